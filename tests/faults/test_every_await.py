"""Each await of the public API, cancelled at its first, second, third ... suspension."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_origin

import pytest
import sniffio

import aiordma
import aiordma.streams
import aiordma.testing
import tests.faults.stream_awaits  # noqa: F401  (fills the tables)
from aiordma._base.provider import SOFTWARE
from aiordma.testing import Faults
from tests.device.players import one_loop
from tests.devices import DEVICE
from tests.faults.awaits import ASYNCIO, PARAMETERS, SCENARIOS, Scenario, at_rest
from tests.faults.suspensions import MODES, Cut

MOST = 200
"""More suspensions than any scenario has."""
TRIES = 10
AWAITED = ("__aenter__", "__aexit__", "__anext__", "__await__")
WITHOUT_WAIT = {
    "Connection.__aenter__",
    "Domain.__aenter__",
    "Grant.__aenter__",
    "Session.__aenter__",
    "SharedReceiveQueue.__aenter__",
    "StreamListener.__aenter__",
}
"""They return the object, and wait for nothing."""
FORWARDS = {
    "StreamEventLoop.create_connection",
    "StreamEventLoop.create_server",
    "StreamEventLoop.sock_connect",
    "StreamEventLoop.sock_recv",
    "StreamEventLoop.sock_recv_into",
    "StreamEventLoop.sock_sendall",
    "StreamEventLoop.sock_sendfile",
}
"""They only await one function after the other: those of aiordma.streams, or asyncio's own."""
PACKAGES: tuple[Any, ...] = (aiordma, aiordma.streams, aiordma.testing)


def _is_awaited(function: Any) -> bool:
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return True
    if inspect.isasyncgenfunction(inspect.unwrap(function)):  # of an async context manager
        return True
    returned = getattr(function, "__annotations__", {}).get("return")
    return get_origin(returned) is aiordma.Opening or "AsyncContextManager" in str(returned)


def _public() -> Iterator[tuple[str, Any]]:
    for package in PACKAGES:
        for name in package.__all__:
            yield name, getattr(package, name)


def _public_awaits() -> Iterator[str]:
    for name, thing in _public():
        if not inspect.isclass(thing):
            if callable(thing) and _is_awaited(thing):
                yield name
            continue
        for member in dir(thing):
            if member.startswith("_") and member not in AWAITED:
                continue
            function = getattr(thing, member)
            module = getattr(function, "__module__", None) or thing.__module__
            if member == "__await__" or (callable(function) and _is_awaited(function)):
                if not module.startswith("aiordma"):
                    continue  # of anyio's base classes: they call the others
                # Where it is defined; a class of the engine has no qualified names.
                defined = next(each for each in thing.__mro__ if member in vars(each))
                yield f"{defined.__name__}.{member}"


def test_every_public_await_has_a_scenario() -> None:
    assert set(_public_awaits()) - WITHOUT_WAIT - FORWARDS == set(SCENARIOS)


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", PARAMETERS)
async def test_cancelled_at_each_suspension(scenario: Scenario) -> None:
    await _cancel_at_each(scenario)


@pytest.mark.anyio
@one_loop
@pytest.mark.parametrize("scenario", ASYNCIO)
async def test_cancelled_at_each_suspension_on_asyncio(scenario: Scenario) -> None:
    await _cancel_at_each(scenario)


async def _cancel_at_each(scenario: Scenario) -> None:
    on_asyncio = sniffio.current_async_library() == "asyncio"
    with _slow_completions():
        for mode in MODES if on_asyncio else MODES[:1]:
            for at in range(1, MOST):
                # On a busy machine a completion can be there before its task waits for it.
                for _ in range(TRIES if at == 1 else 1):
                    cut = Cut(at, mode)
                    await scenario(cut)
                    await at_rest()
                    if cut.reached:
                        break
                if not cut.reached:
                    break
            assert at < MOST - 1, "the scenario has no end"
            if DEVICE == SOFTWARE and scenario is not SCENARIOS["Connection.send_eof"]:
                assert at > 1, "nothing was cancelled"


@contextmanager
def _slow_completions() -> Iterator[None]:
    """Let no request complete before its task waits for it, on the device that can."""
    if DEVICE != SOFTWARE:
        yield
        return
    with Faults() as faults:
        faults.delay_completions(0.005)
        yield
