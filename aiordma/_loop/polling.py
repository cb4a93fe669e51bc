"""An asyncio event loop that looks for completions before it sleeps.

What completes within some microseconds is found by polling the completion queues, without the
system calls, the wake-up and the event that sleeping costs. The loop polls only where the last
waits were short; else it arms the queues and sleeps, as any other loop does. It is asyncio's own
loop but for the selector, whose `select` is where a loop has nothing else to do.
"""

import asyncio
import os
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from aiordma._base.arguments import seconds
from aiordma._native import Spinner

__all__ = ("SPIN", "PollingEventLoop", "new_event_loop", "run")

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SPIN = 50e-6
"""Seconds of polling before a sleep, at most."""

_EXPECTED = 4
"""How many long waits it takes to learn that polling does not pay (at most twice as many)."""


class _PollingSelector(selectors.EpollSelector):
    """Looks for completions before it sleeps, for as long as that has paid lately. The work is the
    engine's (select.c); without a drain of the engine's this is asyncio's own selector."""

    def __init__(self, spin: float) -> None:
        super().__init__()
        self.spinner = Spinner()
        self._drains: tuple[object, ...] = ()
        alone = len(os.sched_getaffinity(0)) == 1  # whoever is waited for could not run
        self.spinner.most = 0 if alone else round(spin * 1e9)
        self.spinner.confidence = _EXPECTED

    def add(self, drain: object) -> None:
        self._drains += (drain,)

    def remove(self, drain: object) -> None:
        self._drains = tuple(known for known in self._drains if known is not drain)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._drains:
            return super().select(timeout)
        others = self.spinner.select(self.fileno(), self._drains, timeout)
        return super().select(0) if others or timeout == 0 else []


class PollingEventLoop(asyncio.SelectorEventLoop):
    """See the module. Made by `new_event_loop`."""

    def __init__(self, spin: float = SPIN) -> None:
        self._polling = _PollingSelector(spin)
        self._spinner = self._polling.spinner
        super().__init__(self._polling)

    def poll(self, drain: object) -> bool:
        """Poll it from now on, and arm its queues before sleeping; return whether that is done."""
        if not self._spinner.takes(drain):
            return False
        self._polling.add(drain)
        return True

    def unpoll(self, drain: object) -> None:
        """Poll it no more."""
        self._polling.remove(drain)

    # Who is woken by polling may give the loop something to do: then it must not go on polling.

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """As asyncio's."""
        self._spinner.dirty = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's."""
        self._spinner.dirty = True
        return super().call_at(when, callback, *args, context=context)


def new_event_loop(spin: float = SPIN) -> PollingEventLoop:
    """Return an asyncio event loop that polls before it sleeps: the loop factory of those who want
    the last microseconds, `asyncio.Runner(loop_factory=aiordma.new_event_loop)`.

    Args:
        spin: seconds that it polls before it sleeps, at most; 0 never polls. While the waits are
            longer than that it does not poll either, nor on a single core. A loop that polls uses
            its core, and whatever else the loop has to do goes first.

    Raises:
        TypeError: `spin` is no number.
        ValueError: `spin` is not in 0..1.
    """
    spin = seconds(spin, "spin", "new_event_loop")
    if not 0 <= spin <= 1:
        raise ValueError(f"new_event_loop(): spin={spin} is not in 0..1 (seconds)")
    return PollingEventLoop(spin)


def run(main: Coroutine[Any, Any, T], *, spin: float = SPIN, debug: bool | None = None) -> T:
    """Run a coroutine as `asyncio.run` does, on the loop of `new_event_loop`.

    Args:
        main: what to run.
        spin: see `new_event_loop`.
        debug: asyncio's debug mode.

    Raises:
        as `new_event_loop`.
        RuntimeError: an event loop runs in this thread already.
        Exception: what `main` raised.
    """
    with asyncio.Runner(debug=debug, loop_factory=lambda: new_event_loop(spin)) as runner:
        return runner.run(main)
