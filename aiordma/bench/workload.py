"""A workload: an operation, a size and a depth; and its encoding in private data (pure)."""

import struct
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from aiordma import ConnectionOptions

__all__ = ("MOST_BYTES", "OPERATIONS", "Workload", "row_name")

OPERATIONS = ("echo", "messages", "send", "read", "write", "chain", "datagrams", "views")
"""
echo: a SEND to the server, and a SEND back, by `post_send` and `post_recv`.
messages: the same by `send` and `receive`; with a depth above 1, by the option `send_ahead`.
send: SENDs to the server, without answers.
read, write: READs or WRITEs of the server's memory.
chain: WRITEs, all signaled; one call posts half of the depth.
datagrams: as messages, by datagrams.
views: as send; the server receives by `receive_view`.
"""

MOST_BYTES = 1 << 30
MOST_DEPTH = 4096
MOST_INLINE = 4096

_ANSWERED = "has messages in both directions already"
_WHY_NOT_BOTH = {
    **dict.fromkeys(
        ("read", "write", "chain"),
        "completes on one side only, so that side alone can count it: run `aiordma bench server` "
        "and `client` on both machines at the same time, or use -o send",
    ),
    "views": "receives on the server only: use -o send",
}
"""Why an operation cannot be bidirectional."""


def row_name(operation: str, size: int, depth: int) -> str:
    """Return the name of a row: operation/size, with /window and the depth above 1."""
    return f"{operation}/{size}" if depth == 1 else f"{operation}/{size}/window{depth}"


@dataclass(frozen=True, slots=True)
class Workload:
    """An operation to measure, with its size and depth.

    Attributes:
        operation: one of OPERATIONS.
        size: bytes of each operation.
        depth: how many operations are in flight at a time.
        both: the server sends to the client in the same way, at the same time; send only.
        inline: the largest message that both sides post inline, in bytes; None: none of registered
            memory, and aiordma's default for plain bytes.
    """

    operation: str
    size: int
    depth: int = 1
    both: bool = False
    inline: int | None = None

    WIRE: ClassVar[struct.Struct] = struct.Struct("!4sB?HIi")
    MAGIC: ClassVar[bytes] = b"abm2"

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"{self.operation!r} is none of {', '.join(OPERATIONS)}")
        if not 1 <= self.size <= MOST_BYTES:
            raise ValueError(f"size={self.size} is not in 1..{MOST_BYTES}")
        if not 1 <= self.depth <= MOST_DEPTH:
            raise ValueError(f"depth={self.depth} is not in 1..{MOST_DEPTH}")
        if self.inline is not None and not 0 <= self.inline <= MOST_INLINE:
            raise ValueError(f"-I {self.inline} is not in 0..{MOST_INLINE}")
        if self.inline is not None and self.operation == "read":
            raise ValueError("-I: a READ sends no data that could be inline: choose others with -o")
        if self.both and self.operation != "send":
            raise ValueError(f"-b: {self.operation} {_WHY_NOT_BOTH.get(self.operation, _ANSWERED)}")

    @property
    def name(self) -> str:
        """The name of the row in the table."""
        name = row_name(self.operation, self.size, self.depth)
        return f"{name}/both" if self.both else name

    @property
    def is_inline(self) -> bool:
        """Whether operations that would send registered memory send plain bytes, inline."""
        return self.inline is not None and self.size <= self.inline

    @property
    def ahead(self) -> int:
        """How many messages `send` runs ahead of, so that `depth` are in flight."""
        return self.depth if self.depth > 1 else 0

    @property
    def is_one_sided(self) -> bool:
        """Whether the operations complete without the server's program."""
        return self.operation in ("read", "write", "chain")

    def inlined(self, options: ConnectionOptions) -> ConnectionOptions:
        """Return the options of a connection with the longest inline message of the workload."""
        return options if self.inline is None else replace(options, max_inline_data=self.inline)

    def pack(self) -> bytes:
        """Return the workload as private data of the connection request."""
        number = OPERATIONS.index(self.operation)
        inline = -1 if self.inline is None else self.inline
        return self.WIRE.pack(self.MAGIC, number, self.both, self.depth, self.size, inline)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Decode the private data that `pack` returned. The transport may have padded it.

        Raises:
            ValueError: the data is not from a benchmark client of this version.
        """
        if len(data) < cls.WIRE.size or not data.startswith(cls.MAGIC):
            raise ValueError("no benchmark's client of this version")
        _, number, both, depth, size, inline = cls.WIRE.unpack_from(data)
        if number >= len(OPERATIONS):
            raise ValueError(f"operation {number} is not known here")
        return cls(OPERATIONS[number], size, depth, both, None if inline < 0 else inline)
