"""The memory of an endpoint, or of a shared receive queue."""

from collections.abc import Callable

from aiordma._endpoint.domain_state import DomainState
from aiordma._requests.pool import BufferPool
from aiordma._runtime.hub import DeviceHub
from aiordma.verbs import ProtectionDomain
from aiordma.verbs.memory import MemoryRegion


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

    __slots__ = ("domain", "pool", "regions", "state")

    def __init__(
        self,
        hub: DeviceHub,
        state: DomainState | None,
        user: object,
        kind: str,
        is_closing: Callable[[], bool],
    ) -> None:
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
