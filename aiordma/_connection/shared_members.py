"""The members of a shared receive queue: the connections that take their receives from it.

A connection is a member from before its queue pair is created until the queue pair is destroyed.
The queue pair's number identifies the member that a completion belongs to.
"""

import weakref
from collections.abc import Callable, Iterator

from aiordma._base.enums import AsyncEventType
from aiordma._connection.connection import Connection
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.event_loop import Timer
from aiordma._native import ArrivalQueue
from aiordma._runtime.hub import DeviceHub

LAST_WQE_SECONDS = 0.2
"""Seconds to wait for the device to report that a queue pair has completed the last receive that it
consumed. Some devices never report this. If the first report does not arrive in time, no further
queue pair of this shared receive queue is waited for."""


class _Stay:
    """The state of a member's queue pair, until it is destroyed."""

    def __init__(self) -> None:
        self.last_wqe_reached = False
        self.timer: Timer | None = None
        self.then: Callable[[], None] = lambda: None


class _Member:
    """A connection that takes its receives from this queue."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self.endpoint = endpoint
        self.connection = weakref.ref(connection)  # so that an unclosed connection is finalized


class SharedReceiveMembers:
    """See the module. Iterating returns the members' endpoints."""

    def __init__(self, hub: DeviceHub) -> None:
        self._hub = hub
        self._stays: dict[Endpoint, _Stay] = {}
        self._by_number: dict[int, _Member] = {}
        self.queues: dict[int, ArrivalQueue] = {}
        """The members' messages, by queue pair number."""
        self._reports_last_wqe: bool | None = None

    def __len__(self) -> int:
        return len(self._stays)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(list(self._stays))  # a copy: a member that ends is removed

    def add(self, endpoint: Endpoint) -> None:
        """Add an endpoint before its queue pair is created."""
        self._stays[endpoint] = _Stay()

    def discard(self, endpoint: Endpoint) -> None:
        """Remove an endpoint after its queue pair was destroyed."""
        self._stays.pop(endpoint, None)

    # -- members by queue pair number ---------------------------------------------------------

    def find(self, qp_num: int) -> _Member | None:
        """Return the member whose queue pair has this number; None once it is closed."""
        return self._by_number.get(qp_num)

    def serve(self, endpoint: Endpoint, arrivals: ArrivalQueue, connection: Connection) -> None:
        """Deliver the receives that the endpoint's queue pair consumes. Call this before its
        handshake."""
        if endpoint.pair.number in self._by_number:
            # An earlier queue pair had this number. Deliver its remaining completions first.
            self._hub.drain()
        self._by_number[endpoint.pair.number] = _Member(endpoint, connection)
        self.queues[endpoint.pair.number] = arrivals
        self._watch_for_last_wqe(endpoint)
        endpoint.teardown.on_closed.append(lambda: self._forget(endpoint))

    def _forget(self, endpoint: Endpoint) -> None:
        member = self._by_number.get(endpoint.pair.number)
        if member is not None and member.endpoint is endpoint:
            del self._by_number[endpoint.pair.number], self.queues[endpoint.pair.number]

    # -- the last receive of a queue pair -----------------------------------------------------

    def delays(self, endpoint: Endpoint, then: Callable[[], None]) -> bool:
        """Return whether the destruction of the queue pair must wait until `then` is called.

        It waits until the device reports that the queue pair has completed the last receive that it
        consumed (IBV_EVENT_QP_LAST_WQE_REACHED). A driver drops completions between the last drain
        and the destruction, so that their receives would never complete (man ibv_create_srq).
        """
        self._hub.drain()
        stay = self._stays.get(endpoint)
        if stay is None or stay.last_wqe_reached or self._reports_last_wqe is False:
            return False
        if stay.timer is None:
            stay.then = then
            stay.timer = self._hub.loop.call_later(
                LAST_WQE_SECONDS, lambda: self._last_wqe_timed_out(endpoint)
            )
        return True

    def _watch_for_last_wqe(self, endpoint: Endpoint) -> None:
        """Subscribe to the event that the failed queue pair has completed its last receive."""

        def handle(event: AsyncEventType) -> None:
            if event is AsyncEventType.QP_LAST_WQE_REACHED:
                self._reports_last_wqe = True
                self._end_wait(endpoint)

        assert endpoint.pair.raw is not None
        self._hub.on_object_event[endpoint.pair.number] = handle

    def _last_wqe_timed_out(self, endpoint: Endpoint) -> None:
        if self._reports_last_wqe is None:
            self._reports_last_wqe = False
        self._end_wait(endpoint)

    def _end_wait(self, endpoint: Endpoint) -> None:
        stay = self._stays.get(endpoint)
        if stay is None or stay.last_wqe_reached:
            return
        stay.last_wqe_reached = True
        self._hub.drain()  # the receive completed before the event
        if stay.timer is not None:
            stay.timer.cancel()
            stay.then()
