"""listen(): a listener, which accepts or rejects connection requests, and serves connections."""

import errno
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, Unpack

import anyio
from anyio.abc import Listener as AbstractListener
from anyio.abc import TaskGroup

from aiordma._base.arguments import seconds, whole_number, wrong_type
from aiordma._base.connection_parameters import IN_ACCEPT, check_private_data
from aiordma._base.enums import CmEventType
from aiordma._base.errors import (
    BACKLOG_IS_FULL,
    NOT_SERVING,
    BusyError,
    ClosedError,
    DeviceRemovedError,
    FlushedError,
    LocalAccessError,
    LocalLengthError,
    LocalProtectionError,
    LocalQueuePairError,
    RdmaConnectionError,
    RdmaError,
    VerbsCallError,
    WorkCompletionError,
    cause_text,
    detached,
    leaf_errors,
)
from aiordma._base.fair_queue import FairQueue, source_of
from aiordma._base.hints import descriptors_hint
from aiordma._base.opening import opens
from aiordma._base.options import (
    ConnectionKeywords,
    ConnectionOptions,
)
from aiordma._base.origin import warn_unclosed, with_origin
from aiordma._base.process import here, never_pickled, require_same_process
from aiordma._base.provider import Provider, Requirement
from aiordma._base.socket_address import SocketAddress, address_text, unpack_address
from aiordma._base.statistics import ListenerStatistics
from aiordma._base.weak_items import WeakItems
from aiordma._connection.connection import Connection, ConnectionInfo
from aiordma._connection.connection_request import ConnectionRequest, RequestTally
from aiordma._connection.domain import DomainArgument
from aiordma._connection.handshakes import Acceptance, Establish, Handshakes
from aiordma._connection.local_ports import LocalPorts
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.shared_source import ListenerReceives
from aiordma._loop.event_loop import Waiter, require_here
from aiordma._loop.threads import Once, outwait
from aiordma._runtime.address_lookup import checked_host, checked_port, numeric_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import new_identifier
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.teardown import Teardown
from aiordma.verbs.device import Context, require_device
from aiordma.verbs.identifier import Event, Identifier

__all__ = (
    "MOST_BACKLOG",
    "Listener",
    "listen",
    "listen_with",
    "open_listeners",
    "wait_for_port",
)

logger: logging.Logger = logging.getLogger("aiordma")

KERNEL_BACKLOG_RESERVE = 128

MOST_STRANGERS = 64
"""Hosts of peers without a handshake that a listener logs; further ones are counted only."""

MOST_BACKLOG = (1 << 31) - 1 - KERNEL_BACKLOG_RESERVE
"""The maximum backlog: rdma_listen takes an int."""


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
    domain: DomainArgument = None,
    options: ConnectionOptions | None = None,
    **keywords: Unpack[ConnectionKeywords],
) -> "Listener":
    """Listen for connections. Await the call, or enter it with `async with`.

    The listener uses every real RDMA device, or the real device that has the address. If there is
    no such device, it uses the built-in software device.

    Args:
        host: a local address; "0.0.0.0" is all IPv4 addresses, "::" all addresses of both versions.
            A link-local address includes its interface: "fe80::1%eth0". A listener has one address:
            of a name with several, the first one of IPv4, or else the first one. So "localhost" is
            127.0.0.1 only. Open a listener for each address to listen on all of them.
        port: the port in RDMA's TCP port space; 0 is any free port (`listener.port`). On iWARP
            (siw, the software device) these are TCP's ports, so a socket may already use the port;
            on RoCE and InfiniBand they are separate.
        backlog: the maximum number of connection requests that wait to be accepted. A further
            request is rejected. If another address (for IPv6: a /64) has more waiting requests than
            the further request's address would then have, the oldest request of the address with
            the most is rejected instead. The private data of the rejection states the reason.
        device: "auto", or the name or the class of the devices to accept on, as of `connect`.
        accept_timeout: seconds that a peer may take to finish the handshake after the accept.
        ipv6_only: with "::", do not listen on IPv4's port of the same number; None: the system's
            default (sysctl net.ipv6.bindv6only).
        shared_receive: a queue from which all accepted connections take their receives. A number
            creates one queue per device and domain, with as many pooled receives of receive_size
            bytes. None: each connection has receives of its own.
        domain: the protection domain of the accepted connections: None shares one with everything
            else on this event loop and device. "each" makes one for each connection, so that no
            peer can access memory that is registered for another one. With a Domain of
            `open_domain`, the listener accepts on the domain's device only.
        receive_buffers, receive_size, peer_timeout, keepalive, options: of every accepted
            connection: see ConnectionOptions.

    Raises:
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that has the address.
        AddressError: the host's name does not resolve, or another device than the required one has
            the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        VerbsCallError: the address or port is not available, or there are no file descriptors left;
            the message says why.
        ClosedError, EventLoopError: `domain` is closed, or belongs to another event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left; no peer was accepted.

    See: man rdma_bind_addr, rdma_listen.
    """
    return await listen_with(
        "listen",
        ConnectionOptions._chosen(listen, options, keywords),
        host,
        port,
        backlog=backlog,
        device=device,
        accept_timeout=accept_timeout,
        ipv6_only=ipv6_only,
        shared_receive=shared_receive,
        domain=domain,
    )


async def listen_with(
    call: str,
    options: ConnectionOptions,
    host: str,
    port: int,
    *,
    backlog: int,
    device: str,
    accept_timeout: float,
    ipv6_only: bool | None,
    shared_receive: SharedReceiveQueue | int | None = None,
    domain: DomainArgument = None,
    establish: Establish = ConnectionRequest._open,
) -> "Listener":
    """Do the work of `listen`, for a function whose name the errors have."""
    host, port = checked_host(host, "host", call), checked_port(port, "port", call)
    # rdma_listen takes 0 as a system default, beyond which the kernel silently drops requests.
    backlog = whole_number(backlog, "backlog", 1, MOST_BACKLOG, call)
    accept_timeout = seconds(accept_timeout, "accept_timeout", call)
    if ipv6_only is not None and not isinstance(ipv6_only, bool):
        raise wrong_type(ipv6_only, "ipv6_only", "a bool or None", call)
    if ipv6_only is not None and ":" not in host:
        raise ValueError(f"{call}(): ipv6_only={ipv6_only}: {host!r} is no numeric IPv6 address")
    # Check the arguments before anything is opened.
    choice = ListenerReceives(shared_receive, options, domain, call).domain
    requirement = choice.requirement(device)
    choice.require_usable()
    if requirement.name is not None:
        require_device(requirement.name)
    numeric = await numeric_address(host)

    async def attempt(provider: Provider) -> Listener:
        receives = ListenerReceives(shared_receive, options, domain)
        ports = LocalPorts((numeric, port))
        while True:
            try:
                reactor, identifier = await listening(provider)
            except VerbsCallError as error:
                if error.call != "rdma_listen" or not ports.has_another(error):
                    raise
            else:
                return Listener(
                    reactor,
                    identifier,
                    options,
                    backlog,
                    requirement,
                    accept_timeout,
                    receives,
                    establish,
                )

    async def listening(provider: Provider) -> tuple[Reactor, Identifier]:
        async with new_identifier(provider) as (reactor, identifier):
            if options.tos is not None:
                identifier.set_tos(options.tos)
            if ipv6_only is not None:
                identifier.set_ipv6_only(ipv6_only)
            identifier.bind(numeric, port)
            if identifier.device_key:
                with borrowed_context(identifier) as context:
                    requirement.check(context.device_name, context.kind, f"{call}({host!r})")
            # The kernel silently drops requests beyond its backlog. The listener's own, smaller
            # backlog rejects them before that.
            identifier.listen(backlog + KERNEL_BACKLOG_RESERVE)
            return reactor, identifier

    return await with_device(requirement, numeric, attempt)


@contextmanager
def borrowed_context(identifier: Identifier) -> Iterator[Context]:
    """Yield the opened device of an identifier."""
    context = identifier.context()
    try:
        yield context
    finally:
        context.close()


_PEERS_FAULT = (RdmaConnectionError, anyio.BrokenResourceError, anyio.EndOfStream)

_HANDLERS_FAULT = (LocalProtectionError, LocalAccessError)

_TOO_LONG = (LocalLengthError, LocalQueuePairError)
"""The errors of a peer's message that is longer than its receive: rxe reports the second one."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # `raise error from error` makes a circle
        seen.add(id(link))
        yield link
        link = link.__cause__


def _is_of(connection: Connection, error: BaseException) -> bool:
    """Whether an error is one of this connection, and not, for example, of another connection that
    the handler has opened."""
    cause = connection.cause
    for link in _causes(error):
        if isinstance(link, WorkCompletionError) and link.qp_num == connection.qp_num:
            # Queue pairs of two devices can have the same number, so the connection must have
            # ended. Only the cause of a flush can still be unknown.
            return cause is not None or isinstance(link, FlushedError)
        if cause is not None and type(link) is type(cause) and link.args == cause.args:
            return True
    # anyio's own errors, of streams that wrap the connection, do not say what failed.
    return cause is not None and not isinstance(link, RdmaError | OSError)


def _peers_fault(error: Exception, connection: Connection | None) -> BaseException | None:
    """Return the first cause of a handler's error, if the handler did not cause any part of it;
    otherwise None. Without a connection, its handshake failed."""
    leaves = leaf_errors(error)
    if not all(isinstance(leaf, (RdmaError, *_PEERS_FAULT)) for leaf in leaves):
        return None
    causes = []
    for leaf in leaves:
        if not isinstance(leaf, _PEERS_FAULT):
            continue  # for example, the ClosedError of another task of the same connection
        if connection is not None and not _is_of(connection, leaf):
            return None
        while isinstance(leaf, FlushedError) and leaf.__cause__ is not None:
            leaf = leaf.__cause__
        if isinstance(leaf, _HANDLERS_FAULT):
            return None
        causes.append(leaf)
    causes.sort(key=lambda cause: isinstance(cause, FlushedError))  # a flush is never the cause
    return causes[0] if causes else None


def _log_failure(error: Exception, peer: str, connection: Connection | None = None) -> None:
    """Log the error of a peer's handshake or, with its connection, of its handler."""
    fault = _peers_fault(error, connection)
    fields = {"peer": peer} if connection is None else connection._endpoint.log_fields
    if fault is None:
        logger.error("the handler of %s failed", peer, exc_info=error, extra=fields)
    else:
        level = logging.WARNING if isinstance(fault, _TOO_LONG) else logging.INFO
        logger.log(level, "%s ended: %s", peer, cause_text(fault), extra=fields)


_listeners: WeakItems["Listener"] = WeakItems()


def open_listeners() -> list["Listener"]:
    """Return the open listeners of this process, in any thread."""
    return [each for each in _listeners.alive() if not each._closed and each._process == here.pid]


async def wait_for_port(port: int) -> None:
    """Wait until the listeners on the port that this event loop has closed no longer use it."""
    for each in _listeners.alive():
        if each._closed and each.port == port and each._reactor.loop.is_running_here():
            with suppress(VerbsCallError, BusyError):  # then the bind fails
                await each.aclose()


class Listener(AbstractListener[Connection]):
    """Listens for connections until it is closed. `accept` returns one connection, `serve` handles
    all. An anyio Listener.

    `async for request in listener` returns every ConnectionRequest until the listener is closed.
    """

    def __init__(
        self,
        reactor: Reactor,
        identifier: Identifier,
        options: ConnectionOptions,
        backlog: int,
        requirement: Requirement,
        accept_timeout: float,
        receives: ListenerReceives,
        establish: Establish = ConnectionRequest._open,
    ) -> None:
        self._process = here.pid
        self._reactor = reactor
        self.options = options
        self._accept_timeout = accept_timeout
        self._receives = receives
        self._domain = receives.domain.state
        if self._domain is not None:
            self._domain.join(self, "listener", lambda: self._closed)
        self._identifier = identifier
        self._local = identifier.local_address
        self._is_of_one_device = bool(identifier.device_key)  # which was checked
        self._backlog = backlog
        self._requirement = requirement
        self._requests: FairQueue[ConnectionRequest] = FairQueue()
        self._waiters: deque[Waiter] = deque()
        self._closed = False
        self._failure: DeviceRemovedError | None = None
        self._is_serving = True
        self._leaving = 0  # requests that are being rejected
        self._all_left = Once(reactor.loop)
        self._tally = RequestTally()
        self._arrived = self._backlog_full = self._strangers = 0
        self._stranger_hosts: set[tuple[str, bool]] = set()
        _listeners.add(self)
        self._handshakes = Handshakes(
            reactor.loop,
            self._requests,
            establish,
            reactor.after_events,
            self._count_leaving,
            self._has_left,
        )
        self._teardown = Teardown(reactor, self)
        reactor.subscribe(identifier, self._handle)

    __reduce__ = never_pickled

    def __repr__(self) -> str:
        return f"<Listener on {'closed' if self._closed else self.local_address}>"

    @property
    def local_address(self) -> SocketAddress | None:
        """The (host, port) that the listener is bound to, also after it was closed."""
        return self._local

    @property
    def port(self) -> int:
        """The port that the listener listens on."""
        address = self.local_address
        return address[1] if address else 0

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {ConnectionInfo.local_address: lambda: self.local_address}

    def statistics(self) -> ListenerStatistics:
        """Return the counters of the listener's connection requests.

        Raises: nothing.
        """
        return ListenerStatistics(
            connection_requests=self._arrived,
            waiting=len(self._requests),
            established=self._tally.established,
            rejected=self._tally.rejected,
            backlog_full=self._backlog_full,
            failed=self._tally.failed,
            without_handshake=self._strangers,
        )

    def _handle(self, event: Event) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            if event.type is CmEventType.DEVICE_REMOVAL:
                self._failure = DeviceRemovedError(f"{self!r}: its RDMA device was removed")
                self._wake_all()
                self._handshakes.release()
            elif event.type is CmEventType.CONNECT_ERROR:
                if event.qp_num:
                    self._note_strangers(event)
                else:
                    self._log_shortage(-event.status)
            return
        identifier = Identifier(self._reactor.channel, key=event.new_key)
        request = ConnectionRequest(
            self._reactor,
            self.options,
            self._accept_timeout,
            self._receives,
            identifier,
            event,
            self._tally,
            self._teardown.origin,
        )
        self._reactor.subscribe(identifier, partial(self._handle_waiting, request))
        self._arrived += 1
        source = source_of(request.peer_address)
        if self._closed or not self._is_ours(identifier):
            self._turn_away(request)
            return
        if not self._is_serving:
            self._turn_away(request, NOT_SERVING)
            return
        if not self._has_room(source):
            self._turn_away(request, BACKLOG_IS_FULL)
            return
        self._requests.append(request, source)
        self._handshakes.advance()
        if self._waiters and self._requests:
            self._waiters.popleft().wake()

    def _has_room(self, source: bytes) -> bool:
        """Return whether the backlog can take a request from a source. A full backlog can if
        another source has more requests than this source would then have. The oldest request of the
        source with the most is then rejected."""
        if len(self._requests) < self._backlog:
            return True
        displaced = self._requests.displaced_by(source)
        if displaced is None:
            return False
        self._requests.remove(displaced)
        self._turn_away(displaced, BACKLOG_IS_FULL)
        return True

    def _handle_waiting(self, request: ConnectionRequest, event: Event) -> None:
        """Remove a request from the backlog if its peer withdraws it before the program takes
        it."""
        request._handle_event(event)
        if request.is_gone and request in self._requests:
            self._requests.remove(request)
            self._turn_away(request)

    def _log_shortage(self, error: int) -> None:
        """Log an event of the software device, which reports each shortage once."""
        why = descriptors_hint(error) or os.strerror(error)
        logger.warning("%r refuses peers until this process has resources again. %s", self, why)

    def _note_strangers(self, event: Event) -> None:
        """Count an event of the software device for peers without a handshake, whose number is in
        `qp_num`. Log the first one of each host, of a few hosts."""
        self._strangers += event.qp_num
        peer = unpack_address(event.private_data)
        host, name = ("", "a peer") if peer is None else (peer[0], address_text(peer))
        has_sent = event.status == -errno.EPROTO
        if (host, has_sent) in self._stranger_hosts or len(self._stranger_hosts) == MOST_STRANGERS:
            return
        self._stranger_hosts.add((host, has_sent))
        # A client that only connects is usual: a health check of a load balancer, for instance.
        logger.log(
            logging.WARNING if has_sent else logging.INFO,
            "%r: %s connected by TCP and sent %s: probably a plain TCP client (%s)",
            self,
            name,
            "bytes that are no handshake of iWARP" if has_sent else "no handshake of iWARP",
            "HTTP, for instance" if has_sent else "a health check, a port scan",
            extra={"peer": name},
        )

    def _is_ours(self, identifier: Identifier) -> bool:
        if self._is_of_one_device or self._requirement.permits_all:
            return True
        if self._requirement.name is not None:
            return self._requirement.name == identifier._device_name
        with borrowed_context(identifier) as context:
            return self._requirement.permits(context.device_name, context.kind)

    def _turn_away(self, request: ConnectionRequest, reason: bytes = b"") -> None:
        self._backlog_full += reason == BACKLOG_IS_FULL
        self._count_leaving()
        request._start_rejecting(self._has_left, reason)

    def _count_leaving(self) -> None:
        self._leaving += 1

    def _has_left(self) -> None:
        self._leaving -= 1
        if not self._leaving and self._closed:
            self._all_left.set()

    async def request(self) -> ConnectionRequest:
        """Return the next connection request, to be accepted or rejected.

        Raises:
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no peer is lost; the next call returns it.
        """
        self._require_here()
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
                    self._waiters.popleft().wake()  # pass on the wake-up of this cancelled task
                raise
        request, _ = self._requests.popleft()
        request._was_handed_out = True
        return request

    def _require_here(self) -> None:
        require_same_process(self._process, self)
        require_here(self._reactor.loop, self)

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
        """Accept the next peer, and return the established connection.

        Handshakes run concurrently: while one is slow, other waiting peers are accepted. The call
        returns the first connection that is established. The next calls return the connections that
        are established afterwards. At most 128 handshakes are in progress. To begin one more, the
        oldest handshake with a slow peer, of the address with the most handshakes, is ended.

        Args:
            private_data: up to 196 bytes for the peer's program. Several peers can be sent these
                bytes, and one of them is returned. A later call with different private data ends
                the handshakes that this call has left.

        Raises:
            TypeError, ValueError: the private data is not bytes, or longer than 196; no peer was
                accepted.
            RdmaConnectionError: a peer withdrew, or did not finish within `accept_timeout`; call
                again for the next peer. If no call is waiting then, the error is logged.
            NotSupportedError: the listener has `shared_receive`, and the device has no shared
                receive queues.
            VerbsCallError: no thread could be started, or no file descriptors are left.
            ClosedError: the listener was closed.
            DeviceRemovedError: its RDMA device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no peer is lost. Handshakes in progress continue, for the next call. They end
        when the listener is closed.

        See: man rdma_accept.
        """
        private_data = check_private_data(private_data, *IN_ACCEPT, "accept")
        self._require_here()
        return (await self._accept(private_data)).take()

    async def _accept(self, private_data: bytes = b"") -> Acceptance:
        """Return the next handshake that has ended, to be taken."""
        accepted = None
        if not self._has_ended:
            accepted = await self._handshakes.accept(private_data)
        if accepted is None:
            raise self._end_error()
        return accepted

    async def serve(
        self,
        handler: Callable[[Connection], Any],
        task_group: TaskGroup | None = None,
    ) -> None:
        """Accept every peer, and run `handler(connection)` for each in a task of its own, until
        cancelled or closed.

        A connection is closed when its handler returns. If a handler raises an error, only its
        connection ends, and the error is logged to the logger "aiordma". If the error is that this
        connection or its handshake has failed, because of the peer, the network or the device, it
        is logged in one line, with its first cause, at the level INFO. The same holds for an
        exception group of such errors. The level is WARNING if a message of the peer was longer
        than its receive. Any other error, such as that of another connection that the handler has
        opened, is logged with its traceback, at the level ERROR.

        At most 128 handshakes are in progress. To begin one more, the oldest handshake with a slow
        peer, of the address with the most handshakes, is ended.

        Args:
            handler: an async function of one connection.
            task_group: the task group to run the handlers in; None: `serve` creates one.

        Raises:
            TypeError: `handler` cannot be called, or `task_group` is not a task group.
            DeviceRemovedError: the listener's RDMA device was removed. Without `task_group`, it is
                in an ExceptionGroup.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: without `task_group`, the handlers are cancelled and their connections closed.
        No peer that waits to be accepted is lost. Handshakes in progress continue, for the next
        call of `serve` or `accept`.
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
        self._require_here()
        with suppress(ClosedError), self._handshakes.taking_all():
            while True:
                # In no variable, which would keep the last peer's connection until the next peer.
                group.start_soon(self._handle_one, await self._accept(), handler)

    async def _handle_one(
        self, accepted: Acceptance, handler: Callable[[Connection], Awaitable[Any]]
    ) -> None:
        try:
            async with accepted.take() as connection:
                try:
                    await handler(connection)
                except Exception as error:
                    # Before the close, which sets the cause of a connection that works.
                    _log_failure(error, accepted.peer, connection)
                    connection._ahead.give_up()  # its end waits for no message
        except Exception as error:
            _log_failure(error, accepted.peer)

    async def aclose(self) -> None:
        """Stop listening, and reject the waiting peers. Accepted connections stay open. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                listener.
            VerbsCallError: the driver refused to destroy the listener's identifier. Its port stays
                in use for the life of the process, and a second call raises the same error.

        Cancellation: the listener still closes, and the call returns once it is closed.
        """
        if not self._teardown.is_inherited:  # else the listener belongs to the parent process
            try:
                await self._teardown.aclose()
            finally:
                if self._closed:
                    await outwait(self._all_left)

    # -- the end (Owner) ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in messages."""
        return repr(self)

    def _closing(self) -> Exception:
        return ClosedError("this listener is closed")

    def _flush(self) -> None:
        """Reject the peers that wait, and end the handshakes."""
        self._closed = True
        self._leaving += 1
        self._reactor.unsubscribe(self._identifier)
        self._receives.close()
        self._wake_all()
        self._handshakes.close()
        for request in list(self._requests):
            self._requests.remove(request)
            self._turn_away(request)
        self._teardown.destroy()
        self._has_left()

    def _hurry(self) -> None:
        """Nothing waits for a timer."""

    def _destroy(self) -> None:
        self._identifier.close()

    def _destroyed(self) -> None:
        """It has no requests of its own."""

    def _release(self) -> None:
        return None

    def _released(self) -> None:
        if self._domain is not None:
            self._domain.leave(self)

    def _abandon(self, why: str) -> None:
        """It has no requests of its own. Wake all that wait."""
        self._closed = True
        self._all_left.set()
        self._wake_all()
        self._handshakes.release()
        refusal = self._teardown.refusal
        if self._domain is not None and refusal is not None:
            self._domain.keep_for(self, refusal)

    def _wake_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().wake()

    def __del__(self) -> None:
        teardown = getattr(self, "_teardown", None)
        if teardown is None or teardown.is_closing or teardown.is_inherited:
            return
        try:
            warn_unclosed(f"unclosed {with_origin(self, teardown.origin)}", self, teardown.origin)
        finally:
            if self._reactor.loop.has_ended:
                self._reactor.close_elsewhere(teardown.close)
