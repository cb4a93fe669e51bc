"""A module imports only from layers above it in one list, so that there are no cycles; one module
opens the door to C, one to the event loops; importing does nothing."""

import ast
import json
import subprocess
import sys

import pytest

from tests.unit.sources import BUILD, PACKAGE, ROOT, imported, modules

# From low to high: a module imports only from those listed before it. The layout in docs/design.md
# is this list in words. A new module goes where its imports allow.
ORDER = (
    "_native",
    "enums",
    "device_enums",
    "hints",
    "errors",
    "process",
    "states",
    "ranges",
    "socket_address",
    "options",
    "inflight",
    "counted",
    "provider",
    "verbs.resource",
    "verbs.async_event",
    "verbs.attributes",
    "verbs.device",
    "verbs.memory",
    "verbs.completion",
    "verbs.address",
    "verbs.memory_window",
    "verbs.send_work",
    "verbs.shared_receive",
    "verbs.queue_pair",
    "verbs",
    "connection_parameters",
    "event_channel",
    "rdmacm",
    "unmanaged",
    "pool",
    "polling",
    "event_loop",
    "request",
    "drain",
    "threads",
    "credits",
    "async_events",
    "hub",
    "reactor",
    "queue_state",
    "work_queues",
    "endpoint",
    "capabilities",
    "staging",
    "arrivals",
    "messages",
    "windows",
    "opcodes",
    "registration",
    "request_posting",
    "window_posting",
    "posting",
    "chain",
    "operations",
    "connection",
    "shared_settings",
    "shared_life",
    "shared_receive",
    "address_lookup",
    "device_choice",
    "connector",
    "shared_source",
    "connection_request",
    "listener",
    "grh",
    "local_gid",
    "address_handles",
    "event_waiter",
    "datagram_peer",
    "datagram_message",
    "datagram_queue",
    "resolution",
    "multicast",
    "datagram_endpoint",
    "datagram_posting",
    "datagram",
    "queue_pairs",
    "testing.leaks",
    "testing.faults",
    "testing",
)
# On top of the package, by its public interface.
TOP = (
    "bench.statistics",
    "bench.workload",
    "bench.meter",
    "bench.timing",
    "bench.loops",
    "bench.tcp",
    "bench.server",
    "bench.client",
    "bench",
    "bench.processes",
    "bench.table",
    "bench.commands",
    "command",
)
LAYERS = [
    *(f"{PACKAGE}.{name}" for name in ORDER),
    PACKAGE,
    *(f"{PACKAGE}.{name}" for name in TOP),
]

BINDINGS = {f"{PACKAGE}._native._binding", f"{PACKAGE}._native._engine"}
EVENT_LOOPS = {"asyncio", "trio", "uvloop", "sniffio"}


def test_every_module_has_a_layer() -> None:
    assert set(modules()) - {BUILD} == set(LAYERS)


@pytest.mark.parametrize("name", [name for name in modules() if name != BUILD])
def test_a_module_imports_only_from_layers_above_it(name: str) -> None:
    below = {
        other
        for other in imported(modules()[name])
        if other.split(".")[0] == PACKAGE and other not in BINDINGS
    }
    place = LAYERS.index(name)
    assert [other for other in sorted(below) if LAYERS.index(other) >= place] == []


def test_only_the_native_package_imports_the_binding() -> None:
    users = [name for name, tree in modules().items() if BINDINGS & imported(tree)]
    assert users == [f"{PACKAGE}._native"]


def test_only_the_event_loop_modules_import_an_event_loop() -> None:
    # The benchmark compares with asyncio's own TCP; `polling` is a loop of asyncio's.
    users = [
        name
        for name, tree in modules().items()
        if EVENT_LOOPS & {other.split(".")[0] for other in imported(tree)}
    ]
    assert users == [
        f"{PACKAGE}.bench.tcp",
        f"{PACKAGE}.event_loop",
        f"{PACKAGE}.polling",
    ]


def test_trio_is_imported_for_its_types_only() -> None:
    # trio is optional: event_loop takes it from sys.modules, where whoever runs it has put it.
    tree = modules()[f"{PACKAGE}.event_loop"]
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
    assert deeper == {PACKAGE}


def test_nothing_imports_the_build_script() -> None:
    assert [name for name, tree in modules().items() if BUILD in imported(tree)] == []


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


@pytest.mark.parametrize("name", [name for name in modules() if name != BUILD])
def test_a_module_holds_imports_definitions_and_constants_only(name: str) -> None:
    code = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in modules()[name].body
        if not (isinstance(node, DEFINITIONS) or _is_text(node) or _is_type_checking(node))
    ]
    assert code == []


# Everything that a program can notice of an import, before and after.
EFFECTS = """
import json, logging, os, signal, sys, threading, warnings
import anyio, anyio.abc, anyio.lowlevel, anyio.to_thread, asyncio, cffi, resource, socket

def look():
    return {
        "environment": dict(os.environ),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
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
