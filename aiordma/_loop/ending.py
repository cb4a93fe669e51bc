"""The steps of an object's end, which are all done, whatever one of them raises."""

from collections.abc import Callable

from aiordma._loop.event_loop import EventLoop

__all__ = ("ATTEMPTS", "RETRY_SECONDS", "Ending")

RETRY_SECONDS = 0.05
"""Seconds between a step that found no memory and the next attempt."""

ATTEMPTS = 20
"""Attempts at most that find no memory, of all steps of an end together."""


class Ending:
    """Functions to call in turn. A step that finds no memory (MemoryError) is done again, later:
    the steps behind it wait for that. So each step can be repeated if it raises a MemoryError.

    If the loop has ended, or if there is no memory for a timer either, it is done again at once.
    """

    def __init__(self, loop: EventLoop, *steps: Callable[[], object]) -> None:
        self._loop = loop
        self._left = list(reversed(steps))
        self._attempts = ATTEMPTS

    def run(self) -> None:
        """Call the functions. An exception of one of them is raised behind the last one: the first
        exception, or an interrupt (KeyboardInterrupt)."""
        raised: BaseException | None = None
        try:
            while self._left:
                try:
                    self._left[-1]()
                except MemoryError as error:
                    self._attempts -= 1
                    if self._attempts > 0:
                        if self._continues_later():
                            break
                        continue
                    raised = raised or error
                except BaseException as error:
                    if raised is None or not isinstance(error, Exception):
                        raised = error
                self._left.pop()
            if raised is not None:
                raise raised
        finally:
            del raised  # its traceback holds this frame

    def _continues_later(self) -> bool:
        try:
            if self._loop.has_ended:
                return False
            self._loop.call_later(RETRY_SECONDS, self.run)
        except MemoryError:
            return False
        return True
