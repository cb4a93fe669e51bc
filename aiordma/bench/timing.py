"""The loops that run and time operations, for any awaitable."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from aiordma import WorkRequest
from aiordma.bench.meter import Meter

__all__ = (
    "abandoning",
    "deadline",
    "one_by_one",
    "perf_counter_ns",
    "ping_pong",
    "pipelined",
    "timed_pipeline",
)

BETWEEN_LOOKS = 64
"""Operations between two readings of the clock, if only the rate is measured."""


def deadline(seconds: float) -> int:
    """Return the time in so many seconds, on the clock of perf_counter_ns."""
    return perf_counter_ns() + round(seconds * 1e9)


@contextmanager
def abandoning(unawaited: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Retrieve the errors of requests that nobody awaits, because the block ended with an error or
    an interrupt: they say nothing new, and would each be reported.

    Args:
        unawaited: returns the block's operations that were not awaited. Those that are no
            WorkRequests are left alone.
    """
    try:
        yield
    except BaseException:
        for operation in unawaited():
            if isinstance(operation, WorkRequest):
                operation.add_done_callback(WorkRequest.exception)
        raise


async def one_by_one(start: Callable[[], Awaitable[Any]], until: int, meter: Meter) -> None:
    """Start an operation, await it and record its time; repeat until the deadline, or for the
    meter's iterations."""
    samples = meter.samples
    before = perf_counter_ns()
    for _ in meter.turns():
        if before >= until:
            break
        await start()
        now = perf_counter_ns()
        samples.append(now - before)
        before = now


async def pipelined(
    start: Callable[[], Awaitable[Any]], depth: int, until: int, meter: Meter
) -> None:
    """Keep `depth` operations in flight until the deadline, and count the completed ones."""
    window: deque[Awaitable[Any]] = deque(start() for _ in range(depth))
    count = depth
    with abandoning(lambda: window):
        while perf_counter_ns() < until:
            for _ in range(BETWEEN_LOOKS):
                await window.popleft()
                window.append(start())
            count += BETWEEN_LOOKS
        for operation in window:
            await operation
    meter.count += count


async def ping_pong(
    send: Callable[[bytes], Awaitable[Any]],
    receive: Callable[[], Awaitable[Any]],
    payload: bytes,
    depth: int,
    until: int,
    meter: Meter,
) -> None:
    """Keep `depth` messages in flight that the server sends back, and record the time of each until
    its answer. Ends at the deadline, or with the meter's iterations."""
    samples = meter.samples
    began: deque[int] = deque()
    turns = meter.turns(depth)
    for _ in range(depth):
        began.append(perf_counter_ns())
        await send(payload)
    while began:
        await receive()
        now = perf_counter_ns()
        samples.append(now - began.popleft())
        if now < until and next(turns, False):
            began.append(now)
            await send(payload)


async def timed_pipeline(
    start: Callable[[], Awaitable[Any]], depth: int, until: int, meter: Meter
) -> None:
    """As `pipelined`, and record the time of each, from its start until its await returned.
    Ends with the meter's iterations, too."""
    samples = meter.samples
    window = deque((perf_counter_ns(), start()) for _ in range(depth))
    now = 0
    with abandoning(lambda: (operation for _, operation in window)):
        for _ in meter.turns(depth):
            if now >= until:
                break
            began, operation = window.popleft()
            await operation
            now = perf_counter_ns()
            samples.append(now - began)
            window.append((now, start()))
        for began, operation in window:
            await operation
            samples.append(perf_counter_ns() - began)
