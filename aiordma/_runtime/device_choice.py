"""Which device an undertaking uses: the one that is insisted on, else the real one that reaches the
address, else the built-in software device, which is said once in the log."""

import errno
import logging
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import TypeVar

from aiordma._base.errors import (
    AddressError,
    NoDeviceError,
    RdmaConnectionError,
    RouteError,
    VerbsCallError,
)
from aiordma._base.provider import (
    Provider,
    provider_of,
    rdma_core,
    real_devices_are_here,
    software,
    wanted_device,
)

__all__ = ("with_device",)

logger: logging.Logger = logging.getLogger("aiordma")

Result = TypeVar("Result")

_FINDING = ("rdma_bind_addr", "rdma_resolve_addr", "rdma_resolve_route")
"""The calls that find the device of an address. (Of a loopback address Linux knows a device at
first, and then no route to it.)"""

_said: set[str] = set()


async def with_device(
    device: str, address: str, attempt: Callable[[Provider], Awaitable[Result]]
) -> Result:
    """Return what the attempt makes of the provider that the device is of.

    With "auto" it is made with the real devices first, unless it is about a loopback address, which
    Linux lets listen on any of them, and leads nobody to. Where none of them reaches the address
    (there is none, the connection manager cannot be had, or it knows no device that is on the way
    there) it is made once more, with the software device. An attempt that fails leaves nothing.

    Args:
        device: "auto", or the name of the device that is insisted on.
        address: what is to be reached or had, numeric.
        attempt: raises what tells that an address is not reached as it came: NoDeviceError,
            VerbsCallError of the call that found no device (also as a cause), or AddressError with
            `is_unreached`.

    Raises:
        NoDeviceError: a real device is wanted by name, and there is none.
        Exception: what the attempt raises.
    """
    wanted = wanted_device(device)
    if wanted is not None:
        return await attempt(provider_of(wanted))
    loopback = ip_address(address.partition("%")[0]).is_loopback
    if real_devices_are_here() and not loopback:
        try:
            return await attempt(rdma_core())
        except (NoDeviceError, RdmaConnectionError, VerbsCallError) as error:
            if not _is_unreached(error):
                raise
            why = str(error)
        _say(
            logging.WARNING,
            "unreached",
            f"no RDMA device of this machine reaches {address}, so the built-in software device "
            f"serves it, and whatever else they do not reach ({why})",
        )
    elif loopback and real_devices_are_here():
        _say(
            logging.INFO,
            "loopback",
            f"{address} is a loopback address, which the built-in software device serves",
        )
    else:
        _say(
            logging.INFO,
            "none",
            "this machine has no RDMA device, so the built-in software device serves every address",
        )
    return await attempt(software())


def _is_unreached(error: BaseException | None) -> bool:
    if isinstance(error, NoDeviceError) or (isinstance(error, AddressError) and error.is_unreached):
        return True
    if isinstance(error, AddressError | RouteError):
        error = error.__cause__
    return (
        isinstance(error, VerbsCallError) and error.call in _FINDING and error.errno == errno.ENODEV
    )


def _say(level: int, subject: str, text: str) -> None:
    if subject not in _said:
        _said.add(subject)
        logger.log(level, text)
