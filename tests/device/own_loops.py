"""Event loops of a test's own, what is open on them, and what remains when they are closed."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

import aiordma
from aiordma import new_event_loop
from tests.connections import connect_to
from tests.devices import ADDRESS, DEVICE, kernel_objects
from tests.internals import reactor

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "polling": new_event_loop,
}
try:
    import uvloop
except ImportError:
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop
OWN_LOOPS = pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)


async def open_pair() -> list[Any]:
    """Return what is open: a connection with a receive in flight, its peer, and their listener."""
    listener = await aiordma.listen(ADDRESS, 0, receive_buffers=0)
    client, server = await connect_to(listener, ADDRESS)
    server.post_recv(server.register(bytearray(8)))
    return [client, server, listener]


async def open_others() -> list[Any]:
    """Return a datagram socket that is in a group, and a shared receive queue."""
    socket = await aiordma.open_datagram(ADDRESS)
    shared = await aiordma.open_shared_receive(ADDRESS, buffers=4)
    return [socket, shared]


def objects() -> dict[str, int]:
    """Count the device's objects, but for streams, which the software device closes after them, and
    for what the reactor of a closed loop has open until that loop is collected."""
    for of_loop in list(reactor._loops.values()):
        for each in list(of_loop.reactors.values()):
            if each.loop.has_ended:
                each._close_if_unused()
    return {kind: count for kind, count in kernel_objects(DEVICE).items() if kind != "sockets"}


async def closing_fails(closable: Any, match: str) -> None:
    with pytest.raises(aiordma.EventLoopError, match=match):
        await closable.aclose()


def without_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Collect what is left, and assert that nothing was warned of or logged."""
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []
