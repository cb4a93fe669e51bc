"""connect(): resolves a name and a port, and connects. Each step has its own error."""

import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeAlias, TypeVar, Unpack

import anyio

from aiordma._base.arguments import instance, optional_seconds, wrong_type
from aiordma._base.connection_parameters import (
    MAX_CONNECT_PRIVATE_DATA,
    ConnectionParameters,
    check_private_data,
)
from aiordma._base.enums import CmEventType
from aiordma._base.errors import (
    NOT_ACCEPTED,
    REJECT_REASONS,
    REJECT_TEXTS,
    AddressError,
    ConnectTimeoutError,
    DeviceRemovedError,
    DisconnectedError,
    RdmaConnectionError,
    RejectedError,
    RouteError,
    UnreachableError,
    VerbsCallError,
    detached,
)
from aiordma._base.hints import descriptors_hint, is_own_address
from aiordma._base.opening import opens
from aiordma._base.options import (
    DECIDED_BY_CM,
    ConnectionKeywords,
    ConnectionOptions,
    refuses,
)
from aiordma._base.provider import Provider, Requirement, wanted_device
from aiordma._base.socket_address import SocketAddress
from aiordma._base.states import ConnectionState, next_state
from aiordma._connection.connection import Connection
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._connection.local_ports import LocalPorts
from aiordma._connection.several_addresses import (
    Routes,
    SharedSeconds,
    first_bound,
    first_connected,
)
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._loop.threads import PEERS, Once, start_call
from aiordma._runtime.address_lookup import (
    addresses_of,
    checked_host,
    checked_port,
)
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.identifiers import ROUTE_TIMEOUT_MS, milliseconds, new_identifier
from aiordma._runtime.reactor import Reactor
from aiordma.verbs.identifier import Event, Identifier

__all__ = (
    "PeerAddresses",
    "connect",
    "failed_event",
    "failed_handshake",
    "parameters",
    "prepare_connection",
)

logger: logging.Logger = logging.getLogger("aiordma")

_S = ConnectionState

Connected = TypeVar("Connected")
LocalAddresses: TypeAlias = Sequence[SocketAddress | None]
"""The local (host, port) to connect from, the first that can be bound; None: any."""


@refuses(DECIDED_BY_CM)
@opens
async def connect(
    host: str,
    port: int,
    *,
    private_data: bytes = b"",
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    require: str | None = None,
    reuse_address: bool = False,
    shared_receive: SharedReceiveQueue | None = None,
    domain: DomainArgument = None,
    **options: Unpack[ConnectionKeywords],
) -> Connection:
    """Connect to a listening peer over RDMA. Await the call, or enter it with `async with`.

    Args:
        host: a name or a numeric address of the peer's RDMA interface. An IPv6 link-local address
            includes the local interface: "fe80::1%eth0". If a name has several addresses, they are
            tried one after the other, those of IPv4 first, until one is connected, or the peer's
            program rejects with private data.
        port: the peer's port in RDMA's TCP port space. On iWARP (siw, the software device) these
            are TCP's ports, shared with sockets; on RoCE and InfiniBand they are separate.
        private_data: up to 56 bytes for the peer's program, sent with the connection request.
        source: bind to this local (host, port) first; port 0 is any port. Of a name, the first
            address of the peer's family that can be bound is taken. None: any address.
        timeout: seconds for all steps together; None: no limit. Each address of a name gets an
            equal part of what remains.
        device: "auto" is the real RDMA device that reaches the address, otherwise the built-in
            device "software"; a name requires that device. The environment variable AIORDMA_DEVICE,
            if set, replaces "auto".
        require: "rdma" refuses the software device; "infiniband", "roce" or "iwarp" refuses every
            device of another kind; "any" permits all. None: the environment variable
            AIORDMA_REQUIRE, or "any" if it is not set.
        reuse_address: with a source port: share it with other connections that also set this.
        shared_receive: take receives from this queue; the receive_* options then have no effect.
            None: the connection has receives of its own.
        domain: the protection domain: None shares one with everything else on this event loop and
            device, "each" makes one for this connection alone, and a Domain of `open_domain` is
            used with its device. A peer cannot access memory of another domain.
        options: see ConnectionOptions.

    Raises:
        AddressError, RouteError, RejectedError, UnreachableError, ConnectTimeoutError: a step
            failed; the message says which, and why. All are ConnectionError. Of several addresses,
            it is the error of the attempt that came nearest to the peer's program, with the texts
            of all: its answer, a full backlog, other errors of the peer or of the path, no device,
            no permitted device; of several such, the first one.
        RdmaConnectionError: the driver refused a call, for instance because this process has no
            file descriptors left; the message names the limit. `errno` is the call's.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `require` does not permit the device that reaches the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        ClosedError, EventLoopError: `shared_receive` or `domain` is closed, or belongs to another
            event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left; the peer's connection ends, if it was established.

    See: man rdma_cm (Client operation), rdma_connect.
    """
    private_data = check_private_data(
        private_data, MAX_CONNECT_PRIVATE_DATA, "a connection request", "connect"
    )
    chosen = ConnectionOptions._of(connect, options)

    def begin() -> _Attempt:
        attempt = _Attempt("connect", host, port, chosen, timeout, require)
        attempt.take(source, reuse_address, shared_receive)
        attempt.choose(device, domain)
        return attempt

    async def establish(
        attempt: _Attempt, address: str, local: LocalAddresses, seconds: float | None
    ) -> Connection:
        with attempt.limited(seconds):
            return await _connect_to(attempt, address, local, private_data)

    return await _to_first(begin(), begin, establish)


async def _to_first(
    first: "_Attempt",
    begin: "Callable[[], _Attempt]",
    use: "Callable[[_Attempt, str, LocalAddresses, float | None], Awaitable[Connection]]",
) -> Connection:
    """Return what `use` returns for the first address of the name that can be connected. `first`
    looks the name up, and serves its only address. If there are several, `begin` makes an attempt
    for each."""
    shared = SharedSeconds(first.timeout)
    with shared.spending(), first.limited():
        routes = await first.look_up()

    async def use_one(address: str, left: int) -> Connection:
        attempt, seconds = first, shared.share(left)
        if len(routes.addresses) > 1:
            attempt = begin()  # a call of the driver may still use the one before
            attempt.set_timeout(seconds)
        with shared.spending():
            return await use(attempt, address, routes.locals(address), seconds)

    return await first_connected(routes.addresses, use_one, routes.failure)


async def _connect_to(
    attempt: "_Attempt", address: str, local: LocalAddresses, private_data: bytes
) -> Connection:
    ports = LocalPorts(attempt.source)
    while True:
        connection = await attempt.prepare(address, local)
        try:
            await connection.establish(private_data=private_data)
            return connection
        except RdmaConnectionError as error:
            if not ports.has_another(error):
                raise


@refuses(DECIDED_BY_CM)
@opens
async def prepare_connection(
    host: str,
    port: int,
    *,
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    require: str | None = None,
    reuse_address: bool = False,
    shared_receive: SharedReceiveQueue | None = None,
    domain: DomainArgument = None,
    **options: Unpack[ConnectionKeywords],
) -> Connection:
    """Create the connection with its queue pair, and do not connect yet. Post receives on it, then
    connect with its `establish`. Use this if the peer sends first, and you post the receives.

        async with aiordma.prepare_connection(host, port, receive_buffers=0) as connection:
            receives = [connection.post_recv(buffer) for buffer in buffers]
            await connection.establish()

    Args:
        host: as of `connect`. The connection has the first address of a name whose address, route
            and queue pair succeed. If its `establish` fails, no other address is tried.
        port, source, device, require, reuse_address, shared_receive, domain, options: as of
            `connect`.
        timeout: seconds for the address, the route and the queue pair together, and again for
            `establish`; None: no limit. Each address of a name gets an equal part of what remains.

    Raises:
        AddressError, RouteError, ConnectTimeoutError: a step failed; the message says which, and
            why. All are ConnectionError. Of several addresses, the error is chosen as of
            `connect`.
        RdmaConnectionError: the driver refused a call, for instance because this process has no
            file descriptors left.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `require` does not permit the device that reaches the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        ClosedError, EventLoopError: `shared_receive` or `domain` is closed, or belongs to another
            event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left, and the peer was not contacted.
    """
    chosen = ConnectionOptions._of(prepare_connection, options)

    def begin() -> _Attempt:
        attempt = _Attempt("prepare_connection", host, port, chosen, timeout, require)
        attempt.take(source, reuse_address, shared_receive)
        attempt.choose(device, domain)
        return attempt

    async def prepare(
        attempt: _Attempt, address: str, local: LocalAddresses, seconds: float | None
    ) -> Connection:
        with attempt.limited(seconds):
            connection = await attempt.prepare(address, local)
        attempt.set_timeout(first.timeout)  # that of `establish`
        return connection

    first = begin()
    return await _to_first(first, begin, prepare)


class PeerAddresses:
    """The addresses of a peer's name, for a function with a handshake of its own: `connected`
    calls it with each of them.

    Args:
        call: the name of the function that the program has called, for the errors.
        options: of the connections.
        host, port, source, device, require: as of `connect`.
        timeout: seconds for the addresses, the routes and the queue pairs of all connections; None:
            no limit.

    Attributes:
        timeout: the checked argument.
        seconds: what is left of it.
    """

    def __init__(
        self,
        call: str,
        options: ConnectionOptions,
        host: str,
        port: int,
        *,
        source: tuple[str, int] | None,
        timeout: float | None,
        device: str,
        require: str | None,
    ) -> None:
        def begin() -> _Attempt:
            attempt = _Attempt(call, host, port, options, timeout, require)
            attempt.take(source, False, None)
            attempt.choose(device, None)
            return attempt

        self._begin = begin
        self._first = begin()
        self.timeout: float | None = self._first.timeout
        self.seconds: SharedSeconds = SharedSeconds(self.timeout)

    async def connected(self, connect: Callable[[str, int], Awaitable[Connected]]) -> Connected:
        """Return what `connect` returns for the first of the addresses that can be connected. It
        is called with an address for `prepare`, and how many are left to try, with this one.

        Raises: as `connect`.
        """
        with self.seconds.spending(), self._first.limited():
            self._routes = await self._first.look_up()
        return await first_connected(self._routes.addresses, connect, self._routes.failure)

    def target(self, address: str) -> str:
        """Return the peer's name, port and address, for an error's text."""
        return _target(self._first.host, self._first.port, address)

    def share(self, left: int) -> float | None:
        """Return the seconds to prepare connections to the next address; None: no limit."""
        return self.seconds.share(left)

    async def prepare(
        self, address: str, preparing: SharedSeconds, answering: SharedSeconds
    ) -> Connection:
        """Create a connection to the address as `prepare_connection` does.

        Args:
            address: one that `connected` has passed.
            preparing: the time limit of the address for the steps, which are subtracted.
            answering: that for `establish` of the connection.
        """
        attempt = self._begin()
        attempt.set_timeout(preparing.share(1))
        with self.seconds.spending(), preparing.spending(), attempt.limited():
            connection = await attempt.prepare(address, self._routes.locals(address))
        attempt.set_timeout(answering.share(1))
        return connection


def _target(host: str, port: int, address: str) -> str:
    return f"{host}:{port}" if address == host else f"{host}:{port} ({address})"


def checked_source(source: object, name: str, call: str) -> tuple[str, int] | None:
    """Return the local (host, port) to connect from, or None.

    Raises:
        TypeError, ValueError: the value is neither that nor None.
    """
    if source is None:
        return None
    if not isinstance(source, tuple | list) or len(source) != 2:
        raise wrong_type(source, name, "(host, port), with port 0 for any", call)
    host, port = source
    return checked_host(host, f"{name}[0]", call), checked_port(port, f"{name}[1]", call)


class _Attempt:
    """One connect: performs its steps, and undoes them if one fails."""

    def __init__(
        self,
        call: str,
        host: str,
        port: int,
        options: ConnectionOptions,
        timeout: float | None,
        require: str | None,
    ) -> None:
        self.host, self.port = checked_host(host, "host", call), checked_port(port, "port", call)
        self.set_timeout(optional_seconds(timeout, "timeout", call))
        self._call = call
        self.target = f"{host}:{port}"
        self.options = options
        self.chosen_device = "auto"
        self.source: tuple[str, int] | None = None
        self.reuse_address = False
        self.shared_receive: SharedReceiveEndpoint | None = None
        self.step = "looking up the name"
        self._device: str | None = None
        self._requirement = Requirement(require, call)
        self._state = _S.RESOLVING_ADDRESS
        self._event: Event | None = None
        self._waiter: Waiter | None = None  # of the task that waits for an event
        self._calling = False
        self._has_asked = False  # the peer may have the request
        self._later: Callable[[], None] | None = None
        self._is_limited = False
        self._late = ""  # why the step takes long

    def take(
        self,
        source: tuple[str, int] | None,
        reuse_address: bool,
        shared_receive: SharedReceiveQueue | None,
    ) -> None:
        """Check and set the optional arguments."""
        self.source = checked_source(source, "source", self._call)
        self.reuse_address = reuse_address
        if shared_receive is not None:
            instance(shared_receive, "shared_receive", SharedReceiveQueue, self._call)
            self.shared_receive = shared_receive._endpoint

    def choose(self, device: str, domain: DomainArgument) -> None:
        """Check and set the device and the domain. Call this after `take`."""
        shared = self.shared_receive
        queue = None if shared is None else (shared.domain_state,)
        self.domain = DomainChoice(domain, self._call, queue)
        self.chosen_device = self.domain.device(device)
        self.domain.require_usable()
        self._device = wanted_device(self.chosen_device)

    def set_timeout(self, timeout: float | None) -> None:
        """Set the seconds for the steps."""
        self.timeout = timeout
        self.timeout_ms = milliseconds(timeout)

    @contextmanager
    def limited(self, remaining: float | None = None) -> Iterator[None]:
        """Limit the time of the steps in the block, and name the step that failed. `remaining` are
        the seconds that earlier steps have left; None: all. Within another such block, which is
        the shorter one, this does nothing."""
        if self._is_limited:
            yield
            return
        self._is_limited = True
        try:
            with anyio.fail_after(self.timeout if remaining is None else remaining):
                yield
        except TimeoutError:
            raise ConnectTimeoutError(
                f"connect to {self.target}: {self.step} took longer than {self.timeout:g} s"
                f"{self._late}"
            ) from None
        except VerbsCallError as error:
            raise _refused_call(f"connect to {self.target}: {self.step}", error) from error
        finally:
            self._is_limited = False

    async def look_up(self) -> Routes:
        """Return the numeric addresses of the host, and of the source."""
        local = None if self.source is None else await addresses_of(*self.source)
        found = [address for address, _ in await addresses_of(self.host, 0)]
        target = partial(_target, self.host, self.port)
        return Routes(found, local, target, f"source={self.source!r}")

    async def prepare(self, address: str, local: LocalAddresses) -> Connection:
        """Perform the steps up to the queue pair, and post the pooled receives. The arguments are
        a result of `look_up`."""
        self.target = _target(self.host, self.port, address)

        async def prepare_from(bound: SocketAddress | None) -> Connection:
            return await with_device(
                self.chosen_device,
                address,
                lambda provider: self._prepare(provider, address, bound),
                self._requirement,
            )

        return await first_bound(local, prepare_from)

    async def _prepare(
        self, provider: Provider, host: str, source: tuple[str, int] | None
    ) -> Connection:
        self._state = _S.RESOLVING_ADDRESS
        self.step = "making the identifier"
        async with new_identifier(provider) as (reactor, identifier):
            reactor.subscribe(identifier, self._handle)
            hub = await self._resolve(reactor, identifier, host, source)
            domain = await self.domain.on(reactor, hub)
        # From here the endpoint owns the identifier, and the use of the reactor.
        endpoint = Endpoint(reactor, hub, identifier, self.options, _S.CONNECTING, domain)
        reactor.subscribe(identifier, endpoint.handle_event, endpoint)
        async with self._closing_on_failure(endpoint):
            self.step = "making the queue pair"
            async with reactor.connects:
                await endpoint.open(shared_receive=self.shared_receive)
            handshake = partial(self._establish, endpoint, identifier)
            connection = Connection(endpoint, self.shared_receive, handshake)
            connection._post_pooled_receives()
        return connection

    def _establish(
        self, endpoint: Endpoint, identifier: Identifier, private_data: bytes
    ) -> Awaitable[bytes]:
        private_data = check_private_data(
            private_data, MAX_CONNECT_PRIVATE_DATA, "a connection request", "establish"
        )
        return self._connect(endpoint, identifier, private_data)

    async def _connect(
        self, endpoint: Endpoint, identifier: Identifier, private_data: bytes
    ) -> bytes:
        self.step = "waiting for the peer to accept"
        if endpoint.hub.is_iwarp:
            self._late = NOT_ACCEPTED
        with self.limited():
            async with self._closing_on_failure(endpoint):
                if endpoint.state is _S.CONNECTING:
                    await self._request_connection(
                        endpoint, identifier, parameters(self.options, private_data)
                    )
                if not await endpoint.connected():
                    raise failed_handshake(f"connect to {self.target}", endpoint)
                endpoint.established()
                device = endpoint.hub.context.device_name
                logger.debug("connected to %s through the device %s", self.target, device)
                event = endpoint.last_event
        return event.private_data if event else b""

    @asynccontextmanager
    async def _closing_on_failure(self, endpoint: Endpoint) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            withdrawal = None if isinstance(error, Exception) else endpoint.on_withdrawal
            if self._calling:  # it is closed when the driver's call has returned
                self._later = withdrawal
            elif withdrawal is not None and self._may_be_accepted(endpoint):
                withdrawal()
            elif endpoint.in_handshake:
                endpoint.close()  # in the background: the driver waits for the peer's answer
            else:
                await endpoint.aclose()
            if isinstance(error, VerbsCallError):
                raise _refused_call(f"connect to {self.target}", error) from error
            raise

    def _may_be_accepted(self, endpoint: Endpoint) -> bool:
        """Return whether the peer may be connected, or become so before it hears that this side has
        withdrawn. On iWARP, it is connected as soon as it accepts; elsewhere only after this
        side."""
        if endpoint.state is _S.CONNECTING:
            return self._has_asked and endpoint.hub.is_iwarp and endpoint.cause is None
        return endpoint.state is _S.ESTABLISHED

    async def _resolve(
        self,
        reactor: Reactor,
        identifier: Identifier,
        host: str,
        source: tuple[str, int] | None,
    ) -> DeviceHub:
        identifier.set_ack_timeout(self.options.ack_timeout)
        if self.options.tos is not None:
            identifier.set_tos(self.options.tos)
        if self.reuse_address:
            identifier.set_reuse_address(True)
        self.step = "resolving the address"
        try:
            identifier.resolve_address(host, self.port, source, self.timeout_ms)
        except VerbsCallError as error:
            raise _unbound(f"connect to {self.target}", error, source) from error
        await self._until(_S.RESOLVING_ROUTE, reactor.loop)
        hub = await reactor.hub(identifier)
        if self._device is not None and hub.context.device_name != self._device:
            raise AddressError(
                f"connect to {self.target}: {hub.context.device_name} reaches that address, "
                f"not {self._device}, which was asked for"
            )
        self._requirement.check_kind(hub.context.device_name, hub.context.kind)
        self.step = "resolving the route"
        try:
            identifier.resolve_route(min(self.timeout_ms, ROUTE_TIMEOUT_MS))
        except VerbsCallError as error:
            raise RouteError._of_call(f"connect to {self.target}", error) from error
        await self._until(_S.CONNECTING, reactor.loop)
        return hub

    async def _request_connection(
        self, endpoint: Endpoint, identifier: Identifier, request: ConnectionParameters
    ) -> None:
        if not endpoint.hub.is_iwarp or identifier.provider.connects_at_once:
            identifier.connect(request)
            self._has_asked = True
            return
        # A driver may connect its TCP stream during the call (siw does), which can take as long as
        # TCP's time limits. The identifier must not be destroyed during the call. So if this task
        # is cancelled, `then` closes the endpoint.
        returned = Once(endpoint.loop)
        errors: list[BaseException] = []
        abandoned = False

        def then(error: BaseException | None) -> None:
            self._calling = False
            endpoint.calls.end()
            if error is not None:
                endpoint.handshake_ends()
                errors.append(error)
            returned.set()
            if abandoned:
                later, self._later = self._later, None
                if error is None and later is not None and self._may_be_accepted(endpoint):
                    later()
                else:
                    endpoint.close()

        withdraw = start_call(endpoint.loop, lambda: identifier.connect(request), then, PEERS)
        self._calling = self._has_asked = True
        endpoint.calls.begin()
        endpoint.handshake_begins()
        try:
            await returned.wait()
        except BaseException:
            if withdraw():  # the call had not begun
                self._calling = self._has_asked = False
                endpoint.handshake_ends()
                endpoint.calls.end()
            abandoned = True
            raise
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # their tracebacks hold this frame

    def _handle(self, event: Event) -> None:
        self._state = next_state(self._state, event.type)
        self._event = event
        if self._waiter is not None:
            self._waiter.wake()

    async def _until(self, goal: ConnectionState, loop: EventLoop) -> None:
        while self._state is not goal:
            if self._state is _S.BROKEN:
                raise failed_event(f"connect to {self.target}", self._event)
            self._waiter = loop.waiter()
            await self._waiter.wait()


_OF_NETWORKS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,
    }
)
"""What the route, or the wait for the peer, fails with at a socket. (Drivers have others.)"""


def _unbound(what: str, error: VerbsCallError, source: tuple[str, int] | None) -> AddressError:
    """Return the error for an address that could not be resolved, or a source not be bound."""
    unbound = AddressError._of_call(what, error)
    if error.errno == errno.ENODEV and source and not is_own_address(source[0]):
        unbound.errno = errno.EADDRNOTAVAIL  # as of a socket's bind
    return unbound


def _refused_call(what: str, error: VerbsCallError) -> RdmaConnectionError:
    """Return the ConnectionError for a call that the driver refused."""
    text = f"{what}: {error}"
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        reason = -error.errno
        return RejectedError(f"{text}: {REJECT_REASONS[reason]}", reason=reason, private_data=b"")
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        unreachable = UnreachableError(text)
        unreachable.errno = error.errno
        return unreachable
    if error.errno == errno.EPROTO:
        text += f": {REJECT_REASONS[-error.errno]}"
    refused = RdmaConnectionError(text)
    refused.errno = error.errno
    return refused


def parameters(options: ConnectionOptions, private_data: bytes) -> ConnectionParameters:
    """Return the parameters to send to the peer."""
    return ConnectionParameters(
        private_data=private_data,
        responder_resources=options.responder_resources,
        initiator_depth=options.initiator_depth,
        retry_count=options.retry_count,
        rnr_retry_count=options.rnr_retry_count,
        flow_control=options.flow_control,
    )


def failed_handshake(what: str, endpoint: Endpoint) -> Exception:
    """Return why an endpoint's handshake failed."""
    if endpoint.cause is not None:
        return detached(endpoint.cause)
    return failed_event(what, endpoint.last_event)


def failed_event(what: str, event: Event | None) -> Exception:
    """Return the error for the CM event that ended an attempt."""
    if event is None:
        return RdmaConnectionError(f"{what}: no reason was given")
    status = event.status
    if status == -1:
        # This is not EPERM: a call inside librdmacm failed, and its errno is not available.
        text = "librdmacm gave no reason (status -1)"
    else:
        text = os.strerror(-status) if status < 0 else f"status {status}"
    shortage = descriptors_hint(-status)
    if shortage is not None:
        text = f"{text}. {shortage}"
    kind = event.type
    if kind is CmEventType.ADDR_ERROR:
        if shortage is None:
            text += (
                ". Either no machine has this address, or no RDMA device reaches it (`rdma link` "
                "lists devices and their interfaces)"
            )
        unresolved = AddressError(f"{what}: resolving the address failed: {text}")
        unresolved.is_unreached = status == -errno.ENODEV
        # A broadcast address fails with EACCES, and TCP's connect to it with ENETUNREACH.
        return _with_errno(unresolved, -errno.ENETUNREACH if status == -errno.EACCES else status)
    if kind is CmEventType.ROUTE_ERROR:
        unrouted = RouteError(f"{what}: resolving the route failed: {text}")
        return _with_errno(unrouted, status, _OF_NETWORKS)
    if kind is CmEventType.REJECTED:
        said = event.private_data.rstrip(b"\0")  # zero-padded on InfiniBand and RoCE
        reason = REJECT_TEXTS.get(said) or REJECT_REASONS.get(status, text)
        return RejectedError(
            f"{what}: rejected ({status}): {reason}",
            reason=status,
            private_data=event.private_data,
        )
    if kind is CmEventType.UNREACHABLE:
        silent = UnreachableError(f"{what}: the peer's connection manager did not answer: {text}")
        return _with_errno(silent, status, _OF_NETWORKS)
    if kind is CmEventType.DISCONNECTED:
        return DisconnectedError(f"{what}: the peer disconnected at once")
    if kind is CmEventType.DEVICE_REMOVAL:
        return DeviceRemovedError(f"{what}: the RDMA device was removed")
    if status == -errno.EPROTO:
        text += f": {REJECT_REASONS[status]}"
    return _with_errno(RdmaConnectionError(f"{what}: {kind.label}: {text}"), status)


def _with_errno(
    error: RdmaConnectionError, status: int, known: frozenset[int] | None = None
) -> RdmaConnectionError:
    """Give an error the errno of an event's status, if the status has one, and it is `known`; None:
    any."""
    if status < -1 and (known is None or -status in known):
        error.errno = -status
    return error
