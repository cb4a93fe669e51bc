"""The protocol of rping(1), which rdma-core brings: both sides of a connection.

A round: the client describes a buffer with text in it, the server READs it and says so; the client
describes an empty buffer, the server WRITEs the text there and says so. Every message has 16 bytes:
a buffer's address, rkey and length; a message that only says so can have any content.
"""

import itertools
import mmap
import struct
import time
from collections.abc import Callable

import anyio

import aiordma
from aiordma import Access, Connection, ConnectionOptions, RemoteMemory

PORT = 7174
MOST = (1 << 16) - 1
"""Bytes in a round; the C program takes no more, and no fewer than 23."""

DESCRIPTION = struct.Struct("!QII")
GO_AHEAD = bytes(DESCRIPTION.size)
CHARACTERS = bytes(range(ord("A"), ord("z") + 1))

OPTIONS = ConnectionOptions(
    receive_buffers=2,
    receive_size=DESCRIPTION.size,
    max_send_wr=16,
    responder_resources=1,
    initiator_depth=1,
)


class PingError(anyio.BrokenResourceError):
    """The peer left in the middle of a round, or sent what it should not."""


def describe(memory: RemoteMemory) -> bytes:
    """Return the message that describes a buffer."""
    return DESCRIPTION.pack(memory.address, memory.rkey, memory.length)


def described(message: bytes, least: int = 1) -> RemoteMemory:
    """Return the buffer that a message describes.

    Raises:
        PingError: the message describes none, or one of less than `least` or more than MOST bytes,
            or beyond the address space.
    """
    if len(message) != DESCRIPTION.size:
        raise PingError(f"{len(message)} bytes describe no buffer: {DESCRIPTION.size} do")
    address, rkey, length = DESCRIPTION.unpack(message)
    if not least <= length <= MOST:
        raise PingError(f"the peer's buffer has {length} bytes, not {least}..{MOST}")
    try:
        return RemoteMemory(address, length, rkey)
    except ValueError as error:
        raise PingError(f"the peer's buffer: {error}") from None


def shown(text: bytes) -> str:
    """Return a peer's text for a terminal: what is no printable ASCII is escaped."""
    return "".join(chr(each) if 0x20 <= each < 0x7F else f"\\x{each:02x}" for each in text)


def payload(number: int, size: int) -> bytes:
    """Return the text of a round: its number, a run of characters that starts elsewhere each time,
    and NUL."""
    start = number % len(CHARACTERS)
    run = CHARACTERS[start:] + CHARACTERS * (size // len(CHARACTERS) + 1)
    return (f"rdma-ping-{number}: ".encode() + run)[: size - 1] + b"\0"


async def next_message(connection: Connection) -> bytes:
    """Receive the next message of a round.

    Raises:
        PingError: the peer left.
        ConnectionError: the connection broke.

    Cancellation: as `Connection.receive`.
    """
    try:
        return await connection.receive()
    except anyio.EndOfStream:
        raise PingError("the peer left in the middle of a round") from None


def go_ahead(connection: Connection) -> None:
    """Tell the client to go on, without waiting: its next message, or its end, says how it went."""
    # The callback looks at the error, which would be reported otherwise: a client may leave without
    # reading.
    connection.post_send(GO_AHEAD).add_done_callback(aiordma.WorkRequest.exception)


async def answer(connection: Connection, *, verify: bool = False, show: bool = False) -> int:
    """Be the server of one connection until the client leaves.

    Args:
        verify: compare the text of each round with the expected text.
        show: print the text of each round.

    Returns:
        the number of rounds.

    Raises:
        PingError: the client sent something else, or left in the middle of a round.
        ConnectionError: the connection broke.

    Cancellation: ends the round.
    """
    rounds = 0
    buffer = connection.register(bytearray(MOST))
    async for message in connection:
        source = described(message)
        text = buffer[: source.length]
        await connection.read(text, source)
        go_ahead(connection)

        received = bytes(text.view)
        if show:
            print(f"server ping data: {shown(received.rstrip(bytes(1)))}")
        if verify and received != payload(rounds, source.length):
            raise PingError(f"round {rounds}: the client's data is not the text of that round")

        length = received.find(b"\0") + 1 or source.length
        sink = described(await next_message(connection), least=length)
        await connection.write(text[:length], sink[:length])
        go_ahead(connection)
        rounds += 1
    return rounds


async def ping(
    connection: Connection,
    *,
    count: int = 0,
    size: int = 64,
    verify: bool = False,
    show: bool = False,
    interval: float = 0.0,
    on_round: Callable[[float], None] | None = None,
) -> None:
    """Be the client of one connection.

    Args:
        count: the number of rounds; 0: no limit.
        size: bytes of a round's text, 1 to MOST.
        verify: compare the text that the server wrote back.
        show: print that text.
        interval: seconds from the end of a round to the next one.
        on_round: called after each round, with its seconds.

    Raises:
        PingError: the server sent something else, or left in the middle of a round.
        ConnectionError: the connection broke.

    Cancellation: ends the round.
    """
    # The server reads from its own page: siw reads up to 32 bytes that lie on two pages wrongly
    # (docs/devices.md), and a bytearray begins anywhere.
    source = connection.register(mmap.mmap(-1, size), Access.REMOTE_READ)
    sink = connection.register(bytearray(size), Access.REMOTE_WRITE)
    for number in range(count) if count else itertools.count():
        if number and interval:
            await anyio.sleep(interval)
        source.view[:] = payload(number, size)
        started = time.perf_counter()
        await connection.send(describe(source.remote()))
        await next_message(connection)  # the server has READ it
        await connection.send(describe(sink.remote()))
        await next_message(connection)  # ... and has written it back
        took = time.perf_counter() - started
        if verify and sink.view != source.view:
            raise PingError(f"round {number}: data mismatch")
        if show:
            print(f"ping data: {shown(bytes(sink.view[:-1]))}")
        if on_round is not None:
            on_round(took)
