"""Destination of datagrams: address vector, queue pair number and qkey."""

from dataclasses import dataclass, field

from aiordma._base.arguments import instance, whole_number
from aiordma.verbs import AddressVector

UDP_QKEY = 0x01234567
"""RDMA_UDP_QKEY of rdma_cma.h: the qkey of every endpoint of the UDP port space."""

MOST_QP_NUM = 0xFFFFFF
MOST_QKEY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DatagramPeer:
    """Destination of datagrams: a queue pair and the path to it.

    `Datagram.resolve` queries the peer's connection manager for it. `DatagramMessage.source` is the
    sender of a datagram. `Datagram.peer` makes one from numbers from another source.

    Attributes:
        address: the path to the peer's port.
        qp_num: the peer's queue pair number.
        qkey: the key that a datagram to the peer must contain; the peer's device silently drops
            other datagrams. (If the highest bit is set, devices other than rxe send the local queue
            pair's qkey instead, man ibv_post_send.)
        private_data: the data that the peer's program sends to peers that resolve it; RDMA pads it
            with zeros. It is ignored when peers are compared.

    Raises:
        TypeError, ValueError: a field is of the wrong type, or out of range; the message names it.
    """

    address: AddressVector
    qp_num: int
    qkey: int = UDP_QKEY
    private_data: bytes = field(default=b"", compare=False)

    def __post_init__(self) -> None:
        instance(self.address, "address", AddressVector)
        for name, most in (("qp_num", MOST_QP_NUM), ("qkey", MOST_QKEY)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, 0, most))
