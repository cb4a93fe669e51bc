"""An asyncio event loop that looks for completions before it sleeps.

What completes within some microseconds is found by polling the completion queues, without the
system calls, the wake-up and the event that sleeping costs. The loop polls only where the last
waits were short; else it arms the queues and sleeps, as any other loop does. It is asyncio's own
loop but for the selector, whose `select` is where a loop has nothing else to do.
"""

import asyncio
import os
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from aiordma._native import spinner

__all__ = ("SPIN", "PollingEventLoop", "new_event_loop", "run")

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

SPIN = 50e-6
"""Seconds of polling before a sleep, at most."""

SLICE = 20_000
"""Nanoseconds of polling between two looks at the other descriptors."""

_CONFIDENT = 8
"""How many waits in a row have to be long until a short one is no longer expected."""


class _PollingSelector(selectors.EpollSelector):
    """Polls drains before it sleeps, for as long as that has paid lately."""

    def __init__(self, spin: float) -> None:
        super().__init__()
        self.spinner = spinner()
        alone = len(os.sched_getaffinity(0)) == 1  # whoever is waited for could not run
        self._most = 0 if alone or self.spinner is None else round(spin * 1e9)
        self._confidence = _CONFIDENT // 2
        self._drains: tuple[object, ...] = ()
        self._before_sleep: tuple[Callable[[], int], ...] = ()

    def add(self, drain: object, before_sleep: Callable[[], int]) -> None:
        self._drains += (drain,)
        self._before_sleep += (before_sleep,)

    def remove(self, drain: object) -> None:
        kept = [i for i, known in enumerate(self._drains) if known is not drain]
        self._before_sleep = tuple(self._before_sleep[i] for i in kept)
        self._drains = tuple(self._drains[i] for i in kept)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._drains:
            return super().select(timeout)
        if timeout is not None and timeout <= 0:
            if self._most:
                self.spinner.spin(self._drains, 0)
            return super().select(0)
        started = time.monotonic_ns()
        until = None if timeout is None else started + int(timeout * 1e9)
        if self._most and self._confidence:
            events = self._spin(started, until)
            if events is not None:
                return events
        # All of them: a queue that is not armed tells of nothing.
        if sum([prepare() for prepare in self._before_sleep]):
            return super().select(0)
        asleep = time.monotonic_ns()
        events = super().select(None if until is None else max(0, until - asleep) / 1e9)
        if self._most and events:
            self._learn(time.monotonic_ns() - asleep < self._most)
        return events

    def _spin(
        self, started: int, until: int | None
    ) -> list[tuple[selectors.SelectorKey, int]] | None:
        """Poll. None: nothing came; else what to return."""
        spinner, drains, last = self.spinner, self._drains, started
        while True:
            found = spinner.spin(drains, min(SLICE, self._most))
            events = super().select(0)
            now = time.monotonic_ns()
            if found:
                self._learn(True)
                last = now
            if events or (found and spinner.dirty) or (until is not None and now >= until):
                return events
            if self._drains is not drains:
                return events  # one of them was opened or closed meanwhile
            if now - last >= self._most:
                self._learn(False)
                return None

    def _learn(self, was_short: bool) -> None:
        step = 1 if was_short else -1
        self._confidence = min(max(self._confidence + step, 0), _CONFIDENT)


class PollingEventLoop(asyncio.SelectorEventLoop):
    """See the module. Made by `new_event_loop`."""

    def __init__(self, spin: float = SPIN) -> None:
        self._polling = _PollingSelector(spin)
        self._spinner = self._polling.spinner
        super().__init__(self._polling)

    def poll(self, drain: object, before_sleep: Callable[[], int]) -> None:
        """Poll it from now on; `before_sleep` arms its queues, and returns what it found."""
        self._polling.add(drain, before_sleep)

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
        if self._spinner is not None:
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
        if self._spinner is not None:
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
        ValueError: `spin` is not in 0..1.
    """
    if not 0 <= spin <= 1:
        raise ValueError(f"spin={spin} is not in 0..1 (seconds)")
    return PollingEventLoop(spin)


def run(main: Coroutine[Any, Any, T], *, spin: float = SPIN, debug: bool | None = None) -> T:
    """Run a coroutine as `asyncio.run` does, on the loop of `new_event_loop`.

    Args:
        main: what to run.
        spin: see `new_event_loop`.
        debug: asyncio's debug mode.
    """
    with asyncio.Runner(debug=debug, loop_factory=lambda: new_event_loop(spin)) as runner:
        return runner.run(main)
