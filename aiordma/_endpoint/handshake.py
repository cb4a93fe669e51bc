"""The handshake of a connection: its state, which CM events change by a table
(`states.next_state`), one waiting task, and one time limit."""

from collections.abc import Callable
from functools import partial

from aiordma._base.states import ConnectionState, next_state
from aiordma._base.system import system
from aiordma._loop.event_loop import EventLoop, Timer, Waiter
from aiordma.verbs.identifier import Event

__all__ = ("IN_PROGRESS", "Handshake")

IN_PROGRESS = (ConnectionState.CONNECTING, ConnectionState.ACCEPTING)
"""The states of a connection whose queue pair exists, and which is not established yet."""


class Handshake:
    """See the module. A connect begins it before the connection exists, with the state
    RESOLVING_ADDRESS."""

    __slots__ = (
        "_end",
        "_loop",
        "_timer",
        "_waiters",
        "event",
        "is_late",
        "state",
        "was_established",
    )

    def __init__(self, loop: EventLoop, state: ConnectionState) -> None:
        self.state: ConnectionState = state
        self.event: Event | None = None
        """The last event that has changed the state before the connection was established."""
        self.was_established: bool = state is ConnectionState.ESTABLISHED
        """Whether the peer is, or was, connected: `Endpoint._saw` can know it without the event."""
        self.is_late: bool = False
        """Whether the time limit has been exceeded."""
        self._loop = loop
        self._waiters: list[Callable[[], object]] = []
        self._end: float | None = None
        self._timer: Timer | None = None

    def feed(self, event: Event) -> None:
        """Change the state by an event, and wake those that wait for a change."""
        state = next_state(self.state, event.type)
        if state is self.state:
            return
        self.state = state
        if not self.was_established:
            self.event = event
            self.was_established = state is ConnectionState.ESTABLISHED
        if self._waiters:
            self.wake()

    def wake(self) -> None:
        """Wake those that wait for a change."""
        while self._waiters:
            self._waiters.pop()()

    def limit(self, end: float | None) -> None:
        """Let all waits end at a time of the monotonic clock; None: no limit. `is_late` then says
        that it is over. A handshake that never waits needs no timer."""
        self._end = end
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self.is_late = True
        self.wake()

    async def change(self) -> None:
        """Wait for a change of the state, or for the end of the time."""
        if self._timer is None and self._end is not None:
            left = max(self._end - system.now(), 0)
            self._timer = self._loop.call_later(left, self._expire)
        waiter: Waiter = self._loop.waiter()
        wake = waiter.wake
        self._waiters.append(wake)
        try:
            await waiter.wait()
        finally:
            if wake in self._waiters:
                self._waiters.remove(wake)

    def call_at_change(self, callback: Callable[[], None]) -> None:
        """Call the callback from the loop, once, when the state may have changed."""
        self._waiters.append(partial(self._loop.call_later, 0, callback))
