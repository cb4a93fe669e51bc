"""The checks of `aiordma doctor`: pure functions from a System to findings."""

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from aiordma.cli.system import SOFTWARE, DeviceState, Interface, System

__all__ = ("CHECKS", "Finding", "check", "works")

_ENOUGH_MEMLOCK = 64 * 1024 * 1024
_ROCE_HEADERS = 1024 + 58
"""Bytes of an Ethernet frame that carries 1024 bytes with RoCE v2 over IPv4."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Args:
        level: "ok", "note" (nothing to do), "warning" (RDMA works, but not as well as it could) or
            "error" (RDMA does not work).
        subject: the check: "libraries", "memlock", ...
        text: what was found, and what it means.
        command: the command that mends it, for a person to read and run; "": there is none.
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
            "apt-get install libibverbs1 librdmacm1 ibverbs-providers",
        )
    ]


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
            )
        ]
    load = ("modprobe", "-a", *lacking)
    text = f"not loaded: {', '.join(lacking)}"
    return [Finding("error", "kernel", text, " ".join(load), (load,))]


def check_devices(system: System) -> list[Finding]:
    """Whether there is an RDMA device, and each can be opened."""
    real = [device for device in system.devices if device.name != SOFTWARE]
    findings = [
        Finding("error", "devices", f"{device.name} cannot be opened: {device.error}")
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
        return [Finding("error", "devices", text + "serves every address")]
    interface = usual_interface(system.interfaces)
    if interface is None:
        text = "no RDMA device, and no network interface that is up and has an address"
        return [Finding("error", "devices", text)]
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
    command = " && ".join(" ".join(step) for step in steps)
    return [Finding("error", "devices", text, command, steps)]


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
                _CONTAINER_COMMANDS.get(system.container, _CONTAINER_COMMANDS["docker"]),
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
                f"chmod 0666 {' '.join(denied)}",
            )
        )
    if system.nodes and not findings:
        findings.append(Finding("ok", "nodes", "the device nodes can be opened"))
    return findings


_CONTAINER_COMMANDS = {
    "docker": "docker run --device=/dev/infiniband --network=host --ulimit memlock=-1 ...",
    "podman": "podman run --device=/dev/infiniband --network=host --ulimit memlock=-1 ...",
    "kubernetes": "kubectl get nodes -o jsonpath='{.items[*].status.allocatable}'",
}


def check_memlock(system: System) -> list[Finding]:
    """Whether the limit of locked memory is enough for registered memory."""
    if system.memlock is None or system.memlock >= _ENOUGH_MEMLOCK:
        return [Finding("ok", "memlock", "the limit of locked memory (ulimit -l) is high enough")]
    size = system.memlock // 1024
    text = f"locked memory is limited to {size} KiB: registering more fails (ENOMEM)"
    if system.is_root:
        return [Finding("note", "memlock", text + ", except for root")]
    command = "echo '* - memlock unlimited' >> /etc/security/limits.conf   # then log in again"
    return [Finding("warning", "memlock", text, command)]


def check_links(system: System) -> list[Finding]:
    """Whether each device's port is active, and its interface up."""
    findings = []
    for device in _usable(system):
        interface = _interface_of(device, system)
        if interface is not None and not interface.is_up:
            text = f"{device.name}: its interface {interface.name} is down"
            command = f"ip link set {interface.name} up"
            findings.append(Finding("error", "link", text, command))
        elif device.port_state != "ACTIVE":
            cause = "cable, switch port"
            if device.kind == "infiniband":
                cause += ", or no subnet manager (`sminfo`)"
            text = f"{device.name}: port 1 is {device.port_state}, not ACTIVE: {cause}"
            findings.append(Finding("error", "link", text))
        else:
            findings.append(Finding("ok", "link", f"{device.name}: port 1 is ACTIVE"))
    return findings


def check_mtu(system: System) -> list[Finding]:
    """Whether the interface's MTU lets a RoCE device use large packets."""
    findings = []
    for device in _usable(system):
        interface = _interface_of(device, system)
        if device.kind != "roce" or interface is None:
            continue
        if interface.mtu < _ROCE_HEADERS:
            level = "warning"
            text = "is less than 1024 bytes of data need"
        elif device.active_mtu < 4096:
            level = "note"
            text = "9000 would give 4096, if the whole path has it"
        else:
            level, text = "ok", "that is the most"
        shown = f"{device.name} sends {device.active_mtu} bytes in a packet: the MTU of "
        shown += f"{interface.name} is {interface.mtu}; {text}"
        command = "" if level == "ok" else f"ip link set {interface.name} mtu 9000"
        findings.append(Finding(level, "mtu", shown, command))
    return findings


def check_gids(system: System) -> list[Finding]:
    """Whether a RoCE device has a GID for each address of its interface."""
    findings = []
    for device in _usable(system):
        interface = _interface_of(device, system)
        if device.kind != "roce" or interface is None:
            continue
        addresses = [each.partition("%")[0] for each in interface.addresses]
        lacking = [each for each in addresses if each not in device.gid_addresses]
        if not addresses:
            text = f"{device.name}: its interface {interface.name} has no IP address"
            command = f"ip address add 192.0.2.1/24 dev {interface.name}   # with your address"
            findings.append(Finding("error", "gids", text, command))
        elif lacking:
            text = f"{device.name} has no RoCE v2 GID for {', '.join(lacking)} of {interface.name}"
            findings.append(Finding("warning", "gids", text))
        else:
            text = f"{device.name} has a RoCE v2 GID for each address: {', '.join(addresses)}"
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
        if device.kind != "infiniband" and _interface_of(device, system) is None:
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
    return [Finding("warning", "tcp_diag", text, " ".join(load), (load,))]


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
            findings.append(Finding("error", "loopback", text))
    return findings


def check_addresses(system: System) -> list[Finding]:
    """Which device each address would get."""
    findings = []
    for use in system.uses:
        where = "on" if use.is_local else "through"
        if use.device is None:
            text = f"{use.address} cannot be reached: {use.why}"
            findings.append(Finding("error", "address", text, f"ping -c 1 {use.address}"))
            continue
        text = f"{use.address} is served {where} {use.device}"
        text += f": {use.why}" if use.why else ""
        # A peer that was asked for by name is an error; the machine's own addresses are a list.
        level = "note" if use.device == SOFTWARE else "ok"
        if use.device == SOFTWARE and not use.is_local:
            level = "warning"
        if use.device == SOFTWARE and system.required not in ("", "any"):
            level = "warning"
            text += f" (AIORDMA_REQUIRE={system.required} refuses it)"
        findings.append(Finding(level, "address", text))
    return findings


def _usable(system: System) -> list[DeviceState]:
    return [each for each in system.devices if each.name != SOFTWARE and each.error is None]


def _interface_of(device: DeviceState, system: System) -> Interface | None:
    return next((each for each in system.interfaces if each.name == device.interface), None)


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
    check_addresses,
)
