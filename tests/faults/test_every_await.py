"""Each await of the public API, cancelled at its first, second, third ... suspension."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_origin

import anyio
import anyio.lowlevel
import pytest
import sniffio

import aiordma
import aiordma.streams
import aiordma.testing
import tests.faults.stream_awaits  # noqa: F401  (fills the tables)
from aiordma.testing import Faults
from tests.device.players import one_loop
from tests.devices import DEVICE, provider_under_test
from tests.faults.awaits import ASYNCIO, PARAMETERS, SCENARIOS, Scenario, at_rest
from tests.faults.suspensions import MODES, Cut
from tests.internals import SOFTWARE

pytestmark = pytest.mark.slow

MOST = 200
"""More suspensions than any scenario has."""
TRIES = 10 if DEVICE == SOFTWARE else 3
WAITED = 2
"""Seconds for one cancellation of a broken function: its scenario may wait without end."""
AWAITED = ("__aenter__", "__aexit__", "__anext__", "__await__")
WITHOUT_WAIT = {
    "Connection.__aenter__",
    "Session.__aenter__",
}
"""They return the object, and wait for nothing."""
FORWARDS = {
    "Opening.__await__",
    "StreamEventLoop.create_connection",
    "StreamEventLoop.create_server",
    "StreamEventLoop.sendfile",
    "StreamEventLoop.sock_connect",
    "StreamEventLoop.sock_recv",
    "StreamEventLoop.sock_recv_into",
    "StreamEventLoop.sock_sendall",
    "StreamEventLoop.sock_sendfile",
}
"""They only await one function after the other: those of aiordma.streams, or asyncio's own."""
ELSEWHERE = {"simulated_network"}
"""tests/simulation/test_other_loop.py cancels what runs on another simulation's loop only."""
ON_KERNELS_DEVICES = {
    "BlockTransfer.__await__",
    "connect",
    "Connection.aclose",
    "Connection.grant",
    "Connection.read",
    "Connection.receive",
    "Connection.write",
    "Listener.accept",
    "Stream.receive",
}
"""The scenarios for the virtual machine, where one takes seconds: one of each kind."""
MODES_HERE = MODES if DEVICE == SOFTWARE else MODES[1:]
NEVER_CANCELLED = {"Connection.send_eof"} if DEVICE == SOFTWARE else {"Connection.write"}
"""Their awaits need not suspend: `send_eof` is refused; rxe and siw complete a WRITE at once."""
PACKAGES: dict[Any, str] = {
    aiordma: "",
    aiordma.types: "",
    aiordma.verbs: "",
    aiordma.streams: "",
    aiordma.testing: "",
}
"""The public packages, and how the names of their awaits begin here."""
if DEVICE == SOFTWARE:  # in the virtual machine, the imports take longer than all tests here
    from tests.faults import integration_awaits

    PACKAGES |= integration_awaits.PACKAGES
OWN_LOOP = ("asyncio", {"loop_factory": aiordma.streams.new_event_loop})
"""The event loop of streams, which is the polling loop and more."""


def _is_awaited(function: Any) -> bool:
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return True
    if inspect.isasyncgenfunction(inspect.unwrap(function)):  # of an async context manager
        return True
    returned = getattr(function, "__annotations__", {}).get("return")
    return get_origin(returned) is aiordma.types.Opening or "AsyncContextManager" in str(returned)


def _public() -> Iterator[tuple[str, str, Any]]:
    for package, prefix in PACKAGES.items():
        for name in package.__all__:
            yield prefix, name, getattr(package, name)


def _public_awaits() -> Iterator[str]:
    public = [thing for _, _, thing in _public()]
    for prefix, name, thing in _public():
        if not inspect.isclass(thing):
            if callable(thing) and _is_awaited(thing):
                yield prefix + name
            continue
        for member in dir(thing):
            if member.startswith("_") and member not in AWAITED:
                continue
            function = getattr(thing, member)
            module = getattr(function, "__module__", None) or thing.__module__
            if member == "__await__" or (callable(function) and _is_awaited(function)):
                if not module.startswith("aiordma"):
                    continue  # of anyio's base classes: they call the others
                # Of the first public class that has it.
                first = [each for each in thing.__mro__ if each in public and hasattr(each, member)]
                yield f"{prefix}{first[-1].__name__}.{member}"


@pytest.mark.promise(
    "Cancellation loses no message and leaves nothing open",
    "Each await can be cancelled at each suspension",
)
@pytest.mark.natively
def test_every_public_await_has_a_scenario() -> None:
    assert set(_public_awaits()) - WITHOUT_WAIT - FORWARDS - ELSEWHERE == set(SCENARIOS)
    assert {each.id for each in PARAMETERS} >= ON_KERNELS_DEVICES


@pytest.mark.promise(
    "Cancellation loses no message and leaves nothing open",
    "Each await can be cancelled at each suspension",
)
@pytest.mark.anyio
@pytest.mark.parametrize(
    "scenario",
    [each for each in PARAMETERS if DEVICE == SOFTWARE or each.id in ON_KERNELS_DEVICES],
)
async def test_cancelled_at_each_suspension(scenario: Scenario) -> None:
    await _cancel_at_each(scenario)


@pytest.mark.promise("Each await can be cancelled at each suspension")
@pytest.mark.anyio
@pytest.mark.natively
@one_loop
@pytest.mark.parametrize("scenario", ASYNCIO)
async def test_cancelled_at_each_suspension_on_asyncio(scenario: Scenario) -> None:
    await _cancel_at_each(scenario)


@pytest.mark.promise("Each await can be cancelled at each suspension")
@pytest.mark.anyio
@pytest.mark.natively
@pytest.mark.parametrize("anyio_backend", [pytest.param(OWN_LOOP, id="streams")])
@pytest.mark.parametrize("scenario", [*PARAMETERS, *ASYNCIO])
async def test_cancelled_at_each_suspension_on_the_own_loop(scenario: Scenario) -> None:
    await _cancel_at_each(scenario)


@pytest.fixture(autouse=True)
def blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Natively, too, calls of the driver run in workers, for which a task waits."""
    monkeypatch.setattr(provider_under_test(), "blocks", True)


async def _cancel_at_each(scenario: Scenario, limit: float | None = None) -> None:
    on_asyncio = sniffio.current_async_library() == "asyncio"
    with _slow_completions():
        for mode in MODES_HERE if on_asyncio else MODES[:1]:
            for at in range(1, MOST):
                # On a busy machine a completion can be there before its task waits for it.
                for _ in range(TRIES if at == 1 else 1):
                    cut = Cut(at, mode)
                    with anyio.fail_after(limit):
                        await scenario(cut)
                        await at_rest()
                    if cut.reached:
                        break
                if not cut.reached:
                    break
            assert at < MOST - 1, "the scenario has no end"
            if not any(scenario is SCENARIOS[name] for name in NEVER_CANCELLED):
                assert at > 1, "nothing was cancelled"


# -- the test itself ------------------------------------------------------------------------------


def _waits_with_its_result(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, kept: list[Any]
) -> None:
    """Let a coroutine function suspend once more when it has its result, which a cancellation there
    loses. What it opened stays open."""
    function = getattr(owner, name)

    async def broken(*arguments: Any, **keywords: Any) -> Any:
        result = await function(*arguments, **keywords)
        kept.append(result)
        await anyio.lowlevel.checkpoint()
        kept.remove(result)
        return result

    monkeypatch.setattr(owner, name, broken)


def _waits_before(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, kept: list[Any]) -> None:
    """Let a coroutine function suspend once before it does anything, so that a cancellation there
    leaves everything undone."""
    function = getattr(owner, name)

    async def broken(self: Any) -> None:
        kept.append(self)
        await anyio.lowlevel.checkpoint()
        kept.remove(self)
        await function(self)

    monkeypatch.setattr(owner, name, broken)


LOSES = _waits_with_its_result
BROKEN: dict[str, tuple[Any, Any, type[Exception]]] = {
    "Connection.receive": (LOSES, aiordma.Connection, AssertionError),  # a message
    "Stream.receive": (LOSES, aiordma.streams.Stream, TimeoutError),  # bytes, which are waited for
    "Listener.accept": (LOSES, aiordma.Listener, TimeoutError),  # a peer
    "Connection.register_in_thread": (LOSES, aiordma.Connection, BufferError),  # memory
    "Domain.register_in_thread": (LOSES, aiordma.Domain, BufferError),
    "prepare_connection": (LOSES, aiordma, TimeoutError),  # a connection, which stays open
    "listen_stream": (LOSES, aiordma.streams, TimeoutError),
    "Connection.aclose": (_waits_before, aiordma.Connection, TimeoutError),
    "Grant.aclose": (_waits_before, aiordma.types.Grant, AssertionError),
}
"""Functions, how they are broken, and the error by which their scenarios show it."""


@pytest.mark.promise("Each await can be cancelled at each suspension")
@pytest.mark.anyio
@pytest.mark.natively
@one_loop
@pytest.mark.parametrize("name", BROKEN)
async def test_harness_finds_a_broken_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking, owner, expected = BROKEN[name]
    kept: list[Any] = []
    breaking(owner, name.rpartition(".")[2], monkeypatch, kept)
    found: BaseException | None = None
    try:
        await _cancel_at_each(SCENARIOS[name], WAITED)
    except Exception as error:
        found = error
    monkeypatch.undo()
    for each in kept:
        if hasattr(each, "aclose"):
            await each.aclose()
        elif isinstance(each, aiordma.MemoryRegion):
            each.close()
    while isinstance(found, BaseExceptionGroup):
        (found,) = found.exceptions
    assert type(found) is expected


@contextmanager
def _slow_completions() -> Iterator[None]:
    """Let no request complete before its task waits for it, on the device that can."""
    if DEVICE != SOFTWARE:
        yield
        return
    with Faults() as faults:
        faults.delay_completions(0.005)
        yield
