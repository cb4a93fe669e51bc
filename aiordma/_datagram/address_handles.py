"""The address handles of one endpoint: created at the first use, and kept up to a maximum number.

A handle must exist until every request that was posted with it has completed. So each handle counts
the requests that hold it. A handle that is dropped is destroyed only when the last of these
requests has completed.
"""

import logging
from collections import OrderedDict
from functools import partial

from aiordma._base.call_all import call_all
from aiordma._base.errors import ClosedError
from aiordma._endpoint.domain_state import DomainState, kept_open
from aiordma._loop.event_loop import EventLoop
from aiordma._loop.threads import PEERS, in_thread, start_destroy
from aiordma._native import HandleBase
from aiordma.verbs import AddressHandle, AddressVector, ProtectionDomain

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
    for the device. So where the device blocks, both run in worker threads, and one destroying call
    runs at a time. The domain stays open until then.

    Args:
        loop, domain: those of the endpoint.
        most: the largest number of handles.
        state: the domain's state; None: the domain is the loop's own.
        blocks: whether creating and destroying calls block.
    """

    def __init__(
        self,
        loop: EventLoop,
        domain: ProtectionDomain,
        most: int,
        state: DomainState | None = None,
        *,
        blocks: bool = True,
    ) -> None:
        self._loop = loop
        self._domain = domain
        self._most = most
        self._domain_state = state
        self._blocks = blocks
        self._kept: OrderedDict[AddressVector, PeerHandle] = OrderedDict()
        self._alive = 0
        self._unwanted: list[AddressHandle] = []
        self._destroying = self._closed = False

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
        make = partial(AddressHandle, self._domain, vector)
        # If two tasks create the same handle concurrently, the later one is kept.
        keep = partial(self._keep, vector)
        with kept_open(self._domain_state) as leave:
            made = await in_thread(
                self._loop, make, PEERS, blocks=self._blocks, on_cancelled=keep, on_lost=leave
            )
            known = keep(made)
        self._require_open()
        return known

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
        self._unwanted.append(handle)
        if not self._destroying:
            self._destroy_unwanted()

    def _destroy_unwanted(self) -> None:
        unwanted, self._unwanted = self._unwanted, []
        if not unwanted:
            return

        def closed(error: BaseException | None) -> None:
            if error is not None:
                logger.error("destroying address handles: %s", error)
            self._alive -= len(unwanted)
            self._destroying = False
            self._destroy_unwanted()

        self._destroying = True
        start_destroy(self._loop, partial(close_all, unwanted), closed, blocks=self._blocks)

    def detach(self) -> list[AddressHandle]:
        """Return the handles that exist, for the caller to destroy: no request uses one any more.
        No further one is kept."""
        self._closed = True
        handles = [each.handle for each in self._kept.values()]
        self._kept.clear()
        self._alive -= len(handles)
        return handles


def close_all(handles: list[AddressHandle]) -> None:
    """Destroy handles, even if the driver refuses one."""
    call_all([handle.close for handle in reversed(handles)])
