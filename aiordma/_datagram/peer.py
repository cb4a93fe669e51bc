"""Destination of datagrams: address vector, queue pair number and qkey."""

from dataclasses import dataclass, field

from aiordma._base.arguments import instance, whole_number
from aiordma.verbs import AddressVector

__all__ = ("MOST_QKEY", "MOST_QPN", "UDP_QKEY", "DatagramPeer")

UDP_QKEY = 0x01234567
"""RDMA_UDP_QKEY of rdma_cma.h: what every endpoint of the UDP port space has as its key."""

MOST_QPN = 0xFFFFFF
MOST_QKEY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DatagramPeer:
    """Destination of datagrams: a queue pair and the path to it.

    `Datagram.resolve` asks the peer's connection manager for one, `DatagramMessage.source` is one,
    `Datagram.peer` makes one from numbers that were learned some other way.

    Attributes:
        address: the path to its port.
        qpn: its queue pair's number.
        qkey: what a datagram must carry to be received; the device drops others without a report.
            (One with its highest bit set makes the device send our own queue pair's, man
            ibv_post_send.)
        private_data: from its program, for those that resolve it; RDMA pads it with zeros. Peers
            that differ only in it are equal.

    Raises:
        TypeError, ValueError: a field is of another type, or out of range; the message names it.
    """

    address: AddressVector
    qpn: int
    qkey: int = UDP_QKEY
    private_data: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        instance(self.address, "address", AddressVector)
        for name, most in (("qpn", MOST_QPN), ("qkey", MOST_QKEY)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, 0, most))
