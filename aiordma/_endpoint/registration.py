"""Registers memory with an endpoint, for its requests and for its peer."""

from aiordma._base.enums import Access
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import register_memory
from aiordma.verbs import DmabufRegion, MemoryRegion, RegistrableMemory
from aiordma.verbs.dmabuf import checked_part

__all__ = ("register", "register_dmabuf", "register_in_thread")


def register(endpoint: Endpoint, buffer: RegistrableMemory, access: Access | None) -> MemoryRegion:
    """Register a buffer until the endpoint's end. See `Connection.register`."""
    endpoint.require_usable()
    region = register_memory(endpoint, buffer, access)
    endpoint.adopt(region)
    return region


def register_dmabuf(
    endpoint: Endpoint, fd: int, length: int, offset: int, access: Access, iova: int | None
) -> DmabufRegion:
    """Register a dma-buf until the endpoint's end. See `Connection.register_dmabuf`."""
    endpoint.require_usable()
    fd, length, offset, access, iova = checked_part(
        fd, length, offset, access, iova, "register_dmabuf"
    )
    region = endpoint.pool.registrations._register(
        lambda: DmabufRegion(endpoint.domain, fd, length, offset=offset, access=access, iova=iova)
    )
    endpoint.adopt(region)
    return region


async def register_in_thread(
    endpoint: Endpoint, buffer: RegistrableMemory, access: Access | None
) -> MemoryRegion:
    """Register a buffer in a worker thread. After a cancellation, nothing stays registered."""
    endpoint.require_usable()
    region = await endpoint.make_in_thread(
        lambda: register_memory(endpoint, buffer, access, "register_in_thread"), MemoryRegion.close
    )
    endpoint.adopt(region)
    return region
