"""Simulated hosts on the event loop of another simulation, which has the time and decides the
turns. The device notifies by the loop's `call_soon` and `call_later` only: it has no descriptor
that the loop would have to watch, and no thread.

Before each callback of the loop, the host that it belongs to is put in place: that is in the
callback's context, which tasks inherit. After it, the host's device has a turn.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context, ContextVar, copy_context
from selectors import EVENT_READ
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from aiordma._base.system import system
from aiordma._native import lib
from aiordma.testing.choices import Choices
from aiordma.testing.scheduler import END_SECONDS, LINGER_SECONDS, Scheduler, SimulationError
from aiordma.testing.simulated_loop import NEVER, NO_HOST, SECOND, Descriptors, numbers
from aiordma.testing.simulation import Simulation, opened

__all__ = ("simulated_network",)

Result = TypeVar("Result")

_current: "ContextVar[GuestHost | None]" = ContextVar("aiordma_simulated_host", default=None)


class _Alarm:
    """Calls a function at one time of the simulation, on no host."""

    def __init__(self, guest: "Guest", function: Callable[[], None]) -> None:
        self._guest = guest
        self._function = function
        self._due = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due: int) -> None:
        """Call it at this time, instead of any other."""
        if due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = None if due == NEVER else self._guest.call_at(due, self._call)

    def _call(self) -> None:
        self._guest.pass_time(self._due)  # the loop's sum of seconds may be less by a rounding
        self._due, self._timer = NEVER, None
        self._function()


class GuestHost:
    """A host's part of the loop, from boot to crash.

    Attributes:
        host: its number.
        number: one that no other has: for the package, each is a process of its own.
        is_lost: whether it has crashed.
        time: returns its time, in seconds.
        tasks: those of the host, numbered.
        descriptors: those that the package watches there.
    """

    def __init__(self, guest: "Guest", host: int) -> None:
        self.host: int = host
        self.number: int = next(numbers)
        self.is_lost: bool = False
        self.time: Callable[[], float] = guest.loop.time
        self.tasks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self.descriptors: Descriptors = Descriptors()
        self._guest = guest
        self._loop = guest.loop
        self._engine = _Alarm(guest, self.wake)
        self._is_awake = False

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """As asyncio's."""
        self._loop.call_soon(callback, *args)

    def create_task(
        self, coro: Coroutine[Any, Any, Result], *, name: str
    ) -> "asyncio.Task[Result]":
        """Make a task of the host. Those that it makes are the host's, too."""
        context = copy_context()
        context.run(_current.set, self)
        return self._loop.create_task(coro, name=name, context=context)

    def unfinished(self) -> "list[asyncio.Task[Any]]":
        """Return the host's tasks that have not ended, the oldest first."""
        tasks = sorted(self.tasks.items(), key=lambda each: each[1])
        return [task for task, _ in tasks if not task.done()]

    def lose(self) -> None:
        """Have no more turns: the host has crashed."""
        self.is_lost = True
        self._engine.set(NEVER)

    def set_rate(self, rate: float) -> None:
        """Raise SimulationError: the clock is the loop's."""
        raise SimulationError(f"{rate=}: the clocks are those of {self._loop!r}")

    # -- turns ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Serve the host soon."""
        if not self._is_awake:
            self._is_awake = True
            self._guest.call_soon(self, self._serve)

    def _serve(self) -> None:
        self._is_awake = False
        lib.aiordma_simulated_turn()
        for callback, args in self.descriptors.wanted(self.descriptors.take_ready()):
            self._loop.call_soon(callback, *args)

    def end_turn(self) -> None:
        """Let the device do what a callback has given it to do."""
        self._engine.set(lib.aiordma_simulated_turn())
        self.descriptors.wake()


class _Entered:
    """A callback of the loop, which looks like the program's own: it may be shown, or compared."""

    __slots__ = ("_callback", "_guest")

    def __init__(self, guest: "Guest", callback: Callable[..., object]) -> None:
        self._guest = guest
        self._callback = callback

    def __call__(self, *args: Any) -> None:
        self._guest.turn(self._callback, args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)


class Guest(Scheduler):
    """See the module. The time and the turns are the loop's.

    Attributes:
        loop: the other simulation's.
    """

    loops: dict[int, GuestHost]  # type: ignore[assignment]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self._context = copy_context()
        self._nobody = GuestHost(self, NO_HOST)
        self._is_open = False
        self._network = _Alarm(self, lambda: None)  # its time has passed: it has delivered
        self._own = loop.call_soon, loop.call_later, loop.call_at, loop.create_task
        self._replaced: dict[str, Callable[..., object]] = {
            "call_soon": self._soon,
            "call_soon_threadsafe": self._soon,  # there are no threads
            "call_later": self._later,
            "call_at": self._at,
            "create_task": self._make_task,
            "add_reader": self._add_reader,
            "remove_reader": self._remove_reader,
        }

    def new_loop(self, host: int, name: str) -> GuestHost:  # type: ignore[override]
        """Make what stands for the loop on a host that comes up."""
        return GuestHost(self, host)

    def begin(self) -> None:
        """Take the place of the system, and of some of the loop's methods."""
        for name, method in self._replaced.items():
            setattr(self.loop, name, method)
        self.take_system()
        self._is_open = True
        self.pass_time()

    def close(self) -> None:
        """Give back what `begin` has taken."""
        self._is_open = False
        for name in self._replaced:
            delattr(self.loop, name)
        self.leave()

    def adopt(self, loop: GuestHost) -> None:  # type: ignore[override]
        """Let the current task be the host's, and those that it makes."""
        _current.set(loop)
        if (task := asyncio.current_task()) is not None:
            loop.tasks[task] = next(self._order)
        self.enter(loop)

    def freeze(self, host: int) -> None:
        """Raise SimulationError: the turns are the loop's."""
        raise SimulationError(f"{self.names[host]}: the turns are those of {self.loop!r}")

    def thaw(self, host: int) -> None:
        """Do nothing: it is not frozen."""

    def forget(self, loop: GuestHost) -> None:  # type: ignore[override]
        """Give the host no more turns."""
        loop.lose()

    # -- the loop's calls -----------------------------------------------------------------------

    def _entered(self, callback: Callable[..., object]) -> Callable[..., object]:
        return callback if isinstance(callback, _Entered) else _Entered(self, callback)

    def _soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self._own[0](self._entered(callback), *args, context=context)

    def _later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._own[1](delay, self._entered(callback), *args, context=context)

    def _at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._own[2](when, self._entered(callback), *args, context=context)

    def _make_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = self._own[3](coro, **options)
        if (host := (options.get("context") or copy_context()).get(_current)) is not None:
            host.tasks[task] = next(self._order)
        return task

    def _add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        if (host := system.guest) is not None:
            host.descriptors.add(fd, EVENT_READ, callback, args)

    def _remove_reader(self, fd: int) -> bool:
        return system.guest is not None and system.guest.descriptors.remove(fd, EVENT_READ)

    def call_soon(self, host: GuestHost, callback: Callable[[], None]) -> None:
        """Call a function soon, on a host."""
        context = self._context.copy()
        context.run(_current.set, host)
        self._soon(callback, context=context)

    def call_at(self, when: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function at this time of the simulation, on no host."""
        context = self._context.copy()
        delay = max(when - self.now, 0) / SECOND
        return context.run(self._later, delay, callback, context=self._context)

    # -- turns ----------------------------------------------------------------------------------

    def pass_time(self, least: int = 0) -> None:
        """Read the loop's clock: as the program has begun, because a host's may differ."""
        now = max(round(self._context.copy().run(self.loop.time) * SECOND), least)
        if now > self.now:
            self.now = now
            lib.aiordma_simulated_advance(now)

    def enter(self, loop: GuestHost) -> None:  # type: ignore[override]
        """Be the host from now on."""
        super().enter(loop)  # type: ignore[arg-type]
        system.guest = None if loop is self._nobody else loop

    def turn(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run a callback of the loop on the host that it belongs to. What a host has scheduled
        that has crashed runs, too, if the loop lets it: on no host, as in a process that is over.
        """
        if not self._is_open:
            callback(*args)
            return
        self.pass_time()
        host = _current.get()
        if host is None or host.is_lost:
            host = self._nobody
        self.enter(host)
        try:
            callback(*args)
        finally:
            if self._is_open:
                self._end_turn()

    def _end_turn(self) -> None:
        if system.guest is not None:
            system.guest.end_turn()
        self._current = NO_HOST
        while self._after_turn:
            self._after_turn.pop(0)()
        self._wake_due()
        self._network.set(lib.aiordma_simulated_next())
        self._read_trace()

    def wake(self, loop: GuestHost) -> None:  # type: ignore[override]
        """Give the host a turn soon."""
        loop.wake()

    # -- the end --------------------------------------------------------------------------------

    async def cancel_tasks(self) -> None:
        """Cancel the hosts' tasks, and wait until they and the device's streams have ended."""
        tasks = [task for host in self.loops.values() for task in host.unfinished()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_SECONDS)
        await asyncio.sleep(LINGER_SECONDS)


@asynccontextmanager
async def simulated_network(
    *, seed: int | str = 0, any_order: bool = True
) -> AsyncIterator[Simulation]:
    """Open simulated hosts and their network on the running event loop, another simulation's: one
    that has virtual time, and neither descriptors nor threads.

    The time and the order of callbacks are the loop's. `Host.run` makes a task of a host, and
    `Host.enter` gives a task to it; the tasks that these make are the host's, too.

    Args:
        seed: decides what the network leaves open, as of `simulate`. Take the loop's own.
        any_order: as of `simulate`.

    Returns:
        A context manager that gives the `Simulation`. At the end of its block, the hosts' tasks
        are cancelled; the loop's time advances by 3 s.

    Raises:
        RuntimeError: no asyncio loop runs here.
        ValueError: as of `simulate`.
        Exception: at the end of the block, as of `simulate`.

    Cancellation: nothing remains.
    """
    choices = Choices(seed)
    guest = Guest(asyncio.get_running_loop())
    with opened(choices, guest, any_order):
        simulation = Simulation(guest, choices.seed)
        try:
            yield simulation
            simulation._raise_unnoticed()
        except GeneratorExit:
            raise  # the loop has dropped its tasks
        except BaseException:
            await guest.cancel_tasks()
            simulation._raise_unnoticed()
            raise
        await guest.cancel_tasks()
