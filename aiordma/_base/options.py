"""What a connection is made with: sizes, retries, limits (pure)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict

from aiordma._base.arguments import nearest, seconds_within, whole_number

__all__ = ("ConnectionKeywords", "ConnectionOptions")


_RANGES = {
    "receive_buffers": (0, 1 << 16),
    "receive_size": (1, 1 << 30),
    "max_send_wr": (1, 1 << 16),
    "max_recv_wr": (1, 1 << 16),
    "max_send_sge": (1, 64),
    "max_recv_sge": (1, 64),
    "max_inline_data": (0, 1 << 12),
    "responder_resources": (0, 255),
    "initiator_depth": (0, 255),
    "retry_count": (0, 7),
    "rnr_retry_count": (0, 7),
    "ack_timeout": (0, 31),
    "min_rnr_timer": (0, 31),
    "tos": (0, 255),
    "linger": (0, 3600),
}


class ConnectionKeywords(TypedDict, total=False):
    """The keyword arguments of `connect` and `listen`; ConnectionOptions says what they mean."""

    receive_buffers: int
    receive_size: int
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    responder_resources: int
    initiator_depth: int
    retry_count: int
    rnr_retry_count: int
    ack_timeout: int
    min_rnr_timer: int
    tos: int | None
    linger: float


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How a connection is made.

    Attributes:
        receive_buffers: receives that are posted for you from a pool, so that messages arrive
            whenever the peer sends. While all of them hold messages that you have not received,
            the peer's sends wait (RNR; on siw nothing makes them wait: give enough of them for
            all that may be under way, see docs/devices.md). 0: you post receives yourself with
            `post_recv`.
        receive_size: bytes of each of these: the longest message that the peer may send. A longer
            one breaks the connection (that is RDMA's rule, not ours).
        max_send_wr: requests in flight on the send queue; `post_*` raise QueueFullError beyond it,
            the coroutines wait.
        max_recv_wr: the same for your own receives, with receive_buffers=0.
        max_send_sge: parts that one request of the send queue may have.
        max_recv_sge: parts that one receive of your own may have.
        max_inline_data: messages up to this length are copied at the post, without registered
            memory.
        responder_resources: READs and atomics that the peer may have outstanding here; 255: the
            device's maximum.
        initiator_depth: the same for ours at the peer.
        retry_count: how often the device retransmits what the peer does not acknowledge before the
            connection ends with RetryExceededError, 0..7. With 0 the first packet that is lost or
            late ends it; with 7 rxe never gives up. On the accepting side it is this one that
            counts, too, and not the one that the peer asks for (the kernel's 9P client: 0). On
            iWARP TCP retransmits: see ack_timeout.
        rnr_retry_count: how often the peer repeats a message that found no receive posted here,
            before its send ends with ReceiverNotReadyError; 7 is for ever. Ours at the peer is the
            peer's to say (man rdma_connect).
        ack_timeout: exponent n of 4.096 us x 2^n, the wait before a retransmission, 1..31; 16 is
            268 ms. 0 is no wait but for ever: nothing is retransmitted, and a dead peer is never
            noticed. While requests are in flight a dead peer is noticed within
            (retry_count + 1) x 4.096 us x 2^n, 1.9 s by default; hardware may take up to four times
            as long (IBTA 9.7.6.1.3).
        min_rnr_timer: code of the pause that we ask of a peer that finds no receive posted, 0..31
            (IBTA table 45): 5 is 0.06 ms. The CM's own default, 0, is 655 ms.
        tos: type of service of what both ends send, 0..255 (IPv6: the traffic class; the DSCP is
            its upper six bits); None: the system's. On RoCE the side that connects decides for
            both, on iWARP each side for itself (siw does not heed it).
        linger: seconds that sends in flight may still be acknowledged after the peer has
            disconnected, counted anew from each that is; then they end with FlushedError. On RoCE
            and InfiniBand the disconnect can overtake an acknowledgement inside a device. On iWARP
            it cannot, and nothing lingers.

    Raises:
        TypeError, ValueError: an option is of another type or out of range; the message names it.
    """

    receive_buffers: int = 16
    receive_size: int = 16384
    max_send_wr: int = 64
    max_recv_wr: int = 64
    max_send_sge: int = 8
    max_recv_sge: int = 8
    max_inline_data: int = 64
    responder_resources: int = 255
    initiator_depth: int = 255
    retry_count: int = 6
    rnr_retry_count: int = 7
    ack_timeout: int = 16
    min_rnr_timer: int = 5
    tos: int | None = None
    linger: float = 0.05

    def __post_init__(self) -> None:
        for name in _RANGES:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    @classmethod
    def _of(cls, call: Callable[..., object], keywords: Mapping[str, Any]) -> Self:
        """Return the options that a function was called with; its name is in the errors.

        Raises:
            TypeError: one is unknown; the message has the nearest name. Or no whole number.
            ValueError: one is out of range.
        """
        for name, value in keywords.items():
            if name not in _RANGES:
                known = {*_RANGES, *inspect.signature(call).parameters} - {"self", "options"}
                raise TypeError(
                    f"{call.__name__}() has no parameter {name!r}: {nearest(name, known)}"
                )
            _checked(name, value, call.__name__)
        return cls(**keywords)

    @property
    def receive_queue(self) -> int:
        """The depth of the receive queue."""
        return self.receive_buffers or self.max_recv_wr


def _checked(name: str, value: Any, call: str = "") -> float | None:
    if value is None and name == "tos":
        return None
    if name == "linger":
        return seconds_within(value, name, *_RANGES[name], call)
    return whole_number(value, name, *_RANGES[name], call)
