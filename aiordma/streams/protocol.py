"""The handshake of the rsockets protocol, version 1, without I/O. What follows it is in
`_native/engine/stream_path.c`.

Each side has a ring of memory for the data that it receives, in two halves, and lends the halves to
its peer one after the other. The peer writes data into the half that it was lent, with RDMA WRITEs
whose immediate data is the number of bytes. When half of the ring has been read, it is lent again:
a grant is written into the peer's table of grants, and an immediate tells the peer so. Each message
with data also takes a credit. The credits are the receives that the other side has posted.

The authority is rdma-core's librdmacm/rsocket.c.
"""

import struct
import sys
from dataclasses import dataclass
from typing import Self

from aiordma._base.errors import StreamProtocolError
from aiordma._base.ranges import RemoteMemory

__all__ = ("CREDIT_LIMIT", "GRANT_BYTES", "HELLO_BYTES", "TABLE_ENTRIES", "Hello")

VERSION = 1
TABLE_ENTRIES = 2
"""How many grants a table holds: one for each half of the ring."""
CREDIT_LIMIT = 0xFFFE
"""The most credits: sequence numbers have 16 bits."""
GRANT_BYTES = 16
"""Of an entry of the table: address, rkey, length."""

_HELLO = struct.Struct("!BBHxxxBQIIQII")
HELLO_BYTES = _HELLO.size
_BIG_ENDIAN_FLAG = 1
_IMMEDIATE_FLAG = 0x80
"""Ours; C's rsockets does not look at it."""


@dataclass(frozen=True)
class Hello:
    """The 40 bytes of private data with which each side begins.

    Attributes:
        credits: how many receives this side has posted.
        table: its table of grants; `length` is in bytes.
        buffer: the first half of its ring.
        is_big_endian: the byte order of its memory, and so of the grants in its table.
        takes_immediate: on iWARP: this side can use immediate data there (RFC 7306). If both can,
            they do. C's rsockets never uses it on iWARP.
    """

    credits: int
    table: RemoteMemory
    buffer: RemoteMemory
    is_big_endian: bool = sys.byteorder == "big"
    takes_immediate: bool = False

    def pack(self) -> bytes:
        """Return the private data."""
        flags = _BIG_ENDIAN_FLAG if self.is_big_endian else 0
        return _HELLO.pack(
            VERSION,
            flags | _IMMEDIATE_FLAG if self.takes_immediate else flags,
            self.credits,
            0,
            self.table.address,
            self.table.rkey,
            self.table.length // GRANT_BYTES,
            self.buffer.address,
            self.buffer.rkey,
            self.buffer.length,
        )

    @classmethod
    def unpack(cls, private_data: bytes) -> Self:
        """Return the peer's Hello. Devices may append zeros.

        Raises:
            StreamProtocolError: this is no rsockets peer, or one of another version.
        """
        if len(private_data) < HELLO_BYTES:
            raise StreamProtocolError(
                f"the peer sent {len(private_data)} bytes of private data, and rsockets sends "
                f"{HELLO_BYTES}: the program at that port does not use rsockets"
            )
        version, flags, permitted, _, address, rkey, entries, *buffer = _HELLO.unpack_from(
            private_data
        )
        if version != VERSION:
            raise StreamProtocolError(
                f"the peer's private data begins with version {version}, and rsockets has {VERSION}"
            )
        if permitted > CREDIT_LIMIT or entries < TABLE_ENTRIES or entries > CREDIT_LIMIT:
            raise StreamProtocolError(
                f"the peer announces {permitted} credits (at most {CREDIT_LIMIT}) and {entries} "
                f"grants ({TABLE_ENTRIES} to {CREDIT_LIMIT})"
            )
        return cls(
            permitted,
            _remote(address, rkey, entries * GRANT_BYTES),
            _remote(buffer[0], buffer[1], buffer[2]),
            bool(flags & _BIG_ENDIAN_FLAG),
            bool(flags & _IMMEDIATE_FLAG),
        )


def _remote(address: int, rkey: int, length: int) -> RemoteMemory:
    if address + length >= 1 << 64:
        raise StreamProtocolError(
            f"the peer describes memory at {address:#x} of {length} bytes, which ends beyond 2**64"
        )
    return RemoteMemory(address, length, rkey)
