"""Two ends of a connection in one process: the vocabulary that the device tests share."""

import socket as plain
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest

import aiordma
from tests import connections
from tests.devices import ADDRESS, BUILT_IN, DEVICE, SILENT
from tests.internals import reactor

REMOTE = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE

ROCE_PORT = 4791

OWN_RECEIVES: dict[str, Any] = {"receive_buffers": 0}
"""For the end that posts its receives itself, and so decides when its peer's messages arrive."""

one_loop = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio")]
)
"""For what is decided before anything reaches a loop: the checks of arguments."""


@asynccontextmanager
async def connected(
    *, server: dict[str, Any] | None = None, client: dict[str, Any] | None = None
) -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Yield (client, server), connected on the device under test."""
    async with connections.connected(ADDRESS, server=server, client=client) as ends:
        yield ends


@asynccontextmanager
async def members(
    count: int, shared: aiordma.SharedReceiveQueue | int, says: bytes = b"", **options: Any
) -> AsyncIterator[tuple[list[aiordma.Connection], list[aiordma.Connection]]]:
    """Yield (clients, servers), connected in pairs; the servers take from the shared queue. The
    clients say `says`."""
    clients: list[aiordma.Connection] = []
    servers: list[aiordma.Connection] = []
    async with await aiordma.listen(ADDRESS, 0, shared_receive=shared, **options) as listener:
        for number in range(count):
            async with anyio.create_task_group() as group:

                async def connect() -> None:
                    client = await aiordma.connect(ADDRESS, listener.port, private_data=says)
                    clients.append(client)

                group.start_soon(connect)
                servers.append(await listener.accept())
            await clients[number].send(b"first")  # the connecting side sends first
    try:
        yield clients, servers
    finally:
        for connection in clients + servers:
            await connection.aclose()


@contextmanager
def silent_taker() -> Iterator[tuple[str, int]]:
    """Where questions are taken and never answered. Where the address is this machine's own, its
    kernel would reject them: a plain socket takes them. A socket that is bound to this address gets
    them at RoCE's port, too."""
    with plain.socket(plain.AF_INET, plain.SOCK_DGRAM) as taker:
        if DEVICE == "software_roce":
            taker.setsockopt(plain.SOL_SOCKET, plain.SO_REUSEPORT, 1)
            taker.bind((SILENT, ROCE_PORT))
            yield SILENT, 4711
        elif BUILT_IN:
            taker.bind((SILENT, 0))
            yield taker.getsockname()
        else:
            yield SILENT, 4711


def reactor_in_use() -> bool:
    """Whether anything of this loop is open: its end would close it."""
    return any(each.closables for each in reactor.current_reactors())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task or the device does; pytest's timeout is the limit."""
    while not condition():
        await anyio.sleep(0.01)


async def both_ways(one: aiordma.Connection, other: aiordma.Connection) -> None:
    """Prove that a connection works, after something was done to it."""
    await one.send(b"still there?")
    assert await other.receive() == b"still there?"
    await other.send(b"yes")
    assert await one.receive() == b"yes"


class Outcome:
    """How a task's wait ended: started in a group, looked at when the group is done."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: Exception | None = None

    async def of(self, function: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.value = await function()
        except Exception as error:
            self.error = error
