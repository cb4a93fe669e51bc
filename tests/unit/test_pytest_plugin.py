"""The pytest plugin, as a project that has installed aiordma gets it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import aiordma
from aiordma.testing import connected_pair, fabric, plugin, serving_listener
from tests.plugin_project import ALL_FIXTURES, run

pytestmark = pytest.mark.slow

LEAK = """
import aiordma, pytest
kept = []

{mark}
@pytest.mark.asyncio
async def test_leak():
    kept.append(await aiordma.listen("127.0.0.1", 0))
"""


@pytest.mark.parametrize(
    ("mark", "passed"), [("@pytest.mark.asyncio", 5), ("@pytest.mark.anyio", 10)]
)
def test_each_fixture_works_with_each_way_to_run_tests(
    mark: str, passed: int, tmp_path: Path
) -> None:
    # anyio's plugin runs each test twice: on asyncio and on trio.
    said = run(tmp_path, ALL_FIXTURES.format(marks=mark))
    assert f"{passed} passed" in said, said
    assert "failed" not in said


HYPOTHESIS = """
import aiordma, pytest
from hypothesis import Phase, given, settings, strategies
kept = []

@pytest.mark.parametrize("leaks", [False, True])
@{mark}
@settings(max_examples=3, deadline=None, database=None, phases=[Phase.generate])
@given(number=strategies.integers())
async def test_leak(leaks, number):
    listener = await aiordma.listen("127.0.0.1", 0)
    if leaks:
        kept.append(listener)
    else:
        await listener.aclose()
"""


@pytest.mark.parametrize("mark", ["pytest.mark.asyncio", "pytest.mark.anyio"])
def test_a_leak_of_a_test_of_hypothesis_fails_it(mark: str, tmp_path: Path) -> None:
    said = run(tmp_path, HYPOTHESIS.format(mark=mark), "-W", "ignore")
    assert "the test has left open: 1 connections or listeners" in said, said
    assert "passed" in said
    assert "failed" in said


def test_a_leak_fails_the_test_and_says_what_was_left(tmp_path: Path) -> None:
    said = run(tmp_path, LEAK.format(mark=""), "-W", "ignore")
    assert "the test has left open: 1 connections or listeners, <Listener on " in said, said
    assert f", opened at {tmp_path / 'test_it.py'}:8" in said
    assert "1 failed" in said


DROPPED = """
import aiordma, aiordma.testing, gc, pytest
kept = []

async def dropped(port, in_a_cycle):
    connection = await aiordma.connect("127.0.0.1", port)
    cycle = [connection]
    if in_a_cycle:
        cycle.append(cycle)

async def stay(connection):
    await connection.ended()

@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.asyncio
async def test_drop(in_a_cycle):
    async with aiordma.testing.serving_listener(stay) as listener:
        await dropped(listener.port, in_a_cycle)

@pytest.mark.rdma_leaks("on purpose")
@pytest.mark.asyncio
async def test_drop_on_purpose():
    gc.disable()
    async with aiordma.testing.serving_listener(stay) as listener:
        await dropped(listener.port, True)

@pytest.mark.asyncio
async def test_next():
    gc.enable()
    gc.collect()
"""


def test_a_dropped_connection_fails_the_test_that_opened_it(tmp_path: Path) -> None:
    said = run(tmp_path, DROPPED)
    assert "2 failed, 2 passed" in said, said
    assert "the test has left open: unclosed <Connection " in said
    assert f", opened at {tmp_path / 'test_it.py'}:6" in said


@pytest.mark.parametrize(
    ("mark", "settings"),
    [("@pytest.mark.rdma_leaks('on purpose')", ""), ("", "rdma_leak_check = false")],
)
def test_a_leak_can_be_permitted(mark: str, settings: str, tmp_path: Path) -> None:
    said = run(tmp_path, LEAK.format(mark=mark), "-W", "ignore", settings=settings)
    assert "1 passed" in said, said


DRIVER = """
import contextvars, inspect, pytest, sniffio

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        def drive():
            sniffio.current_async_library_cvar.set({library!r})
            with pytest.raises(StopIteration):
                pyfuncitem.obj().send(None)
        contextvars.copy_context().run(drive)
        return True
"""

DRIVEN = """
from aiordma.verbs.identifier import EventChannel, Identifier
kept = []

async def test_short():
    pass

async def test_leak():
    kept.append(Identifier(EventChannel()))
"""


@pytest.mark.parametrize("library", [None, "curio"])
def test_coroutine_outside_of_asyncio_and_trio_runs_unchecked(
    library: str | None, tmp_path: Path
) -> None:
    """Other plugins run asynchronous tests on loops that neither anyio nor aiordma knows."""
    (tmp_path / "conftest.py").write_text(DRIVER.format(library=library))
    said = run(tmp_path, DRIVEN, "-W", "ignore")
    assert "2 passed" in said, said


ARMED = """
import aiordma, aiordma.testing, pytest, unittest
kept = []

def leave():
    kept.append(aiordma.testing.Faults())
    kept[-1].__enter__().refuse_connection()

{mark}
def test_plain():
    leave()

{mark}
@pytest.mark.asyncio
async def test_coroutine():
    leave()

{mark}
class TestCase(unittest.TestCase):
    def test_method(self):
        leave()

@pytest.mark.asyncio
async def test_next(rdma_pair, rdma_faults):
    fault = rdma_faults.drop_connection(after_bytes=1 << 20)
    async with rdma_pair():
        assert not fault.struck
"""


def test_faults_left_armed_fail_the_test_and_end(tmp_path: Path) -> None:
    said = run(tmp_path, ARMED.format(mark=""), "-W", "ignore")
    assert "3 failed, 1 passed" in said, said
    place = f"{tmp_path / 'test_it.py'}:7"
    assert f"the test has left faults armed: <Faults: 1 armed>, opened at {place}. Use" in said
    assert "`with`" in said


@pytest.mark.parametrize(
    ("mark", "settings"),
    [("@pytest.mark.rdma_leaks('on purpose')", ""), ("", "rdma_leak_check = false")],
)
def test_faults_left_armed_can_be_permitted(mark: str, settings: str, tmp_path: Path) -> None:
    said = run(tmp_path, ARMED.format(mark=mark), "-k", "plain", "-W", "ignore", settings=settings)
    assert "1 passed" in said, said


def test_faults_of_a_wider_fixture_stay_armed(tmp_path: Path) -> None:
    source = """
import aiordma.testing, pytest

@pytest.fixture(scope="module")
def faults():
    with aiordma.testing.Faults() as found:
        yield found

def test_first(faults):
    faults.refuse_call("connect")

def test_second(faults):
    assert len(faults._faults) == 1
"""
    said = run(tmp_path, source)
    assert "2 passed" in said, said


def test_another_device_is_required_by_name(tmp_path: Path) -> None:
    source = ALL_FIXTURES.format(marks="@pytest.mark.asyncio")
    said = run(tmp_path, source, "--rdma=rxe9", "--rdma-address=127.0.0.1", "-rs")
    assert "rxe9 has no fault injection" in said, said
    assert "4 failed, 1 skipped" in said
    assert "rxe9" in said.partition("NoDeviceError")[2]


def test_address_of_an_unknown_device_is_an_error_with_its_name(tmp_path: Path) -> None:
    source = ALL_FIXTURES.format(marks="@pytest.mark.asyncio")
    said = run(tmp_path, source, "--rdma=rxe9", "-k", "pair")
    assert "NoDeviceError" in said, said
    assert "rxe9" in said.partition("NoDeviceError")[2]


class DeviceOfAddresses:
    """Stands for a device: its GID table has these addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def __call__(self, _name: str) -> "DeviceOfAddresses":
        return self

    @contextmanager
    def open(self) -> Iterator["DeviceOfAddresses"]:
        yield self

    def gid_table(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(address=each) for each in self.addresses]


def address_of(device: str, given: str | None = None) -> str:
    config: Any = SimpleNamespace(getoption=lambda _name: given)
    fixture: Any = plugin.rdma_address
    return str(fixture.__wrapped__(config, device))


def test_address_is_the_first_ipv4_address_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "Device", DeviceOfAddresses("fe80::1", "192.0.2.1", "192.0.2.2"))
    assert address_of("rxe0") == "192.0.2.1"
    assert address_of("rxe0", "192.0.2.9") == "192.0.2.9"


def test_device_without_an_ipv4_address_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "Device", DeviceOfAddresses("fe80::1"))
    monkeypatch.setattr(plugin, "_device_at", lambda _address: None)
    with pytest.raises(pytest.fail.Exception) as caught:
        address_of("rxe0")
    assert str(caught.value) == "rxe0 has no IPv4 address: give one with --rdma-address"


@pytest.mark.anyio
async def test_a_fabric_has_at_least_two_endpoints() -> None:
    with pytest.raises(ValueError, match="size=1"):
        async with fabric(1):
            pass


@pytest.mark.anyio
async def test_no_endpoint_is_connected_with_itself() -> None:
    async with fabric(2) as made:
        with pytest.raises(KeyError):
            made[0, 0]
        with pytest.raises(KeyError):
            made.of(2)


@pytest.mark.anyio
async def test_a_pair_that_cannot_connect_raises_the_error_itself() -> None:
    # Not a group of errors, which no caller of `connect` expects.
    with pytest.raises(aiordma.NoDeviceError, match="rxe9"):
        async with connected_pair(device="rxe9"):
            pass


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [AssertionError, pytest.skip.Exception, KeyboardInterrupt])
async def test_error_of_a_test_leaves_a_serving_listener_as_it_is(kind: type[Exception]) -> None:
    # Not in a group of errors: pytest shows an assertion, and skips.
    error = kind("of the test")
    with pytest.raises(kind) as caught:
        async with serving_listener(lambda connection: connection.ended()):
            raise error
    assert caught.value is error


@pytest.mark.anyio
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_error_of_the_accepting_side_of_a_pair_is_raised_as_it_is(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a group of errors; and a cancellation, which can be the reason, goes before it."""
    error = aiordma.RdmaConnectionError("of the accepting side")
    scope = anyio.CancelScope()

    async def accept(_listener: aiordma.Listener) -> None:
        if is_cancelled:
            scope.cancel()
        raise error

    monkeypatch.setattr(aiordma.Listener, "accept", accept)
    raised: list[Exception] = []
    with scope:
        try:
            async with connected_pair():
                raise AssertionError("it was connected")
        except Exception as caught:
            raised.append(caught)
    assert scope.cancelled_caught == is_cancelled
    assert raised == ([] if is_cancelled else [error])


@pytest.mark.anyio
async def test_cancelled_serving_listener_is_cancelled() -> None:
    with anyio.move_on_after(0) as scope:
        async with serving_listener(lambda connection: connection.ended()):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
