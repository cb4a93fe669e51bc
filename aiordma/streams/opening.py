"""Opening streams: connect_stream, listen_stream and the listener."""

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypedDict, Unpack

import anyio
from anyio.abc import Listener as AnyListener
from anyio.abc import SocketAttribute, TaskGroup

from aiordma._base.arguments import seconds_within, whole_number
from aiordma._base.errors import (
    ClosedError,
    ConnectTimeoutError,
    EventLoopError,
    ForkError,
    RdmaError,
    StreamProtocolError,
    VerbsCallError,
    cause_text,
)
from aiordma._base.opening import opens
from aiordma._base.options import ConnectionOptions
from aiordma._base.rejections import NOT_ACCEPTED, is_backlog_full
from aiordma._base.socket_address import SocketAddress, address_text
from aiordma._base.states import ConnectionState
from aiordma._connection.connection import Connection
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._connection.connector import Attempt, LocalAddresses
from aiordma._connection.listener_endpoint import ListenerEndpoint, open_listener
from aiordma._connection.local_ports import LocalPorts
from aiordma._connection.several_addresses import Routes
from aiordma.streams.ending import ClosesOnceDrained
from aiordma.streams.path import CONTROL_SLOTS, Memory, stream_path
from aiordma.streams.protocol import CREDIT_LIMIT
from aiordma.streams.rsocket import CLOSE_TIMEOUT, Rsocket
from aiordma.streams.sockets import StreamSocket
from aiordma.streams.stream import Stream, family_of

__all__ = (
    "StreamListener",
    "StreamOptions",
    "StreamSettings",
    "connect_rsocket",
    "connect_stream",
    "listen_for_rsockets",
    "listen_stream",
)

logger: logging.Logger = logging.getLogger("aiordma")

BUFFER_BYTES = 256 * 1024
QUEUE_DEPTH = 128
ACCEPT_TIMEOUT = 30.0
_MOST_BUFFER_BYTES = 1 << 30
_LEAST_BUFFER_BYTES = 4096
_LEAST_DEPTH = 16
_MOST_CLOSE_TIMEOUT = 3600
ACCEPT_AGAIN_SECONDS = 1.0
"""The pause after an accept that failed because this process lacks descriptors or memory."""


FULL_SECONDS = 0.05
MOST_FULL_SECONDS = 1.0
"""The longest of the pauses before a listener is tried again whose backlog was full. They begin
with `FULL_SECONDS`, and are doubled."""
LEAST_LEFT_SECONDS = 0.05
"""With less time left, a listener whose backlog was full is not tried again."""


class StreamOptions(TypedDict, total=False):
    """The keyword arguments of `connect_stream` and `listen_stream` that set up the stream."""

    buffer_size: int | None
    queue_depth: int
    close_timeout: float
    tos: int | None
    ack_timeout: int
    retry_count: int
    peer_timeout: float | None
    keepalive: float | None


class StreamSettings:
    """The checked options of a stream.

    Args:
        function: the function that was called. The errors have its name, and the nearest one of its
            parameters.
        options: those of its keyword arguments that set up the stream.

    Raises:
        TypeError: an option is unknown, or has an unsuitable type.
        ValueError: an option is out of range.
    """

    def __init__(self, function: Callable[..., object], options: Mapping[str, Any]) -> None:
        self.call: str = function.__name__
        call = self.call
        others = dict(options)
        given = others.pop("buffer_size", None)
        self.grows: bool = given is None
        buffer_bytes = whole_number(
            BUFFER_BYTES if given is None else given,
            "buffer_size",
            _LEAST_BUFFER_BYTES,
            _MOST_BUFFER_BYTES,
            call,
        )
        self.ring_bytes: int = buffer_bytes - buffer_bytes % 2
        self.close_timeout: float = seconds_within(
            others.pop("close_timeout", CLOSE_TIMEOUT),
            "close_timeout",
            0,
            _MOST_CLOSE_TIMEOUT,
            call,
        )
        depth = whole_number(
            others.pop("queue_depth", QUEUE_DEPTH), "queue_depth", _LEAST_DEPTH, CREDIT_LIMIT, call
        )
        # What the protocol needs: own receives, retries without limit where the peer has none.
        self.options: ConnectionOptions = ConnectionOptions._of(
            function,
            StreamOptions.__annotations__,
            others,
            receive_buffers=0,
            max_recv_wr=depth,
            max_send_wr=depth + CONTROL_SLOTS,
            rnr_retry_count=7,
            responder_resources=0,
        )

    def attempt(
        self,
        host: str,
        port: int,
        source: tuple[str, int] | None = None,
        timeout: float | None = 30.0,
        device: str = "auto",
    ) -> Attempt:
        """Return a connect with these options. Arguments and errors are as of `connect_stream`."""
        return Attempt(self.call, self.options, host, port, source, timeout, device)

    def rsocket(self, connection: Connection) -> Rsocket:
        """Return an rsocket with these options over a prepared connection.

        Raises:
            VerbsCallError: memory could not be registered, or a receive not posted.
        """
        memory = Memory(connection, self.ring_bytes, self.grows)
        return Rsocket(connection, memory, stream_path(connection, memory), self.close_timeout)


@opens
async def connect_stream(
    host: str,
    port: int,
    *,
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    **options: Unpack[StreamOptions],
) -> Stream:
    """Connect a byte stream over RDMA. Await the call, or enter it with `async with`.

    The peer is `listen_stream`, or any program that uses rsockets.

    Args:
        host, port, source, device: as of `aiordma.connect`.
        timeout: same as `aiordma.connect`. While time remains, an aiordma listener whose backlog is
            full is tried again, as a client of TCP does, too.
        buffer_size: bytes that the peer can send before this side has received them; as many again
            are used for sending. 4 KiB to 1 GiB. None: 256 KiB, and 2 MiB once they were full
            several times.
        queue_depth: messages that can be on the way in each direction, 16 to 65,534. Each send is
            at least one message.
        close_timeout: seconds in which a close waits until the peer's device has everything that
            was sent, 0 to 3,600. At its end, the connection ends, and what was not acknowledged by
            then may be lost. 0: do not wait.
        tos, ack_timeout, retry_count, peer_timeout, keepalive: see ConnectionOptions.

    Raises:
        as `aiordma.connect`.
        StreamProtocolError: the program at that port does not use rsockets.

    Cancellation: the peer, if it accepts, gets an end of the data. On iWARP, the connection waits
        in the background for that, at most `close_timeout` seconds, at most 5.

    See: man 7 rsocket.
    """
    settings = StreamSettings(connect_stream, options)
    attempt = settings.attempt(host, port, source, timeout, device)
    return Stream(*await connect_rsocket(settings, attempt))


class _FullBacklog:
    """The attempts to reach a listener whose backlog is full, for programs that were written for
    TCP: the kernel repeats the SYN there, so that a burst of clients waits."""

    def __init__(self) -> None:
        self._longest = FULL_SECONDS
        self._seconds = 0.0
        self._waited = 0.0

    def has_another(self, error: BaseException, left: float | None) -> bool:
        """Return whether to try again, after `pause`.

        Args:
            left: seconds for the pause and the attempt; None: no limit. The pause takes at most a
                half of them: the peer needs the others for its answer.
        """
        if not is_backlog_full(error) or (left is not None and left < LEAST_LEFT_SECONDS):
            return False
        # A random part, so that the clients of a burst do not come together again.
        seconds = self._longest * random.uniform(0.5, 1)
        self._longest = min(2 * self._longest, MOST_FULL_SECONDS)
        self._seconds = seconds if left is None else min(seconds, left / 2)
        return True

    async def pause(self) -> None:
        """Wait before the next attempt. For another local port, there is nothing to wait for."""
        seconds, self._seconds = self._seconds, 0.0
        if seconds:
            self._waited += seconds
            await anyio.sleep(seconds)

    def explain(self, error: BaseException) -> None:
        """Add to the text of an attempt's error that waiting has taken a part of the time."""
        if self._waited and isinstance(error, ConnectTimeoutError):
            waited = f"the listener's backlog was full for {self._waited:.3g} s of that time"
            error.args = (f"{str(error).removesuffix(NOT_ACCEPTED)}; {waited}",)


@asynccontextmanager
async def _closed_on_failure(connection: Connection) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await connection.aclose()
        raise


class _Connecting:
    """A stream whose connection is not established yet. See Above.

    If its connect is cancelled, the connection ends once the peer has accepted it,
    with an end of the data, as over TCP. It has no data, so none can be missing. If the peer does
    not accept within `close_timeout`, at most ABORT_SECONDS, it finds the connection closed."""

    _is_ending = False

    def __init__(self, connection: Connection, rsocket: Rsocket) -> None:
        self._connection, self._rsocket = connection, rsocket
        self._endpoint = connection._endpoint
        self._endpoint.teardown.above = self

    def _end_soon(self) -> None:
        closing = ClosesOnceDrained(self._connection, self._rsocket)
        self._endpoint.teardown.is_reported = True
        self._end_data(closing)

    def _end_data(self, closing: ClosesOnceDrained) -> None:
        event, rsocket = self._endpoint.handshake.event, self._rsocket
        if self._endpoint.state is ConnectionState.CONNECTING:
            self._endpoint.handshake.call_at_change(lambda: self._end_data(closing))
            return
        if self._endpoint.state is not ConnectionState.ESTABLISHED or event is None:
            closing.close()
            return
        try:
            rsocket.start(event.private_data)
        except StreamProtocolError:
            closing.close()
            return
        rsocket.begin(is_first=True)
        rsocket.path.close_write(True)
        if not rsocket.notify_drained(closing.close):
            closing.close()


@contextmanager
def _naming(operation: str) -> Iterator[None]:
    """Let the error of a handshake say which one."""
    try:
        yield
    except StreamProtocolError as error:
        raise StreamProtocolError(f"{operation}: {error}") from None


async def connect_rsocket(
    settings: StreamSettings,
    attempt: Attempt,
    routes: Routes | None = None,
    check: Callable[[Connection], object] = lambda _: None,
) -> tuple[Connection, Rsocket]:
    """Do the work of `connect_stream`.

    Args:
        settings: those of the stream.
        attempt: of `settings.attempt`.
        routes: the peer's addresses; None: they are looked up.
        check: called with the connection before it is established. It can raise.
    """

    async def establish(connection: Connection) -> Rsocket:
        async with _closed_on_failure(connection):
            check(connection)
            rsocket = settings.rsocket(connection)
        # If it fails, it closes the connection itself: in the background while the driver waits for
        # the peer, which takes iWARP's up to two minutes.
        connecting = _Connecting(connection, rsocket)
        await connection.establish(private_data=rsocket.hello())
        del connecting
        async with _closed_on_failure(connection):
            with _naming(f"connect to {attempt.target}"):
                rsocket.start(connection.private_data)
            rsocket.begin(is_first=True)
        return rsocket

    async def connect_to(address: str, local: LocalAddresses) -> tuple[Connection, Rsocket]:
        ports, waits = LocalPorts(local[0]), _FullBacklog()
        while True:
            connection = await attempt.prepare(address, local)
            try:
                return connection, await establish(connection)
            except Exception as error:
                if waits.has_another(error, attempt.limit.left()):
                    ports = LocalPorts(local[0])
                elif not ports.has_another(error):
                    waits.explain(error)
                    raise
            await waits.pause()

    if routes is None:
        return await attempt.of_name(connect_to)
    return await attempt.of_first(routes, connect_to)


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
    rsockets: dict[Connection, Rsocket] = {}
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
    rsockets: dict[Connection, Rsocket],
    request: ConnectionRequest,
    _private_data: bytes,
) -> Connection:
    """Answer a request, and enter the connection's rsocket into `rsockets`."""
    peer = request.private_data
    connection = await request.prepare()
    try:
        rsocket = settings.rsocket(connection)
        with _naming(request._operation):
            rsocket.start(peer)
        await connection.establish(private_data=rsocket.hello())
        rsocket.begin(is_first=False)
    except BaseException:
        await connection.aclose()  # before `establish`, this rejects the peer
        raise
    rsockets[connection] = rsocket
    connection._endpoint.teardown.on_closed.append(partial(rsockets.pop, connection, None))
    return connection


class StreamListener(AnyListener[Stream]):
    """Listens for streams: `listen_stream` makes it. It is an anyio Listener."""

    def __init__(
        self,
        endpoint: ListenerEndpoint,
        settings: StreamSettings,
        rsockets: dict[Connection, Rsocket],
    ) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._rsockets = rsockets

    def __repr__(self) -> str:
        return f"<StreamListener at {address_text(self.local_address)}>"

    @property
    def local_address(self) -> SocketAddress | None:
        """The local (host, port)."""
        return self._endpoint.local_address

    @property
    def port(self) -> int:
        """The port."""
        return self._endpoint.port

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
        return Stream(*await self._accept())

    async def _accept_all(self, handle: Callable[[Connection, Rsocket], Awaitable[None]]) -> None:
        """Accept every peer until the listener is closed. Await `handle` for each.

        Raises:
            DeviceRemovedError, EventLoopError, ForkError: as `_accept_any`.
        """
        with suppress(ClosedError), self._endpoint.handshakes.taking_all():
            while True:
                # In no variable, which would keep the last peer's connection until the next peer.
                await handle(*await self._accept_any())

    async def _accept_any(self) -> tuple[Connection, Rsocket]:
        """Accept the next peer whose handshake succeeds; log the others.

        Raises:
            ClosedError, DeviceRemovedError: no further peer can be accepted.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.
        """
        while True:
            try:
                return await self._accept()
            except (EventLoopError, ForkError):
                raise
            except Exception as error:
                if isinstance(error, RdmaError) and self._endpoint.has_ended:
                    raise self._endpoint.end_error() from None  # this may be a handshake's
                is_peers = isinstance(error, ConnectionError)
                level = logging.INFO if is_peers else logging.WARNING
                logger.log(level, "a stream was not accepted: %s", cause_text(error))
                if isinstance(error, VerbsCallError):
                    await anyio.sleep(ACCEPT_AGAIN_SECONDS)

    async def _accept(self) -> tuple[Connection, Rsocket]:
        connection = (await self._endpoint.accept()).take()
        return connection, self._rsockets.pop(connection)

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
            await self._serve(handler, task_group)
            return
        async with anyio.create_task_group() as own:
            await self._serve(handler, own)

    async def _serve(self, handler: Callable[[Stream], Awaitable[Any]], group: TaskGroup) -> None:
        async def start(connection: Connection, rsocket: Rsocket) -> None:
            group.start_soon(self._handle, Stream(connection, rsocket), handler)

        await self._accept_all(start)

    async def _handle(self, stream: Stream, handler: Callable[[Stream], Awaitable[Any]]) -> None:
        async with stream:
            await handler(stream)

    async def aclose(self) -> None:
        """Stop listening, and reject the waiting peers. Accepted streams stay open. Idempotent.

        Raises: as `Listener.aclose`.

        Cancellation: the listener still closes, and the call returns once it is closed.
        """
        await self._endpoint.aclose()

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

    def _close_soon(self) -> None:
        """Stop listening, and close in the background. `aclose` waits for the end."""
        self._endpoint.teardown.close()
