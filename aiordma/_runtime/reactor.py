"""One per event loop and provider, shared by all their connections: the CM channel, and a hub per
device. Where a loop uses the software device beside real ones, it has two.

It exists while somebody uses it: the first connection or listener of a loop opens it, the last one
closes it, so that nothing outlives what the program itself opened. Whatever has an identifier, or a
call into the driver under way, counts as a user.
"""

import logging
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import anyio
from anyio.lowlevel import RunVar

from aiordma._base.errors import ClosedError, EventLoopError, VerbsCallError
from aiordma._base.interrupts import deferring
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import Provider
from aiordma._loop.event_loop import EventLoop, current_event_loop, require_here
from aiordma._loop.threads import DESTROYS, Once, calls_under_way, in_thread, start_destroy
from aiordma._native import ffi
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.unmanaged_identifier import Unmanaged, opened_device
from aiordma.verbs import Context
from aiordma.verbs.identifier import Event, EventChannel, Identifier

__all__ = ("AtLoopEnd", "Reactor", "acquire_reactor", "current_reactors")

logger: logging.Logger = logging.getLogger("aiordma")

EventHandler = Callable[[Event], None]

END_SECONDS = 5.0
"""How long the end of a loop waits for calls into the driver that were under way."""

EVENTS_AT_ONCE = 256
"""CM events delivered before other callbacks of the loop, and destroys, have their turn."""

DESTROYS_AT_ONCE = DESTROYS.max_workers
"""Destroys begun before CM events have their turn, which is when all of these have returned. There
are as many as there were events if those were more: each may leave an identifier to destroy."""


class Closable(Protocol):
    """A connection's endpoint, or a listener."""

    def left_open(self) -> str:
        """Return how to name it in the warning that the program did not close it; "" for none."""

    def close(self) -> None:
        """Close it in the background. Idempotent."""

    async def aclose(self) -> None:
        """`close`, and wait for it, whatever is cancelled."""


@dataclass(frozen=True)
class AtLoopEnd:
    """A Closable made of the private methods of a public object."""

    left_open: Callable[[], str]
    close: Callable[[], None]
    aclose: Callable[[], Coroutine[Any, Any, None]]


class Reactor:
    """See the module. Get it with `acquire_reactor` or `retain`, and `release` it as often."""

    def __init__(
        self,
        loop: EventLoop,
        channel: EventChannel,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.loop = loop
        self.channel = channel
        self._on_end = on_end
        self._process = here.pid
        self.users: int = 0
        self.ended: bool = False
        self._handlers: dict[int, tuple[EventHandler, Closable | None]] = {}
        self._hubs: dict[int, DeviceHub] = {}
        self._opening = anyio.Lock()
        self._destroying = 0
        self._since_events = 0  # destroys begun
        self._taken = 0  # events, when they had their turn last
        self._unwanted: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
        self._taking = 0
        self._after_events: list[Callable[[], None]] = []
        self._closed = Once(loop)
        channel._is_left_to_owner = lambda: not loop.is_running
        loop.watch(channel.fd, self._readable)

    # -- CM events ----------------------------------------------------------------------------

    def subscribe(
        self,
        identifier: Identifier | Unmanaged,
        handler: EventHandler,
        owner: Closable | None = None,
    ) -> None:
        """Deliver the identifier's events to the handler, in order, on the loop's thread. The
        owner, if there is one by now, is closed where the loop ends before it."""
        self._handlers[identifier.key] = handler, owner

    def unsubscribe(self, identifier: Identifier | Unmanaged) -> None:
        """Forget an identifier, before it is destroyed."""
        self._handlers.pop(identifier.key, None)

    @deferring
    def poll_events(self) -> bool:
        """Deliver the CM events that wait, and return whether none is left. None is taken while
        something is being destroyed."""
        if self.ended or self._destroying or self.loop.has_ended:
            return False
        if not self._taking:
            self._taken = 0
        self._taking += 1
        try:
            all_taken = self._take_events()
        finally:
            self._taking -= 1
        if self._taking:
            return all_taken  # a handler polled; the outer poll goes on
        self._since_events = 0
        callbacks: list[Callable[[], None]] = []
        if all_taken:
            callbacks, self._after_events = self._after_events, callbacks
        elif self._after_events:
            self.loop.call_later(0, self._readable)
        for callback in callbacks:
            callback()
        self._start_destroys()
        return all_taken

    def _take_events(self) -> bool:
        try:
            for count, event in enumerate(self.channel.events(), 1):
                self._taken += 1
                handler, _ = self._handlers.get(event.key, (None, None))
                if handler is not None:
                    handler(event)
                elif event.new_key:
                    # Its listener is gone: destroying the newborn identifier refuses the peer.
                    self.destroy(Identifier(self.channel, key=event.new_key).close)
                if self.ended or count == EVENTS_AT_ONCE:
                    return False  # what waits behind it makes the channel readable again
        except VerbsCallError as error:
            # The failed event is spent and its identifier is told by the next one; what waits
            # behind it makes the channel readable again.
            logger.warning("%s", error)
            return False
        return True

    @deferring
    def after_events(self, callback: Callable[[], None]) -> None:
        """Call back once every CM event that waits has been delivered: at once where events can be
        taken, else after what is being destroyed."""
        if self.poll_events():
            callback()
        else:
            self._after_events.append(callback)

    @deferring
    def destroy(
        self, function: Callable[[], object], then: Callable[[], object] = lambda: None
    ) -> None:
        """Run what destroys queue pairs or identifiers in a worker thread, and then, on the loop's
        thread, `then`, even if it failed (which is logged).

        No CM event is taken meanwhile: taking one moves queue pairs, maybe the one that is being
        destroyed (man rdma_get_cm_event, rdma_destroy_id). So that a storm of closes does not hold
        up the events, the two take turns: after `DESTROYS_AT_ONCE` further ones wait until these
        have returned and the events that wait are delivered. The reactor stays open for it.
        """
        self.retain()
        self._unwanted.append((function, then))
        self._start_destroys()

    def _start_destroys(self) -> None:
        most = max(DESTROYS_AT_ONCE, self._taken)
        while self._unwanted and not self._taking and self._since_events < most:
            self._since_events += 1
            self._start_destroy(*self._unwanted.popleft())

    def _start_destroy(self, function: Callable[[], object], then: Callable[[], object]) -> None:
        self._destroying += 1
        if self._destroying == 1:
            self.loop.unwatch(self.channel.fd)

        def returned(error: BaseException | None) -> None:
            if error is not None:
                logger.error("destroying: %s", error, exc_info=error)
            self._destroying -= 1
            if not self._destroying:
                self.loop.watch(self.channel.fd, self._readable)
            if self.users > 1:
                # Ours goes first: `then` may give up the last one, and wants to know of the end.
                self.users -= 1
                then()
            else:
                self.release(then)
            self.poll_events()

        start_destroy(self.loop, function, returned)

    def _readable(self) -> None:
        self.poll_events()

    # -- devices ------------------------------------------------------------------------------

    async def hub(self, identifier: Identifier) -> DeviceHub:
        """Return the hub of the device that the identifier is bound to, opened if need be."""
        return await self._hub(identifier.device_key, identifier.context)

    async def hub_of(self, device: str) -> DeviceHub:
        """Return the hub of a device by name, opened if need be.

        Raises:
            NoDeviceError: librdmacm knows no such device; the message names those it knows.
        """
        with self.retained():
            context = await in_thread(
                self.loop,
                lambda: opened_device(self.channel.provider, device),
                on_cancelled=Context.close,
            )
            found = [context]
            try:
                key = int(ffi.cast("uintptr_t", context.pointer))
                return await self._hub(key, found.pop)
            finally:
                for unused in found:
                    unused.close()  # its hub existed, or the caller was cancelled

    async def _hub(self, key: int, context: Callable[[], Context]) -> DeviceHub:
        async with self._opening:
            if key not in self._hubs:

                def keep(hub: DeviceHub) -> None:
                    hub.start()
                    self._hubs[key] = hub

                with self.retained():
                    hub = await in_thread(
                        self.loop, lambda: DeviceHub(context(), self.loop), on_cancelled=keep
                    )
                    keep(hub)
            return self._hubs[key]

    # -- the end ------------------------------------------------------------------------------

    @deferring
    def retain(self) -> None:
        """Count one more user.

        Raises:
            ClosedError: the last one has gone, and everything with it.
            ForkError: this is a child of the process that opened it.
        """
        require_same_process(self._process, "this event loop's RDMA channel")
        if self.ended:
            raise ClosedError("this event loop's RDMA channel was closed with its last user")
        self.users += 1

    @contextmanager
    def retained(self) -> Iterator[None]:
        """Count one more user meanwhile, so that nothing is closed under a call in a thread.

        Raises: as `retain`.
        """
        self.retain()
        try:
            yield
        finally:
            self.release()

    @deferring
    def release(self, then: Callable[[], object] = lambda: None) -> None:
        """Count one fewer; the last one closes everything. `then` is called once that is done, at
        once if others are left."""
        self.users -= 1
        if self.users:
            then()
            return
        self.ended = True
        self._on_end()
        self.loop.unwatch(self.channel.fd)
        hubs = list(self._hubs.values())
        for hub in hubs:
            hub.stop()

        def close() -> None:
            with ExitStack() as stack:
                stack.callback(self.channel.close)
                for hub in hubs:
                    stack.callback(hub.close)

        def closed(error: BaseException | None) -> None:
            if error is not None:
                logger.error("closing: %s", error, exc_info=error)
            self._closed.set()
            then()

        start_destroy(self.loop, close, closed)

    async def guard(self) -> None:
        """Wait for the end; where the loop ends first, close what the program left open. (A loop's
        end cancels its tasks, this one too, and waits for them.)"""
        try:
            await self._closed.wait()
        except GeneratorExit:
            # The loop was closed with its tasks pending, and is being collected.
            self.loop.abandon()
            left = self._left_open()
            self._end_without_loop()
            _warn_of(left)
            raise
        except BaseException:
            left = self._left_open()
            for owner in self._owners():
                await owner.aclose()
            with anyio.move_on_after(END_SECONDS, shield=True):
                await self._closed.wait()
            _warn_of(left)
            raise

    def _owners(self) -> list[Closable]:
        return [owner for _, owner in self._handlers.values() if owner is not None]

    def _left_open(self) -> list[str]:
        return [text for text in (owner.left_open() for owner in self._owners()) if text]

    def _end_without_loop(self) -> None:
        """Close everything in this thread: the loop has ended, and calls nothing back."""
        for callback in self.loop.undelivered():
            callback()
        for owner in self._owners():
            owner.close()
        if not self.ended and not calls_under_way():
            self.users = 1  # tasks that were dropped do not give theirs up
            self.release()

    # -- closing from elsewhere ---------------------------------------------------------------

    @deferring
    def require_here(self, what: object, close: Callable[[], None]) -> None:
        """Do nothing where the loop runs. Elsewhere, nobody could wait for the end of `close`.

        Raises:
            EventLoopError: another loop runs here, or the loop has ended. If it has ended, `close`
                has been called, and what was to be given back has been. If it stands still, it
                calls `close` when it goes on. If it runs in another thread, nothing was done.
        """
        try:
            require_here(self.loop, what)
        except EventLoopError as error:
            outcome = self.close_elsewhere(close)
            raise EventLoopError(f"{error}; {outcome}") from None

    @deferring
    def close_elsewhere(self, close: Callable[[], None]) -> str:
        """Call `close` where the loop does not run, if it can be. Return what became of it."""
        if self.loop.has_ended:
            for callback in self.loop.undelivered():
                callback()
            close()
            return "it is closed now"
        if self.loop.is_running:
            return "it is as it was"
        self.loop.call_from_thread(close)
        return "its event loop stands still, and closes it when it runs again"


def _warn_of(left: list[str]) -> None:
    if left:
        text = f"left open at the end of the event loop: {'; '.join(left)}"
        warnings.warn(text, ResourceWarning, stacklevel=1)


# By the provider's name, weakly: what a RunVar keeps is kept with its loop for ever, and a reactor
# holds its loop, so that neither would be collected. A loop that runs holds its reactors, which
# watch descriptors there.
_current: RunVar[WeakValueDictionary[str, Reactor]] = RunVar("aiordma_reactors")
_locks: RunVar[anyio.Lock] = RunVar("aiordma_reactor_lock")


def current_reactors() -> list[Reactor]:
    """Return the running loop's reactors that are open: none, one, or one per provider."""
    try:
        return list(_current.get().values())
    except LookupError:
        return []


def _ours() -> tuple[WeakValueDictionary[str, Reactor], anyio.Lock]:
    """The running loop's, made if need be."""
    try:
        return _current.get(), _locks.get()
    except LookupError:
        current, lock = WeakValueDictionary[str, Reactor](), anyio.Lock()
        _current.set(current)
        _locks.set(lock)
        return current, lock


async def acquire_reactor(provider: Provider) -> Reactor:
    """Return the running loop's reactor of a provider, opened if need be, with one more user.

    Raises:
        NoDeviceError: there is no RDMA stack here; the message says how to get one.
        ForkError: the loop was inherited from the process that this one was forked from.
    """
    current, lock = _ours()
    async with lock:
        reactor = current.get(provider.name)
        if reactor is None:
            loop = current_event_loop()
            channel = await in_thread(
                loop, lambda: EventChannel(provider), on_cancelled=lambda late: late.close()
            )
            reactor = Reactor(loop, channel, lambda: current.pop(provider.name, None))
            current[provider.name] = reactor
            loop.spawn(reactor.guard, "aiordma: guard of the loop's end")
        reactor.retain()
        return reactor
