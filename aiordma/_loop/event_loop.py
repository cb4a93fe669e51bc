"""One interface to asyncio, uvloop and trio. Of other modules, only what is asyncio's by nature
imports an event loop: polling, streams' transports and servers, Dask, Valkey, the benchmark.

The rest of the package watches file descriptors, waits and sleeps through an `EventLoop`, and does
not depend on the loop. Callbacks run on the loop's thread, between tasks. An exception of a
callback does not end trio's run: it is logged. asyncio passes it to its exception handler.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from math import inf
from threading import current_thread, get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio.lowlevel

from aiordma._base.errors import EventLoopError
from aiordma._base.opening import WrappedCoroutine
from aiordma._base.process import here, require_same_process
from aiordma._base.system import system
from aiordma._loop.polling import PollingEventLoop
from aiordma._loop.private import expect_unfinished, is_nested, running_asyncio_loop
from aiordma._native import Waiter as AsyncioWaiter
from aiordma._native import call_then_run

if TYPE_CHECKING:
    import trio

logger: logging.Logger = logging.getLogger("aiordma")

Function = TypeVar("Function", bound=Callable[..., object])


class Waiter(Protocol):
    """Lets one task wait for one wake-up. A wake-up before the wait is not lost."""

    def wake(self) -> None:
        """Wake the waiting task. Idempotent."""

    def wait(self) -> Awaitable[Any]:
        """Return an awaitable that completes on wake-up; call this once."""


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Cancel the callback."""


class EventLoop(Protocol):
    """The functions of an event loop that aiordma uses."""

    asyncio_loop: asyncio.AbstractEventLoop | None
    """The asyncio or uvloop loop; None on trio."""

    thread: int
    """The thread on which `require_here` last found the loop running."""

    process: int
    """The process that the loop belongs to."""

    from_thread: str
    """The calls by which another thread runs code on this loop, for messages."""

    calls: set[object]
    """One object for each call in a worker thread whose end is to be reported to this loop. It is
    removed once the report is passed to `call_from_thread`, or the call was withdrawn."""

    returned: dict[object, Callable[[], object]]
    """For each task that has not continued since its call in a worker thread has returned: what to
    do if the loop has ended, because it does not continue then."""

    @property
    def has_ended(self) -> bool:
        """Whether the loop was closed or abandoned, or its run is over. A loop that has ended runs
        no callbacks, and ignores timers and descriptors."""

    @property
    def is_running(self) -> bool:
        """Whether the loop runs in some thread, and so runs callbacks soon."""

    def is_running_here(self) -> bool:
        """Whether this loop runs in this thread."""

    def abandon(self) -> None:
        """Treat the loop as ended, because its tasks were dropped unfinished."""

    def undelivered(self) -> list[Callable[[], None]]:
        """Return and forget the callbacks of `call_from_thread` that have not been called. Call
        this after the loop's end."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call the callback whenever the descriptor is readable."""

    def unwatch(self, fd: int) -> None:
        """Stop watching the descriptor. Call this before closing it."""

    def poll(self, drain: object) -> bool:
        """Let the loop poll the drain from now on, and arm its queues before it sleeps. Return
        False, and do nothing, if the loop does not poll; most loops do not."""

    def unpoll(self, drain: object) -> None:
        """Stop polling the drain."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call the callback after some seconds; 0: in the loop's next iteration."""

    def limit(self, seconds: float, callback: Callable[[], None]) -> Callable[[], object]:
        """Call the callback after some seconds, and return what withdraws that: for time limits,
        of which few pass. On asyncio they share one timer, which stays when they are withdrawn."""

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Schedule the callback on the loop's thread, from another thread. If the loop ends before
        it is called, keep it for `undelivered`.
        """

    def report(self, message: str, error: Exception) -> None:
        """Report an error that no task receives: to asyncio's exception handler
        (`loop.set_exception_handler`), or, on trio, to the log. Works in every thread, and after
        the loop's end."""

    def waiter(self) -> Waiter:
        """Make a waiter for the calling task.

        Raises:
            EventLoopError: the task belongs to another loop.
        """

    async def checkpoint(self) -> None:
        """Raise the cancellation of a scope that was cancelled before; on trio, whose rule it is,
        also let other tasks run. For a call that did not have to wait."""

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run a coroutine function in the background; its exceptions are logged."""

    def task_group(self) -> AbstractAsyncContextManager[Callable[..., object]]:
        """Return a task group for tasks that raise nothing. It gives the block the function that
        starts a task, and cancels the tasks if the block raises. On asyncio, a task costs a fifth
        of one of anyio's, and its own CancelledError does not cancel the others."""

    async def outlast_tasks(self, limit: float) -> None:
        """Wait for the end of the program's tasks that have been cancelled, in a spawned task that
        has been cancelled, too: the loop ends. Another cancellation does not end the wait.

        Args:
            limit: seconds of waiting, at most.
        """


async def _logged(
    function: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    on_end: Callable[[], object] = lambda: None,
) -> None:
    try:
        await function()
    except Exception:
        logger.exception("%s failed", name)
    finally:
        on_end()


class _Begun(WrappedCoroutine[None]):
    """A coroutine that always begins. asyncio never begins a task that is cancelled before its
    first step."""

    _begun = False

    def send(self, value: Any) -> Any:
        self._begun = True
        return super().send(value)

    def throw(self, *error: Any) -> Any:
        if not self._begun:
            self.send(None)
        return super().throw(*error)


def _call(callback: Callable[[], None], fd: int) -> None:
    # Keep watching the descriptor after a failed callback, as asyncio does.
    try:
        callback()
    except Exception:
        logger.exception("the callback of fd %d failed", fd)


class _Never:
    """A timer of a loop that has ended."""

    def cancel(self) -> None:
        pass


class _BaseEventLoop:
    """State that both implementations of `EventLoop` share."""

    def __init__(self) -> None:
        self.thread = get_ident()
        self.process: int = here.pid
        self._thread_name = current_thread().name
        self._abandoned = False
        self.calls: set[object] = set()
        self.returned: dict[object, Callable[[], object]] = {}
        # The callbacks of other threads. The loop drops what is scheduled when it is closed, so it
        # is told only that there are some.
        self._undelivered: deque[Callable[[], None]] = deque()

    def abandon(self) -> None:
        self._abandoned = True

    def undelivered(self) -> list[Callable[[], None]]:
        return [self._undelivered.popleft() for _ in range(len(self._undelivered))]

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        self._undelivered.append(callback)
        with suppress(RuntimeError):  # the loop has ended
            self._deliver_soon()

    def _deliver_soon(self) -> None:
        """Call `_deliver` on the loop's thread. A RuntimeError says that the loop has ended."""
        raise NotImplementedError

    def _deliver(self) -> None:
        # If a callback raises, later calls of this method run the others: it is scheduled once for
        # each.
        while self._undelivered:
            self._undelivered.popleft()()


class _AsyncioEventLoop(_BaseEventLoop):
    asyncio_loop: asyncio.AbstractEventLoop | None

    from_thread = (
        "loop.call_soon_threadsafe(...), asyncio.run_coroutine_threadsafe(...) or "
        "anyio.from_thread.run(...)"
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = self.asyncio_loop = loop
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._limits: dict[object, tuple[float, Callable[[], None]]] = {}
        self._limit_timer: Timer | None = None
        self._next_limit = inf

    def __repr__(self) -> str:
        return f"{self._loop!r} at {id(self._loop):#x}, of thread {self._thread_name!r}"

    @property
    def has_ended(self) -> bool:
        return self._abandoned or self._loop.is_closed()

    @property
    def is_running(self) -> bool:
        return self._loop.is_running()

    def is_running_here(self) -> bool:
        here = running_asyncio_loop() is self._loop
        return here and ("trio" not in sys.modules or _trio_here() is None)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        if self.has_ended:
            return
        self._loop.add_reader(fd, callback)

    def unwatch(self, fd: int) -> None:
        if self._loop.is_closed():
            return
        # From Python 3.13 on, the debug mode imports a module to describe the callback that it has
        # taken out, and an interpreter that ends imports none.
        with suppress(ImportError):
            self._loop.remove_reader(fd)

    def poll(self, drain: object) -> bool:
        return isinstance(self._loop, PollingEventLoop) and self._loop.poll(drain)

    def unpoll(self, drain: object) -> None:
        if isinstance(self._loop, PollingEventLoop):
            self._loop.unpoll(drain)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        try:
            if not delay:
                return self._loop.call_soon(callback)
            return self._loop.call_later(delay, callback)
        except RuntimeError:
            if not self.has_ended:
                raise
            return _Never()

    def limit(self, seconds: float, callback: Callable[[], None]) -> Callable[[], object]:
        key, when = object(), system.now() + seconds
        self._limits[key] = when, callback
        if when < self._next_limit:
            if self._limit_timer is not None:
                self._limit_timer.cancel()
            self._watch_limits(when)
        return partial(self._limits.pop, key, None)

    def _watch_limits(self, when: float) -> None:
        self._next_limit = when
        self._limit_timer = self.call_later(max(when - system.now(), 1e-6), self._look_at_limits)

    def _look_at_limits(self) -> None:
        now, next_limit = system.now(), inf
        for key, (when, callback) in list(self._limits.items()):
            if when > now:
                next_limit = min(next_limit, when)
            elif self._limits.pop(key, None) is not None:
                callback()
        self._limit_timer, self._next_limit = None, inf
        if next_limit < inf:
            self._watch_limits(next_limit)

    def _deliver_soon(self) -> None:
        self._loop.call_soon_threadsafe(call_then_run, self._deliver)

    def report(self, message: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": message, "exception": error})

    def waiter(self) -> Waiter:
        require_here(self, "what this task waits for")
        return AsyncioWaiter(self._loop)

    async def checkpoint(self) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        # The loop itself has only weak references to tasks.
        # A name in the call would reach a program's task factory, which may not take one.
        key = object()
        coroutine: Any = _logged(function, name, partial(self._tasks.pop, key, None))
        coroutine.__qualname__ = getattr(function, "__qualname__", name)
        task = self._loop.create_task(_Begun(coroutine))
        task.set_name(name)
        expect_unfinished(task)  # a program may close its loop without cancelling its tasks
        if not task.done():  # an eager factory's can be
            self._tasks[key] = task

    @asynccontextmanager
    async def task_group(self) -> AsyncIterator[Callable[..., object]]:
        with anyio.CancelScope() as scope:
            async with asyncio.TaskGroup() as group:
                try:
                    yield lambda function, *arguments: group.create_task(function(*arguments))
                except BaseException:
                    scope.shield = True  # anyio would interrupt the wait for the tasks at each turn
                    await asyncio.sleep(0)  # each task begins before it is cancelled
                    raise

    async def outlast_tasks(self, limit: float) -> None:
        # asyncio.run cancels all tasks at once. A task that is not cancelled is none of those: it
        # can be one that has cancelled the others, and waits for them, and so for this one.
        # Nor do the tasks of `spawn` wait for each other.
        tasks = {
            task
            for task in asyncio.all_tasks(self._loop)
            if task.cancelling() and not isinstance(task.get_coro(), _Begun)
        }
        end = self._loop.time() + limit
        while tasks and (left := end - self._loop.time()) > 0:
            with suppress(asyncio.CancelledError):
                _, tasks = await asyncio.wait(tasks, timeout=left)


class _TrioWaiter:
    __slots__ = ("_event",)

    def __init__(self, event: "trio.Event") -> None:
        self._event = event

    def wake(self) -> None:
        self._event.set()

    def wait(self) -> Awaitable[None]:
        return self._event.wait()


_protected: list[Callable[..., object]] = []
"""The functions of `protected`; empty once they are registered with trio."""


def protected(function: Function) -> Function:
    """Decorate a function in which a KeyboardInterrupt would lose a request or a message, or leak
    what is being closed. On trio it is raised at the next wait instead, as in trio's own
    functions. Elsewhere this does nothing."""
    _protected.append(function)
    return function


class _TrioEventLoop(_BaseEventLoop):
    """Descriptors and timers are system tasks, which end with the run, not with a nursery."""

    asyncio_loop: asyncio.AbstractEventLoop | None = None
    from_thread = "trio.from_thread.run_sync(..., trio_token=...) or anyio.from_thread.run(...)"

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._trio = module
        self._token: trio.lowlevel.TrioToken = module.lowlevel.current_trio_token()
        while _protected:
            module.lowlevel.enable_ki_protection(_protected.pop())
        self._watched: dict[int, trio.CancelScope] = {}

    def __repr__(self) -> str:
        return f"<trio run> at {id(self._token):#x}, of thread {self._thread_name!r}"

    @property
    def has_ended(self) -> bool:
        if not self._abandoned:
            try:
                self._token.run_sync_soon(_nothing, idempotent=True)
            except self._trio.RunFinishedError:
                self._abandoned = True
        return self._abandoned

    @property
    def is_running(self) -> bool:
        return not self.has_ended

    def is_running_here(self) -> bool:
        return _trio_here() is not None and self._trio.lowlevel.current_trio_token() is self._token

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        scope = self._trio.CancelScope()
        self._watched[fd] = scope

        async def wait_and_call() -> None:
            with scope:
                # After an unwatch before the first wait, the number may belong to a new descriptor.
                while not scope.cancel_called:
                    try:
                        await self._trio.lowlevel.wait_readable(fd)
                    except self._trio.ClosedResourceError:
                        return  # woken by unwatch()
                    if not scope.cancel_called:
                        _call(callback, fd)

        self.spawn(wait_and_call, f"aiordma: watch fd {fd}")

    def unwatch(self, fd: int) -> None:
        scope = self._watched.pop(fd, None)
        if scope is not None:
            scope.cancel()
            # trio allows one waiter per descriptor, and requires this call before the close.
            self._trio.lowlevel.notify_closing(fd)

    def poll(self, drain: object) -> bool:
        return False

    def unpoll(self, drain: object) -> None:
        pass

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        scope = self._trio.CancelScope(shield=True)
        timer: Timer = scope

        async def sleep_and_call() -> None:
            # The end of the run cancels every system task. Objects that close then need the timer.
            with scope:
                await self._trio.sleep(delay)
                callback()

        self.spawn(sleep_and_call, "aiordma: timer")
        return timer

    def limit(self, seconds: float, callback: Callable[[], None]) -> Callable[[], object]:
        return self.call_later(seconds, callback).cancel  # a timer that stays would hold up the end

    def _deliver_soon(self) -> None:
        self._token.run_sync_soon(self._deliver)

    def _deliver(self) -> None:
        # An exception would end the run.
        try:
            super()._deliver()
        except Exception:
            logger.exception("aiordma: a call from another thread failed")

    def report(self, message: str, error: Exception) -> None:
        logger.error("%s", message, exc_info=error)

    def waiter(self) -> Waiter:
        require_here(self, "what this task waits for")
        return _TrioWaiter(self._trio.Event())

    async def checkpoint(self) -> None:
        await self._trio.lowlevel.checkpoint()

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._trio.lowlevel.spawn_system_task(_logged, function, name, name=name)

    @asynccontextmanager
    async def task_group(self) -> AsyncIterator[Callable[..., object]]:
        async with self._trio.open_nursery() as nursery:
            yield nursery.start_soon

    async def outlast_tasks(self, limit: float) -> None:
        pass  # trio cancels its system tasks when the program's tasks have ended


def _nothing() -> None:
    pass


def _trio_here() -> Any:
    """Return the module trio if trio runs this code, else None. In trio's guest mode asyncio's loop
    is the host, and runs in this thread, too. Trio then runs this code only within a task."""
    module = sys.modules.get("trio")
    lowlevel = getattr(module, "lowlevel", None)  # None: another thread is importing trio
    if lowlevel is None or not lowlevel.in_trio_run():
        return None
    return module if lowlevel.in_trio_task() or running_asyncio_loop() is None else None


def running_loop() -> object:
    """Return what identifies the event loop that runs here: asyncio's loop, or trio's token, or a
    simulated host's part of the loop.

    Raises:
        RuntimeError: no asyncio or trio loop is running here.
    """
    if system.guest is not None:
        return system.guest
    trio = _trio_here()
    return asyncio.get_running_loop() if trio is None else trio.lowlevel.current_trio_token()


def runs_event_loop() -> bool:
    """Return whether an event loop runs in this thread, which must not block then."""
    return running_asyncio_loop() is not None or _trio_here() is not None


def require_here(loop: EventLoop, what: object) -> None:
    """Raise an error outside the loop's tasks and callbacks. On the loop's thread between its runs,
    do nothing.

    Args:
        loop: the loop that the object belongs to.
        what: the object, or a text that names it, for the message.

    Raises:
        EventLoopError: this is another thread, another loop runs here, or the loop has ended.
        ForkError: this process is a forked child of the loop's.
    """
    if loop.process != here.pid:
        require_same_process(loop.process, what)
    if loop.is_running_here():
        loop.thread = get_ident()
        return
    name = what if isinstance(what, str) else repr(what)
    if loop.has_ended:
        raise EventLoopError(f"{name} belongs to the event loop {loop!r}, which has ended")
    try:
        instead = f"the event loop {current_event_loop()!r} runs here"
    except RuntimeError:
        if loop.thread == get_ident():
            return
        instead = f"this is thread {current_thread().name!r}"
    raise EventLoopError(
        f"{name} belongs to the event loop {loop!r}, and {instead}: use it in its own event loop, "
        f"from another thread by {loop.from_thread}"
    )


def current_event_loop() -> EventLoop:
    """Return an `EventLoop` for the loop that runs this task.

    Raises:
        RuntimeError: no asyncio or trio loop is running here; an EventLoopError if it is one that
            nest_asyncio has patched.
    """
    trio, loop = _trio_here(), running_asyncio_loop()
    if trio is not None:
        return _TrioEventLoop(trio)
    if loop is not None:
        if is_nested(loop):
            raise EventLoopError(
                "nest_asyncio lets this event loop run inside its own tasks, where aiordma cannot "
                "deliver completions. In a notebook, await in the cell instead, or run the program "
                "by asyncio.run in a thread (docs/faq.md)"
            )
        return _AsyncioEventLoop(loop)
    raise RuntimeError("aiordma was called outside a running asyncio or trio event loop")


def asyncio_event_loop(call: str, instead: str) -> asyncio.AbstractEventLoop:
    """Return asyncio's event loop that runs this task.

    Args:
        call: the function that needs it, for the message.
        instead: what to use on trio.

    Raises:
        RuntimeError: no asyncio loop is running here.
    """
    loop = running_asyncio_loop()
    if loop is None or _trio_here() is not None:
        raise RuntimeError(f"{call}() needs a running asyncio event loop: on trio, {instead}")
    return loop
