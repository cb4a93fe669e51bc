"""rping over RDMA, both sides: speaks with the C program of that name, which rdma-core brings.

    python rping.py -s                          a server, for one client
    python rping.py -s -P                       ... for many, one after the other or at once
    python rping.py -c -a 10.1.1.1 -C 10 -V     a client: ten rounds, each compared

A round: the client describes a buffer with text in it, the server READs it and says so; the client
describes an empty buffer, the server WRITEs the text there and says so. Every message has 16 bytes:
a buffer's address, rkey and length; or anything, where it only says so.
"""

import argparse
import asyncio
import itertools
import logging
import struct
import sys

import anyio

import aiordma
from aiordma import Access, Connection, ConnectionKeywords, RemoteMemory

PORT = 7174
MOST = (1 << 16) - 1
"""Bytes in a round; the C program takes no more, and no fewer than 23."""

DESCRIPTION = struct.Struct("!QII")
GO_AHEAD = bytes(DESCRIPTION.size)
CHARACTERS = bytes(range(ord("A"), ord("z") + 1))

OPTIONS = ConnectionKeywords(
    receive_buffers=2,
    receive_size=DESCRIPTION.size,
    max_send_wr=16,
    responder_resources=1,
    initiator_depth=1,
)


class PingError(anyio.BrokenResourceError):
    """The peer left in the middle of a round, or sent what it should not."""


def describe(memory: RemoteMemory) -> bytes:
    return DESCRIPTION.pack(memory.address, memory.rkey, memory.length)


def described(message: bytes, least: int = 1) -> RemoteMemory:
    if len(message) != DESCRIPTION.size:
        raise PingError(f"{len(message)} bytes describe no buffer: {DESCRIPTION.size} do")
    address, rkey, length = DESCRIPTION.unpack(message)
    if not least <= length <= MOST:
        raise PingError(f"the peer's buffer has {length} bytes, not {least}..{MOST}")
    return RemoteMemory(address, length, rkey)


def payload(number: int, size: int) -> bytes:
    """The text of a round: its number, a run of characters that starts elsewhere each time, NUL."""
    start = number % len(CHARACTERS)
    run = CHARACTERS[start:] + CHARACTERS * (size // len(CHARACTERS) + 1)
    return (f"rdma-ping-{number}: ".encode() + run)[: size - 1] + b"\0"


async def next_message(connection: Connection) -> bytes:
    try:
        return await connection.receive()
    except anyio.EndOfStream:
        raise PingError("the peer left in the middle of a round") from None


def go_ahead(connection: Connection) -> None:
    # Posted, not awaited: the client's next message, or its leaving, says how it went. The callback
    # looks at the error, which would be reported otherwise: a client may leave without reading.
    connection.post_send(GO_AHEAD).add_done_callback(aiordma.WorkRequest.exception)


async def answer(connection: Connection, *, verify: bool = False, show: bool = False) -> int:
    """The server's side of one connection, until the client leaves; returns the rounds."""
    rounds = 0
    buffer = connection.register(bytearray(MOST))
    async for message in connection:
        source = described(message)
        text = buffer[: source.length]
        await connection.read(source, text)
        go_ahead(connection)

        received = bytes(text.view)
        if show:
            print(f"server ping data: {received.rstrip(bytes(1)).decode(errors='replace')}")
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
) -> None:
    """The client's side; count 0 is for ever."""
    source = connection.register(bytearray(size), Access.REMOTE_READ)
    sink = connection.register(bytearray(size), Access.REMOTE_WRITE)
    for number in range(count) if count else itertools.count():
        source.view[:] = payload(number, size)
        await connection.send(describe(source.remote()))
        await next_message(connection)  # the server has READ it
        await connection.send(describe(sink.remote()))
        await next_message(connection)  # ... and has written it back
        if verify and sink.view != source.view:
            raise PingError(f"round {number}: data mismatch")
        if show:
            print(f"ping data: {bytes(sink.view[:-1]).decode(errors='replace')}")


async def serve(arguments: argparse.Namespace) -> None:
    async def serve_one(connection: Connection) -> None:
        rounds = await answer(connection, verify=arguments.verify, show=arguments.show)
        print(f"{connection.peer_address} left after {rounds} rounds", flush=True)

    async with aiordma.listen(arguments.address, arguments.port, **OPTIONS) as listener:
        print(f"listening on {arguments.address}:{listener.port}", flush=True)
        if arguments.persistent:
            await listener.serve(serve_one)
        else:
            async with listener.accept() as connection:
                await serve_one(connection)


async def run_client(arguments: argparse.Namespace) -> None:
    async with aiordma.connect(arguments.address, arguments.port, **OPTIONS) as connection:
        await ping(
            connection,
            count=arguments.count,
            size=arguments.size,
            verify=arguments.verify,
            show=arguments.show,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="RDMA ping, as rping(1)")
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("-s", dest="server", action="store_true", help="be the server")
    side.add_argument("-c", dest="server", action="store_false", help="be the client")
    parser.add_argument("-a", dest="address", help="of the server; a server's default is any")
    parser.add_argument("-p", dest="port", type=int, default=PORT)
    parser.add_argument("-P", dest="persistent", action="store_true", help="serve many clients")
    parser.add_argument(
        "-C", dest="count", type=int, default=0, help="rounds of a client; 0: no end"
    )
    parser.add_argument("-S", dest="size", type=int, default=64, help="bytes in a client's round")
    parser.add_argument("-v", dest="show", action="store_true", help="print the data")
    parser.add_argument("-V", dest="verify", action="store_true", help="compare the data")
    arguments = parser.parse_args()
    if not arguments.server and arguments.address is None:
        parser.error("a client needs -a")
    if not 1 <= arguments.size <= MOST:
        parser.error(f"-S {arguments.size} is not in 1..{MOST}")
    if arguments.count < 0:
        parser.error(f"-C {arguments.count} is negative")
    arguments.address = arguments.address or "0.0.0.0"
    return arguments


def main() -> int:
    arguments = parse()
    logging.basicConfig(format="rping: %(message)s", level=logging.INFO)  # how -P's clients ended
    try:
        asyncio.run(serve(arguments) if arguments.server else run_client(arguments))
    except (anyio.BrokenResourceError, aiordma.RdmaError) as error:
        print(f"rping: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
