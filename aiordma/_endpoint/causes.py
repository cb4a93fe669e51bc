"""Why a connection ends: one table from what was seen, and in which state, to what follows.

The first cause counts. A flush only says that something else has failed: it is the cause only if
nothing explains it. An iWARP device flushes by itself when the peer closes, before the CM's event
is read. So a disconnect is an assumption at first, which a failed completion of the same drain
replaces.
"""

import errno
import os
from enum import Enum
from typing import NamedTuple, Protocol

from aiordma._base.enums import AsyncEventType, CmEventType, WorkCompletionStatus
from aiordma._base.errors import (
    DeviceEventError,
    DeviceRemovedError,
    DisconnectedError,
    completion_error,
)
from aiordma._base.states import ConnectionState
from aiordma._endpoint.pair import Pair
from aiordma.verbs.identifier import Event


class What(Enum):
    """What was seen of a connection."""

    __hash__ = object.__hash__  # as of ConnectionState

    DISCONNECTED = "the CM reports that the peer has disconnected"
    BROKEN = "the CM reports that the connection broke"
    REMOVED = "the CM reports that the device was removed"
    HANDSHAKE = "another CM event"
    FAILED = "a completion with another error than a flush"
    FLUSHED = "a flush, without a known cause"
    REPORTED = "an error of the device, of a post, of the peer's silence, or of a layer above"


class Follows(Enum):
    """What follows."""

    NOTHING = "the task that connects or accepts sees the state, and ends the connection"
    THE_END = "the connection ends at once"
    LINGERING = "it ends once the sends in flight are acknowledged, or after `linger` seconds"
    EXPLAINING = "an event is to explain it, within FLUSH_CAUSE_SECONDS"


class Ruling(NamedTuple):
    """A row of the table."""

    follows: Follows
    is_assumed: bool = False
    """Whether a failed completion replaces the cause."""


_C = ConnectionState
_TABLE: dict[tuple[What, ConnectionState], Ruling] = {
    (What.DISCONNECTED, _C.ESTABLISHED): Ruling(Follows.LINGERING, is_assumed=True),
    # The peer was connected, because it could disconnect. The last packet of its handshake was
    # lost, but its messages may have arrived.
    (What.DISCONNECTED, _C.ACCEPTING): Ruling(Follows.LINGERING, is_assumed=True),
    (What.BROKEN, _C.ESTABLISHED): Ruling(Follows.THE_END, is_assumed=True),
    (What.BROKEN, _C.ACCEPTING): Ruling(Follows.THE_END, is_assumed=True),
    (What.REMOVED, _C.ESTABLISHED): Ruling(Follows.THE_END, is_assumed=True),
    (What.FLUSHED, _C.ESTABLISHED): Ruling(Follows.EXPLAINING),
}
_ALWAYS: dict[What, Ruling] = {
    What.FAILED: Ruling(Follows.THE_END),
    What.REPORTED: Ruling(Follows.THE_END),
}


def ruling(what: What, state: ConnectionState) -> Ruling:
    """Return what follows.

    Args:
        what: what was seen.
        state: the connection's state before it.
    """
    return _ALWAYS.get(what) or _TABLE.get((what, state)) or Ruling(Follows.NOTHING)


class Evidence:
    """What a connection keeps of what it has seen, besides the cause of its end."""

    flush: Exception | None = None
    """The error of a flush that was seen before its cause was known."""

    is_assumed: bool = False
    """Whether a failed completion replaces the cause."""

    polls_events: bool = False
    """Whether it takes CM events now, to explain a flush."""


class Seen(Protocol):
    """A connection, for the texts of its causes."""

    pair: Pair

    @property
    def peer_text(self) -> str | None:
        """The peer's address."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def device_name(self) -> str:
        """The device's name."""


# Why a connection broke, by the status of the CM's event. Only the software device gives one.
_SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
_DEVICE_EVENTS = {
    errno.EACCES: AsyncEventType.QP_ACCESS_ERR,
    errno.EPROTO: AsyncEventType.QP_REQ_ERR,
    errno.ENOMEM: AsyncEventType.QP_FATAL,
}
_TEXTS = {
    errno.ECONNABORTED: "its device reported an error, and terminated the connection",
    errno.ECONNRESET: "the connection was reset, or ended within a message",
}


def silence_error(seen: Seen) -> Exception:
    """Return the error for a peer that acknowledges nothing any more."""
    status = int(WorkCompletionStatus.RETRY_EXC_ERR)
    return completion_error(status, seen.name, qp_num=seen.pair.number, retries=seen.pair.retries)


def _broken(seen: Seen, error: int) -> Exception:
    if error in _SILENCE:
        return silence_error(seen)
    if error in _DEVICE_EVENTS:
        return device_error(seen, _DEVICE_EVENTS[error])
    return DisconnectedError(f"peer {seen.peer_text}: {_TEXTS.get(error) or os.strerror(error)}")


def device_error(seen: Seen, event: AsyncEventType) -> DeviceEventError:
    """Return the error for an asynchronous event of the connection's queue pair."""
    return DeviceEventError(event, f"{seen.name} on {seen.device_name}")


def event_cause(seen: Seen, event: Event) -> tuple[What, Exception | None]:
    """Return what a CM event says, and the error for it."""
    if event.type is CmEventType.DISCONNECTED:
        if event.status:
            return What.BROKEN, _broken(seen, -event.status)
        return What.DISCONNECTED, DisconnectedError(f"peer {seen.peer_text} disconnected")
    if event.type is CmEventType.DEVICE_REMOVAL:
        removed = DeviceRemovedError(f"{seen.name}: {seen.device_name} was removed")
        return What.REMOVED, removed
    return What.HANDSHAKE, None
