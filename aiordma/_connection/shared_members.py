"""The members of a shared receive queue: the connections that take their receives from it.

A connection is a member from before its queue pair is made until that is gone. Its messages find it
by the queue pair's number.
"""

import weakref
from collections.abc import Callable, Iterator

from aiordma._base.enums import AsyncEventType
from aiordma._connection.connection import Connection
from aiordma._connection.messages import MessageQueue
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.event_loop import Timer
from aiordma._runtime.hub import DeviceHub

__all__ = ("SharedReceiveMembers",)

LAST_SECONDS = 0.2
"""How long a device may take to tell that a queue pair has completed the last receive it took.
Some never do: the first that does not is the last that is waited for."""


class _Stay:
    """A member's queue pair, until it is gone."""

    def __init__(self) -> None:
        self.last_told = False
        self.timer: Timer | None = None
        self.then: Callable[[], None] = lambda: None


class _Member:
    """A connection that takes its receives from here."""

    def __init__(self, endpoint: Endpoint, messages: MessageQueue, connection: Connection) -> None:
        self.endpoint = endpoint
        self.messages = messages
        self.connection = weakref.ref(connection)  # one that is forgotten has to be found


class SharedReceiveMembers:
    """See the module. Iterating gives the members' endpoints."""

    def __init__(self, hub: DeviceHub) -> None:
        self._hub = hub
        self._stays: dict[Endpoint, _Stay] = {}
        self._by_number: dict[int, _Member] = {}
        self._tells_last: bool | None = None

    def __len__(self) -> int:
        return len(self._stays)

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(list(self._stays))  # as they are now: ending one takes it out

    def add(self, endpoint: Endpoint) -> None:
        """Count a queue pair that is about to be made."""
        self._stays[endpoint] = _Stay()

    def discard(self, endpoint: Endpoint) -> None:
        """Count no more a queue pair that is gone."""
        self._stays.pop(endpoint, None)

    # -- by number ----------------------------------------------------------------------------

    def find(self, qpn: int) -> _Member | None:
        """Return the member whose queue pair has this number; None once it is closed."""
        return self._by_number.get(qpn)

    def serve(self, endpoint: Endpoint, messages: MessageQueue, connection: Connection) -> None:
        """Deliver what the endpoint's queue pair takes; before its handshake."""
        if endpoint.qpn in self._by_number:
            # The number of a queue pair that is gone: what that one took is in the queue.
            self._hub.drain()
        self._by_number[endpoint.qpn] = _Member(endpoint, messages, connection)
        self._hear_of_last(endpoint)
        endpoint.life.on_close.append(lambda: self._forget(endpoint))

    def _forget(self, endpoint: Endpoint) -> None:
        member = self._by_number.get(endpoint.qpn)
        if member is not None and member.endpoint is endpoint:
            del self._by_number[endpoint.qpn]

    # -- the last receive that a queue pair took ----------------------------------------------

    def delays(self, endpoint: Endpoint, then: Callable[[], None]) -> bool:
        """Wait for the device to say that the queue pair has completed the last receive that it
        took (IBV_EVENT_QP_LAST_WQE_REACHED). A driver forgets what completes between the last
        drain and the destruction, and its receive would never be heard of (man ibv_create_srq).
        """
        self._hub.drain()
        stay = self._stays.get(endpoint)
        if stay is None or stay.last_told or self._tells_last is False:
            return False
        if stay.timer is None:
            stay.then = then
            stay.timer = self._hub.loop.call_later(LAST_SECONDS, lambda: self._not_told(endpoint))
        return True

    def _hear_of_last(self, endpoint: Endpoint) -> None:
        """Be told as its queue pair, failed, completes the last receive that it took."""

        def told(event: AsyncEventType) -> None:
            if event is AsyncEventType.QP_LAST_WQE_REACHED:
                self._tells_last = True
                self._last_is_over(endpoint)

        assert endpoint.queue_pair is not None
        self._hub.on_object_event[endpoint.queue_pair.key] = told

    def _not_told(self, endpoint: Endpoint) -> None:
        if self._tells_last is None:
            self._tells_last = False
        self._last_is_over(endpoint)

    def _last_is_over(self, endpoint: Endpoint) -> None:
        stay = self._stays.get(endpoint)
        if stay is None or stay.last_told:
            return
        stay.last_told = True
        self._hub.drain()  # it completed before it was told
        if stay.timer is not None:
            stay.timer.cancel()
            stay.then()
