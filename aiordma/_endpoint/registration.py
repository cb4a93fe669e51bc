"""Registers memory with an endpoint, for its requests and for its peer, and creates other objects
of its protection domain in threads."""

from collections.abc import Callable
from typing import TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

from aiordma._base.enums import Access
from aiordma._endpoint.domain_state import kept_open
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import register_memory
from aiordma._loop.threads import close_unwanted, in_thread
from aiordma.verbs import DmabufRegion, RegistrableMemory
from aiordma.verbs.dmabuf import checked_part
from aiordma.verbs.memory import MemoryRegion

Made = TypeVar("Made")


def register(endpoint: Endpoint, buffer: RegistrableMemory, access: Access | None) -> MemoryRegion:
    """Register a buffer until the endpoint's end. See `Connection.register`."""
    endpoint.require_usable()
    region = register_memory(endpoint, buffer, access)
    endpoint.memory.adopt(region)
    return region


def register_dmabuf(
    endpoint: Endpoint, fd: int, length: int, offset: int, access: Access, iova: int | None
) -> DmabufRegion:
    """Register a dma-buf until the endpoint's end. See `Connection.register_dmabuf`."""
    endpoint.require_usable()
    fd, length, offset, access, iova = checked_part(
        fd, length, offset, access, iova, "register_dmabuf"
    )
    region = endpoint.memory.pool.registrations._register(
        lambda: DmabufRegion(
            endpoint.memory.domain, fd, length, offset=offset, access=access, iova=iova
        )
    )
    endpoint.memory.adopt(region)
    return region


async def register_in_thread(
    endpoint: Endpoint,
    buffer: RegistrableMemory,
    access: Access | None,
    call: str = "register_in_thread",
) -> MemoryRegion:
    """Register a buffer in a worker thread. After a cancellation, nothing stays registered."""
    endpoint.require_usable()
    region = await make_in_thread(
        endpoint,
        lambda: register_memory(endpoint, buffer, access, call),
        MemoryRegion.close,
    )
    endpoint.memory.adopt(region)
    return region


async def make_in_thread(
    endpoint: Endpoint,
    make: Callable[[], Made],
    close: Callable[[Made], object],
    on_lost: Callable[[], object] = lambda: None,
) -> Made:
    """Create an object of the endpoint's protection domain in a worker thread. The domain stays
    open during the call. If the caller is cancelled, or the endpoint or the loop ends during
    the call, the object is closed. At the loop's end, `on_lost` is then called, because the
    caller does not continue.

    Raises: as `Endpoint.require_usable`, and the errors of `make`.
    """
    # In another event loop, neither the call's end nor a cancellation would end the wait.
    endpoint.require_usable()
    with kept_open(endpoint.memory.state) as leave:

        def lost() -> None:
            try:
                on_lost()
            finally:
                leave()

        made = await in_thread(endpoint.loop, make, on_cancelled=close, on_lost=lost)
        try:
            # The call outwaits a cancellation, which then does not return the object to anyone.
            await checkpoint_if_cancelled()
            endpoint.require_usable()
        except BaseException:
            close_unwanted(close, made)
            raise
    return made
