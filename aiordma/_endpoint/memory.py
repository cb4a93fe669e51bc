"""The memory of an endpoint, or of a shared receive queue."""

from collections.abc import Callable
from functools import partial

from aiordma._base.call_all import call_all
from aiordma._endpoint.domain_state import DomainState
from aiordma._requests.pool import BufferPool
from aiordma._runtime.hub import DeviceHub
from aiordma.verbs import ProtectionDomain
from aiordma.verbs.memory import MemoryRegion, retire_all


class Memory:
    """The protection domain of an object's requests, the pool of blocks in it, and the regions that
    close with the object.

    Args:
        hub: the device.
        state: a protection domain of its own, to join; None: the hub's.
        user: the object.
        kind: its name in messages: "connection".
        is_closing: as of `DomainState.join`.
    """

    __slots__ = ("_user", "domain", "pool", "regions", "state")

    def __init__(
        self,
        hub: DeviceHub,
        state: DomainState | None,
        user: object,
        kind: str,
        is_closing: Callable[[], bool],
    ) -> None:
        self._user = user
        self.state: DomainState | None = state
        self.domain: ProtectionDomain = hub.domain
        self.pool: BufferPool = hub.pool
        self.regions: dict[int, MemoryRegion] = {}
        if state is not None:
            self.domain, self.pool = state.raw, state.pool
            state.join(user, kind, is_closing)

    def adopt(self, region: MemoryRegion) -> None:
        """Close the region with the object, if it is not closed before."""
        self.regions[id(region)] = region
        region._on_close = lambda: self.regions.pop(id(region), None)

    def release(self, hub: DeviceHub) -> Callable[[], object] | None:
        """Return what destroys the regions, a domain that only the object has, and the device's
        unused completion queues; None: there are none. Any thread may call the result."""
        steps: list[Callable[[], object]] = []
        unused, state = hub.take_unused(), self.state
        if self.regions:
            steps.append(partial(retire_all, list(self.regions.values())))
        if state is not None and state.is_private and state.members == 1:
            steps.append(state.take_apart())
        if unused is not None:
            steps.append(unused)
        return partial(call_all, steps) if steps else None

    def leave(self) -> None:
        """Leave the domain, once the object is closed."""
        if self.state is not None:
            self.state.leave(self._user)

    def keep_for(self, error: Exception | None) -> None:
        """Leave the domain, which is never destroyed: the object was not, for this reason."""
        if self.state is not None and error is not None:
            self.state.keep_for(self._user, error)
