"""What the package shows: its names, their explanations, and that it needs no library to be
imported."""

import ast
import dataclasses
import glob
import importlib
import inspect
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import aiordma
from aiordma import ConnectionOptions, streams, types, verbs
from aiordma.types import ConnectionKeywords
from tests.unit.sources import PACKAGE, ROOT, modules

NAMES = list(modules())
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")

# -- names ----------------------------------------------------------------------------------------


def _is_private(name: str) -> bool:
    """Whether a module is in a folder that only the package imports (the command, too): there an
    underscore says what is a module's own, and mypy finds names that are taken from where they are
    only imported."""
    folder = name.split(".")[1] if "." in name else name
    return folder == "cli" or (folder.startswith("_") and folder not in ("__main__", "_native"))


@pytest.mark.parametrize("name", NAMES)
def test_all_is_a_sorted_tuple_of_names_that_exist(name: str) -> None:
    module = importlib.import_module(name)
    if _is_private(name):
        assert not hasattr(module, "__all__")
        return
    exported = module.__all__
    assert type(exported) is tuple
    # ruff's order: constants, classes, everything else.
    assert list(exported) == sorted(set(exported), key=lambda each: (_rank(each), each))
    assert [each for each in exported if not hasattr(module, each)] == []


def _rank(name: str) -> int:
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


@pytest.mark.parametrize("name", NAMES)
def test_a_module_takes_only_what_another_exports(name: str) -> None:
    hidden = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(modules()[name])
        if isinstance(node, ast.ImportFrom) and node.module in NAMES
        for alias in node.names
        if f"{node.module}.{alias.name}" not in NAMES and not _exports(node.module, alias.name)
    ]
    assert hidden == []


def _exports(module: str, name: str) -> bool:
    exported: tuple[str, ...] | None = getattr(importlib.import_module(module), "__all__", None)
    return not name.startswith("_") if exported is None else name in exported


def test_public_names_are_said_to_be_the_packages() -> None:
    elsewhere = {
        name: module
        for name in aiordma.__all__
        if isinstance(each := getattr(aiordma, name), type) or inspect.isfunction(each)
        if (module := each.__module__) != PACKAGE
    }
    assert elsewhere == {"EndOfStream": "anyio"}
    for home in (verbs, types):
        named = [getattr(home, name) for name in home.__all__]
        assert {each.__module__ for each in named if isinstance(each, type)} == {home.__name__}


def test_public_names_have_one_home() -> None:
    names = [*aiordma.__all__, *verbs.__all__, *types.__all__]
    assert [name for name in names if names.count(name) > 1] == []
    assert len(aiordma.__all__) <= 60
    assert len(verbs.__all__) <= 60


def test_the_package_exports_exactly_what_it_imports() -> None:
    imported = {
        alias.asname or alias.name
        for node in modules()[PACKAGE].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {*aiordma.__all__, "types", "verbs"}


def test_every_error_can_be_caught_by_its_public_name() -> None:
    def every(root: type[Exception]) -> set[type[Exception]]:
        return {root}.union(*(every(child) for child in root.__subclasses__()))

    for integration in ("valkey", "dask"):
        importlib.import_module(f"{PACKAGE}.integrations.{integration}")
    hidden = [
        error
        for error in every(aiordma.RdmaError)
        if error.__name__ not in importlib.import_module(_public_home(error)).__all__
    ]
    assert hidden == []


def _public_home(error: type[Exception]) -> str:
    """The package that exports it: aiordma, one of its parts, or one of the integrations."""
    if error is streams.StreamProtocolError:
        return streams.__name__
    names = error.__module__.split(".")
    return ".".join(names[: 3 if names[1:2] == ["integrations"] else 2])


def test_keywords_are_some_of_the_options() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(ConnectionOptions)}
    keywords = typing.get_type_hints(ConnectionKeywords)
    assert keywords.items() <= fields.items()
    assert ConnectionKeywords.__required_keys__ == frozenset()


@pytest.mark.parametrize("function", [aiordma.connect, aiordma.listen])
def test_connecting_and_listening_take_the_options_and_explain_the_rest(
    function: typing.Callable[..., object],
) -> None:
    signature = inspect.signature(function)
    assert signature.parameters["keywords"].annotation == typing.Unpack[ConnectionKeywords]
    names = {*signature.parameters, *ConnectionKeywords.__annotations__} - {"keywords"}
    assert len(names) <= 15
    for name in names:
        assert re.search(rf"\n    (\w+, )*{name}(,[\w, \n]+)?: ", inspect.getdoc(function) or ""), (
            name
        )


# -- the compiled binding -------------------------------------------------------------------------


def _binding() -> str:
    path = importlib.import_module(f"{PACKAGE}._native._binding").__file__
    assert path is not None
    assert path.endswith(".so")
    return path


def test_the_binding_has_no_undefined_rdma_symbol() -> None:
    # A provider's table has them all: what C calls by name is inline in the headers.
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", _binding()],
        capture_output=True,
        text=True,
        check=True,
    )
    undefined = [line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()]
    assert "dlopen" in undefined  # or this looks at nothing
    assert [name for name in undefined if name.startswith(("ibv_", "rdma_", "rs_"))] == []


def test_the_binding_is_not_linked_with_the_libraries() -> None:
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", _binding()], capture_output=True, text=True, check=True
    ).stdout
    assert "NEEDED" in dynamic
    assert "libibverbs" not in dynamic
    assert "librdmacm" not in dynamic


def test_threads_need_no_memory_for_the_engines_variables() -> None:
    # glibc ends the process if it has none for a thread's first use of dynamic variables.
    path = str(Path(_binding()).parent / "_engine.*.so")
    listed = subprocess.run(
        ["readelf", "--relocs", "--wide", *glob.glob(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "TPOFF64" in listed or "TLS_TPREL64" in listed
    assert "DTPMOD" not in listed
    assert "TLSDESC" not in listed


# -- without the libraries ------------------------------------------------------------------------

USE = """
import anyio, aiordma

async def connect():
    await aiordma.connect("192.0.2.1", 7471, device="rxe0")

async def listen():
    await aiordma.listen(device="rxe0")

uses = (
    aiordma.verbs.Device("rxe0").open,
    lambda: anyio.run(connect),
    lambda: anyio.run(listen),
    lambda: anyio.run(connect),
)
for use in uses:
    try:
        use()
    except aiordma.NoDeviceError as error:
        print(error)

async def echo():
    async with await aiordma.listen("127.0.0.1") as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(serve, listener)
            async with await aiordma.connect("127.0.0.1", listener.port) as connection:
                await connection.send(b"hello")
                print(connection.device_name, await connection.receive())

async def serve(listener):
    async with await listener.accept() as connection:
        await connection.send(await connection.receive())

print(aiordma.verbs.Device.names())
anyio.run(echo)
"""


@pytest.mark.parametrize("missing", LIBRARIES)
def test_without_a_library_a_real_device_is_an_error_that_names_the_packages(
    missing: str, tmp_path: Path
) -> None:
    # The loader finds this one first, and it is no library: for the program there is none.
    (tmp_path / missing).touch()
    run = subprocess.run(
        [sys.executable, "-c", USE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[4:] == ["['software', 'software_roce']", "software b'hello'"]
    for line in lines[:4]:
        assert missing in line
        assert "apt-get install libibverbs1 librdmacm1 ibverbs-providers" in line
        assert "dnf install libibverbs librdmacm" in line
