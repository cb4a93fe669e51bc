"""What stands in the 40 bytes before a datagram's payload: the sender and whom it was sent to.

InfiniBand and RoCE over IPv6 write a whole header there, RoCE v2 over IPv4 an IPv4 header into the
last 20 bytes, with the first 20 undefined (man ibv_create_ah_from_wc).
"""

from aiordma.verbs import GRH_BYTES

__all__ = ("is_multicast", "source_and_destination")

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
_FOLLOWED_BY = (17, 27)
"""What comes after such a header: UDP on RoCE v2, InfiniBand's own transport elsewhere."""


def source_and_destination(grh: bytes) -> tuple[bytes, bytes]:
    """Return the sender's GID and the GID that it sent to; IPv4 addresses as IPv4-mapped GIDs.

    Raises:
        ValueError: not 40 bytes.
    """
    if len(grh) != GRH_BYTES:
        raise ValueError(f"a GRH has {GRH_BYTES} bytes, and this has {len(grh)}")
    if grh[0] >> 4 == 6 and grh[6] in _FOLLOWED_BY and not _is_ipv4(grh[20:]):
        return grh[8:24], grh[24:40]
    return _IPV4_MAPPED + grh[32:36], _IPV4_MAPPED + grh[36:40]


def _is_ipv4(header: bytes) -> bool:
    # What lies before it may look like anything: old bytes of the buffer.
    if header[0] != 0x45:
        return False
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, 20, 2))
    return (total & 0xFFFF) + (total >> 16) == 0xFFFF


def is_multicast(gid: bytes) -> bool:
    """Whether a GID names a group."""
    return gid[0] == 0xFF or (gid.startswith(_IPV4_MAPPED) and gid[12] >> 4 == 0xE)
