"""Ranges of memory: bounds-checked slices, and ranges of a peer's memory (pure)."""

import struct
from dataclasses import dataclass
from operator import index
from typing import ClassVar

from aiordma._base.arguments import shown, whole_number, wrong_type
from aiordma._native import given


def resolve_slice(key: slice, length: int, what: str, hint: str = "") -> tuple[int, int]:
    """Return (offset, length) of a slice of a range of `length` bytes.

    Unlike Python's own sequences, this does not clamp the bounds, because RDMA would then read or
    write other memory than the caller asked for.

    Args:
        key: the slice.
        length: the length of the range.
        what: the name of the range in messages.
        hint: how to read its bytes, for the error of a caller that iterates over it.

    Raises:
        IndexError: a bound is out of range, or the end is before the start.
        TypeError: `key` is not a slice of whole numbers.
        ValueError: the step is not 1.
    """
    if not isinstance(key, slice):
        text = f"{what} is taken by slice, [start:stop], not by {type(key).__name__}"
        raise TypeError(f"{text}; {hint}" if hint else text)
    if key.step not in (None, 1):
        raise ValueError(f"{what} is contiguous: a slice of it has no step")
    start = 0 if key.start is None else index(key.start)
    stop = length if key.stop is None else index(key.stop)
    start += length if start < 0 else 0
    stop += length if stop < 0 else 0
    if not 0 <= start <= stop <= length:
        raise IndexError(
            f"[{'' if key.start is None else key.start}:{'' if key.stop is None else key.stop}] "
            f"lies outside {what} of {length} bytes"
        )
    return start, stop - start


_MOST = 2**64 - 1
_HINT = "its bytes are at the peer: await connection.read_bytes(remote)"


@given("remote")
@dataclass(frozen=True, slots=True, init=False)
class RemoteMemory:
    """A range of a peer's registered memory, the target of one-sided operations.

    A slice is a part of the range. Its bounds are checked, because an access out of bounds breaks
    the connection. `pack` and `unpack` convert a range to and from 20 bytes in network byte order,
    to send it in a message: address (8), length (8), rkey (4).

    Attributes:
        address: the first byte, as the peer's device addresses it.
        length: bytes.
        rkey: the key of the peer's region or window, 32 bits.

    Raises:
        TypeError, ValueError: a field is not a number, or out of range; the message names it.
    """

    address: int
    length: int
    rkey: int

    WIRE: ClassVar[struct.Struct] = struct.Struct("!QQI")

    def __init__(self, address: int, length: int, rkey: int) -> None:
        # Convert now, because conversion runs the numbers' own code, and a post must not.
        if not type(address) is type(length) is type(rkey) is int:
            address = whole_number(address, "address", -_MOST, _MOST)
            length = whole_number(length, "length", -_MOST, _MOST)
            rkey = whole_number(rkey, "rkey", -_MOST, _MOST)
        set_field, end = object.__setattr__, address + length  # the fields are frozen
        set_field(self, "address", address)
        set_field(self, "length", length)
        set_field(self, "rkey", rkey)
        if not (0 <= address <= end and 0 <= rkey < 2**32):
            raise ValueError(f"not a range of remote memory: {self._numbers()}")
        # The address after the last byte must be valid, too: an empty slice can begin there.
        if end >= 2**64:
            raise ValueError(f"the range ends beyond the address space: {self._numbers()}")

    def _numbers(self) -> str:
        numbers = {name: shown(getattr(self, name)) for name in ("address", "length", "rkey")}
        return ", ".join(f"{name}={number}" for name, number in numbers.items())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> "RemoteMemory":
        """Return a part of the range.

        Raises:
            IndexError: the slice is out of bounds.
        """
        offset, length = resolve_slice(key, self.length, "remote memory", _HINT)
        return RemoteMemory(self.address + offset, length, self.rkey)

    def pack(self) -> bytes:
        """Return the 20 bytes that `unpack` converts to this range at the peer.

        Raises: nothing.
        """
        return self.WIRE.pack(self.address, self.length, self.rkey)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> "RemoteMemory":
        """Convert the 20 bytes that `pack` returned at the peer.

        The peer chooses the length of the range. `read_bytes` has a limit. Before you allocate
        `length` bytes yourself, compare it with a limit of your own.

        Args:
            data: the 20 bytes.

        Raises:
            TypeError: the data is not bytes.
            ValueError: the data is not 20 bytes long, or not a range.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise wrong_type(data, "data", "the 20 bytes that pack() returned", "unpack")
        size = memoryview(data).nbytes
        if size != cls.WIRE.size:
            raise ValueError(
                f"unpack(): data has {size} bytes: expected the {cls.WIRE.size} bytes that pack() "
                "returned"
            )
        return cls(*cls.WIRE.unpack(data))

    def __str__(self) -> str:
        return f"{self.length} bytes at {self.address:#x}, rkey {self.rkey:#x}"
