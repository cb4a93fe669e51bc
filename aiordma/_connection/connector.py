"""connect(): resolves a name and a port, and connects. Each step has its own error.

The life of a connect, from the call to ESTABLISHED, is `Attempt`, from top to bottom.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar, Unpack

import anyio

from aiordma._base.arguments import instance, optional_seconds, wrong_type
from aiordma._base.connection_parameters import (
    IN_REQUEST,
    check_private_data,
    parameters_to_c,
)
from aiordma._base.errors import (
    ConnectTimeoutError,
    DeviceRequirementError,
    RdmaConnectionError,
    RouteError,
    VerbsCallError,
)
from aiordma._base.opening import opens
from aiordma._base.options import (
    ConnectionKeywords,
    ConnectionOptions,
)
from aiordma._base.origin import origin
from aiordma._base.provider import Provider, required
from aiordma._base.rejections import NOT_ACCEPTED, is_programs_answer
from aiordma._base.socket_address import SocketAddress
from aiordma._base.states import ConnectionState
from aiordma._base.time_limit import TimeLimit
from aiordma._connection.announcement import announcement, read_announcement
from aiordma._connection.connection import Connection
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._connection.handshake_errors import (
    failed_event,
    failed_handshake,
    refused_call,
    unbound,
)
from aiordma._connection.local_ports import LocalPorts
from aiordma._connection.several_addresses import Routes, first_bound
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.handshake import IN_PROGRESS, Handshake
from aiordma._loop.threads import PEERS, start_call
from aiordma._runtime.address_lookup import (
    addresses_of,
    checked_host,
    checked_port,
    known_address,
)
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import ROUTE_TIMEOUT_MS, drop, milliseconds
from aiordma._runtime.reactor import Reactor, open_reactor, reactor_of
from aiordma.verbs.identifier import Identifier

logger: logging.Logger = logging.getLogger("aiordma")

_S = ConnectionState

Connected = TypeVar("Connected")
Opened = TypeVar("Opened")
LocalAddresses: TypeAlias = Sequence[SocketAddress | None]
"""The local (host, port) to connect from, the first that can be bound; None: any."""
ANY: LocalAddresses = (None,)


@opens
async def connect(
    host: str,
    port: int,
    *,
    private_data: bytes = b"",
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    shared_receive: SharedReceiveQueue | None = None,
    domain: DomainArgument = None,
    options: ConnectionOptions | None = None,
    **keywords: Unpack[ConnectionKeywords],
) -> Connection:
    """Connect to a listening peer over RDMA. Await the call, or enter it with `async with`.

    Args:
        host: a name or a numeric address of the peer's RDMA interface. An IPv6 link-local address
            includes the local interface: "fe80::1%eth0". If a name has several addresses, they are
            tried one after the other, those of IPv4 first, until one is connected, or the peer's
            program rejects with private data.
        port: the peer's port in RDMA's TCP port space. On iWARP (siw, the software device) these
            are TCP's ports, shared with sockets; on RoCE and InfiniBand they are separate.
        private_data: up to 56 bytes for the peer's program, sent with the connection request. Of
            none, the peer learns how long this side's receives are (docs/messages.md).
        source: bind to this local (host, port) first; port 0 is any port. Of a name, the first
            address of the peer's family that can be bound is taken. None: any address.
        timeout: seconds for all steps together; None: no limit. Each address of a name gets an
            equal part of what remains. The software device waits at most 60 s for a peer's answer.
        device: "auto" is the real RDMA device that reaches the address, otherwise the built-in
            device "software". A name ("mlx5_0") requires that device, "rdma" any real RDMA device,
            and "infiniband", "roce" or "iwarp" a real device of that kind. The environment variable
            AIORDMA_DEVICE, if set, replaces "auto".
        shared_receive: take receives from this queue; the receive_* options then have no effect.
            None: the connection has receives of its own.
        domain: the protection domain: None shares one with everything else on this event loop and
            device, "each" makes one for this connection alone, and a Domain of `open_domain` is
            used with its device. A peer cannot access memory of another domain.
        receive_buffers, receive_size, peer_timeout, keepalive, options: see ConnectionOptions.

    Raises:
        AddressError, RouteError, RejectedError, UnreachableError, ConnectTimeoutError: a step
            failed; the message says which, and why. All are ConnectionError. Of several addresses,
            it is the error of the attempt that came nearest to the peer's program, with the texts
            of all: its answer, a full backlog, other errors of the peer or of the path, no device,
            no permitted device; of several such, the first one.
        RdmaConnectionError: the driver refused a call, for instance because this process has no
            file descriptors left; the message names the limit. `errno` is the call's.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that reaches the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        ClosedError, EventLoopError: `shared_receive` or `domain` is closed, or belongs to another
            event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left; the peer's connection ends, if it was established.

    See: man rdma_cm (Client operation), rdma_connect.
    """
    private_data = check_private_data(private_data, *IN_REQUEST, "connect")
    chosen = ConnectionOptions._chosen(connect, options, keywords)
    attempt = Attempt(
        "connect", chosen, host, port, source, timeout, device, shared_receive, domain
    )

    async def establish(address: str, local: LocalAddresses) -> Connection:
        ports: LocalPorts | None = None
        while True:
            connection = await attempt.prepare(address, local)
            try:
                await connection._establish(private_data)
                return connection
            except RdmaConnectionError as error:
                ports = ports or LocalPorts(local[0])
                if not ports.has_another(error):
                    raise

    return await attempt.of_name(establish)


@opens
async def prepare_connection(
    host: str,
    port: int,
    *,
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    shared_receive: SharedReceiveQueue | None = None,
    domain: DomainArgument = None,
    options: ConnectionOptions | None = None,
    **keywords: Unpack[ConnectionKeywords],
) -> Connection:
    """Create the connection with its queue pair, and do not connect yet. Post receives on it, then
    connect with its `establish`. Use this if the peer sends first, and you post the receives.

        async with aiordma.prepare_connection(host, port, receive_buffers=0) as connection:
            receives = [connection.post_recv(buffer) for buffer in buffers]
            await connection.establish()

    Args:
        host: as of `connect`. The connection has the first address of a name whose address, route
            and queue pair succeed. If its `establish` fails, no other address is tried.
        port, source, device, shared_receive, domain, receive_buffers, receive_size, peer_timeout,
            keepalive, options: as of `connect`.
        timeout: seconds for the address, the route and the queue pair together, and again for
            `establish`; None: no limit. Each address of a name gets an equal part of what remains.

    Raises:
        AddressError, RouteError, ConnectTimeoutError: a step failed; the message says which, and
            why. All are ConnectionError. Of several addresses, the error is chosen as of
            `connect`.
        RdmaConnectionError: the driver refused a call, for instance because this process has no
            file descriptors left.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that reaches the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        ClosedError, EventLoopError: `shared_receive` or `domain` is closed, or belongs to another
            event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left, and the peer was not contacted.
    """
    call = "prepare_connection"
    chosen = ConnectionOptions._chosen(prepare_connection, options, keywords)
    attempt = Attempt(call, chosen, host, port, source, timeout, device, shared_receive, domain)
    connection = await attempt.of_name(attempt.prepare)
    attempt.limit = TimeLimit(timeout)  # that of `establish`
    return connection


def _target(host: str, port: int, address: str) -> str:
    return f"{host}:{port}" if address == host else f"{host}:{port} ({address})"


def checked_source(source: object, name: str, call: str) -> tuple[str, int]:
    """Return the local (host, port) to connect from.

    Raises:
        TypeError, ValueError: the value is not that.
    """
    if not isinstance(source, tuple | list) or len(source) != 2:
        raise wrong_type(source, name, "(host, port), with port 0 for any", call)
    host, port = source
    return checked_host(host, f"{name}[0]", call), checked_port(port, f"{name}[1]", call)


class Attempt:
    """One connect: its checked arguments, and its steps. If one fails, the steps before are undone.

    The steps run in the caller's task. Where the events of a step are there at once, as on the
    software device, it does not wait. `Handshake` has the state.

    Args:
        call: the name of the function that the program has called, for the errors.
        options: of the connection.
        host, port, source, timeout, device, shared_receive, domain: same as `connect`.

    Attributes:
        address: the peer's; "" before it is looked up.
        limit: the time for all steps together, or, of several addresses, for those with one.
        step: what the attempt does now, for the errors.

    Raises: as `connect`, if an argument is invalid.
    """

    def __init__(
        self,
        call: str,
        options: ConnectionOptions,
        host: str,
        port: int,
        source: tuple[str, int] | None,
        timeout: float | None,
        device: str,
        shared_receive: SharedReceiveQueue | None = None,
        domain: DomainArgument = None,
    ) -> None:
        self.host: str = checked_host(host, "host", call)
        self.port: int = checked_port(port, "port", call)
        self.limit: TimeLimit = TimeLimit(optional_seconds(timeout, "timeout", call))
        self.address: str = ""
        self._routes: Routes | None = None
        self.options: ConnectionOptions = options
        self.source: tuple[str, int] | None = None
        if source is not None:
            self.source = checked_source(source, "source", call)
        self.shared_receive: SharedReceiveEndpoint | None = None
        if shared_receive is not None:
            instance(shared_receive, "shared_receive", SharedReceiveQueue, call)
            self.shared_receive = shared_receive._endpoint
        self.domain: DomainChoice | None = None  # the domain that all share
        if domain is None and shared_receive is None:
            self._requirement = required(device, call)
        else:
            self.domain = DomainChoice(domain, call, self.shared_receive)
            self._requirement = self.domain.requirement(device)
        self.step: str = "looking up the name"
        self._has_asked = False  # the peer may have the request
        self._opened_at = origin()

    def of_name(
        self, use: Callable[[str, LocalAddresses], Awaitable[Connected]]
    ) -> Awaitable[Connected]:
        """Return an awaitable of what `use` returns for the first address of the host that can be
        connected.

        Args:
            use: called with the arguments for `prepare`.
        """
        known = None if self.source is not None else known_address(self.host, 0)
        if known is None:
            return self._of_looked_up(use)
        self.address = known[0]
        return use(known[0], ANY)

    async def _of_looked_up(
        self, use: Callable[[str, LocalAddresses], Awaitable[Connected]]
    ) -> Connected:
        target = partial(_target, self.host, self.port)
        try:
            with anyio.fail_after(self.limit.left()):
                local = None if self.source is None else await addresses_of(*self.source)
                found = [address for address, _ in await addresses_of(self.host, 0)]
        except TimeoutError:
            raise self._timed_out() from None
        except VerbsCallError as error:
            raise self._refused(error) from error
        return await self.of_first(Routes(found, local, target, f"source={self.source!r}"), use)

    async def of_first(
        self, routes: Routes, use: Callable[[str, LocalAddresses], Awaitable[Connected]]
    ) -> Connected:
        """Return what `use` returns for the first of several addresses that can be connected. Each
        gets an equal part of the time that remains. A program's answer, a rejection with private
        data, is final: the peer was reached.

        Args:
            routes: the addresses.
            use: as of `of_name`.

        Raises:
            Exception: that of `routes.failure`; or of `use`, if it is no error of the address.
        """
        limit, errors, self._routes = self.limit, list[Exception](), routes
        try:
            for place, address in enumerate(routes.addresses):
                self.address = address
                if len(routes.addresses) > 1:
                    self.limit = limit.share(len(routes.addresses) - place)
                try:
                    return await use(address, routes.locals(address))
                except (RdmaConnectionError, DeviceRequirementError) as error:
                    errors.append(error)
                    if is_programs_answer(error):
                        break
            raise routes.failure(errors)
        finally:
            errors.clear()  # their tracebacks hold this frame

    @property
    def target(self) -> str:
        """The peer's name, port and address, for the errors."""
        if self._routes is not None:
            return self._routes.target(self.address)
        return _target(self.host, self.port, self.address or self.host)

    @property
    def _what(self) -> str:
        return f"connect to {self.target}"

    def _timed_out(self, why: str = "") -> ConnectTimeoutError:
        return ConnectTimeoutError(
            f"{self._what}: {self.step} took longer than {self.limit.seconds:g} s{why}"
        )

    def _refused(self, error: VerbsCallError) -> RdmaConnectionError:
        return refused_call(f"{self._what}: {self.step}", error)

    async def prepare(self, address: str, local: LocalAddresses) -> Connection:
        """Perform the steps up to the queue pair, and post the pooled receives.

        Args:
            address: the peer's.
            local: the local (host, port) to connect from, the first that can be bound.
        """

        prepare_from = partial(self._prepare_from, address)
        try:
            return await (prepare_from(None) if local is ANY else first_bound(local, prepare_from))
        except RdmaConnectionError:
            raise
        except TimeoutError:
            raise self._timed_out() from None
        except VerbsCallError as error:
            raise self._refused(error) from error

    def _prepare_from(self, host: str, source: SocketAddress | None) -> Awaitable[Connection]:
        return with_device(self._requirement, host, partial(self._prepare, host, source))

    async def _within_limit(self, opening: Awaitable[Opened]) -> Opened:
        """Wait for what is not open yet."""
        left = self.limit.left()
        with anyio.CancelScope() as scope:
            if left is not None:
                scope.deadline = anyio.current_time() + left
            return await opening
        raise TimeoutError

    async def _prepare(
        self, host: str, source: SocketAddress | None, provider: Provider
    ) -> Connection:
        timeout_ms = milliseconds(self.limit.seconds)
        self.limit.left()  # its time begins
        self.step = "making the identifier"
        reactor = open_reactor(provider)
        if reactor is None:
            reactor = await self._within_limit(reactor_of(provider))
        identifier = Identifier(reactor.channel)
        handshake = Handshake(reactor.loop, _S.RESOLVING_ADDRESS)
        reactor.subscribe(identifier, handshake.feed)
        try:
            if self.options.tos is not None:
                identifier.set_tos(self.options.tos)
            if self.options.reuse_address:
                identifier.set_reuse_address(True)
            self.step = "resolving the address"
            try:
                identifier.resolve_address(host, self.port, source, timeout_ms)
            except VerbsCallError as error:
                raise unbound(self._what, error, source) from error
            await self._until(_S.RESOLVING_ROUTE, reactor, handshake)
            hub = reactor.open_hub(identifier)
            if hub is None:
                hub = await self._within_limit(reactor.hub(identifier))
            if not self._requirement.permits(hub.context.device_name, hub.context.kind):
                self._requirement.check(hub.context.device_name, hub.context.kind, self._what)
            if not hub.leaves_silence_to_tcp:
                identifier.set_ack_timeout(self.options.ack_timeout)
            self.step = "resolving the route"
            try:
                identifier.resolve_route(min(timeout_ms, ROUTE_TIMEOUT_MS))
            except VerbsCallError as error:
                raise RouteError._of_call(self._what, error) from error
            await self._until(_S.CONNECTING, reactor, handshake)
            domain = None
            if self.domain is not None:
                domain = await self._within_limit(self.domain.on(reactor, hub))
        except BaseException:
            await drop(reactor, identifier)
            raise
        # From here the endpoint owns the identifier.
        peer = host, self.port
        endpoint = Endpoint(
            *(reactor, hub, identifier, self.options, handshake, domain, peer, self._opened_at)
        )
        reactor.subscribe(identifier, endpoint.handle_event)
        try:
            self.step = "making the queue pair"
            await endpoint.open(shared_receive=self.shared_receive)
            left = self.limit.left() if provider.blocks else None
            if left is not None and left <= 0:  # it has waited for a free worker
                raise TimeoutError
            establish = partial(self._connect, endpoint, identifier)
            connection = Connection(endpoint, establish, IN_REQUEST)
            connection._post_pooled_receives()
            return connection
        except BaseException as error:
            await self._undo(endpoint, error)
            raise

    async def _until(self, goal: ConnectionState, reactor: Reactor, handshake: Handshake) -> None:
        reactor.poll_events(handshake)  # its event may be there already
        while handshake.state is not goal:
            if handshake.state is _S.BROKEN:
                raise failed_event(self._what, handshake.event)
            await handshake.change(self.limit)

    async def _connect(
        self, endpoint: Endpoint, identifier: Identifier, private_data: bytes
    ) -> bytes:
        handshake = endpoint.handshake
        self.step, self._has_asked = "waiting for the peer to accept", False
        try:
            if handshake.state is _S.CONNECTING and endpoint.teardown.cause is None:
                said = private_data or announcement(endpoint)
                await self._request(endpoint, identifier, said)
            while handshake.state in IN_PROGRESS:
                await handshake.change(self.limit)
            # It may have ended again by then, with messages to receive.
            if not handshake.was_established:
                raise failed_handshake(self._what, endpoint)
            endpoint.established()
            if not endpoint.hub.is_iwarp and endpoint.cause is None:
                endpoint.pair.set_rnr_timer()
        except BaseException as error:
            await self._undo(endpoint, error)
            if isinstance(error, TimeoutError) and not isinstance(error, RdmaConnectionError):
                raise self._timed_out(NOT_ACCEPTED if endpoint.hub.is_iwarp else "") from None
            if isinstance(error, VerbsCallError):
                raise self._refused(error) from error
            raise
        if logger.isEnabledFor(logging.DEBUG):
            device, fields = endpoint.device_name, endpoint.log_fields
            logger.debug("connected to %s through the device %s", self.target, device, extra=fields)
        event = handshake.event
        if event is None:
            return b""
        private_data, most = read_announcement(event.private_data)
        if most is not None:
            endpoint.work.port.max_sent = most
        return private_data

    async def _request(
        self, endpoint: Endpoint, identifier: Identifier, private_data: bytes
    ) -> None:
        """Send the connection request.

        A driver may connect its TCP stream during the call (siw does), which can take as long as
        TCP's time limits: it then runs in a worker, and its return ends `handshake.awaits_answer`.
        The identifier is not destroyed before.
        """
        self._has_asked = True
        request = parameters_to_c(self.options, private_data)
        if not endpoint.hub.is_iwarp or not endpoint.reactor.blocks:
            identifier._connect(request)
            return
        handshake, errors = endpoint.handshake, list[BaseException]()
        returned = False

        def then(error: BaseException | None) -> None:
            nonlocal returned
            returned = True
            if error is not None:
                errors.append(error)
                endpoint.driver_returned()
            endpoint.calls.end()
            handshake.wake()

        abandon = start_call(endpoint.loop, partial(identifier._connect, request), then, PEERS)
        endpoint.calls.begin()
        endpoint.driver_waits()
        try:
            while not returned:
                await handshake.change(self.limit)
        except BaseException:
            if abandon():  # the call had not begun
                self._has_asked = False
                endpoint.driver_returned()
                endpoint.calls.end()
            raise
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # their tracebacks hold this frame

    async def _undo(self, endpoint: Endpoint, error: BaseException) -> None:
        """Close the endpoint of a connect that has failed, or was withdrawn."""
        above = endpoint.teardown.above
        is_withdrawn = not isinstance(error, Exception)  # after a time limit, nobody waits for it
        if above is not None and is_withdrawn and self._may_be_accepted(endpoint):
            above._end_soon()
        elif endpoint.handshake.awaits_answer:
            endpoint.teardown.close()  # in the background: the driver waits for the peer's answer
        else:
            await endpoint.teardown.aclose()

    def _may_be_accepted(self, endpoint: Endpoint) -> bool:
        """Return whether the peer may be connected, or become so before it hears that this side has
        withdrawn. On iWARP, it is connected as soon as it accepts; elsewhere only after this
        side."""
        if endpoint.state is _S.CONNECTING:
            return self._has_asked and endpoint.hub.is_iwarp and endpoint.cause is None
        return endpoint.state is _S.ESTABLISHED
