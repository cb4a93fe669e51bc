"""The event loop of a simulated host: asyncio's, on virtual time, with the host's descriptors."""

import asyncio
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from aiordma._loop.private import leave_the_system, timers
from aiordma._native import ffi, lib

__all__ = (
    "MOST_EVENTS",
    "NEVER",
    "NO_HOST",
    "SECOND",
    "Descriptors",
    "SimulatedLoop",
    "Turns",
    "numbers",
)

Result = TypeVar("Result")

SECOND = 1_000_000_000
"""Of the simulation's time, which counts nanoseconds."""
NEVER = 0xFFFFFFFFFFFFFFFF
NO_HOST = -1
MOST_EVENTS = 64
EPOLLIN, EPOLLOUT = 1, 4

Wanted = tuple[Callable[..., object], tuple[Any, ...]]

numbers: Iterator[int] = itertools.count(1)


class Turns(Protocol):
    """What a loop needs of the scheduler."""

    now: int

    def wake(self, loop: "SimulatedLoop") -> None:
        """Give the loop a turn soon."""

    def wake_at(self, when: int, loop: "SimulatedLoop") -> None:
        """Give the loop a turn at this time."""

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loops' exception handler."""


class _NoTurns:
    """In place of the scheduler, for a loop whose host has crashed: it keeps nothing else alive."""

    def __init__(self, now: int) -> None:
        self.now = now

    def wake(self, loop: "SimulatedLoop") -> None:
        pass

    def wake_at(self, when: int, loop: "SimulatedLoop") -> None:
        pass

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        pass


class Descriptors:
    """The descriptors of the current host that its loop watches."""

    def __init__(self) -> None:
        self._selector: int | None = None
        self._callbacks: dict[int, dict[int, Wanted]] = {}
        self._fds = ffi.new("int[]", MOST_EVENTS)
        self._events = ffi.new("uint32_t[]", MOST_EVENTS)

    def _watch(self, fd: int) -> None:
        if self._selector is None:
            self._selector = lib.aiordma_simulated_selector()
        wanted = self._callbacks.get(fd, {})
        events = EPOLLIN * (EVENT_READ in wanted) | EPOLLOUT * (EVENT_WRITE in wanted)
        error = lib.aiordma_simulated_watch(self._selector, fd, events)
        if error and events:
            raise OSError(error, f"{os.strerror(error)}: descriptor {fd} is none of this host's")

    def add(
        self, fd: int, event: int, callback: Callable[..., object], args: tuple[Any, ...] = ()
    ) -> None:
        """Call the callback when the descriptor is readable or writable."""
        self._callbacks.setdefault(fd, {})[event] = callback, args
        self._watch(fd)

    def remove(self, fd: int, event: int) -> bool:
        """Undo `add`. Return whether there was one."""
        wanted = self._callbacks.get(fd, {})
        if wanted.pop(event, None) is None:
            return False
        self._watch(fd)
        if not wanted:
            del self._callbacks[fd]
        return True

    def take_ready(self) -> list[tuple[int, int]]:
        """Return the descriptors that are ready, in an order that the seed decides."""
        if self._selector is None:
            return []
        fds, events = self._fds, self._events
        count = lib.aiordma_simulated_ready(self._selector, fds, events, MOST_EVENTS)
        return [(fds[i], events[i]) for i in range(count)]

    def wanted(self, ready: Sequence[tuple[int, int]]) -> Iterator[Wanted]:
        """Yield the callbacks of descriptors that are ready."""
        for fd, events in ready:
            wanted = self._callbacks.get(fd, {})
            for event, others in ((EVENT_READ, EPOLLOUT), (EVENT_WRITE, EPOLLIN)):
                if event in wanted and events & ~others:
                    yield wanted[event]

    def wake(self) -> None:
        """Let the network count the host as awake if a descriptor is ready still."""
        if self._selector is not None:
            lib.aiordma_simulated_wake(self._selector)


class SimulatedLoop(asyncio.BaseEventLoop):
    """See the module.

    Attributes:
        host: the number of its host; NO_HOST: it has none, and no device.
        number: one that no other loop has: for the package, each is a process of its own.
        is_awake: whether it waits for a turn.
    """

    def __init__(self, turns: Turns, host: int, name: str) -> None:
        super().__init__()
        self.host = host
        self.number: int = next(numbers)
        self.is_awake = False
        self._turns: Turns = turns
        self._name = name
        self._rate = 1.0
        self._offset = 0.0
        self._engine_is_due = NEVER
        self._descriptors = Descriptors()
        leave_the_system(self, self._descriptors.take_ready, self._serve)
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._numbers = itertools.count()
        self.set_exception_handler(turns.failed)

    def __repr__(self) -> str:
        return f"<the event loop of {self._name}>"

    def lose(self) -> None:
        """Have no more turns: the host has crashed. What others schedule here never runs."""
        self._turns = _NoTurns(self._turns.now)
        self.set_exception_handler(self._turns.failed)

    # -- time ----------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the host's time, in seconds."""
        return self._time_at(self._turns.now)

    def _time_at(self, now: int) -> float:
        return self._offset + now / SECOND * self._rate

    def set_rate(self, rate: float) -> None:
        """Let the clock run faster or slower from now on."""
        now = self.time()
        self._rate = rate
        self._offset = now - self._turns.now / SECOND * rate
        for timer in timers(self):
            self._wake_at(timer.when())

    def _wake_at(self, when: float) -> None:
        if when == math.inf:
            return
        due = math.ceil((when - self._offset) / self._rate * SECOND)
        while self._time_at(due) <= when:  # asyncio takes it when its time is over
            due += 1
        self._turns.wake_at(due, self)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As asyncio's."""
        handle = super().call_at(when, callback, *args, context=context)
        self._wake_at(when)
        return handle

    # -- tasks ---------------------------------------------------------------------------------

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """As asyncio's."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        self._tasks[task] = next(self._numbers)
        return task

    def unfinished(self) -> "list[asyncio.Task[Any]]":
        """Return the tasks that have not ended, the oldest first: `asyncio.all_tasks` has no order,
        and looks at the tasks of all loops."""
        tasks = sorted(self._tasks.items(), key=lambda each: each[1])
        return [task for task, _ in tasks if not task.done()]

    # -- callbacks -----------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """As asyncio's."""
        self._turns.wake(self)
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """As asyncio's."""
        self._turns.wake(self)
        return super().call_soon_threadsafe(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run the function here: there are no threads."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # -- descriptors ---------------------------------------------------------------------------

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """As asyncio's, for a descriptor of the host's."""
        self._descriptors.add(fd, EVENT_READ, callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """As asyncio's."""
        return self._descriptors.remove(fd, EVENT_READ)

    def add_writer(  # type: ignore[override]
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """As asyncio's, for a descriptor of the host's."""
        self._descriptors.add(fd, EVENT_WRITE, callback, args)

    def remove_writer(self, fd: Any) -> bool:
        """As asyncio's."""
        return self._descriptors.remove(fd, EVENT_WRITE)

    def _serve(self, ready: Sequence[tuple[int, int]]) -> None:
        """Schedule the callbacks of descriptors that are ready."""
        for callback, args in self._descriptors.wanted(ready):
            self.call_soon(callback, *args)

    # -- turns ---------------------------------------------------------------------------------

    def _run_ready(self) -> None:
        self.stop()  # before run_forever: it runs one turn, and ends
        self.run_forever()

    def turn(self) -> None:
        """Serve the device, and run the callbacks that are ready."""
        if self.host == NO_HOST:
            self._run_ready()
            return
        lib.aiordma_simulated_turn()
        self._run_ready()
        due = lib.aiordma_simulated_turn()
        if due not in (NEVER, self._engine_is_due):
            self._turns.wake_at(due, self)
        self._engine_is_due = due
        self._descriptors.wake()
