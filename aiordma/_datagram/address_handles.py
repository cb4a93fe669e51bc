"""The address handles of one endpoint: created at the first use, and kept up to a maximum number.

A handle must exist until every request that was posted with it has completed. So each handle counts
the requests that hold it. A handle that is dropped is destroyed only when the last of these
requests has completed.
"""

import logging
from collections import OrderedDict
from contextlib import ExitStack, suppress
from functools import partial

from aiordma._base.errors import ClosedError
from aiordma._endpoint.domain_state import DomainState
from aiordma._endpoint.remains import Remains
from aiordma._loop.ending import Ending, end
from aiordma._loop.event_loop import EventLoop
from aiordma._loop.threads import PEERS, Once, in_thread, start_destroy
from aiordma._native import HandleBase
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import AddressHandle, AddressVector, ProtectionDomain

__all__ = ("AddressHandles", "PeerHandle")

logger: logging.Logger = logging.getLogger("aiordma")


class PeerHandle(HandleBase):
    """An address handle, and the number of its holders (Holdable)."""

    __slots__ = ("_handles", "handle")

    def __init__(self, handles: "AddressHandles", handle: AddressHandle) -> None:
        self.handle: AddressHandle = handle
        self._handles = handles

    def hold(self) -> None:
        """Add a holder: a request that is posted with the handle, or will be."""
        self._holders += 1

    def release(self) -> None:
        """Remove a holder."""
        self._holders -= 1
        self._destroy_if_unused()

    _hold, _release = hold, release  # Holdable

    def retire(self) -> None:
        """Destroy the handle as soon as it has no holders. Idempotent."""
        if not self._retired:
            self.handle._in_use = self._holders > 0  # its domain must not destroy it
            self._retired = True
            self._destroy_if_unused()

    def _destroy_if_unused(self) -> None:
        if self._retired and not self._holders:
            self.handle._in_use = False
            self._handles.destroy(self.handle)


class AddressHandles:
    """The handles of an endpoint, by address vector. The least recently used is dropped first.

    Creating a handle may query the network for the peer's link address, and destroying one waits
    for the device. So both run in worker threads, and one destroying call runs at a time. `ended`
    is set when all handles are destroyed after `close`. Until then, the domain stays open. (If the
    driver refuses to destroy the queue pair, `ended` does not wait for the handles of its requests.
    They are destroyed with what the requests keep, or by the domain.)

    Args:
        loop, reactor, domain: those of the endpoint.
        most: the largest number of handles.
        state: the domain's state; None: the domain is the loop's own, which the reactor closes.
        remains: gets the handles that the driver refuses to destroy.
    """

    def __init__(
        self,
        loop: EventLoop,
        reactor: Reactor,
        domain: ProtectionDomain,
        most: int,
        state: DomainState | None = None,
        remains: Remains | None = None,
    ) -> None:
        self._loop = loop
        self._remains = Remains() if remains is None else remains
        self._reactor = reactor
        self._domain = domain
        self._most = most
        self._domain_state = state
        self._kept: OrderedDict[AddressVector, PeerHandle] = OrderedDict()
        self._alive = self._making = 0
        self._unwanted: list[AddressHandle] = []
        self._destroying = False
        self._closed = self._are_kept = self._has_left = False
        self.ended: Once = Once(loop)

    def __len__(self) -> int:
        """The number of existing handles, including dropped ones whose requests are in flight."""
        return self._alive

    def get(self, vector: AddressVector) -> PeerHandle:
        """Return the handle of an address vector. If it is new, create it on this thread. The
        caller then holds the handle.

        Raises:
            ClosedError: the handles were closed.
            VerbsCallError: there is no path to the address, or the device has no handle left.
        """
        known = self._find(vector)
        if known is None:
            self._require_open()
            known = self._keep(vector, AddressHandle(self._domain, vector))
        known.hold()
        return known

    async def obtain(self, vector: AddressVector) -> PeerHandle:
        """Return the handle as `get` does, but create it in a worker thread.

        Cancellation: the handle has no new holder.
        """
        known = self._find(vector)
        if known is None:
            known = await self._make(vector)
        known.hold()
        return known

    async def _make(self, vector: AddressVector) -> PeerHandle:
        self._require_open()
        # If two tasks create the same handle concurrently, the later one is kept.
        keep = partial(self._keep, vector)
        make = partial(AddressHandle, self._domain, vector)
        self._alive += 1
        self._making += 1
        with ExitStack() as stack:
            stack.callback(self._made)
            stack.enter_context(self._reactor.retained())
            known = keep(
                await in_thread(self._loop, make, PEERS, on_cancelled=keep, on_lost=stack.close)
            )
        self._require_open()
        return known

    def _made(self) -> None:
        self._making -= 1
        self._gone(1)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the address handles were closed with their endpoint")

    def _find(self, vector: AddressVector) -> PeerHandle | None:
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
        # The new handle has no holder yet. It is the last one to be dropped, so it is dropped only
        # after `close`.
        while len(self._kept) > self._most or (self._closed and self._kept):
            self._kept.popitem(last=False)[1].retire()
        return new

    def destroy(self, handle: AddressHandle) -> None:
        """Destroy a handle in the background. PeerHandle calls this."""
        if self._are_kept:
            self._destroy_kept(handle)
            return
        self._unwanted.append(handle)
        try:
            self._destroy_unwanted()
        except MemoryError:
            end(self._loop, self._destroy_unwanted)

    def _destroy_kept(self, handle: AddressHandle) -> None:
        """Destroy a handle at once, in any thread: nothing keeps the reactor open any more. If that
        fails, the end of the domain repeats it."""
        self._alive -= 1
        try:
            handle.close()
        except Exception as error:
            with suppress(MemoryError):
                self._remains.add(objects=[handle])
                logger.error("destroying an address handle: %s", error, exc_info=error)

    def _destroy_unwanted(self) -> None:
        if self._destroying or not self._unwanted:
            return
        unwanted, others = self._unwanted, list[AddressHandle]()

        def close() -> None:
            with ExitStack() as stack:
                for handle in unwanted:
                    stack.callback(handle.close)

        def closed(error: BaseException | None) -> None:
            if error is not None:
                with suppress(MemoryError):
                    self._remains.add(objects=[each for each in unwanted if not each._is_gone])
                    logger.error("destroying address handles: %s", error, exc_info=error)
            self._destroying = False
            ending.run()

        gone = partial(self._gone, len(unwanted))
        release = partial(self._reactor.release, gone)
        ending = Ending(self._loop, self._destroy_unwanted, release)
        undoing = Ending(self._loop, self._reactor.release)
        self._reactor.retain()
        self._destroying, self._unwanted = True, others
        try:
            start_destroy(self._loop, close, closed)
        except MemoryError:
            unwanted += self._unwanted
            self._destroying, self._unwanted = False, unwanted
            undoing.run()
            raise

    def _gone(self, count: int) -> None:
        self._alive -= count
        try:
            self._leave_if_last()
        except MemoryError:
            end(self._loop, self._leave_if_last)

    def _leave_if_last(self) -> None:
        waits = self._alive > 0
        if self._are_kept:
            waits = self._destroying or bool(self._unwanted or self._making)
        if self._closed and not waits and not self._has_left:
            release = partial(self._reactor.release, self.ended.set)
            ending = Ending(self._loop, self._leave_domain, release)
            self._has_left = True
            ending.run()

    def _leave_domain(self) -> None:
        # Before the reactor: the domain closes with its last user, and needs the reactor for that.
        if self._domain_state is not None:
            self._domain_state.leave(self)

    def close(self, *, are_kept: bool = False) -> None:
        """Destroy all handles in the background, each when its last request has completed.
        Idempotent. The endpoint still uses the domain and the reactor.

        Args:
            are_kept: requests keep their handles, because the driver refuses to destroy their queue
                pair. Do not wait for these handles.
        """
        self._are_kept = self._are_kept or are_kept
        # All of it, also if it was called before: that call may have found no memory.
        if not self._closed:
            if self._domain_state is not None:
                self._domain_state.join(self, "address handles", lambda: True)
            self._reactor.retain()
            self._closed = True
        while self._kept:
            last = next(reversed(self._kept))
            self._kept[last].retire()
            del self._kept[last]
        self._leave_if_last()
