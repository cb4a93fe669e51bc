"""The event loop of another simulation: callbacks and timers on virtual time, in an order that a
seed decides. It has no descriptors, threads and sockets: what asks for them fails.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ("OtherLoop",)

Result = TypeVar("Result")


_Base: Any = asyncio.AbstractEventLoop  # whose methods are abstract for a type checker only


class OtherLoop(_Base):  # type: ignore[misc]
    """See the module. What it does not have raises NotImplementedError, as of the base class."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._is_running = False
        self.errors: list[dict[str, Any]] = []

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end."""
        task: asyncio.Task[Result] = self.create_task(main)
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                self._step()
        finally:
            asyncio._set_running_loop(None)
            self._is_running = False
        return task.result()

    def _step(self) -> None:
        if not self._ready:
            self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])
        handle = self._ready.pop(self._random.randrange(len(self._ready)))
        if not handle.cancelled():
            handle._run()

    def time(self) -> float:
        return self._now

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def get_task_factory(self) -> None:
        return None

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)
