"""Reads the source and the destination of a datagram from the 40 bytes before its payload.

InfiniBand, and RoCE over IPv6, write a header of 40 bytes there. RoCE v2 over IPv4 writes an IPv4
header to the last 20 bytes, and the first 20 are undefined (man ibv_create_ah_from_wc).
"""

from aiordma.verbs import GRH_BYTES

__all__ = ("is_multicast", "source_and_destination")

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_FOLLOWED_BY = (17, 27)
"""The next header of a GRH: UDP on RoCE v2, otherwise InfiniBand's own transport."""


def source_and_destination(grh: bytes) -> tuple[bytes, bytes]:
    """Return the sender's GID and the destination GID. IPv4 addresses are IPv4-mapped GIDs.

    Raises:
        ValueError: the header does not have 40 bytes.
    """
    if len(grh) != GRH_BYTES:
        raise ValueError(f"a GRH has {GRH_BYTES} bytes, and this has {len(grh)}")
    if grh[0] >> 4 == 6 and grh[6] in _FOLLOWED_BY and not _is_ipv4(grh[20:]):
        return grh[8:24], grh[24:40]
    return _IPV4_MAPPED + grh[32:36], _IPV4_MAPPED + grh[36:40]


def _is_ipv4(header: bytes) -> bool:
    # The 20 bytes before an IPv4 header are old bytes of the buffer, and can look like a GRH. So
    # only the IPv4 header itself is checked, with its checksum.
    if header[0] != 0x45:
        return False
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, 20, 2))
    return (total & 0xFFFF) + (total >> 16) == 0xFFFF


def is_multicast(gid: bytes) -> bool:
    """Return whether a GID is a multicast address."""
    return gid[0] == 0xFF or (gid.startswith(_IPV4_MAPPED) and gid[12] >> 4 == 0xE)
