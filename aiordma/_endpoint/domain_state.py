"""A protection domain of its own: the memory that is registered in it, and the objects that use it.

A queue pair accesses only memory of its own protection domain, and so does its peer. The hub has
one domain that everything on the loop and device shares. `open_domain` and `domain="each"` make
further ones.

A domain is closed when nothing uses it any more: its regions first, then the domain itself.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

from aiordma._base.call_all import call_all
from aiordma._base.enums import CmEventType
from aiordma._base.errors import BusyError, ClosedError, DeviceRemovedError, detached
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import BUILT_IN
from aiordma._loop.event_loop import EventLoop, require_here
from aiordma._loop.threads import CREATES, Lane, in_thread, start_destroy
from aiordma._requests.pool import SLAB, BufferPool
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.teardown import Owner, Phase, Teardown
from aiordma.verbs import ProtectionDomain
from aiordma.verbs.identifier import Event, Identifier
from aiordma.verbs.memory import MemoryRegion, retire_all, retire_or_log

Region = TypeVar("Region", bound=MemoryRegion)

PRIVATE_SLAB = 1 << 16
"""Bytes of a slab of a connection's own pool: a connection uses few blocks."""


class DomainState(Owner):
    """See the module. `Domain` is its public interface.

    Without an identifier, it is private to its first user, and goes with the last one: calls for
    that user may be under way.
    """

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        raw: ProtectionDomain,
        identifier: Identifier | None = None,
    ) -> None:
        self.reactor = reactor
        self.hub = hub
        self.loop: EventLoop = hub.loop
        self.raw = raw
        self.pool: BufferPool = BufferPool(
            raw,
            is_pinned=hub.context.device_name not in BUILT_IN,
            slab=PRIVATE_SLAB if identifier is None else SLAB,
        )
        hub.counters.add_cache(self.pool.registrations)
        self.regions: dict[int, MemoryRegion] = {}
        self._process = here.pid
        self._identifier = identifier
        self._users: dict[object, tuple[str, Callable[[], bool]]] = {}
        self._apart: Callable[[], None] | None = None
        self._teardown: Teardown | None = None
        if identifier is not None:
            self._teardown = Teardown(reactor, self, hub)
            reactor.subscribe(identifier, self._handle)

    def __repr__(self) -> str:
        is_closing = self._teardown is not None and self._teardown.is_closing
        state = "closed" if is_closing else f"{len(self.regions)} regions"
        return f"<Domain on {self.device_name}: {state}>"

    @property
    def device_name(self) -> str:
        """The name of the RDMA device that the domain belongs to."""
        return self.hub.context.device_name

    @property
    def members(self) -> int:
        """The number of connections and other objects that use the domain."""
        return len(self._users)

    @property
    def is_private(self) -> bool:
        """Whether it goes with its last user."""
        return self._teardown is None

    @property
    def _end(self) -> Teardown:
        assert self._teardown is not None  # the program sees no private one
        return self._teardown

    def require_usable(self) -> None:
        """Do nothing while objects may be created in the domain.

        Raises:
            ClosedError: the domain is closed.
            DeviceRemovedError: its device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.
        """
        require_same_process(self._process, self)
        if self._end.cause is not None:
            raise detached(self._end.cause)
        require_here(self.loop, self)

    def _handle(self, event: Event) -> None:
        if event.type is CmEventType.DEVICE_REMOVAL and self._end.cause is None:
            self._end.cause = DeviceRemovedError(f"{self.device_name} was removed")

    # -- users ----------------------------------------------------------------------------------

    def join(self, user: object, kind: str, is_closing: Callable[[], bool]) -> None:
        """Count an object that uses the domain.

        Args:
            user: the object, which calls `leave` at its end.
            kind: its name in messages: "connection".
            is_closing: whether the object is closed already, and leaves without further ado.
        """
        self._users[user] = kind, is_closing

    def leave(self, user: object) -> None:
        """Remove an object whose queue pair and memory are destroyed."""
        self._users.pop(user, None)
        if self._teardown is not None:
            if self._teardown.phase is Phase.FLUSHING:
                self._teardown.step(self._flush)
        elif not self._users and self._apart is None:
            self.reactor.dispose(self, self.take_apart())

    def keep_for(self, user: object, error: Exception) -> None:
        """Leak at the end: a user has leaked, for this error. A private domain just stays."""
        if self._teardown is not None:
            self._teardown.keep_for(error)
            self.leave(user)

    # -- memory ---------------------------------------------------------------------------------

    def register(self, make: Callable[[ProtectionDomain], Region]) -> Region:
        """Register memory until the domain's end. See `Domain.register`."""
        self.require_usable()
        region = self.pool.registrations._register(lambda: make(self.raw))
        self._adopt(region)
        return region

    def _adopt(self, region: MemoryRegion) -> None:
        self.regions[id(region)] = region
        region._on_close = lambda: self.regions.pop(id(region), None)

    async def register_in_thread(self, make: Callable[[ProtectionDomain], Region]) -> Region:
        """Register memory until the domain's end, in a worker thread."""
        self.require_usable()
        # After the loop's end, this task does not continue: it must not make `aclose` fail.
        with kept_open(self, lambda: self.loop.has_ended) as leave:
            region = await in_thread(
                self.loop,
                lambda: self.pool.registrations._register(lambda: make(self.raw)),
                on_cancelled=MemoryRegion.close,
                on_lost=leave,
            )
            try:
                await checkpoint_if_cancelled()  # a cancellation that the call outwaited
            except BaseException:
                retire_or_log(region)
                raise
            self._adopt(region)
        return region

    # -- the end (Owner) ------------------------------------------------------------------------

    def _closing(self) -> Exception:
        return ClosedError("this domain is closed")

    def _flush(self) -> None:
        """Wait until its users have left: no further one can join."""
        if not self._users:
            assert self._identifier is not None
            self.reactor.unsubscribe(self._identifier)
            self.take_apart()
            self._end.destroy()

    def _destroy(self) -> None:
        assert self._identifier is not None
        assert self._apart is not None
        call_all((self._apart, self._identifier.close))

    def take_apart(self) -> Callable[[], None]:
        """Forget the memory. Return a function that deregisters it and frees the domain, in any
        thread."""
        regions = [*self.regions.values(), *self.pool.detach()]
        self.hub.counters.remove_cache(self.pool.registrations)
        self._apart = destroy = partial(call_all, (partial(retire_all, regions), self.raw.close))
        return destroy

    def _destroyed(self) -> None:
        self.regions.clear()

    def close_when_unused(self) -> None:
        """Close the domain once its last user has left. No further one can join."""
        self._end.close()

    async def aclose(self) -> None:
        """Close the domain, and wait for it. Idempotent. See `Domain.aclose`."""
        end = self._end
        if end.is_inherited:
            return
        using = Counter(kind for kind, is_closing in self._users.values() if not is_closing())
        if using and not end.is_closing:
            users = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in using.items())
            raise BusyError(f"{self!r} is in use ({users}): close its users first")
        await end.aclose()


async def make_raw(reactor: Reactor, hub: DeviceHub, lane: Lane = CREATES) -> ProtectionDomain:
    """Allocate a protection domain of the hub's device, in a worker thread where that blocks.

    Raises:
        VerbsCallError: the driver refused; the message names the limit.
    """
    return await in_thread(
        hub.loop,
        lambda: ProtectionDomain(hub.context),
        lane,
        blocks=reactor.blocks,
        on_cancelled=ProtectionDomain.close,
    )


async def make_private(reactor: Reactor, hub: DeviceHub, lane: Lane = CREATES) -> DomainState:
    """Allocate a domain for one user, which must join it at once.

    Raises:
        VerbsCallError: the driver refused; the message names the limit.
    """
    return DomainState(reactor, hub, await make_raw(reactor, hub, lane))


@contextmanager
def kept_open(
    domain: DomainState | None, is_closing: Callable[[], bool] = lambda: True
) -> Iterator[Callable[[], None]]:
    """Keep a domain open during a call in a worker thread that creates an object in it, and until
    that object is closed or has an owner, even if the connection is closed meanwhile. (`domain` is
    None for the loop's own one, which calls under way keep open.)

    `is_closing` is as of `DomainState.join`.

    Yield a function that ends this before the block's end. If the loop ends, the block's task does
    not continue: so pass the function to `in_thread` as `on_lost`.
    """
    user = object()

    def leave() -> None:
        if domain is not None:
            domain.leave(user)

    if domain is not None:
        domain.join(user, "registration", is_closing)
    try:
        yield leave
    finally:
        leave()


def start_deregistering(
    loop: EventLoop,
    domain: DomainState | None,
    function: Callable[[], object],
    then: Callable[[BaseException | None], object] = lambda _error: None,
    *,
    blocks: bool = True,
) -> None:
    """Run a function that deregisters memory of a domain as `start_destroy` does, and then `then`,
    with the function's error. Until then the domain stays open: a device refuses to
    free a domain that has regions. (`domain` is None for the loop's own one, which calls under way
    keep open.)"""
    user = object()

    def returned(error: BaseException | None) -> None:
        try:
            then(error)
        finally:
            if domain is not None:
                domain.leave(user)

    if domain is not None:
        domain.join(user, "deregistration", lambda: True)
    start_destroy(loop, function, returned, blocks=blocks)


def wrong_domain(region: MemoryRegion, domain: ProtectionDomain) -> ValueError:
    """Return the error for memory that a queue pair of `domain` cannot use."""
    if region.domain.context is domain.context:
        return ValueError(
            f"{region!r} is registered in another protection domain than that of this queue pair: "
            "register it with this connection, or with the Domain that was given as domain= when "
            "the connection was opened"
        )
    return ValueError(
        "this memory is registered with another device or event loop: register it with this "
        "connection"
    )
