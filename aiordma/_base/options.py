"""The options of a connection: sizes, retries, limits (pure)."""

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
    """The keyword arguments of `connect` and `listen`. ConnectionOptions describes them."""

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
    """The options of a connection.

    Attributes:
        receive_buffers: number of receives that aiordma posts from a pool, so that messages can
            arrive at any time. While all of them hold messages that you have not received, the
            peer's sends wait (RNR). On siw they do not wait: use enough buffers for all messages
            that can be in flight (see docs/devices.md). 0: post receives yourself with
            `post_recv`.
        receive_size: bytes of each of these receives, and so the longest message that the peer may
            send. A longer message breaks the connection; this is a rule of RDMA.
        max_send_wr: largest number of requests in flight on the send queue. Beyond it, `post_*`
            raise QueueFullError, and the coroutines wait.
        max_recv_wr: the same for the receives that you post, with receive_buffers=0.
        max_send_sge: largest number of parts of a request on the send queue.
        max_recv_sge: largest number of parts of a receive that you post.
        max_inline_data: the post copies messages up to this length, without registered memory.
        responder_resources: READs and atomics that the peer may have outstanding on this side;
            255: the device's maximum.
        initiator_depth: READs and atomics that this side may have outstanding on the peer; 255:
            the device's maximum.
        retry_count: how often the device retransmits an unacknowledged packet before the
            connection ends with RetryExceededError, 0..7. With 0, the first lost or late packet
            ends the connection; with 7, rxe retries without limit. The accepting side, too, uses
            its own value, and ignores the peer's (the kernel's 9P client requests 0). On iWARP,
            TCP retransmits: see ack_timeout.
        rnr_retry_count: how often the peer resends a message for which no receive is posted on
            this side, before its send fails with ReceiverNotReadyError; 7: without limit. The
            peer sets the value for this side's sends (man rdma_connect).
        ack_timeout: exponent n of 4.096 us x 2^n, the time before a retransmission, 1..31; 16 is
            268 ms. 0: no limit, so that the device never retransmits and never detects a dead
            peer. While requests are in flight, a dead peer is detected within
            (retry_count + 1) x 4.096 us x 2^n, 1.9 s by default; hardware may take up to four times
            as long (IBTA 9.7.6.1.3).
        min_rnr_timer: code of the delay before a peer resends a message for which no receive is
            posted, 0..31 (IBTA table 45): 5 is 0.06 ms. The CM's own default, 0, is 655 ms.
        tos: type of service of the packets of both sides, 0..255 (IPv6: the traffic class; the
            DSCP is its upper six bits); None: the system's. On RoCE the connecting side sets it
            for both. On iWARP each side sets its own (siw ignores it).
        linger: seconds in which sends in flight can still be acknowledged after the peer has
            disconnected. Each acknowledgement restarts the time; at its end, sends fail with
            FlushedError. On RoCE and InfiniBand the disconnect can overtake an acknowledgement
            inside a device. On iWARP it cannot, and nothing lingers.

    Raises:
        TypeError, ValueError: an option has an unsuitable type or is out of range; the message
            names it.
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
        """Return the options from a function's keyword arguments. The errors name the function.

        Raises:
            TypeError: an option is unknown, and the message has the nearest name; or an option is
                not a number.
            ValueError: an option is out of range.
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
