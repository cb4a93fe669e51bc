"""The sources of shared receive queues: `open_shared_receive`, and listeners."""

import anyio

from aiordma._base.arguments import whole_number, wrong_type
from aiordma._base.opening import opens
from aiordma._base.options import ConnectionOptions, check_queue
from aiordma._base.provider import Provider, Requirement
from aiordma._connection.domain import Domain, DomainArgument, DomainChoice
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.shared_settings import MOST_WORK_REQUESTS, SharedReceiveSettings
from aiordma._endpoint.domain_state import DomainState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.threads import ACCEPTS
from aiordma._runtime.address_lookup import checked_host, device_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import hub_of, new_identifier
from aiordma.verbs import ProtectionDomain

__all__ = ("ListenerReceives", "open_shared_receive")


@opens
async def open_shared_receive(
    host: str,
    *,
    depth: int | None = None,
    max_sge: int | None = None,
    buffers: int = 0,
    buffer_size: int = 16384,
    comp_vector: int = 0,
    cqe: int | None = None,
    device: str = "auto",
    domain: Domain | None = None,
) -> SharedReceiveQueue:
    """Open a queue of receives for many connections (ibv_create_srq). Pass it to `listen` and
    `connect` as `shared_receive=`. Use it as an async context manager around its connections.

    Args:
        host: a local address of a device, whose connections can use the queue.
        depth: the maximum number of posted receives; None: `buffers`, or 64 if that is 0.
        max_sge: the maximum number of parts of one receive; None: 1 with `buffers`, otherwise 8 or
            the device's limit, if that is less.
        buffers: the number of receives that the queue posts itself, from a pool, so that each
            connection's `receive()` works; 0: you post them, with `post_srq_recv`.
        buffer_size: the size of each of these receives, in bytes: the longest message that peers
            may send.
        comp_vector: the completion vector of the receives' completion queue, as of
            ConnectionOptions.
        cqe: entries of that completion queue, as of ConnectionOptions; at least `depth`. `resize`
            can use the remaining entries. None: the default size, or `depth` if that is more.
        device: "auto", or the name or the class of the device that must have the address, as of
            `connect`.
        domain: the protection domain of the queue and of its connections, which then need no
            `domain=` of their own; None: the one that everything on this event loop and device
            shares.

    Raises:
        AddressError: no RDMA device has the address, or another device than the required one has.
        NotSupportedError: the device has no shared receive queues.
        TypeError: an argument is of the wrong type; the message names the expected type.
        ValueError: an argument is out of range; the message names it and the limit.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that has the address.
        VerbsCallError: the driver refused.
        ClosedError, EventLoopError: `domain` is closed, or belongs to another event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left.

    See: man ibv_create_srq.
    """
    host = checked_host(host, "host", "open_shared_receive")
    call = "open_shared_receive"
    choice = DomainChoice(domain, call, pooled=True)
    requirement = choice.requirement(device)
    choice.require_usable()
    if depth is not None:
        depth = whole_number(depth, "depth", 1, MOST_WORK_REQUESTS, call)
    if max_sge is not None:
        max_sge = whole_number(max_sge, "max_sge", 1, MOST_WORK_REQUESTS, call)
    buffers = whole_number(buffers, "buffers", 0, MOST_WORK_REQUESTS, call)
    buffer_size = whole_number(buffer_size, "buffer_size", 1, 1 << 30, call)
    comp_vector, cqe = check_queue(comp_vector, cqe, call)
    wanted_depth = depth if depth is not None else buffers or 64
    if buffers > wanted_depth:
        raise ValueError(f"{call}(): buffers={buffers} is not in 0..{wanted_depth} (the depth)")
    settings = SharedReceiveSettings(wanted_depth, max_sge, buffers, buffer_size, comp_vector, cqe)
    numeric = await device_address(host, call)

    async def attempt(provider: Provider) -> SharedReceiveQueue:
        return await _open(provider, host, numeric, requirement, settings, choice)

    return await with_device(requirement, numeric, attempt)


async def _open(
    provider: Provider,
    host: str,
    numeric: str,
    requirement: Requirement,
    settings: SharedReceiveSettings,
    choice: DomainChoice,
) -> SharedReceiveQueue:
    async with new_identifier(provider) as (reactor, identifier):
        identifier.bind(numeric, 0)
        hub = await hub_of(reactor, identifier, requirement, f"open_shared_receive({host!r})")
        domain = await choice.on(reactor, hub)
    shared = SharedReceiveEndpoint(reactor, hub, settings, identifier, domain)
    try:
        await shared.open()
    except BaseException:
        await shared.aclose()
        raise
    return SharedReceiveQueue(shared)


class ListenerReceives:
    """The protection domain and the shared receive queues of one listener's connections: none, a
    given queue, or one pooled queue for each device and domain. A pooled queue has `shared_receive`
    receives, and the receive size, completion vector and `cqe` of the options.

    A queue in the domain of one accepted connection (`ConnectionRequest.accept`) closes with the
    last connection in that domain, because the program may close the domain then. The others are
    kept until `close`.
    """

    def __init__(
        self,
        shared_receive: SharedReceiveQueue | int | None,
        options: ConnectionOptions,
        domain: DomainArgument = None,
        call: str = "listen",
    ) -> None:
        self._given: SharedReceiveEndpoint | None = None
        self._settings: SharedReceiveSettings | None = None
        if isinstance(shared_receive, SharedReceiveQueue):
            self._given = shared_receive._endpoint
        elif shared_receive is not None:
            if isinstance(shared_receive, bool) or not isinstance(shared_receive, int):
                expected = "a SharedReceiveQueue, or a number of receives"
                raise wrong_type(shared_receive, "shared_receive", expected, "listen")
            whole_number(shared_receive, "shared_receive", 1, MOST_WORK_REQUESTS, "listen")
            self._settings = SharedReceiveSettings(
                shared_receive,
                1,
                shared_receive,
                options.receive_size,
                options.comp_vector,
                options.cqe,
            )
        self.domain: DomainChoice = self.choice(domain, call)
        self._made: dict[ProtectionDomain, SharedReceiveEndpoint] = {}
        self._making = anyio.Lock(fast_acquire=True)
        self._closed = False

    def choice(self, domain: DomainArgument, call: str) -> DomainChoice:
        """Check an argument `domain=` against the queues. Raises the errors of `DomainChoice`."""
        given = None if self._given is None else (self._given.memory.state,)
        return DomainChoice(domain, call, given, pooled=self._settings is not None)

    async def on(
        self, endpoint: Endpoint, domain: DomainState | None
    ) -> SharedReceiveEndpoint | None:
        """Return the queue for a connection that is being accepted, or None. The connection becomes
        a member of a pooled queue here; `Endpoint.open` adds it to a given queue.

        Raises:
            ValueError: a setting exceeds the device's limit.
            NotSupportedError: the device has no shared receive queues.
            ClosedError: the queue was closed.
            VerbsCallError: the driver refused.
        """
        if self._settings is None:
            return self._given
        hub = endpoint.hub
        async with self._making:
            shared = self._made.get(endpoint.memory.domain)
            if shared is None or shared.cause is not None:
                if shared is not None:
                    shared.close_when_unused()  # it has failed
                shared = SharedReceiveEndpoint(endpoint.reactor, hub, self._settings, domain=domain)
                shared.calls.lane = ACCEPTS
                try:
                    await shared.open()
                    shared.join(endpoint)
                except BaseException:
                    await shared.aclose()
                    raise
                self._keep(endpoint.memory.domain, shared)
            else:
                shared.join(endpoint)
        if self._closed or domain is not self.domain.state:
            shared.close_when_unused()
        return shared

    def _keep(self, domain: ProtectionDomain, shared: SharedReceiveEndpoint) -> None:
        self._made[domain] = shared

        def forget() -> None:
            if self._made.get(domain) is shared:
                del self._made[domain]

        shared.teardown.on_closed.append(forget)

    def close(self) -> None:
        """Close each pooled queue once its last connection has ended."""
        self._closed = True
        for shared in list(self._made.values()):
            shared.close_when_unused()
