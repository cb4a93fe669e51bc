"""Many connections on one shared receive queue: each gets its own, and every receive ends."""

import errno
import struct
from typing import Any

import anyio
import pytest

import aiordma
from tests.connections import connect_to
from tests.device.players import Outcome, both_ways, members, one_loop, until
from tests.devices import ADDRESS, DeviceUnderTest
from tests.internals import SharedReceiveEndpoint, endpoint_of, kept_queues

SEND = int(aiordma.verbs.WorkRequestOpcode.SEND)

pytestmark = pytest.mark.anyio


async def hear(connection: aiordma.Connection, count: int) -> list[bytes]:
    return [await connection.receive() for _ in range(count)]


# -- pooled ---------------------------------------------------------------------------------------


@pytest.mark.promise("A connection's end flushes no shared receive")
async def test_each_connection_gets_its_own_messages_in_order(device: DeviceUnderTest) -> None:
    # Where a message without a receive does not wait, there has to be one for each.
    async with members(3, 64 if device.lacks("rnr") else 8) as (clients, servers):
        heard: dict[int, list[bytes]] = {}

        async def speak(number: int) -> None:
            for i in range(20):
                await clients[number].send(b"%d of %d" % (i, number))

        async def listen(number: int) -> None:
            heard[number] = await hear(servers[number], 21)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(speak, number)
                group.start_soon(listen, number)
        for number in range(3):
            assert heard[number] == [b"first", *(b"%d of %d" % (i, number) for i in range(20))]
        await both_ways(clients[1], servers[1])


@pytest.mark.promise("A connection's end flushes no shared receive")
@one_loop
async def test_a_listeners_queue_lives_until_its_last_connection_ends() -> None:
    async with members(2, 4) as (clients, servers):  # its listener is closed by now
        shared, other = (endpoint_of(server).shared_receive for server in servers)
        assert other is shared
        assert isinstance(shared, SharedReceiveEndpoint)
        assert shared.members == 2
        await hear(servers[0], 1)
        await servers[0].aclose()
        await hear(servers[1], 1)
        await both_ways(clients[1], servers[1])
        assert shared.cause is None
        await servers[1].aclose()
        with pytest.raises(aiordma.ClosedError):
            shared.require_usable()


@pytest.mark.promise("A connection's end flushes no shared receive")
@one_loop
async def test_listener_replaces_and_closes_a_queue_that_failed() -> None:
    async with await aiordma.listen(ADDRESS, 0, shared_receive=4) as listener:
        client, server = await connect_to(listener, ADDRESS)
        failed = endpoint_of(server).shared_receive
        assert isinstance(failed, SharedReceiveEndpoint)
        failed.fail(aiordma.VerbsCallError(errno.ENOMEM, "ibv_post_srq_recv"))
        await server.aclose()
        await client.aclose()
        client, server = await connect_to(listener, ADDRESS)
        async with client, server:
            await both_ways(client, server)
        assert endpoint_of(server).shared_receive is not failed
        await until(failed.teardown.closed.is_set)
        assert len(kept_queues(listener)) == 1


@pytest.mark.promise("A connection's end flushes no shared receive")
@one_loop
async def test_unreceived_buffers_return_at_close() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4) as shared,
        members(2, shared) as (clients, servers),
    ):
        await hear(servers[0], 1)
        await hear(servers[1], 1)
        await clients[0].send(b"unread")
        await clients[0].send(b"unread as well")
        await until(lambda: shared.posted == 2)
        await servers[0].aclose()
        assert shared.posted == 4
        await both_ways(clients[1], servers[1])


@one_loop
@pytest.mark.capability("rnr")
async def test_a_connection_that_is_not_read_can_hold_up_the_others_and_lets_go() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=2) as shared,
        members(2, shared) as (clients, servers),
    ):
        await hear(servers[0], 1)
        await hear(servers[1], 1)
        await clients[0].send(b"one")
        await clients[0].send(b"two")
        waiting = clients[1].post_send(b"for another")
        await anyio.sleep(0.2)
        assert not waiting.done()
        assert await hear(servers[0], 2) == [b"one", b"two"]
        assert await servers[1].receive() == b"for another"
        await waiting


@pytest.mark.promise("A view stays unchanged until it is released")
@one_loop
@pytest.mark.capability("rnr")
async def test_last_posted_receive_posts_the_free_ones() -> None:
    """Free buffers wait for a chain of two. Another connection holds all others."""
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=16) as shared,
        members(3, shared) as (clients, servers),
        anyio.create_task_group() as group,
    ):
        for server in servers:
            await hear(server, 1)
        waiting = Outcome()
        group.start_soon(waiting.of, servers[0].receive)
        await until(lambda: shared.posted == 16)  # it waits
        await clients[1].send(b"one")
        assert await servers[1].receive() == b"one"
        assert shared.posted == 15
        for _ in range(15):
            await clients[2].send(b"not received")
        await until(lambda: servers[2]._messages.queue.arrived == 15)
        await clients[0].send(b"finds the free one")
        await until(lambda: waiting.value == b"finds the free one")


async def test_what_came_before_the_peer_left_is_received_before_the_end() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4) as shared,
        members(1, shared) as (clients, servers),
    ):
        await clients[0].send(b"last words")
        await clients[0].aclose()
        assert [message async for message in servers[0]] == [b"first", b"last words"]
        await until(lambda: shared.members == 0)
        assert shared.posted == 4


@one_loop
async def test_a_message_that_is_too_long_ends_its_own_connection_only() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4, buffer_size=64) as shared,
        members(2, shared, says=b"-") as (clients, servers),
    ):
        await hear(servers[0], 1)
        await hear(servers[1], 1)
        sent = clients[0].post_send(bytes(65))
        with pytest.raises((aiordma.WorkCompletionError, aiordma.DisconnectedError)):
            await servers[0].receive()
        await clients[0].ended()
        assert isinstance(sent.exception(), aiordma.WorkCompletionError | None)  # siw: it was sent
        await both_ways(clients[1], servers[1])
        await servers[0].aclose()
        assert shared.members == 1
        assert shared.posted == 4


@one_loop
@pytest.mark.promise("A message that the peer cannot hold is refused at its sender")
async def test_a_message_longer_than_the_shared_receives_is_refused_at_its_sender() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4, buffer_size=64) as shared,
        members(1, shared, receive_size=1000) as (clients, servers),
    ):
        await hear(servers[0], 1)
        with pytest.raises(ValueError, match=r"65 bytes.*have 64;"):
            clients[0].post_send(bytes(65))
        await both_ways(clients[0], servers[0])


@one_loop
async def test_a_client_can_take_from_one_too() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=4) as shared,
        await aiordma.listen(ADDRESS, 0) as listener,
    ):
        async with anyio.create_task_group() as group:
            accepted = Outcome()
            group.start_soon(accepted.of, listener.accept)
            client = await aiordma.connect(ADDRESS, listener.port, shared_receive=shared)
        async with client, accepted.value as server:
            await both_ways(client, server)
            assert shared.members == 1


# -- posted by the program ------------------------------------------------------------------------


async def test_chained_receives_name_their_connection() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=8, max_sge=2) as shared:
        memory = shared.register(bytearray(600))
        plain = bytearray(100)
        requests = shared.post_srq_recv(
            [memory[:100], [memory[100:104], memory[104:200]], plain, memory[200:300]]
        )
        assert shared.posted == 4
        async with members(2, shared) as (clients, servers):
            await clients[1].send(b"from the second")
            await clients[0].send(b"from the first")
            done = [await request for request in requests]
            whose = [shared.connection_of(completion) for completion in done]
            assert whose == [servers[0], servers[1], servers[1], servers[0]]
            assert bytes(memory[:5].view) == b"first"
            assert bytes(memory[100:105].view) == b"first"
            assert plain[: done[2].byte_len] == b"from the second"
            assert bytes(memory[200 : 200 + done[3].byte_len].view) == b"from the first"
            assert shared.posted == 0
        assert shared.connection_of(done[0]) is None


@one_loop
async def test_a_chain_beyond_the_free_slots_is_not_posted_at_all() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        memory = shared.register(bytearray(64))
        shared.post_srq_recv([memory[:8]] * 3)
        with pytest.raises(aiordma.QueueFullError, match="2 receives, and 1 of 4"):
            shared.post_srq_recv([memory[:8]] * 2)
        assert shared.posted == 3


@one_loop
async def test_what_the_device_took_before_it_refused_is_live() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        room = endpoint_of(shared).raw.max_wr
        endpoint_of(shared)._set_depth(8 * room)  # our own count would have refused it
        memory, refused = shared.register(bytearray(64)), bytearray(8)
        with pytest.raises(aiordma.verbs.PartialPostError) as caught:
            shared.post_srq_recv([memory[:8]] * (4 * room) + [refused, memory[:8]])
        error = caught.value
        assert error.errno == errno.ENOMEM
        assert 4 <= error.refused == len(error.posted) == shared.posted <= 4 * room
        refused.append(0)  # no longer exported
        async with members(1, shared):
            completion = await error.posted[0]
            assert bytes(memory[: completion.byte_len].view) == b"first"
            assert shared.posted == error.refused - 1


@one_loop
async def test_bad_buffers_post_nothing() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4, max_sge=2) as shared:
        memory = shared.register(bytearray(64))
        assert shared.post_srq_recv([]) == []
        with pytest.raises(TypeError, match="read-only"):
            shared.post_srq_recv([memory, b"read-only"])
        with pytest.raises(
            ValueError, match=r"post_srq_recv\(\): buffers\[\d\]: 3 parts.*at most 2"
        ):
            shared.post_srq_recv([memory, [memory[:1], memory[1:2], memory[2:3]]])
        assert shared.posted == 0
        memory.close()
        with pytest.raises(aiordma.ClosedError):
            shared.post_srq_recv([memory])


@pytest.mark.promise("A connection's end flushes no shared receive")
@one_loop
@pytest.mark.capability("torn_message")
async def test_torn_message_fails_only_its_receive() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        memory = shared.register(bytearray(1 << 16))
        requests = shared.post_srq_recv([memory] * 3)
        async with members(2, shared) as (clients, servers):
            await requests[0]
            await requests[1]
            # Its first packets go out; the second part is in no region, so the rest never does.
            good = clients[0].register(bytearray(1 << 14))
            sges = good[:]._sge + struct.pack("=QII", 4096, 4096, 0xDEAD00)
            work = aiordma.verbs.SendWork("SEND", SEND, sges, 2, 20480)
            request = endpoint_of(clients[0]).work.sends.submit(work)
            with pytest.raises(aiordma.WorkCompletionError):
                await request
            (spare,) = shared.post_srq_recv([memory])
            with pytest.raises(aiordma.FlushedError) as caught:
                await requests[2]
            assert caught.value.qp_num == servers[0].qp_num
            assert not spare.done()
            await clients[1].send(b"for the other")
            assert shared.connection_of(await spare) is servers[1]


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.promise("A connection's end flushes no shared receive")
async def test_closing_ends_what_is_posted_and_only_then_lets_go() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        memory, plain = shared.register(bytearray(8)), bytearray(8)
        requests = shared.post_srq_recv([memory, plain])
        with pytest.raises(aiordma.BusyError):
            memory.close()
        with pytest.raises(BufferError):
            plain.append(0)
        async with members(1, shared) as (clients, servers):
            await requests[0]
            with pytest.raises(aiordma.BusyError, match="1 connections"):
                await shared.aclose()
            assert not requests[1].done()
            await servers[0].aclose()
            await clients[0].aclose()
        assert not requests[1].done()  # it is for the others
        await shared.aclose()
        with pytest.raises(aiordma.FlushedError) as caught:
            await requests[1]
        assert isinstance(caught.value.__cause__, aiordma.ClosedError)
        plain.append(0)
        with pytest.raises(aiordma.ClosedError):
            shared.post_srq_recv([bytearray(8)])
        with pytest.raises(aiordma.ClosedError):
            await aiordma.connect(ADDRESS, 1, shared_receive=shared)


@one_loop
async def test_arguments_are_refused_before_anything_is_made() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"depth": 0}, "depth=0"),
        ({"depth": 1 << 30}, "depth=1073741824"),
        ({"max_sge": 1000}, "max_sge=1000"),
        ({"depth": 4, "buffers": 5}, "buffers=5 is not in 0..4"),
        ({"buffers": 1, "buffer_size": 0}, "buffer_size=0"),
    )
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            await aiordma.open_shared_receive(ADDRESS, **options)
    with pytest.raises(ValueError, match="expected the address of one device"):
        await aiordma.open_shared_receive("0.0.0.0")
    with pytest.raises((aiordma.AddressError, aiordma.NoDeviceError)):
        await aiordma.open_shared_receive(ADDRESS, device="nothing0")
    with pytest.raises(ValueError, match="shared_receive=0"):
        await aiordma.listen(ADDRESS, 0, shared_receive=0)
    with pytest.raises(TypeError, match="a SharedReceiveQueue, or a number"):
        await aiordma.listen(ADDRESS, 0, shared_receive="4")  # type: ignore[arg-type]


@one_loop
async def test_pooled_and_own_receives_do_not_mix() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=2) as pooled,
        members(1, pooled) as (_, servers),
    ):
        with pytest.raises(ValueError, match="posts its own receives"):
            pooled.post_srq_recv([bytearray(8)])
        with pytest.raises(ValueError, match="post_srq_recv"):
            servers[0].post_recv(bytearray(8))
    async with await aiordma.open_shared_receive(ADDRESS) as posted:
        posted.post_srq_recv([bytearray(8)])
        async with members(1, posted) as (_, servers):
            with pytest.raises(ValueError, match="post_srq_recv"):
                await servers[0].receive()
