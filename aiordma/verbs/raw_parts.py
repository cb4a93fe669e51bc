"""Parts of raw work requests: registered memory, plain sges, and buffers of inline requests."""

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from aiordma._base.arguments import Buffer, whole_number, wrong_type
from aiordma.verbs.buffers import address_of, flat_view
from aiordma.verbs.memory import MemoryRegion, MemorySlice

__all__ = ("RawPart", "Sge", "packed_parts")

_SGE = struct.Struct("=QII")
"""The layout of struct ibv_sge."""


class Sge(NamedTuple):
    """A scatter/gather element as C has it (`struct ibv_sge`): memory that the program itself
    registered, or that is no Python buffer.

    Nothing keeps the memory alive or checks the bounds: the program does.
    """

    address: int
    length: int
    lkey: int


RawPart: TypeAlias = MemorySlice | MemoryRegion | Sge | Buffer
"""Local memory of a raw work request. A buffer that is not registered needs SendFlag.INLINE."""

_EXPECTED = "slices of registered memory, region[:], regions, or Sge"


def packed_parts(
    parts: Sequence[RawPart], call: str, *, inline: bool = False
) -> tuple[bytes, int, list[memoryview]]:
    """Return an array of struct ibv_sge, the bytes of all parts together, and views that keep
    inline buffers in their places: keep them until the request is posted.

    Args:
        parts: the parts.
        call: the function's name, for messages.
        inline: the post copies the bytes, so a part may be any buffer.

    Raises:
        TypeError: a part is none of these, or a buffer without `inline`.
        ValueError: a part is 4 GiB or longer, or not contiguous; or the part of an inline request
            is a dma-buf, which the processor does not access.
        ClosedError, ForkError: a region is closed, or was registered by the parent of this process.
    """
    if isinstance(parts, MemorySlice | MemoryRegion | Sge | bytes | bytearray):
        raise wrong_type(parts, "parts", f"a list of parts: {_EXPECTED}", call)
    sges: list[bytes] = []
    kept: list[memoryview] = []
    total = 0
    for part in parts:
        if isinstance(part, MemorySlice | MemoryRegion):
            sge = _registered(part, call, inline)
        elif isinstance(part, Sge):
            sge = part
        elif inline:
            view = flat_view(part, "parts[{}]", len(sges))
            kept.append(view)
            sge = Sge(address_of(view) if view.nbytes else 0, view.nbytes, 0)
        else:
            expected = f"{_EXPECTED}; a buffer that is not registered needs flags=SendFlag.INLINE"
            raise wrong_type(part, "parts", expected, call)
        address = whole_number(sge.address, "address", 0, 2**64 - 1, call)
        lkey = whole_number(sge.lkey, "lkey", 0, 2**32 - 1, call)
        length = whole_number(sge.length, "length", 0, 2**63, call)
        if length >= 2**32:
            raise ValueError(
                f"{call}(): 4 GiB or more in one part: a work request's part has a 32-bit length"
            )
        total += length
        sges.append(_SGE.pack(address, length, lkey))
    return b"".join(sges), total, kept


def _registered(part: MemorySlice | MemoryRegion, call: str, inline: bool) -> Sge:
    region = part.region if isinstance(part, MemorySlice) else part
    region._require_open()
    if not inline:
        return Sge(part.address, part.length, region.lkey)
    if not region._start:
        raise ValueError(
            f"{call}(): {part!r}: SendFlag.INLINE copies the bytes, and the processor does not "
            "access a dma-buf: post it without INLINE"
        )
    # The post copies from the address in this process, which is not that of a region with an iova.
    return Sge(part.address - region.address + region._start, part.length, region.lkey)
