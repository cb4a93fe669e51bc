"""Numbered messages: each is known in advance, so that a wrong one is found when it arrives."""

import struct
from dataclasses import dataclass, field

HEADER = struct.Struct("<IQ")
"""The number of the connection, and that of the message."""

PATTERN = bytes(range(256)) * 20
LONG = 4096
LONG_EVERY = 64

MOST_EXAMPLES = 5


def message(connection: int, number: int) -> bytes:
    """Return the message of that number on that connection: its length and contents are its own."""
    length = LONG if number % LONG_EVERY == LONG_EVERY - 1 else number * 7 % 240
    start = (connection + number) % 256
    return HEADER.pack(connection, number) + PATTERN[start : start + length]


@dataclass
class Tally:
    """The messages that one process has received, and those that were not as expected."""

    received: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, connection: int, number: int, data: bytes) -> None:
        """Count a message, which has to be that of this number: so a message that was lost,
        doubled, reordered or changed is counted as wrong, and so is each one behind it."""
        self.received += 1
        if data != message(connection, number):
            self.wrong += 1
            if len(self.examples) < MOST_EXAMPLES:
                found = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
                self.examples.append(
                    f"expected message {number} of connection {connection}, "
                    f"found {len(data)} bytes with (connection, number) = {found}"
                )
