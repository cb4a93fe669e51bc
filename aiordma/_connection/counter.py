"""Counters: how many notifications of the peer have arrived."""

import anyio.lowlevel

from aiordma._base.arguments import whole_number
from aiordma._endpoint.capabilities import require_immediate
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.event_loop import Waiter
from aiordma._native import ArrivalQueue

_MOST = 2**32 - 1


class Counter:
    """Counts notifications of a connection's peer, made by `Connection.counter`.

    A notification is a WRITE, a `write_blocks` or a message without bytes, with `immediate=number`:
    the number is the counter's `number`, which the peer's program has to be told. It says that all
    that the peer wrote before has arrived. Notifications are no messages: `receive` does not return
    them, and no task need receive.
    """

    def __init__(self, endpoint: Endpoint, queue: ArrivalQueue) -> None:
        counters = queue.counters
        if counters is None:
            counters = queue.counters = {}
        self._endpoint = endpoint
        self._count = 0
        self._number = _MOST - len(counters)
        self._waiters: list[Waiter] = []
        counters[self._number] = self._notified
        endpoint.teardown.on_ended.append(self._wake)

    def __repr__(self) -> str:
        return f"<Counter {self._number:#x} of {self._endpoint.name}: {self._count}>"

    @property
    def number(self) -> int:
        """The immediate data of its notifications, for the peer's program. The first counter of a
        connection has 2**32 - 1, the next one the number below."""
        return self._number

    @property
    def count(self) -> int:
        """How many notifications have arrived since the counter was made."""
        return self._count

    async def wait(self, count: int) -> None:
        """Wait until so many notifications have arrived since the counter was made. This waits for
        the peer's program, and so without a limit of time; `anyio.fail_after` sets one.

        Args:
            count: the number of notifications, those that have arrived already included.

        Raises:
            TypeError, ValueError: `count` is no whole number from 0 to 2**64 - 1.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended, and fewer have arrived; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: changes nothing. In a grant, `Grant.until` ends the access then.
        """
        whole_number(count, "count", 0, 2**64 - 1, "wait")
        endpoint = self._endpoint
        endpoint.require_own_loop()
        await anyio.lowlevel.checkpoint()
        while self._count < count:
            endpoint.require_usable()
            waiter = endpoint.loop.waiter()
            self._waiters.append(waiter)
            try:
                await waiter.wait()
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def _notified(self) -> None:
        self._count += 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters:
            self._waiters.pop().wake()


def open_counter(endpoint: Endpoint, queue: ArrivalQueue) -> Counter:
    """Make a counter. See `Connection.counter`."""
    endpoint.require_usable()
    require_immediate(endpoint)
    if not queue.fed:
        raise ValueError(
            "counter(): the program posts this connection's receives itself: it gets notifications "
            "as their completions"
        )
    return Counter(endpoint, queue)
