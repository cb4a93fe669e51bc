"""The protocol of rcopy (rdmacm-utils), without I/O: files are sent over a byte stream.

The client opens a file by its path, sends its bytes behind one message with their number, and
closes it. The server replies to each of the three with an error number, 0 for success. Numbers are
in the host's byte order, so that both hosts must have the same.
"""

import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import anyio

PORT = 7427
_HEADER = struct.Struct("=BBHIQ")
HEADER_BYTES = _HEADER.size
_SIZE = struct.Struct("=Q")
SIZE_BYTES = _SIZE.size
_REPLY = 0x80
_MOST_ERRNO = 0x7FFFFFFF
_VERSION = 0
_MOST_PATH_BYTES = 0xFFFF - HEADER_BYTES - 8


class RcopyError(anyio.BrokenResourceError):
    """The peer does not keep to rcopy's protocol, or a path does not fit into a message."""


class Command(IntEnum):
    """What a client asks for."""

    OPEN = 1
    """Create a file, or empty it; the path follows."""
    CLOSE = 2
    WRITE = 3
    """Fill the file; the number of bytes follows, and then they do."""


@dataclass(frozen=True)
class Header:
    """The 16 bytes that every message begins with.

    Attributes:
        command: a Command, or another number from an unknown client.
        is_reply: whether the server sent it.
        length: bytes of the message with the header, without a file's bytes.
        data: of OPEN the file's mode; of a reply the error number.
        id: the client's; the reply has the same.
    """

    command: int
    is_reply: bool = False
    length: int = HEADER_BYTES
    data: int = 0
    id: int = 0

    def pack(self) -> bytes:
        """Return the bytes."""
        command = self.command | (_REPLY if self.is_reply else 0)
        return _HEADER.pack(_VERSION, command, self.length, self.data, self.id)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return the header in 16 bytes.

        Raises:
            RcopyError: the version is not 0, or the length is less than the header's.
        """
        version, command, length, value, number = _HEADER.unpack(data)
        if version != _VERSION or length < HEADER_BYTES:
            raise RcopyError(
                f"the peer sent a message of version {version} and length {length}; rcopy has "
                f"version {_VERSION} and at least {HEADER_BYTES} bytes"
            )
        return cls(command & ~_REPLY, bool(command & _REPLY), length, value, number)

    def reply(self, error: int) -> bytes:
        """Return the server's reply to this message: an error number, or 0."""
        return Header(self.command, True, data=error, id=self.id).pack()

    def status(self, command: Command) -> int:
        """Return the error number in the reply to a command.

        Raises:
            RcopyError: this is not the reply to that command, or has a number that is none of C's.
        """
        if (self.command, self.is_reply, self.length) != (command, True, HEADER_BYTES):
            kind = "reply to" if self.is_reply else "request for"
            raise RcopyError(
                f"the server sent a {kind} command {self.command} of {self.length} bytes instead "
                f"of a reply to {command.name}"
            )
        if self.data > _MOST_ERRNO:
            raise RcopyError(f"the server replied to {command.name} with error number {self.data}")
        return self.data


def open_message(path: str, mode: int) -> bytes:
    """Return the request to open a file of that mode, empty.

    Raises:
        RcopyError: the path is empty, too long, or contains a NUL.
    """
    name = os.fsencode(path)
    if not 0 < len(name) <= _MOST_PATH_BYTES or b"\0" in name:
        raise RcopyError(
            f"the destination path has {len(name)} bytes; it must have 1 to {_MOST_PATH_BYTES}, "
            "none of them NUL"
        )
    padded = name + bytes(8 - len(name) % 8)  # at least one NUL, as rcopy does it
    return Header(Command.OPEN, length=HEADER_BYTES + len(padded), data=mode).pack() + padded


def path_of(payload: bytes) -> str:
    """Return the path in what follows the header of OPEN.

    Raises:
        RcopyError: the path is empty, or does not end with a NUL.
    """
    name, end, _ = payload.partition(b"\0")
    if not name or not end:
        raise RcopyError("the client sent a path that is empty, or has no end")
    return os.fsdecode(name)


def write_message(size: int) -> bytes:
    """Return the announcement of a file's bytes, which are to follow."""
    return Header(Command.WRITE, length=HEADER_BYTES + SIZE_BYTES).pack() + _SIZE.pack(size)


def size_of(payload: bytes) -> int:
    """Return the number of bytes that will follow, from what follows the header of WRITE.

    Raises:
        RcopyError: that is no number of 8 bytes.
    """
    if len(payload) != SIZE_BYTES:
        raise RcopyError(f"the client announced a size in {len(payload)} bytes, not {SIZE_BYTES}")
    (size,) = _SIZE.unpack(payload)
    return int(size)


def close_message() -> bytes:
    """Return the request to close the file."""
    return Header(Command.CLOSE).pack()
