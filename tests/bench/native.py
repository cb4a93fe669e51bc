"""Rows of this machine: the software device beside TCP, and what Python costs by itself."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from aiordma import Connection, ConnectionOptions, RemoteMemory, connect, trace
from aiordma.bench.loops import run
from aiordma.bench.workload import Workload
from aiordma.types import MemorySlice, TracedRequest

from . import lag, posting
from .candidates import Candidates
from .instant import instant, prepare
from .rows import Reading, Row, constant, latency, together

WINDOW = 32
CONNECTIONS = 100
BUSY_PROCESSES = 2
COMPUTING = "while True: pass"
SETTLE_SECONDS = 16.0
"""The watchdog looks after 1, 3, 7, 15, 25 s, ... of idleness."""
IDLE_SECONDS = 2.0


def rows(here: Candidates) -> list[Row]:
    """Return them all."""
    echo = partial(_echo, here)
    work = Workload("echo", 64)
    idle = together(lambda: {"wake-ups": run(partial(_idle, here))})
    return [
        Row(
            "software/echo/64",
            "us",
            echo,
            "asyncio TCP streams, round trip",
            lambda: latency(here.streams(work.size)),
            limit=1.0,
        ),
        Row(
            "software/echo/64/events",
            "us",
            lambda: latency(here.rdma(work, polling=False)),
            "asyncio TCP streams, round trip",
            lambda: latency(here.streams(work.size)),
        ),
        Row(
            "software/echo/64/beside_protocol",
            "us",
            echo,
            "asyncio TCP protocol, round trip",
            lambda: latency(here.protocol(work.size)),
        ),
        Row(
            "software/echo/64/beside_uvloop_streams",
            "us",
            echo,
            "uvloop TCP streams, round trip",
            lambda: latency(here.streams(work.size, "uvloop")),
        ),
        Row(
            "software/messages/64",
            "us",
            partial(_messages, here, True),
            "asyncio TCP streams, round trip",
            lambda: latency(here.streams(work.size)),
            limit=1.0,
        ),
        Row(
            "software/messages/64/events",
            "us",
            partial(_messages, here, False),
            "asyncio TCP streams, round trip",
            lambda: latency(here.streams(work.size)),
            limit=1.0,
            note="asyncio's own loop, as `asyncio.run` makes it",
        ),
        *(
            Row(
                f"software/messages/64/{name}",
                "us",
                partial(_while_busy, partial(_messages, here, polling)),
                "asyncio TCP streams, round trip",
                lambda: _while_busy(lambda: latency(here.streams(work.size))),
                limit=1.0,
                note=f"beside {BUSY_PROCESSES} processes that compute",
            )
            for name, polling in (("busy", True), ("events/busy", False))
        ),
        Row(
            "software/lag_beside_writers",
            "ms",
            partial(lag.measure, here),
            "20 ms",
            constant(20.0),
            limit=1.0,
            note=f"the longest of each round, beside {len(lag.SIZES)} peers that write",
        ),
        Row(
            "native/completed_await",
            "us CPU",
            lambda: _on_instant(here, partial(_completed_awaits, seconds=here.seconds)),
            "1 us",
            constant(1.0),
            limit=1.0,
            note="post and await, on a device that takes no time",
        ),
        *(
            Row(
                f"native/{name}",
                "us CPU",
                partial(_watched_awaits, here, watched),
                "the same without",
                lambda: _watched_awaits(here, nullcontext),
                note=note,
            )
            for name, watched, note in (
                ("trace", partial(trace, _discard), "each request is passed to a function"),
                ("trace_file", partial(trace, os.devnull), "each request is a line of JSON"),
            )
        ),
        Row(
            "native/statistics",
            "us CPU",
            lambda: _on_instant(here, partial(_snapshots, seconds=here.seconds)),
            "a completed await, which has counted",
            lambda: _watched_awaits(here, nullcontext),
            note="one snapshot of a connection's counters",
        ),
        *posting.rows(here),
        Row(
            "native/post_beside_busy_thread",
            "us",
            lambda: _on_instant(here, partial(_beside_busy_thread, seconds=here.seconds)),
            "10 us",
            constant(10.0),
            limit=1.0,
            note="post and completion, one at a time, on a device that takes no time",
        ),
        Row(
            "native/idle_wakeups",
            "per second",
            partial(idle, "wake-ups"),
            "0",
            constant(0.0),
            limit=0.0,
            note=f"of all threads; {CONNECTIONS} connections, idle for {SETTLE_SECONDS:g} s",
        ),
    ]


def _echo(here: Candidates) -> Reading:
    return latency(here.rdma(Workload("echo", 64)))


def _messages(here: Candidates, polling: bool) -> Reading:
    return latency(here.rdma(Workload("messages", 64), polling=polling))


def _while_busy(measure: Callable[[], Reading]) -> Reading:
    """Measure beside processes that compute without pause."""
    with ExitStack() as stack:
        for _ in range(BUSY_PROCESSES):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", COMPUTING]))
            stack.callback(process.kill)
        return measure()


# -- what Python costs ----------------------------------------------------------------------------


Job = Callable[[Connection, MemorySlice, RemoteMemory], Awaitable[Reading]]


def _on_instant(here: Candidates, job: Job) -> Reading:
    prepare()
    work = Workload("write", 64, WINDOW)
    port = here.ports("auto", True).rdma

    async def main() -> Reading:
        async with await connect(
            here.host,
            port,
            device=here.device,
            private_data=work.pack(),
            options=ConnectionOptions(max_send_wr=WINDOW),
            receive_buffers=2,
            receive_size=64,
        ) as connection:
            await connection.send(b"where?")
            remote = RemoteMemory.unpack(await connection.receive())
            local = connection.register(bytearray(work.size))[:]
            return await job(connection, local, remote)

    return run(main)


async def _completed_awaits(
    connection: Connection, local: MemorySlice, remote: RemoteMemory, seconds: float
) -> Reading:
    post = connection.post_write

    async def windows(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            for request in [post(local, remote) for _ in range(WINDOW)]:
                await request
            count += WINDOW
        return count

    with instant(connection):
        await windows(time.perf_counter() + seconds / 10)
        cpu = time.process_time()
        count = await windows(time.perf_counter() + seconds)
        cpu = time.process_time() - cpu
    return Reading(cpu / count * 1e6, extra={"count": count})


def _discard(_requests: Sequence[TracedRequest]) -> None:
    pass


def _watched_awaits(here: Candidates, watched: Callable[[], Any]) -> Reading:
    """Measure completed awaits inside a context, whose end counts: it writes the rest."""
    cpu = time.process_time()
    with watched() as traced:
        found = _on_instant(here, partial(_completed_awaits, seconds=here.seconds))
        inside = time.process_time() - cpu
    outside = time.process_time() - cpu - inside
    assert found.value is not None
    extra = {**found.extra, "lost": getattr(traced, "lost", 0)}
    return replace(found, value=found.value + outside / found.extra["count"] * 1e6, extra=extra)


async def _snapshots(
    connection: Connection, local: MemorySlice, remote: RemoteMemory, seconds: float
) -> Reading:
    await connection.post_write(local, remote)
    count, cpu = 0, time.process_time()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(WINDOW):
            connection.statistics()
        count += WINDOW
    return Reading((time.process_time() - cpu) / count * 1e6, extra={"count": count})


@contextmanager
def _busy_thread() -> Iterator[None]:
    """Another thread that computes in Python."""
    stop = False

    def compute() -> None:
        number = 0
        while not stop:
            number = (number * 31 + 7) % 1_000_003

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


async def _beside_busy_thread(
    connection: Connection, local: MemorySlice, remote: RemoteMemory, seconds: float
) -> Reading:
    post = connection.post_write
    samples = []
    with instant(connection), _busy_thread():
        end = time.perf_counter() + seconds
        now = time.perf_counter()
        while now < end:
            # Begin each with the lock just given back: between two of them the other thread runs.
            before = time.perf_counter()
            await post(local, remote)
            now = time.perf_counter()
            samples.append(now - before)
    mean = sum(samples) / len(samples) * 1e6
    extra = {"count": len(samples), "switch_interval_us": sys.getswitchinterval() * 1e6}
    return Reading(mean, extra=extra)


# -- idleness -------------------------------------------------------------------------------------


async def _idle(here: Candidates) -> list[Reading]:
    ports = here.ports("auto", True)
    work = Workload("echo", 64)
    async with AsyncExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = await connect(
                here.host, ports.rdma, device=here.device, private_data=work.pack()
            )
            await stack.enter_async_context(connection)
        await anyio.sleep(SETTLE_SECONDS)
        found = []
        for _ in range(here.rounds):
            before = wake_ups(ports.pid)
            await anyio.sleep(IDLE_SECONDS)
            now = wake_ups(ports.pid)
            each = {
                thread: (count - before.get(thread, 0)) / IDLE_SECONDS
                for thread, count in now.items()
            }
            extra = {"loop_thread": each[str(ports.pid)]}
            found.append(Reading(sum(each.values()), extra=extra))
        return found


def wake_ups(pid: int) -> dict[str, int]:
    """Return how often each thread of a process has slept and was woken."""
    found = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                found[status.parent.name] = int(line.split()[1])
    return found
