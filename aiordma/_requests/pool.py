"""Pools of registered blocks, which are leased and returned.

A slab is one registration; a lease is one block of a slab. Block sizes are powers of two, so that a
returned block fits the next lease of its size. Slabs are anonymous mappings, and so page-aligned,
because fork protection works on whole pages (MADV_DONTFORK, man ibv_fork_init).

When the last block of a slab is returned, the slab is freed, except for one slab of each size.
"""

import mmap
from contextlib import suppress

from aiordma.verbs import MemoryRegion, MemorySlice, ProtectionDomain

__all__ = ("BufferPool", "Lease")

SMALLEST = 256
SLAB = 1 << 20


class _Slab:
    """One registration, and its free blocks."""

    __slots__ = ("count", "free", "region", "size")

    def __init__(self, region: MemoryRegion, size: int) -> None:
        self.region: MemoryRegion = region
        self.size: int = size
        self.free: list[MemorySlice] = [
            region[at : at + size] for at in range(0, region.length, size)
        ]
        self.count: int = len(self.free)


class Lease:
    """A registered block, leased until `release`. `memory` has the requested length."""

    __slots__ = ("_block", "_pool", "_slab", "memory")

    def __init__(self, pool: "BufferPool", slab: _Slab, block: MemorySlice, length: int) -> None:
        self._pool = pool
        self._slab: _Slab | None = slab
        self._block = block
        self.memory: MemorySlice = block
        if length != block.length:
            region = block.region
            self.memory = MemorySlice(region, block.address - region.address, length)

    def _hold(self) -> None:
        """Do nothing: a lease holds its block from the start."""

    def release(self) -> None:
        """Return the block. Idempotent. No posted request may still use it."""
        slab = self._slab
        if slab is not None:
            self._slab = None
            self._pool.take_back(slab, self._block)

    _release = release  # Holdable


class BufferPool:
    """A pool of registered blocks in one protection domain. It grows and shrinks by slabs.

    Args:
        domain: the protection domain of the slabs.
        is_pinned: the device pins registered memory. Otherwise, a page of a slab costs no memory
            until it is used.
    """

    def __init__(self, domain: ProtectionDomain, *, is_pinned: bool = True) -> None:
        self._domain = domain
        self._is_pinned = is_pinned
        self._current: dict[int, _Slab] = {}
        """By block size: the slab of the next lease."""
        self._others: dict[int, dict[_Slab, None]] = {}
        """By block size: the other slabs with free blocks."""
        self._slabs: dict[_Slab, None] = {}
        self.leased: int = 0

    @property
    def registered(self) -> int:
        """The number of registered bytes, leased or free."""
        return sum(slab.region.length for slab in self._slabs)

    def lease(self, length: int) -> Lease:
        """Return a block of at least `length` bytes, which may have old contents.

        Raises:
            VerbsCallError: a new slab could not be registered; the message names the limit.
        """
        size = SMALLEST if length <= SMALLEST else 1 << (length - 1).bit_length()
        slab = self._current.get(size)
        if slab is None or not slab.free:
            slab = self._next_slab(size)
        self.leased += 1
        return Lease(self, slab, slab.free.pop(), length)

    def _next_slab(self, size: int) -> _Slab:
        """Make a slab with free blocks the current one of its size."""
        others = self._others.setdefault(size, {})
        if others:
            slab, _ = others.popitem()
        else:
            slab = self._make_slab(size)
        self._current[size] = slab
        return slab

    def _make_slab(self, size: int) -> _Slab:
        memory = mmap.mmap(-1, max(SLAB, size))
        slab = _Slab(MemoryRegion(self._domain, memory), size)
        if not self._is_pinned:
            # The registration allocated every page. Free them; pages locked by mlockall stay.
            with suppress(OSError):
                memory.madvise(mmap.MADV_REMOVE)
        self._slabs[slab] = None
        return slab

    def take_back(self, slab: _Slab, block: MemorySlice) -> None:
        """Take a block back, for `Lease.release`."""
        free = slab.free
        free.append(block)
        self.leased -= 1
        count = len(free)
        if count == 1 or count == slab.count:
            self._has_room(slab)

    def _has_room(self, slab: _Slab) -> None:
        """Note that the slab has its first free block, or only free blocks."""
        size = slab.size
        current, others = self._current[size], self._others[size]
        if slab is current:
            return
        if len(slab.free) < slab.count:
            others[slab] = None
            return
        others.pop(slab, None)
        if current.free:
            del self._slabs[slab]
            # If a request that is completing still holds a block, it frees the slab at its end.
            slab.region._retire()
        else:
            self._current[size] = slab

    def close(self) -> None:
        """Deregister every slab. No posted request may still use a block."""
        self._current.clear()
        self._others.clear()
        while self._slabs:
            slab, _ = self._slabs.popitem()
            slab.region.close()
