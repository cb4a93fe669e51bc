"""Domains: memory that outlives connections, and connections whose memory is kept apart.

`open_domain` (open_domain.py) makes a Domain. This module also checks the argument `domain=` of
the functions that open connections, and finds the domain of each connection.
"""

from typing import Literal, TypeAlias

from anyio.abc import AsyncResource

from aiordma._base.arguments import wrong_type
from aiordma._base.enums import Access
from aiordma._base.process import never_pickled
from aiordma._base.provider import Requirement, required
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._endpoint.domain_state import DomainState, make_private
from aiordma._loop.threads import CREATES, Lane
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import Context, DmabufRegion, ProtectionDomain, RegistrableMemory
from aiordma.verbs.dmabuf import checked_part
from aiordma.verbs.gpu_memory import register_anywhere
from aiordma.verbs.memory import MemoryRegion


class Domain(AsyncResource):
    """A protection domain (`ibv_pd`), for the connections that are opened with `domain=`.

    Made by `open_domain`, for one device and event loop. Regions that are registered with the
    domain live as long as the domain, and every connection of the domain can use them. So a server
    registers a large buffer once, and lends it to all of its clients:

        async with aiordma.open_domain("192.0.2.1") as domain:
            region = domain.register(array, Access.REMOTE_READ)
            async with aiordma.listen("192.0.2.1", 7471, domain=domain) as listener:
                await listener.serve(handler)  # sends region.remote().pack() to each client

    The device refuses a peer of another domain, even if the peer knows the rkey. A region of
    another domain raises ValueError in the connection's methods.
    """

    def __init__(self, state: DomainState) -> None:
        self._state = state

    __reduce__ = never_pickled

    def __repr__(self) -> str:
        return repr(self._state)

    @property
    def device_name(self) -> str:
        """The name of the RDMA device that the domain belongs to."""
        return self._state.device_name

    @property
    def context(self) -> Context:
        """The opened device (`ibv_context`), as `Connection.context`: do not close it."""
        return self._state.hub.context

    @property
    def protection_domain(self) -> ProtectionDomain:
        """The object of the synchronous layer, for `aiordma.verbs`. Do not close it. Objects that
        you create with it are closed with the domain."""
        return self._state.raw

    @property
    def members(self) -> int:
        """The number of objects that use the domain: connections, listeners, datagram sockets and
        their address handles until these are destroyed, shared receive queues, and registrations
        and deregistrations that are under way."""
        return self._state.members

    def register(self, buffer: RegistrableMemory, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for every connection of the domain and, with remote access, for their
        peers. It stays registered until `region.close()` or until the domain closes.

        Args:
            buffer, access: as of `Connection.register`.

        Raises:
            TypeError: the object has no buffer, and describes no plain memory either; or the buffer
                is read-only and the access permits writing.
            ValueError: the buffer is empty or not contiguous.
            NotSupportedError: the device does not support a requested access (ON_DEMAND, MW_BIND);
                or the memory is a GPU's, and the device, the library or the GPU's driver cannot
                register it.
            VerbsCallError: the driver refused; the message names the limit.
            ClosedError, DeviceRemovedError: the domain was closed, or its device removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_reg_mr.
        """
        return self._state.register(lambda domain: register_anywhere(domain, buffer, access))

    async def register_in_thread(
        self, buffer: RegistrableMemory, access: Access | None = None
    ) -> MemoryRegion:
        """Register a buffer as `register` does, in a worker thread, so that the event loop
        continues while a large one is pinned.

        Args:
            buffer, access: as of `Connection.register`.

        Raises: as `Domain.register`.

        Cancellation: the call waits for the driver, and then deregisters the buffer.
        """
        return await self._state.register_in_thread(
            lambda domain: register_anywhere(domain, buffer, access)
        )

    def register_dmabuf(
        self,
        fd: int,
        length: int,
        *,
        offset: int = 0,
        access: Access = Access.LOCAL_WRITE,
        iova: int | None = None,
    ) -> DmabufRegion:
        """Register memory of another device by its dma-buf, as `register` does a buffer.

        Args:
            fd, length, offset, access, iova: as of `Connection.register_dmabuf`.

        Raises:
            as `Connection.register_dmabuf`.
            ClosedError, DeviceRemovedError: the domain was closed, or its device removed.

        See: man ibv_reg_dmabuf_mr.
        """
        fd, length, offset, access, iova = checked_part(
            fd, length, offset, access, iova, "register_dmabuf"
        )
        return self._state.register(
            lambda domain: DmabufRegion(domain, fd, length, offset=offset, access=access, iova=iova)
        )

    async def aclose(self) -> None:
        """Deregister the domain's memory and free the domain, and wait for it. Idempotent.

        Close everything that uses the domain first.

        Raises:
            BusyError: connections, listeners, datagram sockets, shared receive queues or
                registrations still use the domain; the message counts them. Nothing has changed.
            EventLoopError: called outside of its event loop; the message says what happens to the
                domain.
            VerbsCallError: the driver refused to destroy the domain, or an object that was created
                in it. The domain stays in memory for the life of the process. A second call raises
                the same error.

        Cancellation: the domain still closes, and the call returns once it is closed.

        See: man ibv_dealloc_pd.
        """
        await self._state.aclose()


DomainArgument: TypeAlias = Domain | Literal["each"] | None
"""The argument `domain=`: a domain; "each", for a domain of its own; or None, for the domain that
everything on the event loop and device shares."""


class DomainChoice:
    """The argument `domain=` of a call, checked.

    Args:
        domain: the argument.
        call: the function, for messages.
        shared: the shared receive queue that the call was given; None: the call has no such queue.
            Connections use the domain of their shared receive queue.
        pooled: the call makes a shared receive queue for its connections.

    Attributes:
        state: the domain, if one is given.

    Raises:
        TypeError: `domain` is of the wrong type.
        ValueError: it is another string, or not the domain of the shared receive queue.
    """

    def __init__(
        self,
        domain: DomainArgument,
        call: str,
        shared: SharedReceiveEndpoint | None = None,
        *,
        pooled: bool = False,
    ) -> None:
        expected = 'a Domain of open_domain(), "each", or None'
        if not isinstance(domain, Domain | str | None):
            raise wrong_type(domain, "domain", expected, call)
        self._call = call
        self._each = isinstance(domain, str)
        if self._each and domain != "each":
            raise ValueError(f"{call}(): domain={domain!r}: expected {expected}")
        if self._each and (pooled or shared is not None):
            raise ValueError(
                f'{call}(): domain="each" gives every connection a protection domain of its own, '
                "and a shared receive queue belongs to one domain: give one of the two"
            )
        self.state: DomainState | None = domain._state if isinstance(domain, Domain) else None
        if shared is not None:
            if domain is not None and self.state is not shared.memory.state:
                raise ValueError(
                    f"{call}(): domain={domain!r} is not the domain of shared_receive: open the "
                    "queue with open_shared_receive(..., domain=domain)"
                )
            self.state = shared.memory.state

    def requirement(self, device: str) -> Requirement:
        """Return what the device must be: with a domain, that of the domain, which must be usable.

        Raises:
            as `DomainState.require_usable`.
            TypeError, ValueError: `device` is invalid, or does not permit the domain's device.
        """
        requirement = required(device, self._call)
        if self.state is None:
            return requirement
        context = self.state.hub.context
        name = context.device_name
        if device != "auto" and not requirement.permits(name, context.kind):
            raise ValueError(f"{self._call}(): device={device!r}: the domain is on {name}")
        self.state.require_usable()
        return Requirement(name)

    async def on(
        self, reactor: Reactor, hub: DeviceHub, lane: Lane = CREATES
    ) -> DomainState | None:
        """Return the domain for an object on this hub; None: the hub's own. The object must join
        the domain without waiting for anything else first. A new domain is allocated in the lane.

        Raises:
            as `DomainState.require_usable`.
            ValueError: the domain is on another device.
            VerbsCallError: the driver refused another protection domain.
        """
        if self._each:
            return await make_private(reactor, hub, lane)
        state = self.state
        if state is not None:
            state.require_usable()
            if state.hub is not hub:
                raise ValueError(
                    f"{self._call}(): the domain is on {state.device_name}, and the connection on "
                    f"{hub.context.device_name}"
                )
        return state
