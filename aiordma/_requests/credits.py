"""Slots of a work queue: a post takes a slot, and the completion gives it back.

The post functions use `try_take`, and raise an error if no slot is free. The coroutines use `take`,
which waits, first come, first served, and they pass the Slot to the post. The event loop runs woken
tasks later, and in any order. So only one task is woken at a time, and no other task takes a slot
until it has run.
"""

from collections import deque
from typing import Self

from aiordma._base.errors import detached
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._native import Slots


class Slot:
    """A slot that was taken, or that `Credits.take_into` will take in its `with` block. The end of
    the block gives it back, unless it was handed over to a request. The request gives it back when
    it completes."""

    __slots__ = ("_owner",)

    def __init__(self, owner: "Credits | None" = None) -> None:
        self._owner = owner

    @property
    def is_taken(self) -> bool:
        """Whether it is to be given back."""
        return self._owner is not None

    def hand_over(self) -> None:
        """Leave the slot to a request."""
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
    """A number of slots, and a queue of tasks that wait for them."""

    waits: int = 0
    """How often a task waited for a slot."""

    _granted: _Turn | None = None
    """The turn whose task has a slot and was woken, but has not run yet."""

    _error: Exception | None = None

    def __init__(self, loop: EventLoop, total: int) -> None:
        super().__init__()
        self._loop = loop
        self._turns: deque[_Turn] = deque()
        self.total = total
        self.free: int = total

    def try_take(self) -> bool:
        """Take a slot if one is free and no task waits."""
        if self.free > 0 and not self.waiting:
            self.free -= 1
            return True
        return False

    def take_into(self, slot: Slot) -> bool:
        """Take a slot as `try_take` does, for an object whose `with` block has begun."""
        if not self.try_take():
            return False
        slot._owner = self
        return True

    def take_reserved(self) -> Slot:
        """Take a slot in addition to all others. The queue must have an entry more than slots, and
        no such slot may be taken."""
        self.free -= 1
        return Slot(self)

    async def take(self) -> Slot:
        """Take a slot, and wait for it if none is free. A cancelled wait takes none.

        Raises:
            RdmaError: the error that was passed to `fail`.
        """
        if self.try_take():
            return Slot(self)
        if self._error is not None:
            raise detached(self._error)
        turn = _Turn(self._loop.waiter())
        self._turns.append(turn)
        self.waits += 1
        self._count()
        try:
            await turn.waiter.wait()
        except BaseException:
            if turn is self._granted:
                self.free += 1  # woken and then cancelled: the next task gets the slot
            self._leave(turn)
            raise
        self._leave(turn)
        if turn.error is not None:
            raise detached(turn.error)
        return Slot(self)

    def give(self) -> None:
        """Give a slot back: to the first waiting task, or to the free slots."""
        self.free += 1
        self.grant()

    def grant(self) -> None:
        """Give a free slot to the first waiting task."""
        if self._granted is None and self.free > 0 and self._turns:
            self.free -= 1
            self._granted = self._turns.popleft()
            self._granted.waiter.wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in all current and future waits."""
        self._error = error
        if self._turns:
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
