"""Finds the entry of a port's GID table for a local IP address, or for an index."""

import ipaddress

from aiordma._base.enums import GidType
from aiordma._base.errors import VerbsCallError
from aiordma._native import ffi
from aiordma.verbs import Context


def find_gid(context: Context, port: int, host: str) -> tuple[int, bytes]:
    """Return (index, gid) of a numeric address.

    On RoCE an address has an entry for each version. Version 2 is preferred, because it is
    routable. On InfiniBand a GID is not an IP address, and the port's first entry is returned.

    Each entry is a query to the kernel: run this in a thread.
    """
    address = ipaddress.ip_address(host)
    wanted = address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed
    found: int | None = None
    raw = ffi.new("struct ibv_gid_entry *")
    size = ffi.sizeof("struct ibv_gid_entry")
    for index in range(context.query_port(port).gid_tbl_len):
        if context.provider.query_gid_ex(context.pointer, port, index, raw, 0, size):
            continue  # an empty entry
        if bytes(raw.gid.raw) == wanted and (found is None or raw.gid_type == GidType.ROCE_V2):
            found = index
            if raw.gid_type == GidType.ROCE_V2:
                break
    if found is None:
        return 0, context.query_gid(port, 0)
    return found, wanted


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
