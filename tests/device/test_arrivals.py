"""The queue of pooled receives: available messages are handed out at once, in order, and no block
is lost."""

import gc
import sys
from collections.abc import Generator
from threading import Thread
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from tests.device.players import REMOTE, connected, members
from tests.devices import ADDRESS
from tests.internals import endpoint_of, hub_of, pool_of

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {"receive_buffers": 8, "receive_size": 64}


async def until_arrived(server: aiordma.Connection, count: int) -> None:
    while server._messages.queue.arrived < count:
        hub_of(server).drain()
        await anyio.lowlevel.checkpoint()


async def test_available_messages_are_received_without_pause() -> None:
    async with connected(server=SMALL) as (client, server), anyio.create_task_group() as group:
        for number in range(8):
            await client.send(bytes([number]))
        await until_arrived(server, 8)
        ran: list[bool] = []

        async def other() -> None:
            ran.append(True)

        group.start_soon(other)
        assert [await server.receive() for _ in range(4)] == [bytes([n]) for n in range(4)]
        for number in range(4, 8):
            async with server.receive_view() as view:
                assert view == bytes([number])
        assert not ran
        await anyio.wait_all_tasks_blocked()
        assert ran


async def test_other_tasks_run_beside_a_full_queue() -> None:
    count = 600
    options = {"receive_buffers": count, "receive_size": 64}
    async with connected(server=options) as (client, server), anyio.create_task_group() as group:
        for _ in range(count):
            await client.send(b"x")
        await until_arrived(server, count)
        ran: list[bool] = []

        async def other() -> None:
            ran.append(True)

        group.start_soon(other)
        for _ in range(count):
            await server.receive()
        assert ran


async def test_queue_keeps_order_as_it_grows_and_wraps() -> None:
    count = 50
    options = {"receive_buffers": count, "receive_size": 64}
    async with connected(server=options) as (client, server):
        sent = received = 0
        for more, fewer in ((3, 1), (30, 20), (20, 31), (30, 29), (7, 9)):
            for _ in range(more):
                await client.send(b"%d" % sent)
                sent += 1
            await until_arrived(server, sent - received)
            for _ in range(fewer):
                assert await server.receive() == b"%d" % received
                received += 1
        assert sent == received


async def test_cancellation_at_the_arrival_loses_no_message() -> None:
    async with connected(server=SMALL) as (client, server):
        for with_view in (False, True):
            got: list[bytes] = []
            async with anyio.create_task_group() as group:

                async def receive(got: list[bytes], with_view: bool) -> None:
                    if with_view:
                        async with server.receive_view() as view:
                            got.append(bytes(view))
                    else:
                        got.append(await server.receive())

                group.start_soon(receive, got, with_view)
                await anyio.wait_all_tasks_blocked()
                sent = client.post_send(b"one")
                while not server._messages.queue.arrived and not got:
                    hub_of(server).drain()
                group.cancel_scope.cancel()
            await sent
            if not got:
                got.append(await server.receive())
            assert got == [b"one"]


async def test_close_with_queued_messages_returns_all_blocks() -> None:
    async with connected(server=SMALL, client=SMALL) as (client, server):
        pool = pool_of(server)
        for _ in range(5):
            await client.send(b"queued")
        await until_arrived(server, 5)
        async with server.receive_view():
            pass
        await server.aclose()
        with pytest.raises(aiordma.ClosedError):
            await server.receive()
        assert server._messages.queue.arrived == server._messages.receives.unposted == 0
    assert pool.leased == 0


async def test_close_of_a_member_returns_its_blocks() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=8, buffer_size=64) as shared,
        members(2, shared) as (clients, servers),
    ):
        for server in servers:
            assert await server.receive() == b"first"
        for _ in range(5):
            await clients[0].send(b"queued")
        await until_arrived(servers[0], 5)
        assert shared.posted == 3
        await servers[0].aclose()
        assert shared.posted == 8
        await clients[1].send(b"still received")
        assert await servers[1].receive() == b"still received"


async def test_shared_blocks_are_posted_again_in_chains() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=32, buffer_size=64) as shared,
        members(1, shared) as (clients, servers),
    ):
        assert await servers[0].receive() == b"first"
        with anyio.move_on_after(0.01):
            await servers[0].receive()  # posts what is left, before it waits
        assert shared.posted == 32
        for _ in range(8):
            await clients[0].send(b"x")
        await until_arrived(servers[0], 8)
        assert shared.posted == 24
        posted = set()
        for _ in range(8):
            await servers[0].receive()
            posted.add(shared.posted)
        assert posted == ({24, 28, 32} if hub_of(shared).lets_peers_wait else set(range(25, 33)))


@pytest.mark.capability("immediate")
async def test_write_with_immediate_is_an_empty_message() -> None:
    async with connected(server=SMALL) as (client, server):
        memory = server.register(bytearray(16), REMOTE)
        for _ in range(2):
            await client.post_write(b"written", memory.remote()[:7], immediate=5)
        assert await server.receive() == b""
        async with server.receive_view() as view:
            assert view.nbytes == 0


class Forever:
    """Suspends the task that awaits it."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def test_view_closed_by_another_thread_returns_its_block() -> None:
    async with connected(server={**SMALL, "receive_buffers": 1}) as (client, server):
        leased = pool_of(server).leased
        await client.send(b"held")
        await until_arrived(server, 1)

        async def hold() -> None:
            async with server.receive_view() as view:
                assert bytes(view) == b"held"
                await Forever()

        held = hold()
        held.send(None)
        thread = Thread(target=held.close)
        thread.start()
        thread.join()
        assert not endpoint_of(server).work.requests
        while not endpoint_of(server).work.requests:
            await anyio.lowlevel.checkpoint()
        await client.send(b"next")
        assert await server.receive() == b"next"
        assert pool_of(server).leased == leased


async def test_receiving_leaks_no_objects() -> None:
    async with connected(server=SMALL) as (client, server):

        async def receive(count: int) -> None:
            for _ in range(count):
                await client.send(b"x" * 50)
                await server.receive()
                await client.send(b"x" * 50)
                async with server.receive_view() as view:
                    assert view.nbytes == 50
                await client.send(b"x" * 50)
                await until_arrived(server, 1)
                await server.receive_message()

        await receive(100)
        gc.collect()
        before = sys.getallocatedblocks()
        await receive(500)
        gc.collect()
        assert sys.getallocatedblocks() - before < 250
