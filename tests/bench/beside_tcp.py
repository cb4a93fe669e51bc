"""Rows of this machine: large transfers of the software device beside a plain C program over TCP,
and what connections cost each other.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import anyio

from aiordma.bench.client import measure
from aiordma.bench.loops import run
from aiordma.bench.meter import Measurement
from aiordma.bench.processes import announcing
from aiordma.bench.workload import Workload
from tests.ports import free_port

from . import streams
from .candidates import Candidates
from .compiling import compiled
from .perftest import against_itself
from .rows import MORE, Reading, Row, bandwidth
from .rxe import WINDOW
from .same_work import rounds_of

SIZE = 1 << 20
DEPTH = 16
PERCENT = 99
MEGABYTE = 1e6


def rows(here: Candidates) -> list[Row]:
    """Return them all."""
    return [
        *(
            row
            for operation in ("write", "read")
            for row in _beside_plain_c(here, Workload(operation, SIZE, DEPTH))
        ),
        _of_two_connections(here, Workload("write", 64, WINDOW), f"write/64/window{WINDOW}"),
        _of_two_connections(here, Workload("write", SIZE, DEPTH), f"write/{SIZE}"),
        _beside_stream(here, "software/echo/64/beside_stream", polling=True, limit=5.0),
        _beside_stream(here, "software/echo/64/events/beside_stream", polling=False),
        streams.tcp_beside_stream(here),
    ]


# -- large transfers ------------------------------------------------------------------------------


def _beside_plain_c(here: Candidates, work: Workload) -> list[Row]:
    refer = partial(_plain_c, here, work)

    def row(name: str, candidate: Callable[[], Reading], limit: float | None = None) -> Row:
        reference = "a plain C program over TCP"
        return Row(name, "MB/s", candidate, reference, refer, limit, MORE)

    name = f"software/{work.operation}/{work.size}"
    return [
        row(name, lambda: bandwidth(here.rdma(work, timed=False)), 0.9),
        row(f"{name}/in_c", partial(_in_c, here, work)),
    ]


def _plain_c(here: Candidates, work: Workload) -> Reading:
    place = [here.host, str(free_port())]
    numbers = (work.size, work.depth, round(here.seconds * 1000), 1, 0)
    printed = against_itself(
        [str(compiled("plain_tcp.c", "-std=gnu11"))],
        ["ask", *place, work.operation, *map(str, numbers)],
        ["serve", *place],
        more_seconds=here.seconds,
    )
    count, nanoseconds, processor = map(int, printed.split())
    extra = {"count": count, "cpu_us": processor / count / 1000}
    return Reading(count * work.size / nanoseconds * 1e9 / MEGABYTE, extra=extra)


def _in_c(here: Candidates, work: Workload) -> Reading:
    (found,) = rounds_of(here.host, here.device, work, here.seconds, polling=False)
    assert found.value is not None
    return Reading(found.value * work.size / MEGABYTE, extra=found.extra)


# -- two connections ------------------------------------------------------------------------------


def _of_two_connections(here: Candidates, work: Workload, name: str) -> Row:
    return Row(
        f"software/{name}/two_connections",
        "per second",
        partial(_at_once, here, work, 2),
        "one connection",
        partial(_at_once, here, work, 1),
        limit=1.0,
        better=MORE,
        note="the sum of both connections' rates",
    )


def _at_once(here: Candidates, work: Workload, connections: int) -> Reading:
    """Return the sum of the rates of connections that do the same work at the same time."""
    port = here.ports("auto", True).rdma
    found: list[Measurement] = []

    async def one() -> None:
        found.append(
            await measure(here.host, port, work, here.seconds, device=here.device, timed=False)
        )

    async def all_of_them() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(connections):
                group.start_soon(one)

    began, processor = time.perf_counter(), time.process_time()
    run(all_of_them, spin=here.spin)
    busy = (time.process_time() - processor) / (time.perf_counter() - began)
    rates = [each.rate for each in found]
    return Reading(sum(rates), extra={"rates": rates, "cores_busy_at_the_client": busy})


# -- a peer that streams --------------------------------------------------------------------------


def _beside_stream(
    here: Candidates, name: str, *, polling: bool, limit: float | None = None
) -> Row:
    work = Workload("echo", 64)

    def slowest() -> Reading:
        found = here.rdma(work, polling=polling)
        return Reading(found.percentile_us(PERCENT), extra=found.as_dict())

    def beside_stream() -> Reading:
        port = here.ports("auto", polling).rdma
        words = [sys.executable, "-m", "tests.bench.streaming", str(port)]
        with announcing(words):
            return slowest()

    return Row(
        name,
        "us",
        beside_stream,
        "the same without that peer",
        slowest,
        limit,
        note=f"p{PERCENT}",
    )
