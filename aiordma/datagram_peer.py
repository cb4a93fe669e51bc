"""Whom datagrams go to: the way, the queue pair, and the key that it demands."""

from dataclasses import dataclass, field

from aiordma.verbs import AddressVector

__all__ = ("MOST_QKEY", "UDP_QKEY", "DatagramPeer")

UDP_QKEY = 0x01234567
"""RDMA_UDP_QKEY of rdma_cma.h: what every endpoint of the UDP port space has as its key."""

MOST_QPN = 0xFFFFFF
MOST_QKEY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DatagramPeer:
    """A queue pair that takes datagrams.

    `Datagram.resolve` asks the peer's connection manager for one, `DatagramMessage.source` is one,
    `Datagram.peer` makes one from numbers that were learned some other way.

    Attributes:
        address: the way to its port.
        qpn: its queue pair's number.
        qkey: what a datagram must carry to be taken; others are dropped without a word. (One with
            its highest bit set makes the device send our own queue pair's, man ibv_post_send.)
        private_data: what its program tells those who resolve it; RDMA pads it with zeros. It is
            the same peer with or without.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    address: AddressVector
    qpn: int
    qkey: int = UDP_QKEY
    private_data: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        for name, most in (("qpn", MOST_QPN), ("qkey", MOST_QKEY)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name):#x} is not in 0..{most:#x}")
