"""The providers: tables of C calls, of libibverbs and librdmacm (by dlopen), or the software
device.

Only this module and `device_choice` choose. docs/design.md ("Two providers") lists the modules that
know a device by its name.
"""

import errno
import os
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from aiordma._base.arguments import text
from aiordma._base.errors import (
    AddressError,
    DeviceRequirementError,
    ForkError,
    NoDeviceError,
    NotSupportedError,
    VerbsCallError,
)
from aiordma._base.process import here
from aiordma._base.system import system
from aiordma._native import lib, load_rdma_core, load_software

SOFTWARE = "software"
"""The name of the built-in software device."""
SOFTWARE_ROCE = "software_roce"
"""The name of its RoCE device, which is used only if a program asks for it."""
BUILT_IN = (SOFTWARE, SOFTWARE_ROCE)

_RDMA_CLASSES = ("rdma", "infiniband", "roce", "iwarp")
CLASSES = (*_RDMA_CLASSES, SOFTWARE)
"""Classes of devices that `device=` takes, beside "auto" and the name of a device."""

_A_NAME = "a device's name such as 'rxe0'"
_A_DEVICE = f"'auto', {', '.join(map(repr, CLASSES))}, or {_A_NAME}"
DEVICE = "AIORDMA_DEVICE"
"""Environment variable: what "auto" stands for."""
HELD_MIB = "AIORDMA_SOFTWARE_HELD_MIB"
"""Environment variable: MiB that the software device may use to hold back peers' messages."""
CAPTURE = "AIORDMA_CAPTURE"
"""Environment variable: the file to which the software device's traffic is written."""
CAPTURE_MIB = "AIORDMA_CAPTURE_MIB"
"""Environment variable: MiB that this file may have."""
DEFAULT_CAPTURE_MIB = "1024"
_HELD_USE = "in which the software device holds back messages that find no receive (256 without it)"
_CAPTURE_USE = "that the capture may have"

_DEVICES = "/sys/class/infiniband"

RDMA_CORE_VERSIONS = {
    "join_multicast_ex": ("rdma_join_multicast_ex", 16),
    "establish": ("rdma_establish", 23),
    "init_qp_attr": ("rdma_init_qp_attr", 23),
    "reg_mr_iova": ("ibv_reg_mr_iova", 25),
    "reg_mr_iova2": ("ibv_reg_mr_iova2", 28),
    "set_local_ece": ("rdma_set_local_ece", 31),
    "get_remote_ece": ("rdma_get_remote_ece", 31),
    "reject_ece": ("rdma_reject_ece", 31),
    "query_gid_ex": ("ibv_query_gid_ex", 32),
    "query_gid_table": ("ibv_query_gid_table", 32),
    "reg_dmabuf_mr": ("ibv_reg_dmabuf_mr", 34),
    "query_qp_data_in_order": ("ibv_query_qp_data_in_order", 41),
}
"""Each slot's function, and the first version of rdma-core that has it; every version has the
others."""


class Provider:
    """A table of verbs and rdma_cm calls; each slot is an attribute, named as in provider.h.

    Args:
        name: its name in messages.
        table: the slots.
        since: a slot's function, and the first version of the library that has it, for the
            message.
        blocks: calls that open, create or destroy can take long, and the connect call of some
            devices waits for the network. Calls that register much memory always can.
        outlives_forks: a forked child can use the connection manager after its parent has used it.

    Raises:
        NotSupportedError: (on use of a slot) the library lacks the function.
    """

    def __init__(
        self,
        name: str,
        table: Any,
        since: Mapping[str, tuple[str, int]] = MappingProxyType({}),
        *,
        blocks: bool = True,
        outlives_forks: bool = False,
    ) -> None:
        self.name = name
        self.table = table
        self.blocks = blocks
        self._since = since
        self._outlives_forks = outlives_forks
        self._user: int | None = None

    def __repr__(self) -> str:
        return f"<Provider {self.name}>"

    def use_manager(self) -> None:
        """Record that this process uses the connection manager, before its first call into it.

        Raises:
            ForkError: this process is a forked child, and its parent has used it. librdmacm keeps
                the devices open that it has used, and the kernel refuses their use by a child.
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
            function, _ = RDMA_CORE_VERSIONS.get(slot, (slot, 0))
            _, version = self._since.get(slot, (slot, 0))
            remedy = f": install rdma-core {version} or newer" if version else ""
            raise NotSupportedError(f"{self.name} has no {function}{remedy}")
        # The next access finds an ordinary attribute.
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
    return Provider("the installed rdma-core", table, RDMA_CORE_VERSIONS)


@cache
def software() -> Provider:
    """Return the provider of the built-in software device, which works on every Linux.

    Raises:
        ValueError: AIORDMA_SOFTWARE_HELD_MIB or AIORDMA_CAPTURE_MIB, which are read at the first
            call, is not a whole number of at least 1, or the file AIORDMA_CAPTURE cannot be
            written.
    """
    limit = os.environ.get(HELD_MIB)
    if limit is not None:
        limit_held(limit)
    path = os.environ.get(CAPTURE)
    if path:
        capture(path, os.environ.get(CAPTURE_MIB, DEFAULT_CAPTURE_MIB))
    return Provider(
        "the built-in software device", load_software(), blocks=False, outlives_forks=True
    )


@cache
def software_roce() -> Provider:
    """Return the provider of the built-in RoCE device: the same one, except that the connection
    manager connects over RoCE.

    Raises: as `software`.
    """
    usual = software()
    table = load_software(is_roce=True)
    return Provider(usual.name, table, blocks=False, outlives_forks=True)


def check_software_variables() -> None:
    """Check the environment variables that `software` reads, without effect.

    Raises:
        ValueError: AIORDMA_SOFTWARE_HELD_MIB or AIORDMA_CAPTURE_MIB is not a whole number of at
            least 1.
    """
    for name, use in ((HELD_MIB, _HELD_USE), (CAPTURE_MIB, _CAPTURE_USE)):
        if name in os.environ:
            _mebibytes(name, os.environ[name], use)


def limit_held(mib: str) -> None:
    """Limit the memory in which the software device holds back peers' messages.

    Raises:
        ValueError: `mib` is not a whole number of at least 1.
    """
    lib.aiordma_software_limit_held(_mebibytes(HELD_MIB, mib, _HELD_USE))


def capture(path: str, mib: str) -> None:
    """Write the software device's traffic to a pcapng file, of at most so many MiB. `%p` in the
    path is the number of the process. A forked child writes a file only if its path differs.

    Raises:
        ValueError: `mib` is not a whole number of at least 1, or the file cannot be written.
    """
    most = _mebibytes(CAPTURE_MIB, mib, _CAPTURE_USE)

    def start() -> None:
        name = path.replace("%p", str(os.getpid()))
        error = lib.aiordma_software_capture(os.fsencode(name), most)
        if error:
            raise ValueError(f"{CAPTURE}={path!r}: {name} cannot be written: {os.strerror(error)}")

    start()
    if "%p" in path:
        os.register_at_fork(after_in_child=start)


def _mebibytes(variable: str, mib: str, use: str) -> int:
    if not mib.isascii() or not mib.isdigit() or not 1 <= int(mib) < 1 << 40:
        raise ValueError(f"{variable}={mib!r}: give a whole number of MiB, at least 1, {use}")
    return int(mib) << 20


def provider_of(device: str) -> Provider:
    """Return the provider of the device of this name.

    Raises:
        NoDeviceError: this is not the software device, and rdma-core is not installed.
    """
    if device == SOFTWARE_ROCE:
        return software_roce()
    return software() if device == SOFTWARE else rdma_core()


def real_devices_are_here() -> bool:
    """Return whether the kernel has an RDMA device, from the contents of one directory.

    Raises:
        VerbsCallError: there are no file descriptors left.
    """
    try:
        return not system.is_simulated and bool(os.listdir(_DEVICES))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise VerbsCallError(error.errno, f"reading {_DEVICES}") from error
        return False


def checked_device(device: object, call: str) -> str:
    """Return the name of a device.

    Raises:
        TypeError, ValueError: the value is not a text that could be one, or is "auto" or a class.
    """
    checked = text(device, "device", _A_NAME, call)
    if checked in ("auto", *_RDMA_CLASSES):
        raise ValueError(f"{call}(): device={checked!r}: expected {_A_NAME}")
    return checked


class Requirement:
    """The device that an operation may use: the checked argument `device` or, if that is "auto",
    the environment variable AIORDMA_DEVICE.

    Args:
        device: the name of a device; "rdma": every device except the software device;
            "infiniband", "roce" or "iwarp": an RDMA device of that kind; "auto": AIORDMA_DEVICE,
            or any device without it.
        call: the function that was called, for messages.

    Attributes:
        name: the name of the only permitted device; None: the class decides.

    Raises:
        TypeError, ValueError: the value is not a text that could be one of these.
    """

    def __init__(self, device: object = "auto", call: str = "") -> None:
        chosen = text(device, "device", _A_DEVICE, call)
        self.text: str = f'device="{chosen}"'
        if chosen == "auto":
            chosen = os.environ.get(DEVICE) or "auto"
            self.text = f"{DEVICE}={chosen}"
        self.name: str | None = None if chosen in ("auto", *_RDMA_CLASSES) else chosen
        self._class = chosen

    @property
    def permits_software(self) -> bool:
        """Whether the software device may be used."""
        return self._class in ("auto", SOFTWARE)

    @property
    def permits_all(self) -> bool:
        """Whether every device may be used."""
        return self._class == "auto"

    def permits(self, device: str, kind: str) -> bool:
        """Return whether a device of this name and kind ("software", "roce", ...) may be used."""
        if self.name is not None:
            return device == self.name
        if self._class == "rdma":
            return kind != SOFTWARE
        return self._class in ("auto", kind)

    def check_unreached(self, address: str, why: str) -> None:
        """Check that the software device may be used for an address.

        Raises:
            DeviceRequirementError: it may not; the text has the reason why no other device is used.
        """
        if not self.permits_software:
            raise DeviceRequirementError(
                f"{self.text} does not permit the software device, and no other device can be used "
                f"for {address}: {why}. `aiordma doctor {address}` says what to do"
            )

    def check(self, device: str, kind: str, what: str) -> None:
        """Check that the device that has or reaches an address may be used.

        Args:
            device, kind: the device's name and kind.
            what: the operation with the address, for the errors.

        Raises:
            AddressError: another device is required by name.
            DeviceRequirementError: the device is of another kind than the required one.
        """
        if self.name not in (None, device):
            raise AddressError(
                f"{what}: {device} is the device of this address, not {self.name}, which was "
                "asked for"
            )
        if self.name is None and not self.permits(device, kind):
            raise DeviceRequirementError(
                f"{what}: {self.text} does not permit {device}, the device of this address: its "
                f"kind is {kind!r}. `aiordma info` lists the devices and their kinds"
            )


_KNOWN: dict[object, Requirement] = {
    each: Requirement(each) for each in dict.fromkeys((*CLASSES, *BUILT_IN))
}
"""By the argument `device`, those that do not depend on the environment."""


def required(device: object, call: str) -> Requirement:
    """Return the requirement of an argument `device`. See `Requirement`."""
    return (_KNOWN.get(device) if type(device) is str else None) or Requirement(device, call)


def usual_provider(device: str = "auto", call: str = "") -> Provider:
    """Return the provider for an operation without an address: the required device's. If no device
    is required: rdma-core, if it is installed and the kernel has a device, else the software
    device.

    Raises:
        NoDeviceError: a real device is required, and rdma-core is not installed.
        TypeError, ValueError: the device's name is invalid.
    """
    required = Requirement(device, call)
    if required.name is not None:
        return provider_of(required.name)
    if not required.permits_software:
        return rdma_core()
    if real_devices_are_here():
        try:
            return rdma_core()
        except NoDeviceError:
            pass
    return software()
