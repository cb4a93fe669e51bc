"""The counters of each device in this process: those of its hubs, of any event loop, and of those
that have ended. `statistics` reads them, in any thread.

Nothing here is on the path of a request. The hubs and their queues count; this module adds up.
"""

from threading import RLock
from typing import Protocol
from weakref import WeakSet

from aiordma._base.process import here
from aiordma._base.statistics import DeviceStatistics, RequestStatistics
from aiordma._requests.registrations import RegistrationCache
from aiordma._requests.select import Drain

__all__ = ("HubCounters", "statistics")


class _Counted(Protocol):
    def statistics(self) -> RequestStatistics:
        """Return the counters of its requests."""


class _Process:
    """The counters of a process. A forked child begins with its own."""

    def __init__(self) -> None:
        self.pid = here.pid
        # Reentrant: while it is held, the garbage collector can end an object that is counted.
        self.lock = RLock()
        # Weakly: an event loop that ended without closing its objects is collected with them.
        self.hubs: WeakSet[HubCounters] = WeakSet()
        self.ended: dict[str, DeviceStatistics] = {}


_process = _Process()


def _current() -> _Process:
    global _process
    if _process.pid != here.pid:
        _process = _Process()
    return _process


class HubCounters:
    """The counters of one hub.

    Args:
        device: the device's name.
        steps: the hub's drain.
    """

    def __init__(self, device: str, steps: Drain) -> None:
        self._process = _current()
        self._device = device
        self._steps = steps
        self._queues: WeakSet[_Counted] = WeakSet()
        self._caches: WeakSet[RegistrationCache] = WeakSet()
        self._gone = DeviceStatistics()
        self._has_ended = False
        with self._process.lock:
            self._process.hubs.add(self)

    def add(self, counted: _Counted) -> None:
        """Count the requests of a queue pair or of a shared receive queue."""
        with self._process.lock:
            self._queues.add(counted)

    def remove(self, counted: _Counted) -> None:
        """Keep the counters of an object that posts no more requests. Idempotent."""
        with self._process.lock:
            if counted in self._queues:
                self._queues.discard(counted)
                self._keep(DeviceStatistics(requests=counted.statistics()))

    def add_cache(self, cache: RegistrationCache) -> None:
        """Count the hits of a protection domain's cache."""
        with self._process.lock:
            self._caches.add(cache)

    def remove_cache(self, cache: RegistrationCache) -> None:
        """Keep the counters of a domain's cache that is no longer used. Idempotent."""
        with self._process.lock:
            if cache in self._caches:
                self._caches.discard(cache)
                self._keep(_of_cache(cache))

    def end(self) -> None:
        """Keep the counters of a hub that stops. Idempotent."""
        process = self._process
        with process.lock:
            if self._has_ended:
                return
            before = process.ended.get(self._device, DeviceStatistics())
            process.ended[self._device] = DeviceStatistics._sum([before, self.snapshot()])
            self._has_ended = True
            process.hubs.discard(self)

    def snapshot(self) -> DeviceStatistics:
        """Return the counters."""
        queues = [counted.statistics() for counted in self._queues]
        own = DeviceStatistics(
            requests=RequestStatistics._sum(queues),
            queues=len(queues),
            polls=self._steps.polls,
            wakes=self._steps.wakes,
            completion_events=self._steps.events,
            completions=self._steps.delivered,
        )
        return DeviceStatistics._sum([self._gone, own, *map(_of_cache, self._caches)])

    def _keep(self, statistics: DeviceStatistics) -> None:
        self._gone = DeviceStatistics._sum([self._gone, statistics])

    @property
    def device(self) -> str:
        """The device's name."""
        return self._device


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
    process = _current()
    with process.lock:
        found = dict(process.ended)
        for hub in process.hubs:
            before = found.get(hub.device, DeviceStatistics())
            found[hub.device] = DeviceStatistics._sum([before, hub.snapshot()])
        return found
