"""The parameters that a connect and an accept send to the peer, and the limits of private data."""

from dataclasses import dataclass
from typing import Any

from aiordma._base.arguments import data as checked_data
from aiordma._base.arguments import whole_number
from aiordma._base.options import ConnectionOptions
from aiordma._native import ffi

# Bytes of private data in an InfiniBand REQ, REP and REJ (man rdma_connect, rdma_accept,
# rdma_reject). In the REQ, an IP port space uses 36 bytes for its own header.
MAX_CONNECT_PRIVATE_DATA = 56
MAX_ACCEPT_PRIVATE_DATA = 196
MAX_REJECT_PRIVATE_DATA = 148

# The same for the UDP port space's SIDR REQ and SIDR REP. A rejection is a REP, too.
MAX_DATAGRAM_CONNECT_PRIVATE_DATA = 180
MAX_DATAGRAM_ACCEPT_PRIVATE_DATA = 136

IN_REQUEST = (MAX_CONNECT_PRIVATE_DATA, "a connection request")
IN_ACCEPT = (MAX_ACCEPT_PRIVATE_DATA, "an accept")
"""What carries private data, for `check_private_data`."""

DEVICE_MAXIMUM = 0xFF
"""In `responder_resources` and `initiator_depth`: the device's maximum."""


def check_private_data(value: Any, most: int, carrier: str, call: str = "") -> bytes:
    """Return private data as bytes.

    Args:
        value: the argument.
        most: the maximum number of bytes.
        carrier: the message that carries the data, for the error.
        call: the function that received the argument.

    Raises:
        TypeError: the value is not bytes.
        ValueError: the data is too long. The text has the length and the limit.
    """
    if type(value) is bytes and len(value) <= most:
        return value
    data = checked_data(value, "private_data", call)
    if len(data) > most:
        where = f"{call}(): " if call else ""
        raise ValueError(
            f"{where}private_data of {len(data)} bytes: {carrier} carries at most {most}"
        )
    return data


@dataclass(frozen=True, slots=True)
class ConnectionParameters:
    """The parameters that a connect or an accept sends to the peer (`rdma_conn_param`, man
    rdma_connect).

    librdmacm uses `qp_num` and `shared_receive` only if the identifier has no queue pair itself:
    the queue pair was created without librdmacm, or an accept in the UDP port space names a shared
    queue pair.

    Attributes:
        private_data: bytes for the peer's program.
        responder_resources: READs and atomics of the peer that the device serves at the same time,
            0 to 254; 255: as many as it can.
        initiator_depth: READs and atomics that this side has in flight, 0 to 254; 255: as many as
            the device can have.
        retry_count: retransmissions without an acknowledgement, 0 to 7.
        rnr_retry_count: how often the peer resends a message for which no receive is posted on
            this side, 0 to 7; 7: no limit.
        qp_num: the number of a queue pair that librdmacm did not create; 0: it did.
        shared_receive: whether that queue pair has a shared receive queue.
        flow_control: whether the device has end-to-end flow control.
    """

    private_data: bytes = b""
    responder_resources: int = DEVICE_MAXIMUM
    initiator_depth: int = DEVICE_MAXIMUM
    retry_count: int = 6
    rnr_retry_count: int = 7
    qp_num: int = 0
    shared_receive: bool = False
    flow_control: bool = True

    def _check(self, most_private_data: int, call: str) -> None:
        """Check the values, which C would truncate or misread.

        Args:
            most_private_data: the MAX_..._PRIVATE_DATA of the message and the port space.
            call: the message that carries the private data, for the error.

        Raises:
            TypeError: a field has an unsuitable type. The text names it.
            ValueError: a field is out of range. The text has the range.
        """
        check_private_data(self.private_data, most_private_data, call)
        for name, most in (
            ("responder_resources", 255),
            ("initiator_depth", 255),
            ("retry_count", 7),
            ("rnr_retry_count", 7),
            ("qp_num", 0xFFFFFF),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                whole_number(value, name, 0, most)

    def _to_c(self) -> tuple[Any, Any]:
        """Return the same as `parameters_to_c`."""
        raw, data = parameters_to_c(self, self.private_data)
        raw.flow_control = self.flow_control
        raw.srq = self.shared_receive
        raw.qp_num = self.qp_num
        return raw, data


def parameters_to_c(
    offered: ConnectionParameters | ConnectionOptions, private_data: bytes
) -> tuple[Any, Any]:
    """Return a struct rdma_conn_param, and the private data that it points to, which the caller
    keeps alive. The values are checked already."""
    data = ffi.new("uint8_t[]", bytes(private_data)) if private_data else ffi.NULL
    values = (
        data,
        len(private_data),
        offered.responder_resources,
        offered.initiator_depth,
        True,  # flow_control
        offered.retry_count,
        offered.rnr_retry_count,
    )
    return ffi.new("struct rdma_conn_param *", values), data


@dataclass(frozen=True, slots=True)
class Ece:
    """Options of enhanced connection establishment (`ibv_ece`): bits that two devices of one vendor
    negotiate. 0 means no options.

    Attributes:
        vendor_id: the vendor of the device, 32 bits.
        options: the vendor's bits, 32 bits.

    Raises:
        TypeError, ValueError: a field is not a number of 32 bits.
    """

    vendor_id: int
    options: int

    def __post_init__(self) -> None:
        for name in ("vendor_id", "options"):
            whole_number(getattr(self, name), name, 0, 2**32 - 1)
