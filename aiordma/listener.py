"""listen(): connection requests, accepted or rejected, and served."""

import logging
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import anyio
from anyio.abc import Listener as AbstractListener
from anyio.abc import TaskGroup

from aiordma.connection import Connection, ConnectionInfo
from aiordma.connector import choose_device, failed_event, numeric_address, parameters
from aiordma.endpoint import Endpoint
from aiordma.enums import CmEventType
from aiordma.errors import (
    ClosedError,
    DeviceRemovedError,
    DisconnectedError,
    NoDeviceError,
    RdmaConnectionError,
    VerbsCallError,
)
from aiordma.event_loop import Waiter
from aiordma.hub import DeviceHub
from aiordma.options import ConnectionKeywords, ConnectionOptions
from aiordma.rdmacm import (
    MAX_ACCEPT_PRIVATE_DATA,
    MAX_REJECT_PRIVATE_DATA,
    Event,
    Identifier,
)
from aiordma.reactor import Reactor, acquire_reactor
from aiordma.shared_receive import SharedReceiveQueue
from aiordma.shared_source import ListenerReceives
from aiordma.socket_address import SocketAddress
from aiordma.states import ConnectionState
from aiordma.threads import outwait
from aiordma.verbs import Device

__all__ = ("ConnectionRequest", "Listener", "listen")

logger = logging.getLogger("aiordma")

KERNEL_BACKLOG_RESERVE = 128


async def listen(
    host: str = "0.0.0.0",
    port: int = 0,
    *,
    backlog: int = 128,
    device: str = "auto",
    accept_timeout: float = 30.0,
    shared_receive: SharedReceiveQueue | int | None = None,
    **options: Unpack[ConnectionKeywords],
) -> "Listener":
    """Listen for connections, on every RDMA device or on the one that has the address.

    Args:
        host: a local address of an RDMA interface; "0.0.0.0" or "::" is all of them.
        port: in RDMA's TCP port space; 0 takes a free one (`listener.port`).
        backlog: connection requests that may wait to be accepted; further ones are rejected.
        device: "auto", or the name of the only device to accept on.
        accept_timeout: seconds that a peer may take to finish an accepted connection.
        shared_receive: take the receives of all accepted connections from there; a number makes
            a queue of so many pooled receives, of receive_size bytes, per device.
        options: of every accepted connection: see ConnectionOptions.

    Raises:
        NoDeviceError: there is no RDMA device here.
        VerbsCallError: the address or port cannot be had; the message says why.
    """
    if backlog < 1:
        # Zero means a system default to rdma_listen, and dropping without a word beyond it.
        raise ValueError(f"backlog={backlog} is not 1 or more")
    chosen = ConnectionOptions(**options)
    receives = ListenerReceives(shared_receive, chosen.receive_size)
    wanted = choose_device(device)
    if wanted is not None and wanted not in Device.names():
        raise NoDeviceError(f"there is no RDMA device {wanted!r} here: `rdma link` lists them")
    numeric = await numeric_address(host)
    reactor = await acquire_reactor()
    try:
        identifier = Identifier(reactor.channel)
    except BaseException:
        reactor.release()
        raise
    listener = Listener(reactor, identifier, chosen, backlog, wanted, accept_timeout, receives)
    try:
        identifier.bind(numeric, port)
        # The kernel drops what is beyond its backlog without a word: ours rejects before that.
        identifier.listen(backlog + KERNEL_BACKLOG_RESERVE)
    except BaseException:
        await listener.aclose()
        raise
    return listener


class ConnectionRequest:
    """A peer that wants to connect: `accept` it or `reject` it, once."""

    def __init__(self, listener: "Listener", identifier: Identifier, event: Event) -> None:
        listener.reactor.retain()  # until it is answered; then whoever has the identifier has it
        self._reactor = listener.reactor
        self._options = listener.options
        self._accept_timeout = listener.accept_timeout
        self._receives = listener.receives
        self._identifier = identifier
        self._event = event
        self._gone: Event | None = None
        self._answered = False
        self.private_data = event.private_data
        """What the peer sent along; RDMA pads it with zeros."""
        self.peer_address: SocketAddress | None = identifier.peer_address
        """The peer's (host, port)."""

    def __repr__(self) -> str:
        return f"<ConnectionRequest from {self.peer_address}>"

    def _handle(self, event: Event) -> None:
        # The peer can go away while it waits for the answer.
        if event.type in (
            CmEventType.DISCONNECTED,
            CmEventType.UNREACHABLE,
            CmEventType.CONNECT_ERROR,
            CmEventType.REJECTED,
            CmEventType.DEVICE_REMOVAL,
        ):
            self._gone = event

    def _answer(self) -> None:
        if self._answered:
            raise ClosedError("this connection request has been answered")
        self._answered = True

    async def accept(
        self, *, private_data: bytes = b"", **options: Unpack[ConnectionKeywords]
    ) -> Connection:
        """Accept, and return the established connection. Cancelled or failed, the peer is refused
        or disconnected, and nothing is left.

        Args:
            private_data: up to 196 bytes for the peer's program.
            options: in place of the listener's.

        Raises:
            RdmaConnectionError: the peer has gone, or did not finish in time.
            ClosedError: the request has been answered already.
        """
        chosen = ConnectionOptions(**options) if options else self._options
        parameters(chosen, private_data).check(MAX_ACCEPT_PRIVATE_DATA, "an accept")
        self._answer()
        what = f"accept {self.peer_address}"
        identifier = self._identifier
        try:
            if self._gone is not None:
                raise failed_event(what, self._gone)
            hub = await self._reactor.hub(identifier)
        except BaseException:
            await self._give_back()
            raise
        # From here the endpoint owns the identifier, and the use of the reactor.
        endpoint = Endpoint(self._reactor, hub, identifier, chosen, ConnectionState.ACCEPTING)
        self._reactor.subscribe(identifier, endpoint.handle_event, endpoint)
        try:
            identifier.set_ack_timeout(chosen.ack_timeout)
            shared = await self._receives.on(endpoint)
            await endpoint.open(shared_receive=shared)
            connection = Connection(endpoint, shared)
            connection.prepare()
            if self._gone is not None:
                raise failed_event(what, self._gone)
            identifier.accept(parameters(self._offered(hub, chosen), private_data))
            with anyio.move_on_after(self._accept_timeout):
                if not await endpoint.connected():
                    raise endpoint.cause or failed_event(what, endpoint.last_event)
                connection.begin(private_data=self.private_data)
                return connection
            raise DisconnectedError(
                f"{what}: the peer did not finish within {self._accept_timeout:g} s"
            )
        except BaseException as error:
            await endpoint.aclose()
            if isinstance(error, VerbsCallError):
                # Calls on an identifier whose peer has gone fail in many ways.
                raise RdmaConnectionError(f"{what}: {error}") from error
            raise

    def _offered(self, hub: DeviceHub, chosen: ConnectionOptions) -> ConnectionOptions:
        if hub.is_iwarp:
            return chosen  # the two sides settle it by themselves (RFC 6581)
        # No more than the peer offers; its numbers come from our viewpoint (man rdma_accept).
        event = self._event
        return replace(
            chosen,
            responder_resources=min(chosen.responder_resources, event.responder_resources),
            initiator_depth=min(chosen.initiator_depth, event.initiator_depth),
        )

    async def reject(self, private_data: bytes = b"") -> None:
        """Refuse; the peer's connect raises RejectedError with up to 148 bytes from here.

        Raises:
            ClosedError: the request has been answered already.
        """
        if len(private_data) > MAX_REJECT_PRIVATE_DATA:
            raise ValueError(
                f"private_data of {len(private_data)} bytes: a reject carries at most "
                f"{MAX_REJECT_PRIVATE_DATA}"
            )
        self._answer()
        self._refuse(private_data)
        await self._give_back()

    def reject_later(self) -> None:
        """`reject` in the background."""
        self._answer()
        self._refuse(b"")
        self._give_back_later(lambda: None)

    def _refuse(self, private_data: bytes) -> None:
        try:
            self._identifier.reject(private_data)
        except VerbsCallError as error:
            logger.debug("rejecting %s: %s", self.peer_address, error)  # it has gone already

    async def _give_back(self) -> None:
        given = anyio.Event()
        self._give_back_later(given.set)
        await outwait(given)

    def _give_back_later(self, then: Callable[[], None]) -> None:
        self._reactor.unsubscribe(self._identifier)
        self._reactor.destroy(self._identifier.close, lambda: self._reactor.release(then))

    def __del__(self) -> None:
        if not getattr(self, "_answered", True):
            warnings.warn(f"unanswered {self!r}", ResourceWarning, stacklevel=1, source=self)


class Listener(AbstractListener[Connection]):
    """Listens until closed: `accept` one by one, or `serve` all. An anyio Listener."""

    def __init__(
        self,
        reactor: Reactor,
        identifier: Identifier,
        options: ConnectionOptions,
        backlog: int,
        device: str | None,
        accept_timeout: float,
        receives: ListenerReceives,
    ) -> None:
        self.reactor = reactor
        self.options = options
        self.accept_timeout = accept_timeout
        self.receives = receives
        self._identifier = identifier
        self._backlog = backlog
        self._device = device
        self._requests: deque[ConnectionRequest] = deque()
        self._waiters: deque[Waiter] = deque()
        self._closed = False
        self._failure: DeviceRemovedError | None = None
        self._gave_back = anyio.Event()
        reactor.subscribe(identifier, self._handle, self)

    def __repr__(self) -> str:
        return f"<Listener on {'closed' if self._closed else self.local_address}>"

    @property
    def local_address(self) -> SocketAddress | None:
        """(host, port) that it is bound to."""
        return self._identifier.local_address

    @property
    def port(self) -> int:
        """The port that it listens on."""
        address = self.local_address
        return address[1] if address else 0

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {ConnectionInfo.local_address: lambda: self.local_address}

    def _handle(self, event: Event) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            if event.type is CmEventType.DEVICE_REMOVAL:
                self._failure = DeviceRemovedError(f"{self!r}: its RDMA device was removed")
                self._wake_all()
            return
        identifier = Identifier(self.reactor.channel, key=event.new_key)
        request = ConnectionRequest(self, identifier, event)
        self.reactor.subscribe(identifier, request._handle)
        if self._closed or len(self._requests) >= self._backlog or not self._is_ours(identifier):
            request.reject_later()
            return
        self._requests.append(request)
        if self._waiters:
            self._waiters.popleft().wake()

    def _is_ours(self, identifier: Identifier) -> bool:
        if self._device is None:
            return True
        context = identifier.context()
        try:
            return context.device_name == self._device
        finally:
            context.close()

    async def request(self) -> ConnectionRequest:
        """Return the next peer that wants to connect, to be accepted or rejected. A cancelled
        wait loses none.

        Raises:
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
        """
        while not self._requests:
            if self._closed:
                raise ClosedError("this listener is closed")
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            waiter = self.reactor.loop.waiter()
            self._waiters.append(waiter)
            try:
                await waiter.wait()
            except BaseException:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif self._requests and self._waiters:
                    self._waiters.popleft().wake()  # pass on the wake-up that found us cancelled
                raise
        return self._requests.popleft()

    async def accept(self, *, private_data: bytes = b"") -> Connection:
        """Accept the next peer and return the established connection.

        Raises:
            RdmaConnectionError: that peer went away; call again for the next.
            ClosedError: the listener was closed.
        """
        request = await self.request()
        return await request.accept(private_data=private_data)

    async def serve(
        self,
        handler: Callable[[Connection], Any],
        task_group: TaskGroup | None = None,
    ) -> None:
        """Accept every peer, and run `handler(connection)` for each in a task of its own, until
        cancelled or closed.

        A connection is closed when its handler returns. What a handler raises ends its connection
        only: what the peer or the network did is logged briefly, all else with its traceback.

        Args:
            handler: an async function of one connection.
            task_group: where to run the handlers; None: a group of its own.
        """
        if task_group is not None:
            await self._serve(handler, task_group)
            return
        async with anyio.create_task_group() as own:
            await self._serve(handler, own)

    async def _serve(self, handler: Callable[[Connection], Any], group: TaskGroup) -> None:
        while True:
            try:
                request = await self.request()
            except ClosedError:
                return
            group.start_soon(self._handle_one, request, handler)

    async def _handle_one(
        self, request: ConnectionRequest, handler: Callable[[Connection], Awaitable[Any]]
    ) -> None:
        try:
            async with await request.accept() as connection:
                await handler(connection)
        except (RdmaConnectionError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            logger.info("%s ended: %s", request.peer_address, error)
        except Exception:
            logger.exception("the handler of %s failed", request.peer_address)

    async def aclose(self) -> None:
        """Stop listening; reject who waits. Accepted connections live on. Idempotent."""
        if not self._closed:
            self._closed = True
            self.receives.close()
            self._wake_all()
            while self._requests:
                self._requests.popleft().reject_later()
            self.reactor.unsubscribe(self._identifier)
            self.reactor.destroy(
                self._identifier.close, lambda: self.reactor.release(self._gave_back.set)
            )
        await outwait(self._gave_back)

    def _wake_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().wake()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
