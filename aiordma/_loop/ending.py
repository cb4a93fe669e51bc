"""The steps of an object's end, which are all done, whatever one of them raises."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from aiordma._loop.event_loop import EventLoop

__all__ = ("ATTEMPTS", "RETRY_SECONDS", "Ending", "end", "repeated")

logger: logging.Logger = logging.getLogger("aiordma")

RETRY_SECONDS = 0.05
"""Seconds between a step that found no memory and the next attempt."""

ATTEMPTS = 20
"""Attempts at most that find no memory after the loop's end, of all steps of an end together."""


class Ending:
    """Functions to call in turn. A step that finds no memory (MemoryError) is done again, later, as
    often as needed: the steps behind it wait for that. So each step can be repeated if it raises a
    MemoryError. (It counts and removes last, or it makes an Ending first.) No other step is called
    twice, also if `run` is.

    If there is no memory for a timer either, the loop's thread sleeps instead. If the loop has
    ended, or ends before its timer, the step is done again at once, at most `ATTEMPTS` times.

    Only the constructor raises MemoryError, `run` never does. So make an Ending before the change
    that must not be without it.
    """

    def __init__(self, loop: EventLoop, *steps: Callable[[], object]) -> None:
        self._loop = loop
        self._steps = steps
        self._done = 0  # steps; removing one from a list can take memory
        self._attempts = ATTEMPTS

    def run(self) -> None:
        """Call the functions. An exception of one of them is raised behind the last one, or behind
        the last one before a step that found no memory: the first exception, or an interrupt
        (KeyboardInterrupt)."""
        raised: BaseException | None = None
        try:
            self._loop.returned.pop(self, None)
            while self._done < len(self._steps):
                try:
                    self._steps[self._done]()
                except MemoryError:
                    if self._may_repeat():
                        if self._continues_later():
                            break
                        continue
                    with suppress(MemoryError):
                        logger.error("no memory for a step of an end after the event loop's end")
                except BaseException as error:
                    if raised is None or not isinstance(error, Exception):
                        raised = error
                self._done += 1
            if raised is not None:
                raise raised
        finally:
            del raised  # its traceback holds this frame

    def _may_repeat(self) -> bool:
        with suppress(MemoryError):
            if self._loop.has_ended:
                self._attempts -= 1
        return self._attempts > 0

    def _continues_later(self) -> bool:
        try:
            if self._loop.has_ended:
                return False
            self._loop.returned[self] = self.run  # if the loop ends before the timer
            self._loop.call_later(RETRY_SECONDS, self.run)
        except MemoryError:
            self._loop.returned.pop(self, None)
            time.sleep(RETRY_SECONDS)
            return False
        return True


def end(loop: EventLoop, *steps: Callable[[], object]) -> None:
    """Run functions as an Ending does, also if there is no memory for an Ending at first. A caller
    tries the first one itself before: already the call of this function needs memory."""
    attempts = ATTEMPTS
    while True:
        try:
            ending = Ending(loop, *steps)
        except MemoryError:
            attempts -= 1
            if not attempts:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            break
    ending.run()


def repeated(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls a closing one, again as long as it finds no memory: the closes
    of objects are idempotent."""

    def repeat() -> None:
        attempts = ATTEMPTS
        while True:
            try:
                function()
            except MemoryError:
                attempts -= 1
                if not attempts:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return

    return repeat
