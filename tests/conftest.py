"""What every test run shares: the event loops to cross with, and the count of what ran where.

AIORDMA_TEST_DEVICE names the RDMA device under test (rxe0, siw0, or one of the built-in ones,
software_roce and "software"). AIORDMA_TEST_LOOPS names the event loops, of asyncio, uvloop, trio
(all three are crossed with the tests) and polling, aiordma's own. AIORDMA_TEST_ALL=1 crosses all
tests with them in the virtual machine, too, and runs on siw those that run on rxe only.
AIORDMA_RESULTS names the folder for summary-<device>.json, which tests/vm/summary.py reads.
"""

import functools
import gc
import inspect
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiordma import new_event_loop

# A shell starts what it runs in the background with SIGINT ignored, and so would the programs of
# tests that interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICE = os.environ.get("AIORDMA_TEST_DEVICE", "software")
BUILT_IN = DEVICE in ("software", "software_roce")
EVERYTHING = os.environ.get("AIORDMA_TEST_ALL", "0") not in ("", "0")
RESULTS = os.environ.get("AIORDMA_RESULTS")
KINDS = (
    *("unit", "device", "dask", "valkey", "interop", "faults", "attacks", "simulation", "docs"),
    "soak",
)

BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
    "polling": ("asyncio", {"loop_factory": new_event_loop}),
}
LOOPS = [
    pytest.param(BACKENDS[name], id=name)
    for name in os.environ.get("AIORDMA_TEST_LOOPS", "asyncio,uvloop,trio").split(",")
]


@pytest.fixture(params=LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Every test marked anyio runs on each loop."""
    return request.param


_counts: Counter[tuple[str, str, str]] = Counter()
_skips: Counter[str] = Counter()


def _kind(nodeid: str) -> str:
    parts = Path(nodeid.split("::", 1)[0]).parts
    return next((kind for kind in KINDS if kind in parts), "other")


def _loop(item: pytest.Item) -> str:
    # The id that pytest made from LOOPS, which stands in the brackets of the test's name.
    if "anyio_backend" in getattr(item, "fixturenames", ()):
        ids = item.name.partition("[")[2].rstrip("]").split("-")
        return next((name for name in ids if name in BACKENDS), "-")
    return "asyncio" if item.get_closest_marker("asyncio") else "-"


# A test that waits for ever fails by itself, inside its loop. pytest-timeout comes later: it can
# only end the whole run (trio's loop, for one, is in a state that nothing tears down).
PATIENCE = float(os.environ.get("AIORDMA_PATIENCE", 90))


def _bounded(test: Any) -> Any:
    @functools.wraps(test)
    async def bounded(*arguments: Any, **keywords: Any) -> None:
        with anyio.fail_after(PATIENCE):
            await test(*arguments, **keywords)

    return bounded


def _is_left_out(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if BUILT_IN:
        return False
    if item.get_closest_marker("natively"):
        return True
    if EVERYTHING:
        return False
    is_repeated = _loop(item) in ("uvloop", "trio") or parameters.get("run") in (
        "asyncio",
        "uvloop",
    )
    if DEVICE == "siw0":
        return is_repeated or item.get_closest_marker("one_kernel_device") is not None
    return is_repeated and not item.get_closest_marker("loop_and_device")


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run every test on each loop natively, and in the slow VM on one of them, unless its subject
    is what the loop does with the device, and then on one of the kernel's devices: on asyncio's,
    and what asyncio's transports do (the fixture `run`) on aiordma's own. A test that no device can
    change runs natively only, and one of what lies above the verbs on one of the kernel's devices.
    """
    if out := {item for item in items if _is_left_out(item)}:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


_NATIVELY = re.compile(r"^pytestmark = .*\bpytest\.mark\.natively\b", re.MULTILINE)


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no module in the VM whose tests all run natively: an import takes up to seconds."""
    if BUILT_IN or not collection_path.match("test_*.py"):
        return None
    return bool(_NATIVELY.search(collection_path.read_text())) or None


def _put_slow_first(items: list[pytest.Item]) -> None:
    """Let the processes of pytest-xdist end at about the same time: they take modules in order. The
    unit tests stay last, because the others compare what a process has open before and after."""
    items.sort(key=lambda each: ("unit" in each.path.parts, not each.get_closest_marker("slow")))


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out(config, items)
    if hasattr(config, "workerinput"):
        _put_slow_first(items)
    for item in items:
        item.user_properties.append(("loop", _loop(item)))  # which goes with its reports
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj)


def _keep_what_is_left() -> None:
    """Take out of the garbage collector's way what stays: tests collect garbage, and each time it
    would look through all of that."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # hardly any garbage: only more and more to look through


@pytest.hookimpl
def pytest_collection_finish() -> None:
    _keep_what_is_left()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # pytest keeps something of each test, and some modules read the whole package: at the end of a
    # run without this, a collection took 0.4 s.
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_left()


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = report.outcome
    if report.when != "call" and outcome == "passed":
        return  # set-up and tear-down count only where they fail or skip
    key = (str(dict(report.user_properties).get("loop", "-")), _kind(report.nodeid), outcome)
    _counts[key] += 1
    if outcome == "skipped" and isinstance(report.longrepr, tuple):
        _skips[report.longrepr[2].removeprefix("Skipped: ")] += 1


def _rows() -> list[dict[str, Any]]:
    groups = sorted({(loop, kind) for loop, kind, _ in _counts})
    return [
        {
            "loop": loop,
            "kind": kind,
            **{name: _counts[loop, kind, name] for name in ("passed", "failed", "skipped")},
        }
        for loop, kind in groups
    ]


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"what ran on {DEVICE}")
    for row in _rows():
        terminalreporter.write_line(
            f"{row['kind']:8} {row['loop']:8} {row['passed']:5} passed "
            f"{row['failed']:4} failed {row['skipped']:4} skipped"
        )


@pytest.hookimpl
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")  # pytest-xdist's, which reports to another
    if RESULTS and not session.config.option.collectonly and not is_worker:
        summary = {"device": DEVICE, "rows": _rows(), "skips": dict(_skips)}
        path = Path(RESULTS) / f"summary-{DEVICE}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=1))
