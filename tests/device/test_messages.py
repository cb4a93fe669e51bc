"""Messages: every post is awaitable, every length arrives, in order, from any kind of buffer."""

import array
import mmap
from typing import Any

import anyio
import numpy
import pytest

import aiordma
from aiordma.verbs import WorkCompletionOpcode as Opcode
from tests.device.players import OWN_RECEIVES, both_ways, connected
from tests.internals import COPY_LIMIT, THREAD_LIMIT, pool_of, queue_pair_of

pytestmark = pytest.mark.anyio


def pattern(length: int, seed: int = 1) -> bytes:
    """Bytes in which a shifted, lost or doubled part shows."""
    return (b"".join(i.to_bytes(4, "big") for i in range(seed, seed + length // 4 + 1)))[:length]


# -- the awaitables ---------------------------------------------------------------------------


async def test_a_posted_send_and_receive_give_their_completions() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        target = bytearray(64)
        receive = server.post_recv(target)
        assert not receive.done()
        send = client.post_send(b"hello")
        sent, received = await send, await receive
        assert sent.operation is Opcode.SEND
        assert sent.ok
        assert (received.operation, received.byte_len) == (Opcode.RECV, 5)
        assert received.wr_id == receive.wr_id
        assert target[:6] == b"hello\0"


async def test_gather_and_scatter_keep_the_order_of_the_parts() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        target = server.register(bytearray(30))
        receive = server.post_recvv([target[20:30], target[0:4], target[10:20]])
        source = client.register(bytearray(b"0123456789abcdefghijklmnopqrstuv"))
        send = client.post_sendv([source[16:28], source[0:2], source[10:14]])
        await send
        assert (await receive).byte_len == 18
        message = b"ghijklmnopqr01abcd"
        assert target.view[20:30] == message[:10]
        assert target.view[0:4] == message[10:14]
        assert target.view[10:14] == message[14:]
        assert target.view[14:20] == bytes(6)


async def test_sendv_gathers_registered_and_plain_parts_together() -> None:
    async with connected() as (client, server):
        region = client.register(bytearray(b"<registered>"))
        await client.sendv([b"plain", region[1:11], bytearray(b"!")])
        assert await server.receive() == b"plainregistered!"
        await client.sendv([b"plain" * 200, region[:]])
        assert await server.receive() == b"plain" * 200 + b"<registered>"


async def test_sendv_takes_any_iterable_of_parts() -> None:
    async with connected() as (client, server):
        await client.sendv(part for part in (b"from ", b"a ", b"generator"))
        assert await server.receive() == b"from a generator"
        await client.post_sendv(iter([b"from ", b"an iterator"]))
        assert await server.receive() == b"from an iterator"


async def test_a_request_may_be_awaited_by_several_and_again_when_done() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive = server.post_recv(bytearray(16))
        seen: list[aiordma.verbs.WorkCompletion] = []

        async def look() -> None:
            seen.append(await receive)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(look)
            await anyio.wait_all_tasks_blocked()
            assert not seen
            await client.send(b"news")
        assert len(seen) == 3
        assert await receive == await receive == seen[0]
        assert receive.done()
        assert receive.result() is seen[0]
        assert receive.exception() is None


async def test_a_result_before_the_end_is_an_error_and_not_a_wait() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive = server.post_recv(bytearray(16))
        with pytest.raises(RuntimeError, match="has not ended"):
            receive.result()
        assert receive.exception() is None
        await client.send(b"now")
        await receive


async def test_done_callbacks_run_once_at_the_end_or_at_once() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive = server.post_recv(bytearray(16))
        called: list[aiordma.WorkRequest] = []
        receive.add_done_callback(called.append)
        assert called == []
        await client.send(b"x")
        await receive
        assert called == [receive]
        receive.add_done_callback(called.append)
        assert called == [receive, receive]


async def test_a_failing_callback_harms_neither_the_waiter_nor_later_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (client, server):
        send = client.post_send(b"one")

        def fail(_request: aiordma.WorkRequest) -> None:
            raise ZeroDivisionError("the user's mistake")

        reached: list[aiordma.WorkRequest] = []
        send.add_done_callback(fail)
        send.add_done_callback(reached.append)
        await send
        assert reached == [send]
        assert "the user's mistake" in caplog.text
        assert await server.receive() == b"one"
        await both_ways(client, server)


async def test_a_pipeline_of_64_sends_and_receives_matches_one_to_one() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        region = server.register(bytearray(64 * 16))
        receives = [server.post_recv(region[i * 16 : i * 16 + 16]) for i in range(64)]
        sends = [client.post_send(b"message %d" % i) for i in range(64)]
        for send in reversed(sends):
            assert (await send).wr_id == send.wr_id
        for i, receive in enumerate(receives):
            length = (await receive).byte_len
            assert bytes(region.view[i * 16 : i * 16 + length]) == b"message %d" % i
        assert len({request.wr_id for request in sends + receives}) == 128


# -- lengths and order ------------------------------------------------------------------------


@pytest.mark.promise("Messages arrive whole and in order")
async def test_every_kind_of_send_arrives_in_order() -> None:
    """Inline, copied into the pool, registered on the fly: three ways, one order."""
    largest = COPY_LIMIT + 4096
    # One for each: not every device makes a sender wait for a receive, and none of these waits.
    options = {"receive_buffers": 13, "receive_size": largest}
    async with connected(server=options) as (client, server):
        inline = queue_pair_of(client).capacity.max_inline_data
        assert 0 < inline < COPY_LIMIT
        lengths = [0, 1, inline - 1, inline, inline + 1, 4095, 4096, 4097]
        lengths += [COPY_LIMIT - 1, COPY_LIMIT, COPY_LIMIT + 1, largest, 0]
        assert len(lengths) == options["receive_buffers"]

        async def send_all() -> None:
            for seed, length in enumerate(lengths):
                await client.send(pattern(length, seed))

        async with anyio.create_task_group() as group:
            group.start_soon(send_all)
            for seed, length in enumerate(lengths):
                assert await server.receive() == pattern(length, seed)
        assert pool_of(client).leased == 16 + 13  # both ends' receives, nothing else


async def test_a_message_larger_than_the_thread_limit_is_registered_beside_the_loop() -> None:
    length = THREAD_LIMIT + 1
    options = {"receive_buffers": 1, "receive_size": length}
    async with connected(server=options) as (client, server):
        data = pattern(length)
        async with anyio.create_task_group() as group:
            group.start_soon(client.send, data)
            received = await server.receive()
        assert received == data


async def test_a_message_of_exactly_the_receive_size_fits() -> None:
    async with connected(server={"receive_size": 1000}) as (client, server):
        await client.send(pattern(1000))
        assert await server.receive() == pattern(1000)
        await both_ways(client, server)


@pytest.mark.promise("Messages arrive whole and in order")
async def test_messages_both_ways_at_once_keep_each_ways_order() -> None:
    # A receive for each: not every device makes a sender wait for one.
    options = {"receive_buffers": 51}
    async with connected(server=options, client=options) as (client, server):
        await client.send(b"I go first")
        await server.receive()

        async def talk(connection: aiordma.Connection) -> None:
            for i in range(50):
                await connection.send(b"%d" % i)

        async def listen(connection: aiordma.Connection) -> None:
            assert [await connection.receive() for _ in range(50)] == [b"%d" % i for i in range(50)]

        async with anyio.create_task_group() as group:
            for connection in (client, server):
                group.start_soon(talk, connection)
                group.start_soon(listen, connection)


async def test_a_received_message_is_the_programs_own() -> None:
    async with connected(server={"receive_buffers": 1}) as (client, server):
        await client.send(b"first")
        first = await server.receive()
        await client.send(b"SECOND")
        await server.receive()
        assert first == b"first"


# -- kinds of buffers -------------------------------------------------------------------------


def _mmap() -> mmap.mmap:
    memory = mmap.mmap(-1, 4096)
    memory[:] = pattern(4096)
    return memory


BUFFERS: dict[str, Any] = {
    "bytes": lambda: pattern(4096),
    "bytearray": lambda: bytearray(pattern(4096)),
    "memoryview": lambda: memoryview(bytearray(b"xx" + pattern(4096) + b"yy"))[2:-2],
    "array": lambda: array.array("Q", pattern(4096)),
    "mmap": _mmap,
    "numpy": lambda: numpy.frombuffer(pattern(4096), dtype=">f8").reshape(8, 64).copy(),
    "numpy structured": lambda: numpy.frombuffer(pattern(4096), dtype="<i4,<f4").copy(),
}


@pytest.mark.parametrize("kind", BUFFERS)
async def test_every_kind_of_buffer_can_be_sent_plain_and_registered(kind: str) -> None:
    async with connected() as (client, server):
        buffer = BUFFERS[kind]()
        await client.send(buffer)
        assert await server.receive() == pattern(4096)
        region = client.register(buffer)
        assert len(region) == 4096
        await client.send(region)
        assert await server.receive() == pattern(4096)
        await client.send(region[8:16])
        assert await server.receive() == pattern(4096)[8:16]
        region.close()


@pytest.mark.parametrize("kind", [kind for kind in BUFFERS if kind != "bytes"])
async def test_every_kind_of_writable_buffer_can_be_received_into(kind: str) -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        buffer = BUFFERS[kind]()
        plain = server.post_recv(buffer)
        await client.send(bytes(range(256)) * 16)
        await plain
        assert bytes(buffer) == bytes(range(256)) * 16
        region = server.register(buffer)
        registered = server.post_recv(region)
        await client.send(pattern(4096))
        await registered
        assert bytes(buffer) == pattern(4096)
        region.close()
