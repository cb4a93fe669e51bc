"""What `rdma resource show` shows, asked of the kernel by netlink: starting that program takes a
third of a second in the VM, before and after each test."""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ("has_port", "kernel_counts", "kernel_listens", "kernel_taint")

# linux/netlink.h and rdma/rdma_netlink.h
NETLINK_RDMA = 20
NLM_F_REQUEST_DUMP = 0x1 | 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLA_TYPE_MASK = 0x3FFF
RDMA_NLDEV_CMD_RES_GET = 5 << 10 | 9
RDMA_NLDEV_CMD_RES_CM_ID_GET = 5 << 10 | 11
DEV_INDEX, STATE, CM_IDS, SRC_ADDR = 1, 27, 30, 33
RDMA_CM_LISTEN = 8
DEV_NAME, RES_SUMMARY, RES_SUMMARY_ENTRY, ENTRY_NAME, ENTRY_CURR = 2, 15, 16, 17, 18

MESSAGE = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port."""
ATTRIBUTE = struct.Struct("=HH")
"""struct nlattr: length, type."""


def kernel_counts(device: str) -> dict[str, int]:
    """Count the objects of a device by kind: pd, cq, qp, cm_id, mr, ctx, srq."""
    summary = _device(device)[RES_SUMMARY]
    return dict(_count(entry) for _, entry in _attributes(summary))


def kernel_listens(device: str, port: int) -> bool:
    """Whether an identifier of the connection manager listens on that port of a device."""
    index = ATTRIBUTE.pack(ATTRIBUTE.size + 4, DEV_INDEX) + _device(device)[DEV_INDEX]
    for message in _ask(RDMA_NLDEV_CMD_RES_CM_ID_GET, index):
        for _, entry in _attributes(dict(_attributes(message)).get(CM_IDS, b"")):
            fields = dict(_attributes(entry))
            # A sockaddr: the port follows the family, in network order.
            if fields.get(STATE) == bytes([RDMA_CM_LISTEN]) and port == int.from_bytes(
                fields.get(SRC_ADDR, b"")[2:4], "big"
            ):
                return True
    return False


def has_port(port: int) -> bool:
    """Whether a process of this machine listens on a TCP port, or has a UDP port."""
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, found, *_ = line.split()
            if found == state and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def kernel_taint() -> int:
    """Return the kernel's taint, which grows when it has warned, or has lost a process."""
    return int(Path("/proc/sys/kernel/tainted").read_text())


def _device(name: str) -> dict[int, bytes]:
    for message in _ask(RDMA_NLDEV_CMD_RES_GET):
        fields = dict(_attributes(message))
        if _text(fields[DEV_NAME]) == name:
            return fields
    raise LookupError(f"the kernel has no RDMA device {name!r}")


def _ask(command: int, attributes: bytes = b"") -> Iterator[bytes]:
    header = MESSAGE.pack(MESSAGE.size + len(attributes), command, NLM_F_REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as kernel:
        kernel.send(header + attributes)
        yield from _answers(kernel)


def _answers(kernel: socket.socket) -> Iterator[bytes]:
    while True:
        datagram = kernel.recv(1 << 16)
        while datagram:
            length, kind, *_ = MESSAGE.unpack_from(datagram)
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                raise OSError(-struct.unpack_from("=i", datagram, MESSAGE.size)[0], "netlink")
            yield datagram[MESSAGE.size : length]
            datagram = datagram[length:]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind = ATTRIBUTE.unpack_from(data)
        yield kind & NLA_TYPE_MASK, data[ATTRIBUTE.size : length]
        data = data[length + -length % 4 :]


def _count(entry: bytes) -> tuple[str, int]:
    fields = dict(_attributes(entry))
    return _text(fields[ENTRY_NAME]), int.from_bytes(fields[ENTRY_CURR], "little")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode()
