"""A hostile peer: a plain socket that speaks MPA, DDP and RDMAP (RFC 5044, 5041, 5040) as far as
its test wants, and no further."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.attacks.victim import HOST
from tests.unit.mpa_peer import LOWER, UPPER, Frame, exactly
from tests.unit.stream_peer import READ_REQUEST, SEND, tagged, untagged

__all__ = ("WRITE", "RawPeer", "Stream", "raw_socket")

WRITE = 0
SECONDS = 60
DEPTH = 16  # of READs, both ways


def raw_socket(port: int, source: str = HOST) -> socket.socket:
    """Connect a plain socket to the victim, from an address of 127.0.0.0/8."""
    made = socket.create_connection((HOST, port), SECONDS, (source, 0))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


class RawPeer:
    """A connected peer that sends what its test composes.

    Message and READ numbers are counted as the RFCs want them, so that the victim's device has
    nothing to refuse but what the test makes wrong.

    Args:
        port: the victim's.
        source: the address that it comes from.
        is_our_kind: announce both kinds of first frame, as the software device does: it then asks
            for answers to READs of no bytes. Otherwise the first frame is a READ of no bytes, whose
            answer is the first frame that the victim sends.
        private_data: of the request, at most 512 bytes.
    """

    def __init__(
        self,
        port: int,
        *,
        source: str = HOST,
        is_our_kind: bool = True,
        private_data: bytes = b"",
    ) -> None:
        self.socket = raw_socket(port, source)
        self._messages = self._reads = 0
        request = Frame(
            inbound=DEPTH | UPPER,
            outbound=DEPTH | LOWER | (UPPER if is_our_kind else 0),
            private_data=private_data,
        )
        self.socket.sendall(request.pack())
        self.reply = Frame.receive(self.socket)
        assert self.reply.is_reply
        # The first frame, which lets the victim speak: a WRITE of no bytes, or a READ.
        self.socket.sendall(tagged(WRITE, 0, 0) if is_our_kind else self.read_request(0, 0, 0))

    def message(self, payload: bytes) -> bytes:
        """Compose the next SEND; at most 64,000 bytes. Its CRC is 0: none was agreed on."""
        self._messages += 1
        header = struct.pack(">BBIIII", 0x41, 0x40 | SEND, 0, 0, self._messages, 0)
        whole = struct.pack(">H", len(header) + len(payload)) + header + payload
        return whole + bytes(-len(whole) % 4 + 4)

    def read_request(self, rkey: int, address: int, size: int) -> bytes:
        """Compose the next READ of the victim's memory, into a sink of ours that is called 1."""
        self._reads += 1
        payload = b"".join(
            number.to_bytes(width, "big")
            for number, width in ((1, 4), (0, 8), (size, 4), (rkey, 4), (address, 8))
        )
        return untagged(READ_REQUEST, 1, self._reads, payload)

    def write(self, rkey: int, address: int, payload: bytes) -> bytes:
        """Compose a WRITE into the victim's memory; at most 64,000 bytes."""
        return tagged(WRITE, rkey, address, payload)

    def send(self, composed: bytes) -> None:
        """Send what was composed, all of it."""
        self.socket.sendall(composed)

    def receive(self) -> tuple[int, bytes]:
        """Receive the victim's next frame: its operation, and its payload."""
        size = int.from_bytes(exactly(self.socket, 2), "big")
        rest = exactly(self.socket, size + (-(size + 2) % 4) + 4)
        header = 14 if rest[0] & 0x80 else 18  # tagged, or not
        return rest[1] & 15, rest[header:size]

    def receive_message(self) -> bytes:
        """Receive the payload of the victim's next SEND of one frame, ignoring other frames."""
        while True:
            operation, payload = self.receive()
            if operation == SEND:
                return payload

    def close(self) -> None:
        """Break off."""
        self.socket.close()

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """Sends without pause, from a thread, until the end of the block or of the connection: the same
    bytes again and again, or what a function composes each time. It reads and discards whatever
    comes."""

    def __init__(
        self, peer: RawPeer, composed: bytes | Callable[[], bytes], *, is_reading: bool = True
    ) -> None:
        self._peer = peer
        self._compose = composed if callable(composed) else lambda: composed
        self._is_over = False
        self.sent = 0
        self.was_ended = threading.Event()
        """The victim ended the connection."""
        self._threads = [threading.Thread(target=self._send, daemon=True)]
        if is_reading:
            self._threads.append(threading.Thread(target=self._discard, daemon=True))

    def _send(self) -> None:
        try:
            while not self._is_over:
                composed = self._compose()
                self._peer.socket.sendall(composed)
                self.sent += len(composed)
        except OSError:
            if not self._is_over:
                self.was_ended.set()

    def _discard(self) -> None:
        with suppress(OSError):
            while not self._is_over and self._peer.socket.recv(1 << 16):
                pass

    def __enter__(self) -> "Stream":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        with suppress(OSError):
            self._peer.socket.shutdown(socket.SHUT_RDWR)  # which wakes both threads
        for thread in self._threads:
            thread.join(SECONDS)
