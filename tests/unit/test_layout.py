"""The package's own declarations of rdma-core's types and calls equal those of its headers.

A C program asserts it at compile time: the size and the members of every structure, every constant,
and the type of every function that is called through a pointer.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.internals import RDMA_CORE_VERSIONS, ffi, lib
from tests.unit.sources import ROOT

NATIVE = ROOT / "aiordma" / "_native"
INCLUDES = """
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <linux/types.h>
#define __be64 uint64_t /* the kernel's is another type of the same size */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
"""
GROWS_AT_START = "struct verbs_context"
"""Its new members come first: a device's driver has its members counted from the end."""
GROWS_AT_END = "struct ibv_port_attr"
"""The caller says how large its own is (rdma-core 65 has one member more)."""
SAME = "__builtin_types_compatible_p"


def compile_with_headers(source: str) -> str:
    """The compiler's errors: with rdma-core's headers, and without the package's own."""
    command = ("gcc", "-std=gnu11", "-fsyntax-only", "-Werror", "-x", "c", "-")
    text = INCLUDES + source
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60).stderr


@pytest.fixture(autouse=True)
def _headers() -> None:
    if "No such file" in compile_with_headers(""):
        pytest.skip("needs rdma-core's headers: apt-get install libibverbs-dev librdmacm-dev")


def ours(name: str) -> bool:
    return name.startswith(("ibv_", "rdma_", "verbs_"))


def layout(kind: str, ctype: Any) -> Iterator[str]:
    """Assertions about a structure and its members, also those of nested structures."""

    def members(inner: Any, path: str, offset: int) -> Iterator[str]:
        for name, field in inner.fields:
            if name.startswith("unused"):
                continue
            at, where = offset + field.offset, f"{path}.{name}" if path and name else path or name
            if field.type.kind in ("struct", "union") and "$" in field.type.cname:
                yield from members(field.type, where, at)
            if name:
                if kind == GROWS_AT_START:
                    yield f"sizeof({kind}) - offsetof({kind}, {where}) == {ffi.sizeof(ctype) - at}"
                else:
                    yield f"offsetof({kind}, {where}) == {at}"
                yield f"sizeof((({kind} *)0)->{where}) == {ffi.sizeof(field.type)}"

    grows = kind in (GROWS_AT_START, GROWS_AT_END)
    yield f"sizeof({kind}) {'>=' if grows else '=='} {ffi.sizeof(ctype)}"
    yield from members(ctype, "", 0)


def types() -> dict[str, Any]:
    _, structures, unions = ffi.list_types()
    names = [f"struct {name}" for name in structures if ours(name)]
    names += [f"union {name}" for name in unions if ours(name)]
    return {name: ffi.typeof(name) for name in names if is_complete(name)}


def is_complete(name: str) -> bool:
    try:
        return bool(ffi.sizeof(name))
    except ffi.error:
        return False


def assertions(conditions: list[str]) -> str:
    return "".join(f'_Static_assert({each}, "{each}");\n' for each in conditions)


def test_structures_have_the_layout_of_the_headers() -> None:
    conditions = [line for name, ctype in types().items() for line in layout(name, ctype)]
    assert len(types()) > 45
    assert len(conditions) > 500
    assert "offsetof(struct ibv_send_wr, bind_mw.bind_info) == 96" in conditions
    assert compile_with_headers(assertions(conditions)) == ""


def test_constants_have_the_values_of_the_headers() -> None:
    names = [name for name in dir(lib) if name.startswith(("IBV_", "RDMA_", "RAI_"))]
    assert len(names) > 200
    conditions = [f"{name} == {getattr(lib, name)}" for name in names]
    assert compile_with_headers(assertions(conditions)) == ""


FUNCTION_POINTER = re.compile(r"^    ([\w *]+?)\(\*(\w+)\)(\([^;]*\));", re.MULTILINE)


def test_driver_functions_have_the_types_of_the_headers() -> None:
    text = (NATIVE / "declarations/verbs.h").read_text()
    lines: list[str] = []
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        for result, member, parameters in FUNCTION_POINTER.findall(body):
            pointer = f"ours_{len(lines)}"
            lines.append(
                f"extern {result}(*{pointer}){parameters};\n"
                f"_Static_assert({SAME}(__typeof__({pointer}), "
                f'__typeof__(((struct {name} *)0)->{member})), "{name}.{member}");\n'
            )
    assert len(lines) > 20
    assert compile_with_headers("".join(lines)) == ""


def test_library_functions_have_the_types_of_the_headers() -> None:
    declarations = (NATIVE / "declarations/provider.h").read_text()
    loaded = loaded_symbols()
    slots = {member for _, member, _ in FUNCTION_POINTER.findall(declarations)}
    assert set(loaded) == slots
    lines = [
        f"_Static_assert({SAME}(__typeof__(((struct aiordma_provider *)0)->{slot}), "
        f'__typeof__(&{symbol})), "{symbol}");\n'
        for slot, symbol in loaded.items()
    ]
    assert len(lines) > 60
    assert compile_with_headers(declarations + "".join(lines)) == ""


def loaded_symbols() -> dict[str, str]:
    """Slots of the provider's table, each with the function that rdma_core.c puts into it."""
    return {
        slot: symbol for slot, symbol, _ in LOADED.findall((NATIVE / "rdma_core.c").read_text())
    }


LOADED = re.compile(r'^    LOAD\(\w+, (\w+), "(\w+)", "(\w+\.\d+)"\);', re.MULTILINE)

LINKED = """
int main(void)
{
    void *volatile used[] = {%s};
    return !used[0];
}
"""


def test_library_functions_have_the_version_that_programs_link(tmp_path: Path) -> None:
    loaded = LOADED.findall((NATIVE / "rdma_core.c").read_text())
    source = LINKED % ", ".join(f"(void *){symbol}" for _, symbol, _ in loaded)
    program = tmp_path / "program"
    command = ("gcc", "-x", "c", "-", "-o", program, "-libverbs", "-lrdmacm")
    subprocess.run(command, input=INCLUDES + source, text=True, check=True, timeout=60)
    run = subprocess.run(
        ("readelf", "-W", "--dyn-syms", program), capture_output=True, text=True, check=True
    )
    linked = set(re.findall(r"\b(_?(?:ibv|rdma)_\w+)@(\w+\.\d+)", run.stdout))
    assert len(loaded) > 60
    assert linked == {(symbol, version) for _, symbol, version in loaded}


def test_functions_of_newer_libraries_have_their_rdma_core_version() -> None:
    loaded = LOADED.findall((NATIVE / "rdma_core.c").read_text())
    first = {"IBVERBS_1.0", "IBVERBS_1.1", "RDMACM_1.0"}
    newer = {slot for slot, _, version in loaded if version not in first}
    assert newer == set(RDMA_CORE_VERSIONS)
