"""Waits for the CM events of one identifier, for a task that performs one step after the other."""

from collections import deque

import anyio

from aiordma._base.enums import CmEventType
from aiordma._base.errors import MulticastError, UnreachableError, detached
from aiordma._connection.handshake_errors import failed_event
from aiordma.verbs.identifier import Event

_FAILURES = (
    CmEventType.ADDR_ERROR,
    CmEventType.ROUTE_ERROR,
    CmEventType.CONNECT_ERROR,
    CmEventType.UNREACHABLE,
    CmEventType.REJECTED,
    CmEventType.MULTICAST_ERROR,
    CmEventType.DEVICE_REMOVAL,
)

_REFUSALS = {
    1: "no program receives datagrams at that port",
    2: "its program refused",
    3: "it has no queue pair for that port",
    4: "it redirects to another port, which aiordma does not follow",
    5: "it uses another version of the protocol (SIDR)",
}
"""Texts for the status of a peer's answer in the UDP port space (`ib_cm_sidr_status` of the
kernel)."""


class EventWaiter:
    """Collects the events of an identifier, and waits for the event that completes a step.

    Args:
        what: the operation that consists of the steps, for messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._events: deque[Event] = deque()
        self._failure: Exception | None = None
        self._changed = anyio.Event()

    def handle(self, event: Event) -> None:
        """Add an event (an EventHandler)."""
        self._events.append(event)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Let `until` raise an error, because no further event will arrive."""
        self._failure = error
        self._changed.set()

    async def until(self, kind: CmEventType) -> Event:
        """Wait for an event of a kind.

        Raises:
            RdmaConnectionError: an event reported that the operation failed.
            Exception: the error that `fail` was called with.
        """
        while True:
            # Read every event: one of no interest must not hide an earlier one.
            while self._events:
                event = self._events.popleft()
                if event.type is kind:
                    return event
                if event.type in _FAILURES:
                    raise failure_of(self.what, event)
            if self._failure is not None:
                raise detached(self._failure)
            self._changed = anyio.Event()
            await self._changed.wait()


def failure_of(what: str, event: Event) -> Exception:
    """Return the error for an event that reports a failure."""
    if event.type is CmEventType.UNREACHABLE and event.status in _REFUSALS:
        return UnreachableError(f"{what}: {_REFUSALS[event.status]} (status {event.status})")
    error = failed_event(what, event)
    if event.type is CmEventType.MULTICAST_ERROR:
        refused = MulticastError(str(error))
        refused.errno = getattr(error, "errno", None)
        return refused
    return error
