"""Slots of a work queue: taken at the post, given back at the completion.

`try_take` is for the post functions, which raise when there is none; `take` waits its turn, first
come first served, for the coroutines, which hand the Slot on to the post. A task that was woken
runs some time later, and in which order woken tasks run is the event loop's choice. So one task at
a time is woken, and nobody else takes a slot before that task has gone on.
"""

from collections import deque
from typing import Self

from aiordma._base.errors import detached
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._native import Slots

__all__ = ("Credits", "Slot")


class Slot:
    """A slot that was taken. At the end of a `with` block it is given back, unless a request has
    taken it over, which gives it back as it ends."""

    __slots__ = ("_owner",)

    def __init__(self, owner: "Credits") -> None:
        self._owner: Credits | None = owner

    def hand_over(self) -> None:
        """A request has it from now on."""
        self._owner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.give()


class _Turn:
    __slots__ = ("error", "waiter")

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter
        self.error: Exception | None = None


class Credits(Slots):
    """A counted resource with a queue in front of it."""

    def __init__(self, loop: EventLoop, total: int) -> None:
        super().__init__()
        self._loop = loop
        self._turns: deque[_Turn] = deque()
        self._granted: _Turn | None = None
        """Whose task has a slot, was woken, and has not gone on."""
        self._error: Exception | None = None
        self.total = total
        self.free: int = total

    def try_take(self) -> bool:
        """Take one if one is free and nobody waits for it."""
        if self.free and not self.waiting:
            self.free -= 1
            return True
        return False

    def try_take_many(self, count: int) -> bool:
        """Take so many at once, or none."""
        if self.free < count or (count and self.waiting):
            return False
        self.free -= count
        return True

    async def take(self) -> Slot:
        """Take one, waiting for it if need be. A cancelled wait takes none.

        Raises:
            RdmaError: what `fail` was given.
        """
        if self.try_take():
            return Slot(self)
        if self._error is not None:
            raise detached(self._error)
        turn = _Turn(self._loop.waiter())
        try:
            self._turns.append(turn)
            self._count()
            await turn.waiter.wait()
        except BaseException:
            if turn is self._granted:
                self.free += 1  # woken and cancelled at once: the next in line gets it
            self._leave(turn)
            raise
        self._leave(turn)
        if turn.error is not None:
            raise detached(turn.error)
        return Slot(self)

    def give(self) -> None:
        """Give one back: to the first in line, or to the free ones."""
        self.free += 1
        self.grant()

    def grant(self) -> None:
        """Give a free slot to the first in line. Idempotent: what an interrupt (KeyboardInterrupt)
        left undone, another call does."""
        if self._granted is None and self.free and self._turns:
            self._granted = self._turns.popleft()
            self.free -= 1
        if self._granted is not None:
            self._granted.waiter.wake()

    def fail(self, error: Exception) -> None:
        """End the waiting, now and later, with an error."""
        self._error = error
        while self._turns:
            turn = self._turns.popleft()
            turn.error = error
            turn.waiter.wake()
        self._count()

    def _leave(self, turn: _Turn) -> None:
        if turn is self._granted:
            self._granted = None
        elif turn in self._turns:
            self._turns.remove(turn)
        self._count()
        self.grant()

    def _count(self) -> None:
        self.waiting: int = len(self._turns) + (self._granted is not None)
