"""The reactor of an event loop and a provider: the CM channel, and a hub per device. All of the
loop's connections share it. A loop that uses the software device and real devices has two.

The first object that needs it opens it, and it stays open until the loop ends, so that a client
which opens one connection after the other does not open the device for each. At the loop's end, its
guard closes what the program left open, and then the reactor.
"""

import logging
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio

from aiordma._base.call_all import call_all
from aiordma._base.errors import EventLoopError, VerbsCallError
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import Provider
from aiordma._base.states import ConnectionState
from aiordma._base.system import system
from aiordma._loop.event_loop import EventLoop, current_event_loop, require_here, running_loop
from aiordma._loop.threads import ACCEPTS, DESTROYS, Once, in_thread, start_destroy
from aiordma._native import call_then_run, ffi, leak
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.unmanaged_identifier import Unmanaged, opened_device
from aiordma.verbs import Context
from aiordma.verbs.identifier import Event, EventChannel, Identifier

logger: logging.Logger = logging.getLogger("aiordma")

EventHandler = Callable[[Event], None]
Then = Callable[[BaseException | None], None]

END_SECONDS = 5.0
"""Seconds that the end of a loop waits for the program's cancelled tasks."""

LONGEST_END = 60.0
"""Seconds that the end of a loop waits for the objects that it closes. By their options' defaults,
they need less than ten."""

CALLS_SECONDS = 1.0
"""Seconds that the end of a loop, or all closes after it together, wait for the driver's calls."""

EVENTS_AT_ONCE = 256
"""CM events delivered before other callbacks of the loop, and destroying calls, run."""

DESTROYS_AT_ONCE = DESTROYS.max_workers
"""Destroying calls that begin before CM events are delivered, once all of these have returned. If
more events were delivered before, as many calls as events begin, because each event can leave an
identifier to destroy."""


class Closable(Protocol):
    """What the end of the loop closes."""

    def left_open(self) -> str:
        """Return its name for the warning that the program did not close it; "" for no warning."""

    def end_with_loop(self) -> None:
        """Begin to close the object, because the event loop ends. What is built on it may do so."""

    def close(self) -> None:
        """Close the object in the background, also outside of its loop. Idempotent."""

    @property
    def closed(self) -> Once:
        """Set once it is closed."""

    @property
    def hub(self) -> DeviceHub | None:
        """That of its device; None: it needs none."""


class HasState(Protocol):
    """A handshake."""

    state: ConnectionState


class Reactor:
    """See the module. `reactor_of` returns it."""

    def __init__(
        self, loop: EventLoop, channel: EventChannel, on_end: Callable[[], object] = lambda: None
    ) -> None:
        self.loop = loop
        self.channel = channel
        self.blocks: bool = channel.provider.blocks
        """Whether creating and destroying calls block, and so run in worker threads."""
        self.ended: bool = False
        self.is_leaking: bool = False
        """Whether an object has leaked: then what lies below it is never destroyed."""
        self._on_end = on_end
        self._process = here.pid
        self._handlers: dict[int, EventHandler] = {}
        self.closables: dict[Closable, None] = {}
        self._hubs: dict[int, DeviceHub] = {}
        self._failed: list[DeviceHub] = []
        self._opening = anyio.Lock(fast_acquire=True)
        self._is_guarded = True
        self._destroying = 0
        self._since_events = 0  # destroying calls begun since the last delivery of events
        self._taken = 0  # events of the last delivery
        self._unwanted: deque[tuple[Callable[[], object], Then]] = deque()
        self._taking = 0
        self._after_events: list[Callable[[], None]] = []
        self._closed = Once(loop)
        self._deadline: float | None = None  # for the calls under way, after the loop's end
        channel._is_left_to_owner = lambda: not loop.is_running
        self._is_watching = True  # the channel
        loop.watch(channel.fd, self._readable)

    @property
    def _is_inherited(self) -> bool:
        """Whether this process is a forked child of the process that opened the reactor: then what
        it has is the parent's, and so are the descriptors that its loop watches."""
        return self._process != here.pid

    # -- what the loop's end closes -------------------------------------------------------------

    def enter(self, closable: Closable) -> None:
        """Let the loop's end close an object.

        Raises:
            ForkError: this process is a forked child of the process that opened the reactor.
        """
        if self._process != here.pid:
            require_same_process(self._process, "this event loop's RDMA channel")
        self.closables[closable] = None

    def leave(self, closable: Closable) -> None:
        """Forget an object that is closed."""
        self.closables.pop(closable, None)
        if self._failed:
            self._close_failed()
        if not self._is_guarded:
            self._close_if_unused()

    # -- CM events ------------------------------------------------------------------------------

    def subscribe(self, identifier: Identifier | Unmanaged, handler: EventHandler) -> None:
        """Deliver the identifier's events to the handler, in order, on the loop's thread."""
        self._handlers[identifier.key] = handler

    def unsubscribe(self, identifier: Identifier | Unmanaged) -> None:
        """Deliver no more events of an identifier. Call this before destroying it."""
        self._handlers.pop(identifier.key, None)

    def poll_events(self, handshake: HasState | None = None) -> bool:
        """Deliver the pending CM events, and return whether all were delivered. During destroying
        calls, no event is taken, nor in a forked child: the events are the parent's.

        Args:
            handshake: deliver no more events once its state has changed; None: all.
        """
        if self.ended or self._destroying or self._process != here.pid:
            return False
        if not self._taking:
            self._taken = 0
        self._taking += 1
        try:
            all_taken = self._take_events(handshake)
        finally:
            self._taking -= 1
        if self._taking:
            return all_taken  # called by a handler; the outer call continues
        self._since_events = 0
        if self._after_events:
            if all_taken:
                callbacks, self._after_events = self._after_events, []
                for callback in callbacks:
                    callback()
            else:
                self.loop.call_later(0, self._readable)
        if self._unwanted:
            self._start_destroys()
        return all_taken

    def _take_events(self, handshake: HasState | None) -> bool:
        take, before = self.channel._take, handshake and handshake.state
        try:
            while (event := take()) is not None:
                self._taken += 1
                handler = self._handlers.get(event.key)
                if handler is not None:
                    handler(event)
                elif event.new_key:
                    # Its listener was closed: destroying the new identifier rejects the request.
                    self.drop(Identifier(self.channel, key=event.new_key))
                if handshake is not None and handshake.state is not before:
                    return False  # further events make the channel readable again
                if self.ended or self._taken == EVENTS_AT_ONCE:
                    return False
        except VerbsCallError as error:
            # The failed event was consumed, and its identifier gets another event. Further events
            # make the channel readable again.
            logger.warning("%s", error)
            return False
        return True

    def after_events(self, callback: Callable[[], None]) -> None:
        """Call the callback once every pending CM event has been delivered: at once if events can
        be taken, else after the destroying calls."""
        if not self.loop.has_ended and self.poll_events():
            callback()
            return
        self._after_events.append(callback)
        if not self._destroying:
            self.loop.call_later(0, self._readable)

    def _readable(self) -> None:
        if self._destroying:  # its events have to wait
            self._is_watching = False
            self.loop.unwatch(self.channel.fd)
        else:
            call_then_run(self.poll_events)

    # -- destroying -----------------------------------------------------------------------------

    def drop(self, identifier: Identifier, then: Callable[[], object] = lambda: None) -> None:
        """Destroy an identifier in the background, and then call `then`."""
        self.unsubscribe(identifier)
        self.dispose(identifier, identifier.close, then)

    def dispose(
        self,
        what: object,
        function: Callable[[], object],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Destroy in the background what has no Teardown, and then call `then`. If the driver
        refuses, it leaks.

        Args:
            what: what is kept then.
            function: destroys it.
            then: called in either case.
        """

        def disposed(error: BaseException | None) -> None:
            if error is not None:
                leak(what)
                self.is_leaking = True
                logger.error("%r was not destroyed, and stays in memory: %s", what, error)
            then()

        self.destroy(function, disposed)

    def destroy(self, function: Callable[[], object], then: Then) -> None:
        """Run a function that destroys queue pairs or identifiers, and then `then(error or None)`
        on the loop's thread: at once if the provider's calls do not block, else from a worker.

        During a call in a thread, no CM event is taken, because taking an event can change the
        state of the queue pair that is being destroyed (man rdma_get_cm_event, rdma_destroy_id).
        Destroying calls and events alternate, so that closing many connections does not delay
        events: after `DESTROYS_AT_ONCE` calls, or as many as events were delivered before, further
        ones wait until these have returned and the pending events are delivered.
        """
        if not self.blocks or self.loop.has_ended:
            start_destroy(self.loop, function, then, blocks=False)
            return
        self._unwanted.append((function, then))
        self._start_destroys()

    def _start_destroys(self) -> None:
        most = max(DESTROYS_AT_ONCE, self._taken)
        while self._unwanted and not self._taking:
            # After the loop's end, no events are taken, which the calls would alternate with.
            if self._since_events >= most and not self.loop.has_ended:
                return
            self._since_events += 1
            function, then = self._unwanted.popleft()
            self._destroying += 1
            start_destroy(self.loop, function, partial(self._has_destroyed, then))

    def _has_destroyed(self, then: Then, error: BaseException | None) -> None:
        self._destroying -= 1
        if not self._destroying and not self._is_watching and not self.ended:
            self._is_watching = True
            self.loop.watch(self.channel.fd, self._readable)
        try:
            then(error)
        finally:
            if not self.loop.has_ended:
                self.poll_events()

    # -- devices --------------------------------------------------------------------------------

    async def hub(self, identifier: Identifier) -> DeviceHub:
        """Return the hub of the device to which the identifier is bound. Open it if needed."""
        return self.open_hub(identifier) or await self._hub(
            identifier.device_key, identifier.context
        )

    def open_hub(self, identifier: Identifier) -> DeviceHub | None:
        """Return the hub of the device to which the identifier is bound; None: it is not open."""
        return self._hubs.get(identifier.device_key)

    async def hub_of(self, device: str) -> DeviceHub:
        """Return the hub of a device by name. Open it if needed.

        Raises:
            NoDeviceError: librdmacm has no such device; the message lists its devices.
        """
        for hub in self._hubs.values():
            if hub.context.device_name == device:
                return hub
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
                unused.close()  # the hub existed, or the caller was cancelled

    async def _hub(self, key: int, context: Callable[[], Context]) -> DeviceHub:
        async with self._opening:
            if key in self._hubs:
                return self._hubs[key]

            def keep(hub: DeviceHub) -> None:
                try:
                    hub.start()
                except BaseException:
                    hub.stop()
                    hub.close()
                    raise
                hub.on_failed = partial(self._has_failed, key)
                self._hubs[key] = hub
                logger.info("this event loop uses the device %s", hub.context.device_name)

            hub = await in_thread(
                self.loop,
                lambda: DeviceHub(context(), self.loop, blocks=self.blocks),
                ACCEPTS,  # an accept may wait for it
                blocks=self.blocks,
                on_cancelled=keep,
            )
            keep(hub)
            return hub

    def _has_failed(self, key: int, hub: DeviceHub) -> None:
        """Let the next object open the device anew, and close the hub once nothing uses it."""
        del self._hubs[key]
        self._failed.append(hub)
        self.loop.call_later(0, self._close_failed)

    def _close_failed(self) -> None:
        if self.is_leaking:
            return  # perhaps an object of theirs
        used = [each.hub for each in self.closables]
        for hub in [hub for hub in self._failed if hub not in used]:
            self._failed.remove(hub)
            hub.stop()
            self.dispose(hub, hub.close)

    # -- the end --------------------------------------------------------------------------------

    async def guard(self) -> None:
        """Wait for the reactor's end. If the loop ends first, close the objects that the program
        left open, and then the reactor. (A loop's end cancels its tasks, including this one, and
        waits for them.)"""
        try:
            await self._end_or_cancellation()
        except GeneratorExit:
            if self._is_inherited:
                raise
            # The loop was closed with its tasks pending, and is being collected.
            self.loop.abandon()
            left = _left_open(list(self.closables))
            self._end_without_loop()
            _warn_of(left)
            raise

    async def _end_or_cancellation(self) -> None:
        try:
            await self._closed.wait()
        except GeneratorExit:
            raise
        except BaseException:
            if self._is_inherited:
                raise
            # What the program opens from now on is not closed here: if the loop goes on, because
            # the program itself has cancelled all tasks, it is used.
            known = set(self.closables)
            await self.loop.outlast_tasks(END_SECONDS)  # they use connections while they clean up
            closables = [each for each in self.closables if each in known]
            left = _left_open(closables)
            for each in closables:
                each.end_with_loop()  # all at once: each can wait for its peer, or its device
            with anyio.move_on_after(LONGEST_END, shield=True):
                for each in closables:
                    await each.closed.wait()
            self._is_guarded = False
            with anyio.move_on_after(CALLS_SECONDS, shield=True):
                while self.loop.calls:  # noqa: ASYNC110 - the loop has no event for it
                    await anyio.sleep(0.001)
            self._close_if_unused()
            if self.ended:
                with anyio.move_on_after(CALLS_SECONDS, shield=True):
                    await self._closed.wait()
            elif self.loop.asyncio_loop is not None:
                self.loop.call_later(0, self._guard_again)
            _warn_of(left)
            raise

    def _guard_again(self) -> None:
        """Guard what the program has opened since, because the loop goes on."""
        if not self.ended:
            self._is_guarded = True
            self.loop.spawn(self.guard, "aiordma: guard of the loop's end")

    def _close_if_unused(self) -> None:
        """Close the reactor, unless an object, a connect or a call in a worker thread uses it. What
        has leaked uses it for ever."""
        if self.ended or self.closables or self._unwanted or self.is_leaking or self.loop.calls:
            return
        if self._is_inherited:
            return
        if self._handlers and not self.loop.has_ended:
            return
        self.ended = True
        self._on_end()
        self.loop.unwatch(self.channel.fd)
        hubs = [*self._hubs.values(), *self._failed]
        for hub in hubs:
            hub.stop()

        def closed(error: BaseException | None) -> None:
            if error is not None:
                leak(self)
                logger.error("closing the event loop's RDMA devices: %s", error)
            self._closed.set()

        steps = [hub.close for hub in reversed(hubs)] + [self.channel.close]
        start_destroy(self.loop, partial(call_all, steps), closed, blocks=self.blocks)

    def _end_without_loop(self) -> None:
        """Close everything in this thread, because the loop has ended and runs no callbacks."""
        self._finish_calls()
        for each in list(self.closables):
            each.close()
        self._close_if_unused()

    def _finish_calls(self) -> None:
        """After the loop's end, do what it would have done: wait for the calls in worker threads,
        run the callbacks of those that have returned, and begin the destroying calls that wait.

        A call that has not returned keeps its objects open. No further call begins in a thread, so
        one deadline is enough for all closes."""
        if self._deadline is None:
            self._deadline = system.now() + END_SECONDS
        while True:
            # Before its callback is taken: a call that has returned by now has left its callback.
            # A forked child has none of the threads, nor has an interpreter that ends.
            waits = self.loop.calls and not self._is_inherited and not sys.is_finalizing()
            for callback in self.loop.undelivered():
                _call_or_log(callback)
            while self.loop.returned:
                _call_or_log(self.loop.returned.popitem()[1])
            self._start_destroys()
            if not waits or system.now() >= self._deadline:
                return
            time.sleep(0.001)

    # -- closing outside of the loop ------------------------------------------------------------

    def require_here(self, what: object, close: Callable[[], None]) -> None:
        """Check that the loop runs here, because the caller could not wait for `close` otherwise.

        Raises:
            EventLoopError: another loop runs here, or the loop has ended. If the loop has ended,
                `close` was called, and its resources are released. If the loop does not run at the
                moment, it calls `close` when it runs again. If it runs in another thread, nothing
                was done.
        """
        try:
            require_here(self.loop, what)
        except EventLoopError as error:
            outcome = self.close_elsewhere(close)
            raise EventLoopError(f"{error}; {outcome}") from None

    def close_elsewhere(self, close: Callable[[], None]) -> str:
        """Call `close` outside of the loop, if possible. Return the outcome, for a message."""
        if self.loop.has_ended:
            self._finish_calls()
            close()
            self._close_if_unused()
            return "it is closed now"
        if self.loop.is_running:
            return "it is as it was"
        self.loop.call_from_thread(close)
        return "its event loop stands still, and closes it when it runs again"


def _call_or_log(callback: Callable[[], object]) -> None:
    """Call a callback of a loop that has ended, and log its error, as the loop does."""
    try:
        callback()
    except Exception:
        logger.exception("a callback of an event loop that has ended")


def _left_open(closables: list[Closable]) -> list[str]:
    return [text for text in (each.left_open() for each in closables) if text]


def _warn_of(left: list[str]) -> None:
    if left:
        text = f"left open at the end of the event loop: {'; '.join(left)}"
        try:
            warnings.warn(text, ResourceWarning, stacklevel=1)
        except ResourceWarning:  # by a filter of the program's; no caller of its own gets it
            logger.error("ResourceWarning: %s", text)


class _Loop:
    """The reactors of one event loop, by the name of their provider. Weakly, because a reactor
    refers to its loop. A running loop keeps its reactors alive, because they watch descriptors."""

    def __init__(self) -> None:
        self.reactors: WeakValueDictionary[str, Reactor] = WeakValueDictionary()
        self.opening = anyio.Lock(fast_acquire=True)


_loops: WeakKeyDictionary[object, _Loop] = WeakKeyDictionary()


def current_reactors() -> list[Reactor]:
    """Return the open reactors of the running loop, at most one per provider."""
    known = _loops.get(running_loop())
    return [] if known is None else list(known.reactors.values())


def open_reactor(provider: Provider) -> Reactor | None:
    """Return the running loop's reactor of a provider; None: it is not open.

    Raises:
        ForkError: the loop was inherited from the parent of this process.
    """
    known = _loops.get(running_loop())
    reactor = None if known is None else known.reactors.get(provider.name)
    if reactor is not None and reactor._process != here.pid:
        require_same_process(reactor._process, "this event loop's RDMA channel")
    return reactor


async def reactor_of(provider: Provider) -> Reactor:
    """Return the running loop's reactor of a provider. Open it if needed.

    Raises:
        NoDeviceError: the connection manager cannot be opened; the message has the reason.
        VerbsCallError: no thread could be started, or no descriptors are left.
        ForkError: the loop was inherited from the parent of this process.
    """
    reactor = open_reactor(provider)
    if reactor is None:
        known = _loops.setdefault(running_loop(), _Loop())
        async with known.opening:
            reactor = known.reactors.get(provider.name) or await _open(provider, known)
    return reactor


async def _open(provider: Provider, known: _Loop) -> Reactor:
    loop = current_event_loop()
    if provider.blocks:
        DESTROYS.keep_worker()
    channel = await in_thread(
        loop,
        lambda: EventChannel(provider),
        blocks=provider.blocks,
        on_cancelled=lambda channel: channel.close(),
    )
    try:
        reactor = Reactor(loop, channel, lambda: known.reactors.pop(provider.name, None))
    except BaseException:
        channel.close()
        raise
    known.reactors[provider.name] = reactor
    loop.spawn(reactor.guard, "aiordma: guard of the loop's end")
    return reactor
