"""A listening port, behind the public listeners: its backlog, its handshakes and its end.

`Listener` and `aiordma.streams.StreamListener` take established connections from it.
"""

import errno
import logging
import os
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial

from aiordma._base.arguments import seconds, whole_number, wrong_type
from aiordma._base.enums import CmEventType
from aiordma._base.errors import (
    BusyError,
    ClosedError,
    DeviceRemovedError,
    VerbsCallError,
    detached,
)
from aiordma._base.fair_queue import FairQueue, source_of
from aiordma._base.hints import descriptors_hint
from aiordma._base.options import ConnectionOptions
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import Provider, Requirement
from aiordma._base.rejections import BACKLOG_IS_FULL, NOT_SERVING
from aiordma._base.socket_address import SocketAddress, address_text, unpack_address
from aiordma._base.statistics import ListenerStatistics
from aiordma._base.weak_items import WeakItems
from aiordma._connection.domain import DomainArgument
from aiordma._connection.handshakes import Acceptance, Establish, Handshakes, Take
from aiordma._connection.incoming import IncomingRequest
from aiordma._connection.listener_receives import ListenerReceives
from aiordma._connection.local_ports import LocalPorts
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._loop.event_loop import Waiter, require_here
from aiordma._loop.threads import Once, outwait
from aiordma._runtime.address_lookup import checked_host, checked_port, numeric_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import new_identifier
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.teardown import Owner, Teardown
from aiordma.verbs.device import require_device
from aiordma.verbs.identifier import Event, Identifier

logger: logging.Logger = logging.getLogger("aiordma")

KERNEL_BACKLOG_RESERVE = 128

MOST_STRANGERS = 64
"""Hosts of peers without a handshake that a listener logs; further ones are counted only."""

MOST_BACKLOG = (1 << 31) - 1 - KERNEL_BACKLOG_RESERVE
"""The maximum backlog: rdma_listen takes an int."""


async def open_listener(
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
    establish: Establish = IncomingRequest.accept,
) -> "ListenerEndpoint":
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
    receives = ListenerReceives(shared_receive, options, domain, call)
    requirement = receives.domain.requirement(device)
    if requirement.name is not None:
        require_device(requirement.name)
    numeric = await numeric_address(host)

    async def attempt(provider: Provider) -> "ListenerEndpoint":
        ports = LocalPorts((numeric, port))
        while True:
            try:
                reactor, identifier = await listening(provider)
            except VerbsCallError as error:
                if error.call != "rdma_listen" or not ports.has_another(error):
                    raise
            else:
                return ListenerEndpoint(
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
                with identifier.context() as context:
                    requirement.check(context.device_name, context.kind, f"{call}({host!r})")
            # The kernel silently drops requests beyond its backlog. The listener's own, smaller
            # backlog rejects them before that.
            identifier.listen(backlog + KERNEL_BACKLOG_RESERVE)
            return reactor, identifier

    return await with_device(requirement, numeric, attempt)


_open: WeakItems["ListenerEndpoint"] = WeakItems()


def open_listeners() -> list["ListenerEndpoint"]:
    """Return the open listeners of this process, in any thread."""
    return [each for each in _open.alive() if not each.is_closed and each.process == here.pid]


async def wait_for_port(port: int) -> None:
    """Wait until the listeners on the port that this event loop has closed no longer use it."""
    for each in _open.alive():
        if each.is_closed and each.port == port and each.reactor.loop.is_running_here():
            with suppress(VerbsCallError, BusyError):  # then the bind fails
                await each.aclose()


class ListenerEndpoint(Owner):
    """See the module."""

    def __init__(
        self,
        reactor: Reactor,
        identifier: Identifier,
        options: ConnectionOptions,
        backlog: int,
        requirement: Requirement,
        accept_timeout: float,
        receives: ListenerReceives,
        establish: Establish,
    ) -> None:
        self.process: int = here.pid
        self.reactor = reactor
        self.options = options
        self._accept_timeout = accept_timeout
        self.receives = receives
        self._domain = receives.domain.state
        if self._domain is not None:
            self._domain.join(self, "listener", lambda: self.is_closed)
        self._identifier = identifier
        self.local_address: SocketAddress | None = identifier.local_address
        """The (host, port) that it is bound to, also after its end."""
        self._is_of_one_device = bool(identifier.device_key)  # which was checked
        self._backlog = backlog
        self._requirement = requirement
        self.requests: FairQueue[IncomingRequest] = FairQueue()
        self._waiters: deque[Waiter] = deque()
        self.is_closed: bool = False
        self.failure: DeviceRemovedError | None = None
        self.is_serving: bool = True
        """Whether peers are accepted. Else each is rejected at once."""
        self._leaving = 0  # requests that are being rejected
        self._all_left = Once(reactor.loop)
        self._tally = Counter[str]()
        """By the names of `ListenerStatistics`."""
        self._stranger_hosts: set[tuple[str, bool]] = set()
        _open.add(self)
        self.handshakes: Handshakes = Handshakes(
            reactor.loop,
            self.requests,
            establish,
            reactor.after_events,
            self._count_leaving,
            self._has_left,
        )
        self.teardown: Teardown = Teardown(reactor, self)
        reactor.subscribe(identifier, self._handle)

    def __repr__(self) -> str:
        return f"<Listener on {'closed' if self.is_closed else self.local_address}>"

    @property
    def port(self) -> int:
        """Its port; 0 if the address is not known."""
        return self.local_address[1] if self.local_address else 0

    def statistics(self) -> ListenerStatistics:
        """Return its counters. See `Listener.statistics`."""
        return ListenerStatistics(waiting=len(self.requests), **self._tally)

    @property
    def has_ended(self) -> bool:
        """Whether no further peer comes."""
        return self.is_closed or self.failure is not None

    def end_error(self) -> Exception:
        """Return a new error for the calls that wait for a peer, once it has ended."""
        if self.failure is not None and not self.is_closed:
            return detached(self.failure)
        return ClosedError("this listener is closed")

    def require_here(self) -> None:
        """Check that this is the listener's process and loop, before `request` and `accept`."""
        require_same_process(self.process, self)
        require_here(self.reactor.loop, self)

    async def request(self) -> IncomingRequest:
        """Return the next connection request. See `Listener.request`."""
        while not self.requests:
            if self.has_ended:
                raise self.end_error()
            waiter = self.reactor.loop.waiter()
            self._waiters.append(waiter)
            try:
                await waiter.wait()
            except BaseException:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif self.requests and self._waiters:
                    self._waiters.popleft().wake()  # pass on the wake-up of this cancelled task
                raise
        request, _ = self.requests.popleft()
        request.is_of_program = True
        return request

    async def accept(self, private_data: bytes = b"", take: Take | None = None) -> Acceptance:
        """Return the next handshake that has ended, to be taken. See `Handshakes.accept`."""
        accepted = None
        if not self.has_ended:
            accepted = await self.handshakes.accept(private_data, take)
        if accepted is None:
            raise self.end_error()
        return accepted

    async def accept_all(self, start: Callable[..., object], *arguments: object) -> None:
        """Call `start(*arguments, handshake)` for each handshake that has ended, in its task, with
        the context variables of this one, until the listener is closed."""
        self.require_here()
        context = copy_context()

        def take(accepted: Acceptance) -> None:
            context.copy().run(start, *arguments, accepted)

        with suppress(ClosedError):
            while True:
                take(await self.accept(take=take))

    async def aclose(self) -> None:
        """Stop listening, and wait for it. See `Listener.aclose`."""
        if not self.teardown.is_inherited:  # else the listener belongs to the parent process
            try:
                await self.teardown.aclose()
            finally:
                if self.is_closed:
                    await outwait(self._all_left)

    # -- peers ----------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if event.type is not CmEventType.CONNECT_REQUEST:
            if event.type is CmEventType.DEVICE_REMOVAL:
                self.failure = DeviceRemovedError(f"{self!r}: its RDMA device was removed")
                self._wake_all()
                self.handshakes.release()
            elif event.type is CmEventType.CONNECT_ERROR:
                if event.qp_num:
                    self._note_strangers(event)
                else:
                    self._log_shortage(-event.status)
            return
        identifier = Identifier(self.reactor.channel, key=event.new_key)
        request = IncomingRequest(
            self.reactor,
            self.options,
            self._accept_timeout,
            self.receives,
            identifier,
            event,
            self._tally,
            self.teardown.origin,
        )
        self.reactor.subscribe(identifier, partial(self._handle_waiting, request))
        self._tally["connection_requests"] += 1
        source = source_of(request.peer_address)
        if self.is_closed or not self._is_ours(identifier):
            self._turn_away(request)
            return
        if not self.is_serving:
            self._turn_away(request, NOT_SERVING)
            return
        if not self._has_room(source):
            self._turn_away(request, BACKLOG_IS_FULL)
            return
        self.requests.append(request, source)
        self.handshakes.advance()
        if self._waiters and self.requests:
            self._waiters.popleft().wake()

    def _has_room(self, source: bytes) -> bool:
        """Return whether the backlog can take a request from a source. A full backlog can if
        another source has more requests than this source would then have. The oldest request of the
        source with the most is then rejected."""
        if len(self.requests) < self._backlog:
            return True
        displaced = self.requests.displaced_by(source)
        if displaced is None:
            return False
        self.requests.remove(displaced)
        self._turn_away(displaced, BACKLOG_IS_FULL)
        return True

    def _handle_waiting(self, request: IncomingRequest, event: Event) -> None:
        """Remove a request from the backlog if its peer withdraws it before the program takes
        it."""
        request.handle_event(event)
        if request.withdrawal is not None and request in self.requests:
            self.requests.remove(request)
            self._turn_away(request)

    def _log_shortage(self, error: int) -> None:
        """Log an event of the software device, which reports each shortage once."""
        why = descriptors_hint(error) or os.strerror(error)
        logger.warning("%r refuses peers until this process has resources again. %s", self, why)

    def _note_strangers(self, event: Event) -> None:
        """Count an event of the software device for peers without a handshake, whose number is in
        `qp_num`. Log the first one of each host, of a few hosts."""
        self._tally["without_handshake"] += event.qp_num
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
        with identifier.context() as context:
            return self._requirement.permits(context.device_name, context.kind)

    def _turn_away(self, request: IncomingRequest, reason: bytes = b"") -> None:
        self._tally["backlog_full"] += reason == BACKLOG_IS_FULL
        self._count_leaving()
        request.start_rejecting(self._has_left, reason)

    def _count_leaving(self) -> None:
        self._leaving += 1

    def _has_left(self) -> None:
        self._leaving -= 1
        if not self._leaving and self.is_closed:
            self._all_left.set()

    # -- the end (Owner) ------------------------------------------------------------------------

    def _closing(self) -> Exception:
        return ClosedError("this listener is closed")

    def _flush(self) -> None:
        """Reject the peers that wait, and end the handshakes."""
        self.is_closed = True
        self._leaving += 1
        self.reactor.unsubscribe(self._identifier)
        self.receives.close()
        self._wake_all()
        self.handshakes.close()
        for request in list(self.requests):
            self.requests.remove(request)
            self._turn_away(request)
        self.teardown.destroy()
        self._has_left()

    def _destroy(self) -> None:
        self._identifier.close()

    def _released(self) -> None:
        if self._domain is not None:
            self._domain.leave(self)

    def _abandon(self, why: str) -> None:
        """It has no requests of its own. Wake all that wait."""
        self.is_closed = True
        self._all_left.set()
        self._wake_all()
        self.handshakes.release()
        refusal = self.teardown.refusal
        if self._domain is not None and refusal is not None:
            self._domain.keep_for(self, refusal)

    def _wake_all(self) -> None:
        while self._waiters:
            self._waiters.popleft().wake()

    def __del__(self) -> None:
        teardown = getattr(self, "teardown", None)
        if teardown is not None and not teardown.is_closing and not teardown.is_inherited:
            teardown.forget()
