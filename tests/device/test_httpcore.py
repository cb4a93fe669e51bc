"""httpx over RDMA streams on every event loop, with and without TLS."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpcore
import httpx
import pytest
from anyio.abc import ByteStream
from anyio.streams.tls import TLSListener, TLSStream

from aiordma.integrations.httpcore import StreamBackend, StreamTransport
from aiordma.streams import listen_stream
from tests.device.players import one_loop
from tests.devices import ADDRESS

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]


class Server:
    """Answers each request with its number on its connection."""

    connections = 0

    async def handle(self, stream: ByteStream) -> None:
        self.connections += 1
        requests, received = 0, b""
        async with stream:
            try:
                while True:
                    received += await stream.receive()
                    while b"\r\n\r\n" in received:
                        _, _, received = received.partition(b"\r\n\r\n")
                        requests += 1
                        head = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
                        await stream.send(head + str(requests).encode())
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, str]]:
    """Yield the server and its URL."""
    server = Server()
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        wrapped: Any = listener
        if context is not None:
            wrapped = TLSListener(listener, context, standard_compatible=False)
        group.start_soon(wrapped.serve, server.handle)
        yield server, f"http{'' if context is None else 's'}://{ADDRESS}:{listener.port}/"
        group.cancel_scope.cancel()


@pytest.mark.natively
async def test_connect_times_out() -> None:
    async with listen_stream(ADDRESS) as listener:  # and accepts no stream
        with pytest.raises(httpcore.ConnectTimeout, match=r"accept took longer than 0\.3 s"):
            await StreamBackend().connect_tcp(ADDRESS, listener.port, timeout=0.3)


@pytest.mark.parametrize("is_secured", [False, True])
async def test_requests_share_a_connection(
    is_secured: bool, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async with (
        serving(contexts[0] if is_secured else None) as (server, url),
        httpx.AsyncClient(transport=StreamTransport(verify=contexts[1]), timeout=60) as client,
    ):
        assert [(await client.get(url)).text for _ in range(3)] == ["1", "2", "3"]
        assert server.connections == 1
        async with client.stream("GET", url) as answer:
            below = answer.extensions["network_stream"]
            assert (below.get_extra_info("ssl_object") is not None) is is_secured
            assert below.get_extra_info("server_addr")[0] == ADDRESS


async def test_wrong_certificate_is_a_connect_error(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with (
        serving(contexts[0]) as (server, url),
        httpx.AsyncClient(transport=StreamTransport(), timeout=60) as client,
    ):
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await client.get(url)
        assert server.connections == 0


@pytest.mark.parametrize("is_end_of_stream", [False, True])
async def test_end_during_the_handshake_is_a_connect_error(
    is_end_of_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some versions of OpenSSL, anyio raises EndOfStream then, with others an SSLError."""

    async def close(stream: ByteStream) -> None:
        async with stream:
            await stream.receive()

    async def end(stream: ByteStream, **_: Any) -> None:
        await stream.send(b"hello")
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        raise anyio.EndOfStream

    if is_end_of_stream:
        monkeypatch.setattr(TLSStream, "wrap", end)
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, close)
        async with httpx.AsyncClient(transport=StreamTransport(), timeout=60) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"https://{ADDRESS}:{listener.port}/")
        group.cancel_scope.cancel()


async def test_silent_server_is_a_connect_timeout_of_tls(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, lambda _stream: anyio.sleep_forever())
        stream = await StreamBackend().connect_tcp(ADDRESS, listener.port)
        with pytest.raises(httpcore.ConnectTimeout):
            await stream.start_tls(contexts[1], ADDRESS, timeout=0.3)
        with pytest.raises(httpcore.WriteError):  # it was closed
            await stream.write(b"x")
        group.cancel_scope.cancel()


@one_loop
@pytest.mark.parametrize("kind", [StreamBackend, StreamTransport])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"close_timeout": -1}, r"\(\): close_timeout=-1 "),
        ({"keepalive": 0}, r"\(\): keepalive=0 "),
        ({"receive_buffers": 16}, r"\(\) has no parameter 'receive_buffers': "),
        ({"device": ""}, r"\(\): device='': "),
        ({"device": 5}, r"\(\): device=5 "),
    ],
)
async def test_wrong_arguments_are_refused(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{kind.__name__}{said}"):
        kind(**options)


@one_loop
async def test_limits_are_those_of_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    pool = httpcore.AsyncConnectionPool

    def make(**options: Any) -> httpcore.AsyncConnectionPool:
        made.append(options)
        return pool(**options)

    monkeypatch.setattr(httpcore, "AsyncConnectionPool", make)
    httpx.AsyncHTTPTransport()
    StreamTransport()
    StreamTransport(limits=httpx.Limits(max_connections=7))
    names = ("max_connections", "max_keepalive_connections", "keepalive_expiry")
    expected, ours, given = ([options[name] for name in names] for options in made)
    assert ours == expected
    assert given == [7, None, 5.0]
