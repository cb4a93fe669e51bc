"""A protection domain of its own: the memory that is registered in it, and the objects that use it.

A queue pair accesses only memory of its own protection domain, and so does its peer. The hub has
one domain that everything on the loop and device shares. `open_domain` and `domain="each"` make
further ones.

A domain is closed when nothing uses it any more: its regions first, then the domain itself.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

from aiordma._base.enums import CmEventType
from aiordma._base.errors import BusyError, ClosedError, DeviceRemovedError, detached
from aiordma._base.origin import with_origin
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import SOFTWARE
from aiordma._endpoint.lifecycle import Lifecycle, Phase
from aiordma._loop.ending import Ending, end
from aiordma._loop.event_loop import EventLoop, require_here
from aiordma._loop.threads import CREATES, Lane, in_thread, outwait, start_destroy
from aiordma._requests.pool import SLAB, BufferPool
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import AtLoopEnd, Reactor
from aiordma.verbs import MemoryRegion, ProtectionDomain
from aiordma.verbs.identifier import Event, Identifier
from aiordma.verbs.memory import retire_all, retire_or_log

__all__ = (
    "DomainState",
    "kept_open",
    "make_private",
    "make_raw",
    "start_deregistering",
    "wrong_domain",
)

Region = TypeVar("Region", bound=MemoryRegion)

PRIVATE_SLAB = 1 << 16
"""Bytes of a slab of a connection's own pool: a connection uses few blocks."""


class DomainState:
    """See the module. `Domain` is its public interface.

    It counts as one user of the reactor, until it is closed: the caller's use, if it has an
    identifier. Without one, it is private to its only user, and is closed when that user leaves.
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
            is_pinned=hub.context.device_name != SOFTWARE,
            slab=PRIVATE_SLAB if identifier is None else SLAB,
        )
        hub.counters.add_cache(self.pool.registrations)
        self.life: Lifecycle = Lifecycle(self.loop)
        self.regions: dict[int, MemoryRegion] = {}
        self._detached: list[MemoryRegion] = []  # the pool's, for the close
        self._refusal: BaseException | None = None  # of the last attempt to destroy the domain
        self._process = here.pid
        self._identifier = identifier
        self._users: dict[object, tuple[str, Callable[[], bool]]] = {}
        self._retiring = identifier is None
        if identifier is None:
            reactor.retain()
        else:
            at_end = AtLoopEnd(self._left_open, self.close_when_unused, self._aclose_when_unused)
            reactor.subscribe(identifier, self._handle, at_end)

    def __repr__(self) -> str:
        state = "closed" if self.life.is_closing else f"{len(self.regions)} regions"
        return f"<Domain on {self.device_name}: {state}>"

    @property
    def device_name(self) -> str:
        """The name of the RDMA device that the domain belongs to."""
        return self.hub.context.device_name

    @property
    def members(self) -> int:
        """The number of connections and other objects that use the domain."""
        return len(self._users)

    def require_usable(self) -> None:
        """Do nothing while objects may be created in the domain.

        Raises:
            ClosedError: the domain is closed.
            DeviceRemovedError: its device was removed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.
        """
        require_same_process(self._process, self)
        if self.life.cause is not None:
            raise detached(self.life.cause)
        require_here(self.loop, self)

    def _handle(self, event: Event) -> None:
        if event.type is CmEventType.DEVICE_REMOVAL and self.life.cause is None:
            self.life.cause = DeviceRemovedError(f"{self.device_name} was removed")

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
        if self._retiring and not self._users:
            self.close()

    # -- memory ---------------------------------------------------------------------------------

    async def register(self, make: Callable[[ProtectionDomain], Region]) -> Region:
        """Register memory until the domain's end, in a worker thread. See `Domain.register`."""
        self.require_usable()
        with ExitStack() as stack:
            # After the loop's end, this task does not continue: it must not make `aclose` fail.
            stack.enter_context(self.used("registration", lambda: self.loop.has_ended))
            region = await in_thread(
                self.loop,
                lambda: self.pool.registrations._register(lambda: make(self.raw)),
                on_cancelled=MemoryRegion.close,
                on_lost=stack.close,
            )
            try:
                await checkpoint_if_cancelled()  # a cancellation that the call outwaited
            except BaseException:
                retire_or_log(region)
                raise
            self.regions[id(region)] = region
            region._on_close = lambda: self.regions.pop(id(region), None)
        return region

    @contextmanager
    def used(self, kind: str, is_closing: Callable[[], bool]) -> Iterator[None]:
        """Count a user during the block. Arguments as of `join`."""
        user = object()
        self.join(user, kind, is_closing)
        try:
            yield
        finally:
            self.leave(user)

    # -- the end --------------------------------------------------------------------------------

    def _left_open(self) -> str:
        is_closing = self.life.is_closing or self._retiring
        return "" if is_closing else with_origin(self, self.life.origin)

    async def _aclose_when_unused(self) -> None:
        self.close_when_unused()  # at the loop's end, its users are also being closed

    def close_when_unused(self) -> None:
        """Call `close` once the last user has left. No further one can join."""
        self._retiring = True
        if self.life.cause is None:
            self.life.cause = ClosedError("this domain is closed")
        if not self._users:
            self.close()

    def close(self) -> None:
        """Deregister the memory and free the domain, in the background. Idempotent. Nothing may use
        the domain."""
        try:
            self._close()
        except MemoryError:
            end(self.loop, self._close)

    def _close(self) -> None:
        self.life.is_closing = True
        if self._process != here.pid:
            return  # the domain belongs to the parent process
        if self.life.cause is None:
            self.life.cause = ClosedError("this domain is closed")
        self.life.enter(Phase.DESTROYING, self._release)

    def _release(self) -> None:
        identifier, regions = self._identifier, list(self.regions.values())
        if identifier is not None:
            self.reactor.unsubscribe(identifier)
        self.hub.counters.remove_cache(self.pool.registrations)
        self.pool.detach(self._detached)
        regions += self._detached

        def close() -> None:
            with ExitStack() as last_first:
                if identifier is not None:
                    last_first.callback(identifier.close)
                last_first.callback(retire_all, regions)
                # First, with its regions: queue pairs that the driver has refused to destroy are
                # destroyed before the memory that their requests hold.
                last_first.callback(self._destroy)

        advance = partial(self.life.advance, Phase.CLOSED)
        forgetting = Ending(self.loop, self.regions.clear)
        self.reactor.destroy(close, advance, closed=self.life.closed.set)
        forgetting.run()

    def _destroy(self) -> None:
        """Destroy the domain and what is left in it, in a worker thread."""
        try:
            self.raw.close()
        except BaseException as error:
            self._refusal = detached(error)
            raise
        self._refusal = None

    @property
    def is_private(self) -> bool:
        """Whether it is closed by the end of its only user."""
        return self._identifier is None

    @property
    def is_left(self) -> bool:
        """Whether it was closed, and still exists, because the driver has refused to destroy it or
        what is left in it."""
        if not self.life.closed.is_set():
            return False
        is_open = self._identifier is not None and not self._identifier.closed
        return not self.raw._is_gone or is_open

    def _destroy_rest(self) -> None:
        """Destroy, in a worker thread, what the driver has refused to destroy. Idempotent."""
        with ExitStack() as last_first:
            if self._identifier is not None:
                last_first.callback(self._identifier.close)
            last_first.callback(self._destroy)

    def destroy_private_rest(self) -> None:
        """Do the same for a private domain, which nobody else closes again; else do nothing."""
        if self.is_private and self.is_left:
            self._destroy_rest()

    async def aclose(self) -> None:
        """Close the domain, and wait for it. Idempotent. See `Domain.aclose`."""
        if self._process != here.pid:
            return
        using = Counter(kind for kind, is_closing in self._users.values() if not is_closing())
        if using and not self._retiring:
            users = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in using.items())
            raise BusyError(f"{self!r} is in use ({users}): close its users first")
        if not self.life.closed.is_set():
            self.reactor.require_here(self, self.close_when_unused)
        elif self.is_left or self.reactor.is_left:
            await self.reactor.destroy_again(self, self._destroy_rest)
        self.close_when_unused()
        await outwait(self.life.closed)
        self.check()

    def check(self) -> None:
        """Raise the driver's refusal if the domain still exists, after an attempt to destroy it.

        Raises:
            VerbsCallError: the driver refuses to destroy the domain, or what is left in it.
            BusyError: a request or a window uses memory in it, or another thread is destroying it.
        """
        if not self.raw._is_gone:
            raise detached(self._refusal or BusyError("it still exists: call aclose() again"))


async def make_raw(reactor: Reactor, hub: DeviceHub, lane: Lane = CREATES) -> ProtectionDomain:
    """Allocate a protection domain of the hub's device, in a worker thread.

    Raises:
        VerbsCallError: the driver refused; the message names the limit.
    """
    with reactor.retained():
        return await in_thread(
            hub.loop,
            lambda: ProtectionDomain(hub.context),
            lane,
            on_cancelled=ProtectionDomain.close,
        )


async def make_private(reactor: Reactor, hub: DeviceHub, lane: Lane = CREATES) -> DomainState:
    """Allocate a domain for one user, which must join it at once.

    Raises:
        VerbsCallError: the driver refused; the message names the limit.
    """
    return DomainState(reactor, hub, await make_raw(reactor, hub, lane))


@contextmanager
def kept_open(reactor: Reactor, domain: DomainState | None) -> Iterator[Callable[[], None]]:
    """Keep the reactor and the domain open during a call in a worker thread that creates an object
    of the domain, and until that object is closed or has an owner, even if the connection is closed
    meanwhile. (`domain` is None for the loop's own one, which the reactor closes.)

    Yield a function that ends this before the block's end. If the loop ends, the block's task does
    not continue: so pass the function to `in_thread` as `on_lost`.
    """
    with ExitStack() as stack:
        stack.enter_context(reactor.retained())
        if domain is not None:
            stack.enter_context(domain.used("registration", lambda: True))
        yield stack.close


def start_deregistering(
    reactor: Reactor,
    domain: DomainState | None,
    function: Callable[[], object],
    then: Callable[[BaseException | None], object] = lambda _error: None,
) -> None:
    """Run a function that deregisters memory of a domain in a worker thread, and then `then` on the
    loop's thread, with the function's error. Until then the reactor and the domain stay open: a
    device refuses to free a domain that has regions. (`domain` is None for the loop's own one,
    which the reactor closes.)"""
    user = object()
    errors: list[BaseException | None] = [None]

    def leave() -> None:
        if domain is not None:
            domain.leave(user)

    def returned(error: BaseException | None) -> None:
        errors[0] = error
        ending.run()

    ending = Ending(reactor.loop, lambda: then(errors[0]), leave, reactor.release, errors.clear)
    giving_up = Ending(reactor.loop, leave, reactor.release)
    reactor.retain()
    try:
        if domain is not None:
            domain.join(user, "deregistration", lambda: True)
        start_destroy(reactor.loop, function, returned)
    except MemoryError:
        giving_up.run()
        raise


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
