"""Checks of what a connection's device and service support, before C is called.

The caller has checked that the endpoint is usable.
"""

from aiordma._base.enums import AtomicCapability, QueuePairType
from aiordma._base.errors import NotSupportedError
from aiordma._endpoint.endpoint import Endpoint


def _name(endpoint: Endpoint) -> str:
    return endpoint.hub.context.device_name


def require_reads(endpoint: Endpoint, parts: int, what: str = "READ") -> None:
    """Check that READs into so many parts, and atomics, can be posted.

    Raises:
        NotSupportedError: the device or the service does not support them, or the two sides agreed
            on none.
    """
    if endpoint.pair.service is not QueuePairType.RC:
        raise NotSupportedError(f"{what}: {endpoint.pair.service.name} queue pairs have none")
    most = endpoint.hub.attributes.max_sge_rd
    if parts > most:
        raise NotSupportedError(
            f"{what} into {parts} parts: {_name(endpoint)} scatters one over at most {most} "
            "(max_sge_rd)"
        )
    # Some iWARP devices do not report the agreed depth (max_rd_atomic); they refuse the post.
    agreed = endpoint.pair.max_read_depth
    if endpoint.hub.is_iwarp:
        asked = endpoint.options.initiator_depth
        agreed = min(asked, agreed or asked)
    if not agreed:
        raise NotSupportedError(
            f"{what}: the two sides agreed on no outstanding READs (our initiator_depth, the "
            "peer's responder_resources)"
        )
    # From now on, the port posts READs, after it has checked only the number of parts. If requests
    # after a READ can complete before it, a chain needs another check each time.
    endpoint.work.port.can_read = endpoint.hub.keeps_order


def require_atomics(endpoint: Endpoint) -> None:
    """Check that atomics can be posted. Raises the errors of `require_reads`."""
    if endpoint.hub.attributes.atomic_cap is AtomicCapability.NONE:
        raise NotSupportedError(f"atomics: {_name(endpoint)} has none (atomic_cap)")
    require_reads(endpoint, 1, "atomics")
    endpoint.work.port.can_atomics = True  # from now on, the port posts atomics without this check


def has_immediate(endpoint: Endpoint) -> bool:
    """Whether aiordma posts immediate data with SEND and WRITE.

    No attribute of a device reports it. On iWARP, RFC 7306 defines both atomics and immediate data,
    and devices report the atomics (atomic_cap), which stand for both here. A device can have
    immediate data without atomics: libcxgb4 posts WRITE_WITH_IMM. We have not tested one.
    """
    hub = endpoint.hub
    return not hub.is_iwarp or hub.attributes.atomic_cap is not AtomicCapability.NONE


def require_immediate(endpoint: Endpoint) -> None:
    """Check that SEND and WRITE can carry immediate data.

    Raises:
        NotSupportedError: the device is not known to support it (`has_immediate`).
    """
    if not has_immediate(endpoint):
        raise NotSupportedError(
            f"immediate data: {_name(endpoint)} is an iWARP device without atomics (atomic_cap). "
            "aiordma posts immediate data on iWARP only with atomics: RFC 7306 defines both"
        )
    endpoint.work.port.can_immediate = True  # as above


def require_windows(endpoint: Endpoint) -> None:
    """Check that memory windows can be bound.

    Raises:
        NotSupportedError: the device has no memory windows, or the service is not RC. (The verbs
            also permit UC; aiordma does not.)
    """
    if not endpoint.hub.attributes.max_mw:
        raise NotSupportedError(f"memory windows: {_name(endpoint)} has none (max_mw)")
    if endpoint.pair.service is not QueuePairType.RC:
        raise NotSupportedError(
            f"memory windows: aiordma binds them on RC queue pairs only, not on "
            f"{endpoint.pair.service.name}"
        )
    endpoint.work.port.can_bind = True  # as above


def require_invalidate(endpoint: Endpoint) -> None:
    """Check that a message can invalidate a memory window of the peer.

    The window is the peer's. No attribute reports whether this side's device can send such a
    message; that it has memory windows itself (max_mw) stands for it.

    Raises:
        NotSupportedError: the device has no memory windows, or the service is not RC. (The verbs
            also permit UC; aiordma does not.)
    """
    if not endpoint.hub.attributes.max_mw:
        raise NotSupportedError(
            f"SEND with invalidate: {_name(endpoint)} has no memory windows (max_mw), and aiordma "
            "posts it only on devices that have them"
        )
    if endpoint.pair.service is not QueuePairType.RC:
        raise NotSupportedError(
            f"SEND with invalidate: aiordma posts it on RC queue pairs only, not on "
            f"{endpoint.pair.service.name}"
        )
    endpoint.work.port.can_invalidate = True  # as above
