"""Memory for the bulk of messages. It is used again when the program has dropped what it made of
it: the kernel clears new pages, which takes longer than to fill them from a socket."""

import weakref
from collections import deque

import numpy

__all__ = ("BulkMemory",)

SHORTEST = 1 << 20
"""Shorter memory is malloc's, which keeps it itself."""


class BulkMemory:
    """Of one process, for all its comms.

    Args:
        most: how many bytes are kept that no message uses.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: deque[bytearray] = deque()  # the last used at the right; any thread gives back

    def take(self, size: int) -> memoryview:
        """Return memory of so many bytes; what they are is not defined."""
        if size < SHORTEST:
            return numpy.empty(size, "u1").data
        memory = self._found(size)
        if memory is None:
            memory = bytearray(size)
        # An array made of a view of this one refers to this one, and not to the memory: an array
        # replaces its base by the base's base only if that is an array, too.
        array = numpy.frombuffer(memory, "u1", size)
        weakref.finalize(array, self._give, memory).atexit = False
        return array.data

    def _found(self, size: int) -> bytearray | None:
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:
                return None  # another thread took it
            if size <= len(memory) <= size + size // 4:
                return memory
            self._free.appendleft(memory)
        return None

    def _give(self, memory: bytearray) -> None:
        self._free.append(memory)
        while sum(map(len, tuple(self._free))) > self._most:
            try:
                self._free.popleft()
            except IndexError:
                return
