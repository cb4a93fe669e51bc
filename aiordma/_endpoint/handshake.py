"""The handshake of a connection: its state, which CM events change by a table
(`states.NEXT_STATES`), and one waiting task."""

from collections.abc import Callable
from functools import partial

from aiordma._base.states import NEXT_STATES, ConnectionState
from aiordma._base.time_limit import TimeLimit
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma.verbs.identifier import Event

IN_PROGRESS = (ConnectionState.CONNECTING, ConnectionState.ACCEPTING)
"""The states of a connection whose queue pair exists, and which is not established yet."""


class Handshake:
    """See the module. A connect begins it before the connection exists, with the state
    RESOLVING_ADDRESS."""

    __slots__ = ("_loop", "_waiters", "awaits_answer", "event", "state", "was_established")

    def __init__(self, loop: EventLoop, state: ConnectionState) -> None:
        self.state: ConnectionState = state
        self.event: Event | None = None
        """The last event that has changed the state before the connection was established."""
        self.was_established: bool = state is ConnectionState.ESTABLISHED
        """Whether the peer is, or was, connected: `Endpoint._saw` can know it without the event."""
        self.awaits_answer: bool = False
        """Between the endpoint's `driver_waits` and `driver_returned`."""
        self._loop = loop
        self._waiters: list[Callable[[], object]] = []

    def feed(self, event: Event) -> None:
        """Change the state by an event, and wake those that wait for a change."""
        state = NEXT_STATES.get((self.state, event.type))
        if state is None:
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

    async def change(self, limit: TimeLimit) -> None:
        """Wait for a change of the state.

        Raises:
            TimeoutError: the time is over.
        """
        left = limit.left()
        if left is not None and left <= 0:
            raise TimeoutError
        waiter: Waiter = self._loop.waiter()
        wake = waiter.wake
        withdraw = None if left is None else self._loop.limit(left, wake)
        self._waiters.append(wake)
        try:
            await waiter.wait()
        finally:
            if withdraw is not None:
                withdraw()
            if wake in self._waiters:
                self._waiters.remove(wake)

    def call_at_change(self, callback: Callable[[], None]) -> None:
        """Call the callback from the loop, once, when the state may have changed."""
        self._waiters.append(partial(self._loop.call_later, 0, callback))
