"""The sizes of a queue pair, from the options of its connection and the limits of its device
(pure)."""

from aiordma._base.arguments import within_device
from aiordma._base.connection_parameters import DEVICE_MAXIMUM
from aiordma._base.options import ConnectionOptions
from aiordma.verbs import Capacity, Context, DeviceAttributes

__all__ = ("capacity_for", "check_depths", "probe_entries")


def check_depths(options: ConnectionOptions, limits: DeviceAttributes, device: Context) -> None:
    """Check the options for outstanding READs against the device's limits.

    Raises:
        ValueError: an option exceeds the device's limit; the message has both.
    """
    for name, limit in (
        ("initiator_depth", limits.max_qp_init_rd_atom),
        ("responder_resources", limits.max_qp_rd_atom),
    ):
        value = getattr(options, name)
        if value != DEVICE_MAXIMUM:
            within_device(value, name, 0, limit, device.device_name)


def probe_entries(options: ConnectionOptions, limits: DeviceAttributes, entries: int) -> int:
    """Return the number of entries of the send queue beyond max_send_wr, for the probe of a
    connection that sends one: 1 if the device has space for it. `entries` are those of the
    completion queue without it."""
    has_space = options.max_send_wr < limits.max_qp_wr and (
        options.cqe is None or entries <= options.cqe < limits.max_cqe
    )
    return int(has_space)


def capacity_for(
    options: ConnectionOptions,
    max_sge: int,
    *,
    probes: int,
    header_parts: int,
    is_shared: bool,
) -> Capacity:
    """Return the capacity to create a queue pair with.

    Args:
        options: the connection's.
        max_sge: the device's limit of parts.
        probes: entries of the send queue for the probe.
        header_parts: parts of a receive in addition to those of the caller.
        is_shared: whether its receives are those of a shared receive queue.
    """
    return Capacity(
        options.max_send_wr + probes,
        0 if is_shared else options.receive_queue,
        min(options.max_send_sge, max_sge),
        min(options.max_recv_sge + header_parts, max_sge),
        options.max_inline_data,
    )
