"""The end of an object of the device: of a connection's or a datagram socket's queue pair, of a
shared receive queue, a protection domain, or a listener.

    OPEN ──end──▶ FLUSHING ──▶ DESTROYING ──▶ (ended) ──close──▶ CLOSED

`end` gives the cause, and the first cause counts. The owner says when what it has posted is
flushed. One call then destroys what the device has of it: on the event loop's thread, or in a
worker where the driver blocks. Only after that are its requests failed and its memory released.
What the program still holds, such as registered regions, lasts until it closes the object, too.

Everything runs in callbacks, not in a task, so that no cancellation stops an end half way.

One rule covers a driver that refuses to destroy, a KeyboardInterrupt at an arbitrary bytecode, lack
of memory and every other exception that nobody foresaw: **leak, never free**. The object breaks:
its waiters get an error, it stays in memory for the life of the process with all that it refers to,
one line goes to the log, and nothing is tried again.
"""

import logging
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from aiordma._base.errors import VerbsCallError, detached
from aiordma._base.origin import Place, origin, warn_unclosed, with_origin
from aiordma._base.process import here
from aiordma._loop.event_loop import EventLoop, Timer, protected
from aiordma._loop.threads import Once, outwait
from aiordma._native import leak
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import Reactor

logger: logging.Logger = logging.getLogger("aiordma")


class Phase(IntEnum):
    """The phase of an object. It only increases."""

    OPEN = 0
    FLUSHING = 1
    """It is ending; the device may still flush its requests."""
    DESTROYING = 2
    """What the device has of it is being destroyed, or was."""
    CLOSED = 3
    """The program has closed it, too, and everything is released."""


class Owner(Protocol):
    """An object that ends by a Teardown. Its methods are its steps, in their order; each runs on
    the event loop's thread, except `_destroy` and what `_release` returns. A class that has nothing
    to do in a step inherits it from here."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return repr(self)

    def _closing(self) -> Exception:
        """Note that the program has closed it. Return an error: the cause of its end, if it has no
        other."""

    def _flush(self) -> None:
        """Begin to end. Call `Teardown.destroy` as soon as nothing is left to flush; if
        `Teardown.is_hurried` is not set, not in the middle of the program's code."""

    def _hurry(self) -> None:
        """Do at once what `_flush` has left to a timer, if it can be done: `Teardown.is_hurried` is
        set since."""
        return

    def _destroy(self) -> None:
        """Destroy what the device has of it. Raise what the driver refuses."""

    def _destroyed(self) -> None:
        """Fail the requests that have not completed, and release what only they needed."""
        return

    def _release(self) -> Callable[[], object] | None:
        """Release the rest, once the program has closed it. Return a function that makes the
        driver's calls for that; None: there are none."""
        return None

    def _released(self) -> None:
        """Leave what it was created on: these calls have returned."""
        return

    def _abandon(self, why: str) -> None:
        """Fail the requests that have not completed, and let them keep their memory: the object
        leaks."""
        return


class Above(Protocol):
    """What is built on an object, and closes it: a stream on a connection."""

    @property
    def _is_ending(self) -> bool:
        """Whether it is ending, and will close the object within a stated time."""

    def _end_soon(self) -> None:
        """Close the object, at once or within a stated time: the event loop ends, or the program
        has withdrawn its connect. Idempotent."""


class Teardown:
    """See the module. Each object of the device has one, and ends nowhere else."""

    cause: Exception | None = None
    """The cause of its end, once it is ending. It is stored: raise only `detached` copies, and set
    it only to an error that nothing raises."""

    is_closing: bool = False
    """Whether the program has closed it."""

    is_hurried: bool = False
    """Whether a task waits for the end, so that no post is under way in the middle of which it was
    begun; or the loop has ended."""

    is_reported: bool = False
    """Whether a warning has named it as left open, or none is to."""

    has_ended: bool = False
    """Whether the device has nothing of it any more, and every request has completed."""

    refusal: Exception | None = None
    """Why it has leaked. It is stored: raise only `detached` copies."""

    _above: weakref.ReferenceType[Above] | None = None
    _ended: Once | None = None
    _closed: Once | None = None
    _is_releasing = False
    _leaks_for: Exception | None = None
    """Why an object on it has leaked."""

    def __init__(
        self,
        reactor: Reactor,
        owner: Owner,
        hub: DeviceHub | None = None,
        opened_at: Place | None = None,
    ) -> None:
        self.hub: DeviceHub | None = hub
        """That of its device; None: it needs none."""
        self.phase: Phase = Phase.OPEN
        self.process: int = here.pid
        self.origin: Place = origin() if opened_at is None else opened_at
        """The line of the program that opened it; "" if it is not known."""
        self.on_ended: list[Callable[[], object]] = []
        """Called when `ended` is set, once."""
        self.on_closed: list[Callable[[], object]] = []
        """Called when the program has closed it, after `on_ended`, before the rest is released."""
        self._owner = owner
        self._reactor = reactor
        self._loop: EventLoop = reactor.loop
        self._timers: dict[str, Timer] = {}
        reactor.enter(self)

    @property
    def above(self) -> Above | None:
        """What is built on it, and closes it. Held weakly: the program holds it."""
        return None if self._above is None else self._above()

    @above.setter
    def above(self, above: Above) -> None:
        self._above = weakref.ref(above)

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the process that made the object."""
        return self.process != here.pid

    @property
    def ended(self) -> Once:
        """Set with `has_ended`. Most objects end before a task waits for it."""
        if self._ended is None:
            self._ended = Once(self._loop, is_set=self.has_ended)
        return self._ended

    @property
    def closed(self) -> Once:
        """Set in the phase CLOSED. In a forked child, the object belongs to the parent process, and
        there is nothing to wait for."""
        if self._closed is None:
            is_set = self.phase is Phase.CLOSED or self.process != here.pid
            self._closed = Once(self._loop, is_set=is_set)
        return self._closed

    # -- timers -----------------------------------------------------------------------------------

    def set_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call a step after so many seconds; 0: in the loop's next turn; at once if the loop has
        ended. This replaces an earlier timer of that name."""
        earlier = self._timers.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        if self._loop.has_ended:
            self.step(callback)
            return
        self._timers[name] = self._loop.call_later(seconds, lambda: self.step(callback))

    def hold_timer(self, name: str, timer: Timer) -> None:
        """Cancel the owner's timer together with the others. There is none of that name yet."""
        self._timers[name] = timer

    def cancel_timers(self) -> None:
        """Cancel all timers. A loop that ends would wait for them."""
        while self._timers:
            self._timers.popitem()[1].cancel()

    def has_timer(self, name: str) -> bool:
        """Whether the timer was set, and has not been cancelled since."""
        return name in self._timers

    # -- the end ----------------------------------------------------------------------------------

    @protected
    def step(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function that changes the object. If it raises, the object breaks, and nothing
        else does."""
        try:
            function(*arguments)
        except Exception as error:
            self._break(error)
        except BaseException as interrupt:
            self._break(interrupt)
            raise

    def end(self, cause: Exception) -> None:
        """End the object for a cause. The first cause counts; later calls do nothing."""
        if self.cause is None:
            self.cause = detached(cause)
        if self.phase is Phase.OPEN:
            self.phase = Phase.FLUSHING
            if self._timers:
                self.cancel_timers()
            self.step(self._owner._flush)

    def destroy(self) -> None:
        """Destroy what the device has of it, because nothing is left to flush. Idempotent."""
        if self.phase is not Phase.FLUSHING:
            return
        if self._leaks_for is not None:
            self._break(self._leaks_for)
        else:
            if self._timers:
                self.cancel_timers()
            self.phase = Phase.DESTROYING
            self._reactor.destroy(self._owner._destroy, self._destroyed)

    def keep_for(self, error: Exception) -> None:
        """Leak the object at its end: one that was created on it has leaked, for this error."""
        self._leaks_for = self._leaks_for or error

    def _destroyed(self, error: BaseException | None) -> None:
        if error is not None:
            self._break(error)
        else:
            self.step(self._finish)

    def _finish(self) -> None:
        self._owner._destroyed()
        self._set_ended()
        if self.is_closing:
            self._release()

    def _set_ended(self) -> None:
        self.has_ended = True
        if self._ended is not None:
            self._ended.set()
        while self.on_ended:
            self.on_ended.pop(0)()

    def close(self) -> None:
        """End the object, and release everything, in the background, also outside of its loop.
        Idempotent."""
        self._close(is_hurried=self._loop.has_ended)

    @protected
    def _close(self, is_hurried: bool) -> None:
        self.is_closing = True
        if self.process != here.pid:
            if self._closed is not None:  # its resources belong to the parent process
                self._closed.set()
            return
        self.is_hurried |= is_hurried
        if self.phase is Phase.FLUSHING and is_hurried:
            self.step(self._owner._hurry)
        cause = self._owner._closing()
        if self.cause is None:
            self.cause = cause
        self.end(cause)
        if self.has_ended and not self._is_releasing:
            self.step(self._release)

    def _release(self) -> None:
        if self._is_releasing or self.phase is Phase.CLOSED:
            return
        self._is_releasing = True
        while self.on_closed:
            self.on_closed.pop(0)()
        release = self._owner._release()
        if release is None:
            self._released(None)
        else:
            self._reactor.destroy(release, self._released)

    def _released(self, error: BaseException | None) -> None:
        if error is not None:
            self._break(error)
            return
        self.phase = Phase.CLOSED
        self._owner._released()
        self._reactor.leave(self)
        if self._closed is not None:
            self._closed.set()

    # -- the rule ---------------------------------------------------------------------------------

    def _break(self, error: BaseException) -> None:
        """Leak the object: keep it, and all that it refers to, for the life of the process."""
        leak(self)
        self._reactor.is_leaking = True
        if self.refusal is not None:
            return  # what follows has raised again
        reason = error.strerror if isinstance(error, VerbsCallError) else repr(error)
        why = (
            f"it was not destroyed ({reason}): the device may still access its memory, which "
            "stays allocated for the life of the process"
        )
        refusal = error if isinstance(error, Exception) else RuntimeError(why)
        self.refusal = detached(refusal)
        if self.cause is None:
            self.cause = self.refusal
        is_refusal = isinstance(error, VerbsCallError)
        logger.error("%s: %s", self._owner.name, why, exc_info=None if is_refusal else error)
        self.phase = Phase.CLOSED
        self.cancel_timers()
        self._reactor.leave(self)
        try:
            self._owner._abandon(why)
            self._set_ended()
            while self.on_closed:
                self.on_closed.pop(0)()
        finally:
            self.has_ended = True
            if self._ended is not None:
                self._ended.set()
            if self._closed is not None:
                self._closed.set()

    # -- closing from outside -------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the object and wait for it, also if the task is cancelled.

        Raises:
            EventLoopError: as in `Reactor.require_here`.
            Exception: why the object has leaked.
        """
        was_closed = self.phase is Phase.CLOSED
        if self.process != here.pid:
            self.close()
        elif not was_closed:
            if not self._loop.is_running_here():
                self._reactor.require_here(self._owner, self.close)
            self._close(is_hurried=True)
            if self.phase is not Phase.CLOSED:
                await outwait(self.closed)
            elif self._loop.asyncio_loop is None:
                await self._loop.checkpoint()  # trio's rule
        if self.refusal is not None:
            raise detached(self.refusal)

    # -- at the loop's end (Closable) -----------------------------------------------------------

    def forget(self) -> None:
        """Close an object that the program did not close, with a warning. Works in every thread,
        and after the loop's end."""
        text, self.is_reported = self.left_open(), True
        try:
            if text:
                warn_unclosed(f"unclosed {text}", self._owner, self.origin)
        finally:
            if self._loop.has_ended:
                self._reactor.close_elsewhere(self.close)
            else:
                self._loop.call_from_thread(self.close)

    def left_open(self) -> str:
        """Return its name for the warning that the program did not close it; "" once it has been
        reported, or is being closed."""
        above = self.above
        if self.is_reported or self.is_closing or self.is_inherited:
            return ""
        if above is not None and above._is_ending:
            return ""
        return with_origin(self._owner, self.origin)

    def end_with_loop(self) -> None:
        """Close the object, by what is built on it."""
        above = self.above
        if above is None or self.is_inherited:
            self.close()
        else:
            above._end_soon()
