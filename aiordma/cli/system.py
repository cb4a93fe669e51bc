"""The state of this machine that decides whether RDMA works: inspected here, judged in checks."""

import array
import ctypes
import fcntl
import os
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from aiordma import RdmaError
from aiordma._base.provider import BUILT_IN, SOFTWARE, SOFTWARE_ROCE, rdma_core
from aiordma._runtime.device_choice import why_software
from aiordma.bench.mistakes import one_line
from aiordma.cli.containers import container_of
from aiordma.verbs import Context, Device, EventChannel, GidEntry, GidType, Identifier

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
MODULES = ("rdma_rxe", "siw", "rdma_ucm", "ib_uverbs", "tcp_diag")
_CAP_IPC_LOCK = 14
_EVERY_USER = ["0", "0", "4294967295"]
"""The user namespace's map of the users, if it is the machine's."""
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32


@dataclass(frozen=True)
class Interface:
    """A network interface. `addresses` are those of IPv4 and IPv6, without link-local ones of other
    interfaces."""

    name: str
    mtu: int
    is_up: bool
    is_loopback: bool = False
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class GidState:
    """An entry of a port's GID table: its index, the name of its type, and its IP address ("" on
    InfiniBand)."""

    index: int
    type: str
    address: str


@dataclass(frozen=True)
class PortState:
    """A port of an RDMA device, with its network interface, if that is known."""

    number: int = 1
    state: str = "ACTIVE"
    active_mtu: int = 1024
    gids: tuple[GidState, ...] = ()
    interface: str | None = None


@dataclass(frozen=True)
class DeviceState:
    """An RDMA device, with its kind (as of `device=`) and its ports."""

    name: str
    kind: str
    ports: tuple[PortState, ...] = ()
    error: str | None = None
    """Why the device cannot be opened."""
    loopback: str | None = None
    """The result of the loopback test: "ok", the error, or None: not tested."""


@dataclass(frozen=True)
class AddressUse:
    """The device that an address would get, or the error; and why, if it is not a real device.

    `source` is the local address of the route to a peer.
    """

    address: str
    device: str | None
    why: str = ""
    is_local: bool = True
    source: str = ""


@dataclass(frozen=True)
class System:
    """Everything that the checks look at. The defaults are a machine without RDMA hardware, on
    which rdma-core is installed."""

    libraries: tuple[tuple[str, str | None], ...] = ()
    """By name: None, or why it cannot be loaded."""
    has_verbs: bool = False
    """The kernel has ib_uverbs."""
    has_manager: bool = False
    """The kernel has rdma_ucm."""
    kernel_devices: tuple[str, ...] = ()
    """The devices in /sys/class/infiniband."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Device nodes: "ok", "missing" or "denied"."""
    missing_modules: tuple[str, ...] = ()
    """Modules that this kernel does not have."""
    is_modular: bool = True
    """The kernel loads modules. Otherwise, what it has is built in, and it does not say what."""
    loaded_modules: tuple[str, ...] = ()
    devices: tuple[DeviceState, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    uses: tuple[AddressUse, ...] = ()
    memlock: int | None = None
    """RLIMIT_MEMLOCK in bytes; None: unlimited."""
    has_ipc_lock: bool = False
    """CAP_IPC_LOCK: the limit does not apply."""
    container: str | None = None
    has_shared_namespaces: bool | None = None
    """Whether every network namespace sees all devices; None: unknown."""
    has_rdma_tool: bool = True
    wanted: str = ""
    """The value of AIORDMA_DEVICE."""


def inspect(root: Path = Path("/")) -> System:
    """Inspect this machine. Loads rdma-core's libraries, and opens each device once.

    Args:
        root: the directory that has sys, dev and proc, for tests.

    Raises: nothing.
    """
    kernel = _names(root / "sys/class/infiniband")
    interfaces = _interfaces(root)
    uses = tuple(
        _use_of(address) for each in interfaces if each.is_up for address in each.addresses
    )
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return System(
        libraries=tuple((name, _load(name)) for name in LIBRARIES),
        has_verbs=(root / "sys/class/infiniband_verbs").is_dir(),
        has_manager=(root / "sys/class/misc/rdma_cm").exists(),
        kernel_devices=kernel,
        nodes=_nodes(root),
        missing_modules=tuple(name for name in MODULES if not _is_available(root, name)),
        is_modular=(root / "proc/modules").exists(),
        loaded_modules=tuple(name for name in MODULES if (root / "sys/module" / name).exists()),
        devices=tuple(_device(name, uses, interfaces) for name in _device_names(kernel)),
        interfaces=interfaces,
        uses=uses,
        memlock=None if soft == resource.RLIM_INFINITY else soft,
        has_ipc_lock=_has_ipc_lock(root),
        container=container_of(root),
        has_shared_namespaces=_namespaces(root),
        has_rdma_tool=shutil.which("rdma") is not None,
        wanted=os.environ.get("AIORDMA_DEVICE", ""),
    )


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(each.name for each in folder.iterdir()))
    except OSError:
        return ()


def _load(library: str) -> str | None:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return one_line(error)
    return None


def _nodes(root: Path) -> tuple[tuple[str, str], ...]:
    wanted = ["rdma_cm"] if (root / "sys/class/misc/rdma_cm").exists() else []
    verbs = _names(root / "sys/class/infiniband_verbs")
    wanted += [name for name in verbs if name.startswith("uverbs")]
    return tuple((f"/dev/infiniband/{name}", _node(root, name)) for name in wanted)


def _node(root: Path, name: str) -> str:
    node = root / "dev/infiniband" / name
    if not node.exists():
        return "missing"
    return "ok" if os.access(node, os.R_OK | os.W_OK) else "denied"


def _is_available(root: Path, module: str) -> bool:
    if (root / "sys/module" / module).exists():
        return True
    modprobe = shutil.which("modprobe") or "/sbin/modprobe"
    try:
        done = subprocess.run([modprobe, "-n", "-q", module], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _has_ipc_lock(root: Path) -> bool:
    """Return whether this process has CAP_IPC_LOCK. In a user namespace (a container without
    root) the kernel's check of locked memory does not count the capability."""
    try:
        status = (root / "proc/self/status").read_text()
        users = (root / "proc/self/uid_map").read_text().split()
    except OSError:
        return False
    effective = next((line for line in status.splitlines() if line.startswith("CapEff:")), "")
    mask = int(effective.partition(":")[2] or "0", 16)
    return bool(mask >> _CAP_IPC_LOCK & 1) and users == _EVERY_USER


def _namespaces(root: Path) -> bool | None:
    try:
        text = (root / "sys/module/ib_core/parameters/netns_mode").read_text().strip()
    except OSError:
        return None
    return text == "Y"


def _interfaces(root: Path) -> tuple[Interface, ...]:
    addresses = _addresses(root)
    found = []
    for name in _names(root / "sys/class/net"):
        folder = root / "sys/class/net" / name
        try:
            flags, mtu = int((folder / "flags").read_text(), 16), int((folder / "mtu").read_text())
        except (OSError, ValueError):
            continue  # a file, such as bonding_masters, or an interface that was just removed
        its = tuple(addresses.get(name, ()))
        found.append(Interface(name, mtu, bool(flags & 1), bool(flags & 8), its))
    return tuple(found)


def _addresses(root: Path) -> dict[str, list[str]]:
    """Return the addresses of each interface: IPv4 from SIOCGIFCONF, IPv6 from /proc."""
    found: dict[str, list[str]] = {}
    buffer = array.array("B", bytes(_IFREQ_BYTES * 256))
    where, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            filled = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iP", length, where))
        except OSError:
            filled = bytes(struct.calcsize("iP"))
    used = struct.unpack("iP", filled)[0]
    for start in range(0, used, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().partition(":")[0]
        found.setdefault(name, []).append(socket.inet_ntoa(entry[20:24]))
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, _index, _prefix, _scope, _flags, name = line.split()
        address = ip_address(bytes.fromhex(digits))
        zone = f"%{name}" if address.is_link_local else ""
        found.setdefault(name, []).append(f"{address}{zone}")
    return found


def _use_of(address: str) -> AddressUse:
    """Bind to a local address, as `listen` does, and return the device that has it."""
    why = why_software(address)
    if why:
        return AddressUse(address, SOFTWARE, why)
    try:
        with EventChannel(rdma_core()) as channel, Identifier(channel) as identifier:
            identifier.bind(address, 0)
            if not identifier.device_key:
                return AddressUse(address, SOFTWARE, "no RDMA device has this address")
            with identifier.context() as context:
                return AddressUse(address, context.device_name)
    except RdmaError as error:
        return AddressUse(address, SOFTWARE, one_line(error))


def _device_names(kernel: Iterable[str]) -> list[str]:
    try:
        names = Device.names()
    except RdmaError:
        names = [*BUILT_IN]
    names = [name for name in names if name != SOFTWARE_ROCE]  # which no address leads to
    # What the kernel has, and the library does not list, cannot be opened, and is a finding.
    return [*(name for name in kernel if name not in names), *names]


def _device(
    name: str, uses: tuple[AddressUse, ...], interfaces: tuple[Interface, ...]
) -> DeviceState:
    its = {use.address for use in uses if use.device == name}
    near = [each.name for each in interfaces if its & set(each.addresses)]
    try:
        with Device(name).open() as context:
            count = context.query().phys_port_cnt
            # Without an interface in the GID table (InfiniBand), the addresses tell that of the
            # only port.
            usual = near[0] if near and count == 1 and name not in BUILT_IN else None
            gids = context.gid_table()
            ports = (_port(context, number, gids, usual) for number in range(1, count + 1))
            return DeviceState(name, context.kind, tuple(ports))
    except (RdmaError, ValueError, OSError) as error:
        return DeviceState(name, "other", error=one_line(error))


def _port(context: Context, number: int, gids: Iterable[GidEntry], usual: str | None) -> PortState:
    port = context.query_port(number)
    its = [each for each in gids if each.port == number]
    index = next((each.interface_index for each in its if each.interface_index), 0)
    entries = (
        GidState(
            each.index,
            each.type.name,
            "" if each.type is GidType.INFINIBAND else each.address,
        )
        for each in its
    )
    return PortState(
        number,
        port.state.name,
        port.active_mtu.bytes,
        tuple(entries),
        interface_name(index) or usual,
    )


def interface_name(index: int) -> str | None:
    """Return the name of a network interface; None for index 0, and if there is none."""
    try:
        return socket.if_indextoname(index) if index else None
    except OSError:
        return None  # of another network namespace
