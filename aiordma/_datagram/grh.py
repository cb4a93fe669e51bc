"""Reads the source and the destination of a datagram from the 40 bytes before its payload.

InfiniBand, and RoCE over IPv6, write a header of 40 bytes there. RoCE v2 over IPv4 writes an IPv4
header to the last 20 bytes, and the first 20 are undefined (man ibv_create_ah_from_wc).
"""

from aiordma._native import grh_ends

__all__ = ("is_multicast", "source_and_destination")

_IPV4_MAPPED = bytes(10) + b"\xff\xff"


def source_and_destination(grh: bytes) -> tuple[bytes, bytes]:
    """Return the sender's GID and the destination GID. IPv4 addresses are IPv4-mapped GIDs.

    Raises:
        ValueError: the header does not have 40 bytes.
    """
    return grh_ends(grh)


def is_multicast(gid: bytes) -> bool:
    """Return whether a GID is a multicast address."""
    return gid[0] == 0xFF or (gid.startswith(_IPV4_MAPPED) and gid[12] >> 4 == 0xE)
