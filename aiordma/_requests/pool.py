"""Pools of registered blocks, which are leased and returned.

A slab is one registration; a lease is one block of a slab. Block sizes are powers of two, so that a
returned block fits the next lease of its size. Slabs are anonymous mappings, and so page-aligned,
because fork protection works on whole pages (MADV_DONTFORK, man ibv_fork_init).

When the last block of a slab is returned, the slab is freed, except for one slab of each size.
Where the device does not pin memory, KEPT bytes of slabs are kept: to register them takes longer
than to use them.
"""

import mmap
from collections import defaultdict
from contextlib import suppress

from aiordma._native import Lease as Lease
from aiordma._native import Pool, Slab
from aiordma._requests.registrations import RegistrationCache
from aiordma.verbs import ProtectionDomain
from aiordma.verbs.memory import MemoryRegion, retire_all

SMALLEST = 256
SLAB = 1 << 20
KEPT = 1 << 25
"""Bytes of slabs without a lease that are kept, of each block size: as many as both sides of a
connection with 16 receives of 1 MiB need."""


class BufferPool(Pool):
    """A pool of registered blocks in one protection domain. It grows and shrinks by slabs.

    The base class (engine/pool.c) leases and returns blocks. It calls `_next_slab` and `_has_room`
    when the current slab of a size changes.

    Args:
        domain: the protection domain of the slabs.
        is_pinned: the device pins registered memory. Otherwise, a page of a slab costs no memory
            until it is used.
        slab: bytes of a slab, unless one block is larger.
    """

    def __init__(
        self, domain: ProtectionDomain, *, is_pinned: bool = True, slab: int = SLAB
    ) -> None:
        self._domain = domain
        self._is_pinned = is_pinned
        self._slab = slab
        self._others: defaultdict[int, dict[Slab, None]] = defaultdict(dict)
        """By block size: the other slabs with free blocks."""
        self._kept: defaultdict[int, int] = defaultdict(int)
        """By block size: the bytes of those that have only free blocks."""
        self._slabs: dict[Slab, mmap.mmap] = {}
        self.registrations: RegistrationCache = RegistrationCache()
        """The registrations of large plain arrays in the same domain."""

    @property
    def registered(self) -> int:
        """The number of registered bytes, leased or free."""
        return sum(slab.region.length for slab in self._slabs)

    def _next_slab(self, size: int) -> Slab | None:
        """Make a slab with free blocks the current one of its size."""
        others = self._others[size]
        if others:
            slab, _ = others.popitem()
            if slab.free == slab.count:
                self._kept[size] -= slab.region.length
            self._set_current(slab)
            return slab
        memory = mmap.mmap(-1, max(self._slab, size))
        slab = Slab(self.registrations._register(lambda: MemoryRegion(self._domain, memory)), size)
        self._slabs[slab] = memory
        self._free_pages(slab)  # the registration has allocated every page
        self._has_room(slab)  # blocks may have been returned to the current one meanwhile
        return self._get_current(size)

    def _free_pages(self, slab: Slab) -> None:
        """Free the pages of a slab without a lease, where the device does not pin them."""
        if not self._is_pinned:
            with suppress(OSError):  # mlockall has locked them
                self._slabs[slab].madvise(mmap.MADV_REMOVE)

    def _has_room(self, slab: Slab) -> None:
        """Note that a slab has its first free block, or only free blocks. It is not the current
        one of its size."""
        if slab not in self._slabs:
            return  # the pool is closed, and the program kept a block until now
        current, others = self._get_current(slab.size), self._others[slab.size]
        if slab.free < slab.count:
            others[slab] = None
            return
        others.pop(slab, None)
        kept = self._kept[slab.size] + slab.region.length
        if current is None or not current.free:
            self._set_current(slab)
        elif kept <= KEPT and not self._is_pinned:
            self._kept[slab.size] = kept
            others[slab] = None
            self._free_pages(slab)
        else:
            del self._slabs[slab]
            # If a request that is completing still holds a block, it frees the slab at its end.
            self.registrations._deregister([slab.region])

    def close(self) -> None:
        """Deregister every slab, and the registration cache; what is held, at its release. No
        posted request may still use a block of another slab."""
        retire_all(self.detach())

    def detach(self) -> list[MemoryRegion]:
        """Return the regions of every slab and of the registration cache, for the caller to retire,
        also in another thread. No posted request may still use a block. The pool leases no block
        any more."""
        self._forget_current()
        self._others.clear()
        self._kept.clear()
        regions = [slab.region for slab in self._slabs]
        self._slabs.clear()
        self.registrations._detach(regions)
        return regions
