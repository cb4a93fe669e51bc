"""Converts the caller's buffers to registered memory or inline bytes.

Registered memory is posted as it is. Other buffers to be sent are copied if they are short, inline
or to a pool block; long ones are registered for the one request, and short ones if the request also
has memory that the processor does not access (a dma-buf). Other buffers to be filled are always
registered, because the device writes to them directly. The registration cache keeps the
registrations of long numpy arrays for further requests.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from aiordma._base.arguments import buffers, shown
from aiordma._base.enums import Access, SendFlag, names_of
from aiordma._endpoint.domain_state import (
    DomainState,
    kept_open,
    start_deregistering,
    wrong_domain,
)
from aiordma._endpoint.memory import Memory
from aiordma._loop.event_loop import EventLoop
from aiordma._loop.threads import in_thread
from aiordma._native import COPY_LIMIT
from aiordma._requests.registrations import LentRegistration
from aiordma._requests.request import Holdable
from aiordma._runtime.hub import DeviceHub
from aiordma.verbs import Capacity, LocalMemory, RegistrableMemory
from aiordma.verbs.buffers import address_of, flat_view
from aiordma.verbs.gpu_memory import register_anywhere
from aiordma.verbs.memory import MemoryRegion, MemorySlice, gather, retire_all, retire_or_log

PARTS = "parts[{}]"
"""The parameter of calls that take several buffers, with {} for the index of a buffer."""

THREAD_LIMIT = 1 << 20
"""Bytes above which a registration would block the event loop for too long."""

_SGE = struct.Struct("=QII")
_INLINE = int(SendFlag.INLINE)


@dataclass(slots=True)
class Staged:
    """The local buffers of one work request. Post it, or `abandon` it."""

    sges: bytes
    count: int
    length: int
    held: list[Holdable] = field(default_factory=list)
    flags: int = 0
    leases: list[Holdable] = field(default_factory=list)
    temporary: list[MemoryRegion] = field(default_factory=list)
    alive: Any = None
    """The memory of inline bytes, until the post has copied them."""

    def own(self) -> None:
        """Copy inline bytes, so that their owner can change them before the post."""
        if self.alive is not None:
            self.alive = bytes(self.alive)
            self.sges = _SGE.pack(address_of(self.alive), self.length, 0)


class _Temporary:
    """Regions that were registered for one request. Its end deregisters them, even if no task
    awaits it: nothing is left to do behind the post, where no memory may be left."""

    __slots__ = ("_regions", "_staging")

    def __init__(self, staging: "Staging", regions: list[MemoryRegion]) -> None:
        self._staging = staging
        self._regions = regions

    def _hold(self) -> None:
        """Nothing: the parts of these regions are held beside this."""

    def _release(self) -> None:
        self._staging._give_back(self._regions)


class Poster(Protocol):
    """An endpoint or a shared receive queue, for which buffers are prepared."""

    loop: EventLoop
    hub: DeviceHub
    memory: Memory

    @property
    def is_sound(self) -> bool:
        """Whether no request of it has failed. If so, the device has left the memory of those that
        have completed."""

    @property
    def max_message(self) -> int:
        """Bytes of the longest message."""

    @property
    def capacity(self) -> Capacity:
        """The sizes of its queue pair."""

    def require_usable(self) -> None:
        """Raise the error of an object that posts no requests: it has ended, for example."""


class Staging:
    """Prepares the buffers of requests, and releases them."""

    def __init__(self, endpoint: Poster) -> None:
        self._endpoint = endpoint
        self._cache = endpoint.memory.pool.registrations
        if self._cache._loop is None:
            dispose = partial(_dispose, endpoint.hub, endpoint.memory.state)
            self._cache._serve(endpoint.loop, dispose)

    # -- the caller's buffers -----------------------------------------------------------------

    def source(self, parts: Iterable[LocalMemory], where: str) -> Staged:
        """Prepare buffers that the device will read.

        Args:
            parts: registered memory, or objects with a buffer.
            where: the call and its parameter, for messages: "post_send(): data", or with {} for the
                index of a part, "post_sendv(): parts[{}]".

        Raises:
            TypeError: a part has no buffer.
            ValueError: there are too many parts, they exceed the device's longest message, or
                registered memory belongs to another device or event loop.
            ClosedError: a region is closed.
            VerbsCallError: a buffer could not be registered.
        """
        given = list(parts)
        self._check_count(len(given), "max_send_sge", where)
        if all(isinstance(part, MemoryRegion | MemorySlice) for part in given):
            return self._registered(given, where)
        if any(_is_inaccessible(part) for part in given):
            return self._register(given, where)
        views = [self._bytes_of(part, where, i) for i, part in enumerate(given)]
        length = sum(view.nbytes for view in views)
        self.check_length(length, where)
        if length <= self._endpoint.capacity.max_inline_data:
            if not length:
                return Staged(b"", 0, 0)
            data = views[0] if len(views) == 1 else memoryview(b"".join(views))
            sge = _SGE.pack(address_of(data), length, 0)
            return Staged(sge, 1, length, flags=_INLINE, alive=data)
        if length <= COPY_LIMIT:
            lease = self._endpoint.memory.pool.lease(length)
            at = 0
            target = lease.memory.view
            for view in views:
                target[at : at + view.nbytes] = view
                at += view.nbytes
            return Staged(lease.memory._sge, 1, length, [lease], leases=[lease])
        return self._register(given, where)

    def copies(self, item: LocalMemory) -> bool:
        """Whether the program may change a buffer that `source` has prepared: it was copied, or it
        is of bytes, which nobody changes."""
        if isinstance(item, MemoryRegion | MemorySlice):
            return False
        return type(item) is bytes or flat_view(item).nbytes <= COPY_LIMIT

    def target(self, parts: Iterable[LocalMemory], where: str) -> Staged:
        """Prepare buffers that the device will write to. Arguments and errors as in `source`.
        Memory that is read-only, or registered without LOCAL_WRITE, raises TypeError, too."""
        given = list(parts)
        self._check_count(len(given), "max_send_sge", where)
        staged = self._target(given, where)
        if not staged.length and self._endpoint.hub.is_iwarp:
            self._add_empty_part(staged)
        return staged

    def _add_empty_part(self, staged: Staged) -> None:
        """Add a part of no bytes. siw refuses a READ without parts (EINVAL), and checks the key of
        the part also if no bytes are read."""
        lease = self._endpoint.memory.pool.lease(1)
        address, _, lkey = _SGE.unpack(lease.memory._sge)
        staged.sges, staged.count = _SGE.pack(address, 0, lkey), 1
        staged.held = [*staged.held, lease]
        staged.leases = [*staged.leases, lease]

    def receive(self, parts: Iterable[LocalMemory], where: str) -> Staged:
        """Prepare a receive. Arguments and errors are those of `target`."""
        given = list(parts)
        self._check_count(len(given), "max_recv_sge", where)
        return self._target(given, where)

    def _target(self, given: list[LocalMemory], where: str) -> Staged:
        for i, part in enumerate(given):
            if isinstance(part, MemoryRegion | MemorySlice):
                region = _as_slice(part).region
                region._require_open()
                if not region.access & Access.LOCAL_WRITE:
                    raise TypeError(f"{where.format(i)}={part!r}: {not_writable(region)}")
            elif flat_view(part, where, i).readonly:
                raise TypeError(
                    f"{where.format(i)}={shown(part)}: {type(part).__name__} is read-only: give a "
                    "bytearray, or another writable buffer, for the device to write to"
                )
        if all(isinstance(part, MemoryRegion | MemorySlice) for part in given):
            return self._registered(given, where)
        return self._register(given, where)

    def is_heavy(self, parts: Iterable[LocalMemory], where: str) -> bool:
        """Return whether preparing the buffers takes so long that a worker thread must do it."""
        views = [
            flat_view(part, where, i)
            for i, part in enumerate(parts)
            if not isinstance(part, MemoryRegion | MemorySlice)
        ]
        return (
            sum(view.nbytes for view in views) > THREAD_LIMIT
            and sum(view.nbytes for view in views if not self._cache._has(view)) > THREAD_LIMIT
        )

    async def prepare(
        self,
        stage: Callable[[Iterable[LocalMemory], str], Staged],
        parts: Sequence[LocalMemory],
        where: str,
    ) -> Staged:
        """Call `source` or `target`, in a worker thread if it would block the loop. A cancellation
        leaves nothing prepared, nor does the endpoint's end during the call."""
        if self.is_heavy(parts, where):
            return await self._prepare_in_thread(lambda: stage(parts, where))
        return stage(parts, where)

    async def _prepare_in_thread(self, stage: Callable[[], Staged]) -> Staged:
        endpoint = self._endpoint
        with kept_open(endpoint.memory.state) as leave:
            staged = await in_thread(endpoint.loop, stage, on_cancelled=self.abandon, on_lost=leave)
            try:
                endpoint.require_usable()
            except BaseException:
                self.abandon(staged)
                raise
        return staged

    # -- registered memory --------------------------------------------------------------------

    def _registered(self, parts: list[Any], where: str) -> Staged:
        slices = [_as_slice(part) for part in parts]
        for part in slices:
            part.region._require_open()
            self._check_domain(part.region)
        length = sum(part.length for part in slices)
        self.check_length(length, where)
        parts_ = [part for part in slices if part.length]
        held = {id(part.region): part for part in slices}  # the request holds each region once
        return Staged(gather(parts_), len(parts_), length, list(held.values()))

    def _bytes_of(self, part: LocalMemory, where: str, place: int) -> memoryview:
        # Among unregistered buffers, registered memory is also copied.
        if isinstance(part, MemoryRegion | MemorySlice):
            registered = _as_slice(part)
            registered.region._require_open()
            self._check_domain(registered.region)
            return registered.view
        return flat_view(part, where, place)

    def _check_domain(self, region: MemoryRegion) -> None:
        if region.domain is not self._endpoint.memory.domain:
            raise wrong_domain(region, self._endpoint.memory.domain)

    def _register(self, parts: list[Any], where: str) -> Staged:
        temporary: list[MemoryRegion] = []
        lent: dict[int, LentRegistration] = {}
        slices: list[MemorySlice] = []
        try:
            for i, part in enumerate(parts):
                if isinstance(part, MemoryRegion | MemorySlice):
                    slices.append(_as_slice(part))
                elif flat_view(part, where, i).nbytes:
                    slices.append(self._register_one(part, temporary, lent))
            staged = self._registered(slices, where)
            staged.held = [
                lent.get(id(slice_.region), slice_)
                for slice_ in {id(slice_.region): slice_ for slice_ in slices}.values()
            ]
            if temporary:
                staged.temporary = temporary
                staged.held.append(_Temporary(self, temporary))
            for region in temporary:
                self._endpoint.memory.adopt(region)
            return staged
        except BaseException:
            for each in lent.values():
                each.drop()
            for region in temporary:
                retire_or_log(region)
            raise

    def _register_one(
        self, part: Any, temporary: list[MemoryRegion], lent: dict[int, LentRegistration]
    ) -> MemorySlice:
        """Register a buffer for one request, or find it in the cache."""
        view = flat_view(part)
        if view.nbytes > COPY_LIMIT:
            known = self._cache._find(view)
            if known is not None:
                if id(known.part.region) in lent:
                    known.drop()  # the same array twice: the request holds it once
                else:
                    lent[id(known.part.region)] = known
                return known.part
        region = register_memory(self._endpoint, part)
        if view.nbytes > COPY_LIMIT:
            kept = self._cache._keep(region)
            if kept is not None:
                lent[id(region)] = kept
                return kept.part
        temporary.append(region)
        return region[:]

    def abandon(self, staged: Staged) -> None:
        """Release the buffers of a request that was not posted."""
        for lease in staged.leases:
            lease._release()
        for held in staged.held:
            if isinstance(held, LentRegistration):
                held.drop()
        self._give_back(staged.temporary)

    def _give_back(self, regions: list[MemoryRegion]) -> None:
        # Regions that the endpoint's end has removed from its list are closed by it.
        known = self._endpoint.memory.regions
        mine = [region for region in regions if known.pop(id(region), None) is not None]
        if not mine:
            return
        close = partial(retire_all, mine, retire_or_log)
        if sum(region.length for region in mine) > THREAD_LIMIT:
            if self._endpoint.is_sound:
                # No request uses them, and no peer may: the program gets its memory back at once.
                for region in mine:
                    region._let_go()
            start_deregistering(self._endpoint.loop, self._endpoint.memory.state, close)
        else:
            close()

    # -- limits -------------------------------------------------------------------------------

    def _check_count(self, count: int, option: str, where: str) -> None:
        most = getattr(self._endpoint.capacity, option)
        if count > most:
            raise ValueError(
                f"{call_of(where)}(): {count} parts: one request takes at most {most}; ask for "
                f"more with {option}= (the device has {self._endpoint.hub.attributes.max_sge})"
            )

    def check_length(self, length: int, where: str) -> None:
        """Check the length of a request against the device's longest message.

        Raises:
            ValueError: the request is longer; the message has the limit.
        """
        most = self._endpoint.max_message
        if length > most:
            raise ValueError(
                f"{call_of(where)}(): {length} bytes in one request: "
                f"{self._endpoint.hub.context.device_name} carries at most {most}"
            )


def register_memory(
    endpoint: Poster,
    buffer: RegistrableMemory,
    access: Access | None = None,
    call: str = "register",
) -> MemoryRegion:
    """Register memory in the endpoint's domain, in any thread. If the device lacks memory for it,
    release what the registration cache keeps without use, and try once more. `call` is the function
    that was called, for messages.

    Raises: as `register_anywhere`.
    """
    return endpoint.memory.pool.registrations._register(
        lambda: register_anywhere(endpoint.memory.domain, buffer, access, call)
    )


def _dispose(
    hub: DeviceHub,
    domain: DomainState | None,
    regions: list[MemoryRegion],
    close: Callable[[], object],
) -> None:
    """Call the function that deregisters memory of the registration cache, in a worker thread if
    that takes long."""
    if sum(region.length for region in regions) > THREAD_LIMIT:
        start_deregistering(hub.loop, domain, close)
    else:
        close()


def call_of(where: str) -> str:
    """Return the name of the call in the argument `where` of `Staging.source`."""
    return where.partition("()")[0]


def not_writable(region: MemoryRegion) -> str:
    """Return why the device may not write to a region, for messages."""
    text = (
        f"it was registered with {names_of(region.access)}, and for the device to write to it "
        "takes Access.LOCAL_WRITE"
    )
    if region._start and region.view.readonly:
        text += ", which its read-only buffer rules out: register a bytearray"
    return text


def several(parts: Iterable[LocalMemory], call: str) -> list[LocalMemory]:
    """Return a copy of the parts of a request, as a list.

    Raises:
        TypeError: `parts` is one buffer, or cannot be iterated.
    """
    return buffers(parts, "parts", call, MemoryRegion, MemorySlice)


def _as_slice(part: MemoryRegion | MemorySlice) -> MemorySlice:
    return part if isinstance(part, MemorySlice) else part[:]


def _is_inaccessible(part: LocalMemory) -> bool:
    """Return whether a part is memory that the processor does not access."""
    return isinstance(part, MemoryRegion | MemorySlice) and not _as_slice(part)._is_accessible
