"""Channels and comms on the device under test: what arrives, who waits, how they end."""

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import dask
import numpy
import pytest
from distributed.comm.core import CommClosedError, connect, listen
from distributed.protocol.serialize import to_serialize

import aiordma
from aiordma.integrations.dask import RdmaComm, RdmaListener
from aiordma.integrations.dask import frames as wire
from aiordma.integrations.dask.channel import Channel
from aiordma.integrations.dask.frames import (
    BULK,
    CONTROLS,
    CREDITS,
    HELLO,
    MESSAGE_BYTES,
    ProtocolError,
)
from tests.connections import connect_to
from tests.dask.test_frames import announced
from tests.devices import ADDRESS

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RECEIVES: Any = {"receive_buffers": CREDITS + CONTROLS, "receive_size": MESSAGE_BYTES}


@asynccontextmanager
async def comms() -> AsyncIterator[tuple[RdmaComm, RdmaComm]]:
    accepted: asyncio.Queue[RdmaComm] = asyncio.Queue()
    async with listen(f"rdma://{ADDRESS}", accepted.put) as listener:
        client = await connect(listener.contact_address)
        server = await accepted.get()
        try:
            yield client, server
        finally:
            await client.close()
            await server.close()


@asynccontextmanager
async def channel_and_peer() -> AsyncIterator[tuple[Channel, aiordma.Connection]]:
    """A channel, and a peer that sends what a test wants."""
    async with aiordma.listen(ADDRESS, **RECEIVES) as listener:
        peer, connection = await connect_to(listener, ADDRESS, **RECEIVES)
    async with peer, connection:
        channel = Channel(connection, 1 << 30, is_first=False)
        try:
            yield channel, peer
        finally:
            await channel.aclose()


async def read_handshake(channel: Channel, peer: aiordma.Connection) -> None:
    await peer.send(announced(0, 0, 0))
    assert await channel.read() == []


# -- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, MESSAGE_BYTES, BULK - 1, BULK, 5 * BULK + 3, 3 << 20])
async def test_array_arrives_in_memory_of_its_own(length: int) -> None:
    array = numpy.arange(length, dtype="u1")
    async with comms() as (client, server):
        writing = asyncio.create_task(client.write({"a": to_serialize(array), "text": "x" * 99}))
        message = await server.read()
        await writing
    assert message["text"] == "x" * 99
    assert (message["a"] == array).all()
    assert message["a"].flags.writeable


async def test_many_buffers_arrive_in_order() -> None:
    arrays = [numpy.full(BULK + number, number, "u1") for number in range(2 * wire.BATCH + 3)]
    async with comms() as (client, server):
        writing = asyncio.create_task(client.write([to_serialize(each) for each in arrays]))
        arrived = await server.read()
        await writing
    assert all((a == b).all() for a, b in zip(arrived, arrays, strict=True))


async def test_array_is_sent_from_its_own_memory() -> None:
    array = numpy.ones(1 << 18)
    async with comms() as (client, server):
        cache = client._channel.connection.registrations
        misses, hits = cache.misses, cache.hits
        for _ in range(3):
            writing = asyncio.create_task(client.write(to_serialize(array)))
            arrived = await server.read()
            await writing
        assert arrived.sum() == array.sum()
        assert cache.registered >= array.nbytes
        assert (cache.misses - misses, cache.hits - hits) == (1, 2)


async def test_both_sides_write_large_messages_at_once() -> None:
    array = numpy.ones(1 << 18)
    async with comms() as (client, server):
        tasks = [asyncio.create_task(each.write(to_serialize(array))) for each in (client, server)]
        for each in (client, server):
            assert (await each.read()).sum() == array.sum()
        await asyncio.gather(*tasks)


# -- back-pressure --------------------------------------------------------------------------------


async def test_writer_waits_for_a_peer_that_does_not_read() -> None:
    async with comms() as (client, server):
        await client.write("before")  # the handshake and this one took credits, too
        assert await server.read() == "before"
        sent = 0
        while client._channel._sent - client._channel._peer_took < CREDITS:
            await client.write(sent)
            sent += 1
        writing = asyncio.create_task(client.write(sent))
        while len(server._channel._complete) < sent:
            await asyncio.sleep(0)
        assert not writing.done()
        assert [await server.read() for _ in range(sent + 1)] == list(range(sent + 1))
        await writing


async def test_one_task_writes_a_large_message_and_then_reads_it() -> None:
    array = numpy.arange(1 << 18)
    async with comms() as (client, server):
        await client.write(to_serialize(array))
        await server.write(to_serialize(-array))
        assert (await server.read() == array).all()
        assert (await client.read() == -array).all()


async def test_second_large_message_waits_for_a_peer_that_does_not_read() -> None:
    async with comms() as (client, server):
        await client.write(to_serialize(numpy.ones(BULK)))
        writing = asyncio.create_task(client.write(to_serialize(numpy.zeros(BULK))))
        while not server._channel._inbox:
            await asyncio.sleep(0)
        assert not writing.done()
        assert (await server.read()).sum() == BULK
        await writing
        assert (await server.read()).sum() == 0


# -- many frames ----------------------------------------------------------------------------------

FRAMES = 1 << 16
TURN = 1 << 12
"""The most frames that may be handled before other tasks run."""
SHAPES: dict[str, list[int]] = {
    "empty": [0] * FRAMES,
    "small": [1] * FRAMES,
    "shards": [BULK] + [1 << 63] * (FRAMES - 1),
}


async def rounds_until(condition: Callable[[], object]) -> int:
    """Count how often this task runs until the condition is true."""
    rounds = 0
    while not condition():
        await asyncio.sleep(0)
        rounds += 1
    return rounds


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
async def test_other_tasks_run_while_many_frames_arrive(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = sum(length for length in lengths if length < BULK)
    head = struct.pack(f"!{FRAMES}Q", *lengths) + bytes(small)

    async def take(buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = head if buffer.nbytes == len(head) else bytes(buffer.nbytes)

    async with channel_and_peer() as (channel, _):
        monkeypatch.setattr(channel, "_take", take)
        announcement = wire.parse_announcement(
            announced(FRAMES, len(head), BULK * lengths.count(BULK)), 1 << 30
        )
        receiving = asyncio.create_task(channel._receive(announcement))
        rounds = await rounds_until(receiving.done)
        assert len(await receiving) == FRAMES
        assert rounds >= 2 * FRAMES // TURN  # the table is checked, and then the frames are made


async def test_other_tasks_run_while_many_frames_are_packed() -> None:
    async with channel_and_peer() as (channel, peer):
        await peer.send(announced(0, 0, 0))  # an accepted side sends nothing before
        await channel.read()
        writing = asyncio.create_task(channel.write([memoryview(b"")] * FRAMES))
        assert await rounds_until(lambda: channel._sent) >= FRAMES // TURN
        channel.abort()
        with suppress(aiordma.RdmaError):
            await writing


async def test_messages_arrive_in_the_order_of_their_writes() -> None:
    """Also if arranging the frames of the first one takes several turns."""
    frames = [b"frame"] * (3 * wire.TURN)
    async with channel_and_peer() as (channel, peer):
        other = Channel(peer, 1 << 30, is_first=True)
        await other.write([b"hello"])
        assert await channel.read() == [b"hello"]
        async with anyio.create_task_group() as group:
            group.start_soon(other.write, frames)
            group.start_soon(other.write, [b"the second"])
            assert await channel.read() == frames
            assert await channel.read() == [b"the second"]
        await other.aclose()


async def test_abort_ends_the_unpacking_of_many_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer[:] = bytes(buffer.nbytes)

    async with channel_and_peer() as (channel, peer):
        monkeypatch.setattr(channel, "_take", take)
        await read_handshake(channel, peer)
        await peer.send(announced(1 << 20, 8 << 20, 0))
        await rounds_until(lambda: channel._fetching)
        channel.abort()
        assert await rounds_until(lambda: channel._fetching is None) <= 2


async def test_many_frames_arrive_as_they_were() -> None:
    sent = [number.to_bytes(4) for number in range(FRAMES)]
    async with comms() as (client, server):
        writing = asyncio.create_task(client._channel.write(sent))
        assert list(map(bytes, await server._channel.read())) == sent
        await writing


# -- the end --------------------------------------------------------------------------------------


async def test_everything_that_was_written_arrives_before_the_end() -> None:
    async with comms() as (client, server):
        for number in range(CREDITS - 2):
            await client.write(number)
        await client.close()
        assert [await server.read() for _ in range(CREDITS - 2)] == list(range(CREDITS - 2))
        with pytest.raises(CommClosedError):
            await server.read()
        assert server.closed()


async def test_idle_comm_is_closed_when_its_peer_leaves() -> None:
    async with comms() as (client, server):
        client.abort()
        await server._channel.connection.ended()
        while not server.closed():
            await asyncio.sleep(0)
        with pytest.raises(CommClosedError):
            await server.write("lost")


async def test_abort_ends_a_write_of_another_task() -> None:
    async with comms() as (client, server):
        await client.write(to_serialize(numpy.ones(BULK)))
        writing = asyncio.create_task(client.write(to_serialize(numpy.ones(BULK))))
        while not server._channel._inbox:
            await asyncio.sleep(0)
        client.abort()
        with pytest.raises(CommClosedError):
            await writing


async def test_abort_ends_a_read_of_another_task() -> None:
    async with channel_and_peer() as (channel, peer):
        await read_handshake(channel, peer)
        reading = asyncio.create_task(channel.read())
        await peer.send(announced(1, 8, BULK, BULK.to_bytes(8)))
        await peer.receive()  # READY: the bulk is being received
        channel.abort()
        with pytest.raises(aiordma.ClosedError):
            await reading
        assert channel.has_ended


async def test_end_within_a_large_message_is_raised_by_read() -> None:
    async with channel_and_peer() as (channel, peer):
        await read_handshake(channel, peer)
        await peer.send(announced(1, 8, BULK, BULK.to_bytes(8)))
        await peer.receive()
        await peer.aclose()
        await channel.connection.ended()
        with pytest.raises((aiordma.RdmaError, anyio.EndOfStream)):
            await channel.read()
        assert channel.has_ended


async def test_no_memory_for_a_large_message_is_raised_by_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(length: int) -> None:
        raise MemoryError(f"no {length} bytes")

    monkeypatch.setattr("aiordma.integrations.dask.channel._bulk.take", no_memory)
    async with channel_and_peer() as (channel, peer):
        await read_handshake(channel, peer)
        await peer.send(announced(1, 8, BULK, BULK.to_bytes(8)))
        await peer.ended()
        with pytest.raises(MemoryError, match="no 65536 bytes"):
            await channel.read()


async def test_close_sends_what_another_task_is_writing() -> None:
    array = numpy.ones(1 << 18)
    async with comms() as (client, server):
        await client.write(to_serialize(array))
        writing = asyncio.create_task(client.write(to_serialize(array)))
        while not server._channel._inbox:
            await asyncio.sleep(0)
        closing = asyncio.create_task(client.close())
        for _ in range(2):
            assert (await server.read()).sum() == array.sum()
        await writing
        await closing


class Unusual(BaseException):
    """No Exception, and no cancellation."""


@pytest.mark.parametrize("kind", [BufferError, Unusual])
async def test_failed_write_closes_the_comm(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise kind

    async with comms() as (client, server):
        monkeypatch.setattr(client._channel, "write", fail)
        with pytest.raises(kind):
            await client.write("lost")
        assert client.closed()
        with pytest.raises(CommClosedError):
            await server.read()


async def test_listener_stopped_during_an_accept_closes_the_comm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = RdmaListener._handle

    async def stop_and_handle(self: RdmaListener, comm: RdmaComm) -> None:
        self.stop()
        await handle(self, comm)

    monkeypatch.setattr(RdmaListener, "_handle", stop_and_handle)
    async with listen(f"rdma://{ADDRESS}", lambda comm: None) as listener:
        with pytest.raises(CommClosedError):
            await connect(listener.contact_address, timeout=30)


async def test_dropped_comm_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    accepted: asyncio.Queue[RdmaComm] = asyncio.Queue()
    async with listen(f"rdma://{ADDRESS}", accepted.put) as listener:
        client = await connect(listener.contact_address)
        server = await accepted.get()
        name = repr(client)
        connection = client._channel.connection
        del client
        with pytest.raises(CommClosedError):
            await server.read()
        await connection.ended()
        await connection.aclose()
        await server.close()
    assert f"closing {name}, which was dropped" in caplog.text


async def test_accepted_side_sends_nothing_first() -> None:
    async with channel_and_peer() as (channel, peer):
        writing = asyncio.create_task(channel.write([memoryview(b"hello")]))
        await asyncio.sleep(0)
        assert channel._sent == 0
        await peer.send(announced(0, 0, 0))
        assert (await peer.receive()).endswith(b"hello")
        await writing


# -- hostile peers --------------------------------------------------------------------------------

VIOLATIONS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "kind 0 that was not expected"),
    "unknown kind": (b"\x63", "kind 99"),
    "READY for nothing": (wire.ready([]), "kind 2 that was not expected"),
    "DONE for nothing": (bytes([wire.DONE]), "kind 3 that was not expected"),
    "CREDIT for nothing": (wire.credit(1), "a CREDIT for 1 messages: 0 were sent"),
    "endless message": (announced(1, 8, 1 << 62, bytes(8)), "at most 1073741824 are received"),
    "false table": (announced(1, 9, 0, bytes(9)), "a table of 8 bytes"),
}


@pytest.mark.parametrize(("data", "text"), VIOLATIONS.values(), ids=VIOLATIONS)
async def test_violation_ends_the_connection(data: bytes, text: str) -> None:
    async with channel_and_peer() as (channel, peer):
        await peer.send(data)
        with pytest.raises(ProtocolError, match=text):
            await channel.read()
        channel.abort()
        assert isinstance(await peer.ended(), aiordma.DisconnectedError)


async def test_messages_without_credits_end_the_connection() -> None:
    async with channel_and_peer() as (channel, peer):
        for _ in range(CREDITS + 1):
            await peer.send(announced(0, 0, 0))
        await peer.ended()
        assert "more than 16 messages without a CREDIT" in str(channel.cause)


async def test_ranges_of_other_lengths_end_the_connection() -> None:
    async with channel_and_peer() as (channel, peer):
        region = peer.register(
            bytearray(BULK), aiordma.Access.REMOTE_WRITE | aiordma.Access.LOCAL_WRITE
        )
        await peer.send(announced(0, 0, 0))  # an accepted side sends nothing before
        writing = asyncio.create_task(channel.write([memoryview(bytes(BULK + 1))]))
        await peer.receive()
        await peer.send(wire.ready([region.remote()]))
        with pytest.raises(ProtocolError, match=r"a READY for \[65536\] bytes, where \[65537\]"):
            await writing


async def test_peer_cannot_write_after_it_has_said_done() -> None:
    async with channel_and_peer() as (channel, peer):
        await read_handshake(channel, peer)
        reading = asyncio.create_task(channel.read())
        await peer.send(announced(1, 8, BULK, BULK.to_bytes(8)))
        (memory,) = wire.parse_ready(await peer.receive())
        await peer.write(b"a" * BULK, memory)
        await peer.send(bytes([wire.DONE]))
        (frame,) = await reading
        with suppress(aiordma.RdmaError):  # on iWARP, a WRITE completes before it is refused
            await peer.write(b"b" * BULK, memory)
        assert isinstance(await peer.ended(), aiordma.RdmaError)
        assert frame == b"a" * BULK


Attack = Callable[[aiordma.Connection], Any]
FIRST: dict[str, bytes] = {
    "violation": b"\x63",
    "no frames": announced(0, 0, 0),
    "no handshake": announced(1, 9, 0, (1).to_bytes(8) + b"\x01"),
}


@pytest.mark.parametrize("data", FIRST.values(), ids=FIRST)
async def test_listener_outlives_a_hostile_peer(data: bytes) -> None:
    async def echo(comm: RdmaComm) -> None:
        await comm.write(await comm.read())

    async with listen(f"rdma://{ADDRESS}", echo) as listener:
        port = int(listener.contact_address.rpartition(":")[2])
        async with aiordma.connect(ADDRESS, port, private_data=HELLO, **RECEIVES) as peer:
            await peer.send(data)
            assert isinstance(await peer.ended(), aiordma.DisconnectedError)
        comm = await connect(listener.contact_address)
        await comm.write("hello")
        assert await comm.read() == "hello"
        await comm.close()


async def test_other_programs_are_rejected_with_a_reason() -> None:
    async with listen(f"rdma://{ADDRESS}", lambda comm: None) as listener:
        port = int(listener.contact_address.rpartition(":")[2])
        with pytest.raises(aiordma.RejectedError) as caught:
            await aiordma.connect(ADDRESS, port, private_data=b"aiordma dask 9")
        assert caught.value.private_data.startswith(b"this listener is one of Dask's")


async def test_listener_of_another_program_is_a_final_error() -> None:
    async with aiordma.listen(ADDRESS) as listener:
        serving = asyncio.create_task(listener.serve(lambda connection: connection.ended()))
        with pytest.raises(CommClosedError, match="another program, or another version"):
            await connect(f"rdma://{ADDRESS}:{listener.port}", timeout=30)
        serving.cancel()


async def test_refused_connection_names_the_reason() -> None:
    async with aiordma.listen(ADDRESS) as listener:
        port = listener.port
    with pytest.raises(OSError, match="Timed out") as caught:
        await connect(f"rdma://{ADDRESS}:{port}", timeout=0.3)
    assert isinstance(caught.value.__cause__, OSError)


async def test_encryption_is_not_promised() -> None:
    with pytest.raises(RuntimeError, match="requires encryption"):
        await connect(f"rdma://{ADDRESS}:1", require_encryption=True)


# -- configuration --------------------------------------------------------------------------------

WRONG_SIZES = ["20 gigs", "all", -1, 0, "0", True, float("inf"), float("nan"), "1e999", {"GiB": 20}]


@pytest.mark.parametrize("value", WRONG_SIZES, ids=str)
async def test_wrong_max_message_size_is_named_before_anything_is_opened(value: object) -> None:
    async with listen(f"rdma://{ADDRESS}", lambda comm: None) as listener:
        text = (
            r"distributed\.comm\.rdma\.max-message-size in Dask's configuration is "
            rf"{re.escape(repr(value))}: expected .* such as \"20GiB\""
        )
        with dask.config.set({"distributed.comm.rdma.max-message-size": value}):
            with pytest.raises(ValueError, match=text):
                await connect(listener.contact_address, timeout=30)
            with pytest.raises(ValueError, match=text):
                await listen(f"rdma://{ADDRESS}", lambda comm: None)


@pytest.mark.parametrize("value", [1 << 20, "1MiB", "1048576", 1048576.0])
async def test_max_message_size_limits_a_message(value: object) -> None:
    async with listen(f"rdma://{ADDRESS}", lambda comm: None) as listener:
        with dask.config.set({"distributed.comm.rdma.max-message-size": value}):
            comm = await connect(listener.contact_address)
        assert comm._channel._most == 1 << 20
        await comm.close()


@pytest.mark.parametrize("first", [announced(1, 8, 1 << 29, bytes(8)), announced(1, 1 << 20, 0)])
async def test_handshake_with_bulk_ends_the_connection(first: bytes) -> None:
    async with channel_and_peer() as (channel, peer):
        await peer.send(first)
        with pytest.raises(ProtocolError, match=r"the first message, a handshake, has \d+ bytes"):
            await channel.read()


async def test_memory_is_taken_after_the_handshake_is_read() -> None:
    async with channel_and_peer() as (channel, peer):
        await peer.send(announced(0, 0, 0))
        await peer.send(announced(1, 8, BULK, BULK.to_bytes(8)))
        with anyio.move_on_after(0.2):
            await peer.receive()
            raise AssertionError("memory was offered before the handshake was read")
        assert await channel.read() == []
        (memory,) = wire.parse_ready(await peer.receive())
        assert memory.length == BULK
