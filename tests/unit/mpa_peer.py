"""The other end of the MPA handshake (RFC 5044, 7.1; RFC 6581, 9), of plain sockets and bytes,
and identifiers of the software device that it is met with."""

import select
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass

from aiordma.verbs import (
    Capacity,
    CmEvent,
    CmEventType,
    CompletionQueue,
    ConnectionParameters,
    EventChannel,
    Identifier,
)

HOST = "127.0.0.1"
MARKERS, CRC, REJECTS, ENHANCED = 0x80, 0x40, 0x20, 0x10
UPPER, LOWER = 0x8000, 0x4000  # of IRD: peer to peer, empty frame; of ORD: WRITE, READ


@dataclass(frozen=True)
class Frame:
    """A frame of the handshake, as the RFCs have it."""

    is_reply: bool = False
    flags: int = ENHANCED
    revision: int = 2
    inbound: int = 4
    outbound: int = 4
    private_data: bytes = b""

    def pack(self) -> bytes:
        depths = b""
        if self.revision == 2 and self.flags & ENHANCED:
            depths = struct.pack(">HH", self.inbound, self.outbound)
        key = b"MPA ID Rep Frame" if self.is_reply else b"MPA ID Req Frame"
        data = depths + self.private_data
        return key + struct.pack(">BBH", self.flags, self.revision, len(data)) + data

    @classmethod
    def receive(cls, peer: socket.socket) -> "Frame":
        head = exactly(peer, 20)
        flags, revision, size = struct.unpack(">BBH", head[16:])
        data = exactly(peer, size)
        inbound = outbound = 0
        if revision == 2 and flags & ENHANCED:
            inbound, outbound = struct.unpack(">HH", data[:4])
            data = data[4:]
        return cls(head[:16] == b"MPA ID Rep Frame", flags, revision, inbound, outbound, data)


def exactly(peer: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = peer.recv(size - len(got))
        assert more, f"the device ended after {got!r}"
        got += more
    return got


def expect(
    channel: EventChannel,
    kind: CmEventType,
    seconds: float = 10,
    passing: CmEventType | None = None,
) -> CmEvent:
    """Return the next event, which is of this kind, but for events of the kind `passing`."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        select.select([channel.fd], [], [], 0.1)
        for event in channel.events():
            if event.type is not passing:
                assert event.type is kind
                return event
    raise AssertionError(f"no {kind.name} within {seconds} s")


def has_ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True


class Device:
    """Identifiers of the software device, with queue pairs where they need one."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.channel = stack.enter_context(EventChannel("software"))

    def identifier(self, key: int = 0) -> Identifier:
        return self.stack.enter_context(Identifier(self.channel, key=key))

    def listener(self, backlog: int = 4) -> tuple[Identifier, int]:
        listener = self.identifier()
        listener.bind(HOST, 0)
        listener.listen(backlog)
        assert listener.local_address is not None
        return listener, listener.local_address[1]

    def give_queue_pair(self, identifier: Identifier) -> None:
        context = self.stack.enter_context(identifier.context())
        domain = self.stack.enter_context(context.alloc_pd())
        queue = self.stack.enter_context(CompletionQueue(context, 8))
        identifier.create_queue_pair(domain, queue, queue, Capacity(4, 4))

    def connecting(
        self,
        port: int,
        parameters: ConnectionParameters,
        *,
        host: str = HOST,
        tos: int | None = None,
    ) -> Identifier:
        identifier = self.identifier()
        if tos is not None:
            identifier.set_tos(tos)
        identifier.resolve_address(host, port, None, 1000)
        expect(self.channel, CmEventType.ADDR_RESOLVED)
        identifier.resolve_route(1000)
        expect(self.channel, CmEventType.ROUTE_RESOLVED)
        self.give_queue_pair(identifier)
        identifier.connect(parameters)
        return identifier
