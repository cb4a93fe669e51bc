"""The control messages of Valkey over RDMA: 32 bytes each, big-endian, sent by SEND.

Nothing here does I/O. See valkey.io/topics/RDMA: the byte stream itself has no messages, it is
written with immediate data into the memory that REGISTER_XFER_MEMORY announced.
"""

import struct
from enum import IntEnum

import anyio

from aiordma._base.errors import RdmaConnectionError
from aiordma._base.ranges import RemoteMemory

__all__ = (
    "CONTROL_BYTES",
    "Opcode",
    "ValkeyProtocolError",
    "memory_of",
    "opcode_of",
    "pack_memory",
    "pack_opcode",
)

CONTROL_BYTES = 32

_OPCODE = struct.Struct(">H30x")
_MEMORY = struct.Struct(">H14xQII")


class ValkeyProtocolError(RdmaConnectionError, anyio.BrokenResourceError):
    """The peer does not use Valkey's protocol over RDMA, or violates it, and the connection has
    ended. The program at that port may be no Valkey server, or one before 8.1, which has no RDMA.
    The message has what the peer sent. Connect to the port that the server got as `--rdma-port`
    (docs/valkey.md). valkey-py reports it as its own ConnectionError, whose `__cause__` is this
    one. Also a builtin ConnectionError."""


class Opcode(IntEnum):
    """What a control message is."""

    GET_SERVER_FEATURE = 0
    """The client asks; the server answers with the same opcode."""
    SET_CLIENT_FEATURE = 1
    KEEPALIVE = 2
    """Has no answer."""
    REGISTER_XFER_MEMORY = 3
    """From now on, data is written to the beginning of this memory."""


def pack_opcode(opcode: Opcode) -> bytes:
    """Return a control message that has only its opcode."""
    return _OPCODE.pack(opcode)


def pack_memory(memory: RemoteMemory) -> bytes:
    """Return the control message that announces the memory that the peer is to write to."""
    return _MEMORY.pack(Opcode.REGISTER_XFER_MEMORY, memory.address, memory.length, memory.rkey)


def opcode_of(message: bytes) -> Opcode:
    """Return the opcode of a control message.

    Raises:
        ValkeyProtocolError: the message has another length, or an unknown opcode.
    """
    if len(message) != CONTROL_BYTES:
        raise ValkeyProtocolError(
            f"the peer sent a message of {len(message)} bytes, and Valkey's control messages have "
            f"{CONTROL_BYTES}: it is no Valkey server"
        )
    (opcode,) = _OPCODE.unpack(message)
    try:
        return Opcode(opcode)
    except ValueError:
        raise ValkeyProtocolError(
            f"the peer sent a control message with the unknown opcode {opcode}"
        ) from None


def memory_of(message: bytes) -> RemoteMemory:
    """Return the memory that a control message announces.

    Raises:
        ValkeyProtocolError: there is no such memory: it is empty, or ends beyond the addresses.
    """
    _, address, length, rkey = _MEMORY.unpack(message)
    if not length or address + length >= 1 << 64:  # as RemoteMemory
        raise ValkeyProtocolError(
            f"the peer announced impossible memory: {length} bytes at {address:#x}"
        )
    return RemoteMemory(address, length, rkey)
