"""listen_stream(): a listener of byte streams."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import anyio
from anyio.abc import SocketAttribute, TaskGroup

from aiordma._base.errors import cause_text
from aiordma._base.opening import opens
from aiordma._base.socket_address import address_text
from aiordma._connection.connection import Connection
from aiordma._connection.handshakes import Acceptance
from aiordma._connection.incoming import IncomingRequest
from aiordma._connection.listener import BaseListener
from aiordma._connection.listener_endpoint import ListenerEndpoint, open_listener
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.settings import StreamOptions, StreamSettings, naming
from aiordma.streams.sockets import StreamSocket
from aiordma.streams.stream import Stream, family_of

__all__ = ("StreamListener", "listen_for_rsockets", "listen_stream")

logger: logging.Logger = logging.getLogger("aiordma")

ACCEPT_TIMEOUT = 30.0


@opens
async def listen_stream(
    host: str = "0.0.0.0",
    port: int = 0,
    *,
    backlog: int = 128,
    device: str = "auto",
    accept_timeout: float = ACCEPT_TIMEOUT,
    ipv6_only: bool | None = None,
    **options: Unpack[StreamOptions],
) -> "StreamListener":
    """Listen for byte streams. Await the call, or enter it with `async with`.

    Args:
        host: as of `aiordma.listen`. Unlike `start_server`, this listens on one address of a name.
        port, backlog, device, accept_timeout, ipv6_only: as of `aiordma.listen`.
        buffer_size, queue_depth, close_timeout, tos, ack_timeout, retry_count, peer_timeout,
            keepalive: as of `connect_stream`; for every accepted stream.

    Raises: as `aiordma.listen`.

    Cancellation: nothing is left; no peer was accepted.

    See: man 7 rsocket.
    """
    return await listen_for_rsockets(
        StreamSettings(listen_stream, options),
        host,
        port,
        backlog=backlog,
        device=device,
        accept_timeout=accept_timeout,
        ipv6_only=ipv6_only,
    )


async def listen_for_rsockets(
    settings: StreamSettings,
    host: str,
    port: int,
    *,
    backlog: int,
    device: str,
    accept_timeout: float = ACCEPT_TIMEOUT,
    ipv6_only: bool | None,
) -> "StreamListener":
    """Do the work of `listen_stream`."""
    rsockets: WeakKeyDictionary[Connection, Rsocket] = WeakKeyDictionary()
    endpoint = await open_listener(
        settings.call,
        settings.options,
        host,
        port,
        backlog=backlog,
        device=device,
        accept_timeout=accept_timeout,
        ipv6_only=ipv6_only,
        establish=partial(_establish, settings, rsockets),
    )
    return StreamListener(endpoint, settings, rsockets)


async def _establish(
    settings: StreamSettings,
    rsockets: WeakKeyDictionary[Connection, Rsocket],
    request: IncomingRequest,
    _private_data: bytes,
) -> Connection:
    """Answer a request, and enter the connection's rsocket into `rsockets`, until it is taken."""
    peer = request.private_data
    connection = await request.prepare()
    try:
        rsocket = settings.rsocket(connection)
        with naming(request.operation):
            rsocket.start(peer)
        await connection.establish(private_data=rsocket.hello())
        rsocket.begin(is_first=False)
    except BaseException:
        await connection.aclose()  # before `establish`, this rejects the peer
        raise
    rsockets[connection] = rsocket
    return connection


class StreamListener(BaseListener[Stream]):
    """Listens for streams: `listen_stream` makes it. It is an anyio Listener."""

    def __init__(
        self,
        endpoint: ListenerEndpoint,
        settings: StreamSettings,
        rsockets: WeakKeyDictionary[Connection, Rsocket],
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._rsockets = rsockets

    def __repr__(self) -> str:
        return f"<StreamListener at {address_text(self.local_address)}>"

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """anyio's typed attributes of listening sockets (without `raw_socket`)."""
        return {
            SocketAttribute.family: lambda: family_of(self.local_address),
            SocketAttribute.local_address: lambda: self.local_address,
            SocketAttribute.local_port: lambda: self.port,
        }

    @opens
    async def accept(self) -> Stream:
        """Accept the next peer, and return its stream. Await the call, or enter it with `async
        with`. Handshakes run concurrently, as of `Listener.accept`. A peer that does not use
        rsockets is rejected.

        Raises:
            as `Listener.accept`.
            StreamProtocolError: a peer does not use rsockets; call again for the next one.
            WorkCompletionError: a peer violated the handshake; call again for the next one.

        Cancellation: as `Listener.accept`.
        """
        self._endpoint.require_here()
        return Stream(*self._take(await self._endpoint.accept()))

    def _take(self, accepted: Acceptance) -> tuple[Connection, Rsocket]:
        connection = accepted.take()
        return connection, self._rsockets.pop(connection)

    def _take_or_log(self, accepted: Acceptance) -> tuple[Connection, Rsocket] | None:
        """Return the connection of a peer; None: its handshake has failed, which is logged."""
        try:
            return self._take(accepted)
        except Exception as error:
            level = logging.INFO if isinstance(error, ConnectionError) else logging.WARNING
            logger.log(level, "a stream was not accepted: %s", cause_text(error))
            return None

    async def serve(
        self,
        handler: Callable[[Stream], Any],
        task_group: TaskGroup | None = None,
    ) -> None:
        """Accept every peer, and run `handler(stream)` for each in a task of its own, until
        cancelled or closed. A stream is closed when its handler returns.

        A peer that fails its handshake is logged in one line. An exception of a handler ends the
        task group, as with anyio's other listeners.

        Args:
            handler: an async function of one stream.
            task_group: the task group to run the handlers in; None: `serve` creates one.

        Raises:
            DeviceRemovedError: the listener's RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: without `task_group`, the handlers are cancelled and their streams closed.
        """
        if task_group is not None:
            await self._endpoint.accept_all(task_group.start_soon, self._handle, handler)
            return
        async with anyio.create_task_group() as own:
            await self._endpoint.accept_all(own.start_soon, self._handle, handler)

    async def _handle(
        self, handler: Callable[[Stream], Awaitable[Any]], accepted: Acceptance
    ) -> None:
        taken = self._take_or_log(accepted)
        if taken is not None:
            async with Stream(*taken) as stream:
                await handler(stream)

    # -- for StreamServer -----------------------------------------------------------------------

    def _socket(self) -> StreamSocket | None:
        """Return what stands in for the listening socket; None once the listener is closed."""
        address = self.local_address
        if self._endpoint.is_closed or address is None:
            return None
        return StreamSocket(address, buffer_sizes=(self._settings.ring_bytes,) * 2)

    def _set_serving(self, is_serving: bool) -> None:
        """Accept peers, as a new listener does, or reject each at once."""
        self._endpoint.is_serving = is_serving

    async def _accept_all(self, make: Callable[[Connection, Rsocket], object]) -> None:
        """Call a function for each peer, until the listener is closed."""

        def take(accepted: Acceptance) -> None:
            taken = self._take_or_log(accepted)
            if taken is not None:
                make(*taken)

        await self._endpoint.accept_all(take)
