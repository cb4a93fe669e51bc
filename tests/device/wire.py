"""Datagrams as the specification has them, put together and taken apart in Python: a peer of the
software device that shares no line with it, at the end of a plain UDP socket."""

import ipaddress
import socket
import struct
import zlib
from dataclasses import dataclass
from functools import cache

__all__ = ("Packet", "Question", "answer_of", "icrc", "pack", "transport", "unpack")

SERVICES_QKEY = 0x80010000
UDP_SERVICES = 0x0000000001110000


@dataclass(frozen=True)
class Packet:
    payload: bytes
    to_qpn: int
    from_qpn: int
    qkey: int
    psn: int = 0
    immediate: int | None = None
    solicited: bool = False


Ends = tuple[tuple[str, int], tuple[str, int]]
"""(address, port) of the sender and of the receiver."""


@cache
def address_bytes(host: str) -> bytes:
    """An address in network order."""
    return ipaddress.ip_address(host).packed


def icrc(roce: bytes, ends: Ends) -> bytes:
    """The invariant CRC (annex A17): ones stand for what changes on the way."""
    (source, source_port), (target, target_port) = ends
    length = 8 + len(roce) + 4
    if "." in source:
        dont_fragment = 0x4000
        header = struct.pack(
            ">BBHHHBBH", 0x45, 0xFF, 20 + length, 0, dont_fragment, 0xFF, 17, 0xFFFF
        )
    else:
        header = struct.pack(">IHBB", 0x6FFFFFFF, length, 17, 0xFF)
    header += address_bytes(source) + address_bytes(target)
    udp = struct.pack(">HHHH", source_port, target_port, length, 0xFFFF)
    masked = b"\xff" * 8 + header + udp + roce[:4] + b"\xff" + roce[5:]
    return struct.pack("<I", zlib.crc32(masked))


def transport(opcode: int, qp_num: int, psn: int) -> bytes:
    """The base transport header, which asks for an acknowledgement."""
    return struct.pack(">BBHII", opcode, 0, 0xFFFF, qp_num, 1 << 31 | psn & 0xFFFFFF)


def pack(packet: Packet, ends: Ends) -> bytes:
    """The UDP payload."""
    with_immediate = packet.immediate is not None
    padding = -len(packet.payload) % 4
    roce = struct.pack(
        ">BBHIIII",
        0x65 if with_immediate else 0x64,
        packet.solicited << 7 | padding << 4,
        0xFFFF,
        packet.to_qpn,
        packet.psn,
        packet.qkey,
        packet.from_qpn,
    )
    if packet.immediate is not None:
        roce += struct.pack(">I", packet.immediate)
    roce += packet.payload + bytes(padding)
    return roce + icrc(roce, ends)


def unpack(data: bytes, ends: Ends) -> Packet:
    """The other way round; an AssertionError is what is wrong with it."""
    assert data[-4:] == icrc(data[:-4], ends)
    opcode, flags, pkey, to_qpn, psn, qkey, from_qpn = struct.unpack(">BBHIIII", data[:20])
    assert opcode in (0x64, 0x65)
    assert pkey == 0xFFFF
    assert flags & 0x4F == 0
    immediate = struct.unpack(">I", data[20:24])[0] if opcode == 0x65 else None
    start = 20 if immediate is None else 24
    padding = flags >> 4 & 3
    payload = data[start : -4 - padding]
    assert padding == -len(payload) % 4
    return Packet(payload, to_qpn, from_qpn, qkey, psn, immediate, bool(flags >> 7))


@dataclass(frozen=True)
class Question:
    """A SIDR_REQ. What it says of itself can be wrong: `ends`, `service`."""

    ends: Ends
    number: int = 0x11223344
    transaction: int = 0x5566778899AABBCC
    private_data: bytes = b""
    service: int | None = None
    class_version: int = 2
    to_qpn: int = 1
    qkey: int = SERVICES_QKEY

    def pack(self, ends: Ends | None = None) -> bytes:
        """The UDP payload, between ends that may be others than it says."""
        (source, source_port), (target, target_port) = self.ends
        service = UDP_SERVICES | target_port if self.service is None else self.service
        mad = struct.pack(
            ">BBBBIQHHI", 1, 7, self.class_version, 3, 0, self.transaction, 0x17, 0, 0
        )
        mad += struct.pack(">IHHQ", self.number, 0xFFFF, 0, service)
        version = ipaddress.ip_address(source).version
        mad += struct.pack(">BBH", 0, version << 4, source_port)
        for address in (source, target):
            mad += ipaddress.ip_address(address).packed.rjust(16, b"\0")
        mad += self.private_data.ljust(180, b"\0")
        assert len(mad) == 256
        return pack(Packet(mad, self.to_qpn, 1, self.qkey), ends or self.ends)


@dataclass(frozen=True)
class Answer:
    number: int
    transaction: int
    status: int
    qp_num: int
    qkey: int
    service: int
    private_data: bytes


def answer_of(data: bytes, ends: Ends) -> Answer:
    """A SIDR_REP, from a UDP payload."""
    packet = unpack(data, ends)
    assert (packet.to_qpn, packet.from_qpn, packet.qkey) == (1, 1, SERVICES_QKEY)
    mad = packet.payload
    assert len(mad) == 256
    assert mad[:4] == bytes([1, 7, 2, 3])
    (transaction, attribute) = struct.unpack(">QH", mad[8:18])
    assert attribute == 0x18
    number, status, _, _, qp_num, service, qkey = struct.unpack(">IBBHIQI", mad[24:48])
    return Answer(number, transaction, status, qp_num >> 8, qkey, service, mad[120:])


def plain_socket(host: str) -> socket.socket:
    """A UDP socket of no RDMA device, which waits for half a second."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(0.5)
    made.bind((host, 0))
    return made
