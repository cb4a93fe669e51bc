"""What a connect and an accept tell the peer, and how much of the program's own fits beside it."""

from dataclasses import dataclass
from typing import Any

from aiordma._base.arguments import data as checked_data
from aiordma._base.arguments import whole_number
from aiordma._native import ffi

__all__ = (
    "DEVICE_MAXIMUM",
    "MAX_ACCEPT_PRIVATE_DATA",
    "MAX_CONNECT_PRIVATE_DATA",
    "MAX_DATAGRAM_ACCEPT_PRIVATE_DATA",
    "MAX_DATAGRAM_CONNECT_PRIVATE_DATA",
    "MAX_REJECT_PRIVATE_DATA",
    "ConnectionParameters",
    "Ece",
    "check_private_data",
)

# What fits beside the CM's own header in an InfiniBand REQ, REP and REJ (man rdma_connect,
# rdma_accept, rdma_reject). An IP port space puts 36 bytes of its own into the REQ.
MAX_CONNECT_PRIVATE_DATA = 56
MAX_ACCEPT_PRIVATE_DATA = 196
MAX_REJECT_PRIVATE_DATA = 148

# The same of the UDP port space's SIDR REQ and SIDR REP; a refusal is a REP too.
MAX_DATAGRAM_CONNECT_PRIVATE_DATA = 180
MAX_DATAGRAM_ACCEPT_PRIVATE_DATA = 136

DEVICE_MAXIMUM = 0xFF
"""In the two depth fields: as many outstanding READs and atomics as the device can."""


def check_private_data(value: Any, most: int, carrier: str, call: str = "") -> bytes:
    """Return private data as bytes.

    Args:
        value: what was passed.
        most: how many bytes fit.
        carrier: what carries them, for the message.
        call: the function that they were passed to.

    Raises:
        TypeError: these are no bytes.
        ValueError: names the length and the limit.
    """
    data = checked_data(value, "private_data", call)
    if len(data) > most:
        where = f"{call}(): " if call else ""
        raise ValueError(
            f"{where}private_data of {len(data)} bytes: {carrier} carries at most {most}"
        )
    return data


@dataclass(frozen=True, slots=True)
class ConnectionParameters:
    """`rdma_conn_param`: what a connect or an accept tells the peer (man rdma_connect).

    The retry counts are 3-bit numbers; rnr_retry_count 7 means for ever. `qpn` is looked at only
    where librdmacm does not know the queue pair: it was made without it, or an accept in the UDP
    port space names one that is shared. `shared_receive` says then that it has a shared receive
    queue. `flow_control` says that the device has end-to-end flow control.
    """

    private_data: bytes = b""
    responder_resources: int = DEVICE_MAXIMUM
    initiator_depth: int = DEVICE_MAXIMUM
    retry_count: int = 6
    rnr_retry_count: int = 7
    qpn: int = 0
    shared_receive: bool = False
    flow_control: bool = True

    def _check(self, most_private_data: int, call: str) -> None:
        """Refuse values that C would cut off or misread.

        Args:
            most_private_data: one of the maxima of this module; the port space has its own.
            call: what carries them, for the message.

        Raises:
            TypeError: names the field, and what is expected.
            ValueError: names the field and its range.
        """
        check_private_data(self.private_data, most_private_data, call)
        for name, most in (
            ("responder_resources", 255),
            ("initiator_depth", 255),
            ("retry_count", 7),
            ("rnr_retry_count", 7),
            ("qpn", 0xFFFFFF),
        ):
            whole_number(getattr(self, name), name, 0, most)

    def _to_c(self) -> tuple[Any, Any]:
        """Return struct rdma_conn_param and the memory that it points to; keep both alive."""
        raw = ffi.new("struct rdma_conn_param *")
        data = ffi.new("uint8_t[]", bytes(self.private_data) or b"\0")
        raw.private_data = data if self.private_data else ffi.NULL
        raw.private_data_len = len(self.private_data)
        raw.responder_resources = self.responder_resources
        raw.initiator_depth = self.initiator_depth
        raw.flow_control = self.flow_control
        raw.retry_count = self.retry_count
        raw.rnr_retry_count = self.rnr_retry_count
        raw.srq = self.shared_receive
        raw.qp_num = self.qpn
        return raw, data


@dataclass(frozen=True, slots=True)
class Ece:
    """Options of enhanced connection establishment (`ibv_ece`): a vendor's bits, which two devices
    of that vendor agree on. Zeros are none.

    Raises:
        TypeError, ValueError: a field is not a number of 32 bits.
    """

    vendor_id: int
    options: int

    def __post_init__(self) -> None:
        for name in ("vendor_id", "options"):
            whole_number(getattr(self, name), name, 0, 2**32 - 1)
