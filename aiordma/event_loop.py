"""The only module that imports an event loop: asyncio (uvloop too) and trio behind one face.

Everything above watches file descriptors, waits and sleeps through an `EventLoop`, so that no
other file knows which loop runs. Callbacks run on the loop's thread, between tasks.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from aiordma._native import in_c
from aiordma.polling import PollingEventLoop

if TYPE_CHECKING:
    import trio

__all__ = ("EventLoop", "Timer", "Waiter", "current_event_loop")

logger = logging.getLogger("aiordma")


class Waiter(Protocol):
    """One task's wait for one wake-up. A wake before the wait is not lost."""

    def wake(self) -> None:
        """Let the waiting task go on; idempotent."""

    def wait(self) -> Awaitable[Any]:
        """Return what to await, once."""


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Do not call it any more."""


class EventLoop(Protocol):
    """What aiordma needs of an event loop."""

    asyncio_loop: asyncio.AbstractEventLoop | None
    """What it is a face of, if that is asyncio's, or behaves as it does (uvloop)."""

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever the descriptor is readable."""

    def unwatch(self, fd: int) -> None:
        """Stop that; before the descriptor is closed."""

    def poll(self, drain: object) -> bool:
        """Return whether the loop polls the drain from now on, and arms its queues before it
        sleeps: most loops do not."""

    def unpoll(self, drain: object) -> None:
        """Poll it no more."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call back after some seconds; 0 means in the next round of the loop."""

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        """Call back on the loop's thread; to be called from another. Nothing, if it has ended."""

    def waiter(self) -> Waiter:
        """Make a waiter for the calling task."""

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run a coroutine function in the background; its exceptions are logged."""


async def _logged(function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    try:
        await function()
    except Exception:
        logger.exception("%s failed", name)


def _call(callback: Callable[[], None], fd: int) -> None:
    # As asyncio does by itself: one failure is no reason to be deaf from then on.
    try:
        callback()
    except Exception:
        logger.exception("the callback of fd %d failed", fd)


@in_c("Waiter")
class _AsyncioWaiter:
    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    def wait(self) -> Awaitable[None]:
        return self._future


class _AsyncioEventLoop:
    asyncio_loop: asyncio.AbstractEventLoop | None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = self.asyncio_loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self._loop.add_reader(fd, callback)

    def unwatch(self, fd: int) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)

    def poll(self, drain: object) -> bool:
        return isinstance(self._loop, PollingEventLoop) and self._loop.poll(drain)

    def unpoll(self, drain: object) -> None:
        if isinstance(self._loop, PollingEventLoop):
            self._loop.unpoll(drain)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        if not delay:
            return self._loop.call_soon(callback)
        return self._loop.call_later(delay, callback)

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback)

    def waiter(self) -> Waiter:
        return _AsyncioWaiter(self._loop)

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        # The loop itself holds tasks weakly.
        task = self._loop.create_task(_logged(function, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _TrioWaiter:
    __slots__ = ("_event",)

    def __init__(self, event: "trio.Event") -> None:
        self._event = event

    def wake(self) -> None:
        self._event.set()

    def wait(self) -> Awaitable[None]:
        return self._event.wait()


class _TrioEventLoop:
    """Descriptors and timers are system tasks: they end with the run, not with a nursery."""

    asyncio_loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, module: Any) -> None:
        self._trio = module
        self._token: trio.lowlevel.TrioToken = module.lowlevel.current_trio_token()
        self._watched: dict[int, trio.CancelScope] = {}

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        scope = self._trio.CancelScope()
        self._watched[fd] = scope

        async def wait_and_call() -> None:
            with scope:
                # Unwatched before the first wait, the number may be another descriptor's by now.
                while not scope.cancel_called:
                    try:
                        await self._trio.lowlevel.wait_readable(fd)
                    except self._trio.ClosedResourceError:
                        return  # unwatch() woke us
                    if not scope.cancel_called:
                        _call(callback, fd)

        self.spawn(wait_and_call, f"aiordma: watch fd {fd}")

    def unwatch(self, fd: int) -> None:
        scope = self._watched.pop(fd, None)
        if scope is not None:
            scope.cancel()
            # trio allows one waiter per descriptor, and wants to be told before the close.
            self._trio.lowlevel.notify_closing(fd)

    def poll(self, drain: object) -> bool:
        return False

    def unpoll(self, drain: object) -> None:
        pass

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        scope = self._trio.CancelScope(shield=True)
        timer: Timer = scope

        async def sleep_and_call() -> None:
            # Shielded, as the end of the run cancels every system task: what closes then needs it.
            with scope:
                await self._trio.sleep(delay)
                callback()

        self.spawn(sleep_and_call, "aiordma: timer")
        return timer

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        with suppress(self._trio.RunFinishedError):
            self._token.run_sync_soon(callback)

    def waiter(self) -> Waiter:
        return _TrioWaiter(self._trio.Event())

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._trio.lowlevel.spawn_system_task(_logged, function, name, name=name)


def current_event_loop() -> EventLoop:
    """Return the face of the loop that runs this task.

    Raises:
        RuntimeError: no asyncio or trio loop is running here.
    """
    try:
        return _AsyncioEventLoop(asyncio.get_running_loop())
    except RuntimeError:
        module = sys.modules.get("trio")
        if module is not None and module.lowlevel.in_trio_run():
            return _TrioEventLoop(module)
    raise RuntimeError("aiordma was called outside a running asyncio or trio event loop")
