"""`make bench`: what a row prints, whatever became of its rounds, and what its goal means."""

import re
import signal
from collections.abc import Callable
from fnmatch import fnmatch

import anyio
import pytest

from aiordma.bench.loops import run
from tests.bench import rounds
from tests.bench.parts import PARTS, Plan
from tests.bench.rounds import measure_all
from tests.bench.rows import LESS, MORE, Reading, Row, constant
from tests.unit.sources import ROOT


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


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # Not the ratio of the medians, which would be 2 here: each round has its own weather.
    found = measured(row(series(2, 8, 30), series(1, 8, 10)), 3)
    assert (found["value"], found["reference_value"], found["ratio"]) == (8, 8, 2)
    assert found["rounds"] == 3
    found = measured(row(series(4, 5, 6), series(4, 1, 3)), 3)
    assert (found["value"], found["reference_value"], found["ratio"]) == (5, 3, 2)


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


def test_page_of_benchmarks_knows_every_row() -> None:
    rows = [row for part in PARTS for row in part.rows(Plan())]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert all(row.limit == 1 for row in rows if row.name.startswith("peer/"))
    page = (ROOT / "docs/benchmarks.md").read_text()
    described = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    patterns = [pattern for cell in described for pattern in re.findall(r"`(.+?)`", cell)]
    assert [name for name in names if not any(fnmatch(name, each) for each in patterns)] == []
    assert [each for each in patterns if not any(fnmatch(name, each) for name in names)] == []
