"""RoCE v2 packets, and messages to a connection manager, put together in Python: all of their
fields can be wrong. A raw socket sends them, so that they can come from any address.
"""

import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from tests.device.wire import Ends, address_bytes, icrc

__all__ = (
    "ACKNOWLEDGE",
    "FETCH_ADD",
    "READ_REQUEST",
    "SEND_ONLY",
    "WRITE_ONLY",
    "ConnectRequest",
    "Sender",
    "management",
    "message_to_manager",
    "transport",
)

PORT = 4791
SEND_ONLY, WRITE_ONLY, READ_REQUEST, ACKNOWLEDGE, FETCH_ADD = 0x04, 0x0A, 0x0C, 0x11, 0x14
"""Opcodes of reliable connections."""
UD_SEND_ONLY = 0x64
MANAGERS_QKEY = 0x80010000
TCP_SERVICES = 0x0000000001060000
COMMUNICATION_MANAGEMENT = 7
"""The management class."""
CONNECT_REQUEST = 0x10
MAD_BYTES = 256

_INTERNET = 0x0800
"""Of an Ethernet header: IPv4."""


class Sender:
    """Sends UDP datagrams from an address, with a raw socket on one end of a wire.

    Args:
        source, target: IPv4 addresses.
        interface, far_interface: the ends of a veth pair: where the packets leave and arrive.
    """

    def __init__(self, source: str, target: str, interface: str, far_interface: str) -> None:
        self.ends: Ends = ((source, 0xC123), (target, PORT))
        self.sent = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._socket.bind((interface, _INTERNET))
        self._ethernet = _link_address(far_interface) + _link_address(interface) + b"\x08\x00"

    def seal(self, roce: bytes) -> bytes:
        """Return a packet with its right invariant CRC."""
        return roce + icrc(roce, self.ends)

    def send(self, payload: bytes) -> None:
        """Send a UDP payload."""
        (source, source_port), (target, target_port) = self.ends
        length = 8 + len(payload)
        udp = struct.pack(">HHHH", source_port, target_port, length, 0)  # 0: without a checksum
        dont_fragment = 0x4000
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, dont_fragment, 64, 17, 0)
        ip += address_bytes(source) + address_bytes(target)
        ip = ip[:10] + _checksum(ip) + ip[12:]
        self._socket.send(self._ethernet + ip + udp + payload)
        self.sent += 1

    def close(self) -> None:
        self._socket.close()


def _link_address(interface: str) -> bytes:
    text = Path(f"/sys/class/net/{interface}/address").read_text()
    return bytes.fromhex(text.strip().replace(":", ""))


def _checksum(header: bytes) -> bytes:
    total = sum(struct.unpack(f">{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF)


def transport(opcode: int, qp_num: int, psn: int, *, padding: int = 0) -> bytes:
    """The base transport header, which asks for an acknowledgement."""
    return struct.pack(">BBHII", opcode, padding << 4, 0xFFFF, qp_num, 1 << 31 | psn & 0xFFFFFF)


def message_to_manager(mad: bytes, *, qp_num: int = 1, qkey: int = MANAGERS_QKEY) -> bytes:
    """A packet, without its CRC, to the queue pair of the connection manager."""
    padding = -len(mad) % 4
    header = transport(UD_SEND_ONLY, qp_num, 0, padding=padding)
    return header + struct.pack(">II", qkey, 1) + mad + bytes(padding)


def management(
    data: bytes,
    attribute: int = CONNECT_REQUEST,
    *,
    kind: int = COMMUNICATION_MANAGEMENT,
    version: int = 2,
    method: int = 3,
    base: int = 1,
) -> bytes:
    """A management datagram."""
    header = struct.pack(">BBBBIQHHI", base, kind, version, method, 0, 0x77, attribute, 0, 0)
    return (header + data).ljust(MAD_BYTES, b"\0")


@dataclass(frozen=True)
class ConnectRequest:
    """A REQ (InfiniBand specification, 12.6.5), as librdmacm's rdma_connect has the kernel send it.

    `ip_version` to `destination` are the connection manager's part of the private data.
    """

    sender: Sender
    port: int
    number: int
    qp_num: int = 0x123456
    qkey: int = 0
    responder_resources: int = 1
    initiator_depth: int = 1
    remote_timeout: int = 20
    service_type: int = 0
    flow_control: int = 0
    psn: int = 0x654321
    local_timeout: int = 20
    retry_count: int = 6
    pkey: int = 0xFFFF
    mtu: int = 3
    rnr_retry_count: int = 7
    cm_retries: int = 15
    shared_receive: int = 0
    service: int | None = None
    gids: tuple[bytes, bytes] | None = None
    hop_limit: int = 64
    cma_version: int = 0
    ip_version: int = 4
    source_port: int = 0x4321
    source: bytes | None = None
    destination: bytes | None = None
    private_data: bytes = b""

    def pack(self) -> bytes:
        """The management datagram."""
        addresses = [address_bytes(host) for host, _ in self.sender.ends]
        ours, theirs = self.gids or [bytes(10) + b"\xff\xff" + each for each in addresses]
        service = TCP_SERVICES | self.port if self.service is None else self.service
        data = struct.pack(">IIQQII", self.number, 0, service, self.number, 0, self.qkey)
        data += struct.pack(
            ">IIIIHBB",
            self.qp_num << 8 | self.responder_resources,
            self.initiator_depth,
            self.remote_timeout << 3 | self.service_type << 1 | self.flow_control,
            self.psn << 8 | self.local_timeout << 3 | self.retry_count,
            self.pkey,
            self.mtu << 4 | self.rnr_retry_count,
            self.cm_retries << 4 | self.shared_receive << 3,
        )
        path = struct.pack(
            ">HH16s16sIBBBB", 0xFFFF, 0xFFFF, ours, theirs, 3, 0, self.hop_limit, 8, 0x90
        )
        data += path.ljust(88, b"\0")  # no alternative path
        source = addresses[0] if self.source is None else self.source
        destination = addresses[1] if self.destination is None else self.destination
        private = struct.pack(">BBH", self.cma_version, self.ip_version << 4, self.source_port)
        private += source.rjust(16, b"\0") + destination.rjust(16, b"\0") + self.private_data
        return management(data + private.ljust(92, b"\0"))
