"""connect(): from a name and a port to a connection, a step at a time, each with its error."""

import errno
import logging
import os
import socket
from typing import Unpack

import anyio

from aiordma.address_lookup import numeric_address
from aiordma.connection import Connection
from aiordma.device_choice import with_device
from aiordma.endpoint import Endpoint
from aiordma.enums import CmEventType
from aiordma.errors import (
    REJECT_REASONS,
    AddressError,
    ConnectTimeoutError,
    DeviceRemovedError,
    DisconnectedError,
    RdmaConnectionError,
    RejectedError,
    RouteError,
    UnreachableError,
    VerbsCallError,
)
from aiordma.hub import DeviceHub
from aiordma.options import ConnectionKeywords, ConnectionOptions
from aiordma.provider import Provider, wanted_device
from aiordma.rdmacm import MAX_CONNECT_PRIVATE_DATA, ConnectionParameters, Event, Identifier
from aiordma.reactor import Reactor, acquire_reactor
from aiordma.shared_receive import SharedReceiveQueue
from aiordma.states import ConnectionState, next_state
from aiordma.threads import outwait, start_call

__all__ = ("connect", "failed_event", "numeric_address", "parameters")

logger = logging.getLogger("aiordma")

ROUTE_TIMEOUT_MS = 2000
"""For one question to a subnet manager, which InfiniBand repeats; Ethernet asks nobody."""

MOST_SECONDS = 1_000_000.0
"""As good as for ever, and still a number of milliseconds that the kernel takes."""

_S = ConnectionState


async def connect(
    host: str,
    port: int,
    *,
    private_data: bytes = b"",
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    reuse_address: bool = False,
    shared_receive: SharedReceiveQueue | None = None,
    **options: Unpack[ConnectionKeywords],
) -> Connection:
    """Connect to a listening peer over RDMA.

    Cancelled, or failed, it leaves nothing behind. Follows man rdma_cm, "Client operation".

    Args:
        host: a name or a numeric address of the peer's RDMA interface. An IPv6 link-local one has
            our interface behind it: "fe80::1%eth0".
        port: its port, in RDMA's TCP port space (which sockets do not share).
        private_data: up to 56 bytes for the peer's program, beside the request.
        source: bind to this (host, port) first; port 0 for any.
        timeout: seconds for all steps together; None for as long as it takes.
        device: "auto" takes the real RDMA device that reaches the address, else the built-in
            "software" one; a name insists on one. The environment's AIORDMA_DEVICE is used in
            place of "auto" where set.
        reuse_address: with a source port: others that say so too may connect from it as well.
        shared_receive: take receives from there; receive_* options say nothing then.
        options: see ConnectionOptions.

    Raises:
        AddressError, RouteError, RejectedError, UnreachableError, ConnectTimeoutError: the step
            that failed and why; all are ConnectionError.
        NoDeviceError: a real device is insisted on, and there is none here.
        ValueError: an argument is out of range.
    """
    chosen = ConnectionOptions(**options)
    parameters(chosen, private_data).check(MAX_CONNECT_PRIVATE_DATA, "a connection request")
    seconds = MOST_SECONDS if timeout is None else min(timeout, MOST_SECONDS)
    attempt = _Attempt(f"{host}:{port}", chosen, private_data, device, int(seconds * 1000))
    attempt.reuse_address = reuse_address
    attempt.shared_receive = shared_receive
    try:
        with anyio.fail_after(timeout):
            family, bound = socket.AF_UNSPEC, None
            if source is not None:
                bound = (await numeric_address(source[0]), source[1])
                family = socket.AF_INET6 if ":" in bound[0] else socket.AF_INET
            target = await numeric_address(host, family)
            return await with_device(
                device, target, lambda provider: attempt.run(provider, target, port, bound)
            )
    except TimeoutError:
        raise ConnectTimeoutError(
            f"connect to {host}:{port}: {attempt.step} took longer than {timeout:g} s"
        ) from None


class _Attempt:
    """One connect: the step it is at, and the way back from there."""

    def __init__(
        self,
        target: str,
        options: ConnectionOptions,
        private_data: bytes,
        device: str,
        timeout_ms: int,
    ) -> None:
        self.target = target
        self.options = options
        self.private_data = private_data
        self.device = wanted_device(device)
        self.reuse_address = False
        self.step = "looking up the name"
        self.timeout_ms = timeout_ms
        self.shared_receive: SharedReceiveQueue | None = None
        self._state = _S.RESOLVING_ADDRESS
        self._event: Event | None = None
        self._changed = anyio.Event()
        self._calling = False

    async def run(
        self, provider: Provider, host: str, port: int, source: tuple[str, int] | None
    ) -> Connection:
        self._state = _S.RESOLVING_ADDRESS
        reactor = await acquire_reactor(provider)
        try:
            identifier = Identifier(reactor.channel)
        except BaseException:
            reactor.release()
            raise
        reactor.subscribe(identifier, self._handle)
        try:
            hub = await self._resolve(reactor, identifier, host, port, source)
        except BaseException:
            reactor.unsubscribe(identifier)
            gone = anyio.Event()
            reactor.destroy(identifier.close, lambda: reactor.release(gone.set))
            await outwait(gone)
            raise
        # From here the endpoint owns the identifier, and the use of the reactor.
        endpoint = Endpoint(reactor, hub, identifier, self.options, _S.CONNECTING)
        reactor.subscribe(identifier, endpoint.handle_event, endpoint)
        try:
            self.step = "making the queue pair"
            await endpoint.open(shared_receive=self.shared_receive)
            self.step = "waiting for the peer to accept"
            connection = Connection(endpoint, self.shared_receive)
            connection.prepare()
            await self._connect(endpoint, identifier)
            if not await endpoint.connected():
                raise endpoint.cause or failed_event(
                    f"connect to {self.target}", endpoint.last_event
                )
            event = endpoint.last_event
            connection.begin(private_data=event.private_data if event else b"")
        except BaseException as error:
            if not self._calling:  # else it is closed when the driver's call has returned
                await endpoint.aclose()
            if isinstance(error, VerbsCallError):
                raise _refused_call(f"connect to {self.target}", error) from error
            raise
        return connection

    async def _resolve(
        self,
        reactor: Reactor,
        identifier: Identifier,
        host: str,
        port: int,
        source: tuple[str, int] | None,
    ) -> DeviceHub:
        identifier.set_ack_timeout(self.options.ack_timeout)
        if self.options.tos is not None:
            identifier.set_tos(self.options.tos)
        if self.reuse_address:
            identifier.set_reuse_address(True)
        self.step = "resolving the address"
        try:
            identifier.resolve_address(host, port, source, self.timeout_ms)
        except VerbsCallError as error:
            raise AddressError(f"connect to {self.target}: {error}") from error
        await self._until(_S.RESOLVING_ROUTE)
        hub = await reactor.hub(identifier)
        if self.device is not None and hub.context.device_name != self.device:
            raise AddressError(
                f"connect to {self.target}: {hub.context.device_name} reaches that address, "
                f"not {self.device}, which was asked for"
            )
        self.step = "resolving the route"
        try:
            identifier.resolve_route(min(self.timeout_ms, ROUTE_TIMEOUT_MS))
        except VerbsCallError as error:
            raise RouteError(f"connect to {self.target}: {error}") from error
        await self._until(_S.CONNECTING)
        return hub

    async def _connect(self, endpoint: Endpoint, identifier: Identifier) -> None:
        request = parameters(self.options, self.private_data)
        if not endpoint.hub.is_iwarp or identifier.provider.connects_at_once:
            identifier.connect(request)
            return
        # A driver may connect its TCP stream within the call (siw does), which takes as long as TCP
        # likes. Nobody can destroy the identifier meanwhile: whoever gives up leaves it to us.
        self._calling = True
        endpoint.calls.begin()
        returned = anyio.Event()
        errors: list[BaseException] = []
        abandoned = False

        def then(error: BaseException | None) -> None:
            self._calling = False
            endpoint.calls.end()
            if error is not None:
                errors.append(error)
            returned.set()
            if abandoned:
                endpoint.close()

        start_call(endpoint.loop, lambda: identifier.connect(request), then)
        try:
            await returned.wait()
        except BaseException:
            abandoned = True
            raise
        for error in errors:
            raise error

    def _handle(self, event: Event) -> None:
        self._state = next_state(self._state, event.type)
        self._event = event
        self._changed.set()

    async def _until(self, goal: ConnectionState) -> None:
        while self._state is not goal:
            if self._state is _S.BROKEN:
                raise failed_event(f"connect to {self.target}", self._event)
            self._changed = anyio.Event()
            await self._changed.wait()


def _refused_call(what: str, error: VerbsCallError) -> RdmaConnectionError:
    """The errors of a connect that a driver carries out within the call."""
    text = f"{what}: {error}"
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        reason = -error.errno
        return RejectedError(f"{text}: {REJECT_REASONS[reason]}", reason=reason, private_data=b"")
    if error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return UnreachableError(text)
    return RdmaConnectionError(text)


def parameters(options: ConnectionOptions, private_data: bytes) -> ConnectionParameters:
    """Return what goes to the peer."""
    return ConnectionParameters(
        private_data=private_data,
        responder_resources=options.responder_resources,
        initiator_depth=options.initiator_depth,
        retry_count=options.retry_count,
        rnr_retry_count=options.rnr_retry_count,
    )


def failed_event(what: str, event: Event | None) -> Exception:
    """Turn the CM event that ended an attempt into its error."""
    if event is None:
        return RdmaConnectionError(f"{what}: no reason was given")
    status = event.status
    text = os.strerror(-status) if status < 0 else f"status {status}"
    kind = event.type
    if kind is CmEventType.ADDR_ERROR:
        error = AddressError(
            f"{what}: resolving the address failed: {text}. Either nobody has it, or no RDMA "
            "device reaches it (`rdma link` lists devices and their interfaces)"
        )
        error.is_unreached = status == -errno.ENODEV
        return error
    if kind is CmEventType.ROUTE_ERROR:
        return RouteError(f"{what}: resolving the route failed: {text}")
    if kind is CmEventType.REJECTED:
        reason = REJECT_REASONS.get(status, text)
        return RejectedError(
            f"{what}: rejected ({status}): {reason}",
            reason=status,
            private_data=event.private_data,
        )
    if kind is CmEventType.UNREACHABLE:
        return UnreachableError(f"{what}: the peer's connection manager did not answer: {text}")
    if kind is CmEventType.DISCONNECTED:
        return DisconnectedError(f"{what}: the peer disconnected at once")
    if kind is CmEventType.DEVICE_REMOVAL:
        return DeviceRemovedError(f"{what}: the RDMA device was removed")
    return RdmaConnectionError(f"{what}: {kind.label}: {text}")
