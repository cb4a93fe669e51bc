"""Hints for failed calls into C: the limit to raise, the command to run."""

import errno
import resource
import socket
from collections.abc import Callable


def _memory_limit() -> str:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return (
            "RLIMIT_MEMLOCK is unlimited, so either memory is short or the device is at one of "
            "its own limits (see `ibv_devinfo -v`)"
        )
    return (
        f"Registered memory and queues count against RLIMIT_MEMLOCK, now {soft // 1024} KiB: raise "
        "it with `ulimit -l unlimited`, or memlock in limits.conf, or LimitMEMLOCK= in the unit"
    )


def _no_device() -> str:
    return (
        "No RDMA device is usable here. See `rdma link`; soft-RoCE on a plain network interface: "
        "`modprobe -a rdma_rxe rdma_ucm && rdma link add rxe0 type rxe netdev eth0`; "
        'device="software" is the built-in device, which needs none of this'
    )


def _not_reached() -> str:
    return (
        "No RDMA device reaches this address: `rdma link` lists devices and their interfaces; "
        'device="software" reaches every address'
    )


def _not_mapped() -> str:
    return "Part of the range is not mapped, or is read-only although write access is required"


def _no_thread() -> str:
    processes, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "unlimited" if processes == resource.RLIM_INFINITY else str(processes)
    return (
        "No worker thread could be started: the process is at a limit of threads (`ulimit -u`, now "
        f"{limit}, or pids.max of its cgroup) or of memory (`ulimit -v`). Raise the limit, or try "
        "again with fewer threads"
    )


def _descriptor_limit() -> str:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"This process has no file descriptors left (RLIMIT_NOFILE is {soft}): raise the limit "
        "with `ulimit -n`, nofile in limits.conf, LimitNOFILE= in the unit, or resource.setrlimit"
    )


def _system_descriptor_limit() -> str:
    return (
        "This machine has no file descriptors left (/proc/sys/fs/file-nr): raise the limit with "
        "`sysctl fs.file-max`"
    )


_DESCRIPTORS: dict[int, Callable[[], str]] = {
    errno.EMFILE: _descriptor_limit,
    errno.ENFILE: _system_descriptor_limit,
}
"""Hints for an errno of any call."""

_HINTS: dict[tuple[str, int], Callable[[], str]] = {
    ("ibv_reg_mr", errno.ENOMEM): _memory_limit,
    ("ibv_reg_mr_iova", errno.ENOMEM): _memory_limit,
    ("ibv_rereg_mr", errno.ENOMEM): _memory_limit,
    ("ibv_resize_cq", errno.ENOMEM): _memory_limit,
    ("ibv_create_cq", errno.ENOMEM): _memory_limit,
    ("ibv_create_qp", errno.ENOMEM): _memory_limit,
    ("rdma_create_qp", errno.ENOMEM): _memory_limit,
    ("ibv_reg_mr", errno.EFAULT): _not_mapped,
    ("ibv_reg_mr_iova", errno.EFAULT): _not_mapped,
    ("ibv_rereg_mr", errno.EFAULT): _not_mapped,
    ("ibv_open_device", errno.EACCES): lambda: "Allow this user to open /dev/infiniband/uverbs*",
    ("rdma_create_event_channel", errno.ENODEV): _no_device,
    ("rdma_create_event_channel", errno.ENOENT): _no_device,
    ("rdma_create_event_channel", errno.EACCES): lambda: (
        "Allow this user to open /dev/infiniband/rdma_cm"
    ),
    ("rdma_bind_addr", errno.EADDRINUSE): lambda: "Another listener has this port",
    ("rdma_listen", errno.EADDRINUSE): lambda: "Another listener has this port",
    ("rdma_resolve_addr", errno.ENODEV): _not_reached,
    ("rdma_resolve_addr", errno.EADDRINUSE): lambda: (
        "Another identifier has the source port. Identifiers share a port if all of them have "
        "reuse_address=True"
    ),
    ("rdma_resolve_route", errno.ENODEV): _not_reached,
    ("pthread_create", errno.EAGAIN): _no_thread,
    ("rdma_resolve_addr", errno.EINVAL): lambda: (
        "The address does not suit the RDMA device that has it, or the source address: a loopback "
        'address is one that most RDMA devices cannot use. device="software" can'
    ),
}


def cannot_bind(host: str, error: int) -> str:
    """Return why a bind to a numeric address failed with ENODEV or EADDRNOTAVAIL, and what to do.
    (For an address of another machine, the kernel may return either.)"""
    if not is_own_address(host):
        return f"{host} is no address of this machine: `ip address` lists those"
    if error == errno.EADDRNOTAVAIL:
        return (
            f"The port is taken at one of the addresses that {host} stands for (all of IPv6 "
            "includes IPv4, unless ipv6_only)"
        )
    return (
        f"No RDMA device has the address {host}: `rdma link` lists devices and their interfaces; "
        'device="software" has every address of this machine'
    )


def is_own_address(host: str) -> bool:
    """Return whether a numeric address is one of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL)
    return True


def hint(call: str, error: int) -> str | None:
    """Return the hint for a call that failed with this errno; None if there is none."""
    make = _HINTS.get((call, error))
    return make() if make else descriptors_hint(error)


def descriptors_hint(error: int) -> str | None:
    """Return the limit of file descriptors that caused an errno, and how to raise it; None for
    every other errno."""
    make = _DESCRIPTORS.get(error)
    return make() if make else None
