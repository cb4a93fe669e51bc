"""Programs that know nothing of RDMA, over it: uvicorn, httpx, aiohttp, websockets, grpclib."""

import asyncio
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import anyio
import grpclib.client
import grpclib.const
import grpclib.encoding.base
import grpclib.server
import httpx
import pytest
import uvicorn
import websockets.asyncio.client
from anyio.abc import SocketAttribute
from grpclib.exceptions import GRPCError

from aiordma import streams
from aiordma.integrations.httpcore import StreamTransport
from tests.devices import ADDRESS, DEVICE
from tests.forked import python
from tests.ports import free_port

Call = Callable[..., Awaitable[Any]]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.one_kernel_device,
    pytest.mark.slow,
]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await main()

    with asyncio.Runner(loop_factory=streams.new_event_loop) as runner:
        runner.run(limited())


# -- HTTP -----------------------------------------------------------------------------------------


async def app(scope: Any, receive: Call, send: Call) -> None:
    """An ASGI application: counts a body, streams one, and shouts over a WebSocket."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            await send({"type": "websocket.send", "text": message["text"].upper()})
        return
    length, more = 0, True
    while more:
        message = await receive()
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"].startswith("/stream"):
        for _ in range(int(scope["path"].removeprefix("/stream") or 100)):
            body = {"type": "http.response.body", "body": bytes(10_000), "more_body": True}
            await send(body)
    answer = f"{length} {scope['client'][0]} {scope['client'][1]}".encode()
    await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Yield the address of uvicorn with the application, in this process."""
    config = uvicorn.Config(app, host=ADDRESS, port=0, log_level="warning")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.01)
    assert isinstance(server.servers[0], streams.StreamServer)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        await running


async def chunks(size: int, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(size)


def test_httpx_and_uvicorn() -> None:
    async def main() -> None:
        async with (
            serving() as address,
            httpx.AsyncClient(transport=StreamTransport(verify=False), timeout=60) as client,
        ):
            answers = [(await client.get(f"http://{address}/")).text for _ in range(3)]
            assert answers[0].startswith(f"0 {ADDRESS} ")
            assert len(set(answers)) == 1, "the connection is kept alive"
            answer = await client.post(f"http://{address}/", content=chunks(50_000, 40))
            assert answer.text.split()[0] == "2000000"
            answer = await client.get(f"http://{address}/stream")
            assert len(answer.content) > 1_000_000

    run(main)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


SIZES = {"rxe0": (100_000_000, 10_000_000), "siw0": (10_000_000, 10_000_000)}
"""Bytes of a body to the server, and to the client. 100 MB to the server take rxe's virtual machine
5 s on a quiet machine, and 42 s beside other virtual machines; siw's has one processor, and takes
longer."""
TO_SERVER, TO_CLIENT = SIZES.get(DEVICE, (100_000_000, 100_000_000))


@pytest.mark.parametrize(("direction", "size"), [("to", TO_SERVER), ("from", TO_CLIENT)])
def test_large_bodies_need_little_memory(direction: str, size: int) -> None:
    """In chunks, to and from the server."""

    async def main() -> None:
        async with (
            serving() as address,
            httpx.AsyncClient(transport=StreamTransport(verify=False), timeout=140) as client,
        ):

            async def post(size: int) -> None:
                content = chunks(100_000, size // 100_000)
                answer = await client.post(f"http://{address}/", content=content)
                assert answer.text.split()[0] == str(size)

            async def get(size: int) -> None:
                received = 0
                url = f"http://{address}/stream{size // 10_000}"
                async with client.stream("GET", url) as response:
                    async for part in response.aiter_raw():
                        received += len(part)
                assert received > size

            exchange = post if direction == "to" else get
            await exchange(1_000_000)
            before = peak_bytes()
            await exchange(size)
            assert peak_bytes() - before < size // 4

    run(main)


def test_httpx_reports_a_peer_that_is_not_there() -> None:
    async def main() -> None:
        async with serving() as address:
            pass
        async with httpx.AsyncClient(transport=StreamTransport(verify=False)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://{address}/")

    run(main)


def test_aiohttp_as_client_and_server() -> None:
    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(text=str(len(await request.read())))

    async def main() -> None:
        application = aiohttp.web.Application(client_max_size=1 << 24)
        application.router.add_post("/", answer)
        runner = aiohttp.web.AppRunner(application)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, ADDRESS, 0).start()
        (host, port) = runner.addresses[0]
        async with aiohttp.ClientSession() as session:
            for size in (10, 500_000):
                async with session.post(f"http://{host}:{port}/", data=bytes(size)) as response:
                    assert await response.text() == str(size)
        await runner.cleanup()

    run(main)


def test_httpx_needs_no_change() -> None:
    async def main() -> None:
        async with serving() as address, httpx.AsyncClient(timeout=60) as client:
            answers = [(await client.get(f"http://{address}/")).text for _ in range(3)]
            async with client.stream("GET", f"http://{address}/") as response:
                below = response.extensions["network_stream"].get_extra_info("socket")
        assert len(set(answers)) == 1
        assert answers[0].startswith(f"0 {ADDRESS} ")  # one connection, which the server can name
        assert isinstance(below, streams.StreamSocket)

    run(main)


class ClosingServer:
    """Answers each request in a thread and a loop of its own, and closes each connection once the
    program says so."""

    def __init__(self) -> None:
        self.connections = 0
        self.address = ""
        self._serves = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._stop: asyncio.Future[None] | None = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        while await reader.readline():
            while await reader.readline() not in (b"\r\n", b""):
                pass
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = self._loop.create_future()
        async with await asyncio.start_server(self._answer, ADDRESS, 0) as server:
            host, port = server.sockets[0].getsockname()
            self.address = f"{host}:{port}"
            self._serves.set()
            await self._stop
            await self._close()

    async def _close(self) -> None:
        while self._writers:
            writer = self._writers.pop()
            writer.close()
            await writer.wait_closed()  # the client's machine has the end then

    def close_connections(self) -> None:
        """Blocks, as a program that computes, until also the client's device has the end."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(60)
        time.sleep(0.3)

    def __enter__(self) -> "ClosingServer":
        self._thread = threading.Thread(target=run, args=[self._serve])
        self._thread.start()
        assert self._serves.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set_result, None)
        self._thread.join()


@pytest.mark.parametrize("is_unchanged", [True, False])
def test_httpx_notices_idle_connections_that_the_server_has_closed(is_unchanged: bool) -> None:
    """Also if the event loop has not run since then, as over TCP: with a new connection in its
    place."""

    async def main() -> None:
        transport = None if is_unchanged else StreamTransport()
        async with httpx.AsyncClient(transport=transport, timeout=60) as client:
            for count in range(1, 4):
                for _ in range(2):
                    assert (await client.get(f"http://{server.address}/")).text == "ok"
                assert server.connections == count
                server.close_connections()

    with ClosingServer() as server:
        run(main)


def test_anyio_connects_by_its_own_function() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, ADDRESS, 0)
        host, port = server.sockets[0].getsockname()
        async with await anyio.connect_tcp(host, port) as stream:
            assert stream.extra(SocketAttribute.remote_address) == (host, port)
            assert stream.extra(SocketAttribute.remote_port) == port
            await stream.send(bytes(100_000))
            await stream.send_eof()
            assert sum([len(data) async for data in stream]) == 100_000
        server.close()
        await server.wait_closed()

    run(main)


def test_anyios_own_socket_stream_closes_in_order() -> None:
    """Its aclose() is a close and an abort: the peer has everything, and the end."""

    async def main() -> None:
        read: asyncio.Queue[bytes] = asyncio.Queue()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            read.put_nowait(await reader.read())
            writer.close()

        server = await asyncio.start_server(accepted, ADDRESS, 0)
        for size in (5, 200_000, 1_000_000):
            async with await anyio.connect_tcp(*server.sockets[0].getsockname()) as stream:
                await stream.send(bytes(size))
            assert len(await read.get()) == size
        server.close()
        await server.wait_closed()

    run(main)


@contextmanager
def uvicorn_program() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run uvicorn's command line in a process; yields it and its URL."""
    loop = ["--loop", "aiordma.streams:new_event_loop"]
    where = ["--host", ADDRESS, "--port", str(free_port())]
    with subprocess.Popen(
        [*python(), "-m", "uvicorn", *loop, *where, "tests.device.asgi_program:app"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                found = re.search(r"running on (http://\S+)", line)
                if found:
                    yield process, found[1]
                    break
        finally:
            process.kill()


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT], ids=lambda stop: stop.name)
def test_uvicorns_command_line_serves_over_rdma(stop: signal.Signals) -> None:
    async def ask(url: str) -> str:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.get(url)).text

    with uvicorn_program() as (process, url):
        with asyncio.Runner(loop_factory=streams.new_event_loop) as runner:
            assert runner.run(ask(url)) == "StreamEventLoop"
        process.send_signal(stop)
        _, said = process.communicate(timeout=60)
    assert "Finished server process" in said
    assert "Traceback" not in said
    assert process.returncode in (0, -stop)  # uvicorn sends itself the signal again, at the end


@pytest.mark.natively
@pytest.mark.parametrize("option", ["--workers", "--reload", "--uds", "--fd"])
def test_uvicorn_serves_by_tcp_where_it_has_a_socket(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/streams.md warns: also on the streams' event loop, and without an error."""
    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)  # a device by name permits no TCP
    path = str(tmp_path / "socket")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        values = {"--workers": "2", "--reload": "", "--uds": path, "--fd": str(listening.fileno())}
        if option != "--fd":
            listening.close()
        command = [*(sys.executable, "-m", "uvicorn", "--loop", "aiordma.streams:new_event_loop")]
        command += ["--port", str(port), *filter(None, (option, values[option]))]
        command += ["--reload-dir", str(tmp_path)] if option == "--reload" else []
        with subprocess.Popen(
            [*command, "tests.device.asgi_program:app"],
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[listening.fileno()] if option == "--fd" else [],
        ) as process:
            assert process.stderr is not None
            try:
                assert any("startup complete" in line for line in process.stderr)
                transport = httpx.HTTPTransport(uds=path if option == "--uds" else None, retries=5)
                with httpx.Client(transport=transport, timeout=60) as client:
                    assert client.get(f"http://127.0.0.1:{port}/").text == "StreamEventLoop"
            finally:
                process.terminate()  # not killed, as it ends its workers
                process.communicate(timeout=60)


def test_aiohttp_speaks_to_uvicorn() -> None:
    async def main() -> None:
        async with serving() as address, aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/stream") as response:
                assert len(await response.read()) > 1_000_000
            async with session.ws_connect(f"http://{address}/") as socket:
                await socket.send_str("hello")
                assert await socket.receive_str() == "HELLO"

    run(main)


def test_websockets_speaks_to_uvicorn() -> None:
    async def main() -> None:
        async with (
            serving() as address,
            websockets.asyncio.client.connect(f"ws://{address}/", proxy=None) as socket,
        ):
            for text in ("hello", "x" * 100_000):
                await socket.send(text)
                assert await socket.recv() == text.upper()

    run(main)


# -- gRPC -----------------------------------------------------------------------------------------


class Plain(grpclib.encoding.base.CodecBase):
    """Messages are bytes, so that no protobuf compiler is needed."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


class Shouter:
    """A service with a unary and a streaming call, and one that never answers."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def unary(self, stream: Any) -> None:
        await stream.send_message((await stream.recv_message()).upper())

    async def both(self, stream: Any) -> None:
        async for message in stream:
            await stream.send_message(message.upper())

    async def silent(self, stream: Any) -> None:
        try:
            await stream.recv_message()
            self.called.set()
            await asyncio.sleep(1000)
        finally:
            self.cancelled.set()

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        kinds = grpclib.const.Cardinality
        return {
            "/s/unary": grpclib.const.Handler(self.unary, kinds.UNARY_UNARY, bytes, bytes),
            "/s/both": grpclib.const.Handler(self.both, kinds.STREAM_STREAM, bytes, bytes),
            "/s/silent": grpclib.const.Handler(self.silent, kinds.UNARY_UNARY, bytes, bytes),
        }


def test_grpclib_as_client_and_server() -> None:
    async def main() -> None:
        service = Shouter()
        server = grpclib.server.Server([service], codec=Plain())
        await server.start(ADDRESS, 0)
        listening: Any = server._server
        assert isinstance(listening, streams.StreamServer)
        host, port = listening.sockets[0].getsockname()
        async with grpclib.client.Channel(host, port, codec=Plain()) as channel:
            unary = grpclib.client.UnaryUnaryMethod(channel, "/s/unary", bytes, bytes)
            for message in (b"hello", b"x" * 1_000_000):
                assert await unary(message) == message.upper()
            both = grpclib.client.StreamStreamMethod(channel, "/s/both", bytes, bytes)
            assert await both([b"a", b"b"]) == [b"A", b"B"]
            silent = grpclib.client.UnaryUnaryMethod(channel, "/s/silent", bytes, bytes)
            with pytest.raises((asyncio.TimeoutError, GRPCError)):
                await silent(b"?", timeout=0.3)
            await service.cancelled.wait()
            assert await unary(b"hello") == b"HELLO"
        server.close()
        await server.wait_closed()

    run(main)


def test_a_cancelled_grpc_call_is_cancelled_on_the_server() -> None:
    async def main() -> None:
        service = Shouter()
        server = grpclib.server.Server([service], codec=Plain())
        await server.start(ADDRESS, 0)
        listening: Any = server._server
        host, port = listening.sockets[0].getsockname()
        async with grpclib.client.Channel(host, port, codec=Plain()) as channel:
            silent = grpclib.client.UnaryUnaryMethod(channel, "/s/silent", bytes, bytes)
            call = asyncio.create_task(silent(b"?"))
            await service.called.wait()
            assert not service.cancelled.is_set()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await service.cancelled.wait()
            unary = grpclib.client.UnaryUnaryMethod(channel, "/s/unary", bytes, bytes)
            assert await unary(b"hello") == b"HELLO"
        server.close()
        await server.wait_closed()

    run(main)
