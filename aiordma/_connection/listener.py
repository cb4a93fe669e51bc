"""listen(): connection requests, accepted or rejected, and served."""

import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self, Unpack

import anyio
from anyio.abc import Listener as AbstractListener
from anyio.abc import TaskGroup

from aiordma._base.arguments import seconds, whole_number, wrong_type
from aiordma._base.connection_parameters import MAX_ACCEPT_PRIVATE_DATA, check_private_data
from aiordma._base.enums import CmEventType
from aiordma._base.errors import (
    ClosedError,
    DeviceRemovedError,
    FlushedError,
    RdmaConnectionError,
    RdmaError,
    cause_text,
    detached,
)
from aiordma._base.fair_queue import FairQueue, source_of
from aiordma._base.hints import descriptors_hint
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._base.opening import opens
from aiordma._base.options import (
    DECIDED_BY_CM,
    ConnectionKeywords,
    ConnectionOptions,
    refuses,
)
from aiordma._base.origin import origin, warn_unclosed, with_origin
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import Provider, checked_device, wanted_device
from aiordma._base.socket_address import SocketAddress, address_text
from aiordma._connection.connection import Connection, ConnectionInfo
from aiordma._connection.connection_request import ConnectionRequest
from aiordma._connection.handshakes import Handshake, Handshakes
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.shared_source import ListenerReceives
from aiordma._loop.event_loop import Waiter, require_here
from aiordma._loop.threads import Once, outwait
from aiordma._runtime.address_lookup import checked_host, checked_port, numeric_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import new_identifier
from aiordma._runtime.reactor import AtLoopEnd, Reactor, acquire_reactor
from aiordma.verbs.device import require_device
from aiordma.verbs.identifier import Event, Identifier

__all__ = ("Listener", "listen")

logger: logging.Logger = logging.getLogger("aiordma")

KERNEL_BACKLOG_RESERVE = 128
BACKLOG_IS_FULL: bytes = b"the listener's backlog is full"
"""The private data of the rejections that this is the reason of."""

MOST_BACKLOG = (1 << 31) - 1 - KERNEL_BACKLOG_RESERVE
"""rdma_listen takes an int."""


@refuses(DECIDED_BY_CM)
@opens
async def listen(
    host: str = "0.0.0.0",
    port: int = 0,
    *,
    backlog: int = 128,
    device: str = "auto",
    accept_timeout: float = 30.0,
    ipv6_only: bool | None = None,
    shared_receive: SharedReceiveQueue | int | None = None,
    **options: Unpack[ConnectionKeywords],
) -> "Listener":
    """Listen for connections, on every real RDMA device or on the one that has the address; on the
    built-in software device where there is none, or none has it. Await it, or enter it with `async
    with`.

    Args:
        host: a local address; "0.0.0.0" is all of IPv4's, "::" all of both versions'. A link-local
            one has its interface behind it: "fe80::1%eth0".
        port: in RDMA's TCP port space; 0 takes a free one (`listener.port`). On iWARP (siw, the
            software device) a socket of the host can have the port already; on RoCE and InfiniBand
            sockets have ports of their own.
        backlog: connection requests that may wait to be accepted. A further one is rejected; or, if
            another address (of IPv6: a /64) has more of them than its own would have, the oldest of
            the address that has the most. The private data of the rejection says so.
        device: "auto", or the name of the only device to accept on, "software" for the built-in.
        accept_timeout: seconds that a peer may take to finish an accepted connection.
        ipv6_only: with "::", leave IPv4's port of that number to others; None: as the system has it
            (sysctl net.ipv6.bindv6only).
        shared_receive: take the receives of all accepted connections from there; a number makes a
            queue of so many pooled receives, of receive_size bytes, per device.
        options: of every accepted connection: see ConnectionOptions.

    Raises:
        NoDeviceError: a real device is insisted on, and there is none of its name here.
        AddressError: the host's name does not resolve.
        TypeError, ValueError: an argument is invalid; the message names it, and what is expected.
        VerbsCallError: the address or port cannot be had, or there are no file descriptors left;
            the message says why.
        ForkError: this process is a child of one that used real devices.

    Cancellation: nothing is left; no peer was accepted.

    See: man rdma_bind_addr, rdma_listen.
    """
    call = "listen"
    host, port = checked_host(host, "host", call), checked_port(port, "port", call)
    # Zero means a system default to rdma_listen, and dropping without a word beyond it.
    backlog = whole_number(backlog, "backlog", 1, MOST_BACKLOG, call)
    device = checked_device(device, call)
    accept_timeout = seconds(accept_timeout, "accept_timeout", call)
    if ipv6_only is not None and ":" not in host:
        raise ValueError(f"ipv6_only={ipv6_only}: {host!r} is no numeric IPv6 address")
    chosen = ConnectionOptions._of(listen, options)
    ListenerReceives(shared_receive, chosen)  # what is wrong with these is said first
    wanted = wanted_device(device)
    if wanted is not None:
        require_device(wanted)
    numeric = await numeric_address(host)

    async def attempt(provider: Provider) -> Listener:
        receives = ListenerReceives(shared_receive, chosen)
        reactor = await acquire_reactor(provider)
        async with new_identifier(reactor) as identifier:
            if chosen.tos is not None:
                identifier.set_tos(chosen.tos)
            if ipv6_only is not None:
                identifier.set_ipv6_only(ipv6_only)
            identifier.bind(numeric, port)
            # The kernel drops what is beyond its backlog without a word: ours rejects before that.
            identifier.listen(backlog + KERNEL_BACKLOG_RESERVE)
            return Listener(reactor, identifier, chosen, backlog, wanted, accept_timeout, receives)

    return await with_device(device, numeric, attempt)


_PEERS_FAULT = (RdmaConnectionError, anyio.BrokenResourceError, anyio.EndOfStream)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _peers_fault(error: Exception) -> BaseException | None:
    """Return the first cause of what a handler raised, if the handler is not to blame for any of
    it; else None."""
    leaves = list(_leaves(error))
    if not all(isinstance(leaf, (RdmaError, *_PEERS_FAULT)) for leaf in leaves):
        return None
    causes = []
    for leaf in leaves:
        if not isinstance(leaf, _PEERS_FAULT):
            continue  # such as the ClosedError of a task beside the one that was disconnected
        while isinstance(leaf, FlushedError) and leaf.__cause__ is not None:
            leaf = leaf.__cause__
        causes.append(leaf)
    causes.sort(key=lambda cause: isinstance(cause, FlushedError))  # a flush is not a cause
    return causes[0] if causes else None


class Listener(AbstractListener[Connection]):
    """Listens until closed: `accept` one by one, or `serve` all. An anyio Listener.

    `async for request in listener` gives every ConnectionRequest, until the listener is closed.
    """

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
        self._process = here.pid
        self._reactor = reactor
        self.options = options
        self._accept_timeout = accept_timeout
        self._receives = receives
        self._identifier = identifier
        self._backlog = backlog
        self._device = device
        self._requests: FairQueue[ConnectionRequest] = FairQueue()
        self._waiters: deque[Waiter] = deque()
        self._closed = False
        self._failure: DeviceRemovedError | None = None
        self._leaving = 0
        self._gave_back = Once(reactor.loop)
        self._handshakes = Handshakes(reactor.loop, self._requests, self._leaves, self._has_left)
        self._origin: str = origin()
        at_end = AtLoopEnd(self._left_open, self._close, self.aclose)
        reactor.subscribe(identifier, self._handle, at_end)

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
                self._handshakes.release()
            elif event.type is CmEventType.CONNECT_ERROR:
                self._log_shortage(-event.status)
            return
        identifier = Identifier(self._reactor.channel, key=event.new_key)
        request = ConnectionRequest(
            self._reactor, self.options, self._accept_timeout, self._receives, identifier, event
        )
        at_end = AtLoopEnd(request._left_open, request._close, request.aclose)
        self._reactor.subscribe(identifier, partial(self._handle_waiting, request), at_end)
        source = source_of(request.peer_address)
        if self._closed or not self._is_ours(identifier):
            self._turn_away(request)
            return
        if not self._has_room(source):
            self._turn_away(request, BACKLOG_IS_FULL)
            return
        request._origin = self._origin
        self._requests.append(request, source)
        self._handshakes.advance()
        if self._requests and self._waiters:
            self._waiters.popleft().wake()

    def _has_room(self, source: bytes) -> bool:
        """Return whether a request from a source gets a place in the backlog: if need be the place
        of the oldest request from the source that has the most, which is rejected."""
        if len(self._requests) < self._backlog:
            return True
        displaced = self._requests.displaced_by(source)
        if displaced is None:
            return False
        self._requests.remove(displaced)
        self._turn_away(displaced, BACKLOG_IS_FULL)
        return True

    def _handle_waiting(self, request: ConnectionRequest, event: Event) -> None:
        """Forget a request whose peer left before the program took it: it has no place in the
        backlog."""
        request._handle_event(event)
        if request.is_gone and request in self._requests:
            self._requests.remove(request)
            self._turn_away(request)

    def _log_shortage(self, error: int) -> None:
        """Of the software device, which reports it once for as long as it lasts."""
        why = descriptors_hint(error) or os.strerror(error)
        logger.warning("%r turns peers away until there is room again. %s", self, why)

    def _is_ours(self, identifier: Identifier) -> bool:
        if self._device is None:
            return True
        context = identifier.context()
        try:
            return context.device_name == self._device
        finally:
            context.close()

    def _turn_away(self, request: ConnectionRequest, reason: bytes = b"") -> None:
        self._leaves()
        request._start_rejecting(self._has_left, reason)

    def _leaves(self) -> None:
        self._leaving += 1

    def _has_left(self) -> None:
        self._leaving -= 1
        if not self._leaving and self._closed:
            self._gave_back.set()

    @deferring_steps
    async def request(self) -> ConnectionRequest:
        """Return the next peer that wants to connect, to be accepted or rejected.

        Raises:
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no peer is lost; the next call returns it.
        """
        require_same_process(self._process, repr(self))
        require_here(self._reactor.loop, self)
        while not self._requests:
            if self._has_ended:
                raise self._end_error()
            waiter = self._reactor.loop.waiter()
            self._waiters.append(waiter)
            try:
                await waiter.wait()
            except BaseException:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif self._requests and self._waiters:
                    self._waiters.popleft().wake()  # pass on the wake-up that found us cancelled
                raise
        request = self._requests.popleft()
        request._was_taken = True
        return request

    @property
    def _has_ended(self) -> bool:
        return self._closed or self._failure is not None

    def _end_error(self) -> Exception:
        if self._failure is not None and not self._closed:
            return detached(self._failure)
        return ClosedError("this listener is closed")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConnectionRequest:
        try:
            return await self.request()
        except ClosedError:
            raise StopAsyncIteration from None

    @opens
    async def accept(self, *, private_data: bytes = b"") -> Connection:
        """Accept the next peer and return the established connection.

        Peers finish their handshakes side by side: while one is slow, others that wait are
        accepted, and the first that is established is returned. Those that are established
        afterwards are returned by the next calls. At most 128 handshakes are in progress; for one
        more, the oldest slow one of the address that has the most is ended.

        Args:
            private_data: up to 196 bytes for the peer's program: several peers can get it, one of
                which is returned. A call with other data ends handshakes that it left behind.

        Raises:
            TypeError, ValueError: the private data is not bytes, or more than 196; no peer was
                accepted.
            RdmaConnectionError: a peer went away, or did not finish within `accept_timeout`; call
                again for the next. If no call waits at that time, it is logged.
            NotSupportedError: the device has no shared receive queues, for `shared_receive`.
            VerbsCallError: no thread could be started, or no file descriptors are left.
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: loses no peer. Handshakes in progress go on, for the next call, and end when
        the listener is closed.

        See: man rdma_accept.
        """
        private_data = check_private_data(
            private_data, MAX_ACCEPT_PRIVATE_DATA, "an accept", "accept"
        )
        require_same_process(self._process, repr(self))
        require_here(self._reactor.loop, self)
        if self._has_ended:
            raise self._end_error()
        connection = await self._handshakes.accept(private_data)
        if connection is None:
            raise self._end_error()
        return connection

    async def serve(
        self,
        handler: Callable[[Connection], Any],
        task_group: TaskGroup | None = None,
    ) -> None:
        """Accept every peer, and run `handler(connection)` for each in a task of its own, until
        cancelled or closed.

        A connection is closed when its handler returns. What a handler raises ends its connection
        only, and is logged: in one line with the first cause if it is the fault of the peer, the
        network or the device, also where task groups made exception groups of several such errors;
        all else with its traceback.

        Args:
            handler: an async function of one connection.
            task_group: where to run the handlers; None: a group of its own.

        Raises:
            TypeError: `handler` cannot be called, or `task_group` is not a task group.
            DeviceRemovedError: the listener's RDMA device was removed. From a group of its own: in
                an ExceptionGroup.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: ends handlers in a group of its own, and closes their connections. No peer
        that waits to be accepted is lost.
        """
        if not callable(handler):
            raise wrong_type(handler, "handler", "an async function of one connection", "serve")
        if task_group is not None:
            if not hasattr(task_group, "start_soon"):
                raise wrong_type(task_group, "task_group", "a task group of anyio's", "serve")
            await self._serve(handler, task_group)
            return
        async with anyio.create_task_group() as own:
            await self._serve(handler, own)

    async def _serve(self, handler: Callable[[Connection], Any], group: TaskGroup) -> None:
        for handshake in self._handshakes.adopt():
            group.start_soon(self._handle_one, handshake, handler)
        while True:
            try:
                request = await self.request()
            except ClosedError:
                return
            group.start_soon(self._handle_one, request, handler)

    async def _handle_one(
        self,
        request: ConnectionRequest | Handshake,
        handler: Callable[[Connection], Awaitable[Any]],
    ) -> None:
        try:
            async with request.accept() as connection:
                await handler(connection)
        except Exception as error:
            peer, fault = address_text(request.peer_address), _peers_fault(error)
            if fault is None:
                logger.exception("the handler of %s failed", peer)
            else:
                logger.info("%s ended: %s", peer, cause_text(fault))

    @deferring_steps
    async def aclose(self) -> None:
        """Stop listening, and reject the peers that wait. Accepted connections live on. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop; the message says what became of the
                listener.

        Cancellation: the listener closes all the same, and the call returns once it is closed.
        """
        if self._process != here.pid:
            return  # all of it is the parent's
        if not self._gave_back.is_set():
            self._reactor.require_here(self, self._close)
        self._close()
        await outwait(self._gave_back)

    @deferring
    def _close(self) -> None:
        """`aclose` in the background."""
        if self._closed:
            return
        self._closed = True
        self._receives.close()
        self._wake_all()
        self._leaving += 1
        self._handshakes.close()
        while self._requests:
            self._turn_away(self._requests.popleft())
        self._reactor.unsubscribe(self._identifier)
        self._reactor.destroy(self._identifier.close, lambda: self._reactor.release(self._has_left))

    def _left_open(self) -> str:
        """For the reactor: how the warning that it was not closed names it."""
        return "" if self._closed else with_origin(self, self._origin)

    def _wake_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().wake()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._process == here.pid:
            try:
                warn_unclosed(f"unclosed {with_origin(self, self._origin)}", self)
            finally:
                if self._reactor.loop.has_ended:
                    self._reactor.close_elsewhere(self._close)
