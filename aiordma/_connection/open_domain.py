"""open_domain(): a protection domain on the device that has, or reaches, an address."""

import errno
from functools import partial

import anyio

from aiordma._base.arguments import optional_seconds
from aiordma._base.enums import CmEventType
from aiordma._base.errors import AddressError, ConnectTimeoutError, VerbsCallError
from aiordma._base.opening import opens
from aiordma._base.provider import Provider, Requirement
from aiordma._connection.domain import Domain
from aiordma._connection.event_waiter import EventWaiter
from aiordma._endpoint.domain_state import DomainState, make_raw
from aiordma._runtime.address_lookup import checked_host, device_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import hub_of, milliseconds, new_identifier
from aiordma._runtime.reactor import Reactor
from aiordma.verbs.identifier import Identifier

_DISCARD = 9
"""A port to resolve an address with. Nothing is sent to it."""


@opens
async def open_domain(
    host: str,
    *,
    timeout: float | None = 30.0,
    device: str = "auto",
) -> Domain:
    """Open a protection domain, for memory that outlives connections, or is kept from other peers.
    Pass it to `connect`, `listen` and the other functions as `domain=`. Await the call, or enter it
    with `async with`, around everything that uses the domain.

    Args:
        host: a local address of a device, or the address of a peer that the device reaches.
        timeout: seconds for looking up the name and finding the device; None: no limit.
        device: as of `connect`.

    Raises:
        AddressError: the host's name does not resolve, no RDMA device has or reaches the address,
            or another device than the required one does.
        ConnectTimeoutError: the device was not found in time.
        NoDeviceError: a real device is required by name, and there is no such device.
        DeviceRequirementError: `device` does not permit the device that reaches the address.
        TypeError, ValueError: an argument is invalid; the message names it and the expected value.
        VerbsCallError: the driver refused; the message names the limit.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left.

    See: man ibv_alloc_pd.
    """
    call = "open_domain"
    host = checked_host(host, "host", call)
    timeout = optional_seconds(timeout, "timeout", call)
    requirement = Requirement(device, call)
    what = f"open_domain({host!r})"

    async def attempt(numeric: str, provider: Provider) -> Domain:
        async with new_identifier(provider) as (reactor, identifier):
            await _find_device(reactor, identifier, what, numeric, timeout)
            hub = await hub_of(reactor, identifier, requirement, what)
            raw = await make_raw(reactor, hub)
        # From here the domain owns the identifier.
        return Domain(DomainState(reactor, hub, raw, identifier))

    try:
        with anyio.fail_after(timeout):
            numeric = await device_address(host, call)
            return await with_device(requirement, numeric, partial(attempt, numeric))
    except TimeoutError:
        raise ConnectTimeoutError(
            f"open_domain: finding the device for {host} took longer than {timeout:g} s"
        ) from None


async def _find_device(
    reactor: Reactor, identifier: Identifier, what: str, numeric: str, timeout: float | None
) -> None:
    """Bind the identifier to the device that has the address, or else reaches it."""
    try:
        identifier.bind(numeric, 0)
    except VerbsCallError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise
        # No device of this machine has the address.
        waiter = EventWaiter(what)
        reactor.subscribe(identifier, waiter.handle)
        try:
            identifier.resolve_address(numeric, _DISCARD, None, milliseconds(timeout))
        except VerbsCallError as refused:
            raise AddressError._of_call(what, refused) from refused
        await waiter.until(CmEventType.ADDR_RESOLVED)
