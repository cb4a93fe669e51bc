"""Which tables of C calls lie below: libibverbs and librdmacm, by dlopen, and the software device.

Here, and in `device_choice` on top of it, devices are chosen. No line above knows which it got.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from aiordma._native import load_rdma_core, load_software
from aiordma.errors import ForkError, NoDeviceError, NotSupportedError
from aiordma.process import here

__all__ = (
    "SOFTWARE",
    "Provider",
    "provider_of",
    "rdma_core",
    "real_devices_are_here",
    "software",
    "usual_provider",
    "wanted_device",
)

SOFTWARE = "software"
"""The built-in device's name."""

_DEVICES = Path("/sys/class/infiniband")


class Provider:
    """A table of verbs and rdma_cm calls; each slot is an attribute, named as in provider.h.

    Args:
        name: what it is.
        table: the slots.
        remedy: what helps where one is empty.
        connects_at_once: no device's connect waits for the network within the call.
        outlives_forks: a child can use its connection manager although its parent did.

    Raises:
        NotSupportedError: (on use of a slot) what lies below lacks the function.
    """

    def __init__(
        self,
        name: str,
        table: Any,
        remedy: str = "",
        *,
        connects_at_once: bool = False,
        outlives_forks: bool = False,
    ) -> None:
        self.name = name
        self.table = table
        self.connects_at_once = connects_at_once
        self._remedy = remedy
        self._outlives_forks = outlives_forks
        self._user: int | None = None

    def __repr__(self) -> str:
        return f"<Provider {self.name}>"

    def use_manager(self) -> None:
        """Note that this process uses the connection manager, before its first call into it.

        Raises:
            ForkError: the process that this one was forked from did. librdmacm keeps the devices
                open that it has used, and the kernel refuses a child that uses them.
        """
        if self._user is None:
            self._user = here.pid
        if self._user != here.pid and not self._outlives_forks:
            raise ForkError(
                f"process {self._user}, of which this one, {here.pid}, is a forked child, has used "
                "real RDMA devices, and librdmacm keeps them open: a child cannot have its own. "
                'Start children by "spawn" or "forkserver", or before the first use, or use '
                f'device="{SOFTWARE}"'
            )

    def __getattr__(self, slot: str) -> Callable[..., Any]:
        pointer: Any = getattr(self.table, slot)
        if not pointer:
            raise NotSupportedError(
                f"{self.name} has no {slot}" + (f": {self._remedy}" if self._remedy else "")
            )
        # Found once, then an ordinary attribute.
        call: Callable[..., Any] = pointer
        setattr(self, slot, call)
        return call


@cache
def rdma_core() -> Provider:
    """Return the system's libibverbs and librdmacm, opened at the first call.

    Raises:
        NoDeviceError: one of the two is not installed; the message names the packages.
    """
    try:
        table = load_rdma_core()
    except OSError as error:
        raise NoDeviceError(
            f"rdma-core's libraries cannot be opened ({error}). Install them: "
            "`apt-get install libibverbs1 librdmacm1 ibverbs-providers` on Debian, "
            "`dnf install libibverbs librdmacm` on Fedora"
        ) from error
    return Provider("the installed rdma-core", table, "a newer one is needed")


@cache
def software() -> Provider:
    """Return the built-in software device, which is there on every Linux."""
    return Provider(
        "the built-in software device", load_software(), connects_at_once=True, outlives_forks=True
    )


def provider_of(device: str) -> Provider:
    """Return what the device of this name belongs to.

    Raises:
        NoDeviceError: it is not the software device, and rdma-core is not installed.
    """
    return software() if device == SOFTWARE else rdma_core()


def real_devices_are_here() -> bool:
    """Whether the kernel has an RDMA device; looks into one directory, and opens nothing else."""
    try:
        return any(True for _ in _DEVICES.iterdir())
    except OSError:
        return False


def wanted_device(device: str = "auto") -> str | None:
    """Return the name of the device that is insisted on, by the caller or, where that one says
    "auto", by the environment's AIORDMA_DEVICE; None for whichever reaches the address."""
    if device == "auto":
        device = os.environ.get("AIORDMA_DEVICE") or "auto"
    return None if device == "auto" else device


def usual_provider(device: str = "auto") -> Provider:
    """Return where to look where no address decides: the wanted device's, or rdma-core where it is
    installed and the kernel has a device, else the software device.

    Raises:
        NoDeviceError: a real device is wanted by name, and rdma-core is not installed.
    """
    wanted = wanted_device(device)
    if wanted is not None:
        return provider_of(wanted)
    if real_devices_are_here():
        try:
            return rdma_core()
        except NoDeviceError:
            pass
    return software()
