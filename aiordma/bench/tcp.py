"""The same round trip over TCP, for comparison: by asyncio's streams, and by its protocols."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TypeVar, cast

from aiordma import ConnectTimeoutError
from aiordma.bench.meter import Measurement, Meter
from aiordma.bench.timing import deadline, perf_counter_ns
from aiordma.bench.workload import MOST_BYTES

__all__ = ("measure_protocol", "measure_streams", "serve_protocol", "serve_streams")

CONNECT_SECONDS = 10.0

LENGTH = 4
"""Bytes of the first field on a connection: the size of its messages."""


Opened = TypeVar("Opened")


def serve_streams(host: str, port: int) -> AbstractAsyncContextManager[int]:
    """Run an echo server by asyncio's streams for the block, which gets its port. On trio there is
    no server, and the port is 0."""
    return _serving(lambda: asyncio.start_server(_echo, host, port))


def serve_protocol(host: str, port: int) -> AbstractAsyncContextManager[int]:
    """Run an echo server by an asyncio protocol, as `serve_streams` does."""
    return _serving(lambda: asyncio.get_running_loop().create_server(_Echo, host, port))


@asynccontextmanager
async def _serving(start: Callable[[], Awaitable[asyncio.Server]]) -> AsyncIterator[int]:
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
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        size = int.from_bytes(await reader.readexactly(LENGTH), "big")
        while 1 <= size <= MOST_BYTES:
            writer.write(await reader.readexactly(size))
            await writer.drain()
    writer.close()


class _Echo(asyncio.Protocol):
    """Sends all bytes back as they arrive, without the size that precedes them."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = LENGTH

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
        if self._head:
            data, self._head = data[self._head :], self._head - min(self._head, len(data))
        if data:
            self._transport.write(data)


async def _connecting(host: str, port: int, opening: Awaitable[Opened]) -> Opened:
    try:
        return await asyncio.wait_for(opening, CONNECT_SECONDS)
    except TimeoutError:
        text = f"TCP to {host} port {port}: no answer within {CONNECT_SECONDS:g} s"
        raise ConnectTimeoutError(text) from None


async def measure_streams(host: str, port: int, size: int, seconds: float) -> Measurement:
    """Measure the round trip of `size` bytes by streams, one at a time.

    Raises:
        ConnectTimeoutError: the server does not answer.
    """
    reader, writer = await _connecting(host, port, asyncio.open_connection(host, port))
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer.write(size.to_bytes(LENGTH, "big"))
    payload = bytes(size)

    async def exchange(meter: Meter, until: int) -> None:
        samples = meter.samples
        before = perf_counter_ns()
        while before < until:
            writer.write(payload)
            await reader.readexactly(size)
            now = perf_counter_ns()
            samples.append(now - before)
            before = now

    meter = Meter(f"tcp streams/{size}", size)
    await exchange(Meter("", size), deadline(seconds / 10))
    until = deadline(seconds)
    with meter:
        await exchange(meter, until)
    writer.close()
    await writer.wait_closed()
    return meter.result()


class _Exchange(asyncio.Protocol):
    """Sends the next message as soon as the previous one has come back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.meter = Meter("", size)
        self.until = 0
        self._payload = bytes(size)
        self._missing = 0
        self._before = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        self._transport.write(self.size.to_bytes(LENGTH, "big"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionResetError("the server went away"))

    def begin(self, meter: Meter, until: int) -> None:
        self.meter, self.until = meter, until
        self.done = asyncio.get_running_loop().create_future()
        self._before = perf_counter_ns()
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._missing = self.size
        self._transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing:
            return
        now = perf_counter_ns()
        self.meter.samples.append(now - self._before)
        self._before = now
        if now < self.until:
            self._send()
        else:
            self.done.set_result(None)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


async def measure_protocol(host: str, port: int, size: int, seconds: float) -> Measurement:
    """Measure the round trip of `size` bytes by a protocol: callbacks, without an await.

    Raises:
        ConnectTimeoutError: the server does not answer.
    """
    opening = asyncio.get_running_loop().create_connection(lambda: _Exchange(size), host, port)
    _, exchange = await _connecting(host, port, opening)
    exchange.begin(Meter("", size), deadline(seconds / 10))
    await exchange.done
    meter = Meter(f"tcp protocol/{size}", size)
    with meter:
        exchange.begin(meter, deadline(seconds))
        await exchange.done
    exchange.close()
    return meter.result()
