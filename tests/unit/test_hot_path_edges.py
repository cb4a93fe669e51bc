"""Where the hot path meets what is rare: a queue that is full, a region that is about to go, other
loops than asyncio's, other integers than Python's."""

import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy
import pytest
from anyio.lowlevel import checkpoint

import aiordma
from aiordma import Access, Connection, MemoryRegion, RemoteMemory
from aiordma.bench import loops
from tests import connections
from tests.bench.instant import instant, prepare
from tests.internals import SPIN, drain_of, endpoint_of

pytestmark = pytest.mark.anyio

DEPTH = 64


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, MemoryRegion, RemoteMemory]]:
    """A client, a region of its own, and the server's memory."""
    prepare()
    keywords: Any = {"device": "software", "options": aiordma.ConnectionOptions(max_send_wr=DEPTH)}
    async with connections.connected("127.0.0.1", server=keywords, client=keywords) as ends:
        client, server = ends
        theirs = server.register(bytearray(64), Access.REMOTE_READ | Access.REMOTE_WRITE)
        await client.write(b"x" * 64, theirs.remote())
        yield client, client.register(bytearray(64)), theirs.remote()


async def test_a_full_queue_is_looked_at_however_seldom_looking_paid() -> None:
    async with connected() as (client, ours, remote):
        for _ in range(100):
            await client.read(ours[:], remote)  # too early to find anything
        with instant(client):
            requests = [client.post_write(ours[:], remote) for _ in range(2 * DEPTH)]
            for request in requests:
                await request


async def test_a_region_that_goes_by_looking_at_a_full_queue_is_not_posted() -> None:
    async with connected() as (client, ours, remote):
        with instant(client):
            part = ours[:]
            requests = [client.post_write(part, remote) for _ in range(DEPTH)]
            ours._retire()
            with pytest.raises(aiordma.ClosedError):
                client.post_write(part, remote)
            for request in requests:
                await request
        await client.write(b"y" * 64, remote)


async def test_awaits_that_never_wait_let_time_pass() -> None:
    async with connected() as (client, ours, remote):
        count = 0

        async def stop() -> None:
            while count <= 256:
                await checkpoint()
            group.cancel_scope.cancel()

        with instant(client), anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(stop)
                while not group.cancel_scope.cancel_called:
                    await client.post_write(ours[:], remote)
                    count += 1
        await client.write(b"y" * 64, remote)


async def test_numbers_of_remote_memory_need_not_be_pythons() -> None:
    async with connected() as (client, _, remote):
        number: Any = numpy.uint64  # an integer by its __index__ only
        same = RemoteMemory(number(remote.address), number(64), number(remote.rkey))
        await client.write(b"z" * 64, same)
        assert await client.read_bytes(remote) == b"z" * 64


async def test_parts_of_every_kind_arrive_in_order() -> None:
    """Registered parts, one with an address of its own, are copied among others."""
    keywords: Any = {"device": "software", "options": aiordma.ConnectionOptions(max_send_sge=5)}
    async with connections.connected("127.0.0.1", server=keywords, client=keywords) as ends:
        client, server = ends
        access = Access.REMOTE_READ | Access.REMOTE_WRITE
        remote = server.register(bytearray(2048), access).remote()
        ours = client.register(bytearray(range(64)))
        moved = MemoryRegion(client.protection_domain, mmap.mmap(-1, 4096), iova=0x10000)
        moved.view[:4] = b"iova"
        for plain in (b"short", bytes(1000)):  # inline, and by a pool block
            array = bytearray(b"array")
            parts: list[Any] = [plain, ours[3:5], array, moved[1:4], memoryview(b"")]
            expected = b"".join(bytes(part) for part in parts)
            with client.chain() as chain:
                chain.post_writev(parts, remote[: len(expected)])
                array[:] = b"later"  # was copied
            await chain.requests[0]
            assert await client.read_bytes(remote[: len(expected)]) == expected
            await client.writev(parts, remote[: len(expected)])
            changed = b"".join(bytes(part) for part in parts)
            assert await client.read_bytes(remote[: len(expected)]) == changed
        registered = [ours[8:16], moved[:4], ours[16:17]]
        await client.writev(registered, remote[:13])
        assert await client.read_bytes(remote[:13]) == bytes(range(8, 16)) + b"iova" + bytes([16])
        assert (ours._users, moved._users) == (0, 0)
        moved.close()


def test_the_benchmark_knows_how_long_a_loop_polls() -> None:
    assert loops.SPIN == SPIN


async def test_port_posts_plain_requests_in_one_call() -> None:
    async with connected() as (client, region, remote):
        port, steps = endpoint_of(client).work.port, drain_of(client)
        await client.read(region[:8], remote[:8])  # from now on the port posts READs
        with instant(client):
            crossings = steps.crossings
            posted = [
                port.send(b"inline"),
                port.write(region[:8], remote[:8]),
                port.read(region[:8], remote[:8]),
            ]
            assert [request and request.operation for request in posted] == [
                "SEND",
                "RDMA_WRITE",
                "RDMA_READ",
            ]
            assert steps.crossings == crossings + len(posted)
            for request in posted:
                assert request is not None
                assert (await request).status == 0
        for refused in (
            port.send(bytes(1 << 20)),  # too long to be sent inline
            port.write(region[:8], remote[:4]),
            port.read(b"read-only", remote[:8]),
        ):
            assert refused is None
