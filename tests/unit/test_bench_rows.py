"""`make bench`: what a row prints, whatever became of its rounds, and what its goal means."""

import json
import platform
import re
import signal
import sys
import sysconfig
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiordma.bench.loops import run
from tests.bench import rounds
from tests.bench.parts import PARTS, Plan
from tests.bench.perftest import ProgramError, columns
from tests.bench.place import is_optimised, place
from tests.bench.report import BESIDE, keep
from tests.bench.rounds import measure_all
from tests.bench.rows import LESS, MORE, Reading, Row, chosen, constant
from tests.unit.sources import ROOT

ASKED = {"name", "value", "unit", "reference", "reference_value", "ratio", "rounds"}


def row(
    candidate: Callable[[], Reading],
    refer: Callable[[], Reading],
    limit: float | None = None,
    better: str = LESS,
) -> Row:
    return Row("rxe/write/64", "us", candidate, "C", refer, limit, better)


def series(*values: float) -> Callable[[], Reading]:
    left = iter(values)
    return lambda: Reading(next(left))


def measured(one: Row, rounds: int = 1) -> dict[str, object]:
    (found,) = measure_all([one], rounds, lambda _: None)
    return found


def test_reference_and_candidate_take_turns() -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[[], Reading]:
        def measure() -> Reading:
            order.append(name)
            return Reading(1.0)

        return measure

    told: list[str] = []
    measure_all([row(noting("candidate"), noting("reference"))], 3, told.append)
    assert order == ["reference", "candidate"] * 3
    assert len(told) == 6


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # Not the ratio of the medians, which would be 2 here: each round has its own weather.
    found = measured(row(series(2, 8, 30), series(1, 8, 10)), 3)
    assert (found["value"], found["reference_value"], found["ratio"]) == (8, 8, 2)
    assert found["rounds"] == 3
    found = measured(row(series(4, 5, 6), series(4, 1, 3)), 3)
    assert (found["value"], found["reference_value"], found["ratio"]) == (5, 3, 2)


def test_the_file_is_a_list_of_rows(tmp_path: Path) -> None:
    rows = measured_here(row(series(1, 3), series(1, 2)), 2)
    keep(rows, tmp_path)
    (kept,) = json.loads((tmp_path / "bench.json").read_text())
    assert set(kept) >= ASKED
    assert kept["rounds"] == len(kept["samples"]) == 2
    assert not set(kept) & set(BESIDE)
    line = (tmp_path / "bench.md").read_text().splitlines()[2]
    assert line == "| `rxe/write/64` | 2 us | C: 1.5 | 1.25 | 1.00 to 1.50 |  |  |"


def measured_here(one: Row, rounds: int = 1) -> list[dict[str, Any]]:
    return [{**found, **place()} for found in measure_all([one], rounds, lambda _: None)]


def test_rows_name_the_interpreter_and_the_bed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_VM", "user-mode Linux 7.3.4")
    there = measured_here(row(series(1), series(1)))
    monkeypatch.delenv("AIORDMA_VM")
    keep(there + measured_here(row(series(1), series(1))), tmp_path, "bench-uml")
    first, second = json.loads((tmp_path / "bench-uml.json").read_text())
    assert first["bed"] == "user-mode Linux 7.3.4"
    assert second["bed"].startswith("this machine, Linux ")
    assert platform.python_version() in first["python"]
    places = (tmp_path / "bench-uml.md").read_text().splitlines()[-2:]
    assert places[0].startswith("1 rows on user-mode Linux 7.3.4; CPython")
    assert places[1].startswith("1 rows on this machine")


@pytest.mark.parametrize(
    ("arguments", "prefix", "distribution", "optimised"),
    [
        ("'--enable-shared' '--enable-optimizations'", "/opt/python", "fedora", True),
        ("'--enable-shared'", "/opt/python", "debian", False),
        ("'--enable-shared'", "/usr", "debian", True),
        ("'--enable-shared'", "/usr", "other", False),
    ],
)
def test_optimised_interpreters_are_recognised(
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    prefix: str,
    distribution: str,
    optimised: bool,
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: arguments)
    monkeypatch.setattr(sys, "base_prefix", prefix)
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": distribution})
    assert is_optimised() is optimised


def test_what_could_not_be_measured_stands_there_with_its_reason() -> None:
    def broken() -> Reading:
        raise OSError("no such program")

    found = measured(row(broken, series(1.0, 1.0)), 2)
    assert (found["value"], found["ratio"], found["rounds"]) == (None, None, 2)
    assert found["note"] == "OSError: no such program"
    assert found["met"] is None
    found = measured(row(series(1.0), lambda: Reading(None, "it does not build")))
    assert (found["value"], found["ratio"]) == (1.0, None)
    assert found["note"] == "it does not build"


def test_a_measurement_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def for_ever() -> Reading:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep_forever()
        return Reading(1.0)

    monkeypatch.setattr(rounds, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(rounds, "AGAIN_SECONDS", 0.05)
    found = measured(row(lambda: run(for_ever), constant(1.0)))
    assert (found["value"], found["note"]) == (None, "TimeoutError: not done after 0.05 s")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_one_round_that_failed_does_not_spoil_the_others() -> None:
    numbers = count()

    def flaky() -> Reading:
        if next(numbers) == 1:
            raise OSError("once")
        return Reading(3.0)

    found = measured(row(flaky, constant(2.0)), 3)
    assert (found["ratio"], found["note"]) == (1.5, "OSError: once")


@pytest.mark.parametrize(
    ("better", "limit", "value", "met"),
    [
        (LESS, 1.25, 1.25, True),
        (LESS, 1.25, 1.26, False),
        (MORE, 0.85, 0.85, True),
        (MORE, 0.85, 0.84, False),
        (MORE, None, 0.1, None),
    ],
)
def test_a_goal_is_a_ratio(better: str, limit: float | None, value: float, met: bool) -> None:
    assert measured(row(constant(value), constant(1.0), limit, better))["met"] is met


@pytest.mark.parametrize(("value", "met"), [(0.0, True), (0.5, False)])
def test_a_goal_of_nothing_is_met_by_nothing(value: float, met: bool) -> None:
    found = measured(row(constant(value), constant(0.0), 0.0))
    assert (found["ratio"], found["met"]) == (None, met)


GOALS = {
    "rxe/send_receive/64/polling": 0.5,
    "rxe/send_receive/64/events": 1.5,
    "rxe/read/64": 1.25,
    "rxe/write/64": 1.25,
    "rxe/write/64/window64": 0.85,
    "rxe/send/64/window64": 0.7,
    "rxe/write/65536": 0.95,
    "rxe/write/1048576": 0.95,
    "rxe/read/65536": 0.95,
    "rxe/read/1048576": 0.95,
    "rxe/connections/1000": 0.8,
    "rxe/connections/1000/own_tasks": 0.8,
    "rxe/connect": 0.2,
    "rxe/stream/echo/64": 0.7,
    "rxe/stream/echo/8192": 0.7,
    "rxe/stream/write/65536": 0.7,
    "rxe/stream/write/1048576": 0.7,
    "native/completed_await": 1,
    "native/write_immediate/completed_await": 1,
    "native/write_immediate/beside_write": 1.3,
    "native/idle_wakeups": 0,
    "native/post_beside_busy_thread": 1,
    "software/echo/64": 1,
    "software/lag_beside_writers": 1,
    "software/messages/64": 1,
    "software/messages/64/events": 1,
    "software/messages/64/busy": 1,
    "software/messages/64/events/busy": 1,
    "software/messages/64/beside_posts": 1 / 0.9,
    "software/messages/64/window32": 0.8,
    "software/echo/64/window32/beside_tcp": 0.3,
    "software/views/65536": 0.95,
    "software/send_receive/64/polling": 1.1,
    "software/send_receive/64/events": 1.5,
    "software/read/64": 1.1,
    "software/write/64": 1.1,
    "software/write/64/window64": 0.95,
    "software/send/64/window64": 0.95,
    "software/write/1048576": 0.9,
    "software/read/1048576": 0.9,
    "software/write/64/window64/two_connections": 1,
    "software/write/1048576/two_connections": 1,
    "software/echo/64/beside_stream": 5,
    "software/stream/echo/64": 0.5,
    "software/stream/echo/8192": 0.5,
    "software/stream/echo/64/open_connection": 0.5,
    "software/stream/echo/8192/open_connection": 0.5,
    **{
        f"software/stream/write/{size}{by}{what}": limit
        for size in (65536, 1048576)
        for by in ("", "/open_connection")
        for what, limit in (("", 0.95), ("/processor_time", 1.5))
    },
    "software/connect": 0.5,
    "software/connect/beside_tcp": 0.2,
    "software/stream/connect": 0.15,
    "software/connect/200_at_once": 5,
    "software/connections/1000/own_tasks": 0.8,
    "software/connections/10000": 0.6,
    "software/connections/10000/memory": 1,
    "software/connections/10000/fds": 1,
}
"""What the ratio of a row has to be."""


def test_every_goal_has_a_row_and_the_page_knows_every_row() -> None:
    rows = [row for part in PARTS for row in part.rows(Plan())]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert {row.name: row.limit for row in rows if row.name in GOALS} == GOALS
    assert all(row.limit == 1 for row in rows if row.name.startswith("peer/"))
    page = (ROOT / "docs/benchmarks.md").read_text()
    described = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    patterns = [pattern for cell in described for pattern in re.findall(r"`(.+?)`", cell)]
    assert [name for name in names if not any(fnmatch(name, each) for each in patterns)] == []
    assert [each for each in patterns if not any(fnmatch(name, each) for name in names)] == []


PERFTEST = """
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 64      2000          10.00          230.13       12.50      	       13.73       	2.20
---------------------------------------------------------------------------------------
"""


def test_what_perftest_prints_is_read() -> None:
    assert columns(PERFTEST) == [64, 2000, 10, 230.13, 12.5, 13.73, 2.2]
    with pytest.raises(ProgramError, match="Couldn't"):
        columns("Couldn't connect to 10.1.1.1:22000")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["rxe/read/64", "rxe/write/64", "native/x"]),
        ("rxe", ["rxe/read/64", "rxe/write/64"]),
        ("rxe/*/64", ["rxe/read/64", "rxe/write/64"]),
        ("write", ["rxe/write/64"]),
        ("nothing", []),
    ],
)
def test_rows_are_chosen_by_name(pattern: str, names: list[str]) -> None:
    rows = [
        Row(name, "", constant(1), "", constant(1))
        for name in ("rxe/read/64", "rxe/write/64", "native/x")
    ]
    assert [each.name for each in chosen(rows, pattern)] == names
