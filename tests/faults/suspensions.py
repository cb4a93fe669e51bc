"""Cancels an awaitable at its first, second, third ... suspension."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import anyio
import sniffio

__all__ = ("CANCELLED", "MODES", "Cut")

CANCELLED = object()
"""What `Cut.run` returns if the cancellation has ended the awaitable."""
MODES = ("scope", "task")
"""anyio's and trio's cancellation, which repeats itself at each wait; and asyncio's `Task.cancel`,
which comes once."""


class _Counted:
    """Awaits an awaitable, counts how often it suspends, and calls a function at one of them."""

    def __init__(self, awaitable: Awaitable[Any], at: int, cancel: Callable[[], object]) -> None:
        self._awaitable = awaitable
        self._at = at
        self._cancel = cancel
        self.count = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._awaitable.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is not None and not hasattr(steps, "throw"):
                    raise error  # as `yield from` does with an iterator of C
                if error is not None:
                    trap = steps.throw(error)
                else:
                    trap = next(steps) if value is None else steps.send(value)
            except StopIteration as stop:
                return stop.value
            self.count += 1
            if self.count == self._at:
                self._cancel()
            value = error = None
            try:
                value = yield trap
            except BaseException as raised:
                error = raised


class Cut:
    """One cancellation, of the awaitable that is given to `run`.

    Args:
        at: the number of the suspension, from 1.
        mode: one of MODES.
    """

    def __init__(self, at: int, mode: str) -> None:
        self.at = at
        self.mode = mode
        self.reached = False
        """Whether the awaitable suspended so often."""

    async def run(self, awaitable: Awaitable[Any]) -> Any:
        """Await it, and cancel it at its suspension. Return its result, or CANCELLED."""
        assert not self.reached, "the scenario uses its cut twice"
        if self.mode == "scope":
            with anyio.CancelScope() as scope:
                return await _Counted(awaitable, self.at, lambda: self._reach(scope.cancel))
            return CANCELLED
        assert sniffio.current_async_library() == "asyncio"
        loop = asyncio.get_running_loop()

        async def counted() -> Any:
            return await _Counted(
                awaitable, self.at, lambda: self._reach(lambda: loop.call_soon(task.cancel))
            )

        task = asyncio.ensure_future(counted())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # a time limit of the scenario
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
            raise
        return CANCELLED if task.cancelled() else task.result()

    def _reach(self, cancel: Callable[[], object]) -> None:
        self.reached = True
        cancel()
