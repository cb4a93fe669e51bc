"""A hostile peer of iWARP: a plain socket that connects to a listener, and sends bytes that
no device would (RFC 5044, 5041, 5040). The same bytes serve siw and the software device.

Its functions block, so that tests call them in threads.
"""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TypeAlias

from aiordma import RemoteMemory
from tests.devices import ADDRESS
from tests.unit.mpa_peer import CRC, ENHANCED, MARKERS, UPPER, Frame, exactly
from tests.unit.stream_peer import READ_REQUEST, READ_RESPONSE, SEND, TERMINATE, frame, tagged
from tests.unit.stream_peer import untagged as numbered

__all__ = (
    "NO_HANDSHAKES",
    "QUESTION",
    "READ_RESPONSE",
    "REQUEST",
    "SEND",
    "UNFINISHED",
    "WRITE",
    "WRONG_FRAMES",
    "RawConnection",
    "ended",
    "invalidation",
    "operations",
    "raw_socket",
    "read_request",
    "reset",
    "tagged",
    "untagged",
)

WRITE, SEND_INVALIDATE = 0, 4
QUESTION = b"where?"
"""A message whose answer is the memory that the peer may write to and read."""
SECONDS = 30
"""The time for each step: an emulated machine can be busy."""
REQUEST = Frame(inbound=16 | UPPER, outbound=16 | UPPER)
"""For a connection whose first frame is a WRITE of this side."""

Composed: TypeAlias = Callable[[RemoteMemory], bytes]


def raw_socket(port: int) -> socket.socket:
    """Connect by TCP to the device under test."""
    made = socket.create_connection((ADDRESS, port), SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def reset(peer: socket.socket) -> None:
    """End a TCP connection with a reset."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def ended(peer: socket.socket, last: bytes = b"") -> bytes:
    """Send the last bytes, and wait until the victim has ended the connection, which may be in the
    middle of them. Return what it sent before."""
    found = b""
    with closing(peer), suppress(ConnectionError):
        peer.sendall(last)
        while more := peer.recv(1 << 16):
            found += more
    return found


# -- instead of the handshake ---------------------------------------------------------------------


def _claims(size: int) -> bytes:
    """A request that announces so much private data, and has none of it."""
    whole = Frame(flags=0).pack()
    return whole[:18] + size.to_bytes(2, "big")


NO_HANDSHAKES: dict[str, bytes] = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n",
    "zeros": bytes(2000),
    "ones": b"\xff" * 2000,
    "an answer": Frame(is_reply=True).pack(),
    "revision 3": Frame(revision=3).pack(),
    "revision 255": Frame(revision=255).pack(),
    "markers": Frame(flags=ENHANCED | MARKERS).pack(),
    "every flag": Frame(flags=0xFF).pack(),
    "513 bytes of private data": Frame(flags=0, private_data=bytes(513)).pack(),
    "65,535 bytes of private data": _claims(65535),
    "enhanced, without depths": Frame().pack()[:18] + bytes(2),
}
"""What a device ends the connection for at once, if it is sent instead of a request."""

UNFINISHED = [b"", *(REQUEST.pack()[:length] for length in (1, 16, 19, 20, 23)), _claims(100)]
"""What may be the beginning of a request."""


# -- after the handshake --------------------------------------------------------------------------


def untagged(operation: int, payload: bytes, *, queue: int, number: int, offset: int = 0) -> bytes:
    header = struct.pack(">BBIIII", 0x41, 0x40 | operation, 0, queue, number, offset)
    return frame(header, payload)


def _send(payload: bytes = b"evil", **wrong: int) -> bytes:
    """The second SEND of a connection, with something wrong."""
    return untagged(SEND, payload, **({"queue": 0, "number": 2} | wrong))


def read_request(
    rkey: int, address: int, length: int, number: int = 1, *, rest: bytes = b""
) -> bytes:
    """A READ into a sink that is called 1."""
    payload = struct.pack(">IQIIQ", 1, 0, length, rkey, address)
    return numbered(READ_REQUEST, 1, number, payload + rest)


def _write(memory: RemoteMemory, offset: int, length: int, *, wrong_key: int = 0) -> bytes:
    """A WRITE at an offset from the memory's beginning."""
    return tagged(WRITE, memory.rkey ^ wrong_key, memory.address + offset, b"e" * length)


def invalidation(rkey: int) -> bytes:
    """The second SEND of a connection, which invalidates an rkey."""
    return frame(struct.pack(">BBIIII", 0x41, 0x40 | SEND_INVALIDATE, rkey, 0, 2, 0), b"evil")


def _announced(length: int, composed: bytes) -> bytes:
    """The same with another length in its header."""
    return length.to_bytes(2, "big") + composed[2:] + bytes(64)


WRONG_FRAMES: dict[str, Composed] = {
    "unknown operation 12": lambda memory: untagged(12, b"evil", queue=0, number=2),
    "unknown operation 15": lambda memory: untagged(15, b"evil", queue=0, number=2),
    "queue 1 of a SEND": lambda memory: _send(queue=1),
    "queue 3": lambda memory: _send(queue=3),
    "a number too high": lambda memory: _send(number=3),
    "a number used before": lambda memory: _send(number=1),
    "an offset in nothing": lambda memory: _send(offset=100),
    "DDP version 2": lambda memory: frame(b"\x42\x43" + bytes(16), b"evil"),
    "RDMAP version 0": lambda memory: frame(b"\x41\x03" + bytes(16), b"evil"),
    "a tagged SEND": lambda memory: tagged(SEND, memory.rkey, memory.address, b"e" * 20),
    "an untagged WRITE": lambda memory: untagged(WRITE, b"e" * 20, queue=0, number=2),
    "a SEND longer than its receive": lambda memory: _send(b"e" * 20000),
    "a WRITE before the memory": lambda memory: _write(memory, -1, 2),
    "a WRITE behind it": lambda memory: _write(memory, memory.length, 2),
    "a WRITE over its end": lambda memory: _write(memory, memory.length - 1, 2),
    "a WRITE over the end of all": lambda memory: tagged(WRITE, memory.rkey, 2**64 - 1, b"evil"),
    "a WRITE with another key": lambda memory: _write(memory, 0, 4, wrong_key=1),
    "a WRITE to another STag": lambda memory: _write(memory, 0, 4, wrong_key=0x100),
    "a length of 0": lambda memory: _announced(0, _send()),
    "a length of 1": lambda memory: _announced(1, _send()),
    "a length without the header's end": lambda memory: _announced(17, _send()),
    "a length of 65,535": lambda memory: _announced(65535, _send(b"e" * 40000)),
    "an answer to no READ": lambda memory: tagged(READ_RESPONSE, memory.rkey, memory.address, b"e"),
    "a READ before the memory": lambda memory: read_request(memory.rkey, memory.address - 1, 2),
    "a READ over its end": lambda memory: read_request(
        memory.rkey, memory.address + 1, memory.length
    ),
    "a READ of 4 GiB": lambda memory: read_request(memory.rkey, memory.address, 2**32 - 1),
    "a READ with another key": lambda memory: read_request(memory.rkey ^ 1, memory.address, 4),
    "a READ from another STag": lambda memory: read_request(memory.rkey ^ 0x100, memory.address, 4),
    "a READ's number too high": lambda memory: read_request(memory.rkey, memory.address, 4, 7),
    "a READ that is too long": lambda memory: read_request(
        memory.rkey, memory.address, 4, rest=bytes(100)
    ),
    "more READs than were agreed on": lambda memory: b"".join(
        read_request(memory.rkey ^ 0x100, memory.address, 4, number) for number in range(1, 70)
    ),
    "the end of a connection": lambda memory: numbered(TERMINATE, 2, 1, bytes(4)),
    "an unknown STag to invalidate": lambda memory: invalidation(memory.rkey ^ 0x100),
    "zeros": lambda memory: bytes(300),
    "ones": lambda memory: b"\xff" * 70000,
}
"""By what is wrong: what a device ends the connection for. Each comes after a first SEND."""


class RawConnection:
    """A connection whose handshake is right, and whose first frame is.

    Args:
        port: the listener's.
        uses_crc: ask for CRCs, which the composed frames have in any case.
    """

    def __init__(self, port: int, *, uses_crc: bool = False) -> None:
        self.socket = raw_socket(port)
        flags = ENHANCED | (CRC if uses_crc else 0)
        request = Frame(flags=flags, inbound=REQUEST.inbound, outbound=REQUEST.outbound)
        self.socket.sendall(request.pack())
        assert Frame.receive(self.socket).is_reply
        self.socket.sendall(tagged(WRITE, 0, 0))

    def send(self, payload: bytes, number: int) -> None:
        """Send a message as it has to be."""
        self.socket.sendall(_send(payload, number=number))

    def receive(self, operation: int = SEND) -> bytes:
        """Receive the payload of the next frame of an operation, ignoring others."""
        while True:
            size = int.from_bytes(exactly(self.socket, 2), "big")
            rest = exactly(self.socket, size + -(size + 2) % 4 + 4)
            if rest[1] & 15 == operation:
                return rest[14 if rest[0] & 0x80 else 18 : size]

    def memory(self) -> RemoteMemory:
        """Ask for the memory, with the first SEND."""
        self.send(QUESTION, 1)
        return RemoteMemory.unpack(self.receive())


def operations(sent: bytes) -> Iterator[int]:
    """Yield the operations of the whole frames in what a device sent."""
    while len(sent) > 4:
        size = int.from_bytes(sent[:2], "big")
        yield sent[3] & 15
        sent = sent[size + 2 + -(size + 2) % 4 + 4 :]
