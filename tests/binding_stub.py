"""Writes aiordma/_native/_binding.pyi from the compiled binding: `python -m tests.binding_stub`.

tests/unit/test_binding_stub.py compares the two.
"""

import builtins
import re
import subprocess
import sys
from typing import Any

from tests.internals import ffi, lib
from tests.unit.sources import ROOT

NATIVE = ROOT / "aiordma" / "_native"
STUB = NATIVE / "_binding.pyi"

CFFI = '''\
# Written by `python -m tests.binding_stub` from the compiled binding: what Python uses of cffi, and
# the functions and constants of declarations/.

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, final, overload

from typing_extensions import Buffer

@final
class CData:
    """A C value: a pointer, a structure, an array, a number. Its fields are attributes."""

    def __getattr__(self, field: str, /) -> Any: ...
    def __setattr__(self, field: str, value: Any, /) -> None: ...
    def __getitem__(self, index: int | slice, /) -> Any: ...
    def __setitem__(self, index: int | slice, value: Any, /) -> None: ...
    def __add__(self, count: int, /) -> CData: ...
    def __sub__(self, other: int | CData, /) -> Any: ...
    def __call__(self, *arguments: Any) -> Any: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __int__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __hash__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class CType:
    @property
    def cname(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def fields(self) -> list[tuple[str, Any]]: ...
    @property
    def relements(self) -> dict[str, int]: ...
    @property
    def args(self) -> tuple[CType, ...]: ...
    @property
    def result(self) -> CType: ...
    @property
    def item(self) -> CType: ...

@final
class CBuffer:
    """A C value's bytes, not copied."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> bytes: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __setitem__(self, index: int | slice, value: bytes, /) -> None: ...

@final
class FFI:
    NULL: CData
    errno: int
    error: type[Exception]
    def addressof(self, cdata: CData, /, *fields: str | int) -> CData: ...
    def new(self, cdecl: str | CType, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str | CType, value: int | CData) -> CData: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def buffer(self, cdata: CData, size: int = ...) -> CBuffer: ...
    @overload
    def from_buffer(self, python_buffer: Buffer, /) -> CData: ...
    @overload
    def from_buffer(
        self, cdecl: str, python_buffer: Buffer, /, require_writable: bool = ...
    ) -> CData: ...
    def gc(self, cdata: CData, destructor: Callable[[CData], object]) -> CData: ...
    def sizeof(self, cdecl: str | CType | CData) -> int: ...
    def typeof(self, cdecl: str | Callable[..., Any] | CData) -> CType: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...
    @overload
    def callback(self, cdecl: str | CType) -> Callable[[Callable[..., Any]], CData]: ...
    @overload
    def callback(
        self, cdecl: str | CType, python_callable: Callable[..., Any], error: Any = ...
    ) -> CData: ...

'''


def parameter_names(function: str, declarations: str) -> list[str]:
    found = re.search(rf"\b{function}\(([^()]*)\);", declarations)
    assert found, f"no header declares {function}"
    parameters = "" if found[1] == "void" else found[1]
    names = re.findall(r"(\w+)\s*(?:,|$)", parameters)
    return [f"{name}_" if hasattr(builtins, name) else name for name in names]


def type_of(ctype: Any, *, taken: bool) -> str:
    """What Python gives for a C type, and what it gets."""
    if ctype.kind == "pointer":
        # Of bytes the callee gets the address.
        return "CData | bytes" if taken and ctype.item.cname in ("char", "void") else "CData"
    if ctype.kind == "void":
        return "None"
    assert ctype.kind in ("primitive", "enum"), ctype.cname
    return "int"


def stub() -> str:
    """Return what the stub has to be."""
    declarations = "".join(path.read_text() for path in (NATIVE / "declarations").glob("*.h"))
    functions, constants = [], []
    for name in dir(lib):
        value = getattr(lib, name)
        if isinstance(value, int):
            constants.append(f"    {name}: int\n")
            continue
        ctype = ffi.typeof(value)
        names = parameter_names(name, declarations)
        taken = [type_of(each, taken=True) for each in ctype.args]
        listed = [f"{name}: {kind}" for name, kind in zip(names, taken, strict=True)]
        listed = ["self", *listed, "/"] if listed else ["self"]
        result = type_of(ctype.result, taken=False)
        functions.append(f"    def {name}({', '.join(listed)}) -> {result}: ...\n")
    text = [CFFI, "@final\nclass Lib:\n", *functions, *constants, "\nffi: FFI\nlib: Lib\n"]
    command = (sys.executable, "-m", "ruff", "format", f"--stdin-filename={STUB}", "-")
    formatted = subprocess.run(command, input="".join(text).encode(), capture_output=True)
    assert not formatted.returncode, formatted.stderr
    return formatted.stdout.decode()


if __name__ == "__main__":
    STUB.write_text(stub())
