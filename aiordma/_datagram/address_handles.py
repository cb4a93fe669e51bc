"""The address handles of one endpoint: made when first used, kept while there is room.

A handle must outlive every request that was posted with it. So each counts the requests that hold
it; one that makes room for another is destroyed only when the last of them has ended.
"""

import logging
from collections import OrderedDict
from contextlib import ExitStack
from functools import partial

from aiordma._base.errors import ClosedError
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._loop.event_loop import EventLoop
from aiordma._loop.threads import PEERS, Once, in_thread, start_destroy
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import AddressHandle, AddressVector, ProtectionDomain

__all__ = ("AddressHandles", "PeerHandle")

logger: logging.Logger = logging.getLogger("aiordma")


class PeerHandle:
    """An address handle and how many hold it (Holdable)."""

    __slots__ = ("_handles", "_holders", "_retired", "handle")

    def __init__(self, handles: "AddressHandles", handle: AddressHandle) -> None:
        self.handle: AddressHandle = handle
        self._handles = handles
        self._holders = 0
        self._retired = False

    def hold(self) -> None:
        """Keep it: a request is posted with it, or is about to be."""
        self._holders += 1

    def release(self) -> None:
        """No longer keep it."""
        self._holders -= 1
        self._destroy_if_unused()

    _hold, _release = hold, release  # Holdable

    def retire(self) -> None:
        """Destroy it as soon as nobody holds it. Idempotent."""
        if not self._retired:
            self._retired = True
            self._destroy_if_unused()

    def _destroy_if_unused(self) -> None:
        if self._retired and not self._holders:
            self._handles.destroy(self.handle)


class AddressHandles:
    """Handles by the way that they stand for, the least recently used one going first.

    Making one may ask the network for the peer's link address, and destroying one waits for the
    device: both run in threads, one at a time for the latter. `ended` is set once all are gone
    after `close`.
    """

    def __init__(
        self, loop: EventLoop, reactor: Reactor, domain: ProtectionDomain, most: int
    ) -> None:
        self._loop = loop
        self._reactor = reactor
        self._domain = domain
        self._most = most
        self._kept: OrderedDict[AddressVector, PeerHandle] = OrderedDict()
        self._alive = 0
        self._unwanted: list[AddressHandle] = []
        self._destroying = False
        self._closed = False
        self.ended: Once = Once(loop)

    def __len__(self) -> int:
        """How many exist, also those that wait for their last request."""
        return self._alive

    def get(self, vector: AddressVector) -> PeerHandle:
        """Return the handle of a way, made on the spot if it is new. The caller holds it.

        Raises:
            VerbsCallError: the way is none, or the device has no handle left.
        """
        known = self._known(vector)
        if known is None:
            self._require_open()
            known = self._keep(vector, AddressHandle(self._domain, vector))
        known.hold()
        return known

    async def obtain(self, vector: AddressVector) -> PeerHandle:
        """`get`, made in a thread if it is new. Cancelled, nobody holds it."""
        known = self._known(vector)
        if known is None:
            known = await self._make(vector)
        known.hold()
        return known

    @deferring_steps
    async def _make(self, vector: AddressVector) -> PeerHandle:
        self._require_open()
        # If another task makes one meanwhile, both do, and the later one is kept.
        keep = partial(self._keep, vector)
        make = partial(AddressHandle, self._domain, vector)
        self._alive += 1
        try:
            with self._reactor.retained():
                known = keep(await in_thread(self._loop, make, PEERS, on_cancelled=keep))
        finally:
            self._gone(1)
        self._require_open()
        return known

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the address handles were closed with their endpoint")

    def _known(self, vector: AddressVector) -> PeerHandle | None:
        known = self._kept.get(vector)
        if known is not None:
            self._kept.move_to_end(vector)
        return known

    def _keep(self, vector: AddressVector, handle: AddressHandle) -> PeerHandle:
        new = PeerHandle(self, handle)
        self._alive += 1
        old = self._kept.pop(vector, None)
        self._kept[vector] = new
        if old is not None:
            old.retire()
        # The new one is held by nobody yet: whatever goes, it is not that one, unless it is late.
        while len(self._kept) > self._most or (self._closed and self._kept):
            self._kept.popitem(last=False)[1].retire()
        return new

    def destroy(self, handle: AddressHandle) -> None:
        """For PeerHandle: nobody needs it any more."""
        self._unwanted.append(handle)
        self._destroy_unwanted()

    @deferring
    def _destroy_unwanted(self) -> None:
        if self._destroying or not self._unwanted:
            return
        self._destroying = True
        unwanted, self._unwanted = self._unwanted, []

        def close() -> None:
            with ExitStack() as stack:
                for handle in unwanted:
                    stack.callback(handle.close)

        def closed(error: BaseException | None) -> None:
            if error is not None:
                logger.error("destroying address handles: %s", error, exc_info=error)
            self._destroying = False
            self._destroy_unwanted()
            self._reactor.release(lambda: self._gone(len(unwanted)))

        self._reactor.retain()
        start_destroy(self._loop, close, closed)

    def _gone(self, count: int) -> None:
        self._alive -= count
        if self._closed and not self._alive:
            self.ended.set()

    def close(self) -> None:
        """Destroy all in the background; those that a request holds when it has ended."""
        self._closed = True
        while self._kept:
            self._kept.popitem()[1].retire()
        self._gone(0)
