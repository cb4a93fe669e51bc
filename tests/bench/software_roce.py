"""Rows of RoCE v2 without a driver: perftest on software_roce with itself, beside the same on the
built-in device's iWARP here, and beside the kernel's rxe in the virtual machine."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiordma.cli.exec import FOLDER

from . import perftest
from .candidates import Candidates
from .rows import LESS, MORE, Reading, Row

LOOPBACK = "127.0.0.1"
SPACE = "aiordma-bench"
IN_SPACE = ("ip", "netns", "exec", SPACE)
DEPTH = 16
WINDOW = 64
EMULATED = 10
"""How much slower the virtual machine is, roughly."""

# How often it happens in a second, roughly.
ROUND_TRIPS = 20_000
MESSAGES = 100_000
BYTES = 1_000_000_000

Measure = Callable[..., Reading]


def rows(here: Candidates) -> list[Row]:
    """Beside iWARP, natively."""
    ours, theirs = on_exported("software_roce"), on_exported("software")
    return [
        Row(
            f"roce/{each.name}",
            each.unit,
            partial(each.measure, LOOPBACK, within=ours),
            f"{each.program} on iWARP",
            partial(each.measure, LOOPBACK, within=theirs),
            better=each.better,
        )
        for each in _works(here.seconds)
    ]


def rows_beside_rxe(here: Candidates) -> list[Row]:
    """Beside rxe on the guest's own interface. Ours is in a network namespace: the kernel has the
    port 4791 of the guest's."""

    def ours(measure: Measure) -> Reading:
        if subprocess.run(["ip", "netns", "add", SPACE], capture_output=True).returncode == 0:
            subprocess.run(["ip", "-n", SPACE, "link", "set", "lo", "up"], check=True)
        return measure(LOOPBACK, within=(*IN_SPACE, *on_exported("software_roce")))

    return [
        Row(
            f"rxe/roce/{each.name}",
            each.unit,
            partial(ours, each.measure),
            f"{each.program} on rxe",
            partial(each.measure, here.host),
            limit=2.0 if each.better == LESS else 0.5,
            better=each.better,
        )
        for each in _works(here.seconds / EMULATED)
    ]


def on_exported(device: str) -> tuple[str, ...]:
    """The command by which a C program runs on a built-in device."""
    return ("env", f"LD_LIBRARY_PATH={FOLDER}", f"AIORDMA_DEVICE={device}")


@dataclass(frozen=True)
class _Work:
    """What a program of perftest does; `measure` takes the host, and what runs the program."""

    name: str
    unit: str
    program: str
    measure: Measure
    better: str = MORE


def _works(seconds: float) -> list[_Work]:
    def rate(name: str, program: str) -> _Work:
        def measure(host: str, within: tuple[str, ...] = ()) -> Reading:
            return perftest.rate_of(program, host, 64, _count(MESSAGES), WINDOW, within)

        return _Work(name, "per second", f"{program} -t {WINDOW} -Q 1", measure)

    def bulk(name: str, program: str, size: int) -> _Work:
        def measure(host: str, within: tuple[str, ...] = ()) -> Reading:
            rounds = _count(BYTES / size)
            return perftest.bandwidth_of(program, host, size, rounds, DEPTH, within)

        return _Work(f"{name}/{size}", "MB/s", f"{program} -t {DEPTH}", measure)

    def _count(a_second: float) -> int:
        return max(2 * WINDOW, round(a_second * seconds))

    def latency(host: str, within: tuple[str, ...] = ()) -> Reading:
        count = _count(ROUND_TRIPS)
        return perftest.latency_of("ib_send_lat", host, 64, count, halves=True, within=within)

    return [
        _Work("send_receive/64", "us", "ib_send_lat, round trip", latency, LESS),
        rate("send/64/window64", "ib_send_bw"),
        rate("write/64/window64", "ib_write_bw"),
        *(bulk("write", "ib_write_bw", size) for size in (65536, 1048576)),
        bulk("read", "ib_read_bw", 65536),
    ]
