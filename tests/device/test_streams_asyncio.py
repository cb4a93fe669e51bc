"""asyncio's transports, streams and servers over RDMA, and the event loop that uses them, on the
device under test."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import aiordma
from aiordma import streams
from aiordma.streams.rsocket import Rsocket
from tests.device.transports import LOOPS, Recorder, Run, echo, is_readable, on_loop, two
from tests.devices import ADDRESS, NOT_OURS
from tests.waiting import wait_until

pytestmark = pytest.mark.one_kernel_device


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each of asyncio's loops."""
    return partial(on_loop, LOOPS[request.param])


@asynccontextmanager
async def echoing(
    **options: Any,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await streams.start_server(echo, ADDRESS, 0, **options)
    address = server.sockets[0].getsockname()
    reader, writer = await streams.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()


# -- streams --------------------------------------------------------------------------------------


def test_bytes_come_back(run: Run) -> None:
    async def main() -> None:
        async with echoing() as (reader, writer):
            for size in (1, 1000, 70_000):
                data = os.urandom(size)
                writer.write(data)
                assert await reader.readexactly(size) == data

    run(main)


def test_a_reader_of_the_program_gets_bytes(run: Run) -> None:
    class Reader(asyncio.StreamReader):
        def feed_data(self, data: Any) -> None:
            assert type(data) is bytes
            super().feed_data(data)

    async def main() -> None:
        async with echoing() as (_reader, writer):
            address = writer.get_extra_info("peername")
            reader = Reader()
            transport, _ = await streams.create_connection(
                lambda: asyncio.StreamReaderProtocol(reader), *address
            )
            transport.write(b"echo")
            assert await reader.readexactly(4) == b"echo"
            transport.close()

    run(main)


def test_much_data_goes_through_small_rings(run: Run) -> None:
    data = os.urandom(1_000_000)

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async def main() -> None:
        async with echoing(buffer_size=8192) as (reader, writer), asyncio.TaskGroup() as group:
            group.create_task(send(writer))
            assert await reader.readexactly(len(data)) == data

    run(main)


def test_write_eof_ends_one_direction(run: Run) -> None:
    async def main() -> None:
        async with echoing() as (reader, writer):
            writer.write(b"last words")
            writer.write_eof()
            assert await reader.read() == b"last words"
            with pytest.raises(RuntimeError, match="after write_eof"):
                writer.write(b"x")

    run(main)


def test_extra_info_has_the_addresses(run: Run) -> None:
    async def main() -> None:
        async with echoing() as (_reader, writer):
            host, _port = writer.get_extra_info("peername")
            assert host == ADDRESS
            assert writer.get_extra_info("sockname")[0] == ADDRESS
            below = writer.get_extra_info("socket")
            assert below.getpeername() == writer.get_extra_info("peername")
            assert below.getsockname() == writer.get_extra_info("sockname")
            assert isinstance(writer.get_extra_info("connection"), aiordma.Connection)

    run(main)


def test_buffer_sizes_are_those_of_the_rings() -> None:
    async def main() -> None:
        server = await streams.start_server(echo, ADDRESS, 0, buffer_size=70_000)
        address = server.sockets[0].getsockname()
        _, writer = await streams.open_connection(*address, buffer_size=30_000)
        for below, size in (
            (server.sockets[0], 70_000),
            (writer.get_extra_info("socket"), 30_000),
        ):
            assert below.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == size
            assert below.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == size
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_the_descriptor_is_readable_while_there_is_something_to_read(run: Run) -> None:
    async def main() -> None:
        async with echoing() as (reader, writer):
            below = writer.get_extra_info("socket")
            transport = writer.transport
            assert below.fileno() == below.fileno() >= 0
            assert not is_readable(below)
            cast(asyncio.ReadTransport, transport).pause_reading()
            writer.write(b"hello")
            while not is_readable(below):
                await asyncio.sleep(0.001)
            assert reader._buffer == b""  # type: ignore[attr-defined]
            cast(asyncio.ReadTransport, transport).resume_reading()
            assert await reader.readexactly(5) == b"hello"
            assert not is_readable(below)
            writer.write_eof()
            assert await reader.read() == b""
            assert is_readable(below)
        assert below.fileno() == -1

    run(main)


@pytest.mark.parametrize("end", ["nothing", "close", "abort", "break off"])
def test_the_descriptor_shows_what_has_arrived_before_the_loop_runs(run: Run, end: str) -> None:
    """As the kernel's socket: httpcore asks before it uses an idle connection. The protocol gets it
    from the loop only."""

    async def main() -> None:
        async with two() as (client, server):
            below = client.transport.get_extra_info("socket")
            assert not is_readable(below)
            if end == "nothing":
                server.transport.write(b"hello")
            elif end == "break off":
                server.transport.get_extra_info("connection")._endpoint.teardown.close()
            else:
                getattr(server.transport, end)()
            wait_until(lambda: is_readable(below))  # without the loop
            assert (client.data, client.eof, client.error) == (b"", False, None)
            if end == "nothing":
                await client.until(lambda: client.data == b"hello")
                assert not is_readable(below)
            else:
                await client.lost.wait()
                assert client.eof is (end != "break off")

    run(main)


def test_the_descriptor_is_brought_up_to_date_within_a_protocols_call(run: Run) -> None:
    class Asks(Recorder):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.depth = getattr(self, "depth", 0) + 1
            assert self.depth == 1
            if other is not None and data == b"a":
                other.transport.write(b"b")
                wait_until(lambda: is_readable(self.transport.get_extra_info("socket")))
            self.depth -= 1

    other: Any = None

    async def main() -> None:
        nonlocal other
        async with two(Asks) as (client, server):
            other = server
            server.transport.write(b"a")
            await client.until(lambda: client.data == b"ab")

    run(main)


def test_the_descriptor_can_be_asked_for_in_another_thread(run: Run) -> None:
    async def main() -> None:
        async with two() as (client, server):
            below = client.transport.get_extra_info("socket")
            assert await asyncio.to_thread(below.fileno) == below.fileno()
            server.transport.write(b"hello")
            await client.until(lambda: client.data == b"hello")

    run(main)


# -- protocols ------------------------------------------------------------------------------------


NAME: ContextVar[str] = ContextVar("NAME", default="neither")


class RecordsContext(Recorder):
    """Keeps the value of NAME in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.names.append(NAME.get())
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.names.append(NAME.get())
        super().data_received(data)

    def eof_received(self) -> None:
        self.names.append(NAME.get())
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.names.append(NAME.get())
        super().connection_lost(exc)


def test_protocols_are_called_in_the_context_of_their_transport(run: Run) -> None:
    """As of asyncio's own: uvicorn's applications see the context variables of its start."""

    async def main() -> None:
        servers: list[RecordsContext] = []

        def accepted() -> RecordsContext:
            servers.append(RecordsContext())
            return servers[-1]

        async def serve() -> streams.StreamServer:
            NAME.set("server")
            return await streams.create_server(accepted, ADDRESS, 0)

        async def connect() -> RecordsContext:
            NAME.set("client")
            address = server.sockets[0].getsockname()
            _, protocol = await streams.create_connection(RecordsContext, *address)
            return protocol

        server = await asyncio.create_task(serve())
        client = await asyncio.create_task(connect())
        client.transport.write(b"?")
        while not servers:
            await asyncio.sleep(0.001)
        (accepting,) = servers
        await accepting.until(lambda: bool(accepting.data))
        accepting.transport.write(b"!")
        await client.until(lambda: bool(client.data))
        client.transport.close()
        await accepting.lost.wait()
        await client.lost.wait()
        assert set(client.names) == {"client"}
        assert set(accepting.names) == {"server"}
        assert len(accepting.names) == 4
        server.close()
        await server.wait_closed()

    run(main)


def test_close_sends_what_was_written(run: Run) -> None:
    data = os.urandom(500_000)

    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            client.transport.write(data)
            client.transport.close()
            assert client.transport.is_closing()
            await server.until(lambda: server.eof)
            await client.lost.wait()
            assert server.data == data
            assert client.error is None
            await server.lost.wait()

    run(main)


def test_abort_drops_what_was_written(run: Run) -> None:
    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            client.transport.write(bytes(500_000))
            client.transport.abort()
            await client.lost.wait()
            server.transport.resume_reading()
            await server.lost.wait()
            assert len(server.data) < 500_000
            assert isinstance(server.error, ConnectionError)

    run(main)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_abort_ends_a_close_that_the_peer_holds_back(run: Run) -> None:
    async def main() -> None:
        async with two(buffer_size=8192, close_timeout=0.05) as (client, server):
            server.transport.pause_reading()
            client.transport.write(bytes(500_000))
            held = client.transport.get_write_buffer_size()
            client.transport.close()
            # No limit of time: `close_timeout` begins once everything is posted, as asyncio's TCP
            # has none. What waits does not grow either.
            await asyncio.sleep(0.2)
            assert not client.lost.is_set()
            assert 0 < client.transport.get_write_buffer_size() <= held
            client.transport.abort()
            await client.lost.wait()
            assert client.error is None
            assert client.transport.get_write_buffer_size() == 0
            server.transport.resume_reading()
            await server.lost.wait()
            assert len(server.data) < 500_000

    run(main)


def test_bytes_that_wait_are_not_copied(run: Run) -> None:
    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            data = bytes(10_000_000)
            tracemalloc.start()
            try:
                client.transport.write(data)
                _, most = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert client.transport.get_write_buffer_size() > 9_000_000
            assert most < 1_000_000
            client.transport.abort()
            await client.lost.wait()

    run(main)


def test_small_writes_that_wait_are_joined(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message costs both sides, and each entry of the backlog takes memory."""
    writes = [b"%09d\n" % number for number in range(20_000)]
    posted: list[int] = []
    write = Rsocket.write

    def counting(rsocket: Rsocket, data: bytes | memoryview) -> int:
        posted.append(write(rsocket, data))
        return posted[-1]

    async def main() -> None:
        async with two(buffer_size=65536) as (client, server):
            transport = client.transport
            transport.set_write_buffer_limits(high=50_000)
            monkeypatch.setattr(Rsocket, "write", counting)
            total = 0
            for number, data in enumerate(writes, 1):
                transport.write(data)
                total += len(data)
                if not number % 1000:
                    waiting = transport.get_write_buffer_size()
                    assert waiting == total - sum(posted)
                    assert client.paused or waiting <= 50_000
                if not number % 5000:
                    await asyncio.sleep(0)  # entries that are sent in parts, too
            transport.close()
            await server.lost.wait()
            assert server.data == b"".join(writes)
            assert transport.get_write_buffer_size() == 0
            assert len([each for each in posted if each]) < len(writes) / 10

    run(main)


Inner = Callable[[Any], None]


def write_inner(transport: Any) -> None:
    transport.write(b"inner" * 3)
    transport.write(b"inner" * 2)


def write_much(transport: Any) -> None:
    transport.write(b"inner" * 100_000)


def write_and_close(transport: Any) -> None:
    transport.write(b"inner")
    transport.close()


def write_and_end(transport: Any) -> None:
    transport.write(b"inner")
    transport.write_eof()


class Finalizers:
    """Calls functions in the middle of `Rsocket.write`, as finalizers of the program run there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[Callable[[], None]] = []
        self.after: list[Callable[[], None]] = []
        write = Rsocket.write

        def run_them(rsocket: Rsocket, data: bytes | memoryview) -> int:
            while self.before:
                self.before.pop()()
            done = write(rsocket, data)
            while self.after:
                self.after.pop()()
            return done

        monkeypatch.setattr(Rsocket, "write", run_them)


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.natively
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("size", [100, 100_000], ids=["small", "large"])
@pytest.mark.parametrize("in_flush", [False, True], ids=["write", "flush"])
@pytest.mark.parametrize("inner", [write_inner, write_much, write_and_close, write_and_end])
def test_finalizer_in_the_middle_of_a_write_comes_after_it(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    inner: Inner,
    in_flush: bool,
    size: int,
    moment: str,
) -> None:
    finalizers = Finalizers(monkeypatch)

    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            transport = client.transport
            sent = b""
            if in_flush:
                sent += bytes(20_000)
                transport.write(sent)
                sent += b"outer" * size
                transport.write(b"outer" * size)
                assert transport.get_write_buffer_size()
            getattr(finalizers, moment).append(lambda: inner(transport))
            if not in_flush:
                sent += b"outer" * size
                transport.write(b"outer" * size)
            await asyncio.sleep(0)
            await server.until(lambda: not finalizers.before and not finalizers.after)
            if inner in (write_inner, write_much):
                transport.write(b"last")
                transport.close()
            await server.until(lambda: server.eof)
            assert server.error is None
            rest = server.data.removeprefix(sent)
            assert len(rest) < len(server.data)
            assert rest.removesuffix(b"last").replace(b"inner", b"") == b""
            assert rest
            assert transport.get_write_buffer_size() == 0

    run(main)


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.natively
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("in_flush", [False, True], ids=["write", "flush"])
def test_finalizer_aborts_in_the_middle_of_a_write(
    run: Run, monkeypatch: pytest.MonkeyPatch, in_flush: bool, moment: str
) -> None:
    """Nothing is reported, and the data that is cut off has no end."""
    finalizers = Finalizers(monkeypatch)

    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            transport = client.transport
            if in_flush:
                transport.write(bytes(20_000))
            getattr(finalizers, moment).append(transport.abort)
            if not in_flush:
                transport.write(bytes(20_000))
            await client.lost.wait()
            await server.lost.wait()
            assert isinstance(server.error, ConnectionResetError)
            assert not server.eof
            assert transport.get_write_buffer_size() == 0

    run(main)


def test_a_paused_reader_holds_the_writer_back(run: Run) -> None:
    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            assert not server.transport.is_reading()
            client.transport.set_write_buffer_limits(high=10_000)
            assert client.transport.get_write_buffer_limits() == (2500, 10_000)
            client.transport.write(bytes(100_000))
            assert client.paused == 1
            assert client.transport.get_write_buffer_size() > 10_000
            await asyncio.sleep(0.05)
            assert server.data == b""
            server.transport.resume_reading()
            await client.until(lambda: client.paused == 0)
            await server.until(lambda: len(server.data) == 100_000)

    run(main)


class Buffered(asyncio.BufferedProtocol):
    """Receives into a buffer of its own."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.made, self.lost = self.recorder.made, self.recorder.lost
        self.until = self.recorder.until
        self.buffer = bytearray(100)
        self.data = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.recorder.connection_made(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        self.recorder.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.recorder.connection_lost(exc)


def test_a_buffered_protocol_is_filled_piece_by_piece(run: Run) -> None:
    data = os.urandom(5000)

    async def main() -> None:
        async with two(Buffered) as (client, server):
            client.transport.write(data)
            await server.until(lambda: len(server.data) == len(data))
            assert server.data == data

    run(main)


FATAL: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("a fault of the program"),
    "OSError": lambda: OSError("a fault of the program"),
    "CancelledError": lambda: asyncio.CancelledError("a fault of the program"),
}


class Raises(Recorder):
    """Raises an error in one of its methods, but not for the first bytes."""

    method = ""
    make_error: Callable[[], BaseException]

    def _raise_in(self, method: str) -> None:
        if method == self.method:
            raise type(self).make_error()

    def data_received(self, data: bytes) -> None:
        if data != b"?":
            self._raise_in("data_received")
        super().data_received(data)

    def eof_received(self) -> None:
        self._raise_in("eof_received")
        super().eof_received()


class RaisesBuffered(Buffered):
    """The same for a BufferedProtocol."""

    method = ""
    make_error: Callable[[], BaseException]
    asked = 0

    def get_buffer(self, sizehint: int) -> bytearray:
        self.asked += 1
        if self.asked > 1 and self.method == "get_buffer":
            raise type(self).make_error()
        return super().get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        super().buffer_updated(nbytes)
        if self.data != b"?" and self.method == "buffer_updated":
            raise type(self).make_error()


@pytest.mark.parametrize("kind", FATAL)
@pytest.mark.parametrize(
    "method", ["data_received", "eof_received", "get_buffer", "buffer_updated"]
)
def test_error_of_a_protocol_ends_its_connection(method: str, kind: str) -> None:
    """As in asyncio: connection_lost gets the error, and the loop reports it, unless it is an
    OSError. Other connections are not affected."""
    base = Recorder if method.endswith("received") else Buffered
    faulty: Any = type(
        "Faulty",
        (Raises if base is Recorder else RaisesBuffered,),
        {"method": method, "make_error": staticmethod(FATAL[kind])},
    )

    async def main() -> list[BaseException]:
        reported: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        async with (
            asyncio.timeout(30),
            two(base) as (client, server),
            two(faulty) as (writer, reader),
        ):
            writer.method = ""
            writer.transport.write(b"x")
            if method == "eof_received":
                await reader.until(lambda: reader.data == b"x")
                writer.transport.write_eof()
            await reader.lost.wait()
            await writer.lost.wait()
            error = getattr(reader, "recorder", reader).error
            assert type(error).__name__ == kind
            assert str(error) == "a fault of the program"
            assert [error] * (kind != "OSError") == reported
            client.transport.write(b"still here")
            await server.until(lambda: server.data[-10:] == b"still here")
        return reported

    assert len(asyncio.run(main())) == (kind != "OSError")


def test_the_end_of_the_peers_process_is_an_error(run: Run) -> None:
    async def main() -> None:
        async with two() as (client, server):
            await client.transport.get_extra_info("connection").aclose()
            await server.lost.wait()
            assert isinstance(server.error, aiordma.DisconnectedError)

    run(main)


def test_an_error_of_connection_made_is_reported() -> None:
    class Faulty(Recorder):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            raise ValueError("a fault of the program")

    async def main() -> list[str]:
        reported: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        server = await streams.create_server(Recorder, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        async with asyncio.timeout(60):
            transport, protocol = await streams.create_connection(Faulty, *address)
            transport.close()
            await protocol.lost.wait()
            assert protocol.error is None
        server.close()
        await server.wait_closed()
        return reported

    assert asyncio.run(main()) == ["a fault of the program"]


def test_a_lost_transport_forgets_its_protocol(run: Run) -> None:
    async def main() -> None:
        async with two() as (client, _server):
            transport = client.transport
            transport.close()
            await client.lost.wait()
            assert transport.get_protocol() is None
            transport.write(b"dropped")
            assert transport.get_write_buffer_size() == 0

    run(main)


class WritesMore(Recorder):
    """Writes again when it may, as SSLProtocol does with what it has encrypted."""

    more = b""

    def resume_writing(self) -> None:
        super().resume_writing()
        data, self.more = self.more, b""
        self.transport.write(data)


def test_close_sends_what_resume_writing_writes(run: Run) -> None:
    data, more = os.urandom(300_000), os.urandom(300_000)

    async def main() -> None:
        async with two(WritesMore, buffer_size=8192) as (client, server):
            client.more = more
            client.transport.set_write_buffer_limits(high=1000, low=0)
            client.transport.write(data)
            assert client.paused == 1
            client.transport.close()
            await client.lost.wait()
            await server.lost.wait()
            assert server.data == data + more

    run(main)


def test_the_peers_abort_is_a_connection_reset(run: Run) -> None:
    """Programs expect this class, as the end of a socket's connection raises it."""

    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            client.transport.write(bytes(500_000))
            client.transport.abort()
            await server.lost.wait()
            assert isinstance(server.error, ConnectionResetError)

    run(main)


# -- files ----------------------------------------------------------------------------------------


@pytest.fixture
def file_of_a_megabyte(tmp_path: Path) -> Iterator[tuple[Any, bytes]]:
    data = os.urandom(1_000_000)
    (tmp_path / "data").write_bytes(data)
    with open(tmp_path / "data", "rb") as file:
        yield file, data


def test_sendfile_falls_back_to_writing(file_of_a_megabyte: tuple[Any, bytes]) -> None:
    file, data = file_of_a_megabyte

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with two(buffer_size=8192) as (client, server):
            assert await loop.sendfile(client.transport, file, 1000, 700_000) == 700_000
            client.transport.write(b"the end")
            await server.until(lambda: server.data.endswith(b"the end"))
            assert server.data == data[1000:701_000] + b"the end"

    asyncio.run(main())


def test_sendfile_without_its_fallback_is_refused(file_of_a_megabyte: tuple[Any, bytes]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with two() as (client, _server):
            with pytest.raises(RuntimeError, match="fallback is disabled"):
                await loop.sendfile(client.transport, file_of_a_megabyte[0], fallback=False)

    asyncio.run(main())


def test_sendfile_ends_with_its_connection(file_of_a_megabyte: tuple[Any, bytes]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with two(buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            sending = asyncio.create_task(loop.sendfile(client.transport, file_of_a_megabyte[0]))
            await asyncio.sleep(0.05)
            server.transport.abort()
            with pytest.raises(ConnectionError):
                await sending

    asyncio.run(main())


# -- servers --------------------------------------------------------------------------------------


def test_wait_closed_waits_for_an_open_server(run: Run) -> None:
    async def main() -> None:
        server = await streams.start_server(echo, ADDRESS, 0)
        waiting = asyncio.create_task(server.wait_closed())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        server.close()
        await waiting
        await server.wait_closed()

    run(main)


def test_aborted_clients_are_disconnected(run: Run) -> None:
    async def main() -> None:
        server = await streams.create_server(Recorder, ADDRESS, 0)
        _, peer = await streams.create_connection(Recorder, *server.sockets[0].getsockname())
        peer.transport.write(b"?")
        while not server._transports:
            await asyncio.sleep(0.001)
        server.abort_clients()
        await peer.lost.wait()
        assert peer.eof  # as over TCP: nothing that was written is missing
        server.close()
        await server.wait_closed()

    run(main)


def test_close_stops_listening_at_once(run: Run) -> None:
    async def main() -> None:
        first = await streams.start_server(echo, ADDRESS, 0)
        address = first.sockets[0].getsockname()
        first.close()
        assert first.sockets == ()
        assert not first.is_serving()
        with pytest.raises(ConnectionError):
            await streams.open_connection(*address)
        await first.wait_closed()

    run(main)


def test_a_closed_server_ends_with_its_loop() -> None:
    """A program closes its loop right after the server, without a warning."""
    program = f"""
import asyncio, gc
from aiordma import streams
from aiordma.streams.rsocket import Rsocket
loop = asyncio.new_event_loop()
server = loop.run_until_complete(streams.create_server(asyncio.Protocol, {ADDRESS!r}, 0))
server.close()
loop.close()
del loop, server
gc.collect()
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_protocol_factory_that_raises_is_reported() -> None:
    calls = 0

    def make() -> Recorder:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("a fault of the program")
        return Recorder()

    async def main() -> list[str]:
        reported: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        server = await streams.create_server(make, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        _, refused = await streams.create_connection(Recorder, *address)
        await refused.lost.wait()
        assert isinstance(refused.error, ConnectionError)
        transport, _protocol = await streams.create_connection(Recorder, *address)
        transport.write(b"?")
        while not server._transports:
            await asyncio.sleep(0.001)
        transport.close()
        server.close()
        await server.wait_closed()
        return reported

    assert asyncio.run(main()) == ["a fault of the program"]


def test_a_refused_connection_has_the_number_and_text_of_an_oserror() -> None:
    """aiohttp, for example, shows only these two."""

    async def main() -> None:
        server = await streams.create_server(Recorder, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        server.close()
        await server.wait_closed()
        with pytest.raises(ConnectionRefusedError) as raised:
            await streams.create_connection(Recorder, *address)
        assert raised.value.errno == errno.ECONNREFUSED
        assert raised.value.strerror == str(raised.value)
        assert str(address[1]) in raised.value.strerror

    asyncio.run(main())


def test_foreign_addresses_are_refused_as_by_asyncio(run: Run) -> None:
    """As of a bind of asyncio's, also if the device says ENODEV."""

    async def main() -> None:
        for opening in (
            streams.start_server(echo, NOT_OURS, 0),
            streams.open_connection(ADDRESS, 1, local_addr=(NOT_OURS, 0)),
        ):
            with pytest.raises(OSError, match=f"{NOT_OURS} is no address of this") as caught:
                await opening
            assert caught.value.errno == errno.EADDRNOTAVAIL

    run(main)


# -- arguments ------------------------------------------------------------------------------------


WRONG: Any = True


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: streams.create_connection(Recorder), "host and port"),
        (lambda: streams.create_connection(Recorder, "x", 1, sock=socket.socket()), "no socket"),
        (lambda: streams.create_connection(Recorder, "x", 1, server_hostname="y"), "with ssl"),
        (lambda: streams.create_server(Recorder, sock=socket.socket()), "no socket"),
        (lambda: streams.create_server(Recorder, "x", 1, reuse_port=True), "has one listener"),
        (lambda: streams.create_server(Recorder), "Neither host/port"),
        (lambda: streams.create_server(Recorder, "x", ssl=WRONG), "SSLContext"),
        (lambda: streams.create_server(Recorder, "x", ssl_handshake_timeout=1), "with ssl"),
        (lambda: streams.create_server(Recorder, "x", buffer_sise=1), "buffer_sise"),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed <socket")
def test_wrong_arguments_are_refused(call: Callable[[], Any], said: str) -> None:
    async def main() -> None:
        await call()

    with pytest.raises((TypeError, ValueError), match=said):
        asyncio.run(main())
