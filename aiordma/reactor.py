"""One per event loop and provider, shared by all their connections: the CM channel, and a hub per
device. Where a loop uses the software device beside real ones, it has two.

It exists while somebody uses it: the first connection or listener of a loop opens it, the last one
closes it, so that nothing outlives what the program itself opened. Whatever has an identifier, or a
call into the driver under way, counts as a user.
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import anyio
from anyio.lowlevel import RunVar

from aiordma._native import ffi
from aiordma.errors import ClosedError, VerbsCallError
from aiordma.event_loop import EventLoop, current_event_loop
from aiordma.hub import DeviceHub
from aiordma.process import here, require_same_process
from aiordma.provider import Provider
from aiordma.rdmacm import Event, EventChannel, Identifier
from aiordma.threads import in_thread, start_call
from aiordma.unmanaged import Unmanaged, opened_device
from aiordma.verbs import Context

__all__ = ("Reactor", "acquire_reactor", "current_reactors")

logger = logging.getLogger("aiordma")

EventHandler = Callable[[Event], None]

END_SECONDS = 5.0
"""How long the end of a loop waits for calls into the driver that were under way."""


class Closable(Protocol):
    """A connection's endpoint, or a listener."""

    async def aclose(self) -> None:
        """Close it, whatever is cancelled."""


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
        self.users = 0
        self.ended = False
        self._handlers: dict[int, tuple[EventHandler, Closable | None]] = {}
        self._hubs: dict[int, DeviceHub] = {}
        self._opening = anyio.Lock()
        self._destroying = 0
        self._closed = anyio.Event()
        loop.watch(channel.fd, self.poll_events)

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

    def poll_events(self) -> None:
        """Deliver the CM events that are waiting."""
        if self.ended or self._destroying:
            return
        try:
            for event in self.channel.events():
                handler, _ = self._handlers.get(event.key, (None, None))
                if handler is not None:
                    handler(event)
                elif event.new_key:
                    # Its listener is gone: destroying the newborn identifier refuses the peer.
                    self.destroy(Identifier(self.channel, key=event.new_key).close)
                if self.ended or self._destroying:
                    return  # what waits behind it makes the channel readable again
        except VerbsCallError as error:
            # The failed event is spent and its identifier is told by the next one; what waits
            # behind it makes the channel readable again.
            logger.warning("%s", error)

    def destroy(
        self, function: Callable[[], object], then: Callable[[], object] = lambda: None
    ) -> None:
        """Run what destroys queue pairs or identifiers in a thread, and then, on the loop's
        thread, `then`, even if it failed (which is logged).

        No CM event is taken meanwhile: taking one moves queue pairs, maybe the one that is being
        destroyed (man rdma_get_cm_event, rdma_destroy_id). The reactor stays open for it.
        """
        self.retain()
        self._destroying += 1
        if self._destroying == 1:
            self.loop.unwatch(self.channel.fd)

        def returned(error: BaseException | None) -> None:
            if error is not None:
                logger.error("destroying: %s", error, exc_info=error)
            self._destroying -= 1
            if not self._destroying:
                self.loop.watch(self.channel.fd, self.poll_events)
            if self.users > 1:
                # Ours goes first: `then` may give up the last one, and wants to know of the end.
                self.users -= 1
                then()
            else:
                self.release(then)

        start_call(self.loop, function, returned)

    # -- devices ------------------------------------------------------------------------------

    async def hub(self, identifier: Identifier) -> DeviceHub:
        """Return the hub of the device that the identifier is bound to, opened if need be."""
        return await self._hub(identifier.device_key, identifier.context)

    async def hub_of(self, device: str) -> DeviceHub:
        """Return the hub of a device by name, opened if need be.

        Raises:
            NoDeviceError: librdmacm knows no such device; the message names those it knows.
        """
        found: list[Context] = []
        self.retain()
        try:
            await in_thread(
                self.loop,
                lambda: found.append(opened_device(self.channel.provider, device)),
            )
            key = int(ffi.cast("uintptr_t", found[0].pointer))
            return await self._hub(key, found.pop)
        finally:
            for context in found:
                context.close()  # its hub existed, or the caller was cancelled
            self.release()

    async def _hub(self, key: int, context: Callable[[], Context]) -> DeviceHub:
        async with self._opening:
            if key not in self._hubs:
                made: list[DeviceHub] = []
                self.retain()
                try:
                    await in_thread(self.loop, lambda: made.append(DeviceHub(context(), self.loop)))
                finally:
                    # Also if the caller was cancelled meanwhile.
                    for hub in made:
                        hub.start()
                        self._hubs[key] = hub
                    self.release()
            return self._hubs[key]

    # -- the end ------------------------------------------------------------------------------

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

        start_call(self.loop, close, closed)

    async def guard(self) -> None:
        """Wait for the end; where the loop ends first, close what the program left open. (A loop's
        end cancels its tasks, this one too, and waits for them.)"""
        try:
            await self._closed.wait()
        finally:
            owners = [owner for _, owner in self._handlers.values() if owner is not None]
            left = ", ".join(repr(owner) for owner in owners)
            for owner in owners:
                await owner.aclose()
            with anyio.move_on_after(END_SECONDS, shield=True):
                await self._closed.wait()
            if left:
                text = f"left open at the end of the event loop: {left}"
                warnings.warn(text, ResourceWarning, stacklevel=1)


# By the provider's name. A reactor takes itself out when it ends: what a RunVar keeps is kept with
# its loop for ever, and a reactor holds its loop, so that neither would be collected.
_current: RunVar[dict[str, Reactor]] = RunVar("aiordma_reactors")
_locks: RunVar[anyio.Lock] = RunVar("aiordma_reactor_lock")


def current_reactors() -> list[Reactor]:
    """Return the running loop's reactors that are open: none, one, or one per provider."""
    try:
        return list(_current.get().values())
    except LookupError:
        return []


def _ours() -> tuple[dict[str, Reactor], anyio.Lock]:
    """The running loop's, made if need be."""
    try:
        return _current.get(), _locks.get()
    except LookupError:
        current, lock = dict[str, Reactor](), anyio.Lock()
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
            made: list[EventChannel] = []
            try:
                await in_thread(loop, lambda: made.append(EventChannel(provider)))
            except BaseException:
                for channel in made:
                    channel.close()
                raise
            reactor = Reactor(loop, made[0], lambda: current.pop(provider.name, None))
            current[provider.name] = reactor
            loop.spawn(reactor.guard, "aiordma: guard of the loop's end")
        reactor.retain()
        return reactor
