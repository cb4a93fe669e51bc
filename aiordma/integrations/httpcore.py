"""httpcore, and httpx above it, over RDMA streams: a network backend, and a transport with it.

async with httpx.AsyncClient(transport=aiordma.integrations.httpcore.StreamTransport()) as client:
    await client.get("http://192.0.2.1:8000/")
"""

import ssl
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

import anyio
import httpcore
import httpx
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute, TLSStream

from aiordma._base.provider import Requirement
from aiordma.streams import Stream, StreamOptions, connect_stream
from aiordma.streams.settings import StreamSettings

__all__ = ("StreamBackend", "StreamTransport")

LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=5.0)
"""httpx's own defaults, for which it has no public name."""

_READ = (
    (TimeoutError, httpcore.ReadTimeout),
    ((OSError, anyio.BrokenResourceError, anyio.ClosedResourceError), httpcore.ReadError),
)
_WRITE = (
    (TimeoutError, httpcore.WriteTimeout),
    ((OSError, anyio.BrokenResourceError, anyio.ClosedResourceError), httpcore.WriteError),
)
_CONNECT = (
    (TimeoutError, httpcore.ConnectTimeout),
    (
        (OSError, anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError),
        httpcore.ConnectError,
    ),
)


@contextmanager
def _translated(table: tuple[tuple[Any, type[Exception]], ...]) -> Any:
    try:
        yield
    except Exception as error:
        for kinds, translation in table:
            if isinstance(error, kinds):
                raise translation(str(error)) from error
        raise


def _check(kind: type[object], device: str, options: Mapping[str, Any]) -> None:
    Requirement(device, kind.__name__)
    StreamSettings(kind, options)


class _NetworkStream(httpcore.AsyncNetworkStream):
    def __init__(self, stream: ByteStream, below: Stream) -> None:
        self._stream = stream
        self._below = below

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _translated(_READ), anyio.fail_after(timeout):
            try:
                return await self._stream.receive(max_bytes)
            except anyio.EndOfStream:
                return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _translated(_WRITE), anyio.fail_after(timeout):
            await self._stream.send(buffer)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        with _translated(_CONNECT), anyio.fail_after(timeout):
            try:
                secured = await TLSStream.wrap(
                    self._stream,
                    server_side=False,
                    hostname=server_hostname,
                    ssl_context=ssl_context,
                    standard_compatible=False,
                )
            except BaseException:
                await self._stream.aclose()
                raise
        return _NetworkStream(secured, self._below)

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of an idle connection: has the peer closed it?
            return self._below.is_readable
        attribute = {
            "ssl_object": TLSAttribute.ssl_object,
            "client_addr": SocketAttribute.local_address,
            "server_addr": SocketAttribute.remote_address,
        }.get(info)
        return None if attribute is None else self._stream.extra(attribute, None)


class StreamBackend(httpcore.AsyncNetworkBackend):
    """A network backend of httpcore that connects RDMA streams.

    Args:
        device, options: as of `aiordma.streams.connect_stream`.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
    """

    def __init__(self, device: str = "auto", **options: Unpack[StreamOptions]) -> None:
        _check(StreamBackend, device, options)
        self._device = device
        self._options = options

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect a stream (an httpcore.AsyncNetworkBackend).

        Args:
            host, port: the peer's.
            timeout: seconds for all steps together, or None.
            local_address: an address of this machine to connect from, or None.
            socket_options: without effect.

        Raises:
            httpcore.ConnectTimeout, httpcore.ConnectError: the stream could not be connected.

        Cancellation: nothing is left.
        """
        source = None if local_address is None else (local_address, 0)
        with _translated(_CONNECT):
            stream = await connect_stream(
                host, port, source=source, timeout=timeout, device=self._device, **self._options
            )
        return _NetworkStream(stream, stream)

    async def sleep(self, seconds: float) -> None:
        """Wait (an httpcore.AsyncNetworkBackend).

        Args:
            seconds: how long.

        Raises: nothing.

        Cancellation: ends the wait.
        """
        await anyio.sleep(seconds)


class StreamTransport(httpx.AsyncHTTPTransport):
    """A transport of httpx whose connections are RDMA streams.

    Args:
        verify: as of httpx.AsyncHTTPTransport.
        http2: as of httpx.AsyncHTTPTransport.
        limits: as of httpx.AsyncHTTPTransport. (httpx.AsyncClient ignores its own if it is given a
            transport.)
        device, options: as of `aiordma.streams.connect_stream`.

    Raises:
        as `StreamBackend`.
    """

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | bool = True,
        http2: bool = False,
        limits: httpx.Limits = LIMITS,
        device: str = "auto",
        **options: Unpack[StreamOptions],
    ) -> None:
        _check(StreamTransport, device, options)
        # In place of the base class's constructor, which makes a pool of TCP connections.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(verify=verify),
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            http2=http2,
            network_backend=StreamBackend(device, **options),
        )
