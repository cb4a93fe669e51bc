"""A workload: an operation, a size and a depth; and its encoding in private data (pure)."""

import struct
from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ("OPERATIONS", "Workload")

OPERATIONS = ("echo", "messages", "send", "read", "write", "chain", "datagrams", "views")
"""
echo: a SEND to the server, and a SEND back, by `post_send` and `post_recv`.
messages: the same by `send` and `receive`.
send: SENDs to the server, without answers.
read, write: READs or WRITEs of the server's memory.
chain: WRITEs, all signaled; one call posts half of the depth.
datagrams: as messages, by datagrams.
views: as send; the server receives by `receive_view`.
"""

MOST_BYTES = 1 << 30
MOST_DEPTH = 4096


@dataclass(frozen=True, slots=True)
class Workload:
    """An operation to measure, with its size and depth.

    Attributes:
        operation: one of OPERATIONS.
        size: bytes of each operation.
        depth: how many operations are in flight at a time.
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
        """The name of the row in the table: operation/size, with /window and the depth above 1."""
        name = f"{self.operation}/{self.size}"
        return name if self.depth == 1 else f"{name}/window{self.depth}"

    @property
    def is_one_sided(self) -> bool:
        """Whether the operations complete without the server's program."""
        return self.operation in ("read", "write", "chain")

    def pack(self) -> bytes:
        """Return the workload as private data of the connection request."""
        return self.WIRE.pack(self.MAGIC, OPERATIONS.index(self.operation), self.depth, self.size)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode the private data that `pack` returned. The transport may have padded it.

        Raises:
            ValueError: the data is not from a benchmark client of this version.
        """
        if len(data) < cls.WIRE.size or not data.startswith(cls.MAGIC):
            raise ValueError("no benchmark's client of this version")
        _, number, depth, size = cls.WIRE.unpack_from(data)
        if number >= len(OPERATIONS):
            raise ValueError(f"operation {number} is not known here")
        return cls(OPERATIONS[number], size, depth)
