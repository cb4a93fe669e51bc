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

_said: set[str] = set()


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
    real, loopback = real_devices_are_here(), is_loopback(address)
    if real and not loopback:
        try:
            return await attempt(rdma_core())
        except (NoDeviceError, RdmaConnectionError, VerbsCallError) as error:
            if not _is_unreached(error):
                raise
            why = str(error)
        requirement.check_unreached(address, why)
        _log_once(
            logging.WARNING,
            "unreached",
            f"no RDMA device of this machine reaches {address}, so the built-in software device "
            f"serves it, and whatever else they do not reach ({why})",
        )
    elif real:
        requirement.check_unreached(address, "Linux does not route RDMA to a loopback address")
        _log_once(
            logging.INFO,
            "loopback",
            f"{address} is a loopback address, which the built-in software device serves",
        )
    else:
        requirement.check_unreached(address, "this machine has no RDMA device")
        _log_once(
            logging.INFO,
            "none",
            "this machine has no RDMA device, so the built-in software device serves every address",
        )
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


def _log_once(level: int, subject: str, text: str) -> None:
    if subject not in _said:
        _said.add(subject)
        logger.log(level, text)
