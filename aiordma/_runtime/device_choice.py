"""Chooses the device of an operation: the required device, else a real device that reaches the
address, else the built-in software device. The log states the last choice once."""

import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiordma._base.errors import (
    AddressError,
    DeviceRequirementError,
    NoDeviceError,
    RdmaConnectionError,
    RouteError,
    VerbsCallError,
)
from aiordma._base.provider import (
    Provider,
    Requirement,
    provider_of,
    rdma_core,
    real_devices_are_here,
    software,
)
from aiordma._base.socket_address import is_loopback
from aiordma.verbs.device import require_device

logger: logging.Logger = logging.getLogger("aiordma")

Result = TypeVar("Result")

_FINDING = ("rdma_bind_addr", "rdma_resolve_addr", "rdma_resolve_route")
"""The calls that find the device for an address. (For a loopback address, Linux finds a device, but
then no route.)"""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_logged: set[str] = set()
"""What `why_software` returned for the choices that were logged."""


def why_software(address: str) -> str:
    """Return why no real device can serve an address, or "" if the attempt has to tell."""
    if not real_devices_are_here():
        return "this machine has no RDMA device"
    return "Linux does not route RDMA to a loopback address" if is_loopback(address) else ""


async def with_device(
    requirement: Requirement,
    address: str,
    attempt: Callable[[Provider], Awaitable[Result]],
) -> Result:
    """Call `attempt` with the device's provider, and return its result.

    Without a required one, the real devices are tried first. The exception is a loopback address:
    Linux binds it to a real device, but does not route connections to it. If no real device reaches
    the address (there is none, the connection manager is not available, or it finds no device for
    the address), `attempt` is called again with the software device. An attempt that fails must
    undo all of its effects.

    Args:
        requirement: what the device must be. The attempt checks the kind of a real device.
        address: the numeric address to reach or to bind to.
        attempt: the operation. If no device reaches the address, it must raise the original error:
            NoDeviceError, the VerbsCallError of the call that found no device (also as a cause), or
            an AddressError with `is_unreached`.

    Raises:
        DeviceRequirementError: the requirement does not permit the software device.
        NoDeviceError: a real device is required by name, and there is no such device.
        Exception: the exception that the attempt raised.
    """
    if requirement.name is not None:
        try:
            return await attempt(provider_of(requirement.name))
        except (NoDeviceError, RdmaConnectionError, VerbsCallError) as error:
            # Without descriptors or memory, the list of the devices would be empty.
            is_elsewhere = isinstance(error, AddressError) and error.errno not in _SHORTAGES
            if is_elsewhere or _is_unreached(error):
                try:
                    require_device(requirement.name)
                except NoDeviceError as absent:
                    raise absent from error
            raise
    why = known = why_software(address)
    if not known:
        try:
            return await attempt(rdma_core())
        except (NoDeviceError, RdmaConnectionError, VerbsCallError) as error:
            if not _is_unreached(error):
                raise
            why = str(error)
    requirement.check_unreached(address, why)
    if known not in _logged:
        _logged.add(known)
        level = logging.INFO if known else logging.WARNING
        text = "the built-in software device serves %s (logged once for each kind of reason): %s"
        logger.log(level, text, address, why)
    return await attempt(software())


def _is_unreached(error: BaseException | None) -> bool:
    if isinstance(error, DeviceRequirementError):
        return False  # a device reaches the address, but is not permitted
    if isinstance(error, NoDeviceError) or (isinstance(error, AddressError) and error.is_unreached):
        return True
    if isinstance(error, AddressError | RouteError):
        error = error.__cause__
    return (
        isinstance(error, VerbsCallError) and error.call in _FINDING and error.errno == errno.ENODEV
    )
