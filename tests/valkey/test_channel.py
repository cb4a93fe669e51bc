"""The bytes over the channel, and servers that do what no Valkey server does."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

import aiordma
from aiordma.integrations.valkey import ValkeyProtocolError, open_connection
from aiordma.integrations.valkey.channel import PARTS, RECEIVES, ValkeyChannel
from aiordma.integrations.valkey.control import Opcode, pack_memory, pack_opcode
from tests.devices import ADDRESS
from tests.valkey.server import (
    BUFFER_BYTES,
    ServerChannel,
    accept,
    reader_and_writer,
    serving,
)

pytestmark = [pytest.mark.anyio, pytest.mark.capability("immediate")]

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(50_000):
        writer.write(data)
        await writer.drain()


@asynccontextmanager
async def client_of(port: int, **options: Any) -> AsyncIterator[Pair]:
    reader, writer = await open_connection(ADDRESS, port, **options)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


SMALL_BUFFER = 65536


@asynccontextmanager
async def client_and_server() -> AsyncIterator[
    tuple[aiordma.Connection, ServerChannel, asyncio.StreamReader, asyncio.StreamWriter]
]:
    """A client with a small buffer, and the server's half of the protocol."""
    async with await aiordma.listen(ADDRESS) as listener:
        connecting = asyncio.ensure_future(
            open_connection(ADDRESS, listener.port, buffer_size=SMALL_BUFFER)
        )
        peer, channel = await accept(listener)
        async with peer:
            await channel.begin()
            reader, writer = await connecting
            yield peer, channel, reader, writer
            writer.close()


async def write_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"PING\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


def channel_of(writer: asyncio.StreamWriter) -> ValkeyChannel:
    channel: ValkeyChannel = writer.transport._channel  # type: ignore[attr-defined]
    return channel


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer_size", [65536, 65537, 1 << 20])
async def test_bytes_come_back_in_order_round_every_buffer(buffer_size: int) -> None:
    sizes = [1, 2, 65535, 65536, 65537, 4 << 16, (4 << 16) + 1, BUFFER_BYTES - 1, 7, 1 << 20]
    async with serving(echo) as port, client_of(port, buffer_size=buffer_size) as (reader, writer):

        async def write() -> None:
            for number, size in enumerate(sizes):
                writer.write(bytes([number + 1]) * size)
                await writer.drain()

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            for number, size in enumerate(sizes):
                assert await reader.readexactly(size) == bytes([number + 1]) * size


async def test_thousands_of_small_writes_wait_for_what_the_server_has_handled() -> None:
    highest = 0
    async with serving(echo) as port, client_of(port) as (reader, writer):
        channel = channel_of(writer)

        async def write() -> None:
            for number in range(3000):
                writer.write(number.to_bytes(2, "big"))
                while writer.transport.get_write_buffer_size():  # two that wait would be joined
                    await asyncio.sleep(0)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            for number in range(3000):
                assert await reader.readexactly(2) == number.to_bytes(2, "big")
                highest = max(highest, channel._unhandled)
        assert channel.most_unhandled // 2 <= highest <= channel.most_unhandled + 2


async def test_a_server_that_handles_nothing_holds_its_writer_back() -> None:
    # It posts receives again, but never answers: no more messages than it has receives may be sent.
    class Silent(ServerChannel):
        def _take_control(self, message: bytes) -> None:
            if message != pack_opcode(Opcode.GET_SERVER_FEATURE):
                super()._take_control(message)

    async with await aiordma.listen(ADDRESS) as listener:
        connecting = asyncio.ensure_future(open_connection(ADDRESS, listener.port))
        connection, channel = await accept(listener, kind=Silent)
        await channel.begin()
        _, writer = await connecting
        ours = channel_of(writer)
        while ours._unhandled < ours.most_unhandled or ours._in_flight:
            if ours._unhandled < ours.most_unhandled:
                writer.write(b"x")  # one at a time: those that wait would be joined
            await asyncio.sleep(0.001)
        for _ in range(20):
            writer.write(b"x")  # nothing moves any more
            await asyncio.sleep(0.01)
        assert ours._unhandled <= ours.most_unhandled + 2
        assert writer.transport.get_write_buffer_size() >= 18
        writer.transport.abort()
        await connection.aclose()


async def test_a_reader_that_does_not_read_holds_the_server_back() -> None:
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        while True:
            writer.write(bytes(16384))
            written += 16384
            await writer.drain()

    async with serving(flood) as port, client_of(port, buffer_size=65536, limit=4096) as pair:
        before = -1
        while before != written:  # until nothing moves for a while
            before = written
            await asyncio.sleep(0.2)
        # The client's buffer, what its reader took before it paused, the server's own buffers.
        assert written < 1 << 20
        assert await pair[0].readexactly(1 << 20) == bytes(1 << 20)


async def test_the_server_writes_on_while_the_client_reads() -> None:
    async with client_and_server() as (_, channel, reader, writer):
        transport: Any = writer.transport
        transport.pause_reading()
        parts = [bytes([number]) * (SMALL_BUFFER // PARTS) for number in range(PARTS)]
        for part in parts:
            with anyio.fail_after(10):
                while not channel.can_write:  # the next one is announced, and nothing is read
                    await asyncio.sleep(0.001)
            assert channel.write(part) == len(part)
        assert not channel.can_write
        transport.resume_reading()
        assert await reader.readexactly(SMALL_BUFFER) == b"".join(parts)
        with anyio.fail_after(10):
            while not channel.can_write:
                await asyncio.sleep(0.001)


async def test_what_was_written_before_a_close_arrives() -> None:
    received = bytearray()
    done = asyncio.Event()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            received.extend(data)
        done.set()

    async with serving(keep) as port:
        async with client_of(port) as (_, writer):
            writer.write(bytes(range(256)) * 8192)
        await done.wait()
    assert received == bytes(range(256)) * 8192


async def test_the_end_of_the_server_is_the_end_of_the_bytes() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all of it")

    async with serving(answer) as port, client_of(port) as (reader, _):
        assert await reader.read() == b"all of it"


async def test_one_direction_cannot_be_ended() -> None:
    async with serving(echo) as port, client_of(port) as (_, writer):
        assert not writer.can_write_eof()
        with pytest.raises(NotImplementedError, match="close"):
            writer.write_eof()
        with pytest.raises(TypeError, match="is not supported by start_tls"):
            await writer.start_tls(ssl.create_default_context())


# -- opening --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buffer_size": 4096}, r"open_connection\(\): buffer_size"),
        ({"buffer_size": 1 << 25}, r"open_connection\(\): buffer_size"),
        ({"close_timeout": -1}, r"open_connection\(\): close_timeout"),
        ({"keepalive": -1}, r"open_connection\(\): keepalive"),
        ({"port": 1 << 16}, r"open_connection\(\): port"),
    ],
)
async def test_options_out_of_range_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        await open_connection(ADDRESS, **{"port": 1, **options})


async def test_options_that_the_protocol_decides_are_unknown() -> None:
    for option in ("receive_buffers", "rnr_retry_count", "queue_depth"):
        given: dict[str, Any] = {option: 16}
        with pytest.raises(TypeError, match=rf"^open_connection\(\) has no parameter '{option}': "):
            await open_connection(ADDRESS, 1, **given)


async def test_a_peer_that_announces_nothing_is_not_waited_for() -> None:
    """The wait for the accept and for the announcement share the time limit."""
    async with await aiordma.listen(ADDRESS) as listener:
        began = time.monotonic()
        connecting = asyncio.ensure_future(open_connection(ADDRESS, listener.port, timeout=3))
        await asyncio.sleep(2)
        async with await listener.accept():
            with pytest.raises(aiordma.ConnectTimeoutError, match=r"no memory within 3 s"):
                await connecting
        assert 2.9 < time.monotonic() - began < 4.9  # 5 if each had all of it


# -- peers that violate the protocol --------------------------------------------------------------

Attack = Callable[[aiordma.Connection, ServerChannel], Awaitable[object]]


async def short_message(peer: aiordma.Connection, _: ServerChannel) -> None:
    await peer.post_send(b"hello")


async def unknown_opcode(peer: aiordma.Connection, _: ServerChannel) -> None:
    await peer.post_send(b"\xff\xff" + bytes(30))


async def impossible_memory(peer: aiordma.Connection, _: ServerChannel) -> None:
    await peer.post_send(b"\x00\x03" + bytes(14) + b"\xff" * 16)


async def empty_memory(peer: aiordma.Connection, _: ServerChannel) -> None:
    await peer.post_send(b"\x00\x03" + bytes(30))


async def memory_twice(peer: aiordma.Connection, channel: ServerChannel) -> None:
    channel._arrived = BUFFER_BYTES // PARTS  # it takes its part for full
    channel._announce()


async def unasked_answer(peer: aiordma.Connection, _: ServerChannel) -> None:
    await peer.post_send(pack_opcode(Opcode.GET_SERVER_FEATURE))


async def clients_message(peer: aiordma.Connection, _: ServerChannel) -> None:
    await peer.post_send(pack_opcode(Opcode.SET_CLIENT_FEATURE))


async def wrong_length(peer: aiordma.Connection, channel: ServerChannel) -> None:
    assert channel._peer is not None
    await peer.post_write(b"four", channel._peer[:4], immediate=5)


async def too_many_bytes(peer: aiordma.Connection, channel: ServerChannel) -> None:
    assert channel._peer is not None
    size = channel._peer.length - 1
    for _ in range(2):
        await peer.post_write(bytes(size), channel._peer[:size], immediate=size)


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        (short_message, "a message of 5 bytes"),
        (unknown_opcode, "unknown opcode 65535"),
        (impossible_memory, "impossible memory"),
        (empty_memory, "impossible memory: 0 bytes"),
        (memory_twice, f"again, with {BUFFER_BYTES // PARTS} bytes of the previous left"),
        (unasked_answer, "nothing was asked"),
        (clients_message, "SET_CLIENT_FEATURE, which only clients send"),
        (wrong_length, "says that it wrote 5 bytes, and it wrote 4"),
        (
            too_many_bytes,
            f"wrote {SMALL_BUFFER // PARTS - 1} bytes where 1 of the buffer were left",
        ),
    ],
)
async def test_a_violation_ends_the_connection_with_its_reason(attack: Attack, text: str) -> None:
    async with client_and_server() as (peer, channel, reader, writer):
        with suppress(aiordma.RdmaError):  # the victim's end may come before the completion
            await attack(peer, channel)
        with pytest.raises(ValkeyProtocolError, match=text):
            await reader.read()
        with pytest.raises(ConnectionError, match=text):
            await write_on(writer)


async def test_wrong_program_is_named_with_its_address() -> None:
    async with await aiordma.listen(ADDRESS) as listener, anyio.create_task_group() as group:

        async def greet() -> None:
            async with listener.accept() as peer:
                await peer.receive()
                await peer.send(b"220 welcome")
                await peer.ended()

        group.start_soon(greet)
        with pytest.raises(ValkeyProtocolError, match="a message of 11 bytes") as caught:
            await open_connection(ADDRESS, listener.port)
    assert str(caught.value).startswith(f"connect to {ADDRESS}:{listener.port}: ")


async def test_keepalives_have_no_effect_however_many() -> None:
    async with await aiordma.listen(ADDRESS) as listener:
        connecting = asyncio.ensure_future(open_connection(ADDRESS, listener.port))
        peer, channel = await accept(listener)
        async with peer:
            await channel.begin()
            reader, writer = await connecting
            for _ in range(3 * RECEIVES):
                await peer.post_send(pack_opcode(Opcode.KEEPALIVE))
            _, theirs = reader_and_writer(peer, channel)
            theirs.write(b"+PONG\r\n")
            assert await reader.readline() == b"+PONG\r\n"
            writer.close()
            await writer.wait_closed()


async def test_data_without_an_announcement_is_refused() -> None:
    # A server that was told nothing yet could only guess the address: it writes no bytes.
    async with await aiordma.listen(ADDRESS) as listener:
        connecting = asyncio.ensure_future(open_connection(ADDRESS, listener.port, timeout=5))
        peer, _ = await accept(listener)
        async with peer:
            await peer.post_send(pack_memory(aiordma.RemoteMemory(4096, 65536, 1)))
            reader, writer = await connecting
            await peer.post_write(b"", aiordma.RemoteMemory(0, 0, 0), immediate=9)
            with pytest.raises(
                ValkeyProtocolError, match="wrote 9 bytes, and it wrote 0"
            ) as caught:
                await reader.read()
            server = f"the connection to {ADDRESS}:{listener.port}: the peer "
            assert str(caught.value).startswith(server)
            writer.close()


async def test_a_write_to_memory_that_the_server_took_back_ends_the_connection() -> None:
    async with await aiordma.listen(ADDRESS) as listener:
        connecting = asyncio.ensure_future(open_connection(ADDRESS, listener.port, timeout=5))
        peer, _ = await accept(listener)
        async with peer:
            await peer.post_send(pack_memory(aiordma.RemoteMemory(4096, 65536, 1)))
            reader, writer = await connecting
            # asyncio's own drain() raises ConnectionResetError if the end comes while it waits.
            ends = (aiordma.RemoteAccessError, aiordma.DisconnectedError)
            with pytest.raises((*ends, ConnectionResetError)):
                await write_on(writer)
            assert isinstance(reader.exception(), ends)
            writer.close()
