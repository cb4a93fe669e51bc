"""The checks of `aiordma doctor`: pure functions from a System to findings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from aiordma._base.provider import BUILT_IN, CLASSES, SOFTWARE
from aiordma.cli.containers import memlock_command, nodes_command
from aiordma.cli.system import (
    AddressUse,
    DeviceState,
    GidState,
    Interface,
    PortState,
    System,
)

_ENOUGH_MEMLOCK = 64 * 1024 * 1024
_ROCE_HEADERS = 1024 + 58
"""Bytes of an Ethernet frame that carries 1024 bytes with RoCE v2 over IPv4."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Args:
        level: "ok", "note" (nothing has to be done), "warning" (RDMA works, but not as well as it
            could) or "error" (RDMA does not work).
        subject: the check: "libraries", "memlock", ...
        text: what was found, and what it means.
        command: the command that mends it, or that finds the cause, for a person to read and run.
            Each warning and error has one; a note may have one, too. "": there is nothing to do.
        fix: commands that `--fix` may run as root, because they remove nothing.
    """

    level: str
    subject: str
    text: str
    command: str = ""
    fix: tuple[tuple[str, ...], ...] = ()


def check(system: System) -> list[Finding]:
    """Return the findings of all checks, in the order in which to mend them."""
    return [finding for each in CHECKS for finding in each(system)]


def works(findings: list[Finding]) -> bool:
    """Return whether RDMA works: no finding is an error."""
    return all(finding.level != "error" for finding in findings)


def check_libraries(system: System) -> list[Finding]:
    """Whether rdma-core's libraries can be loaded."""
    bad = [f"{name}: {why}" for name, why in system.libraries if why is not None]
    if not bad:
        return [Finding("ok", "libraries", "libibverbs and librdmacm can be loaded")]
    return [
        Finding(
            "error",
            "libraries",
            "rdma-core cannot be loaded: " + "; ".join(bad),
            _INSTALL,
        )
    ]


_INSTALL = "apt-get install libibverbs1 librdmacm1 ibverbs-providers"
_FULL_KERNEL = (
    "apt-get install linux-image-amd64   # and reboot into it; on Ubuntu "
    "linux-modules-extra-$(uname -r)"
)


def check_kernel(system: System) -> list[Finding]:
    """Whether the kernel has the user interfaces of verbs and of the connection manager."""
    lacking = [
        module
        for module, present in (("ib_uverbs", system.has_verbs), ("rdma_ucm", system.has_manager))
        if not present
    ]
    if not lacking:
        return [Finding("ok", "kernel", "ib_uverbs and rdma_ucm are loaded")]
    absent = [module for module in lacking if module in system.missing_modules]
    if absent:
        return [
            Finding(
                "error",
                "kernel",
                f"this kernel has no module {' and '.join(absent)}: no RDMA without another kernel "
                "or its modules package; the software device works",
                _on_host(system, _FULL_KERNEL),
            )
        ]
    load = ("modprobe", "-a", *lacking)
    text = f"not loaded: {', '.join(lacking)}"
    return [_mendable(system, "error", "kernel", text, load)]


def _on_host(system: System, command: str) -> str:
    """Return the command; in a container it says where to run it."""
    if not system.container:
        return command
    return f"{command}{'; ' if '   # ' in command else '   # '}on the host"


def _mendable(
    system: System, level: str, subject: str, text: str, *steps: tuple[str, ...]
) -> Finding:
    """Return a finding that `--fix` may mend."""
    command = " && ".join(" ".join(step) for step in steps)
    return Finding(level, subject, text, _on_host(system, command), steps)


def check_devices(system: System) -> list[Finding]:
    """Whether there is an RDMA device, and each can be opened."""
    real = [device for device in system.devices if device.name not in BUILT_IN]
    findings = [
        Finding(
            "error",
            "devices",
            f"{device.name} cannot be opened: {device.error}",
            f"ibv_devinfo -d {device.name}; {_INSTALL}   # does a C program open it? Is its driver "
            "installed?",
        )
        for device in real
        if device.error is not None
    ]
    names = ", ".join(f"{each.name} ({each.kind})" for each in real if each.error is None)
    if names:
        findings.append(Finding("ok", "devices", f"RDMA devices: {names}"))
    if real:
        return findings
    if system.is_modular and "rdma_rxe" in system.missing_modules:
        text = "no RDMA device, and this kernel has no rdma_rxe (soft-RoCE); the software device "
        text += "serves every address"
        return [Finding("error", "devices", text, _on_host(system, _FULL_KERNEL))]
    interface = usual_interface(system.interfaces)
    if interface is None:
        text = "no RDMA device, and no network interface that is up and has an address"
        command = "ip link set eth0 up && ip address add 192.0.2.1/24 dev eth0   # with your names"
        return [Finding("error", "devices", text, command)]
    load = ("modprobe", "-a", "rdma_rxe", "rdma_ucm")
    link = ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", interface.name)
    text = (
        "no RDMA device: the software device serves every address. Soft-RoCE makes a real one on "
        f"the interface {interface.name}"
    )
    if not system.is_modular:
        text += ", if this kernel, which loads no modules, has rdma_rxe built in"
    if not system.has_rdma_tool:
        text += " (the command rdma is in the package iproute2)"
    steps = (load, link) if system.is_modular else (link,)
    return [_mendable(system, "error", "devices", text, *steps)]


def usual_interface(interfaces: tuple[Interface, ...]) -> Interface | None:
    """Return the interface to add a soft-RoCE device to: the first that is up and has an IPv4
    address, and is not the loopback; physical names before those of containers."""
    fit = [
        each
        for each in interfaces
        if each.is_up
        and not each.is_loopback
        and any(ip_address(address.partition("%")[0]).version == 4 for address in each.addresses)
    ]
    fit.sort(key=lambda each: each.name.startswith(("docker", "veth", "br-", "virbr", "cni")))
    return fit[0] if fit else None


def check_nodes(system: System) -> list[Finding]:
    """Whether this process may open the device nodes."""
    findings = []
    missing = [path for path, state in system.nodes if state == "missing"]
    denied = [path for path, state in system.nodes if state == "denied"]
    if missing and system.container:
        findings.append(
            Finding(
                "error",
                "nodes",
                f"the kernel has RDMA devices, but this container has no {', '.join(missing)}",
                nodes_command(system.container),
            )
        )
    elif missing:
        text = f"missing: {', '.join(missing)}; udev makes them"
        findings.append(Finding("error", "nodes", text, "udevadm trigger --action=add"))
    if denied:
        findings.append(
            Finding(
                "error",
                "nodes",
                f"this user may not open {', '.join(denied)}",
                _on_host(system, _UDEV_RULES),
            )
        )
    if system.nodes and not findings:
        findings.append(Finding("ok", "nodes", "the device nodes can be opened"))
    return findings


# A chmod would last until the next start. Mode 0666 is the kernel's own default for these nodes:
# it checks what a program may do with a device.
_UDEV_RULES = (
    r"""printf 'SUBSYSTEM=="infiniband_verbs", MODE="0666"\nKERNEL=="rdma_cm", MODE="0666"\n' """
    "> /etc/udev/rules.d/99-rdma.rules && udevadm control --reload && "
    "udevadm trigger --subsystem-match=infiniband_verbs --subsystem-match=misc"
)


def check_memlock(system: System) -> list[Finding]:
    """Whether the limit of locked memory is enough for registered memory."""
    if system.memlock is None or system.memlock >= _ENOUGH_MEMLOCK:
        return [Finding("ok", "memlock", "the limit of locked memory (ulimit -l) is high enough")]
    size = system.memlock // 1024
    text = f"locked memory is limited to {size} KiB"
    if system.has_ipc_lock:
        return [Finding("note", "memlock", f"{text}, which CAP_IPC_LOCK overrides")]
    command = (
        "echo '* - memlock unlimited' > /etc/security/limits.d/99-rdma.conf   "
        "# then log in again; a service has LimitMEMLOCK=infinity in its unit"
    )
    if system.container:
        command = memlock_command(system.container)
    return [Finding("warning", "memlock", f"{text}: registering more fails (ENOMEM)", command)]


def check_links(system: System) -> list[Finding]:
    """Whether the ports of each device are active, and their interfaces up."""
    findings = []
    for device in _usable(system):
        carries = [_carries(port, system) for port in device.ports]
        level = "warning" if any(carries) else "error"  # one port is enough
        for port, does in zip(device.ports, carries, strict=True):
            interface = _interface_of(port, system)
            name = f"{device.name}: port {port.number}"
            if does:
                findings.append(Finding("ok", "link", f"{name} is ACTIVE"))
            elif interface is not None and not interface.is_up:
                text = f"{name}: its interface {interface.name} is down"
                command = f"ip link set {interface.name} up"
                findings.append(Finding(level, "link", text, command))
            elif device.kind == "infiniband":
                text = f"{name} is {port.state}, not ACTIVE: cable, switch, or no subnet manager"
                command = f"ibstat {device.name}; sminfo"
                findings.append(Finding(level, "link", text, command))
            else:
                text = f"{name} is {port.state}, not ACTIVE: cable or switch port"
                command = f"ethtool {interface.name}" if interface else "rdma link show"
                findings.append(Finding(level, "link", text, command))
    return findings


def check_mtu(system: System) -> list[Finding]:
    """Whether the interface's MTU lets a RoCE device use large packets."""
    findings = []
    for name, port, interface in _roce_ports(system):
        if interface.mtu < _ROCE_HEADERS:
            level = "warning"
            text = "is less than 1024 bytes of data need"
        elif port.active_mtu < 4096:
            level = "note"
            text = "9000 would give 4096, if the whole path has it"
        else:
            level, text = "ok", "that is the most"
        shown = f"{name} sends {port.active_mtu} bytes in a packet: the MTU of "
        shown += f"{interface.name} is {interface.mtu}; {text}"
        command = "" if level == "ok" else f"ip link set {interface.name} mtu 9000"
        findings.append(Finding(level, "mtu", shown, command))
    return findings


def check_gids(system: System) -> list[Finding]:
    """Whether a RoCE device has a GID for each address of its interface."""
    findings = []
    for name, port, interface in _roce_ports(system):
        addresses = [each.partition("%")[0] for each in interface.addresses]
        present = [each.address for each in port.gids if each.type == "ROCE_V2"]
        lacking = [each for each in addresses if each not in present]
        if not addresses:
            text = f"{name}: its interface {interface.name} has no IP address"
            command = f"ip address add 192.0.2.1/24 dev {interface.name}   # with your address"
            findings.append(Finding("error", "gids", text, command))
        elif lacking:
            text = f"{name} has no RoCE v2 GID for {', '.join(lacking)} of {interface.name}"
            command = f"ip link set {interface.name} down && ip link set {interface.name} up"
            command += "   # the kernel makes the GIDs again; connections end"
            findings.append(Finding("warning", "gids", text, command))
        else:
            text = f"{name} has a RoCE v2 GID for each address: {', '.join(addresses)}"
            findings.append(Finding("ok", "gids", text))
    return findings


def check_namespaces(system: System) -> list[Finding]:
    """Whether network namespaces or a container hide devices."""
    findings = []
    if system.container:
        findings.append(Finding("note", "container", f"this is a container ({system.container})"))
    if system.has_shared_namespaces is False:
        text = "each RDMA device is visible in one network namespace only (`rdma system show`)"
        command = "rdma dev set DEVICE netns NAMESPACE"
        findings.append(Finding("note", "namespaces", text, command))
    for device in _usable(system):
        if device.kind != "infiniband" and not any(
            _interface_of(port, system) for port in device.ports
        ):
            text = f"{device.name}: its network interface has no address here, or is in another "
            text += "network namespace"
            command = "rdma link show; ip address show"
            findings.append(Finding("warning", "namespaces", text, command))
    return findings


def check_silence(system: System) -> list[Finding]:
    """Whether a dead peer of an iWARP device can be detected."""
    iwarp = [device.name for device in _usable(system) if device.kind == "iwarp"]
    if not iwarp or "tcp_diag" in system.loaded_modules:
        return []
    load = ("modprobe", "tcp_diag")
    text = f"{', '.join(iwarp)}: without tcp_diag, a dead peer is noticed by TCP's own limit only"
    if "tcp_diag" in system.missing_modules:
        return [Finding("note", "tcp_diag", text)]
    return [_mendable(system, "warning", "tcp_diag", text, load)]


def check_loopback(system: System) -> list[Finding]:
    """Whether each device carried a message to itself, if that was tested."""
    findings = []
    for device in system.devices:
        if device.loopback is None or device.error is not None:
            continue
        if device.loopback == "ok":
            text = f"{device.name}: connected to itself, a message and a READ arrived"
            findings.append(Finding("ok", "loopback", text))
        else:
            text = f"{device.name}: {device.loopback}"
            command = f"ibv_rc_pingpong -d {device.name} -g 0 & sleep 1; "
            command += (
                f"ibv_rc_pingpong -d {device.name} -g 0 localhost   # does it for C programs?"
            )
            findings.append(Finding("error", "loopback", text, command))
    return findings


def check_environment(system: System) -> list[Finding]:
    """Whether the variables that choose devices have possible values."""
    findings = []
    if system.wanted not in ("", "auto", *CLASSES, *(each.name for each in system.devices)):
        text = f"AIORDMA_DEVICE={system.wanted}: there is no such device: no connection works"
        findings.append(Finding("error", "environment", text, "unset AIORDMA_DEVICE"))
    return findings


def check_addresses(system: System) -> list[Finding]:
    """Which device and GID each address would get, and why."""
    findings = []
    for use in system.uses:
        if use.device is None:
            text = f"{use.address} cannot be reached: {use.why}"
            findings.append(Finding("error", "address", text, f"ping -c 1 {use.address}"))
            continue
        text = f"{use.address} is served {'on' if use.is_local else 'through'} {use.device}"
        text += f": {_reason(use, system)}"
        refused = use.device == SOFTWARE and system.wanted in CLASSES[:-1]
        if refused:
            text += f" (AIORDMA_DEVICE={system.wanted} refuses it)"
        # A peer that was asked for by name is an error; the machine's own addresses are a list.
        if use.device != SOFTWARE:
            findings.append(Finding("ok", "address", text))
        elif refused or not use.is_local:
            command = f"ip route get {use.address}; rdma link show   # a device on that interface?"
            findings.append(Finding("warning", "address", text, command))
        else:
            findings.append(Finding("note", "address", text))
    return findings


def _reason(use: AddressUse, system: System) -> str:
    """Return why an address gets its device, and the GID that the connection manager takes."""
    if use.why:
        return use.why
    local = use.address if use.is_local else use.source
    interface = next((each.name for each in system.interfaces if local in each.addresses), "")
    reasons = []
    if not use.is_local:
        reasons.append(f"the route begins at {local}")
    if interface:
        reasons.append(f"{'' if use.is_local else 'which is '}an address of {interface}")
    for device in system.devices:
        if device.name == use.device:
            reasons.append(_gid_text(device, local.partition("%")[0], interface))
    return ", ".join(reasons)


def _gid_text(device: DeviceState, address: str, interface: str) -> str:
    if device.kind == "iwarp":
        return "no GID: iWARP uses IP addresses"
    found = _gid_of(device, address, interface)
    if found is None:
        return "and there is no GID for it"
    port, gid = found
    return f"GID {gid.index} of port {port.number}, {gid.type}"


def _gid_of(device: DeviceState, address: str, interface: str) -> tuple[PortState, GidState] | None:
    """Return the GID that rdma_cm takes for a local address: of the entries with that address the
    one of RoCE v2, its default; on InfiniBand the first of the interface's port."""
    for port in device.ports:
        if device.kind == "infiniband":
            if port.gids and port.interface in (interface, None):
                return port, port.gids[0]
            continue
        entries = [each for each in port.gids if each.address == address]
        entries.sort(key=lambda each: each.type != "ROCE_V2")
        if entries:
            return port, entries[0]
    return None


def _usable(system: System) -> list[DeviceState]:
    return [each for each in system.devices if each.name not in BUILT_IN and each.error is None]


def _interface_of(port: PortState, system: System) -> Interface | None:
    return next((each for each in system.interfaces if each.name == port.interface), None)


def _carries(port: PortState, system: System) -> bool:
    interface = _interface_of(port, system)
    return port.state == "ACTIVE" and (interface is None or interface.is_up)


def _roce_ports(system: System) -> Iterator[tuple[str, PortState, Interface]]:
    """Yield each port of a RoCE device that has an interface here, with its name for a text."""
    for device in _usable(system):
        for port in device.ports if device.kind == "roce" else ():
            interface = _interface_of(port, system)
            if interface is not None:
                name = device.name if len(device.ports) == 1 else f"{device.name}/{port.number}"
                yield name, port, interface


CHECKS: tuple[Callable[[System], list[Finding]], ...] = (
    check_libraries,
    check_kernel,
    check_devices,
    check_nodes,
    check_memlock,
    check_links,
    check_mtu,
    check_gids,
    check_namespaces,
    check_silence,
    check_loopback,
    check_environment,
    check_addresses,
)
