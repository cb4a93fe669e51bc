"""`receive_view`: a message as a view of its receive buffer, which is posted again afterwards."""

import errno
import gc
from contextlib import AsyncExitStack, suppress
from pickle import PickleBuffer
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import MemoryRegion
from tests.device.players import connected, members, one_loop
from tests.devices import ADDRESS
from tests.internals import (
    BufferPool,
    arrivals_of,
    close_unused_reactors,
    endpoint_of,
    pool_of,
)

pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {"receive_buffers": 4, "receive_size": 256}


async def settled(pool: BufferPool, leased: int) -> None:
    """Let the event loop return blocks, until so many are leased."""
    for _ in range(1000):
        if pool.leased == leased:
            break
        await anyio.lowlevel.checkpoint()
    assert pool.leased == leased


async def test_view_is_the_message_and_read_only() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"hello")
        async with server.receive_view() as view:
            assert bytes(view) == b"hello"
            assert view.readonly
            assert (view.format, view.itemsize, view.ndim) == ("B", 1, 1)


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_view_is_released_at_the_end_of_the_block() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"hello")
        async with server.receive_view() as view:
            pass
        with pytest.raises(ValueError, match="released"):
            bytes(view)


async def test_views_reuse_the_posted_buffers() -> None:
    async with connected(server=SMALL) as (client, server):
        leased = pool_of(server).leased
        for number in range(5 * SMALL["receive_buffers"]):
            await client.send(bytes([number]) * 64)
            async with server.receive_view() as view:
                assert view == bytes([number]) * 64
        assert pool_of(server).leased == leased


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_kept_slice_is_not_overwritten() -> None:
    async with connected(server=SMALL) as (client, server):
        leased = pool_of(server).leased
        await client.send(b"keep this")
        async with server.receive_view() as view:
            kept = view[5:]
        for _ in range(5 * SMALL["receive_buffers"]):
            await client.send(b"x" * 256)
            await server.receive()
        assert bytes(kept) == b"this"
        assert pool_of(server).leased == leased + 1
        del kept, view
        gc.collect()
        while pool_of(server).leased != leased:
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("ends_in", ["release_later", "replace"])
async def test_slice_that_goes_as_its_block_is_replaced(
    ends_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of the program can run meanwhile: of a collection, for example."""
    async with connected(server=SMALL) as (client, server):
        pool, leased, kept = pool_of(server), pool_of(server).leased, list[memoryview]()
        call = getattr(arrivals_of(server), ends_in)

        def drop(lease: Any) -> Any:
            result = call(lease)
            kept.clear()
            gc.collect()
            return result

        monkeypatch.setattr(arrivals_of(server), ends_in, drop)
        for number in range(2 * SMALL["receive_buffers"]):
            await client.send(b"keep %d" % number)
            async with server.receive_view() as view:
                kept.append(view[5:])
                del view
            assert not kept
        await settled(pool, leased)


async def test_block_is_returned_if_its_replacement_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server=SMALL) as (client, server):
        pool, leased = pool_of(server), pool_of(server).leased

        def fail(lease: Any) -> None:
            raise KeyError("no replacement")

        monkeypatch.setattr(arrivals_of(server), "replace", fail)
        await client.send(b"keep this")
        async with server.receive_view() as view:
            kept = view[5:]
        assert "no replacement" in caplog.text
        assert bytes(kept) == b"this"
        assert pool.leased == leased
        del kept, view
        gc.collect()
        await settled(pool, leased - 1)  # one receive fewer


@pytest.mark.parametrize(
    "refusal", [OSError(errno.ENOMEM, "no memory to map"), MemoryError()], ids=["map", "allocate"]
)
async def test_connection_ends_if_no_block_can_replace_a_kept_one(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(server=SMALL) as (client, server):

        def lease(size: int) -> None:
            raise refusal

        await client.send(b"keep this")
        async with server.receive_view() as view:
            kept = view[5:]
            monkeypatch.setattr(pool_of(server), "lease", lease)
        assert bytes(kept) == b"this"
        with pytest.raises(aiordma.VerbsCallError, match="another receive buffer") as caught:
            await server.receive()
        assert caught.value.errno == errno.ENOMEM
        assert type(caught.value.__cause__) is type(refusal)


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_export_of_a_view_is_not_overwritten() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"keep this")
        async with server.receive_view() as view:
            export = PickleBuffer(view)  # as an array of the view would be
        for _ in range(5 * SMALL["receive_buffers"]):
            await client.send(b"x" * 256)
            await server.receive()
        assert bytes(export) == b"keep this"


async def test_arrivals_dropped_while_a_view_opens_leave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python code finds the block's memory: a signal handler or a collection can run there."""
    async with connected(server=SMALL) as (client, server):
        queue, region = arrivals_of(server).queue, vars(MemoryRegion)["view"].fget

        def view_of(self: MemoryRegion) -> memoryview:
            queue.discard()
            view: memoryview = region(self)
            return view

        await client.send(b"first")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRegion, "view", property(view_of))
            async with server.receive_view() as view:
                assert bytes(view) == b"first"
        await client.send(b"second")
        assert await server.receive() == b"second"


async def test_several_views_are_held_at_the_same_time() -> None:
    async with connected(server=SMALL) as (client, server):
        for number in range(3):
            await client.send(bytes([number]) * 100)
        async with AsyncExitStack() as stack:
            views = [await stack.enter_async_context(server.receive_view()) for _ in range(3)]
            await client.send(b"the fourth")
            assert await server.receive() == b"the fourth"
            assert views == [bytes([number]) * 100 for number in range(3)]


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_receiving_with_all_buffers_held_raises_busy_error() -> None:
    async with connected(server=SMALL) as (client, server):
        count = SMALL["receive_buffers"]
        for _ in range(count):
            await client.send(b"held")
        async with AsyncExitStack() as stack:
            for _ in range(count):
                await stack.enter_async_context(server.receive_view())
            with pytest.raises(aiordma.BusyError, match=r"holds all receive_buffers=4 .*leave one"):
                async with server.receive_view():
                    pass
            with pytest.raises(aiordma.BusyError, match="receive_view"):
                await server.receive()
        await client.send(b"after")
        assert await server.receive() == b"after"


@pytest.mark.natively
@pytest.mark.parametrize("end", ["close", "drop", "throw"])
async def test_ended_wait_leaves_the_queue_to_the_next_task(end: str) -> None:
    async with connected(server=SMALL) as (client, server):

        async def enter() -> None:
            async with server.receive_view():
                pytest.fail("there is no message")

        entering: Any = enter()
        entering.send(None)  # it waits
        with pytest.raises(aiordma.BusyError, match="already receiving from the connection to"):
            await server.receive()
        if end == "close":
            entering.close()
        elif end == "throw":
            with pytest.raises(KeyError):
                entering.throw(KeyError("of the program"))
        else:
            del entering
        await client.send(b"hello")
        async with server.receive_view() as view:
            assert bytes(view) == b"hello"


async def test_block_left_by_an_error_posts_its_buffer_again() -> None:
    async with connected(server={**SMALL, "receive_buffers": 1}) as (client, server):
        for number in range(5):
            await client.send(b"%d" % number)
            with suppress(ZeroDivisionError):
                async with server.receive_view() as view:
                    assert bytes(view) == b"%d" % number
                    raise ZeroDivisionError


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_kept_slice_outlives_the_event_loops_memory() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"hello")
        async with server.receive_view() as view:
            kept = view[1:]
        pool = pool_of(server)
    await anyio.lowlevel.checkpoint()
    gc.collect()
    await close_unused_reactors()
    assert not pool.registered
    assert bytes(kept) == b"ello"
    del kept, view
    gc.collect()
    await anyio.lowlevel.checkpoint()


async def test_view_of_a_shared_receive_queue() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4, buffer_size=64) as shared,
        members(2, shared) as (clients, servers),
    ):
        for server in servers:
            assert await server.receive() == b"first"
        for number in range(20):
            client, server = clients[number % 2], servers[number % 2]
            await client.send(b"%d" % number)
            async with server.receive_view() as view:
                assert bytes(view) == b"%d" % number
                assert shared.posted == 3
            assert shared.posted == 4


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_shared_queue_replaces_kept_block_of_ended_peer() -> None:
    """The peer has gone when the block ends; the queue posts for the other peers, too."""
    async with await aiordma.open_shared_receive(ADDRESS, buffers=4, buffer_size=64) as shared:
        kept: list[memoryview] = []
        for _ in range(6):
            async with members(1, shared) as (clients, servers):
                await clients[0].aclose()
                await servers[0].ended()
                async with servers[0].receive_view() as view:
                    kept.append(view[1:])
            del view
            assert shared.posted == 4
        assert [bytes(part) for part in kept] == [b"irst"] * 6


@one_loop
async def test_kept_block_without_replacement_ends_the_shared_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One receive less for all peers would at last be none."""
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4, buffer_size=64) as shared,
        members(2, shared) as (clients, servers),
    ):
        await clients[0].aclose()
        await servers[0].ended()
        async with servers[0].receive_view() as view:
            kept = view[1:]

            def lease(size: int) -> None:
                raise MemoryError("no block")

            monkeypatch.setattr(endpoint_of(shared).memory.pool, "lease", lease)
        monkeypatch.undo()
        assert bytes(kept) == b"irst"
        cause = await servers[1].ended()
        assert isinstance(cause, aiordma.VerbsCallError)
        assert isinstance(cause.__cause__, MemoryError)
        with pytest.raises(aiordma.VerbsCallError, match="another receive buffer"):
            endpoint_of(shared).require_usable()


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_view_outlives_its_connection() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"hello")
        async with server.receive_view() as view:
            await client.aclose()
            await server.aclose()
            gc.collect()
            assert bytes(view) == b"hello"
            kept = view[1:]
        assert bytes(kept) == b"ello"
        with pytest.raises(aiordma.ClosedError):
            async with server.receive_view():
                pass


async def test_end_of_stream_is_raised_on_entering() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"last")
        await client.aclose()
        async with server.receive_view() as view:
            assert bytes(view) == b"last"
            with pytest.raises(anyio.EndOfStream):
                async with server.receive_view():
                    pass


async def test_context_manager_is_entered_once() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"one")
        receiving = server.receive_view()
        async with receiving:
            pass
        with pytest.raises(ValueError, match="entered once"):
            async with receiving:
                pass


async def test_view_needs_pooled_receives() -> None:
    async with connected(server={"receive_buffers": 0}) as (_, server):
        with pytest.raises(ValueError, match="receive_buffers=0"):
            async with server.receive_view():
                pass


async def test_second_receiving_task_is_refused() -> None:
    async with connected(server=SMALL) as (client, server), anyio.create_task_group() as group:
        group.start_soon(server.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(aiordma.BusyError, match="already receiving from the connection to"):
            async with server.receive_view():
                pass
        await client.send(b"for the first")


async def test_empty_message_is_an_empty_view() -> None:
    async with connected(server=SMALL) as (client, server):
        await client.send(b"")
        async with server.receive_view() as view:
            assert view.nbytes == 0


@pytest.mark.promise("A view stays unchanged until it is released")
async def test_buffers_are_posted_again_in_chains() -> None:
    options = {"receive_buffers": 32, "receive_size": 64}
    async with connected(server=options) as (client, server):
        endpoint = endpoint_of(server)
        for _ in range(24):
            await client.send(b"x")
        while len(endpoint.work.requests) > 8:
            endpoint.hub.drain()
            await anyio.lowlevel.checkpoint()
        left = set()
        for _ in range(24):
            await server.receive()
            left.add(len(endpoint.work.requests))
        expected = {8, 16, 24, 32} if endpoint.hub.lets_peers_wait else set(range(9, 33))
        assert left == expected
