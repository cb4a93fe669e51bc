"""asyncio's functions for connections and servers, over RDMA, with the same arguments."""

import asyncio
import errno
import logging
import socket
import ssl as tls
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import anyio

from aiordma._base.arguments import optional_seconds, whole_number, wrong_type
from aiordma._base.errors import (
    BusyError,
    ClosedError,
    ConnectTimeoutError,
    DeviceRemovedError,
    VerbsCallError,
    cause_text,
)
from aiordma._base.hints import cannot_bind, is_own_address
from aiordma._base.process import forked, here, require_same_process
from aiordma._base.provider import SOFTWARE, Requirement
from aiordma._base.socket_address import SocketAddress
from aiordma._base.time_limit import TimeLimit
from aiordma._connection.connection import Connection
from aiordma._connection.listener import MOST_BACKLOG, Listener
from aiordma._connection.several_addresses import Routes, joined_error
from aiordma._loop.event_loop import asyncio_event_loop
from aiordma._loop.private import SSLProtocol, expect_unfinished, secured_transport
from aiordma._runtime.address_lookup import addresses_of, checked_host, checked_service
from aiordma.streams.opening import (
    StreamListener,
    StreamSettings,
    connect_rsocket,
    listen_for_rsockets,
)
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.sockets import StreamSocket
from aiordma.streams.transport import StreamTransport

__all__ = (
    "ReachedBySocketsError",
    "StreamServer",
    "attach_protocol",
    "connect_for_socket",
    "create_connection",
    "create_server",
    "open_connection",
    "start_server",
)

logger: logging.Logger = logging.getLogger("aiordma")

_WAITS_FOR_STREAMS = sys.version_info >= (3, 12)
"""Whether `wait_closed` of a closed server waits for its streams."""

_closing: WeakKeyDictionary[Listener, int] = WeakKeyDictionary()
"""The ports of closed servers: they may not be free yet."""

_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""What listening on an IPv6 address fails with if the system has none."""

LIMIT = 64 * 1024
"""asyncio's own limit of a StreamReader, in bytes."""

ON_TRIO_CONNECT = "use aiordma.streams.connect_stream"
ON_TRIO_LISTEN = "use aiordma.streams.listen_stream"

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)


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
        found: list[StreamSocket] = []
        for each in self._listeners:
            address = None if each._listener._closed else each.local_address
            if address is not None:
                ring_bytes = each._settings.ring_bytes
                found.append(StreamSocket(address, buffer_sizes=(ring_bytes, ring_bytes)))
        return tuple(found)

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
                listener._listener._is_serving = True
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
        with listener._listener._handshakes.taking_all():
            await self._accept_all(listener)

    async def _accept_all(self, listener: StreamListener) -> None:
        while True:
            try:
                connection, rsocket = await listener._accept_any()
            except ClosedError:
                return
            except DeviceRemovedError as error:
                logger.error("%r accepts no more streams: %s", self, cause_text(error))
                return
            try:
                # asyncio's server makes each protocol in a task, and so in a context, of its own.
                copy_context().run(self._make, connection, rsocket, self)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._loop.call_exception_handler(
                    {"message": f"{self!r} could not make a stream's protocol", "exception": error}
                )
                await connection.aclose()

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
            _closing[listener._listener] = listener.port
            listener._listener._teardown.close()
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


def _check_tls(
    context: "bool | tls.SSLContext | None",
    handshake_timeout: float | None,
    shutdown_timeout: float | None,
) -> None:
    if not context and handshake_timeout is not None:
        raise ValueError("ssl_handshake_timeout is only meaningful with ssl")
    if not context and shutdown_timeout is not None:
        raise ValueError("ssl_shutdown_timeout is only meaningful with ssl")


def _tls_protocol(
    loop: asyncio.AbstractEventLoop,
    protocol: asyncio.BaseProtocol,
    context: "bool | tls.SSLContext",
    waiter: "asyncio.Future[None] | None",
    **options: Any,
) -> SSLProtocol:
    chosen = None if context is True else context
    if chosen is not None and not isinstance(chosen, tls.SSLContext):
        raise TypeError(f"ssl={context!r} is not an ssl.SSLContext")
    return SSLProtocol(loop, protocol, cast(Any, chosen), cast(Any, waiter), **options)


def _joined(errors: list[Exception], all_errors: bool) -> Exception:
    """Return one error for those of all addresses, with asyncio's text."""
    if all_errors:
        return ExceptionGroup("create_connection failed", errors)
    return joined_error(errors, lambda texts: f"Multiple exceptions: {', '.join(texts)}")


def _checked_local(local: object, call: str) -> tuple[str | None, int | str] | None:
    """Return the local (host, port) to connect from, or None: as of asyncio's, the host can be
    None, which is a loopback address, and the port the name of a service."""
    if local is None:
        return None
    if not isinstance(local, tuple | list) or len(local) != 2:
        raise wrong_type(local, "local_addr", "(host, port), with port 0 for any", call)
    host, port = local
    if host is not None:
        host = checked_host(host, "local_addr[0]", call)
    return host, checked_service(port, "local_addr[1]", call)


async def create_connection(
    protocol_factory: Callable[[], ProtocolT],
    host: str | None = None,
    port: int | str | None = None,
    *,
    ssl: "bool | tls.SSLContext | None" = None,
    family: int = 0,
    proto: int = 0,
    flags: int = 0,
    sock: socket.socket | None = None,
    local_addr: tuple[str | None, int | str] | None = None,
    server_hostname: str | None = None,
    ssl_handshake_timeout: float | None = None,
    ssl_shutdown_timeout: float | None = None,
    happy_eyeballs_delay: float | None = None,
    interleave: int | None = None,
    all_errors: bool = False,
    timeout: float | None = 30.0,
    device: str = "auto",
    **options: Any,
) -> tuple[asyncio.Transport, ProtocolT]:
    """Connect a stream, as `loop.create_connection` connects a socket. For asyncio and uvloop.

    Args:
        protocol_factory: makes the asyncio protocol; called without arguments.
        host: a name or a numeric address of the peer's RDMA interface; its addresses are tried one
            after the other, those of IPv4 first. None: a ValueError.
        port: the peer's port, a number or the name of a service. None: a ValueError.
        ssl: TLS inside the stream: an ssl.SSLContext, or True for a default one; None: no TLS.
        family, flags: as of asyncio's; 0: any.
        all_errors: raise an exception group of the errors of all addresses, also if it is one, in
            place of one error. What is no error of an address, such as NoDeviceError, is raised as
            it is.
        proto, happy_eyeballs_delay, interleave: accepted, without effect.
        sock: must be None.
        local_addr: bind to this local (host, port) first; of a name, to its first address of the
            peer's family that can be bound. As of asyncio's, a host None is a loopback address, and
            the port can be the name of a service. None: any address.
        server_hostname: the name that the peer's certificate must have; None: `host`.
        ssl_handshake_timeout: seconds for the TLS handshake; None: 60.
        ssl_shutdown_timeout: seconds for the end of TLS before the transport is aborted; None: 30.
        timeout, device, options: as of `connect_stream`.

    Raises:
        as `connect_stream`.
        ExceptionGroup: none of the host's addresses could be connected, with `all_errors`: the
            errors of all.
        ValueError: `host` and `port` are missing, or `sock` is given; or the TLS arguments do not
            fit together.
        ssl.SSLError, ConnectionError: the TLS handshake failed.

    Cancellation: nothing is left.
    """
    if sock is not None:
        raise ValueError("create_connection(): a stream over RDMA has no socket: leave out sock")
    if host is None or port is None:
        raise ValueError("host and port was not specified and no sock specified")
    if server_hostname is not None and not ssl:
        raise ValueError("server_hostname is only meaningful with ssl")
    _check_tls(ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    asyncio_event_loop("create_connection", ON_TRIO_CONNECT)
    settings = StreamSettings(create_connection, options)
    call = settings.call
    host, port = checked_host(host, "host", call), checked_service(port, "port", call)
    local = _checked_local(local_addr, call)
    limit = TimeLimit(optional_seconds(timeout, "timeout", call))
    Requirement(device, call)

    try:
        with anyio.fail_after(limit.left()):
            found = await addresses_of(host, port, family, flags)
            bindable = None if local is None else await addresses_of(*local, family, flags)
    except TimeoutError:
        raise ConnectTimeoutError(
            f"connect to {host}:{port}: looking up the name took longer than {limit.seconds:g} s"
        ) from None
    number = found[0][1]
    routes = Routes(
        [address for address, _ in found],
        bindable,
        lambda address: f"{address}:{number}",
        f"local_addr={local_addr!r}",
        lambda errors: _joined(errors, all_errors),
    )
    attempt = settings.attempt(host, number, device=device)
    attempt.limit = limit
    connection, rsocket = await connect_rsocket(settings, attempt, routes)
    return await attach_protocol(
        protocol_factory,
        connection,
        rsocket,
        ssl=ssl,
        server_hostname=host if server_hostname is None else server_hostname,
        ssl_handshake_timeout=ssl_handshake_timeout,
        ssl_shutdown_timeout=ssl_shutdown_timeout,
    )


class ReachedBySocketsError(Exception):
    """The software device reaches an address: its listeners are TCP's."""


def _refuse_software(connection: Connection) -> None:
    if connection._endpoint.hub.context.device_name == SOFTWARE:
        raise ReachedBySocketsError


async def connect_for_socket(
    options: Mapping[str, Any], address: SocketAddress, family: int, source: SocketAddress | None
) -> tuple[Connection, Rsocket]:
    """Connect a stream in place of a socket, for `attach_protocol`. If it is collected, or open at
    the loop's end, it is closed without a warning.

    Args:
        options: the stream options of the event loop.
        address: of the peer.
        family: of the socket.
        source: the address to which the socket is bound, or None.

    Raises:
        as `connect_stream`.
        ReachedBySocketsError: nothing was connected.

    Cancellation: nothing is left.
    """
    settings = StreamSettings(create_connection, options)
    host, port = (await addresses_of(*address, family))[0]
    attempt = settings.attempt(host, port, source)
    connection, rsocket = await connect_rsocket(settings, attempt, check=_refuse_software)
    connection._endpoint.teardown.is_reported = True  # until its transport takes over
    return connection, rsocket


async def attach_protocol(
    protocol_factory: Callable[[], ProtocolT],
    connection: Connection,
    rsocket: Rsocket,
    *,
    ssl: "bool | tls.SSLContext | None",
    server_hostname: str,
    ssl_handshake_timeout: float | None,
    ssl_shutdown_timeout: float | None,
) -> tuple[asyncio.Transport, ProtocolT]:
    """Make the protocol and the transport of a connected stream, as of `create_connection`.

    Cancellation: the stream is closed, as after an error.
    """
    loop = asyncio.get_running_loop()
    transport: asyncio.Transport | None = None
    try:
        protocol, waiter = protocol_factory(), loop.create_future()
        if not ssl:
            transport = StreamTransport(loop, connection, rsocket, protocol, waiter=waiter)
            await waiter
            return transport, protocol
        secured = _tls_protocol(
            loop,
            protocol,
            ssl,
            waiter,
            server_side=False,
            server_hostname=server_hostname,
            ssl_handshake_timeout=ssl_handshake_timeout,
            ssl_shutdown_timeout=ssl_shutdown_timeout,
        )
        transport = StreamTransport(loop, connection, rsocket, secured)
        await waiter
    except BaseException:
        if transport is None:
            await connection.aclose()
        else:
            transport.abort()
        raise
    return secured_transport(secured), protocol


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
    _check_tls(ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    loop = asyncio_event_loop("create_server", ON_TRIO_LISTEN)

    def make(connection: Connection, rsocket: Rsocket, server: StreamServer) -> None:
        protocol = protocol_factory()
        if ssl is not None:
            protocol = _tls_protocol(
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
            await _until_free(address[1])
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
            listener._listener._is_serving = False
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


async def _until_free(port: int) -> None:
    """Wait for the listeners that this event loop has closed on the port."""
    for reference in _closing.keyrefs():  # a copy: loops of other threads add listeners
        listener = reference()
        if listener is None or _closing.get(listener) != port:
            continue
        if listener._reactor.loop.is_running_here():
            with suppress(VerbsCallError, BusyError):  # then the bind fails
                await listener.aclose()


async def open_connection(
    host: str | None = None, port: int | str | None = None, *, limit: int = LIMIT, **keywords: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect a stream, as `asyncio.open_connection` connects a socket.

    Args:
        host, port, limit: as of asyncio's.
        keywords: as of `create_connection`.

    Raises: as `create_connection`.

    Cancellation: nothing is left.
    """
    loop = asyncio_event_loop("open_connection", ON_TRIO_CONNECT)
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await create_connection(lambda: protocol, host, port, **keywords)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


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
    loop = asyncio_event_loop("start_server", ON_TRIO_LISTEN)

    def make() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=limit, loop=loop)
        return asyncio.StreamReaderProtocol(reader, client_connected_cb, loop=loop)

    return await create_server(make, host, port, **keywords)
