"""An event loop whose connections and servers use RDMA, so that programs need no change."""

import os
import socket
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from aiordma._base.arguments import seconds
from aiordma._loop.polling import SPIN, PollingEventLoop
from aiordma.streams.hosts import HostRule
from aiordma.streams.opening import StreamOptions, StreamSettings
from aiordma.streams.server import create_connection, create_server

__all__ = ("StreamEventLoop", "new_event_loop")

VARIABLE = "AIORDMA_STREAM_HOSTS"

_BY_TCP: ContextVar[bool] = ContextVar("aiordma: sockets are connected by TCP", default=False)


class StreamEventLoop(PollingEventLoop):
    """The loop of `new_event_loop`. Sockets that the program passes, and hosts that the rule does
    not name, are handled by asyncio as before."""

    def __init__(self, spin: float, rule: HostRule, options: StreamOptions) -> None:
        super().__init__(spin)
        self._options = options
        self._deferred: WeakKeyDictionary[socket.socket, Any] = WeakKeyDictionary()
        self._rule = rule

    def uses_rdma(self, host: str | None) -> bool:
        """Return whether the rule names the host. (None, a server's "all addresses", only if it
        names every host, as "*" does, or "0.0.0.0".)

        Args:
            host: a name or an address, or None.

        Raises: nothing.
        """
        return self._rule.names(host or "0.0.0.0")

    async def create_connection(
        self,
        protocol_factory: Any,
        host: str | None = None,
        port: int | str | None = None,
        **keywords: Any,
    ) -> Any:
        """As asyncio's, over RDMA if the rule names the host.

        Args:
            protocol_factory, host, port: as of asyncio's loop.create_connection.
            keywords: as of `aiordma.streams.create_connection`, or as of asyncio's.

        Raises: as `create_connection` of this package, or as asyncio's.

        Cancellation: nothing is left.
        """
        given: Any = keywords.get("sock")
        deferred = self._deferred.pop(given, None) if given is not None else None
        if deferred is not None:
            del keywords["sock"]
            local = _address(given.getsockname())
            given.close()
            if local[1]:  # the program has bound it
                keywords["local_addr"] = local
            remote = _address(deferred)
            return await create_connection(protocol_factory, *remote, **self._with(keywords))
        if host is None or given is not None or not self.uses_rdma(host):
            default: Any = super().create_connection
            return await default(protocol_factory, host, port, **keywords)
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
        """As asyncio's. If the rule names the host, the socket is not connected before it is used
        by this loop: programs such as aiohttp pass it to `create_connection`, which connects a
        stream instead, from the address to which the socket is bound.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        is_tcp = sock.type == socket.SOCK_STREAM and sock.family in (
            socket.AF_INET,
            socket.AF_INET6,
        )
        if is_tcp and not _BY_TCP.get() and self.uses_rdma(address[0]):
            self._deferred[sock] = address
        else:
            await super().sock_connect(sock, address)

    async def _connect_deferred(self, sock: socket.socket) -> None:
        address = self._deferred.pop(sock, None)
        if address is not None:
            await super().sock_connect(sock, address)

    async def sock_recv(self, sock: socket.socket, nbytes: int) -> bytes:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._connect_deferred(sock)
        return await super().sock_recv(sock, nbytes)

    async def sock_recv_into(self, sock: socket.socket, buf: Any) -> int:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._connect_deferred(sock)
        return await super().sock_recv_into(sock, buf)

    async def sock_sendall(self, sock: socket.socket, data: Any) -> None:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.

        Cancellation: as asyncio's.
        """
        await self._connect_deferred(sock)
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
        await self._connect_deferred(sock)
        return await super().sock_sendfile(sock, file, offset, count, fallback=fallback)

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

        Raises: as `create_server` of this package, or as asyncio's.

        Cancellation: nothing is left.
        """
        hosts = [host] if host is None or isinstance(host, str) else list(host)
        if keywords.get("sock") is not None or not all(map(self.uses_rdma, hosts)):
            default: Any = super().create_server
            return await default(protocol_factory, host, port, **keywords)
        return await create_server(protocol_factory, host, port, **self._with(keywords))


def _address(address: Any) -> tuple[str, int]:
    """Return a socket's address as (host, port)."""
    host, port, *rest = address
    scope = rest[1] if len(rest) > 1 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host, port


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
    spin = seconds(spin, "spin", "new_event_loop")
    if not 0 <= spin <= 1:
        raise ValueError(f"new_event_loop(): spin={spin} is not in 0..1 (seconds)")
    StreamSettings(new_event_loop, options)
    if hosts is None:
        rule = HostRule(os.environ.get(VARIABLE, "*"), VARIABLE)
    else:
        rule = HostRule(hosts, "new_event_loop(): hosts")
    return StreamEventLoop(spin, rule, options)
