"""From what users pass to what devices take: registered memory, inline bytes, or a leased copy.

Registered memory is posted as it is. Plain bytes to be sent are copied inline or into the pool when
they are short, and registered for the one request when they are long. Plain buffers to be filled
are always registered: the device writes to them itself.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiordma.enums import Access, SendFlag
from aiordma.event_loop import EventLoop
from aiordma.hub import DeviceHub
from aiordma.reactor import Reactor
from aiordma.request import Holdable, WorkRequest
from aiordma.threads import in_thread, start_call
from aiordma.verbs import Capacity, MemoryRegion, MemorySlice
from aiordma.verbs.memory import address_of, flat_view, gather

__all__ = ("Buffer", "Poster", "Staged", "Staging")

Buffer = Any
"""MemoryRegion, MemorySlice, or anything with a buffer."""

COPY_LIMIT = 1 << 16
"""Plain bytes up to this length are copied; longer ones are cheaper to register."""
THREAD_LIMIT = 1 << 20
"""Registering more than this in one go would be felt by the event loop."""

_SGE = struct.Struct("=QII")
_INLINE = int(SendFlag.INLINE)


@dataclass(slots=True)
class Staged:
    """The local side of one work request. Post it, or `abandon` it."""

    sges: bytes
    count: int
    length: int
    held: list[Holdable] = field(default_factory=list)
    flags: int = 0
    leases: list[Holdable] = field(default_factory=list)
    temporary: list[MemoryRegion] = field(default_factory=list)
    alive: Any = None
    """What inline sges point into, until the post has copied it."""

    def own(self) -> None:
        """Copy what goes inline, so that its owner may change it before the post."""
        if self.alive is not None:
            self.alive = bytes(self.alive)
            self.sges = _SGE.pack(address_of(self.alive), self.length, 0)


class Poster(Protocol):
    """What buffers are prepared for: an endpoint, or a shared receive queue."""

    loop: EventLoop
    hub: DeviceHub
    reactor: Reactor
    capacity: Capacity
    max_message: int
    regions: dict[int, MemoryRegion]

    def adopt(self, region: MemoryRegion) -> None:
        """Close the region with it, if it is not closed before."""


class Staging:
    """Prepares and cleans up buffers for one endpoint."""

    def __init__(self, endpoint: Poster) -> None:
        self._endpoint = endpoint

    # -- memory of the user -------------------------------------------------------------------

    def source(self, parts: Iterable[Buffer]) -> Staged:
        """Prepare what the device will read.

        Raises:
            TypeError: a part has no buffer.
            ValueError: too many parts, or longer than the device's messages, or closed.
            VerbsCallError: registering failed.
        """
        given = list(parts)
        self._check_count(len(given))
        if all(isinstance(part, MemoryRegion | MemorySlice) for part in given):
            return self._registered(given)
        views = [_bytes_of(part) for part in given]
        length = sum(view.nbytes for view in views)
        self._check_length(length)
        if length <= self._endpoint.capacity.max_inline_data:
            if not length:
                return Staged(b"", 0, 0)
            data = views[0] if len(views) == 1 else memoryview(b"".join(views))
            sge = _SGE.pack(address_of(data), length, 0)
            return Staged(sge, 1, length, flags=_INLINE, alive=data)
        if length <= COPY_LIMIT:
            lease = self._endpoint.hub.pool.lease(length)
            at = 0
            target = lease.memory.view
            for view in views:
                target[at : at + view.nbytes] = view
                at += view.nbytes
            return Staged(lease.memory.sge, 1, length, [lease], leases=[lease])
        return self._register(given)

    def target(self, parts: Iterable[Buffer]) -> Staged:
        """Prepare what the device will write to. Raises as `source`, and TypeError for memory
        that is read-only or registered without LOCAL_WRITE."""
        given = list(parts)
        self._check_count(len(given))
        for part in given:
            if isinstance(part, MemoryRegion | MemorySlice):
                region = _as_slice(part).region
                region.require_open()
                if not region.access & Access.LOCAL_WRITE:
                    raise TypeError(
                        f"this memory was registered with {region.access!r}: the device may only "
                        "write to it with Access.LOCAL_WRITE"
                    )
            elif flat_view(part).readonly:
                raise TypeError(
                    f"{type(part).__name__} is read-only: give a bytearray, or another writable "
                    "buffer, for the device to write to"
                )
        if all(isinstance(part, MemoryRegion | MemorySlice) for part in given):
            return self._registered(given)
        return self._register(given)

    def is_heavy(self, parts: Iterable[Buffer]) -> bool:
        """Whether preparing this blocks for long enough to be given to a worker thread."""
        plain = (p for p in parts if not isinstance(p, MemoryRegion | MemorySlice))
        return sum(flat_view(part).nbytes for part in plain) > THREAD_LIMIT

    async def prepare(
        self, stage: Callable[[Iterable[Buffer]], Staged], parts: Sequence[Buffer]
    ) -> Staged:
        """Call `source` or `target`, in a worker thread where it would hold up the loop. Cancelled,
        nothing is left of it."""
        if not self.is_heavy(parts):
            return stage(parts)
        made: list[Staged] = []
        reactor = self._endpoint.reactor
        reactor.retain()  # what the thread registers with must not be closed under it
        try:
            await in_thread(self._endpoint.loop, lambda: made.append(stage(parts)))
        except BaseException:
            for staged in made:
                self.abandon(staged)
            raise
        finally:
            reactor.release()
        return made[0]

    # -- how ----------------------------------------------------------------------------------

    def _registered(self, parts: list[Any]) -> Staged:
        slices = [_as_slice(part) for part in parts]
        domain = self._endpoint.hub.domain
        for part in slices:
            part.region.require_open()
            if part.region.domain is not domain:
                raise ValueError(
                    "this memory is registered with another device or event loop: register it "
                    "with this connection"
                )
        length = sum(part.length for part in slices)
        self._check_length(length)
        parts_ = [part for part in slices if part.length]
        return Staged(gather(parts_), len(parts_), length, list(slices))

    def _register(self, parts: list[Any]) -> Staged:
        temporary: list[MemoryRegion] = []
        slices: list[MemorySlice] = []
        try:
            for part in parts:
                if isinstance(part, MemoryRegion | MemorySlice):
                    slices.append(_as_slice(part))
                elif flat_view(part).nbytes:
                    region = MemoryRegion(self._endpoint.hub.domain, part)
                    temporary.append(region)
                    slices.append(region[:])
            staged = self._registered(slices)
        except BaseException:
            for region in temporary:
                region.close()
            raise
        staged.temporary = temporary
        for region in temporary:
            self._endpoint.adopt(region)
        return staged

    def abandon(self, staged: Staged) -> None:
        """Give back what was prepared for a request that was not posted."""
        for lease in staged.leases:
            lease.release()
        self._give_back(staged.temporary)

    def posted(self, staged: Staged, request: WorkRequest) -> None:
        """Arrange for temporary registrations to end with the request, whoever awaits it."""
        if staged.temporary:
            request.add_done_callback(lambda _: self._give_back(staged.temporary))

    def _give_back(self, regions: list[MemoryRegion]) -> None:
        # Whoever takes a region off the endpoint's list closes it: we, or the endpoint's end.
        taken = [self._endpoint.regions.pop(id(region), None) for region in regions]
        mine = [region for region in taken if region is not None]

        def close() -> None:
            for region in mine:
                region.retire()

        if sum(region.length for region in mine) > THREAD_LIMIT:
            reactor = self._endpoint.reactor
            reactor.retain()
            start_call(self._endpoint.loop, close, lambda _error: reactor.release())
        else:
            close()

    # -- limits -------------------------------------------------------------------------------

    def _check_count(self, count: int) -> None:
        most = self._endpoint.capacity.max_send_sge
        if count > most:
            raise ValueError(
                f"{count} parts: one request takes at most {most}; ask for more with max_sge= "
                f"(the device has {self._endpoint.hub.attributes.max_sge})"
            )

    def _check_length(self, length: int) -> None:
        most = self._endpoint.max_message
        if length > most:
            raise ValueError(
                f"{length} bytes in one request: {self._endpoint.hub.context.device_name} carries "
                f"at most {most}"
            )


def _as_slice(part: MemoryRegion | MemorySlice) -> MemorySlice:
    return part if isinstance(part, MemorySlice) else part[:]


def _bytes_of(part: Buffer) -> memoryview:
    # Registered memory beside plain bytes is copied, or gathered, with them.
    if isinstance(part, MemoryRegion | MemorySlice):
        registered = _as_slice(part)
        registered.region.require_open()
        return registered.view
    return flat_view(part)
