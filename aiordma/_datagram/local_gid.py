"""Finds the entry of a port's GID table for a local IP address, or for an index."""

from ipaddress import ip_address

from aiordma._base.enums import GidType
from aiordma._base.errors import VerbsCallError
from aiordma.verbs import Context


def find_gid(context: Context, port: int, host: str) -> tuple[int, bytes]:
    """Return (index, gid) of a numeric address.

    On RoCE an address has an entry for each version. Version 2 is preferred, because it is
    routable. On InfiniBand a GID is not an IP address, and the port's first entry is returned.

    This queries the kernel: run it in a thread.
    """
    packed = ip_address(host).packed
    its = [
        entry
        for entry in context.gid_table()
        if entry.port == port and ip_address(entry.address).packed == packed
    ]
    if not its:
        return 0, context.query_gid(port, 0)
    best = max(its, key=lambda entry: entry.type == GidType.ROCE_V2)
    return best.index, best.gid


def gid_of(context: Context, port: int, gid_index: int) -> bytes:
    """Return the GID at an index. This queries the kernel: run it in a thread.

    Raises:
        ValueError: there is no GID at the index; the message lists the port's GIDs.
    """
    try:
        return context.query_gid_entry(port, gid_index).gid
    except VerbsCallError:
        entries = [entry for entry in context.gid_table() if entry.port == port]
        known = ", ".join(f"{entry.index} ({entry.address})" for entry in entries)
        raise ValueError(
            f"gid_index={gid_index}: port {port} of {context.device_name} has no GID there; it has "
            f"{known or 'none'}"
        ) from None
