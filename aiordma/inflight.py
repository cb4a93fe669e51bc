"""The table of posted work requests: the wr_id is a slot with a generation.

wr_id = generation << 32 | slot. The entry owns whatever the device may touch until its completion
takes it out of the table, and nobody else frees that. The generation makes a late completion of a
reused slot recognisable, so that it is dropped instead of resolving a stranger's request.
"""

from typing import Generic, TypeVar

from aiordma._native import in_c

__all__ = ("InFlightTable",)

Entry = TypeVar("Entry")

SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATION_MASK = (1 << (64 - SLOT_BITS)) - 1


@in_c("InFlightTable")
class InFlightTable(Generic[Entry]):
    """Slots of live entries. All operations take constant time; it grows by need."""

    __slots__ = ("_entries", "_free", "_generations", "_live")

    def __init__(self) -> None:
        self._entries: list[Entry | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._live = 0

    def __len__(self) -> int:
        """Return the number of live entries."""
        return self._live

    @property
    def slots(self) -> int:
        """How many it ever needed at once."""
        return len(self._entries)

    def add(self, entry: Entry) -> int:
        """Keep the entry, and return the wr_id that finds it."""
        if self._free:
            slot = self._free.pop()
            self._entries[slot] = entry
        else:
            slot = len(self._entries)
            self._entries.append(entry)
            self._generations.append(1)
        self._live += 1
        return self._generations[slot] << SLOT_BITS | slot

    def take(self, wr_id: int) -> Entry | None:
        """Remove and return the entry of a wr_id; None if it is not, or no longer, in flight."""
        slot = wr_id & SLOT_MASK
        if slot >= len(self._entries) or self._generations[slot] != wr_id >> SLOT_BITS:
            return None
        entry = self._entries[slot]
        if entry is None:
            return None
        self._entries[slot] = None
        # Generation 0 is never handed out, so that a zeroed wr_id finds nothing.
        self._generations[slot] = self._generations[slot] % GENERATION_MASK + 1
        self._free.append(slot)
        self._live -= 1
        return entry

    def age(self, slot: int, generation: int) -> bool:
        """Move a free slot on to a generation, as if it had been used so often, and return whether
        it was free. For tests of what comes after 2**32 uses."""
        if slot >= len(self._entries) or self._entries[slot] is not None:
            return False
        self._generations[slot] = generation
        return True

    def entries(self) -> list[Entry]:
        """Return the live entries, oldest slot first."""
        return [entry for entry in self._entries if entry is not None]
