"""Slots of a work queue: taken at the post, given back at the completion.

`try_take` is for the post functions, which raise when there is none; `take` waits its turn, first
come first served, for the coroutines.
"""

from collections import deque

from aiordma.counted import Slots
from aiordma.event_loop import EventLoop, Waiter

__all__ = ("Credits",)


class _Turn:
    __slots__ = ("error", "granted", "waiter")

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.granted = False
        self.error: Exception | None = None


class Credits(Slots):
    """A counted resource with a queue in front of it."""

    def __init__(self, loop: EventLoop, total: int) -> None:
        super().__init__()
        self._loop = loop
        self._turns: deque[_Turn] = deque()
        self._error: Exception | None = None
        self.total = total
        self.free = total

    def try_take(self) -> bool:
        """Take one if one is free and nobody waits for it."""
        if self.free and not self._turns:
            self.free -= 1
            return True
        return False

    def try_take_many(self, count: int) -> bool:
        """Take so many at once, or none."""
        if self.free < count or (count and self._turns):
            return False
        self.free -= count
        return True

    async def take(self) -> None:
        """Take one, waiting for it if need be. A cancelled wait takes none.

        Raises:
            RdmaError: what `fail` was given.
        """
        if self.try_take():
            return
        if self._error is not None:
            raise self._error.with_traceback(None)
        turn = _Turn(self._loop.waiter())
        self._turns.append(turn)
        self.waiting += 1
        try:
            await turn.waiter.wait()
        except BaseException:
            if turn.granted:
                self.give()  # woken and cancelled at once: the next in line gets it
            elif turn in self._turns:
                self._turns.remove(turn)
                self.waiting -= 1
            raise
        if turn.error is not None:
            raise turn.error.with_traceback(None)

    def give(self) -> None:
        """Give one back: to the first in line, or to the free ones."""
        if self._turns:
            turn = self._turns.popleft()
            self.waiting -= 1
            turn.granted = True
            turn.waiter.wake()
        else:
            self.free += 1

    def fail(self, error: Exception) -> None:
        """End the waiting, now and later, with an error."""
        self._error = error
        while self._turns:
            turn = self._turns.popleft()
            self.waiting -= 1
            turn.error = error
            turn.waiter.wake()
