"""asyncio's functions for connections, over RDMA, with the same arguments."""

import asyncio
import socket
import ssl as tls
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio

from aiordma._base.arguments import optional_seconds, wrong_type
from aiordma._base.errors import ConnectTimeoutError
from aiordma._base.provider import SOFTWARE, Requirement
from aiordma._base.socket_address import SocketAddress
from aiordma._base.time_limit import TimeLimit
from aiordma._connection.connection import Connection
from aiordma._connection.several_addresses import Routes, joined_error
from aiordma._loop.event_loop import asyncio_event_loop
from aiordma._loop.private import secured_transport
from aiordma._runtime.address_lookup import addresses_of, checked_host, checked_service
from aiordma.streams.connecting import connect_rsocket
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.settings import StreamSettings
from aiordma.streams.tls import check_tls, tls_protocol
from aiordma.streams.transport import StreamTransport

__all__ = (
    "LIMIT",
    "ReachedBySocketsError",
    "attach_protocol",
    "connect_for_socket",
    "create_connection",
    "open_connection",
)

LIMIT = 64 * 1024
"""asyncio's own limit of a StreamReader, in bytes."""

ON_TRIO = "use aiordma.streams.connect_stream"

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)


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
    check_tls(ssl, ssl_handshake_timeout, ssl_shutdown_timeout)
    asyncio_event_loop("create_connection", ON_TRIO)
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
    if connection.device_name == SOFTWARE:
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
    rsocket.teardown.is_reported = True  # until its transport takes over
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
        secured = tls_protocol(
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
    loop = asyncio_event_loop("open_connection", ON_TRIO)
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await create_connection(lambda: protocol, host, port, **keywords)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
