"""The counters of connections, listeners, datagram sockets, shared receive queues and devices."""

from contextlib import suppress
from typing import Any

import anyio
import numpy
import pytest

import aiordma
from aiordma.types import RequestStatistics
from aiordma.verbs import WorkCompletionOpcode
from tests.device.players import OWN_RECEIVES, REMOTE, connected, members, until
from tests.devices import ADDRESS

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

Opcode = WorkCompletionOpcode


def assert_adds_up(counters: RequestStatistics) -> None:
    ended = sum(counters.completed.values()) + sum(counters.failed.values())
    ended += counters.flushed + counters.discarded
    assert counters.posted_sends + counters.posted_receives == ended + counters.in_flight


@pytest.mark.promise("Counters add up")
async def test_a_connection_counts_its_requests_and_their_bytes() -> None:
    async with connected(client=OWN_RECEIVES, server=OWN_RECEIVES) as (client, server):
        memory = server.register(bytearray(1000), REMOTE)
        receives = [server.post_recv(bytearray(100)) for _ in range(3)]
        await client.send(b"x" * 30)
        await client.send(b"y" * 12)
        await client.write(b"z" * 1000, memory.remote())
        await client.read(bytearray(200), memory.remote()[:200])
        await receives[1]
        theirs, ours = server.statistics(), client.statistics()
        assert ours.completed == {Opcode.SEND: 2, Opcode.RDMA_WRITE: 1, Opcode.RDMA_READ: 1}
        assert (ours.posted_sends, ours.posted_receives, ours.in_flight) == (4, 0, 0)
        assert (ours.bytes_sent, ours.bytes_received) == (1042, 200)
        assert theirs.completed == {Opcode.RECV: 2}
        assert (theirs.posted_sends, theirs.posted_receives, theirs.in_flight) == (0, 3, 1)
        assert (theirs.bytes_sent, theirs.bytes_received) == (0, 42)
        assert not ours.failed
        assert not theirs.failed
    # The last receive is flushed, or ends with the queue pair.
    left = server.statistics()
    assert left.in_flight == 0
    assert left.flushed + left.discarded == 1
    assert_adds_up(left)
    with pytest.raises(aiordma.FlushedError):
        await receives[2]


async def test_pooled_receives_are_counted() -> None:
    async with connected(server={"receive_buffers": 4}) as (client, server):
        for _ in range(10):
            await client.send(b"12345")
            assert await server.receive() == b"12345"
        counters = server.statistics()
        assert counters.completed == {Opcode.RECV: 10}
        assert counters.bytes_received == 50
        assert_adds_up(counters)
    # An ordinary close is no failure of any request.
    for each in (client, server):
        counters = each.statistics()
        assert (counters.failed, counters.flushed, counters.in_flight) == ({}, 0, 0)
        assert_adds_up(counters)


@pytest.mark.promise("Counters add up")
async def test_failures_are_counted_by_their_status() -> None:
    async with connected(client=OWN_RECEIVES) as (client, server):
        memory = server.register(bytearray(64), REMOTE)
        remote = memory.remote()
        await client.read(bytearray(64), remote)
        wrong = aiordma.RemoteMemory(remote.address, remote.length, remote.rkey ^ 0x5500)
        receive = client.post_recv(bytearray(8))
        with pytest.raises(aiordma.WorkCompletionError):
            await client.read(bytearray(64), wrong)
        with pytest.raises(aiordma.FlushedError):
            await receive
        await client.ended()
        counters = client.statistics()
        assert counters.completed == {Opcode.RDMA_READ: 1}
        assert sum(counters.failed.values()) <= 1  # siw reports the peer's Terminate as a flush
        assert sum(counters.failed.values()) + counters.flushed + counters.discarded == 2
        assert_adds_up(counters)


async def test_requests_of_a_chain_are_counted_when_it_is_posted() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receives = [server.post_recv(bytearray(8)) for _ in range(3)]
        before = client.statistics()
        with client.chain(signal_last_only=True) as chain:
            for _ in range(3):
                chain.post_send(b"abc")
            assert client.statistics() == before
        for receive in receives:
            await receive
        counters = client.statistics()
        assert counters.posted_sends == before.posted_sends + 3
        await until(lambda: client.statistics().completed.get(Opcode.SEND) == 3)
        assert client.statistics().bytes_sent == 9


async def test_a_chain_that_is_never_posted_is_not_counted() -> None:
    async with connected() as (client, _):
        before = client.statistics()
        with suppress(ZeroDivisionError), client.chain() as chain:
            request = chain.post_send(b"abc")
            raise ZeroDivisionError
        request.exception()
        assert client.statistics() == before


@pytest.mark.capability("rnr")
async def test_waits_for_a_slot_are_counted() -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(max_send_wr=2), **OWN_RECEIVES},
        server=OWN_RECEIVES,
    ) as (
        client,
        server,
    ):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(client.send, b"x")
            await until(lambda: client.statistics().queue_full_waits == 3)
            assert client.statistics().in_flight == 2
            for _ in range(5):
                await server.post_recv(bytearray(8))
        assert client.statistics().queue_full_waits == 3
        assert client.statistics().completed == {Opcode.SEND: 5}


async def test_a_listener_counts_its_requests() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:

        async def connect() -> None:
            async with aiordma.connect(ADDRESS, listener.port):
                pass

        async def be_rejected() -> None:
            with pytest.raises(aiordma.RdmaConnectionError):
                await aiordma.connect(ADDRESS, listener.port)

        async with anyio.create_task_group() as group:
            group.start_soon(connect)
            async with await listener.accept():
                pass
        async with anyio.create_task_group() as group:
            group.start_soon(be_rejected)
            request = await listener.request()
            assert listener.statistics().connection_requests == 2
            await request.reject()
        assert listener.statistics() == aiordma.types.ListenerStatistics(
            connection_requests=2, established=1, rejected=1
        )


async def test_a_shared_receive_queue_counts_the_receives() -> None:
    async with (
        aiordma.open_shared_receive(ADDRESS, buffers=8) as shared,
        members(2, shared) as (_, servers),
    ):
        for server in servers:
            assert await server.receive() == b"first"
        counters = shared.statistics()
        assert counters.completed == {Opcode.RECV: 2}
        assert counters.bytes_received == 10
        assert all(server.statistics().posted_receives == 0 for server in servers)
        assert_adds_up(counters)


@pytest.mark.capability("datagrams")
async def test_a_datagram_socket_counts_its_requests() -> None:
    async with (
        aiordma.open_datagram(ADDRESS, 0) as one,
        aiordma.open_datagram(ADDRESS, 0) as other,
    ):
        peer = await one.resolve(ADDRESS, other.port)
        await one.send(b"hello", peer)
        assert (await other.receive()).data == b"hello"
        assert one.statistics().completed == {Opcode.SEND: 1}
        assert one.statistics().bytes_sent == 5
        assert other.statistics().completed == {Opcode.RECV: 1}
        assert other.statistics().bytes_received == aiordma.verbs.GRH_BYTES + 5


@pytest.mark.promise("Counters add up")
async def test_a_device_sums_its_queues_also_those_that_have_ended() -> None:
    async with connected() as (client, server):
        name = client.device_name
        before = aiordma.statistics()[name]
        await client.send(b"x" * 7)
        assert await server.receive() == b"x" * 7
        await until(lambda: client.statistics().completed.get(Opcode.SEND) == 1)
        now = aiordma.statistics()[name]
        assert now.queues >= 2
        assert now.requests.bytes_sent == before.requests.bytes_sent + 7
        assert now.requests.bytes_received == before.requests.bytes_received + 7
        assert now.completions >= before.completions + 2
        assert now.polls > before.polls
        posted = now.requests.posted_receives
    after = aiordma.statistics()[name]
    assert after.queues == now.queues - 2
    assert after.requests.bytes_sent == now.requests.bytes_sent
    assert after.requests.posted_receives == posted
    assert_adds_up(after.requests)


async def test_a_device_counts_hits_of_the_registration_cache() -> None:
    array: Any = numpy.zeros(1 << 20, dtype=numpy.uint8)
    async with connected() as (client, server):
        before = aiordma.statistics()[client.device_name]
        remote = server.register(bytearray(1 << 20), REMOTE).remote()
        for _ in range(3):
            await client.write(array, remote)
        now = aiordma.statistics()[client.device_name]
        assert now.registration_cache_misses == before.registration_cache_misses + 1
        assert now.registration_cache_hits == before.registration_cache_hits + 2
