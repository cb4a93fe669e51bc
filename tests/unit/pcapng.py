"""Read a pcapng file of raw IP packets, with TCP's bytes put together. For tests of the capture.

Written from draft-ietf-opsawg-pcapng, RFC 791, 8200, 9293 and 768, not from the device's code."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

SECTION, INTERFACE, PACKET = 0x0A0D0D0A, 1, 6
RAW_IP = 101
TCP, UDP = 6, 17
SYN, ACK = 2, 16


@dataclass
class Capture:
    """The connections' bytes by (source port, destination port), and the datagrams."""

    streams: dict[tuple[int, int], bytes] = field(default_factory=dict)
    flags: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    datagrams: list[tuple[int, int, bytes]] = field(default_factory=list)
    addresses: set[bytes] = field(default_factory=set)
    nanoseconds: list[int] = field(default_factory=list)


def read_capture(path: Path) -> Capture:
    """Read a capture; an AssertionError says what is wrong in it."""
    data, capture = path.read_bytes(), Capture()
    types = []
    while data:
        kind, size = struct.unpack_from("=II", data)
        assert size % 4 == 0
        assert len(data) >= size >= 12, "a block is cut short"
        assert struct.unpack_from("=I", data, size - 4) == (size,), "the two sizes differ"
        body, data = data[8 : size - 4], data[size:]
        types.append(kind)
        if kind == SECTION:
            assert struct.unpack_from("=IHH", body) == (0x1A2B3C4D, 1, 0)
        elif kind == INTERFACE:
            assert struct.unpack_from("=H", body) == (RAW_IP,)
        else:
            assert kind == PACKET
            interface, high, low, kept, length = struct.unpack_from("=IIIII", body)
            assert (interface, kept) == (0, length)
            capture.nanoseconds.append(high << 32 | low)
            _read_packet(body[20 : 20 + kept], capture)
    assert types[:2] == [SECTION, INTERFACE]
    return capture


def _sum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _read_packet(packet: bytes, capture: Capture) -> None:
    if packet[0] >> 4 == 4:
        size, protocol, body = (packet[0] & 15) * 4, packet[9], packet[(packet[0] & 15) * 4 :]
        assert _sum(packet[:size]) == 0xFFFF, "the checksum of the IPv4 header is wrong"
        assert struct.unpack_from("!H", packet, 2) == (len(packet),)
        capture.addresses |= {packet[12:16], packet[16:20]}
    else:
        assert packet[0] >> 4 == 6
        protocol, body = packet[6], packet[40:]
        assert struct.unpack_from("!H", packet, 4) == (len(body),)
        capture.addresses |= {packet[8:24], packet[24:40]}
    source, destination = struct.unpack_from("!HH", body)
    if protocol == UDP:
        assert struct.unpack_from("!H", body, 4) == (len(body),)
        addresses = packet[12:20] if packet[0] >> 4 == 4 else packet[8:40]
        pseudo = addresses + struct.pack("!HH", len(body), protocol)
        assert _sum(pseudo + body + bytes(len(body) % 2)) == 0xFFFF, "UDP's checksum is wrong"
        capture.datagrams.append((source, destination, body[8:]))
        return
    assert protocol == TCP
    sequence, acknowledged = struct.unpack_from("!II", body, 4)
    flags, payload = body[13], body[(body[12] >> 4) * 4 :]
    key, back = (source, destination), (destination, source)
    before = capture.streams.setdefault(key, b"")
    capture.flags.setdefault(key, []).append(flags)
    # The SYN is byte 0. Nothing is missing, and nothing comes twice.
    assert sequence == (0 if flags & SYN else (1 + len(before)) % 2**32)
    if flags & ACK:
        assert acknowledged == (1 + len(capture.streams.get(back, b""))) % 2**32
    capture.streams[key] = before + payload


def frames(stream: bytes) -> list[tuple[int, bytes]]:
    """Return (RDMAP opcode, payload) of the MPA frames after the handshake (RFC 5044, 5041, 5040).
    The stream has to end with a whole frame."""
    assert stream[:16] in (b"MPA ID Req Frame", b"MPA ID Rep Frame")
    at, found = 20 + struct.unpack_from("!H", stream, 18)[0], []
    while at < len(stream):
        (length,) = struct.unpack_from("!H", stream, at)
        control, opcode = stream[at + 2], stream[at + 3] & 15
        header = 16 if control & 0x80 else 20
        found.append((opcode, stream[at + header : at + 2 + length]))
        at += 2 + length + -(2 + length) % 4 + 4
    assert at == len(stream), "the last frame is cut short"
    return found
