"""Registering memory with a connection: for its requests, and for its peer."""

from aiordma.endpoint import Endpoint
from aiordma.enums import Access
from aiordma.staging import Buffer
from aiordma.threads import in_thread
from aiordma.verbs import MemoryRegion

__all__ = ("Registration",)


class Registration:
    """What has an endpoint, and so a protection domain to register memory in."""

    _endpoint: Endpoint

    def register(self, buffer: Buffer, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for this connection's requests, and with remote access for its peer.

        It stays registered until `region.close()` or until the connection closes. Pinning takes
        time by the page: `register_in_thread` does not hold up the loop over large ones.

        Every connection of this event loop on the same device shares one protection domain, so
        whoever knows the rkey and has one of these connections can use it.

        Args:
            buffer: bytearray, memoryview, mmap, array, numpy array, bytes: contiguous, not empty.
            access: what is permitted; None is LOCAL_WRITE for a writable buffer. Remote access is
                given only if named.

        Raises:
            TypeError: no buffer, or a read-only one where the access means writing.
            ValueError: empty or not contiguous.
            VerbsCallError: the driver refused; the message names the limit.
        """
        self._endpoint.require_usable()
        region = MemoryRegion(self._endpoint.hub.domain, buffer, access)
        self._endpoint.adopt(region)
        return region

    async def register_in_thread(
        self, buffer: Buffer, access: Access | None = None
    ) -> MemoryRegion:
        """`register`, in a worker thread. Cancelled, nothing stays registered."""
        endpoint = self._endpoint
        endpoint.require_usable()
        made: list[MemoryRegion] = []
        endpoint.reactor.retain()  # what the thread registers with must not be closed under it
        try:
            await in_thread(
                endpoint.loop,
                lambda: made.append(MemoryRegion(endpoint.hub.domain, buffer, access)),
            )
            endpoint.require_usable()
        except BaseException:
            for region in made:
                region.close()
            raise
        finally:
            endpoint.reactor.release()
        endpoint.adopt(made[0])
        return made[0]
