"""An event loop whose connections and servers use RDMA, so that programs need no change."""

import errno
import io
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakSet

from aiordma._base.arguments import seconds_within, wrong_type
from aiordma._base.errors import DeviceRequirementError
from aiordma._base.process import here
from aiordma._base.provider import Requirement
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import Connection
from aiordma._loop.polling import SPIN, PollingEventLoop
from aiordma.streams.client import (
    ReachedBySocketsError,
    attach_protocol,
    connect_for_socket,
    create_connection,
)
from aiordma.streams.hosts import HostRule, explaining_tcp
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.server import StreamServer, create_server
from aiordma.streams.settings import StreamOptions, StreamSettings
from aiordma.streams.sockets import StreamSocket
from aiordma.streams.transport import StreamTransport

__all__ = ("StreamEventLoop", "new_event_loop")

VARIABLE = "AIORDMA_STREAM_HOSTS"

_BY_TCP: ContextVar[bool] = ContextVar("aiordma: sockets are connected by TCP", default=False)


_TLS = ("ssl", "server_hostname", "ssl_handshake_timeout", "ssl_shutdown_timeout")
_OF_ASYNCIO = {
    *_TLS,
    *("sock", "family", "proto", "flags", "local_addr"),
    *("happy_eyeballs_delay", "interleave", "all_errors"),
}
"""The keyword arguments of asyncio's create_connection."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: close a socket at once, without TIME_WAIT."""

_OF_STREAM = StreamSocket(("0.0.0.0", 0))
"""A socket of the type of streams, for asyncio's check of arguments."""

_SWEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What takes a socket's place in `create_connection`.

    Attributes:
        address: of the peer.
        source: the address to which the socket is bound, or None.
        stream: the stream to the peer; None: the socket itself is connected.
    """

    address: SocketAddress
    source: SocketAddress | None
    stream: tuple[Connection, Rsocket] | None


class StreamEventLoop(PollingEventLoop):
    """The loop of `new_event_loop`. Sockets that the program passes, and hosts that the rule does
    not name, are handled by asyncio as before."""

    def __init__(self, spin: float, rule: HostRule, options: StreamOptions) -> None:
        super().__init__(spin)
        self._options = options
        self._replaced: WeakKeyDictionary[socket.socket, _Replaced] = WeakKeyDictionary()
        self._sweep: Any = None
        self._rule = rule
        self._servers: WeakSet[StreamServer] = WeakSet()
        self._process = here.pid

    def uses_rdma(self, host: str | bytes | None) -> bool:
        """Return whether the rule names the host. (None, a server's "all addresses", only if it
        names every host, as "*" does, or "0.0.0.0".)

        Args:
            host: a name or an address, or None.

        Raises:
            TypeError: the host is something else.
        """
        host = _text(host)
        if host is not None and not isinstance(host, str):
            raise wrong_type(host, "host", "a name or a numeric address such as '192.0.2.1'")
        return self._rule.names(host or "0.0.0.0")

    async def create_connection(
        self,
        protocol_factory: Any,
        host: str | bytes | None = None,
        port: int | str | None = None,
        **keywords: Any,
    ) -> Any:
        """As asyncio's, over RDMA if the rule names the host.

        Args:
            protocol_factory, host, port: as of asyncio's loop.create_connection.
            keywords: as of `aiordma.streams.create_connection`, or as of asyncio's.

        Raises:
            as `create_connection` of this package, or as asyncio's.
            DeviceRequirementError: `sock` is a TCP socket, and AIORDMA_DEVICE requires RDMA.

        Cancellation: nothing is left.
        """
        given: Any = keywords.get("sock")
        if given is not None and host is None and port is None and given in self._replaced:
            return await self._create_replacing(protocol_factory, given, keywords)
        if given is not None:
            self._check_plain_tcp(given, "create_connection")
        if host is None or given is not None or not self.uses_rdma(host):
            default: Any = super().create_connection
            return await default(protocol_factory, host, port, **keywords)
        return await self._create(protocol_factory, _text(host), port, keywords)

    def _check_plain_tcp(self, sock: Any, call: str) -> None:
        """Check that asyncio may use the socket of a host that the rule names."""
        required = Requirement()
        if required.permits_software or not _is_tcp(sock):
            return
        address = sock.getsockname() if call == "create_server" else sock.getpeername()
        if self.uses_rdma(address[0]):
            raise DeviceRequirementError(
                f"{call}(): sock={sock!r}: {required.text} does not permit plain TCP: give host "
                f"and port instead, or list only other hosts in {VARIABLE}"
            )

    async def _create_replacing(
        self, protocol_factory: Any, sock: socket.socket, keywords: dict[str, Any]
    ) -> Any:
        """Close a socket that sock_connect has connected, and return the transport of a stream."""
        tls: dict[str, Any] = {name: keywords.get(name) for name in _TLS}
        if not tls["ssl"] and any(value is not None for value in tls.values()):
            raise ValueError("server_hostname and the times of TLS are only meaningful with ssl")
        replaced = self._replaced.pop(sock)
        # The stream can have the same port at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()
        stream = replaced.stream
        if stream is not None and keywords.keys() - _OF_ASYNCIO:
            await stream[0].aclose()  # the call has stream options of its own
            stream = None
        if stream is not None:
            tls["server_hostname"] = tls["server_hostname"] or replaced.address[0]
            return await attach_protocol(protocol_factory, *stream, **tls)
        del keywords["sock"]
        if replaced.source is not None:
            keywords["local_addr"] = replaced.source
        return await self._create(protocol_factory, *replaced.address, keywords)

    async def _create(
        self, protocol_factory: Any, host: str, port: int | str | None, keywords: dict[str, Any]
    ) -> Any:
        with explaining_tcp(VARIABLE):
            return await create_connection(protocol_factory, host, port, **self._with(keywords))

    def _with(self, keywords: dict[str, Any]) -> dict[str, Any]:
        return {**self._options, **keywords}

    # -- sockets that a program connects before it passes them -------------------------------------

    async def _connect_sock(self, *arguments: Any) -> Any:
        # asyncio's own create_connection connects by this method, which calls sock_connect. The
        # variable is not set when it calls the program.
        token = _BY_TCP.set(True)
        try:
            default: Any = super()
            return await default._connect_sock(*arguments)
        finally:
            _BY_TCP.reset(token)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """As asyncio's. If the rule names the host, a stream is connected, from the address to
        which the socket is bound. Programs such as aiohttp pass the socket to `create_connection`,
        which uses the stream in its place. If the socket is used as one, or closed, the stream is
        closed. If the software device reaches the host, the socket itself is connected, as that
        device's listeners are TCP's, and `create_connection` connects the stream.

        Args: as asyncio's.

        Raises:
            as asyncio's.
            RdmaError: the stream could not be connected. Most of these are OSErrors, too.

        Cancellation: as asyncio's.
        """
        if not _is_tcp(sock) or _BY_TCP.get() or not self.uses_rdma(address[0]):
            await super().sock_connect(sock, address)
            return
        if sock in self._replaced:
            raise OSError(errno.EISCONN, os.strerror(errno.EISCONN))
        local = _address(sock.getsockname())
        source = local if local[1] else None  # None: the program has not bound it
        if source is not None:
            # Both are bound to it. The software device and siw also set this.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stream = None
        try:
            with explaining_tcp(VARIABLE):
                stream = await connect_for_socket(
                    self._options, _address(address), sock.family, source
                )
        except ReachedBySocketsError:
            await super().sock_connect(sock, address)
        self._replaced[sock] = _Replaced(_address(address), source, stream)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the streams of sockets that the program has closed, now and while there are streams
        for sockets. (Those of collected sockets are collected.)"""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for sock in list(self._replaced):
            if sock.fileno() == -1:
                _close(self._replaced.pop(sock))
        if any(each.stream is not None for each in self._replaced.values()):
            self._sweep = self.call_later(_SWEEP_SECONDS, self._close_unused)

    async def _use_as_socket(self, sock: socket.socket) -> None:
        replaced = self._replaced.pop(sock, None)
        if replaced is not None and replaced.stream is not None:
            await replaced.stream[0].aclose()
            await super().sock_connect(sock, replaced.address)

    async def sock_recv(self, sock: socket.socket, nbytes: int) -> bytes:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._use_as_socket(sock)
        return await super().sock_recv(sock, nbytes)

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._use_as_socket(sock)
        return await super().sock_recv_into(sock, buf)

    async def sock_sendall(self, sock: socket.socket, data: Any) -> None:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._use_as_socket(sock)
        await super().sock_sendall(sock, data)

    async def sock_sendfile(
        self,
        sock: socket.socket,
        file: Any,
        offset: int = 0,
        count: int | None = None,
        *,
        fallback: bool | None = True,
    ) -> int:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._use_as_socket(sock)
        return await super().sock_sendfile(sock, file, offset, count, fallback=fallback)

    async def sendfile(
        self,
        transport: Any,
        file: Any,
        offset: int = 0,
        count: int | None = None,
        *,
        fallback: bool = True,
    ) -> int:
        """As asyncio's over TCP: it sends from `offset` on, not from the file's position, and then
        the position is that after the last byte that was sent.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        send: Callable[..., Awaitable[int]] = super().sendfile
        is_ours = isinstance(transport, StreamTransport)
        if not (is_ours and fallback) or transport.is_closing():
            return await send(transport, file, offset, count, fallback=fallback)
        default: Any = super()
        default._check_sendfile_params(_OF_STREAM, file, offset, count)
        if not _is_regular(file):
            return await send(transport, file, offset, count)
        return await send(transport, _PlacedFile(file, offset), offset, count)

    async def create_server(
        self,
        protocol_factory: Any,
        host: Any = None,
        port: int | str | None = None,
        **keywords: Any,
    ) -> Any:
        """As asyncio's, over RDMA if the rule names the host, or every one of several.

        Args:
            protocol_factory, host, port: as of asyncio's loop.create_server.
            keywords: as of `aiordma.streams.create_server`, or as of asyncio's.

        Raises:
            as `create_server` of this package, or as asyncio's.
            DeviceRequirementError: `sock` is a TCP socket, and AIORDMA_DEVICE requires RDMA.

        Cancellation: nothing is left.
        """
        is_one = host is None or isinstance(host, str | bytes) or not isinstance(host, Iterable)
        hosts = [_text(each) for each in ([host] if is_one else host)]
        host = hosts[0] if is_one else hosts
        given: Any = keywords.get("sock")
        if given is not None:
            self._check_plain_tcp(given, "create_server")
        if given is not None or not all(map(self.uses_rdma, hosts)):
            default: Any = super().create_server
            return await default(protocol_factory, host, port, **keywords)
        server = await create_server(protocol_factory, host, port, **self._with(keywords))
        self._servers.add(server)
        return server

    def run_forever(self) -> None:
        """As asyncio's. In a forked child, it logs which servers do not serve there.

        Raises: as asyncio's.
        """
        if self._process != here.pid:
            while self._servers:
                self._servers.pop()._tell_if_inherited()
        super().run_forever()


class _PlacedFile:
    """A regular file for asyncio's fallback of `sendfile`. It is read as os.sendfile reads it, by
    its descriptor, from an offset of its own: several calls may send one file at the same time."""

    def __init__(self, file: Any, offset: int) -> None:
        self._file = file
        self._descriptor: int = file.fileno()
        self._begin = self._next = offset

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes, in a worker thread."""
        count = os.preadv(self._descriptor, [buffer], self._next)
        self._next += count
        return count

    def seek(self, position: int) -> None:
        """Set the file's position, but not at the beginning: if nothing is sent, it stays."""
        if position == self._begin:
            return
        if isinstance(self._file, io.BufferedReader | io.BufferedRandom):
            self._file.seek(position)  # what is in its buffer must not be read next
        else:
            os.lseek(self._descriptor, position, os.SEEK_SET)


def _is_regular(file: Any) -> bool:
    """Return whether this is what asyncio passes to os.sendfile."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (AttributeError, OSError):  # of which io.UnsupportedOperation is one
        return False


def _is_tcp(sock: Any) -> bool:
    return sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)


def _text(host: Any) -> Any:
    """Return a host as text: asyncio takes bytes, too."""
    return os.fsdecode(host) if isinstance(host, bytes) else host


def _address(address: Any) -> tuple[str, int]:
    """Return a socket's address as (host, port)."""
    host, port, *rest = address
    host = _text(host)
    scope = rest[1] if len(rest) > 1 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host, port


def _close(replaced: _Replaced) -> None:
    if replaced.stream is not None:
        replaced.stream[0]._close_soon()


def new_event_loop(
    spin: float = SPIN,
    hosts: str | Iterable[str] | None = None,
    **options: Unpack[StreamOptions],
) -> StreamEventLoop:
    """Return an asyncio event loop whose `create_connection` and `create_server` use RDMA streams.
    Everything else is as of `aiordma.new_event_loop`, whose loop polls before it sleeps.

        uvicorn --loop aiordma.streams:new_event_loop app:app

    Args:
        spin: as of `aiordma.new_event_loop`.
        hosts: which hosts are reached over RDMA: names with wildcards, addresses and networks, as a
            list or separated by commas. None: the environment variable AIORDMA_STREAM_HOSTS, or
            "*", which is every host. For a server it is the host that it listens on.
        options: the stream options of every connection and server, as of `connect_stream`:
            `peer_timeout`, `keepalive`, `close_timeout`, ... Those that a call passes replace them.

    Raises:
        TypeError, ValueError: as `aiordma.new_event_loop`; or an option is unknown, has an
            unsuitable type, or is out of range; or no host can match one of `hosts`, or of the
            variable, which the message names.
    """
    spin = seconds_within(spin, "spin", 0, 1, "new_event_loop")
    StreamSettings(new_event_loop, options)
    if hosts is None:
        rule = HostRule(os.environ.get(VARIABLE, "*"), VARIABLE)
    else:
        rule = HostRule(hosts, "new_event_loop(): hosts")
    return StreamEventLoop(spin, rule, options)
