"""`make bench`: what a row prints, whatever became of its rounds."""

import re
from collections.abc import Callable
from fnmatch import fnmatch

from tests.bench.parts import PARTS, Plan
from tests.bench.rounds import measure_all
from tests.bench.rows import LESS, Reading, Row
from tests.unit.sources import ROOT


def row(candidate: Callable[[], Reading], refer: Callable[[], Reading]) -> Row:
    return Row("rxe/write/64", "us", candidate, "C", refer, None, LESS)


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
