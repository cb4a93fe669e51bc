"""What each side of a stream may send after the handshake, without I/O: a model of what is in
`_native/engine/stream_path.c`. A `Sender` counts what we may send, a `Receiver` what the peer may.
Both check every number that arrives, and raise StreamProtocolError for one that no correct peer
sends.
"""

import struct
import sys
from collections import deque
from enum import IntEnum
from typing import NamedTuple

from aiordma import RemoteMemory
from aiordma.streams import StreamProtocolError
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello

__all__ = (
    "Control",
    "Operation",
    "Receiver",
    "Sender",
    "Update",
    "immediate_of",
    "operation_of",
    "unpack_grant",
)

_GRANTS = {False: struct.Struct("<QII"), True: struct.Struct(">QII")}
_VALUE_BITS = 29
_SEQUENCE_MASK = 0xFFFF


class Operation(IntEnum):
    """What an immediate says (its upper 3 bits)."""

    DATA = 0
    """The value is the number of bytes that were written."""
    GRANT = 4
    """The value is the number of the last data message that may be sent, modulo 2**16."""
    IOMAP = 6
    """Part of rsockets' riomap, which this side does not offer."""
    CONTROL = 7
    """The value is a `Control`."""


class Control(IntEnum):
    """The values of Operation.CONTROL."""

    DISCONNECT = 0
    """The sender closes both directions."""
    KEEPALIVE = 1
    SHUTDOWN = 2
    """The sender sends no more data."""


def immediate_of(operation: Operation, value: int) -> int:
    """Return the 32 bits of immediate data."""
    return operation << _VALUE_BITS | value


def operation_of(immediate: int) -> tuple[Operation, int]:
    """Return the operation and the value of a peer's immediate data.

    Raises:
        StreamProtocolError: the operation is reserved.
    """
    value = immediate & ((1 << _VALUE_BITS) - 1)
    try:
        return Operation(immediate >> _VALUE_BITS), value
    except ValueError:
        raise StreamProtocolError(
            f"immediate data {immediate:#010x}: rsockets reserves operation "
            f"{immediate >> _VALUE_BITS}"
        ) from None


def unpack_grant(entry: bytes) -> RemoteMemory | None:
    """Return the grant in an entry of our own table, or None if the entry is empty.

    Raises:
        StreamProtocolError: the memory ends beyond 2**64.
    """
    address, rkey, length = _GRANTS[sys.byteorder == "big"].unpack(entry)
    return _remote(address, rkey, length) if length else None


def _remote(address: int, rkey: int, length: int) -> RemoteMemory:
    if address + length >= 1 << 64:
        raise StreamProtocolError(
            f"the peer describes memory at {address:#x} of {length} bytes, which ends beyond 2**64"
        )
    return RemoteMemory(address, length, rkey)


class Sender:
    """What we may send, and where it goes.

    Args:
        hello: the peer's.
    """

    def __init__(self, hello: Hello) -> None:
        self._credits = hello.credits
        self._sent = 0
        self._limit = hello.credits
        self._grants: deque[RemoteMemory] = deque()
        self._used = 0  # bytes of the first grant
        if hello.buffer.length:
            self._grants.append(hello.buffer)

    @property
    def room(self) -> int:
        """How many bytes the next message may have; 0 without a credit or a grant."""
        if not self._grants or self._sent == self._limit:
            return 0
        return self._grants[0].length - self._used

    def take(self, length: int) -> RemoteMemory:
        """Count a message of so many bytes, at most `room`, and return where to write it."""
        grant, start = self._grants[0], self._used
        self._sent += 1
        self._used += length
        if self._used == grant.length:
            self._grants.popleft()
            self._used = 0
        return RemoteMemory(grant.address + start, length, grant.rkey)

    def add_grant(self, grant: RemoteMemory) -> None:
        """Add memory that the peer has lent.

        Raises:
            StreamProtocolError: the peer lends more often than its ring has halves.
        """
        if len(self._grants) == TABLE_ENTRIES:
            raise StreamProtocolError(
                f"the peer granted memory a third time, although {TABLE_ENTRIES} grants are unused"
            )
        self._grants.append(grant)

    def set_limit(self, value: int) -> None:
        """Set the number of the last message that may be sent.

        Args:
            value: as it came; only its lower 16 bits count.

        Raises:
            StreamProtocolError: the peer takes credits back, or gives more than it announced.
        """
        ahead = (value - self._sent) & _SEQUENCE_MASK
        if ahead > self._credits or self._sent + ahead < self._limit:
            raise StreamProtocolError(
                f"the peer permits messages up to number {value & _SEQUENCE_MASK}, where "
                f"{self._sent & _SEQUENCE_MASK} were sent, and it announced {self._credits} credits"
            )
        self._limit = self._sent + ahead


class Update(NamedTuple):
    """What is to be written to the peer: new credits, and perhaps a grant."""

    immediate: int
    grant: bytes
    """The entry; empty for credits alone."""
    target: RemoteMemory
    """The entry's place in the peer's table; of length 0 for credits alone."""


_NOWHERE = RemoteMemory(0, 0, 0)


class Receiver:
    """What the peer may send, and what of our ring is to be read next.

    Args:
        ring: our ring; its length is even.
        receives: how many are posted.
        hello: the peer's.
    """

    def __init__(self, ring: RemoteMemory, receives: int, hello: Hello) -> None:
        self._ring = ring
        self._half = ring.length // 2
        self._credits = receives
        self._pack_grant = _GRANTS[hello.is_big_endian].pack
        self._table = hello.table
        self._next_entry = 1  # entry 0 is the Hello's buffer
        self._granted: deque[int] = deque([self._half])  # bytes that each grant has left
        self._free = self._half  # bytes of the ring that may be granted
        self._next_grant = self._half  # where in the ring they begin
        self._messages: deque[int] = deque()  # bytes that each has left to read
        self._arrived = self._consumed = 0  # messages
        self._limit = receives
        self._next_update = receives // 2  # an update is due when so many messages are consumed
        self._start = 0
        self._readable = 0

    @property
    def readable(self) -> int:
        """How many bytes there are to read."""
        return self._readable

    def span(self, length: int) -> tuple[int, int]:
        """Return where in the ring the next bytes begin, and how many, at most `length`, lie there
        side by side."""
        return self._start, min(length, self._readable, self._ring.length - self._start)

    def add(self, length: int) -> None:
        """Count a message with data that has arrived.

        Raises:
            StreamProtocolError: the peer had no credit for it, or no such memory.
        """
        granted = self._granted[0] if self._granted else 0
        if self._arrived == self._limit:
            raise StreamProtocolError(f"the peer sent a message beyond its {self._credits} credits")
        if not 0 < length <= granted:
            raise StreamProtocolError(
                f"the peer says that it wrote {length} bytes, and could write 1..{granted}"
            )
        if length == granted:
            self._granted.popleft()
        else:
            self._granted[0] = granted - length
        self._arrived += 1
        self._messages.append(length)
        self._readable += length

    def consume(self, length: int) -> None:
        """Count bytes that were read, at most `readable`."""
        self._start = (self._start + length) % self._ring.length
        self._readable -= length
        self._free += length
        messages = self._messages
        while length and messages[0] <= length:
            length -= messages.popleft()
            self._consumed += 1
        if length:
            messages[0] -= length

    @property
    def is_update_due(self) -> bool:
        """Whether the peer is to get credits, or a half of the ring."""
        return self._free >= self._half or self._consumed >= self._next_update

    def update(self) -> Update:
        """Return what is to be written to the peer, and count it as written."""
        self._next_update = self._consumed + self._credits // 2
        self._limit = self._consumed + self._credits
        value = (self._consumed & _SEQUENCE_MASK) + self._credits
        immediate = immediate_of(Operation.GRANT, value)
        if self._free < self._half:
            return Update(immediate, b"", _NOWHERE)
        grant = self._pack_grant(self._ring.address + self._next_grant, self._ring.rkey, self._half)
        place = self._next_entry * GRANT_BYTES
        self._free -= self._half
        self._next_grant = (self._next_grant + self._half) % self._ring.length
        self._granted.append(self._half)
        self._next_entry = (self._next_entry + 1) % (self._table.length // GRANT_BYTES)
        return Update(immediate, grant, self._table[place : place + GRANT_BYTES])
