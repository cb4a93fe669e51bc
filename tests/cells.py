"""Memory whose every byte has an expected value: cells between canary bytes.

A cell is memory for one operation at a time. Its bytes are known (`contents`), or change to known
ones (`future`), or belong to the device (`is_lent`). The bytes between cells never change, although
the registration permits the device and the peer to write there.
"""

import numpy as np

import aiordma

__all__ = ("EDGE", "POISON", "Arena", "Cell")

EDGE = 64
POISON = b"\xdb"
_CANARY = bytes((7 * place + 13) % 256 for place in range(EDGE))
_PATTERN = bytes(range(251)) * 300
_ACCESS = (
    aiordma.Access.LOCAL_WRITE
    | aiordma.Access.REMOTE_READ
    | aiordma.Access.REMOTE_WRITE
    | aiordma.Access.REMOTE_ATOMIC
    | aiordma.Access.MW_BIND
)
_WITHOUT_WINDOWS = _ACCESS & ~aiordma.Access.MW_BIND


class Cell:
    """A part of an arena."""

    def __init__(self, arena: "Arena", start: int, size: int) -> None:
        self.arena = arena
        self.size = size
        self.contents = arena.buffer[start : start + size]
        self.future: bytes | None = None
        self.is_lent = False
        self.poisoned = 0
        """In a simulation, how many bytes a READ may have poisoned: it owns them until its end."""
        self.is_offered = False
        """Whether the peer gets access by a grant or a window, and only by that."""
        self.readers = 0
        """How many operations expect the contents to stay."""
        self._start = start

    @property
    def is_free(self) -> bool:
        """Whether no operation uses the cell."""
        return self.future is None and not self.is_lent and not self.readers

    @property
    def memory(self) -> aiordma.types.MemorySlice:
        """The registered memory."""
        return self.arena.region[self._start : self._start + self.size]

    @property
    def remote(self) -> aiordma.RemoteMemory:
        """The description for the peer, which a program can keep for too long."""
        return self.arena.remote[self._start : self._start + self.size]

    @property
    def bytes_now(self) -> bytes:
        """What is in memory."""
        return bytes(self.arena.buffer[self._start : self._start + self.size])

    def begin(self, future: bytes, poisoned: int = 0) -> None:
        """Expect a change of the first bytes to these, at some time."""
        assert self.is_free, "the test uses a cell twice"
        self.poisoned = poisoned
        self.future = future + bytes(self.contents[len(future) :])

    def finish(self) -> None:
        """The change is complete."""
        assert self.future is not None
        assert self.bytes_now == self.future, "an operation has succeeded, and its bytes are wrong"
        self.contents, self.future = bytearray(self.future), None

    def freeze(self) -> None:
        """Nothing changes the cell any more, however far the change has come."""
        self.check()
        self.contents, self.future, self.is_lent = bytearray(self.bytes_now), None, False

    def settle(self) -> None:
        """The change has come about, or never comes."""
        assert self.future is not None
        now = self.bytes_now
        poisoned = POISON * self.poisoned + bytes(self.contents[self.poisoned :])
        assert now in (bytes(self.contents), self.future, poisoned), (
            "an operation has been half carried out"
        )
        self.contents, self.future = bytearray(now), None

    def check(self) -> None:
        """Compare memory with what it can be."""
        if self.is_lent:
            return
        now = self.bytes_now
        if self.future is None:
            assert now == self.contents, f"{self} has changed, and no operation uses it"
            return
        bytes_, old, new = (
            np.frombuffer(each, np.uint8) for each in (now, bytes(self.contents), self.future)
        )
        fits = (bytes_ == old) | (bytes_ == new)
        fits[: self.poisoned] |= bytes_[: self.poisoned] == POISON[0]
        assert bool(fits.all()), f"{self} has bytes of no operation"

    def __repr__(self) -> str:
        return f"<cell of {self.size} bytes at {self._start} of {self.arena.name}>"


class Arena:
    """One end's registered memory, in cells."""

    def __init__(self, connection: aiordma.Connection, name: str, sizes: list[int]) -> None:
        self.name = name
        self.buffer = bytearray()
        starts: list[int] = []
        for number, size in enumerate(sizes):
            self.buffer += _CANARY
            starts.append(len(self.buffer))
            self.buffer += _PATTERN[number : number + size]
        self.buffer += _CANARY
        self.cells = [Cell(self, start, size) for start, size in zip(starts, sizes, strict=True)]
        has_windows = connection.context.query().max_mw > 0
        self.region = connection.register(self.buffer, _ACCESS if has_windows else _WITHOUT_WINDOWS)
        self.remote = self.region.remote()
        self._ends = [0, *(start + size for start, size in zip(starts, sizes, strict=True))]

    def find(self, number: int, least: int = 1) -> Cell | None:
        """Return a free cell of at least so many bytes, the first one from this number on."""
        count = len(self.cells)
        for step in range(count):
            cell = self.cells[(number + step) % count]
            if cell.is_free and not cell.is_offered and cell.size >= least:
                return cell
        return None

    def check(self) -> None:
        """Compare every byte with what it can be."""
        for end in self._ends:
            assert self.buffer[end : end + EDGE] == _CANARY, (
                f"{self.name}: a canary at {end} has changed"
            )
        for cell in self.cells:
            cell.check()
