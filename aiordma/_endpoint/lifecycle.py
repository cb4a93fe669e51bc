"""The lifecycle of a queue pair or a shared receive queue: its phase, the cause of its end, its
timers, and the callbacks at its end."""

from collections.abc import Callable
from enum import IntEnum

from aiordma._base.errors import detached
from aiordma._base.origin import Place, origin
from aiordma._loop.event_loop import EventLoop, Timer
from aiordma._loop.threads import Once

__all__ = ("Lifecycle", "Phase")


class Phase(IntEnum):
    """The phase of an object. It only increases, and may skip phases."""

    LIVE = 0
    FLUSHING = 1
    """The object is ending; the device may still flush its requests."""
    DESTROYING = 2
    """A thread is destroying the device's object."""
    ENDED = 3
    """The device's object is destroyed, and every request has completed."""
    CLOSED = 4
    """The object was also closed, and its resources are released."""


class Lifecycle:
    """See the module. Each endpoint and each shared receive queue has one."""

    def __init__(self, loop: EventLoop) -> None:
        self.phase: Phase = Phase.LIVE
        self.is_closing: bool = False
        """Whether its user has closed it."""
        self.origin: Place = origin()
        """The line of the program that opened it; "" if it is not known."""
        self.ended: Once = Once(loop)
        """Set in the phase ENDED."""
        self.closed: Once = Once(loop)
        """Set once all resources are released."""
        self.on_end: list[Callable[[], object]] = []
        """Called in the phase ENDED."""
        self.on_close: list[Callable[[], object]] = []
        """Called in the phase CLOSED, before any resource is released."""
        self._loop = loop
        self._cause: Exception | None = None
        self._timers: dict[str, Timer] = {}

    @property
    def cause(self) -> Exception | None:
        """The cause of its end, once it is ending. It is stored: raise only `detached` copies."""
        return self._cause

    @cause.setter
    def cause(self, cause: Exception | None) -> None:
        self._cause = None if cause is None else detached(cause)

    def advance(self, phase: Phase) -> bool:
        """Enter a phase. Return False, and do nothing, if it was reached before."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True

    def enter(self, phase: Phase, begin: Callable[[], object]) -> None:
        """Enter a phase as `advance` does, and call the function that begins it. If that raises
        MemoryError, because it has done nothing, the phase is the earlier one."""
        before = self.phase
        if not self.advance(phase):
            return
        try:
            begin()
        except MemoryError:
            self.phase = before
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the device's object is destroyed, and every request has completed."""
        return self.phase >= Phase.ENDED

    # -- timers -------------------------------------------------------------------------------

    def set_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call the callback after so many seconds. This replaces an earlier timer of that name,
        which is kept if there is no memory for this one."""
        timer = self._loop.call_later(seconds, callback)
        self.cancel_timers(name)
        self._timers[name] = timer

    def cancel_timers(self, *names: str) -> None:
        """Cancel these timers if they are set. A loop that ends would wait for them."""
        for name in names:
            timer = self._timers.pop(name, None)
            if timer is not None:
                timer.cancel()

    def has_timer(self, name: str) -> bool:
        """Whether the timer was set, and has not been cancelled since."""
        return name in self._timers
