"""Registered buffers, leased and returned.

One slab is one registration; a lease is a block of it. Blocks come in powers of two, so that a
returned block fits the next lease of its class. Slabs are anonymous mappings: page-aligned, which
is the unit in which fork protection works (MADV_DONTFORK, man ibv_fork_init).
"""

import mmap

from aiordma.verbs import MemoryRegion, MemorySlice, ProtectionDomain

__all__ = ("BufferPool", "Lease")

SMALLEST = 256
SLAB = 1 << 20


class Lease:
    """A registered block that is yours until `release`. `memory` is as long as was asked for."""

    __slots__ = ("_block", "_pool", "_released", "_size", "memory")

    def __init__(self, pool: "BufferPool", size: int, block: MemorySlice, length: int) -> None:
        self._pool = pool
        self._size = size
        self._block = block
        self._released = False
        self.memory = block if length == block.length else block[:length]

    def hold(self) -> None:
        """A lease is held from the start."""

    def release(self) -> None:
        """Return the block, once: twice does nothing more. Only when no posted request owns it."""
        if not self._released:
            self._released = True
            self._pool.take_back(self._size, self._block)


class BufferPool:
    """Blocks of registered memory in one protection domain. Grows; gives back all at close."""

    def __init__(self, domain: ProtectionDomain) -> None:
        self._domain = domain
        self._free: dict[int, list[MemorySlice]] = {}
        self._slabs: list[MemoryRegion] = []
        self.leased = 0

    def lease(self, length: int) -> Lease:
        """Return a block of at least `length` bytes; it may hold old bytes.

        Raises:
            VerbsCallError: a new slab could not be registered; the message names the limit.
        """
        size = max(SMALLEST, 1 << max(length - 1, 0).bit_length())
        blocks = self._free.setdefault(size, [])
        if not blocks:
            slab = MemoryRegion(self._domain, mmap.mmap(-1, max(SLAB, size)))
            self._slabs.append(slab)
            blocks += [slab[at : at + size] for at in range(0, slab.length, size)]
        self.leased += 1
        return Lease(self, size, blocks.pop(), length)

    def take_back(self, size: int, block: MemorySlice) -> None:
        """For Lease.release."""
        self._free.setdefault(size, []).append(block)
        self.leased -= 1

    def close(self) -> None:
        """Deregister every slab. No block may be owned by the device any more."""
        self._free.clear()
        while self._slabs:
            self._slabs.pop().close()
