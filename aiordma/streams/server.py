"""asyncio's functions for servers, over RDMA, with the same arguments."""

import asyncio
import errno
import logging
import socket
import ssl as tls
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from aiordma._base.arguments import whole_number, wrong_type
from aiordma._base.errors import (
    BusyError,
    DeviceRemovedError,
    VerbsCallError,
    cause_text,
)
from aiordma._base.hints import cannot_bind, is_own_address
from aiordma._base.process import forked, here, require_same_process
from aiordma._base.provider import Requirement
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import Connection
from aiordma._connection.listener_endpoint import MOST_BACKLOG, wait_for_port
from aiordma._loop.event_loop import asyncio_event_loop
from aiordma._loop.private import expect_unfinished
from aiordma._runtime.address_lookup import addresses_of, checked_host, checked_service
from aiordma.streams.client import LIMIT
from aiordma.streams.listener import StreamListener, listen_for_rsockets
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.settings import StreamSettings
from aiordma.streams.sockets import StreamSocket
from aiordma.streams.tls import check_tls, tls_protocol
from aiordma.streams.transport import StreamTransport

__all__ = ("StreamServer", "create_server", "start_server")

logger: logging.Logger = logging.getLogger("aiordma")

_WAITS_FOR_STREAMS = sys.version_info >= (3, 12)
"""Whether `wait_closed` of a closed server waits for its streams."""

_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""What listening on an IPv6 address fails with if the system has none."""

ON_TRIO = "use aiordma.streams.listen_stream"


class StreamServer(asyncio.AbstractServer):
    """Listens for streams, and makes a protocol for each, as asyncio.Server does."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listeners: list[StreamListener],
        make: Callable[[Connection, Rsocket, "StreamServer"], object],
    ) -> None:
        self._process = here.pid
        self._loop = loop
        self._listeners = listeners
        self._make = make
        self._accepting: list[asyncio.Task[None]] = []
        self._is_closed = False
        self._transports: set[StreamTransport] = set()
        self._idle: list[asyncio.Future[None]] = []
        self._serving: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<StreamServer at {[each.getsockname() for each in self.sockets]}>"

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The event loop.

        Raises: nothing.
        """
        return self._loop

    def is_serving(self) -> bool:
        """Whether the server accepts peers. False in a forked child.

        Raises: nothing.
        """
        is_open = not self._is_closed and self._process == here.pid
        return is_open and not all(task.done() for task in self._accepting)

    def _tell_if_inherited(self) -> None:
        """Log that the server does not serve in this process, a forked child that runs the event
        loop: no call of it raises a ForkError there if it has begun to serve before."""
        if self._process != here.pid and self._accepting and not self._is_closed:
            logger.error("this process serves no streams: %s", forked(self._process, repr(self)))

    @property
    def sockets(self) -> tuple[StreamSocket, ...]:
        """What stands in for listening sockets; empty once the server is closed, or its loop has
        ended."""
        found = [each._socket() for each in self._listeners]
        return tuple(each for each in found if each is not None)

    async def start_serving(self) -> None:
        """Begin to accept peers. Idempotent.

        Raises:
            RuntimeError: the server is closed.
            ForkError: called in a forked child.

        Cancellation: has no effect, because the call does not wait.
        """
        require_same_process(self._process, self)
        if self._is_closed:
            raise RuntimeError(f"server {self!r} is closed")
        if not self._accepting:
            for listener in self._listeners:
                listener._set_serving(True)
            self._accepting = [
                self._loop.create_task(self._accept(listener)) for listener in self._listeners
            ]
            for task in self._accepting:
                task.set_name("aiordma: accepting streams")

    async def serve_forever(self) -> None:
        """Accept peers until cancelled; then close.

        Raises:
            RuntimeError: the server is closed, or another task serves.
            ForkError: called in a forked child.

        Cancellation: the server is closed.
        """
        require_same_process(self._process, self)
        if self._serving is not None:
            raise RuntimeError(f"server {self!r} is already being awaited on serve_forever()")
        await self.start_serving()
        self._serving = self._loop.create_future()
        try:
            await self._serving
        except asyncio.CancelledError:
            self.close()
            await self.wait_closed()
            raise
        finally:
            self._serving = None

    async def _accept(self, listener: StreamListener) -> None:
        try:
            await listener._accept_all(self._make_protocol)
        except DeviceRemovedError as error:
            logger.error("%r accepts no more streams: %s", self, cause_text(error))

    def _make_protocol(self, connection: Connection, rsocket: Rsocket) -> None:
        try:
            self._make(connection, rsocket, self)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._loop.call_exception_handler(
                {"message": f"{self!r} could not make a stream's protocol", "exception": error}
            )
            connection._close_soon()

    def attach(self, transport: StreamTransport) -> None:
        """Count a transport until it is lost.

        Args:
            transport: one of an accepted stream.

        Raises: nothing.
        """
        self._transports.add(transport)

    def detach(self, transport: StreamTransport) -> None:
        """Forget a transport that is lost.

        Args:
            transport: one of an accepted stream.

        Raises: nothing.
        """
        self._transports.discard(transport)
        self._wake_if_idle()

    def _wake_if_idle(self) -> None:
        if self._is_closed and not self._transports:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    def close(self) -> None:
        """Stop listening. Accepted streams stay open. Idempotent.

        The device frees the port in the background: `create_server` in the same event loop waits
        for that, other programs can use the port after `wait_closed`.

        Raises: nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        # The server listens no more when this call returns, as in asyncio: a program may close its
        # loop next. `wait_closed` waits for what the device does.
        for listener in self._listeners:
            listener._close_soon()
        for task in self._accepting:
            expect_unfinished(task)
        if self._serving is not None and not self._serving.done():
            self._serving.cancel()
        self._wake_if_idle()

    async def wait_closed(self) -> None:
        """Wait until the server is closed, and its accepted streams have ended, as asyncio.Server
        does. With Python 3.11, accepted streams are waited for only if the server is open at the
        call.

        Raises: nothing.

        Cancellation: has no effect on the server.
        """
        if self._process != here.pid:
            return  # the server belongs to the parent process
        if not self._is_closed or (_WAITS_FOR_STREAMS and self._transports):
            waiter = self._loop.create_future()
            self._idle.append(waiter)
            await waiter
        await _close_all(self._listeners)

    def close_clients(self) -> None:
        """Close the transports of all accepted streams.

        Raises: nothing.
        """
        for transport in list(self._transports):
            transport.close()

    def abort_clients(self) -> None:
        """Abort the transports of all accepted streams.

        Raises: nothing.
        """
        for transport in list(self._transports):
            transport.abort()


async def create_server(
    protocol_factory: Callable[[], asyncio.BaseProtocol],
    host: "str | list[str] | tuple[str, ...] | None" = None,
    port: int | str | None = None,
    *,
    family: int = socket.AF_UNSPEC,
    flags: int = socket.AI_PASSIVE,
    sock: socket.socket | None = None,
    backlog: int = 100,
    ssl: tls.SSLContext | None = None,
    reuse_address: bool | None = None,
    reuse_port: bool | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    start_serving: bool = True,
    keep_alive: bool | None = None,
    device: str = "auto",
    **options: Any,
) -> StreamServer:
    """Listen for streams, as `loop.create_server` listens for sockets. For asyncio and uvloop.

    Args:
        protocol_factory: makes the asyncio protocol of each accepted stream; called without
            arguments.
        host: a name or a numeric address of this machine, or a list of several: the server listens
            on every address of each. None or "": all addresses.
        port: the port, a number or the name of a service; 0 or None: a free port, another one for
            each address.
        family, flags: as of asyncio's.
        reuse_address, keep_alive: accepted, without effect.
        reuse_port: None or false; a port has one listener.
        sock: must be None.
        backlog: how many peers can wait to be accepted.
        ssl: TLS inside the streams: an ssl.SSLContext; None: no TLS.
        ssl_handshake_timeout: seconds for the TLS handshake; None: 60.
        ssl_shutdown_timeout: seconds for the end of TLS before the transport is aborted; None: 30.
        start_serving: accept at once; False: peers are refused until
            `StreamServer.start_serving`.
        device, options: as of `listen_stream`.

    Raises:
        as `listen_stream`.
        TypeError, ValueError: neither `host` nor `port` is given, or `sock` or `reuse_port` is, or
            the TLS arguments do not fit together.

    Cancellation: nothing is left.
    """
    if sock is not None:
        raise ValueError("create_server(): a stream over RDMA has no socket: leave out sock")
    if reuse_port:
        raise ValueError(
            "create_server(): a port over RDMA has one listener: leave out reuse_port, and give "
            "each server a port of its own"
        )
    if host is None and port is None:
        raise ValueError("create_server(): Neither host/port nor sock were specified")
    if ssl is not None and not isinstance(ssl, tls.SSLContext):
        raise TypeError("ssl argument must be an SSLContext or None")
    check_tls(ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    loop = asyncio_event_loop("create_server", ON_TRIO)

    def make(connection: Connection, rsocket: Rsocket, server: StreamServer) -> None:
        protocol = protocol_factory()
        if ssl is not None:
            protocol = tls_protocol(
                loop,
                protocol,
                ssl,
                None,
                server_side=True,
                ssl_handshake_timeout=ssl_handshake_timeout,
                ssl_shutdown_timeout=ssl_shutdown_timeout,
            )
        server.attach(StreamTransport(loop, connection, rsocket, protocol, server.detach))

    settings = StreamSettings(create_server, options)
    call = settings.call
    hosts = _checked_hosts(host, call)
    port = checked_service(0 if port is None or port == "" else port, "port", call)
    whole_number(backlog, "backlog", 1, MOST_BACKLOG, call)
    Requirement(device, call)
    listeners: list[StreamListener] = []
    try:
        for address in await _all_addresses(hosts, port, family, flags):
            await wait_for_port(address[1])
            is_ipv6 = ":" in address[0]
            try:
                listener = await listen_for_rsockets(
                    settings,
                    *address,
                    backlog=backlog,
                    device=device,
                    ipv6_only=True if is_ipv6 else None,
                )
            except VerbsCallError as error:
                if not (is_ipv6 and listeners and error.errno in _NO_IPV6):
                    raise _of_bind(error, address[0]) from None
                logger.warning("the server does not listen on it: %s", cause_text(error))
                continue
            # asyncio's server listens only from `start_serving` on. A port of RDMA's is reserved by
            # listening on it.
            listener._set_serving(False)
            listeners.append(listener)
    except BaseException:
        await _close_all(listeners)
        raise
    server = StreamServer(loop, listeners, make)
    if start_serving:
        await server.start_serving()
    return server


async def _close_all(listeners: Iterable[StreamListener]) -> None:
    """Close listeners. What the driver refuses was logged, as for sockets, whose close cannot be
    refused."""
    for listener in listeners:
        with suppress(VerbsCallError, BusyError):
            await listener.aclose()


def _of_bind(error: VerbsCallError, host: str) -> VerbsCallError:
    """Return the error with the errno of a socket's bind, if the address is another machine's."""
    if error.errno != errno.ENODEV or is_own_address(host):
        return error
    return VerbsCallError(errno.EADDRNOTAVAIL, error.call, cannot_bind(host, error.errno))


def _checked_hosts(host: object, call: str) -> list[str | None]:
    """Return the hosts that a server listens on. None, also for "", is all addresses."""
    if host is None or isinstance(host, str):
        hosts: list[object] = [host]
    elif isinstance(host, Iterable) and not isinstance(host, bytes | bytearray):
        hosts = list(host)
    else:
        raise wrong_type(host, "host", "a host, a list of hosts, or None", call)
    empty = (None, "")
    return [None if each in empty else checked_host(each, "host", call) for each in hosts]


async def _all_addresses(
    hosts: Iterable[str | None], port: int | str, family: int, flags: int
) -> list[SocketAddress]:
    found = [await addresses_of(each, port, family, flags) for each in hosts]
    return list(dict.fromkeys(address for each in found for address in each))


async def start_server(
    client_connected_cb: Callable[
        [asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None
    ],
    host: "str | list[str] | tuple[str, ...] | None" = None,
    port: int | str | None = None,
    *,
    limit: int = LIMIT,
    **keywords: Any,
) -> StreamServer:
    """Listen for streams, as `asyncio.start_server` listens for sockets.

    Args:
        client_connected_cb, host, port, limit: as of asyncio's.
        keywords: as of `create_server`.

    Raises: as `create_server`.

    Cancellation: nothing is left.
    """
    loop = asyncio_event_loop("start_server", ON_TRIO)

    def make() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, client_connected_cb, loop=loop)

    return await create_server(make, host, port, **keywords)
