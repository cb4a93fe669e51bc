"""Datagrams by the engine: receives into the program's memory, messages, and replies to senders."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Datagram, DatagramPeer
from tests.bench.instant import instant, prepare
from tests.internals import drain_of, pool_of
from tests.unit.test_hot_path import Calls

pytestmark = pytest.mark.anyio

ADDRESS = "127.0.0.1"
DEPTH = 4


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[Datagram, DatagramPeer]]:
    """A socket, and itself as a peer."""
    prepare()
    given: Any = {
        "device": "software",
        "options": aiordma.ConnectionOptions(max_recv_wr=DEPTH),
        **options,
    }
    async with await aiordma.open_datagram(ADDRESS, **given) as socket:
        yield socket, await socket.resolve(ADDRESS, socket.port)


async def test_receive_of_a_datagram_is_no_python_call() -> None:
    async with opened(receive_buffers=0) as (socket, _):
        region = socket.register(bytearray(socket.mtu))
        half = socket.mtu // 2
        parts = [region[:half], region[half:]]
        leased, steps = pool_of(socket).leased, drain_of(socket)
        with instant(socket):
            await socket.post_recv(region)  # the pool registers the blocks of headers
            posts: list[tuple[Any, Any]] = [
                (socket.post_recv, region[:]),
                (socket.post_recvv, parts),
            ]
            for post, memory in posts:
                crossings = steps.crossings
                with Calls() as calls:
                    arrival = await post(memory)
                assert (calls.python, calls.c) == (0, 0)
                assert steps.crossings == crossings + 1
                assert arrival.length == 64
        assert (pool_of(socket).leased, region._users) == (leased, 0)


async def test_receive_gives_the_same_arrival_to_each_task() -> None:
    async with opened(receive_buffers=0) as (socket, peer):
        receive = socket.post_recv(socket.register(bytearray(socket.mtu)))
        assert not receive.done()
        with pytest.raises(RuntimeError, match="not ended"):
            receive.result()
        with anyio.move_on_after(0):
            await receive  # a cancelled await leaves the receive posted
        found = []

        async def wait() -> None:
            found.append(await receive)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await socket.send(b"hello", peer, immediate=0xFFFFFFFF)
        assert found[0] is found[1] is receive.result() is await receive
        assert (found[0].length, found[0].immediate) == (5, 0xFFFFFFFF)
        assert found[0].sender_qp_num == socket.qp_num
        assert found[0].source.qp_num == socket.qp_num
        assert "5 bytes" in repr(found[0])
        assert "RECV" in repr(receive)


async def test_full_queue_and_wrong_memory_keep_no_block() -> None:
    async with opened(receive_buffers=0) as (socket, _):
        region = socket.register(bytearray(socket.mtu))
        receives = [socket.post_recv(region) for _ in range(DEPTH)]
        leased = pool_of(socket).leased
        closed = socket.register(bytearray(socket.mtu))
        part = closed[:]
        closed.close()
        for memory, error in (
            (region, aiordma.QueueFullError),
            (region[1:], ValueError),
            (bytes(socket.mtu), TypeError),
            (part, aiordma.ClosedError),
            (None, TypeError),
        ):
            with pytest.raises(error):
                socket.post_recv(memory)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="parts"):
            socket.post_recvv([region] * 40)
        assert (pool_of(socket).leased, region._users) == (leased, DEPTH)
    for receive in receives:
        with pytest.raises(aiordma.FlushedError):
            receive.result()
        with pytest.raises(aiordma.FlushedError):
            await receive


async def test_sockets_with_pooled_receives_post_no_others() -> None:
    async with opened(receive_buffers=2) as (socket, peer):
        region = socket.register(bytearray(socket.mtu))
        for post in (socket.post_recv, socket.post_recvv):
            with pytest.raises(ValueError, match="posts its own receives"):
                post([region] if post == socket.post_recvv else region)  # type: ignore[arg-type]
        assert region._users == 0
        await socket.send(b"to the pool", peer)
        assert (await socket.receive()).data == b"to the pool"


async def test_datagrams_arrive_in_order_with_their_senders() -> None:
    async with (
        opened(receive_buffers=64) as (socket, peer),
        opened() as (other, _),
    ):
        for number in range(48):  # more than are handed out before other tasks run
            await (other if number % 2 else socket).send(bytes([number]) * number, peer)
        found = [await socket.receive() for _ in range(48)]
        by_sender = {
            end.qp_num: [message.data for message in found if message.sender_qp_num == end.qp_num]
            for end in (socket, other)
        }
        assert by_sender[socket.qp_num] == [bytes([n]) * n for n in range(0, 48, 2)]
        assert by_sender[other.qp_num] == [bytes([n]) * n for n in range(1, 48, 2)]
        # A sender is computed once, and remembered.
        assert len({id(message.source) for message in found}) == 2
        with anyio.move_on_after(0.01):
            await socket.receive()  # none is left, and a cancelled receive takes none
        await socket.send(b"last", peer)
        assert (await socket.receive()).data == b"last"


async def test_second_receiving_task_is_refused() -> None:
    async with opened(receive_buffers=4) as (socket, peer), anyio.create_task_group() as tasks:
        tasks.start_soon(socket.receive)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(
            aiordma.BusyError, match="already receiving from the datagram socket at"
        ):
            await socket.receive()
        await socket.send(b"x", peer)


async def test_forgotten_sender_is_computed_again() -> None:
    async with (
        opened(receive_buffers=8, most_handles=1) as (socket, peer),
        opened() as (other, _),
    ):
        found = []
        for end in (socket, other):
            await end.send(b"x", peer)
            found.append(await socket.receive())
        first = found[0].source
        assert found[0].source is first
        assert found[1].source.qp_num == other.qp_num
        assert found[0].source == first
        assert found[0].source is not first
        await socket.send(b"an answer", found[0].source)
        assert (await socket.receive()).data == b"an answer"


async def test_source_after_the_end_is_an_error_or_known() -> None:
    async with opened(receive_buffers=2) as (socket, peer):
        for _ in range(2):
            await socket.send(b"x", peer)
        messages = [await socket.receive() for _ in range(2)]
        known = messages[0].source
    assert messages[1].source is known
    assert messages[0].data == b"x"


async def test_replies_to_several_senders_are_no_python_calls() -> None:
    async with opened(receive_buffers=4) as (socket, peer), opened() as (other, _):
        messages = []
        for end in (socket, other):
            await end.send(b"x", peer)
            messages.append(await socket.receive())
        part = socket.register(bytearray(64))[:]
        with instant(socket):
            for message in messages:
                await socket.send(part, message.source)
            with Calls() as calls:
                for message in messages * 4:
                    await socket.post_ud_send(part, message.source)
            assert (calls.python, calls.c) == (0, 0)


async def test_more_peers_than_a_port_remembers_are_reached() -> None:
    async with opened(receive_buffers=4) as (socket, peer):
        part = socket.register(bytearray(8))[:]
        ends = [socket.peer(socket.gid, number) for number in range(1, 1300)]
        with instant(socket):
            for end in ends + ends[::100]:
                await socket.send(part, end)
        assert part.region._users == 0
        await socket.send(b"still there", peer)
        assert (await socket.receive()).data == b"still there"


async def test_retired_handle_is_made_again() -> None:
    async with opened(receive_buffers=4) as (socket, peer):
        for _ in range(2):
            await socket.send(b"x", peer)
            await socket.receive()
            socket._endpoint.handles.get(peer.address).release()
            socket._endpoint.handles._kept.popitem()[1].retire()
