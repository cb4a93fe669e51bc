"""Ping-pong over TCP, by asyncio's streams and by its protocols, for comparison; and by its streams
over RDMA."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from functools import partial
from typing import Any, TypeVar, cast

from aiordma import ConnectTimeoutError
from aiordma.bench.meter import Measurement, Meter
from aiordma.bench.timing import deadline, perf_counter_ns, ping_pong
from aiordma.bench.workload import MOST_BYTES, row_name
from aiordma.streams import open_connection, start_server

__all__ = ("measure_protocol", "measure_streams", "serve_protocol", "serve_streams")

CONNECT_SECONDS = 10.0

HEADER_BYTES = 4
"""A connection begins with a header: the size of its messages."""

Connected = TypeVar("Connected")


def serve_streams(
    host: str, port: int, device: str | None = None
) -> AbstractAsyncContextManager[int]:
    """Run an echo server by asyncio's streams for the block, which gets its port; with a device,
    over RDMA. On trio there is no server, and the port is 0."""
    if device is not None:
        return _serve(lambda: start_server(_echo, host, port, device=device))
    return _serve(lambda: asyncio.start_server(_echo, host, port))


def serve_protocol(host: str, port: int) -> AbstractAsyncContextManager[int]:
    """Run an echo server by an asyncio protocol, as `serve_streams` does."""
    return _serve(lambda: asyncio.get_running_loop().create_server(_EchoServer, host, port))


@asynccontextmanager
async def _serve(start: Callable[[], Awaitable[Any]]) -> AsyncIterator[int]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        yield 0
        return
    server = await start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
        size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
        while 1 <= size <= MOST_BYTES:
            writer.write(await reader.readexactly(size))
            await writer.drain()


class _EchoServer(asyncio.Protocol):
    """Echoes all bytes after the header, as they arrive."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._header_left = HEADER_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass

    def pause_writing(self) -> None:
        """Read no more from a client that does not read."""
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._header_left:
            header = data[: self._header_left]
            self._header_left -= len(header)
            data = data[len(header) :]
        if data:
            self._transport.write(data)


async def _connect(
    host: str, port: int, connecting: Awaitable[Connected], protocol: str = "TCP"
) -> Connected:
    try:
        return await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except TimeoutError:
        text = f"{protocol} to {host} port {port}: no answer within {CONNECT_SECONDS:g} s"
        raise ConnectTimeoutError(text) from None


async def measure_streams(
    host: str, port: int, size: int, seconds: float, depth: int = 1, device: str | None = None
) -> Measurement:
    """Measure messages of `size` bytes and their echoes by streams, `depth` in flight; with a
    device, over RDMA.

    Raises:
        ConnectTimeoutError: the server does not answer.
    """
    if device is None:
        name, connecting = "tcp streams", asyncio.open_connection(host, port)
    else:
        name, connecting = "stream", open_connection(host, port, device=device)
    protocol = "TCP" if device is None else "a stream"
    reader, writer = await _connect(host, port, connecting, protocol)
    with closing(writer):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.write(size.to_bytes(HEADER_BYTES, "big"))

        async def send(payload: bytes) -> None:
            writer.write(payload)  # without drain, which could wait for echoes that are not read

        drive = partial(ping_pong, send, partial(reader.readexactly, size), bytes(size), depth)
        await drive(deadline(seconds / 10), Meter("", size))
        meter = Meter(row_name(name, size, depth), size)
        until = deadline(seconds)
        with meter:
            await drive(until, meter)
    await writer.wait_closed()
    return meter.result()


class _EchoClient(asyncio.Protocol):
    """Keeps `depth` messages in flight: each echo is followed by the next message."""

    def __init__(self, size: int, depth: int) -> None:
        self.size = size
        self.depth = depth
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.meter = Meter("", size)
        self.until = 0
        self._payload = bytes(size)
        self._received = 0
        self._sent_at: deque[int] = deque()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        self._transport.write(self.size.to_bytes(HEADER_BYTES, "big"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError("the server went away"))

    def begin(self, meter: Meter, until: int) -> None:
        self.meter, self.until = meter, until
        self.done = asyncio.get_running_loop().create_future()
        for _ in range(self.depth):
            self._send(perf_counter_ns())

    def _send(self, now: int) -> None:
        assert self._transport is not None
        self._sent_at.append(now)
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        while self._received >= self.size:
            self._received -= self.size
            now = perf_counter_ns()
            self.meter.samples.append(now - self._sent_at.popleft())
            if now < self.until:
                self._send(now)
        if not self._sent_at:
            self.done.set_result(None)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


async def measure_protocol(
    host: str, port: int, size: int, seconds: float, depth: int = 1
) -> Measurement:
    """Measure the same by a protocol: callbacks, without an await.

    Raises:
        ConnectTimeoutError: the server does not answer.
    """
    connecting = asyncio.get_running_loop().create_connection(
        lambda: _EchoClient(size, depth), host, port
    )
    _, client = await _connect(host, port, connecting)
    with closing(client):
        client.begin(Meter("", size), deadline(seconds / 10))
        await client.done
        meter = Meter(row_name("tcp protocol", size, depth), size)
        with meter:
            client.begin(meter, deadline(seconds))
            await client.done
    return meter.result()
