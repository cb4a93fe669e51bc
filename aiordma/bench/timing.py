"""The loops that time operations, for anything that can be awaited."""

from collections import deque
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import Any

from aiordma.bench.meter import Meter

__all__ = ("deadline", "one_by_one", "perf_counter_ns", "pipelined", "timed_pipeline")

BETWEEN_LOOKS = 64
"""Operations between two looks at the clock, where only the rate is asked for."""


def deadline(seconds: float) -> int:
    """Return when that will be, by perf_counter_ns."""
    return perf_counter_ns() + round(seconds * 1e9)


async def one_by_one(start: Callable[[], Awaitable[Any]], until: int, meter: Meter) -> None:
    """Start one, await it, note how long that took, until it is time."""
    samples = meter.samples
    before = perf_counter_ns()
    while before < until:
        await start()
        now = perf_counter_ns()
        samples.append(now - before)
        before = now


async def pipelined(
    start: Callable[[], Awaitable[Any]], depth: int, until: int, meter: Meter
) -> None:
    """Keep `depth` of them in flight, and await each; count them."""
    window: deque[Awaitable[Any]] = deque(start() for _ in range(depth))
    count = depth
    while perf_counter_ns() < until:
        for _ in range(BETWEEN_LOOKS):
            await window.popleft()
            window.append(start())
        count += BETWEEN_LOOKS
    for operation in window:
        await operation
    meter.count += count


async def timed_pipeline(
    start: Callable[[], Awaitable[Any]], depth: int, until: int, meter: Meter
) -> None:
    """The same, and note how long each took, from its start until it was awaited."""
    samples = meter.samples
    window = deque((perf_counter_ns(), start()) for _ in range(depth))
    now = 0
    while now < until:
        began, operation = window.popleft()
        await operation
        now = perf_counter_ns()
        samples.append(now - began)
        window.append((now, start()))
    for began, operation in window:
        await operation
        samples.append(perf_counter_ns() - began)
