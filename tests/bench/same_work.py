"""The same work in C (same_work.c), on any device: what a language, and not a device, costs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from aiordma.bench.workload import Workload
from tests.ports import free_port

from .compiling import NATIVE, compiled
from .perftest import against_itself
from .processor import ended_processor_seconds
from .rows import Reading

RECEIVES = 512
CONNECTION_SECONDS = 0.2
"""That making a connection may take, at most: a guest makes tens of them in a second."""


def compile_same_work() -> Path:
    """Compile it: before the virtual machine is booted, where gcc is slow."""
    return compiled(
        "same_work.c",
        "-std=gnu11",
        f"-I{NATIVE}",
        '-DSW_VERSION="0"',
        "-ldl",
        "-lpthread",
        others=[NATIVE / "rdma_core.c", *sorted((NATIVE / "software").glob("*.c"))],
    )


def rounds_of(
    host: str,
    device: str,
    work: Workload,
    seconds: float,
    *,
    polling: bool = True,
    connections: int = 1,
    rounds: int = 1,
    functions: int = 0,
    receives: int | None = None,
) -> list[Reading]:
    """Measure in one pair of processes; return the rounds' medians of the time of an operation in
    microseconds, or with a depth above 1 the operations per second.

    Args:
        host: the device's address.
        device: its name; what is not the software device is the kernel's.
        work: what to do: echo, send, read or write.
        seconds: of each round.
        polling: both sides poll for ever; else they sleep on the completion channel.
        connections: the operations go over all of them in turn.
        rounds: how many.
        functions: with a depth of 1, called between two operations, each at its own address.
        receives: of the server, for sends, each into memory of its own; for READs and WRITEs, the
            pieces of memory that they take in turn.
    """
    place = [host, str(free_port()), str(int(polling))]
    milliseconds = round(seconds * 1000)
    if receives is None:
        receives = RECEIVES if work.operation == "send" else 1
    numbers = (work.size, work.depth, connections, milliseconds, rounds, functions, receives)
    before = ended_processor_seconds()
    printed = against_itself(
        _program(device),
        ["ask", *place, work.operation, *map(str, numbers)],
        ["serve", *place],
        more_seconds=rounds * seconds + connections * CONNECTION_SECONDS,
    )
    found = [[*map(int, line.split())] for line in printed.splitlines()]
    # Of the rounds together, and with what the two did before and after them.
    cpu_us = (ended_processor_seconds() - before) / sum(count for count, *_ in found) * 1e6
    return [_reading(work, numbers, cpu_us) for numbers in found]


def connects(host: str, device: str, size: int, seconds: float) -> Reading:
    """Return the connections per second, one after the other, each with an echo of so many bytes;
    both sides sleep on the completion channel."""
    place = [host, str(free_port()), "0"]
    printed = against_itself(
        _program(device),
        ["ask", *place, "connect", str(size), str(round(seconds * 1000))],
        ["serve", *place],
        more_seconds=2 * seconds,
    )
    count, nanoseconds = map(int, printed.split())
    return Reading(count / nanoseconds * 1e9, extra={"count": count})


def connects_at_once(host: str, device: str, size: int, count: int) -> Reading:
    """Return the milliseconds from the first of so many connects, which begin together, to the last
    echo; both sides sleep."""
    place = [host, str(free_port()), "0"]
    printed = against_itself(
        _program(device),
        ["ask", *place, "at_once", str(size), str(count)],
        ["serve", *place],
        more_seconds=count * CONNECTION_SECONDS,
    )
    return Reading(int(printed) / 1e6)


def _program(device: str) -> list[str]:
    return [str(compile_same_work()), "software" if device == "software" else "rdma-core"]


def measured(
    host: str,
    device: str,
    work: Workload,
    seconds: float,
    polling: bool,
    receives: int | None = None,
) -> Reading:
    """Measure once."""
    (reading,) = rounds_of(host, device, work, seconds, polling=polling, receives=receives)
    return reading


def posting(host: str, device: str, work: Workload, seconds: float, functions: int) -> Reading:
    """Measure what a post alone takes, in microseconds, after so many other functions."""
    (reading,) = rounds_of(host, device, work, seconds, functions=functions)
    return Reading(reading.extra["post_us"], extra=reading.extra)


def _reading(work: Workload, numbers: Sequence[int], cpu_us: float) -> Reading:
    count, nanoseconds, median, post = numbers
    extra = {"count": count, "mean_us": nanoseconds / 1000 / count, "post_us": post / 1000}
    each = partial(Reading, extra=extra, cpu_us=cpu_us)
    return each(median / 1000) if work.depth == 1 else each(count / nanoseconds * 1e9)
