"""Programs that know nothing of RDMA, under LD_PRELOAD of rdma-core's librspreload: their sockets
are rsockets, and our streams are the peers."""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn

from aiordma import streams
from tests.devices import ADDRESS
from tests.interop.programs import Program, connected_to_rsockets, running
from tests.ports import free_port

LIBRARY = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"
SCRIPT = str(Path(__file__).with_name("preloaded.py"))
SIZE = 300_000


def preloaded(*command: str | int) -> AbstractAsyncContextManager[Program]:
    """Run a program whose sockets are rsockets."""
    return running("env", f"LD_PRELOAD={LIBRARY}", *command)


# -- plain sockets, of a Python program -----------------------------------------------------------


@pytest.mark.anyio
async def test_a_preloaded_client_talks_to_our_listener() -> None:
    async with streams.listen_stream(ADDRESS) as listener:
        command = (sys.executable, SCRIPT, "client", ADDRESS, listener.port, SIZE)
        async with preloaded(*command) as client, await listener.accept() as stream:
            received = b""
            async for data in stream:
                received += data
                await stream.send(data)
            await stream.send_eof()
            await client.has_written(hashlib.sha256(received).hexdigest())
    assert len(received) == SIZE


@pytest.mark.anyio
async def test_our_stream_talks_to_a_preloaded_server() -> None:
    port = free_port()
    async with preloaded(sys.executable, SCRIPT, "server", ADDRESS, port) as server:
        await server.listens(port)
        async with connected_to_rsockets(port) as stream:
            sent, received = bytes(range(256)) * 40, b""
            for _ in range(30):
                await stream.send(sent)
                while len(received) < len(sent):
                    received += await stream.receive()
                assert received == sent
                received = b""
            await stream.send_eof()
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        await server.has_written(f"accepted {ADDRESS}")


# -- curl, of uvicorn -----------------------------------------------------------------------------

Call = Callable[..., Awaitable[Any]]


async def app(scope: Any, receive: Call, send: Call) -> None:
    """An ASGI application: answers with the digest of the body, and streams 1 MB for /stream."""
    digest, more = hashlib.sha256(), True
    while more:
        message = await receive()
        digest.update(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        for _ in range(100):
            body = {"type": "http.response.body", "body": bytes(10_000), "more_body": True}
            await send(body)
    await send({"type": "http.response.body", "body": digest.hexdigest().encode()})


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Yield the address of uvicorn with the application, in this process."""
    config = uvicorn.Config(app, host=ADDRESS, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    assert isinstance(server.servers[0], streams.StreamServer)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task


def run_curl(*arguments: str) -> str:
    """Run curl, whose URL is the server's; return what it has written."""

    async def main() -> str:
        async with serving() as url:
            words = [each.replace("URL", url) for each in arguments]
            async with preloaded("curl", "--silent", "--show-error", "--fail", *words) as curl:
                pass
        return curl.output

    with asyncio.Runner(loop_factory=streams.new_event_loop) as runner:
        return runner.run(main())


def test_curl_gets_what_uvicorn_streams(tmp_path: Path) -> None:
    got = tmp_path / "got"
    run_curl("--output", str(got), "URL/stream")
    assert got.read_bytes() == bytes(1_000_000) + hashlib.sha256().hexdigest().encode()


def test_curl_posts_a_body_to_uvicorn(tmp_path: Path) -> None:
    body, got = tmp_path / "body", tmp_path / "got"
    body.write_bytes(bytes(range(256)) * 4000)
    run_curl("--output", str(got), "--data-binary", f"@{body}", "URL/")
    assert got.read_text() == hashlib.sha256(body.read_bytes()).hexdigest()


def test_curl_keeps_its_connection(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = run_curl(
        *("--write-out", r"%{num_connects}\n"),
        *("--output", str(first), "URL/", "--output", str(second), "URL/"),
    )
    assert first.read_text() == second.read_text() == hashlib.sha256().hexdigest()
    assert made.split() == ["1", "0"]  # connections, for each of the two
