"""What a connection's device and service can do, asked before C is: no half-posted surprises.

Of an endpoint that is usable: whoever asks has made sure of that.
"""

from aiordma._base.enums import AtomicCapability, QueuePairType
from aiordma._base.errors import NotSupportedError
from aiordma._endpoint.endpoint import Endpoint

__all__ = (
    "require_atomics",
    "require_immediate",
    "require_invalidate",
    "require_reads",
    "require_windows",
)


def _name(endpoint: Endpoint) -> str:
    return endpoint.hub.context.device_name


def require_reads(endpoint: Endpoint, parts: int, what: str = "READ") -> None:
    """Do nothing where READs into so many parts, and atomics, may be posted.

    Raises:
        NotSupportedError: not with this device, this service, or what the two sides agreed on.
    """
    if endpoint.service is not QueuePairType.RC:
        raise NotSupportedError(f"{what}: {endpoint.service.name} queue pairs have none")
    most = endpoint.hub.attributes.max_sge_rd
    if parts > most:
        raise NotSupportedError(
            f"{what} into {parts} parts: {_name(endpoint)} scatters one over at most {most} "
            "(max_sge_rd)"
        )
    # Not every iWARP device tells what the peer agreed to (max_rd_atomic); it refuses the post.
    agreed = endpoint.max_read_depth
    if endpoint.hub.is_iwarp:
        asked = endpoint.options.initiator_depth
        agreed = min(asked, agreed or asked)
    if not agreed:
        raise NotSupportedError(
            f"{what}: the two sides agreed on no outstanding READs (our initiator_depth, the "
            "peer's responder_resources)"
        )
    # From now on without asking; where a READ's end may come late, a chain has to ask each time.
    endpoint.port.can_read = endpoint.hub.keeps_order


def require_atomics(endpoint: Endpoint) -> None:
    """Do nothing where atomics may be posted. Raises as `require_reads`."""
    if endpoint.hub.attributes.atomic_cap is AtomicCapability.NONE:
        raise NotSupportedError(f"atomics: {_name(endpoint)} has none (atomic_cap)")
    require_reads(endpoint, 1, "atomics")


def require_immediate(endpoint: Endpoint) -> None:
    """Do nothing where SEND and WRITE can carry immediate data.

    Raises:
        NotSupportedError: the device speaks iWARP without RFC 7306, which brought it both atomics
            and immediate data; devices tell of the former only (atomic_cap).
    """
    hub = endpoint.hub
    if hub.is_iwarp and hub.attributes.atomic_cap is AtomicCapability.NONE:
        raise NotSupportedError(
            f"immediate data: {_name(endpoint)} is an iWARP device, and has none (RFC 7306)"
        )


def require_windows(endpoint: Endpoint) -> None:
    """Do nothing where memory windows can be bound.

    Raises:
        NotSupportedError: the device has none, or not for this service.
    """
    if not endpoint.hub.attributes.max_mw:
        raise NotSupportedError(f"memory windows: {_name(endpoint)} has none (max_mw)")
    if endpoint.service is not QueuePairType.RC:
        raise NotSupportedError(f"memory windows: {endpoint.service.name} queue pairs have none")


def require_invalidate(endpoint: Endpoint) -> None:
    """Do nothing where a message may end what a window of the peer's permits.

    Raises:
        NotSupportedError: the device has no windows, or not for this service.
    """
    if not endpoint.hub.attributes.max_mw:
        raise NotSupportedError(
            f"SEND with invalidate: {_name(endpoint)} has no memory windows (max_mw)"
        )
    if endpoint.service is not QueuePairType.RC:
        raise NotSupportedError(f"SEND with invalidate: {endpoint.service.name} has none")
