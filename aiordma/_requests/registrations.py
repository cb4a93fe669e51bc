"""The registration cache: registrations of large plain arrays, kept for the next request.

Registering pins every page, which takes longer than sending it. So the registration of a large
array outlives its request. It holds neither the array nor its memory: it ends with the array, at
the latest.

Only numpy arrays are cached. An object's memory must not move or end before the object does, and
the object must report its end (weakref). A bytearray can be resized, an mmap closed, and neither
says so; while a numpy array has a weak reference, it refuses to be resized.
"""

import errno
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from aiordma._base.arguments import whole_number
from aiordma._base.errors import VerbsCallError
from aiordma._base.process import reentrant_lock
from aiordma._loop.event_loop import EventLoop
from aiordma.verbs.buffers import address_of
from aiordma.verbs.memory import MemoryRegion, MemorySlice, retire_all, retire_or_log

MAX_BYTES = 1 << 28
"""The default of `RegistrationCache.max_bytes`."""

Region = TypeVar("Region", bound=MemoryRegion)

Dispose = Callable[[list[MemoryRegion], Callable[[], object]], object]
"""Call a function, which deregisters these regions, without blocking the event loop."""

_Key = tuple[int, int, bool]
_NOTHING = memoryview(b"")


class _Entry:
    __slots__ = ("owner", "region", "uses")

    def __init__(self, region: MemoryRegion, owner: weakref.ref[Any]) -> None:
        self.region = region
        self.owner = owner
        self.uses = 0  # requests that use it, posted or not yet


class LentRegistration:
    """A cached registration in use by one request (Holdable). It keeps the array, and is not
    removed from the cache, until the request completes, or until `drop`."""

    __slots__ = ("_cache", "_entry", "part", "view")

    def __init__(self, cache: "RegistrationCache", entry: _Entry, view: memoryview) -> None:
        self._cache = cache
        self._entry = entry
        entry.uses += 1  # the cache has its lock; first, because a finalizer can clear the cache
        try:
            self.part: MemorySlice = entry.region[:]
        except BaseException:
            entry.uses -= 1
            raise
        self.view: memoryview | None = view
        entry.region._view = view

    def drop(self) -> None:
        """End the use. Idempotent."""
        with self._cache._lock:
            if self.view is None:
                return
            self.view = None
            self._entry.uses -= 1
            if self._entry.uses:
                return
            self._entry.region._view = _NOTHING
        self._cache._evict(self._cache.max_bytes)

    def _hold(self) -> None:
        self.part._hold()

    def _release(self) -> None:
        self.part._release()
        self.drop()


class RegistrationCache:
    """Registrations of large numpy arrays that were passed to requests unregistered. Connections
    that share a protection domain share the cache.

    A registration is used again if the same array is passed again, or the same part of it. It is
    removed when the array is deleted, when `max_bytes` are exceeded (the registration that was not
    used for the longest time first, but none that a request uses), when the device refuses a
    further registration for lack of memory, and when the domain closes. While an array is in the
    cache, it cannot be resized.

    Attributes:
        hits: the number of registrations that were used again.
        misses: the number of arrays that were registered for the cache.
        evictions: the number of registrations that were removed before their array was deleted.
    """

    def __init__(self) -> None:
        self.hits: int = 0
        self.misses: int = 0
        self.evictions: int = 0
        self._max_bytes = MAX_BYTES
        self._entries: dict[_Key, _Entry] = {}
        # A finalizer of an array takes its entry out, at any moment and in any thread. So it takes
        # no lock, and only calls methods that Python runs in one piece.
        self._dead: deque[MemoryRegion] = deque()
        self._bytes = 0  # of the entries, and of those in `_ended_bytes`
        self._ended_bytes: deque[int] = deque()  # of the entries that finalizers have taken out
        self._lock = reentrant_lock()
        self._loop: EventLoop | None = None
        self._dispose: Dispose = lambda _regions, close: close()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of registrations."""
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<RegistrationCache of {len(self)} registrations, {self.registered} bytes>"

    @property
    def registered(self) -> int:
        """The number of bytes that are registered."""
        return sum(entry.region.length for entry in list(self._entries.values()))

    @property
    def max_bytes(self) -> int:
        """The maximum number of bytes that stay registered; 256 MiB by default. 0 disables the
        cache. A lower value than before removes registrations at once.

        Raises:
            TypeError, ValueError: on assignment, if the value is not a whole number, or negative.
        """
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, most: int) -> None:
        self._max_bytes = whole_number(most, "max_bytes", 0, 1 << 62)
        self._evict(self._max_bytes)

    def clear(self) -> None:
        """Remove every registration that no request uses.

        Raises: nothing.
        """
        self._evict(0)

    # -- for the staging of requests ------------------------------------------------------------

    def _serve(self, loop: EventLoop, dispose: Dispose) -> None:
        """Set the loop, and the function that deregisters memory without blocking it."""
        self._loop, self._dispose = loop, dispose

    def _find(self, view: memoryview) -> LentRegistration | None:
        """Return the registration of an array's memory, or None. Nothing is pinned."""
        owner = _owner_of(view)
        if owner is None or self._is_closed:
            return None
        key = _key_of(view)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.owner() is not owner or not entry.region._usable:
                return None
            self._entries[key] = self._entries.pop(key)  # the last one to be removed
            self.hits += 1
            return LentRegistration(self, entry, view)

    def _keep(self, region: MemoryRegion) -> LentRegistration | None:
        """Take over a new registration, and return its first use; None if it cannot be kept. The
        region then no longer has its view of the memory."""
        view = region.view
        owner = _owner_of(view)
        if owner is None or self._is_closed or region.length > self._max_bytes:
            return None
        key = _key_of(view)

        def ended(reference: weakref.ref[Any]) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry.owner is reference:
                if self._entries.pop(key, None) is None:
                    return  # another thread has just taken it out
                self._ended_bytes.append(entry.region.length)
                self._dead.append(entry.region)
                if self._loop is not None and not self._loop.has_ended:
                    self._loop.call_from_thread(self._sweep)

        entry = _Entry(region, weakref.ref(owner, ended))
        with self._lock:
            if key in self._entries:
                return None  # of another thread, or of an array that is ending
            self.misses += 1
            lent = LentRegistration(self, entry, view)
            self._entries[key] = entry
            self._bytes += region.length
        return lent

    def _has(self, view: memoryview) -> bool:
        """Return whether `_find` would find the memory."""
        entry = self._entries.get(_key_of(view))
        return entry is not None and entry.owner() is _owner_of(view)

    def _register(self, register: Callable[[], Region]) -> Region:
        """Call a function that registers memory in the cache's domain, in any thread. If the device
        lacks memory for it, deregister what the cache keeps without use, and call it once more.

        Raises: the errors of `register`.
        """
        try:
            return register()
        except VerbsCallError as error:
            if error.errno != errno.ENOMEM or not self._release_idle():
                raise
        return register()

    def _release_idle(self) -> bool:
        """Deregister everything that no request uses, at once, in this thread. Return whether there
        was anything."""
        self._remove_unused(0)
        unused = self._take_dead()
        self._deregister(unused)
        return any(region._is_gone for region in unused)

    def _deregister(self, regions: list[MemoryRegion]) -> None:
        """Deregister memory of the cache's domain, in any thread. Refusals of the driver are
        logged."""
        retire_all(regions, retire_or_log)

    def _detach(self, into: list[MemoryRegion]) -> None:
        """Move every region into a list, for the caller to close. The cache keeps no more."""
        self._is_closed = True
        with self._lock:
            # A finalizer takes entries out at any moment, and then has put them into `_dead`.
            for key in list(self._entries):
                entry = self._entries.pop(key, None)
                if entry is not None:
                    into.append(entry.region)
            self._bytes = 0
            self._ended_bytes.clear()
        into.extend(self._take_dead())

    def _evict(self, most: int) -> None:
        self._remove_unused(most)
        self._schedule_sweep()

    def _remove_unused(self, most: int) -> None:
        """Move registrations that no request uses to `_dead`, until at most so many bytes stay."""
        with self._lock:
            if self._count_ended() <= most:
                return  # after almost every request: it costs the same with many entries
            # Making a list of the keys allocates no object that the garbage collector tracks. So no
            # finalizer changes the entries meanwhile.
            for key in list(self._entries):
                if self._count_ended() <= most:
                    break
                entry = self._entries.get(key)
                if entry is None or entry.uses or self._entries.pop(key, None) is None:
                    continue
                self._bytes -= entry.region.length
                self.evictions += 1
                self._dead.append(entry.region)

    def _count_ended(self) -> int:
        """Subtract what finalizers have taken out, and return the bytes of the entries."""
        with suppress(IndexError):
            while True:
                self._bytes -= self._ended_bytes.popleft()
        return self._bytes

    def _schedule_sweep(self) -> None:
        loop = self._loop
        if loop is None or loop.has_ended or loop.is_running_here():
            self._sweep()
        else:
            loop.call_from_thread(self._sweep)

    def _sweep(self) -> None:
        dead = self._take_dead()
        if dead:
            self._dispose(dead, partial(self._deregister, dead))

    def _take_dead(self) -> list[MemoryRegion]:
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._dead.popleft())
        return taken


def _key_of(view: memoryview) -> _Key:
    return address_of(view), view.nbytes, view.readonly


def _owner_of(view: memoryview) -> Any:
    """Return the numpy array that owns the memory; None if there is none, or if the memory could
    end before the array."""
    numpy = sys.modules.get("numpy")
    owner = view.obj
    if numpy is None or not isinstance(owner, numpy.ndarray):
        return None
    while isinstance(owner.base, numpy.ndarray):
        owner = owner.base
    return owner if owner.flags.owndata else None
