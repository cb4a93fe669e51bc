"""What to do about a call that C refused: which limit, which command (pure)."""

import errno
import resource
from collections.abc import Callable

__all__ = ("hint",)


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
    return "Part of the range is not mapped, or is read-only while write access was asked for"


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
    ("rdma_bind_addr", errno.ENODEV): lambda: (
        "No RDMA device has this address: `rdma link` lists devices and their interfaces; "
        'device="software" has every address of this machine'
    ),
    ("rdma_bind_addr", errno.EADDRNOTAVAIL): lambda: (
        "No interface of this machine has this address; or the port is taken at one of the "
        "addresses that it stands for (all of IPv6 includes IPv4, unless ipv6_only)"
    ),
    ("rdma_bind_addr", errno.EADDRINUSE): lambda: "Another listener has this port",
    ("rdma_listen", errno.EADDRINUSE): lambda: "Another listener has this port",
    ("rdma_resolve_addr", errno.ENODEV): _not_reached,
    ("rdma_resolve_addr", errno.EADDRINUSE): lambda: (
        "Another has the source port: where all of them say reuse_address=True, they share it"
    ),
    ("rdma_resolve_route", errno.ENODEV): _not_reached,
    ("rdma_resolve_addr", errno.EINVAL): lambda: (
        "The address does not suit the RDMA device that has it, or the source address: a loopback "
        'address is one that most RDMA devices cannot use. device="software" can'
    ),
}


def hint(call: str, error: int) -> str | None:
    """Return what to do about a call that C refused with this errno, if anything is known."""
    make = _HINTS.get((call, error))
    return make() if make else None
