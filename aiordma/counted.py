"""What posts have to know of registered memory, and slots: the parts that the C engine looks into.

Each class is the reference of one in C (`_native/engine/memory.c`), which stands in for it.
"""

import struct
from typing import Any

from aiordma._native import in_c

__all__ = ("Part", "RegionBase", "Slots")

_SGE = struct.Struct("=QII")  # struct ibv_sge: address, length, lkey


@in_c("RegionBase")
class RegionBase:
    """Registered memory."""

    domain: Any
    """Where it is registered."""
    users = 0
    """Posted requests that own a part of it."""
    retired = False
    """To be closed by its last user."""
    usable = False
    """It is registered."""
    writable = False
    """The device may write to it."""


@in_c("Part")
class Part:
    """A contiguous part of registered memory."""

    __slots__ = ("address", "length", "region", "sge")

    def __init__(self, region: Any, address: int, length: int, lkey: int) -> None:
        self.region = region
        self.address = address
        self.length = length
        # Made once, posted many times. A length of 2**32 or more has no place in a work request.
        self.sge = _SGE.pack(address, length, lkey) if length < 2**32 else b""


@in_c("Slots")
class Slots:
    """Counts of a work queue's slots."""

    total = 0
    free = 0
    waiting = 0
    """Tasks in line for one."""
