"""What a rejection says: aiordma's own private data, and the reasons of the connection manager."""

import errno

from aiordma._base.errors import RejectedError

BACKLOG_IS_FULL: bytes = b"the listener's backlog is full"
"""The private data of a rejection because of a full backlog."""
NOT_SERVING: bytes = b"the server does not serve yet"
"""The private data of a rejection before a server of streams was started."""

REJECT_TEXTS: dict[bytes, str] = {
    BACKLOG_IS_FULL: (
        "the listener's backlog is full, because peers arrive faster than it accepts them: try "
        "again after a pause, or give the listener a larger backlog="
    ),
    NOT_SERVING: "the server does not serve yet: try again after its start_serving()",
}
"""What the private data of aiordma's own listeners mean."""

PLAIN_TCP: str = "a plain TCP server"
NOT_ACCEPTED: str = (
    f": the program that listens there does not accept now, or it is {PLAIN_TCP}, which waits for "
    "a request of its own protocol"
)
"""Why a wait for an accept on iWARP can take too long."""

REJECT_REASONS: dict[int, str] = {
    1: "the peer has no queue pair left",
    3: "the peer has no resources left",
    4: "the peer's connection manager timed out",
    5: "the peer does not support the request",
    8: "no program listens on that port (a device's addresses also need a moment after it appears)",
    10: "the queue pair number is still in use at the peer: try again",
    28: "the peer's program refused",
    35: "the peer does not take these options (ECE): try without",
    -errno.ECONNREFUSED: "no program listens on that port, or the peer's program refused",
    -errno.ECONNRESET: (
        "the peer closed the TCP connection in the handshake: its program ended, or the program "
        "that listens there does not speak iWARP (MPA)"
    ),
    -errno.EPROTO: (
        f"the program that listens there does not speak iWARP (MPA); it may be {PLAIN_TCP}"
    ),
    -errno.ETIMEDOUT: "the peer did not answer",
}


def is_backlog_full(error: BaseException) -> bool:
    """Return whether an aiordma listener rejected the request because its backlog is full."""
    return isinstance(error, RejectedError) and _said(error) == BACKLOG_IS_FULL


def is_listeners_answer(error: BaseException) -> bool:
    """Return whether an aiordma listener rejected the request without its program, and said why."""
    return isinstance(error, RejectedError) and _said(error) in REJECT_TEXTS


def is_programs_answer(error: BaseException) -> bool:
    """Return whether the peer's program rejected the request, and said why in private data."""
    return isinstance(error, RejectedError) and _said(error) not in {b"", *REJECT_TEXTS}


def _said(error: RejectedError) -> bytes:
    return error.private_data.rstrip(b"\0")  # InfiniBand and RoCE pad it with zeros
