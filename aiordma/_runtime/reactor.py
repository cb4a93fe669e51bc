"""The reactor of an event loop and a provider: the CM channel, and a hub per device. All of the
loop's connections share it. A loop that uses the software device and real devices has two.

A reactor exists while it has users: the first connection or listener opens it, and the last one
closes it. So nothing remains open once the program has closed its objects. Every object with an
identifier, and every call into the driver, counts as a user.
"""

import logging
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import anyio
from anyio.lowlevel import RunVar

from aiordma._base.errors import BusyError, ClosedError, EventLoopError, VerbsCallError
from aiordma._base.process import here, require_same_process
from aiordma._base.provider import Provider
from aiordma._loop.ending import Ending, end, repeated
from aiordma._loop.event_loop import EventLoop, current_event_loop, require_here
from aiordma._loop.threads import (
    ACCEPTS,
    CREATES,
    DESTROYS,
    Once,
    calls_under_way,
    in_thread,
    outwait,
    start_destroy,
)
from aiordma._native import ffi
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.unmanaged_identifier import Unmanaged, opened_device
from aiordma.verbs import Context
from aiordma.verbs.identifier import Event, EventChannel, Identifier

__all__ = ("AtLoopEnd", "Reactor", "acquire_reactor", "current_reactors")

logger: logging.Logger = logging.getLogger("aiordma")

EventHandler = Callable[[Event], None]

END_SECONDS = 5.0
"""Seconds that the end of a loop waits for the program's cancelled tasks, and that it, or all
closes after it together, wait for calls into the driver."""

EVENTS_AT_ONCE = 256
"""CM events delivered before other callbacks of the loop, and destroying calls, run."""

CONNECTS_AT_ONCE = 2 * CREATES.max_workers
"""Connects that make their queue pairs at a time. If more of them went on side by side, in each
turn of the loop, all would send their requests before a listener of the loop had made the queue
pair for the first: that is a burst which fills its backlog."""

DESTROYS_AT_ONCE = DESTROYS.max_workers
"""Destroying calls that begin before CM events are delivered, once all of these have returned. If
more events were delivered before, as many calls as events begin, because each event can leave an
identifier to destroy."""


class Closable(Protocol):
    """A connection's endpoint, or a listener."""

    def left_open(self) -> str:
        """Return its name for the warning that the program did not close it; "" for no warning."""

    def end_above(self) -> None:
        """End what is built on the object, in the background, because the event loop ends: `aclose`
        follows, and waits for it."""

    def close(self) -> None:
        """Close the object in the background. Idempotent."""

    async def aclose(self) -> None:
        """Close the object, and wait for the end, also if the task is cancelled."""


@dataclass(frozen=True)
class AtLoopEnd:
    """A Closable that consists of the private methods of a public object."""

    left_open: Callable[[], str]
    close: Callable[[], None]
    aclose: Callable[[], Coroutine[Any, Any, None]]

    def end_above(self) -> None:
        """Nothing is built on it that ends in a way of its own."""


class Reactor:
    """See the module. `acquire_reactor` and `retain` count a user, and `release` removes one."""

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
        self._opening = anyio.Lock(fast_acquire=True)
        self.connects: anyio.Semaphore = anyio.Semaphore(CONNECTS_AT_ONCE, fast_acquire=True)
        """A connect holds it while it makes its queue pair."""
        self._destroying = 0
        self._since_events = 0  # destroying calls begun since the last delivery of events
        self._taken = 0  # events of the last delivery
        self._unwanted: deque[tuple[Callable[[], object], Ending]] = deque()
        self._taking = 0
        self._after_events: list[Callable[[], None]] = []
        self._closed = Once(loop)
        self._after_close: list[Callable[[], object]] = []
        self._close_objects: Callable[[], object] = lambda: None
        self._deadline: float | None = None  # for the calls under way, after the loop's end
        channel._is_left_to_owner = lambda: not loop.is_running
        loop.watch(channel.fd, self._readable)

    # -- CM events ----------------------------------------------------------------------------

    def subscribe(
        self,
        identifier: Identifier | Unmanaged,
        handler: EventHandler,
        owner: Closable | None = None,
    ) -> None:
        """Deliver the identifier's events to the handler, in order, on the loop's thread. If the
        loop ends first, the reactor closes the owner, if there is one."""
        self._handlers[identifier.key] = handler, owner

    def unsubscribe(self, identifier: Identifier | Unmanaged) -> None:
        """Deliver no more events of an identifier. Call this before destroying it."""
        self._handlers.pop(identifier.key, None)

    def poll_events(self) -> bool:
        """Deliver the pending CM events, and return whether all were delivered. During destroying
        calls, no event is taken."""
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
            return all_taken  # called by a handler; the outer call continues
        self._since_events = 0
        callbacks: list[Callable[[], None]] = []
        if all_taken:
            callbacks, self._after_events = self._after_events, callbacks
        elif self._after_events:
            self.loop.call_later(0, self._readable)
        try:
            while callbacks:
                callbacks.pop(0)()
        finally:
            if callbacks:  # one has failed
                self._after_events[:0] = callbacks
                self.loop.call_later(0, self._readable)
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
                    # Its listener was closed: destroying the new identifier rejects the request.
                    self._reject(event.new_key)
                if self.ended or count == EVENTS_AT_ONCE:
                    return False  # further events make the channel readable again
        except VerbsCallError as error:
            # The failed event was consumed, and its identifier gets another event. Further events
            # make the channel readable again.
            logger.warning("%s", error)
            return False
        return True

    def after_events(self, callback: Callable[[], None]) -> None:
        """Call the callback once every pending CM event has been delivered: at once if events can
        be taken, else after the destroying calls."""
        if self.poll_events():
            callback()
        else:
            self._after_events.append(callback)

    def destroy(
        self,
        function: Callable[[], object],
        *then: Callable[[], object],
        closed: Callable[[], object] | None = None,
    ) -> None:
        """Run a function that destroys queue pairs or identifiers in a worker thread, and then
        `then` on the loop's thread. A failure of the function is logged.

        During the call, no CM event is taken, because taking an event can change the state of the
        queue pair that is being destroyed (man rdma_get_cm_event, rdma_destroy_id). Destroying
        calls and events alternate, so that closing many connections does not delay events: after
        `DESTROYS_AT_ONCE` calls, or as many as events were delivered before, further ones wait
        until these have returned and the pending events are delivered. The reactor stays open
        during the call.

        Args:
            function: the function.
            then: the functions to call afterwards, the steps of an Ending. The reactor is open.
            closed: if given, the caller is a user of the reactor no longer: release it, behind
                `then`, and call this as `release` does.

        Raises:
            MemoryError: nothing was done.
            ClosedError, ForkError: as of `retain`.
        """
        steps = [self._watch_again, *then]
        if closed is not None:
            steps.append(self._count_release)
        steps += self._releasing() if closed is None else self._releasing(closed)
        unwanted = function, Ending(self.loop, *steps, self.poll_events)
        starting = Ending(self.loop, self._start_due_destroys)
        self._unwanted.append(unwanted)
        try:
            self.retain()
        except BaseException:
            self._unwanted.remove(unwanted)
            raise
        starting.run()

    async def destroy_again(
        self, what: object, function: Callable[[], object], *then: Callable[[], object]
    ) -> None:
        """Run a function as `destroy` does, and wait for it and `then`. It destroys what the driver
        has refused to destroy before. If the reactor has closed meanwhile, close its objects again,
        too. After the loop's end, all of this runs in the calling thread.

        Args:
            what: the object that owns it.
            function, then: as of `destroy`.

        Raises:
            EventLoopError: as `require_here`, but not after the loop's end.
            MemoryError: nothing was done.
        """
        if not self.loop.has_ended:
            self.require_here(what, partial(self._destroy_again, function, *then))
            if self.ended:
                await outwait(self._closed)
        done = Once(self.loop)
        self._destroy_again(function, *then, done.set)
        await outwait(done)

    def _destroy_again(self, function: Callable[[], object], *then: Callable[[], object]) -> None:
        if not self.ended:
            self.destroy(function, *then)
            return
        ending = Ending(self.loop, *then)

        def destroy() -> None:
            with ExitStack() as last_first:
                last_first.callback(self._close_objects)
                last_first.callback(function)

        def returned(error: BaseException | None) -> None:
            _log("destroying", error)
            ending.run()

        start_destroy(self.loop, repeated(destroy), returned)

    @property
    def is_left(self) -> bool:
        """Whether the reactor has closed, and one of its objects still exists, because the driver
        has refused to destroy it."""
        if not self._closed.is_set():
            return False
        contexts = [hub.context for hub in list(self._hubs.values())]
        return not (self.channel.closed and all(context.closed for context in contexts))

    def _start_destroys(self) -> None:
        try:
            self._start_due_destroys()
        except MemoryError:
            end(self.loop, self._start_due_destroys)

    def _start_due_destroys(self) -> None:
        most = max(DESTROYS_AT_ONCE, self._taken)
        while self._unwanted and not self._taking:
            # After the loop's end, no events are taken, which the calls would alternate with.
            if self._since_events >= most and not self.loop.has_ended:
                return
            self._since_events += 1
            unwanted = self._unwanted.popleft()
            try:
                self._start_destroy(*unwanted)
            except BaseException:
                if not self.loop.has_ended:  # else it was run
                    self._since_events -= 1
                    self._unwanted.appendleft(unwanted)
                raise

    def _start_destroy(self, function: Callable[[], object], ending: Ending) -> None:
        def returned(error: BaseException | None) -> None:
            self._destroying -= 1
            _log("destroying", error)
            ending.run()

        closing = repeated(function)
        self._destroying += 1
        try:
            if self._destroying == 1:
                self.loop.unwatch(self.channel.fd)
            start_destroy(self.loop, closing, returned)
        except BaseException:
            if not self.loop.has_ended:  # else it was run
                self._destroying -= 1
                self._watch_again()
            raise

    def _watch_again(self) -> None:
        if not self._destroying and not self.ended:
            self.loop.watch(self.channel.fd, self._readable)

    def _reject(self, key: int) -> None:
        """Destroy a new identifier, now, or as soon as there is memory for it."""
        made: list[Identifier] = []

        def reject() -> None:
            if not made:
                made.append(Identifier(self.channel, key=key))
            self.destroy(made[0].close)

        try:
            reject()
        except MemoryError:
            end(self.loop, reject)

    def _readable(self) -> None:
        self.poll_events()

    # -- devices ------------------------------------------------------------------------------

    async def hub(self, identifier: Identifier) -> DeviceHub:
        """Return the hub of the device to which the identifier is bound. Open it if needed."""
        return await self._hub(identifier.device_key, identifier.context)

    async def hub_of(self, device: str) -> DeviceHub:
        """Return the hub of a device by name. Open it if needed.

        Raises:
            NoDeviceError: librdmacm has no such device; the message lists its devices.
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
                    unused.close()  # the hub existed, or the caller was cancelled

    async def _hub(self, key: int, context: Callable[[], Context]) -> DeviceHub:
        # Not behind those that wait for the lock: they get it one after the other, in a turn of the
        # loop each, and an accept would come after all connects that wait.
        if key in self._hubs:
            return self._hubs[key]
        async with self._opening:
            if key not in self._hubs:
                named = _named_devices()

                def keep(hub: DeviceHub) -> None:
                    hub.start()
                    self._hubs[key] = hub
                    name = hub.context.device_name
                    # A client with one connection at a time opens the device for each.
                    level = logging.DEBUG if name in named else logging.INFO
                    named.add(name)
                    logger.log(level, "this event loop uses the device %s", name)

                with self.retained():
                    hub = await in_thread(
                        self.loop,
                        lambda: DeviceHub(context(), self.loop),
                        ACCEPTS,  # an accept may wait for it
                        on_cancelled=keep,
                    )
                    keep(hub)
            return self._hubs[key]

    # -- the end ------------------------------------------------------------------------------

    def retain(self) -> None:
        """Count one more user.

        Raises:
            ClosedError: the reactor was closed with its last user.
            ForkError: this process is a forked child of the process that opened the reactor.
        """
        require_same_process(self._process, "this event loop's RDMA channel")
        if self.ended:
            raise ClosedError("this event loop's RDMA channel was closed with its last user")
        self.users += 1

    @contextmanager
    def retained(self) -> Iterator[None]:
        """Count one more user during the block, so that the reactor stays open for a call in a
        thread.

        Raises: as `retain`.
        """
        release = Ending(self.loop, *self._releasing()).run
        self.retain()
        try:
            yield
        finally:
            release()

    def release(self, then: Callable[[], object] = lambda: None) -> None:
        """Count one user less. The last one closes the reactor. `then` is called when it is closed;
        if there are other users, at once. It is a step of an Ending.

        Raises:
            MemoryError: nothing was done.
        """
        Ending(self.loop, *self._releasing(then)).run()

    def _releasing(self, *then: Callable[[], object]) -> list[Callable[[], object]]:
        """Return the steps of `release`, for an Ending. Whatever it repeats, the user is counted
        once."""
        return [self._count_release, partial(self._released, Ending(self.loop, *then))]

    def _count_release(self) -> None:
        if not self.ended:
            self.users -= 1

    def _released(self, then: Ending) -> None:
        if self.users or self._closed.is_set():
            then.run()
        elif self.ended:
            self._after_close.append(then.run)
        else:
            self._close(then)

    def _close(self, then: Ending) -> None:
        hubs = list(self._hubs.values())

        def close() -> None:
            with ExitStack() as stack:
                stack.callback(self.channel.close)
                for hub in hubs:
                    stack.callback(hub.close)

        def closed(error: BaseException | None) -> None:
            _log("closing", error)
            last.run()

        last = Ending(self.loop, self._closed.set, then.run, self._call_after_close)
        ending = Ending(
            self.loop,
            self._on_end,
            partial(self.loop.unwatch, self.channel.fd),
            *(hub.stop for hub in hubs),
            partial(start_destroy, self.loop, repeated(close), closed),
        )
        self._close_objects = close
        self.ended = True
        ending.run()

    def _call_after_close(self) -> None:
        with ExitStack() as stack:
            for then in self._after_close:
                stack.callback(then)

    async def guard(self) -> None:
        """Wait for the reactor's end. If the loop ends first, close the objects that the program
        left open. (A loop's end cancels its tasks, including this one, and waits for them.)"""
        try:
            await self._end_or_cancellation()
        except GeneratorExit:
            # The loop was closed with its tasks pending, and is being collected.
            self.loop.abandon()
            left = _left_open(self.closables())
            self._end_without_loop()
            _warn_of(left)
            raise

    async def _end_or_cancellation(self) -> None:
        try:
            await self._closed.wait()
        except GeneratorExit:
            raise
        except BaseException:
            # What the program opens from now on is not closed here: if the loop goes on, because
            # the program itself has cancelled all tasks, it is used.
            known = set(self.closables())
            await self.loop.outlast_tasks(END_SECONDS)  # they use connections while they clean up
            owners = [owner for owner in self.closables() if owner in known]
            left = _left_open(owners)
            for owner in owners:
                owner.end_above()  # all at once: each can wait for its peer
            for owner in owners:
                # The driver refuses to destroy it, which was logged.
                with suppress(VerbsCallError, BusyError):
                    await owner.aclose()
            with anyio.move_on_after(END_SECONDS, shield=True):
                await self._closed.wait()
            _warn_of(left)
            raise

    def closables(self) -> list[Closable]:
        """Return what the end of the loop closes."""
        return [owner for _, owner in self._handlers.values() if owner is not None]

    def _end_without_loop(self) -> None:
        """Close everything in this thread, because the loop has ended and runs no callbacks."""
        self._finish_calls()
        for owner in self.closables():
            owner.close()
        if not self.ended and not calls_under_way():
            self.users = 1  # dropped tasks do not release theirs
            self.release()

    def _finish_calls(self) -> None:
        """After the loop's end, do what it would have done: wait for the calls in worker threads,
        run the callbacks of those that have returned, and begin the destroying calls that wait.

        A call that has not returned keeps its objects open. No further call begins in a thread, so
        one deadline is enough for all closes."""
        if self._deadline is None:
            self._deadline = time.monotonic() + END_SECONDS
        while True:
            # Before its callback is taken: a call that has returned by now has left its callback.
            # A forked child has none of the threads, nor has an interpreter that ends.
            waits = self.loop.calls and self._process == here.pid and not sys.is_finalizing()
            with ExitStack() as last_first:
                last_first.callback(self._end_lost_waits)
                for callback in reversed(self.loop.undelivered()):
                    last_first.callback(_call_or_log, callback)
            self._start_destroys()
            if not waits or time.monotonic() >= self._deadline:
                return
            time.sleep(0.001)

    def _end_lost_waits(self) -> None:
        with ExitStack() as stack:
            while self.loop.returned:
                stack.callback(_call_or_log, self.loop.returned.popitem()[1])

    # -- closing outside of the loop ----------------------------------------------------------

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
            return "it is closed now"
        if self.loop.is_running:
            return "it is as it was"
        self.loop.call_from_thread(close)
        return "its event loop stands still, and closes it when it runs again"


def _call_or_log(callback: Callable[[], object]) -> None:
    """Call a callback of a loop that has ended, and log its error, as the loop does."""
    try:
        callback()
    except MemoryError:
        raise
    except Exception as error:
        _log("a callback of an event loop that has ended", error)


def _log(what: str, error: BaseException | None) -> None:
    if error is not None:
        with suppress(MemoryError):
            logger.error("%s: %s", what, error, exc_info=error)


def _left_open(owners: list[Closable]) -> list[str]:
    return [text for text in (owner.left_open() for owner in owners) if text]


def _warn_of(left: list[str]) -> None:
    if left:
        text = f"left open at the end of the event loop: {'; '.join(left)}"
        try:
            warnings.warn(text, ResourceWarning, stacklevel=1)
        except ResourceWarning:  # by a filter of the program's; no caller of its own gets it
            logger.error("ResourceWarning: %s", text)


# The reactors by the name of their provider, with weak references. A RunVar keeps its value as long
# as its loop exists, and a reactor refers to its loop, so strong references would keep both alive.
# A running loop keeps its reactors alive, because they watch descriptors.
_current: RunVar[WeakValueDictionary[str, Reactor]] = RunVar("aiordma_reactors")
_locks: RunVar[anyio.Lock] = RunVar("aiordma_reactor_lock")
# The devices whose use by the loop was logged.
_named: RunVar[set[str]] = RunVar("aiordma_named_devices")


def current_reactors() -> list[Reactor]:
    """Return the open reactors of the running loop, at most one per provider."""
    try:
        return list(_current.get().values())
    except LookupError:
        return []


def _ours() -> tuple[WeakValueDictionary[str, Reactor], anyio.Lock]:
    """Return the running loop's reactors and their lock. Create both if needed."""
    try:
        return _current.get(), _locks.get()
    except LookupError:
        current = WeakValueDictionary[str, Reactor]()
        lock = anyio.Lock(fast_acquire=True)
        _current.set(current)
        _locks.set(lock)
        return current, lock


def _named_devices() -> set[str]:
    try:
        return _named.get()
    except LookupError:
        named = set[str]()
        _named.set(named)
        return named


async def acquire_reactor(provider: Provider) -> Reactor:
    """Return the running loop's reactor of a provider, and count one more user. Open it if needed.

    Raises:
        NoDeviceError: the connection manager cannot be opened; the message has the reason.
        ForkError: the loop was inherited from the parent of this process.
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
