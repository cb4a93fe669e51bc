"""What a connection is made with: sizes, retries, limits (pure)."""

from dataclasses import dataclass
from typing import TypedDict

__all__ = ("ConnectionKeywords", "ConnectionOptions")


class ConnectionKeywords(TypedDict, total=False):
    """The keyword arguments of `connect` and `listen`; ConnectionOptions says what they mean."""

    receive_buffers: int
    receive_size: int
    send_depth: int
    receive_depth: int
    max_sge: int
    max_inline: int
    responder_resources: int
    initiator_depth: int
    retry_count: int
    rnr_retry_count: int
    ack_timeout: int
    min_rnr_timer: int
    tos: int | None


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
        send_depth: requests in flight on the send queue; `post_*` raise QueueFullError beyond it,
            the coroutines wait.
        receive_depth: the same for your own receives, with receive_buffers=0.
        max_sge: parts that one scatter-gather request may have.
        max_inline: messages up to this length are copied at the post, without registered memory.
        responder_resources: READs and atomics that the peer may have outstanding here; 255: the
            device's maximum.
        initiator_depth: the same for ours at the peer.
        retry_count: retransmissions before RetryExceededError, 0..7.
        rnr_retry_count: how often the peer repeats a message that found no receive posted here,
            before its send ends with ReceiverNotReadyError; 7 is for ever. Ours at the peer is the
            peer's to say (man rdma_connect).
        ack_timeout: exponent n of 4.096 us x 2^n, the wait before a retransmission, 0..31;
            16 is 268 ms. With retry_count it bounds how fast a dead peer is noticed.
        min_rnr_timer: code of the pause that we ask of a peer that finds no receive posted, 0..31
            (IBTA table 45): 5 is 0.06 ms. The CM's own default, 0, is 655 ms.
        tos: type of service of what both ends send, 0..255 (IPv6: the traffic class; the DSCP is
            its upper six bits); None: the system's. On RoCE the side that connects decides for
            both, on iWARP each side for itself (siw does not heed it).
    """

    receive_buffers: int = 16
    receive_size: int = 16384
    send_depth: int = 64
    receive_depth: int = 64
    max_sge: int = 8
    max_inline: int = 64
    responder_resources: int = 255
    initiator_depth: int = 255
    retry_count: int = 7
    rnr_retry_count: int = 7
    ack_timeout: int = 16
    min_rnr_timer: int = 5
    tos: int | None = None

    def __post_init__(self) -> None:
        ranges = {
            "receive_buffers": (0, 1 << 16),
            "receive_size": (1, 1 << 30),
            "send_depth": (1, 1 << 16),
            "receive_depth": (1, 1 << 16),
            "max_sge": (1, 64),
            "max_inline": (0, 1 << 12),
            "responder_resources": (0, 255),
            "initiator_depth": (0, 255),
            "retry_count": (0, 7),
            "rnr_retry_count": (0, 7),
            "ack_timeout": (0, 31),
            "min_rnr_timer": (0, 31),
            "tos": (0, 255),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is None and name == "tos":
                continue
            if not least <= value <= most:
                raise ValueError(f"{name}={value} is not in {least}..{most}")

    @property
    def receive_queue(self) -> int:
        """The depth of the receive queue."""
        return self.receive_buffers or self.receive_depth
