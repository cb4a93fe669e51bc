"""A folder imports only from those above it in one list; no module imports itself by a detour; one
folder opens the door to C, one to the event loops; importing does nothing. The files of the C
folders have an order, too."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.sources import (
    C_FOLDERS,
    EXPORTED,
    NATIVE,
    PACKAGE,
    ROOT,
    c_files,
    declared,
    defined,
    imported,
    included,
    modules,
    used,
)

# From low to high; docs/design.md says what is in each. "" is the package's own __init__: what
# follows uses its public names only.
FOLDERS = (
    "_native",
    "_base",
    "_loop",
    "verbs",
    "_requests",
    "_runtime",
    "_endpoint",
    "_connection",
    "_datagram",
    "streams",
    "testing",
    "integrations",
    "types",
    "",
    "bench",
    "cli",
    "__main__",
)

BINDINGS = {f"{PACKAGE}._native._binding", f"{PACKAGE}._native._engine"}
EVENT_LOOPS = {"asyncio", "trio", "uvloop", "sniffio"}


def _folder(module: str) -> str:
    return [*module.split("."), ""][1]


def _ours(tree: ast.Module) -> set[str]:
    return {each for each in imported(tree) if each.split(".")[0] == PACKAGE} - BINDINGS


def test_every_module_is_in_a_folder_of_the_list() -> None:
    assert {_folder(name) for name in modules()} == set(FOLDERS)


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_only_from_folders_above_its_own(name: str) -> None:
    place = FOLDERS.index(_folder(name))
    upwards = [each for each in _ours(modules()[name]) if FOLDERS.index(_folder(each)) > place]
    assert sorted(upwards) == []


def test_no_module_imports_itself_by_a_detour() -> None:
    arrows = {name: _ours(tree) - {name} for name, tree in modules().items()}
    assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows)


def test_only_the_native_package_imports_the_binding() -> None:
    users = [name for name, tree in modules().items() if BINDINGS & imported(tree)]
    assert users == [f"{PACKAGE}._native"]


def test_only_the_event_loop_modules_import_an_event_loop() -> None:
    # The benchmark compares with asyncio's own TCP; `polling` is a loop of asyncio's, a stream's
    # transport and server are asyncio's kinds, and so are the classes of Dask's distributed and
    # of valkey-py's client. A simulated host's loop is asyncio's.
    users = [
        name
        for name, tree in modules().items()
        if EVENT_LOOPS & {other.split(".")[0] for other in imported(tree)}
    ]
    assert users == [
        f"{PACKAGE}._loop.event_loop",
        f"{PACKAGE}._loop.polling",
        f"{PACKAGE}._loop.private",
        f"{PACKAGE}.bench.tcp",
        f"{PACKAGE}.integrations.dask.backend",
        f"{PACKAGE}.integrations.dask.channel",
        f"{PACKAGE}.integrations.valkey.channel",
        f"{PACKAGE}.integrations.valkey.opening",
        f"{PACKAGE}.streams.client",
        f"{PACKAGE}.streams.server",
        f"{PACKAGE}.streams.tls",
        f"{PACKAGE}.streams.transport",
        f"{PACKAGE}.testing.guest",
        f"{PACKAGE}.testing.scheduler",
        f"{PACKAGE}.testing.simulated_loop",
        f"{PACKAGE}.testing.simulation",
    ]


def test_trio_is_imported_for_its_types_only() -> None:
    # trio is optional: event_loop takes it from sys.modules, where the program has put it.
    tree = modules()[f"{PACKAGE}._loop.event_loop"]
    outside = ast.Module([node for node in tree.body if not _is_type_checking(node)], [])
    assert "trio" in imported(tree)
    assert "trio" not in imported(outside)


def test_the_benchmark_uses_the_public_interface_only() -> None:
    deeper = {
        other
        for name, tree in modules().items()
        if name.startswith(f"{PACKAGE}.bench")
        for other in imported(tree)
        if other.split(".")[0] == PACKAGE and not other.startswith(f"{PACKAGE}.bench")
    }
    assert deeper == {PACKAGE, *(f"{PACKAGE}.{each}" for each in ("streams", "types", "verbs"))}


@pytest.mark.parametrize("name", modules())
def test_no_import_hides_in_a_function(name: str) -> None:
    hidden = [
        node.lineno
        for function in ast.walk(modules()[name])
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Name | ast.Attribute) and _last(node) in DYNAMIC)
    ]
    assert hidden == []


DYNAMIC = {"__import__", "import_module"}


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_import_by_version(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test).startswith("sys.version_info >= ")
        and all(isinstance(each, ast.ImportFrom) for each in node.body + node.orelse)
    )


def _is_import_with_hint(node: ast.stmt) -> bool:
    """An import whose failure says what to install."""
    return (
        isinstance(node, ast.Try)
        and all(isinstance(each, ast.Import | ast.ImportFrom) for each in node.body)
        and all(
            isinstance(each, ast.Raise) and ast.unparse(each).startswith("raise ImportError(")
            for handler in node.handlers
            for each in handler.body
        )
        and not node.orelse + node.finalbody
    )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


DEFINITIONS = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
)


@pytest.mark.parametrize("name", modules())
def test_a_module_holds_imports_definitions_and_constants_only(name: str) -> None:
    code = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in modules()[name].body
        if not (isinstance(node, DEFINITIONS) or _is_text(node) or _is_type_checking(node))
        and ast.unparse(node) != "_name_after_the_package()"
        and not _is_import_by_version(node)
        and not _is_import_with_hint(node)
        and not ast.unparse(node).startswith("if __name__ == '__main__':")
    ]
    assert code == []


def _owners(folder: str) -> dict[str, str]:
    """The stem of the C file that defines each function and variable."""
    sources = {name: text for name, text in c_files(folder).items() if name.endswith(".c")}
    return {each: Path(name).stem for name, text in sources.items() for each in defined(text)}


@pytest.mark.parametrize("folder", [*C_FOLDERS, EXPORTED])
def test_c_files_have_an_order(folder: str) -> None:
    owners = _owners(folder)
    arrows: dict[str, set[str]] = {}
    for name, text in c_files(folder).items():
        lower = arrows.setdefault(Path(name).stem, set())
        lower |= {owners[each] for each in used(text) & owners.keys()}
        lower |= {Path(header).stem for header in included(text) & c_files(folder).keys()}
        lower.discard(Path(name).stem)
    assert len(owners) > 100
    assert len(list(TopologicalSorter(arrows).static_order())) == len(arrows)


@pytest.mark.parametrize("folder", C_FOLDERS)
def test_each_c_function_is_declared_in_the_header_of_its_file_only(folder: str) -> None:
    # cffi reads those of declarations/, which Python calls.
    texts = {f"declarations/{name}": text for name, text in c_files("declarations").items()}
    texts |= c_files(folder)
    places: dict[str, list[str]] = {each: [] for each in _owners(folder)}
    for name, text in texts.items():
        for each in declared(text) & places.keys():
            places[each].append(name)
    wrong = {
        each: places[each]
        for each, owner in _owners(folder).items()
        if places[each]
        not in (
            [f"{owner}.h"],
            *([f"declarations/{each}.h"] for each in ("software", "faults", "simulation")),
        )
    }
    assert wrong == {}


@pytest.mark.parametrize("folder", ["", *C_FOLDERS, EXPORTED])
def test_c_files_include_headers_of_their_folder_and_the_folders_above_only(folder: str) -> None:
    here = NATIVE / folder
    wrong = [
        (name, header)
        for name, text in c_files(folder).items()
        for header in included(text)
        if (here / header if (here / header).exists() else NATIVE / header).resolve().parent
        not in (here, NATIVE, NATIVE / "declarations")
    ]
    assert wrong == []


def test_no_file_name_stands_in_two_c_folders() -> None:
    names = [name for folder in (*C_FOLDERS, EXPORTED) for name in c_files(folder)]
    assert sorted(names) == sorted(set(names))


# Everything that a program can notice of an import, before and after.
EFFECTS = """
import json, logging, os, signal, sys, threading, warnings
import anyio, anyio.abc, anyio.lowlevel, anyio.to_thread, asyncio, cffi, resource, socket

def is_ours(number):
    # libffi keeps its own file open from when cffi's part in C is imported.
    path = "/proc/self/fd/" + number
    return os.path.lexists(path) and "libffi" not in os.readlink(path)

def look():
    return {
        "environment": dict(os.environ),
        "descriptors": sorted(number for number in os.listdir("/proc/self/fd") if is_ours(number)),
        "threads": threading.active_count(),
        "log handlers": [repr(handler) for handler in logging.root.handlers]
            + [repr(handler) for handler in logging.getLogger("aiordma").handlers],
        "log levels": [logging.root.level, logging.getLogger("aiordma").level],
        "warning filters": len(warnings.filters),
        "signal handlers": [repr(signal.getsignal(number)) for number in signal.valid_signals()],
        "libraries": sorted(
            {line.split()[-1] for line in open("/proc/self/maps") if "libibverbs" in line
             or "librdmacm" in line}
        ),
    }

before = look()
import aiordma
print(json.dumps([before, look()]))
"""


def test_importing_has_no_effects() -> None:
    run = subprocess.run(
        [sys.executable, "-c", EFFECTS], capture_output=True, text=True, check=True, cwd=ROOT
    )
    before, after = json.loads(run.stdout)
    assert after == before
    assert after["libraries"] == []
    assert run.stderr == ""


# -- the tests' door to private parts -------------------------------------------------------------

WITH_PRIVATE_PARTS = ("unit", "fuzz")
"""Folders of tests of single modules, and of the engine beside its model."""


def _is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def _private_modules(tree: ast.Module) -> set[str]:
    """The modules whose private names, or which, a test imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if _is_private(each.name)}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for full in (f"{node.module}.{each.name}" for each in node.names):
                if _is_private(full):
                    found.add(full if full in {*modules(), *BINDINGS} else node.module)
    return {each for each in found if each.split(".")[0] == PACKAGE}


def _users_of_private_modules() -> dict[str, list[Path]]:
    users: dict[str, list[Path]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for module in _private_modules(ast.parse(path.read_text())):
            users.setdefault(module, []).append(path.relative_to(ROOT / "tests"))
    return users


def test_behaviour_is_tested_through_one_module_for_private_parts() -> None:
    users = {path for paths in _users_of_private_modules().values() for path in paths}
    others = {str(path) for path in users if path.parts[0] not in WITH_PRIVATE_PARTS}
    assert others == {"internals.py"}


def test_private_modules_are_imported_by_their_own_test_only() -> None:
    several = {
        module: sorted(map(str, tests))
        for module, paths in _users_of_private_modules().items()
        if len(tests := [path for path in paths if path.name != "internals.py"]) > 1
    }
    assert several == {}, "the others take it from tests/internals.py"
