"""open_shared_receive(): a queue of receives on the device that has an address."""

from aiordma._base.arguments import whole_number
from aiordma._base.opening import opens
from aiordma._base.options import check_queue
from aiordma._base.provider import Provider
from aiordma._connection.domain import Domain, DomainChoice
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._connection.shared_settings import MOST_WORK_REQUESTS, SharedReceiveSettings
from aiordma._runtime.address_lookup import checked_host, device_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import hub_of, new_identifier


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
        async with new_identifier(provider) as (reactor, identifier):
            identifier.bind(numeric, 0)
            hub = await hub_of(reactor, identifier, requirement, f"open_shared_receive({host!r})")
            own = await choice.on(reactor, hub)
        shared = SharedReceiveEndpoint(reactor, hub, settings, identifier, own)
        try:
            await shared.open()
        except BaseException:
            await shared.aclose()
            raise
        return SharedReceiveQueue(shared)

    return await with_device(requirement, numeric, attempt)
