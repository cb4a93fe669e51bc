"""A scenario for each await of aiordma.streams and of aiordma.testing, as in awaits.py."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel

from aiordma import RdmaError, streams, testing
from aiordma.streams import Stream
from tests.device.players import until
from tests.devices import ADDRESS, DEVICE
from tests.faults.awaits import ASYNCIO, close, of, send_to_waiting, until_the_peer_ends
from tests.faults.suspensions import CANCELLED, Cut
from tests.internals import is_closed

__all__ = ()

RING = 8192
"""Bytes that a stream buffers in these scenarios, so that longer data has to wait."""


@asynccontextmanager
async def stream_ends() -> AsyncIterator[tuple[Stream, Stream]]:
    """Yield (client, server)."""
    async with testing.stream_pair(ADDRESS, DEVICE, buffer_size=RING) as (client, server):
        await client.send(b"?")  # on iWARP the client sends first
        assert await server.receive() == b"?"
        yield client, server


async def exactly(stream: Stream, length: int) -> bytes:
    """Receive so many bytes."""
    found = bytearray()
    while len(found) < length:
        found += await stream.receive(length - len(found))
    return bytes(found)


async def until_eof(stream: Stream) -> bytes:
    """Receive everything until the peer ends its data."""
    return b"".join([data async for data in stream])


async def read_until_eof(stream: Stream) -> None:
    """Serve a stream, as a handler. A cancelled peer may disconnect without the end of its data."""
    with suppress(ConnectionError):
        await until_eof(stream)


# -- streams --------------------------------------------------------------------------------------


async def received(stream: Stream, way: str) -> bytes:
    """Receive what has arrived, up to three bytes."""
    if way == "receive":
        return await stream.receive()
    buffer = bytearray(3)
    return bytes(buffer[: await stream.receive_into(buffer)])


@of("Stream.receive", "Stream.receive_into", ways=("receive", "receive_into"))
async def stream_receive(cut: Cut, way: str) -> None:
    async with stream_ends() as (client, server):
        async with anyio.create_task_group() as group:
            group.start_soon(send_to_waiting, client, b"cut")
            found = await cut.run(received(server, way))
        await client.send(b"last")
        lost = 0 if found is CANCELLED else len(found)
        rest = await exactly(server, 7 - lost)  # no byte is lost
        assert (b"" if found is CANCELLED else found) + rest == b"cutlast"


@of("Stream.send", ways=(3, 5 * RING))  # the longer one waits for the peer
async def stream_send(cut: Cut, length: int) -> None:
    data = os.urandom(length)
    async with stream_ends() as (client, server), anyio.create_task_group() as group:
        found: list[bytes] = []

        async def receive() -> None:
            found.append(await until_eof(server))

        group.start_soon(receive)
        sent = await cut.run(client.send(data))
        await client.send(b"last")
        await client.send_eof()
        await until(lambda: bool(found))
        part = found[0].removesuffix(b"last")
        assert found[0] == part + b"last"
        assert data.startswith(part)  # a part of the data, from its beginning
        assert sent is CANCELLED or part == data


@of("Stream.wait_writable")
async def stream_wait_writable(cut: Cut) -> None:
    async with stream_ends() as (client, server):
        with anyio.move_on_after(0.05):  # until the peer's buffer is full
            while True:
                await client.send(bytes(512))
        async with anyio.create_task_group() as group:
            group.start_soon(until_eof, server)
            await cut.run(client.wait_writable())
            await client.wait_writable()  # nothing is left of the first one
            await client.send_eof()


@of("Stream.send_eof")
async def stream_send_eof(cut: Cut) -> None:
    async with stream_ends() as (client, server):
        if await cut.run(client.send_eof()) is CANCELLED:
            await client.send(b"last")  # nothing was sent
            await client.send_eof()
            assert await until_eof(server) == b"last"
        else:
            assert await until_eof(server) == b""
        await server.send(b"back")
        assert await client.receive() == b"back"


@of("Stream.aclose")
async def stream_aclose(cut: Cut) -> None:
    async with stream_ends() as (client, server):
        await cut.run(client.aclose())
        assert is_closed(client.connection)
        with suppress(ConnectionError):  # the peer may miss the end of the data
            assert await until_eof(server) == b""


# -- opening and listening ------------------------------------------------------------------------


@of("connect_stream")
async def stream_connect(cut: Cut) -> None:
    async with (
        await streams.listen_stream(ADDRESS) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, read_until_eof)
        await close(await cut.run(streams.connect_stream(ADDRESS, listener.port)))
        async with streams.connect_stream(ADDRESS, listener.port) as stream:
            await stream.send(b"x")  # the listener serves the next peer
        group.cancel_scope.cancel()


@of("listen_stream")
async def stream_listen(cut: Cut) -> None:
    await close(await cut.run(streams.listen_stream(ADDRESS)))


@of("StreamListener.accept", "StreamListener.aclose")
async def stream_accept(cut: Cut) -> None:
    closing = Cut(cut.at, cut.mode)
    listener = await streams.listen_stream(ADDRESS)
    clients: list[Stream] = []

    async def connect() -> None:
        clients.append(await streams.connect_stream(ADDRESS, listener.port))

    async with anyio.create_task_group() as group:
        group.start_soon(connect)
        server = await cut.run(listener.accept())
        if server is CANCELLED:
            server = await listener.accept()  # no peer is lost
    await closing.run(listener.aclose())
    async with server, clients[0]:  # accepted streams stay open
        await clients[0].send(b"last")
        assert await exactly(server, 4) == b"last"
    cut.reached |= closing.reached


@of("StreamListener.serve")
async def stream_serve(cut: Cut) -> None:
    listener = await streams.listen_stream(ADDRESS)
    async with anyio.create_task_group() as group:

        async def use() -> None:
            with suppress(RdmaError, anyio.EndOfStream):
                async with streams.connect_stream(ADDRESS, listener.port) as client:
                    await client.send(b"x")
            await listener.aclose()

        group.start_soon(use)
        await cut.run(listener.serve(read_until_eof))
        await listener.aclose()


# -- asyncio's side -------------------------------------------------------------------------------


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what arrives, until the peer ends. A cancelled one ends without an end."""
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def close_server(server: Any) -> None:
    """Close a server, if making it was not cancelled."""
    if server is not CANCELLED:
        server.close_clients()
        server.close()
        await server.wait_closed()


async def port_of(server: Any) -> int:
    """Return the port of a server."""
    return int(server.sockets[0].getsockname()[1])


@of("create_connection", "open_connection", on=ASYNCIO, ways=("create", "open"))
async def stream_open_connection(cut: Cut, way: str) -> None:
    server = await streams.start_server(echo, ADDRESS, 0)
    port = await port_of(server)
    if way == "create":
        made = await cut.run(streams.create_connection(asyncio.Protocol, ADDRESS, port))
        if made is not CANCELLED:
            made[0].close()
    else:
        opened = await cut.run(streams.open_connection(ADDRESS, port))
        if opened is not CANCELLED:
            opened[1].close()
            await opened[1].wait_closed()
    reader, writer = await streams.open_connection(ADDRESS, port)
    writer.write(b"last")
    assert await reader.readexactly(4) == b"last"
    writer.close()
    await writer.wait_closed()
    await close_server(server)


@of("create_server", "start_server", on=ASYNCIO, ways=("create", "start"))
async def stream_create_server(cut: Cut, way: str) -> None:
    if way == "create":
        making: Any = streams.create_server(asyncio.Protocol, ADDRESS, 0)
    else:
        making = streams.start_server(echo, ADDRESS, 0)
    await close_server(await cut.run(making))


@of(
    "StreamServer.start_serving",
    "StreamServer.serve_forever",
    "StreamServer.wait_closed",
    on=ASYNCIO,
    ways=("start_serving", "serve_forever", "wait_closed"),
)
async def stream_server(cut: Cut, way: str) -> None:
    server = await streams.start_server(echo, ADDRESS, 0, start_serving=False)
    if way == "start_serving":
        await cut.run(server.start_serving())
    elif way == "serve_forever":
        asyncio.get_running_loop().call_later(0.02, server.close)
        with suppress(asyncio.CancelledError):
            await cut.run(server.serve_forever())
        assert not server.is_serving()
    else:
        await server.start_serving()
        reader, writer = await streams.open_connection(ADDRESS, await port_of(server))
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        server.close()
        asyncio.get_running_loop().call_later(0.02, writer.close)
        await cut.run(server.wait_closed())  # no effect on the server
        with suppress(ConnectionError):
            await writer.wait_closed()
    await close_server(server)


# -- aiordma.testing ------------------------------------------------------------------------------


PAIRS: dict[str, Any] = {
    "connected_pair": lambda: testing.connected_pair(ADDRESS, DEVICE),
    "stream_pair": lambda: testing.stream_pair(ADDRESS, DEVICE),
    "serving_listener": lambda: testing.serving_listener(until_the_peer_ends, ADDRESS, DEVICE),
    "fabric": lambda: testing.fabric(3, ADDRESS, DEVICE),
}


@of(*PAIRS, ways=tuple(PAIRS))
async def pairs(cut: Cut, name: str) -> None:
    async def enter_and_leave() -> None:
        async with PAIRS[name]():
            await anyio.lowlevel.checkpoint()

    await cut.run(enter_and_leave())  # whatever was cancelled, both ends are closed
