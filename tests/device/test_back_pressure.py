"""Back-pressure is waiting, or an error at the post; never a loss, and never an overrun."""

import logging

import anyio
import pytest

import aiordma
from tests.device.players import OWN_RECEIVES, connected, until
from tests.devices import ADDRESS
from tests.internals import endpoint_of, free_sends, hub_of, probes_of, queues_of

pytestmark = pytest.mark.anyio


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
@pytest.mark.capability("rnr")
async def test_a_fast_sender_waits_for_a_slow_receiver_and_nothing_is_lost() -> None:
    options = {"receive_buffers": 2, "receive_size": 64}
    async with connected(
        server=options, client={"options": aiordma.ConnectionOptions(max_send_wr=8)}
    ) as (client, server):
        most = 0

        async def send_all() -> None:
            for i in range(500):
                await client.send(b"message %d" % i)

        async with anyio.create_task_group() as group:
            group.start_soon(send_all)
            for i in range(500):
                if i % 50 == 0:
                    await anyio.sleep(0.02)
                most = max(most, server._messages.queue.arrived)
                assert await server.receive() == b"message %d" % i
        assert most <= 2  # what waits here is bounded by the receives, not by the sender
        assert free_sends(client) == 8


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
@pytest.mark.capability("rnr")
async def test_senders_that_wait_are_served_in_their_order() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(max_send_wr=2)}) as (
        client,
        server,
    ):
        count = 0

        async def send_some() -> None:
            nonlocal count
            for _ in range(40):
                count += 1
                await client.send(b"%d" % count)

        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(send_some)
            arrived = [int(await server.receive()) for _ in range(16 * 40)]
        assert arrived == sorted(arrived)


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
@pytest.mark.capability("rnr")
async def test_many_senders_share_the_slots_and_every_message_arrives_once() -> None:
    options = {"receive_buffers": 4}
    async with connected(
        server=options, client={"options": aiordma.ConnectionOptions(max_send_wr=4)}
    ) as (client, server):

        async def send(number: int) -> None:
            for i in range(10):
                await client.send(b"%d %d" % (number, i))

        received: list[bytes] = []
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(send, number)
            while len(received) < 200:
                received.append(await server.receive())
        assert sorted(received) == sorted(b"%d %d" % (n, i) for n in range(20) for i in range(10))
        for number in range(20):
            mine = [message for message in received if message.startswith(b"%d " % number)]
            assert mine == [b"%d %d" % (number, i) for i in range(10)]


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
@pytest.mark.capability("rnr")
async def test_posts_into_a_peer_without_receives_fill_the_queue_and_no_further() -> None:
    async with connected(
        server=OWN_RECEIVES, client={"options": aiordma.ConnectionOptions(max_send_wr=8)}
    ) as (client, server):
        sends = [client.post_send(b"%d" % i) for i in range(8)]
        with pytest.raises(aiordma.QueueFullError):
            client.post_send(b"one too many")
        assert not any(send.done() for send in sends)
        receives = []
        buffers = [bytearray(8) for _ in range(8)]
        for buffer in buffers:
            receives.append(server.post_recv(buffer))
        for i, receive in enumerate(receives):
            assert (await receive).byte_len == 1
            assert buffers[i][:1] == b"%d" % i
        for send in sends:
            await send
        assert free_sends(client) == 8


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
async def test_no_completion_queue_is_overrun_by_many_deep_connections() -> None:
    """Forty connections of depth 128 both ways reserve more than one shared queue holds."""
    options = aiordma.ConnectionOptions(max_send_wr=128, receive_buffers=128, receive_size=16)
    async with await aiordma.listen(ADDRESS, 0, options=options) as listener:
        accepted: list[aiordma.Connection] = []
        ours: list[aiordma.Connection] = []

        async def accept() -> None:
            while len(accepted) < 20:
                accepted.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            for _ in range(20):
                ours.append(await aiordma.connect(ADDRESS, listener.port, options=options))
        hub = hub_of(ours[0])
        assert sum(queue.reserved for queue in queues_of(hub)) == 40 * (256 + probes_of(ours[0]))
        assert len(queues_of(hub)) >= 2
        for queue in queues_of(hub):
            assert queue.reserved <= queue.queue.cqe

        # Everything that may be in flight is, before the loop polls once.
        requests = [c.post_send(b"%d" % i) for i in range(128) for c in ours]
        for request in requests:
            await request
        for connection in accepted:
            assert [await connection.receive() for _ in range(128)] == [
                b"%d" % i for i in range(128)
            ]
        async with anyio.create_task_group() as group:
            for connection in ours + accepted:
                group.start_soon(connection.aclose)
        assert [queue.reserved for queue in queues_of(hub)] == [0] * len(queues_of(hub))


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
async def test_concurrent_connects_reserve_exact_entries() -> None:
    options = aiordma.ConnectionOptions(max_send_wr=128, receive_buffers=128, receive_size=16)
    async with await aiordma.listen(ADDRESS, 0, options=options) as listener:
        accepted: list[aiordma.Connection] = []
        ours: list[aiordma.Connection] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async def connect() -> None:
            ours.append(await aiordma.connect(ADDRESS, listener.port, options=options))

        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(accept)
                group.start_soon(connect)
        hub = hub_of(ours[0])
        assert sum(queue.reserved for queue in queues_of(hub)) == 20 * (256 + probes_of(ours[0]))
        for queue in queues_of(hub):
            assert queue.reserved <= queue.queue.cqe
        for number, connection in enumerate(ours):
            await connection.send(b"%d" % number)
        messages = [await connection.receive() for connection in accepted]
        assert sorted(messages) == sorted(b"%d" % number for number in range(10))
        for connection in ours + accepted:
            await connection.aclose()
        await until(lambda: not any(queue.reserved for queue in queues_of(hub)))


@pytest.mark.capability("rnr")
async def test_a_message_that_waits_for_long_is_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "aiordma")
    async with connected(server={"receive_buffers": 1}) as (client, server):
        await client.send(b"fills the only receive")
        waiting, watch = client.post_send(b"waits"), endpoint_of(client).work.sends.watch
        for seconds in (100.0, 104.9):
            watch(seconds)
        assert not caplog.records
        for seconds in (105.0, 110.0):
            watch(seconds)
        (record,) = caplog.records
        assert client.peer_address is not None
        assert f":{client.peer_address[1]}: a message waits for more than 5 s" in record.message
        assert "back-pressure.md" in record.message
        await server.receive()
        await waiting


@pytest.mark.capability("rnr")
async def test_messages_that_the_peer_takes_are_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "aiordma")
    async with connected(server={"receive_buffers": 1}) as (client, server):
        await client.send(b"fills the only receive")
        for seconds in range(100, 130, 4):
            waiting = client.post_send(b"waits a little")
            endpoint_of(client).work.sends.watch(float(seconds))
            await server.receive()
            await waiting
        assert endpoint_of(client).work.requests.oldest_message == 0
        assert not caplog.records


@pytest.mark.capability("rnr")
async def test_the_device_is_watched_while_a_message_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma._endpoint.work_queues.LONG_WAIT", 0.5)
    caplog.set_level(logging.WARNING, "aiordma")
    async with connected(server={"receive_buffers": 1}) as (client, server):
        await client.send(b"fills the only receive")
        waiting = client.post_send(b"waits")
        await until(lambda: bool(caplog.records))
        await server.receive()
        await waiting
