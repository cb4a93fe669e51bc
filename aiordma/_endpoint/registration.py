"""Registers memory with an endpoint, for its requests and for its peer."""

from aiordma._base.arguments import Buffer
from aiordma._base.enums import Access
from aiordma._base.interrupts import deferring_steps
from aiordma._endpoint.endpoint import Endpoint
from aiordma.verbs import MemoryRegion

__all__ = ("register", "register_in_thread")


def register(endpoint: Endpoint, buffer: Buffer, access: Access | None) -> MemoryRegion:
    """Register a buffer until the endpoint's end. See `Connection.register`."""
    endpoint.require_usable()
    region = MemoryRegion(endpoint.hub.domain, buffer, access)
    endpoint.adopt(region)
    return region


@deferring_steps
async def register_in_thread(
    endpoint: Endpoint, buffer: Buffer, access: Access | None
) -> MemoryRegion:
    """Register a buffer in a worker thread. After a cancellation, nothing stays registered."""
    endpoint.require_usable()
    region = await endpoint.make_in_thread(
        lambda: MemoryRegion(endpoint.hub.domain, buffer, access), MemoryRegion.close
    )
    endpoint.adopt(region)
    return region
