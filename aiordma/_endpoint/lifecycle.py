"""The life of a queue pair or of a shared receive queue: its phase, the cause of its end, its
timers, and the callbacks for its end."""

from collections.abc import Callable
from enum import IntEnum

from aiordma._base.errors import detached
from aiordma._base.origin import origin
from aiordma._loop.event_loop import EventLoop, Timer
from aiordma._loop.threads import Once

__all__ = ("Lifecycle", "Phase")


class Phase(IntEnum):
    """How far something is on the way to its end. It only goes forward, and may skip phases."""

    LIVE = 0
    FLUSHING = 1
    """It ends for its cause; the device may still flush its requests."""
    DESTROYING = 2
    """The device's object is being destroyed, in a thread."""
    ENDED = 3
    """The device's object is gone, and every request has ended."""
    CLOSED = 4
    """It was closed as well: all that it had is given back."""


class Lifecycle:
    """See the module. One for each endpoint and each shared receive queue."""

    def __init__(self, loop: EventLoop) -> None:
        self.phase: Phase = Phase.LIVE
        self.is_closing: bool = False
        """Whether its user has closed it."""
        self.origin: str = origin()
        """Where in the program it was opened; "" if that is not known."""
        self.ended: Once = Once(loop)
        """Set in the phase ENDED."""
        self.closed: Once = Once(loop)
        """Set once everything is given back."""
        self.on_end: list[Callable[[], object]] = []
        """Called in the phase ENDED."""
        self.on_close: list[Callable[[], object]] = []
        """Called in the phase CLOSED, before anything is given back."""
        self._loop = loop
        self._cause: Exception | None = None
        self._timers: dict[str, Timer] = {}

    @property
    def cause(self) -> Exception | None:
        """Why it has ended, or is about to; stored, so raise only what `detached` makes of it."""
        return self._cause

    @cause.setter
    def cause(self, cause: Exception | None) -> None:
        self._cause = None if cause is None else detached(cause)

    def advance(self, phase: Phase) -> bool:
        """Go forward to a phase, and return whether it was not reached before."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the device's object is gone, and every request has ended."""
        return self.phase >= Phase.ENDED

    # -- timers -------------------------------------------------------------------------------

    def set_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call back after so many seconds, in place of an earlier timer of that name."""
        self.cancel_timers(name)
        self._timers[name] = self._loop.call_later(seconds, callback)

    def cancel_timers(self, *names: str) -> None:
        """Cancel those that are set, or a loop that ends would wait for them."""
        for name in names:
            timer = self._timers.pop(name, None)
            if timer is not None:
                timer.cancel()

    def has_timer(self, name: str) -> bool:
        """Whether it was set, and not cancelled since."""
        return name in self._timers
