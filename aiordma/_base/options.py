"""The options of a connection: sizes, retries, limits (pure)."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict

from aiordma._base.arguments import nearest, seconds_within, whole_number, wrong_type
from aiordma._base.errors import retry_seconds

_RANGES = {
    "receive_buffers": (0, 1 << 16),
    "receive_size": (1, 1 << 30),
    "max_send_wr": (1, 1 << 16),
    "send_ahead": (0, 1 << 16),
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
    "comp_vector": (0, (1 << 31) - 1),
    "cqe": (1, (1 << 31) - 1),
}

_DECIDED_BY_CM = {
    "path_mtu": "the connection manager takes the MTU of the path that it resolves, and both sides "
    "must use the same one. Lower the MTU of the network interface, or use open_queue_pair(), "
    "whose connect_to() takes path_mtu",
    "gid_index": "the connection manager takes the GID of the local address. Choose the address, "
    "with source= of connect() or host of listen(), or use open_queue_pair(), which takes "
    "gid_index",
    "service_level": "the connection manager derives it from the type of service of the side that "
    "connects. Use the option tos, or open_queue_pair(), whose connect_to() takes service_level",
    "pkey_index": "the connection manager takes the partition key of the network interface that "
    "has the local address. Choose the address, with source= of connect() or host of listen(), or "
    "use open_queue_pair(), which takes pkey_index",
}
"""Attributes of a queue pair for which connections have no option: the reason, and alternatives."""

_OPTIONAL = ("tos", "cqe", "peer_timeout", "keepalive")
"""Options that may be None."""

_SECONDS: dict[str, tuple[float, float]] = {
    "linger": (0, 3600),
    "flush_timeout": (0, 3600),
    "peer_timeout": (0.001, 3600),
    "keepalive": (0.01, 86400),
}
"""Options that are times."""

_ATTEMPTS = (7, 6, 5, 4)
"""Numbers of transmissions that `peer_timeout` chooses from: enough for a network that loses
packets. Each factor of two between two values of ack_timeout is divided by them."""

_MOST_ACK_TIMEOUT = 31

_RETRIES = ("retry_count", "ack_timeout")
"""Options that `peer_timeout` chooses."""

_FLAGS = ("reuse_address",)
"""Options that are True or False."""


class ConnectionKeywords(TypedDict, total=False):
    """The options that are also keyword arguments of `connect`, `listen` and the other functions
    that open connections. ConnectionOptions describes them."""

    receive_buffers: int
    receive_size: int
    peer_timeout: float | None
    keepalive: float | None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The options of a connection: `options=` of `connect`, `listen` and the other functions that
    open connections. Those that most programs set are also keyword arguments, which take precedence
    over these: receive_buffers, receive_size, peer_timeout and keepalive.

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
        send_ahead: how many messages `Connection.send` may run ahead of: it then returns when its
            message is posted, and not when the peer's device has it. 0: it waits for each. See
            `Connection.send`.
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
            peer sets the value for this side's sends (man rdma_connect). `open_queue_pair` has no
            connection manager: there it is the value for this side's sends.
        ack_timeout: exponent n of 4.096 us x 2^n, the time before a retransmission, 1..31; 16 is
            268 ms. 0: no limit, so that the device never retransmits and never detects a dead
            peer (iWARP: after 900 s). While requests are in flight, a dead peer is detected within
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
        flush_timeout: seconds that the device may take to flush the requests in flight when the
            connection ends, and so the time limit of `aclose`, with the time of the driver's calls.
            The wait ends with the last flushed request. Requests that the device has not flushed
            by then fail with FlushedError all the same, once the queue pair is destroyed. 0:
            destroy it at once.
        peer_timeout: seconds after which a peer that acknowledges nothing ends the connection with
            a PeerGoneError, while requests are in flight: retry_count and ack_timeout as one
            number. It chooses both, so give it without them. Their time is at most this, and at
            least four fifths of it. None: their values. `Connection.peer_timeout` is the time in
            force. iWARP (siw, the software device) needs one second at least, and takes 900 at
            most, as TCP gives up soon after; hardware may take up to four times as long.
        keepalive: seconds after which an idle connection posts a WRITE of no bytes, which the
            peer's device acknowledges, so that a peer that has vanished is detected within
            keepalive + peer_timeout also if this side only receives. None: no keepalive. It says
            nothing about the peer's program: its device, or its kernel, answers also while the
            program is stopped (docs/dead-peers.md). The WRITE has an entry of its own in the
            queues, beyond max_send_wr and cqe. It needs ack_timeout > 0.
        comp_vector: index of the completion vector (interrupt) of the connection's completion
            queue, 0..`connection.context.num_comp_vectors` - 1. The queue serves all queue pairs
            of the event loop with the same comp_vector and cqe. With `shared_receive`, receives
            complete in the shared receive queue's own completion queue.
        cqe: entries of the connection's completion queue; None: 4096, or more if this connection
            alone needs more. It must be at least the number of requests that can be in flight:
            max_send_wr and the receives. If all entries of the queues of this size and vector are
            reserved, another queue is created. So a connection has a queue of its own if cqe is
            exactly this number. Each wake-up of the event loop polls every queue, so use few.
        reuse_address: with a port in `source` of `connect`: share it with other connections that
            also set this.

    Raises:
        TypeError, ValueError: an option has an unsuitable type or is out of range; the message
            names it.
    """

    receive_buffers: int = 16
    receive_size: int = 16384
    max_send_wr: int = 64
    send_ahead: int = 0
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
    flush_timeout: float = 0.5
    peer_timeout: float | None = None
    keepalive: float | None = None
    comp_vector: int = 0
    cqe: int | None = None
    reuse_address: bool = False

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is not default:
                object.__setattr__(self, name, _checked(name, value))
        if self.peer_timeout is not None:
            self._set_retries(self.peer_timeout)
        if self.keepalive is not None and not self.ack_timeout:
            raise ValueError(
                f"keepalive={self.keepalive:g}: with ack_timeout=0 the device waits for "
                "acknowledgements without limit, and detects no dead peer: give a peer_timeout"
            )

    def _set_retries(self, seconds: float) -> None:
        """Set retry_count and ack_timeout for a peer_timeout.

        Raises:
            ValueError: they are also given.
        """
        for name, chosen in zip(_RETRIES, _retries(seconds), strict=True):
            value = getattr(self, name)
            # dataclasses.replace() passes the values that were chosen before.
            if value not in (type(self).__dataclass_fields__[name].default, chosen):
                raise ValueError(
                    f"peer_timeout={seconds:g} and {name}={value}: peer_timeout chooses "
                    "retry_count and ack_timeout, so give either it or them"
                )
            object.__setattr__(self, name, chosen)

    @classmethod
    def _of(
        cls,
        call: Callable[..., object],
        permitted: Iterable[str],
        keywords: Mapping[str, Any],
        **needed: Any,
    ) -> Self:
        """Return the options from a function's keyword arguments, and what the function needs. The
        errors name the function.

        Raises:
            TypeError: an option is not permitted, and the message has the nearest name; or an
                option is not a number.
            ValueError: an option is out of range.
        """
        for name, value in keywords.items():
            if name not in permitted:
                raise _unknown_parameter(name, call, permitted)
            _checked(name, value, call.__name__)
        return cls(**keywords, **needed)

    @classmethod
    def _chosen(
        cls,
        call: Callable[..., object],
        options: "ConnectionOptions | None",
        keywords: ConnectionKeywords,
        default: "ConnectionOptions | None" = None,
    ) -> "ConnectionOptions":
        """Return the options from a function's arguments; `default` is in place of options=None.

        Raises:
            TypeError: `options` is not a ConnectionOptions; a keyword is unknown, and the message
                has the nearest name, or names `options`; or an option is not a number.
            ValueError: an option is out of range.
        """
        if options is not None and not isinstance(options, cls):
            raise wrong_type(options, "options", "a ConnectionOptions, or None", call.__name__)
        given: dict[str, Any] = {**keywords}
        for name, value in given.items():
            if name in _DEFAULTS and name not in ConnectionKeywords.__annotations__:
                raise TypeError(
                    f"{call.__name__}() has no parameter {name!r}: give it as "
                    f"options=ConnectionOptions({name}={value!r})"
                )
            if name not in _DEFAULTS:
                raise _unknown_parameter(name, call, _DEFAULTS)
            _checked(name, value, call.__name__)
        base = options or default or DEFAULT_OPTIONS
        if not given:
            return base
        if "peer_timeout" in given and base.peer_timeout is not None:
            given = {each: _DEFAULTS[each] for each in _RETRIES} | given
        return replace(base, **given)

    @property
    def receive_queue(self) -> int:
        """The depth of the receive queue."""
        return self.receive_buffers or self.max_recv_wr


_DEFAULTS: dict[str, Any] = {
    name: ConnectionOptions.__dataclass_fields__[name].default
    for name in (*_RANGES, *_SECONDS, *_FLAGS)
}
"""The options' defaults, which need no check."""


DEFAULT_OPTIONS = ConnectionOptions()


def _unknown_parameter(name: str, call: Callable[..., object], options: Iterable[str]) -> TypeError:
    """Return the error for a keyword argument that a function does not have. It says who decides
    the value, or has the nearest name of the function's parameters and options."""
    own = inspect.signature(call).parameters.values()
    known = {*options, *(each.name for each in own if each.kind is not each.VAR_KEYWORD)}
    why = _DECIDED_BY_CM.get(name) or nearest(name, known - {"self"})
    return TypeError(f"{call.__name__}() has no parameter {name!r}: {why}")


def _retries(seconds: float) -> tuple[int, int]:
    """Return the retry_count and the ack_timeout whose time is the longest that is at most so many
    seconds."""
    candidates = [
        (retry_seconds(attempts - 1, exponent), attempts, exponent)
        for attempts in _ATTEMPTS
        for exponent in range(1, _MOST_ACK_TIMEOUT + 1)
    ]
    _, attempts, exponent = max(each for each in candidates if each[0] <= seconds)
    return attempts - 1, exponent


def _checked(name: str, value: Any, call: str = "") -> float | None:
    if value is None and name in _OPTIONAL:
        return None
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise wrong_type(value, name, "True or False", call)
        return value
    if name in _SECONDS:
        return seconds_within(value, name, *_SECONDS[name], call)
    return whole_number(value, name, *_RANGES[name], call)


def check_queue(comp_vector: Any, cqe: Any, call: str = "") -> tuple[int, int | None]:
    """Check and return both options of a completion queue.

    Raises:
        TypeError: an option is not a whole number.
        ValueError: an option is out of range.
    """
    vector = whole_number(comp_vector, "comp_vector", *_RANGES["comp_vector"], call)
    return vector, None if cqe is None else whole_number(cqe, "cqe", *_RANGES["cqe"], call)
