"""An asyncio event loop that polls for completions before it sleeps.

Polling finds a request that completes within some microseconds, and saves the system calls, the
wake-up and the event of a sleep. The loop polls only if the last waits were short. Otherwise it
arms the completion queues and sleeps, as every loop does. It is asyncio's own loop with another
selector: the loop calls `select` when it has nothing else to do.
"""

import asyncio
import os
import selectors
from collections.abc import Callable, Coroutine, Sized
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from aiordma._base.arguments import seconds_within
from aiordma._loop.private import ready_handles, running_asyncio_loop
from aiordma._native import Spinner

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SPIN = 50e-6
"""Seconds of polling before a sleep, at most."""

_EXPECTED = 4
"""Initial confidence of the spinner. A long wait subtracts 1, and at 0 the loop stops polling. A
short wait adds 1, up to twice this value."""


class _PollingSelector(selectors.EpollSelector):
    """Polls for completions before it sleeps, while the recent waits are short. The engine does
    this (select.c). Without a drain of the engine, this is asyncio's own selector."""

    def __init__(self, spin: float) -> None:
        super().__init__()
        self.spinner = Spinner()
        self._drains: tuple[object, ...] = ()
        self.ready: Sized = ()
        alone = len(os.sched_getaffinity(0)) == 1  # polling would keep the peer from running
        self.spinner.most = 0 if alone else round(spin * 1e9)
        self.spinner.confidence = _EXPECTED

    def add(self, drain: object) -> None:
        self._drains += (drain,)

    def remove(self, drain: object) -> None:
        self._drains = tuple(known for known in self._drains if known is not drain)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._drains:
            return super().select(timeout)
        others = self.spinner.select(self.fileno(), self._drains, timeout, self.ready)
        return super().select(0) if others or timeout == 0 else []


class PollingEventLoop(asyncio.SelectorEventLoop):
    """An event loop of `new_event_loop`."""

    def __init__(self, spin: float = SPIN) -> None:
        self._polling = _PollingSelector(spin)
        self._spinner = self._polling.spinner
        super().__init__(self._polling)
        self._polling.ready = ready_handles(self)

    def poll(self, drain: object) -> bool:
        """Poll the drain from now on, and arm its queues before the loop sleeps. Return False, and
        do nothing, for an object that is no drain of the engine's.

        Args:
            drain: a drain of the engine's.

        Raises: nothing.
        """
        if not self._spinner.takes(drain):
            return False
        self._polling.add(drain)
        return True

    def unpoll(self, drain: object) -> None:
        """Stop polling the drain.

        Args:
            drain: as of `poll`.

        Raises: nothing.
        """
        self._polling.remove(drain)

    # A task that polling wakes runs within `select`. It can schedule callbacks or timers, or stop
    # the loop: the selector must then return to the loop. It sees the callbacks itself. All else
    # that the loop must notice makes a descriptor ready.

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's.

        Args: as asyncio's.

        Raises: as asyncio's.
        """
        self._spinner.dirty = True
        handle = super().call_at(when, callback, *args, context=context)
        if created := handle._source_traceback:  # type: ignore[attr-defined]
            del created[-1]  # this method: debug mode says where the program called it
        return handle

    def stop(self) -> None:
        """As asyncio's.

        Raises: nothing.
        """
        self._spinner.dirty = True
        super().stop()


def new_event_loop(spin: float = SPIN) -> PollingEventLoop:
    """Return an asyncio event loop that polls for completions before it sleeps, for the lowest
    latency: `asyncio.Runner(loop_factory=aiordma.new_event_loop)`.

    Args:
        spin: seconds for which the loop polls before it sleeps, at most; 0: it never polls. The
            loop does not poll either while the waits are longer than that, or if the process runs
            on a single core. Polling uses the core, but callbacks and other descriptors have
            priority.

    Raises:
        TypeError: `spin` is not a number.
        ValueError: `spin` is not in 0..1.
    """
    spin = seconds_within(spin, "spin", 0, 1, "new_event_loop")
    return PollingEventLoop(spin)


def run(main: Coroutine[Any, Any, T], *, spin: float = SPIN, debug: bool | None = None) -> T:
    """Run a coroutine as `asyncio.run` does, on the loop of `new_event_loop`.

    Args:
        main: the coroutine.
        spin: as of `new_event_loop`.
        debug: asyncio's debug mode; None: as PYTHONASYNCIODEBUG says.

    Raises:
        as `new_event_loop`.
        RuntimeError: an event loop runs in this thread already.
        Exception: the exception that `main` raised.
    """
    if running_asyncio_loop() is not None:  # else the Runner leaves a coroutine pending
        raise RuntimeError(
            "aiordma.run() cannot be called from a running event loop: `await main()` there, as in "
            "a Jupyter notebook or `python -m asyncio`; or call it in another thread"
        )
    with asyncio.Runner(debug=debug, loop_factory=lambda: new_event_loop(spin)) as runner:
        return runner.run(main)
