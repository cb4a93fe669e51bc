"""What is measured: an operation, a size, a depth; and how the client tells the server (pure)."""

import struct
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ("OPERATIONS", "Workload")

OPERATIONS = ("echo", "messages", "send", "read", "write", "chain", "datagrams")
"""
echo: a SEND to the server and its answer, with receives posted by hand.
messages: the same by `send` and `receive`.
send: SENDs one way.
read, write: one-sided.
chain: WRITEs, half of the depth with one call, every one of them signaled.
datagrams: as messages, by datagrams.
"""

MOST_BYTES = 1 << 30
MOST_DEPTH = 4096


@dataclass(frozen=True, slots=True)
class Workload:
    """One thing to measure.

    Attributes:
        operation: one of OPERATIONS.
        size: bytes of each.
        depth: how many are in flight at a time.
    """

    operation: str
    size: int
    depth: int = 1

    WIRE: ClassVar[struct.Struct] = struct.Struct("!4sBxHI")
    MAGIC: ClassVar[bytes] = b"abm1"

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"{self.operation!r} is none of {', '.join(OPERATIONS)}")
        if not 1 <= self.size <= MOST_BYTES:
            raise ValueError(f"size={self.size} is not in 1..{MOST_BYTES}")
        if not 1 <= self.depth <= MOST_DEPTH:
            raise ValueError(f"depth={self.depth} is not in 1..{MOST_DEPTH}")

    @property
    def name(self) -> str:
        """As rows are called: operation/size, and the window behind it."""
        name = f"{self.operation}/{self.size}"
        return name if self.depth == 1 else f"{name}/window{self.depth}"

    @property
    def is_one_sided(self) -> bool:
        """Whether the server's program has no part in it."""
        return self.operation in ("read", "write", "chain")

    def pack(self) -> bytes:
        """Return what goes with the connection request."""
        return self.WIRE.pack(self.MAGIC, OPERATIONS.index(self.operation), self.depth, self.size)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read what `pack` wrote; RDMA may have padded it.

        Raises:
            ValueError: this is no benchmark's client, or one of another version.
        """
        if len(data) < cls.WIRE.size or not data.startswith(cls.MAGIC):
            raise ValueError("no benchmark's client of this version")
        _, number, depth, size = cls.WIRE.unpack_from(data)
        if number >= len(OPERATIONS):
            raise ValueError(f"operation {number} is not known here")
        return cls(OPERATIONS[number], size, depth)
