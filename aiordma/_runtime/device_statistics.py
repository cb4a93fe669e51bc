"""The counters of each device in this process: those of its hubs, of any event loop, and of those
that have ended. `statistics` reads them, in any thread.

Nothing here is on the path of a request. The hubs and their queues count; this module adds up.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from aiordma._base.process import here, reentrant_lock
from aiordma._base.statistics import DeviceStatistics, RequestCounters, RequestStatistics, summed
from aiordma._base.weak_items import WeakItems
from aiordma._native import Drain
from aiordma._requests.registrations import RegistrationCache

Read = TypeVar("Read")

LEFT_AT_ONCE = 64
"""So many queues end before their counters are added up."""


class _Counted(Protocol):
    def counters(self) -> RequestCounters:
        """Return the counters of its requests."""


class _Total:
    """A sum. A finalizer may add to it while something else is being added."""

    def __init__(self) -> None:
        self.value = DeviceStatistics()


class _Process:
    """The counters of a process. A forked child begins with its own."""

    def __init__(self) -> None:
        self.pid = here.pid
        # Weakly: an event loop that ended without closing its objects is collected with them.
        self.hubs: WeakItems[HubCounters] = WeakItems()
        self.ended: dict[str, _Total] = {}
        self.moves = 0
        """How often the counters of an object that ended were added to those that remain."""

    def read(self, sum_up: Callable[[], Read]) -> Read:
        """Return what a function adds up. It is called again if a finalizer has ended an object
        meanwhile, which would be counted twice, or not at all."""
        while True:
            before = self.moves
            read = sum_up()
            if self.moves == before:
                return read

    def sum_up(self) -> dict[str, DeviceStatistics]:
        found = {device: self.ended[device].value for device in list(self.ended)}
        for hub in self.hubs.alive():
            if hub.has_ended:
                continue
            before = found.get(hub.device, DeviceStatistics())
            found[hub.device] = DeviceStatistics._sum([before, hub.snapshot()])
        return found


_lock = reentrant_lock()
_process = _Process()


def _current() -> _Process:
    """Return the counters of this process. The caller has the lock."""
    global _process
    if _process.pid != here.pid:
        _process = _Process()
    return _process


class HubCounters:
    """The counters of one hub.

    Args:
        device: the device's name.
        poller: the hub's drain.
    """

    def __init__(self, device: str, poller: Drain) -> None:
        self.device: str = device
        self._poller = poller
        # Not weakly: if the loop is collected with all its objects, weak references would be gone
        # before the objects end, and their counters with them.
        self._queues: set[_Counted] = set()
        self._caches: set[RegistrationCache] = set()
        self._gone = _Total()
        self._left: list[RequestCounters] = []
        """The counters of queues that have ended, and their sums."""
        self.refused_accesses: int = 0
        """Connections that ended because the device refused an access of the peer's."""
        self.has_ended: bool = False
        """Whether its counters are among those of the device that remain."""
        with _lock:
            self._process = _current()
            self._process.hubs.add(self)

    def add(self, counted: _Counted) -> None:
        """Count the requests of a queue pair or of a shared receive queue."""
        with _lock:
            self._queues.add(counted)

    def remove(self, counted: _Counted) -> None:
        """Keep the counters of an object that posts no more requests. Idempotent."""
        with _lock:
            counters = counted.counters()
            if counted in self._queues:  # a finalizer has not removed it
                self._left.append(counters)
                self._process.moves += 1
                self._queues.discard(counted)
            if len(self._left) >= LEFT_AT_ONCE:
                self._add_up()

    def _add_up(self) -> None:
        left = list(self._left)
        total = summed(left)
        if self._left == left:  # else a finalizer has added to it
            self._left[:] = [total]

    def add_cache(self, cache: RegistrationCache) -> None:
        """Count the hits of a protection domain's cache."""
        with _lock:
            self._caches.add(cache)

    def remove_cache(self, cache: RegistrationCache) -> None:
        """Keep the counters of a domain's cache that is no longer used. Idempotent."""
        with _lock:
            while cache in self._caches:
                before, moves = self._gone.value, self._process.moves + 1
                after = DeviceStatistics._sum([before, _of_cache(cache)])
                if self._gone.value is before and cache in self._caches:  # else a finalizer did it
                    self._gone.value = after
                    self._process.moves = moves
                    self._caches.discard(cache)

    def end(self) -> None:
        """Keep the counters of a hub that stops. Idempotent."""
        with _lock:
            total = self._process.ended.setdefault(self.device, _Total())
            while not self.has_ended:
                before, moves = total.value, self._process.moves + 1
                after = DeviceStatistics._sum([before, self.snapshot()])
                if total.value is before and not self.has_ended:
                    # From now on, `sum_up` takes the total.
                    total.value = after
                    self._process.moves = moves
                    self.has_ended = True
            self._process.hubs.discard(self)

    def snapshot(self) -> DeviceStatistics:
        """Return the counters."""
        return self._process.read(self._sum_up)

    def _sum_up(self) -> DeviceStatistics:
        counters = [counted.counters() for counted in list(self._queues)]
        queues = len(counters)
        counters += self._left
        own = DeviceStatistics(
            requests=RequestStatistics._sum(counters),
            queues=queues,
            polls=self._poller.polls,
            wakes=self._poller.wakes,
            completion_events=self._poller.events,
            completions=self._poller.delivered,
            refused_accesses=self.refused_accesses,
        )
        caches = map(_of_cache, list(self._caches))
        return DeviceStatistics._sum([self._gone.value, own, *caches])


def _of_cache(cache: RegistrationCache) -> DeviceStatistics:
    return DeviceStatistics(
        registration_cache_hits=cache.hits, registration_cache_misses=cache.misses
    )


def statistics() -> dict[str, DeviceStatistics]:
    """Return the counters of each device that this process uses or has used, by the device's name.

    The counters include all event loops, and objects that have ended. So they never decrease in the
    life of the process, except those that are present numbers. A forked child begins with its own.
    May be called in any thread.

    Raises: nothing.
    """
    with _lock:
        process = _current()
        return process.read(process.sum_up)
