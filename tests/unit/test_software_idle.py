"""What an idle connection of the software device costs: memory, and descriptors."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from aiordma import Connection, connect
from tests.bench.connections import descriptors, process_kib
from tests.bench.default_server import serving

COUNT = 200
FIRST = 20
"""Connections that are made before the measurement: with them come the threads and the queues."""
MOST_KIB = 64.0
OTHER_DESCRIPTORS = 10
"""Of the connection manager's events, of the completion channel and of the engine (an epoll and an
eventfd each), of asynchronous events, of the kernel's news about addresses, of the sockets that are
lent (an epoll of the streams, one of the handshakes)."""


@asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Connection]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(await connect("127.0.0.1", port, device="software"))
            for _ in range(count)
        ]


@pytest.mark.anyio
async def test_idle_connection_costs_little_memory_and_one_descriptor() -> None:
    with serving("127.0.0.1", "software", 0.0) as server:
        before = descriptors(os.getpid())
        server_before = descriptors(server.pid)
        async with connected(server.rdma, FIRST) as connections:
            await exchange(connections)
            kib = process_kib(server.pid)
            async with connected(server.rdma, COUNT) as more:
                await exchange(more[-1:])  # the server has accepted all of them
                each = (process_kib(server.pid) - kib) / COUNT
                opened = descriptors(os.getpid()) - before
                server_opened = descriptors(server.pid) - server_before
    assert each <= MOST_KIB
    assert opened <= FIRST + COUNT + OTHER_DESCRIPTORS
    assert server_opened <= FIRST + COUNT + OTHER_DESCRIPTORS


async def exchange(connections: list[Connection]) -> None:
    for connection in connections:
        await connection.send(b"message")
        with anyio.fail_after(30):
            assert await connection.receive() == b"message"
