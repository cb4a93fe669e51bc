"""A peer of a software device's connection, made of a plain socket and of frames (RFC 5040, 5041,
5044) that a test writes and reads."""

import socket
import struct
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from aiordma import Access, MemoryRegion
from aiordma.verbs import (
    Capacity,
    CmEventType,
    CompletionChannel,
    CompletionQueue,
    ConnectionParameters,
    QueuePair,
)
from tests.unit.mpa_peer import CRC, ENHANCED, HOST, LOWER, UPPER, Device, Frame, exactly, expect

SEND, READ_REQUEST, READ_RESPONSE, TERMINATE = 3, 1, 2, 7


def table() -> list[int]:
    made = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        made.append(value)
    return made


TABLE = table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def frame(header: bytes, payload: bytes = b"") -> bytes:
    """An FPDU of a DDP and RDMAP header and a payload."""
    whole = struct.pack(">H", len(header) + len(payload)) + header + payload
    whole += bytes(-len(whole) % 4)
    return whole + struct.pack("<I", crc32c(whole))


def untagged(operation: int, queue: int, number: int, payload: bytes = b"") -> bytes:
    return frame(struct.pack(">BBIIII", 0x41, 0x40 | operation, 0, queue, number, 0), payload)


def tagged(
    operation: int, key: int, offset: int, payload: bytes = b"", *, is_last: bool = True
) -> bytes:
    first = 0xC1 if is_last else 0x81
    return frame(struct.pack(">BBIQ", first, 0x40 | operation, key, offset), payload)


@dataclass(frozen=True)
class Heard:
    """A frame of the device's: its RDMAP operation, the header behind that, and the payload."""

    operation: int
    header: bytes
    payload: bytes
    is_intact: bool

    @property
    def sequence(self) -> int:
        return int.from_bytes(self.header[8:12], "big")

    @property
    def sink(self) -> int:
        """That of a READ's request."""
        return int.from_bytes(self.payload[:4], "big")


class Wire:
    """A connection of the device with a peer that the test plays."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        crc: bool = False,
        depth: int = 4,
        backlog: int = 0,
        is_our_kind: bool = True,
        has_channel: bool = False,
    ):
        device = Device(stack)
        server = stack.enter_context(closing(socket.socket()))
        if backlog:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, backlog)
        server.bind((HOST, 0))
        server.listen(1)
        self.identifier = identifier = device.identifier()
        identifier.resolve_address(HOST, server.getsockname()[1], None, 1000)
        expect(device.channel, CmEventType.ADDR_RESOLVED)
        identifier.resolve_route(1000)
        expect(device.channel, CmEventType.ROUTE_RESOLVED)
        context = stack.enter_context(identifier.context())
        self.domain = stack.enter_context(context.alloc_pd())
        self.events = stack.enter_context(CompletionChannel(context)) if has_channel else None
        self.queue = stack.enter_context(CompletionQueue(context, 64, self.events))
        self.pair: QueuePair = identifier.create_queue_pair(
            self.domain, self.queue, self.queue, Capacity(16, 16)
        )
        identifier.connect(ConnectionParameters(responder_resources=16, initiator_depth=16))
        accepted, _ = server.accept()
        self.peer = stack.enter_context(closing(accepted))
        self.peer.settimeout(10)
        Frame.receive(self.peer)
        flags = ENHANCED | (CRC if crc else 0)
        # Both bits: that is how the device knows its own kind, which answers READs of no bytes.
        announced = UPPER | LOWER if is_our_kind else UPPER
        reply = Frame(True, flags, inbound=depth, outbound=announced | 16)
        self.peer.sendall(reply.pack())
        expect(device.channel, CmEventType.ESTABLISHED)
        self.channel, self.crc, self.stack = device.channel, crc, stack

    def region(self, buffer: Any, access: Access = Access.LOCAL_WRITE) -> MemoryRegion:
        return self.stack.enter_context(MemoryRegion(self.domain, buffer, access))

    def send(self, wr_id: int, region: MemoryRegion, **how: Any) -> None:
        self.pair.post_send(wr_id, [region[:]], **how)

    def hear(self) -> Heard:
        head = exactly(self.peer, 2)
        size = int.from_bytes(head, "big")
        rest = exactly(self.peer, size + (-(size + 2) % 4) + 4)
        length = 16 if rest[0] & 0x80 else 20
        is_intact = not self.crc or rest[-4:] == struct.pack("<I", crc32c(head + rest[:-4]))
        return Heard(rest[1] & 15, rest[2 : length - 2], rest[length - 2 : size], is_intact)

    def completions(self, count: int, seconds: float = 5) -> list[tuple[int, int]]:
        """The wr_ids and statuses of so many completions."""
        limit = time.monotonic() + seconds
        got: list[tuple[int, int]] = []
        while len(got) < count and time.monotonic() < limit:
            got += [(each.wr_id, each.status) for each in self.queue.poll()]
            time.sleep(0.002)
        assert len(got) == count, f"{got} after {seconds} s"
        return got
