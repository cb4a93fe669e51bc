"""What asyncio's transports over RDMA report when the peer has not taken everything, and what their
protocols may do in a call of the transport."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

import aiordma
from aiordma import streams
from aiordma.streams.rsocket import Rsocket
from tests.device.transports import LOOPS, Recorder, Run, is_readable, on_loop, two
from tests.devices import ADDRESS

pytestmark = pytest.mark.one_kernel_device


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each of asyncio's loops."""
    return partial(on_loop, LOOPS[request.param])


# -- a peer that ends while there is a backlog -----------------------------------------------------


@asynccontextmanager
async def to_a_peer_that_does_not_read() -> AsyncIterator[
    tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]
]:
    """Yield asyncio's reader and writer, and the transport of the peer, which has paused reading
    and sent "hello"."""
    peers: asyncio.Queue[Any] = asyncio.Queue()

    async def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"hello")
        peers.put_nowait(writer.transport)

    server = await streams.start_server(accepted, ADDRESS, 0, buffer_size=8192)
    address = server.sockets[0].getsockname()
    reader, writer = await streams.open_connection(*address, buffer_size=8192)
    writer.write(b"?")  # on iWARP the side that connected sends first
    peer = await peers.get()
    try:
        yield reader, writer, peer
    finally:
        writer.transport.abort()
        peer.abort()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_drain_raises_when_the_peer_ends(run: Run, ending: str) -> None:
    """Not everything that was written was sent. So drain() does not return as if it were."""

    async def main() -> None:
        async with to_a_peer_that_does_not_read() as (reader, writer, peer):
            assert await reader.readexactly(5) == b"hello"
            writer.write(bytes(500_000))
            draining = asyncio.create_task(writer.drain())
            await asyncio.sleep(0)
            getattr(peer, ending)()
            with pytest.raises(ConnectionResetError):
                await draining
            with pytest.raises(ConnectionResetError):
                await writer.drain()
            writer.close()
            with pytest.raises(ConnectionResetError):
                await writer.wait_closed()

    run(main)


class Records(Recorder):
    """Keeps the names of the calls, in order, and does not close at the end of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def data_received(self, data: bytes) -> None:
        self.calls.append("data_received")
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        self.calls.append("eof_received")
        super().eof_received()
        return True

    def pause_writing(self) -> None:
        self.calls.append("pause_writing")
        super().pause_writing()

    def resume_writing(self) -> None:
        self.calls.append("resume_writing")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("connection_lost")
        super().connection_lost(exc)


def test_what_the_peer_sent_is_delivered_before_the_error_of_a_backlog(run: Run) -> None:
    """As an answer to a request that the peer has not read to its end. The protocol is not asked
    for more, and the connection ends, although the protocol keeps it open."""

    async def main() -> None:
        async with two(Records, buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            client.transport.write(bytes(500_000))
            server.transport.write(b"too much")
            server.transport.close()
            await client.lost.wait()
            assert isinstance(client.error, ConnectionResetError)
            assert client.data == b"too much"
            assert client.calls == [
                "pause_writing",
                "data_received",
                "eof_received",
                "connection_lost",
            ]

    run(main)


class Pauses(Records):
    """Reads no more once it has something."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.transport.pause_reading()


def test_a_backlog_fails_if_its_protocol_stops_reading(run: Run) -> None:
    """The end of the data, which would come first, is not delivered then."""

    async def main() -> None:
        server = await streams.create_server(Recorder, ADDRESS, 0, buffer_size=8192)
        address = server.sockets[0].getsockname()
        _, client = await streams.create_connection(Pauses, *address, buffer_size=8192)
        client.transport.write(b"?")
        while not server._transports:
            await asyncio.sleep(0.001)
        (accepted,) = server._transports
        accepted.pause_reading()
        client.transport.write(bytes(500_000))
        accepted.write(b"too much")
        accepted.close()
        await client.lost.wait()
        assert isinstance(client.error, ConnectionResetError)
        assert client.calls == ["pause_writing", "data_received", "connection_lost"]
        server.close()
        await server.wait_closed()

    run(main)


def test_a_write_that_cannot_be_posted_ends_a_half_closed_connection(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the data was delivered, so that no read reports the error."""

    def fail(rsocket: Rsocket, _data: bytes | memoryview) -> int:
        error = aiordma.DisconnectedError("a fault of the test")
        rsocket.fail(error)
        raise error

    async def main() -> None:
        async with two(Records) as (client, server):
            server.transport.write_eof()
            await client.until(lambda: client.eof)
            with monkeypatch.context() as patched:
                patched.setattr(Rsocket, "write", fail)
                client.transport.write(b"lost")
            await client.lost.wait()
            assert str(client.error) == "a fault of the test"

    run(main)


def test_a_half_closed_peer_takes_the_backlog(run: Run) -> None:
    """The end of one direction is no error of the other one."""

    async def main() -> None:
        async with two(Records, buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            client.transport.write(bytes(500_000))
            server.transport.write_eof()
            await client.until(lambda: client.eof)
            server.transport.resume_reading()
            await server.until(lambda: len(server.data) == 500_000)
            assert not client.lost.is_set()

    run(main)


# -- buffers of the program -----------------------------------------------------------------------


class CutsItsBuffer(asyncio.BufferedProtocol):
    """Resizes the buffer that it gave to the length of what has arrived, and sends it back."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        self.buffer = bytearray(1000)
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        del self.buffer[nbytes:]
        self.transport.write(self.buffer)
        self.buffer.clear()


class CutsItsViewedBuffer(CutsItsBuffer):
    """Gives a view of it, and ends the view."""

    view: memoryview

    def get_buffer(self, sizehint: int) -> memoryview:  # type: ignore[override]
        self.view = memoryview(super().get_buffer(sizehint))
        return self.view

    def buffer_updated(self, nbytes: int) -> None:
        self.view.release()
        super().buffer_updated(nbytes)


@pytest.mark.parametrize("make", [CutsItsBuffer, CutsItsViewedBuffer])
def test_a_protocol_may_resize_the_buffer_that_was_filled(
    run: Run, make: type[CutsItsBuffer]
) -> None:
    async def main() -> None:
        server = await streams.create_server(make, ADDRESS, 0)
        reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
        for data in (b"hello", bytes(3000)):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    run(main)


class GivesBytes(asyncio.BufferedProtocol):
    """Gives a buffer that nothing can be written to."""

    def get_buffer(self, sizehint: int) -> bytes:
        return bytes(100)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        GivesBytes.connection = transport.get_extra_info("connection")

    connection: aiordma.Connection


def test_a_read_only_buffer_is_an_error_of_the_protocol(run: Run) -> None:
    """It is reported, and nothing leaks."""

    async def main() -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, each: reported.append(each))
        server = await streams.create_server(GivesBytes, ADDRESS, 0)
        reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        await reader.read()
        writer.close()
        server.close()
        await server.wait_closed()
        (context,) = reported
        assert context["message"] == "Fatal error: protocol.get_buffer() call failed."
        assert isinstance(context["exception"], TypeError)
        await GivesBytes.connection.aclose()

    run(main)


class ClearsWhatItWrote(Recorder):
    """Uses its buffer again when it has to pause."""

    buffer = bytearray()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.buffer.clear()


def test_pause_writing_may_resize_the_buffer_that_was_written(run: Run) -> None:
    async def main() -> None:
        async with two(ClearsWhatItWrote, buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            client.buffer = bytearray(b"x" * 500_000)
            client.transport.write(client.buffer)
            assert client.buffer == b""
            server.transport.resume_reading()
            await server.until(lambda: len(server.data) == 500_000)
            assert set(server.data) == set(b"x")

    run(main)


# -- the end in a call of the transport -----------------------------------------------------------


class AbortsInResume(Recorder):
    """Aborts while there is something left to be sent."""

    def resume_writing(self) -> None:
        super().resume_writing()
        self.left = self.transport.get_write_buffer_size()
        self.transport.abort()


def test_abort_in_resume_writing_sends_no_end_of_the_data(run: Run) -> None:
    """A part of the data was dropped. So the peer does not get an end, as if it had all of it."""

    async def main() -> None:
        async with two(AbortsInResume, buffer_size=8192) as (client, server):
            client.transport.set_write_buffer_limits(high=200_000, low=100_000)
            server.transport.pause_reading()
            client.transport.write(bytes(500_000))
            client.transport.write_eof()
            server.transport.resume_reading()
            await client.lost.wait()
            await server.lost.wait()
            assert client.left > 0
            assert not server.eof
            assert isinstance(server.error, ConnectionResetError)

    run(main)


class LooksInLost(Recorder):
    """Asks its transport in connection_lost."""

    def connection_lost(self, exc: Exception | None) -> None:
        below = self.transport.get_extra_info("socket")
        self.protocol = self.transport.get_protocol()
        self.is_readable = is_readable(below)
        super().connection_lost(exc)


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_connection_lost_finds_its_protocol_and_descriptor(run: Run, ending: str) -> None:
    """As in asyncio, whose transports forget them afterwards."""

    async def main() -> None:
        async with two(LooksInLost) as (client, server):
            getattr(client.transport, ending)()
            for each in (client, server):
                await each.lost.wait()
                assert each.protocol is each
                assert each.is_readable
                assert each.transport.get_protocol() is None
                assert each.transport.get_extra_info("socket").fileno() == -1

    run(main)
