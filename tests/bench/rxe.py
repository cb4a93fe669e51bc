"""Rows of the virtual machine: latency and throughput over soft-RoCE, beside C."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from aiordma.bench.workload import Workload

from . import perftest, same_work
from .candidates import Candidates
from .rows import MORE, Reading, Row, bandwidth, latency, rate

WINDOW = 64
BULK_DEPTH = 16
OTHER_FUNCTIONS = 1024

# How often the C programs do it in a second, roughly: how many rounds make one measurement.
EVENTS_A_SECOND = 4_000
POLLED_A_SECOND = 15_000
MESSAGES_A_SECOND = 30_000
BYTES_A_SECOND = 300_000_000


def latency_rows(here: Candidates) -> list[Row]:
    """One at a time."""
    host, seconds = here.host, here.seconds
    events = partial(
        perftest.latency_of,
        "ib_send_lat",
        host,
        64,
        _count(EVENTS_A_SECOND, seconds),
        "-e",
        halves=True,
    )
    polled = _count(POLLED_A_SECOND, seconds)

    def candidate(operation: str, polling: bool = True) -> Reading:
        return latency(here.rdma(Workload(operation, 64), polling=polling))

    return [
        Row(
            "rxe/send_receive/64/polling",
            "us",
            partial(candidate, "echo"),
            "ib_send_lat -e, round trip",
            events,
            limit=0.5,
        ),
        Row(
            "rxe/send_receive/64/events",
            "us",
            partial(candidate, "echo", False),
            "ib_send_lat -e, round trip",
            events,
            limit=1.5,
        ),
        Row(
            "rxe/send_receive/64/events/in_c",
            "us",
            in_c(here, Workload("echo", 64), polling=False),
            "ib_send_lat -e, round trip",
            events,
        ),
        Row(
            "rxe/send_receive/64/beside_polling_c",
            "us",
            partial(candidate, "echo"),
            "ib_send_lat, round trip",
            partial(perftest.latency_of, "ib_send_lat", host, 64, polled, halves=True),
        ),
        Row(
            "rxe/messages/64/polling",
            "us",
            partial(candidate, "messages"),
            "ib_send_lat -e, round trip",
            events,
        ),
        Row(
            "rxe/read/64",
            "us",
            partial(candidate, "read"),
            "ib_read_lat",
            partial(perftest.latency_of, "ib_read_lat", host, 64, polled),
            limit=1.25,
        ),
        Row(
            "rxe/read/64/in_c",
            "us",
            in_c(here, Workload("read", 64)),
            "ib_read_lat",
            partial(perftest.latency_of, "ib_read_lat", host, 64, polled),
        ),
        Row(
            "rxe/write/64",
            "us",
            partial(candidate, "write"),
            "one signaled WRITE in C, polled",
            partial(same_work.measured, host, here.device, Workload("write", 64), seconds, True),
            limit=1.25,
        ),
        after_other_code(here, "rxe/write/64/post_in_c"),
    ]


def in_c(here: Candidates, work: Workload, *, polling: bool = True) -> Callable[[], Reading]:
    """The same work as the candidate's, by the same calls, in C: what no Python has a part in."""
    return partial(same_work.measured, here.host, here.device, work, here.seconds, polling)


def after_other_code(here: Candidates, name: str) -> Row:
    """What a post in C takes where other code has run since the last one, whatever it did."""
    post = partial(same_work.posting, here.host, here.device, Workload("write", 64), here.seconds)
    return Row(
        name,
        "us",
        partial(post, OTHER_FUNCTIONS),
        "nothing called in between",
        partial(post, 0),
        note=f"{OTHER_FUNCTIONS} functions called in between, which return at once; not timed",
    )


def throughput_rows(here: Candidates) -> list[Row]:
    """Many in flight."""
    return [
        _rate(here, "rxe/write/64/window64", "write", "ib_write_bw", WINDOW, 0.85),
        _rate(here, "rxe/send/64/window64", "send", "ib_send_bw", WINDOW, 0.7),
        _rate(
            here, "rxe/write/64/window64/in_c", "write", "ib_write_bw", WINDOW, None, is_in_c=True
        ),
        _rate(here, "rxe/write/64/window64/chains", "chain", "ib_write_bw", WINDOW, None),
        *(
            _bulk(here, operation, size)
            for operation in ("write", "read")
            for size in (65536, 1048576)
        ),
        *(_bulk(here, "read", size, is_in_c=True) for size in (65536, 1048576)),
    ]


def _rate(
    here: Candidates,
    name: str,
    operation: str,
    program: str,
    depth: int,
    limit: float | None,
    *,
    is_in_c: bool = False,
) -> Row:
    rounds = _count(MESSAGES_A_SECOND, here.seconds)
    work = Workload(operation, 64, depth)
    return Row(
        name,
        "per second",
        in_c(here, work) if is_in_c else lambda: rate(here.rdma(work, timed=False)),
        f"{program} -t {depth} -Q 1",
        partial(perftest.rate_of, program, here.host, 64, rounds, depth),
        limit,
        MORE,
    )


def _bulk(here: Candidates, operation: str, size: int, is_in_c: bool = False) -> Row:
    rounds = max(2 * BULK_DEPTH, _count(BYTES_A_SECOND // size, here.seconds))
    work = Workload(operation, size, BULK_DEPTH)
    program = f"ib_{operation}_bw"

    def candidate() -> Reading:
        if not is_in_c:
            return bandwidth(here.rdma(work, timed=False))
        found = in_c(here, work)()
        return replace(found, value=(found.value or 0) * size / 1e6)

    return Row(
        f"rxe/{operation}/{size}" + ("/in_c" if is_in_c else ""),
        "MB/s",
        candidate,
        f"{program} -t {BULK_DEPTH}",
        partial(perftest.bandwidth_of, program, here.host, size, rounds, BULK_DEPTH),
        limit=None if is_in_c else 0.95,
        better=MORE,
        note=f"{BULK_DEPTH} in flight on both sides",
    )


def _count(a_second: int, seconds: float) -> int:
    return max(100, round(a_second * seconds))
