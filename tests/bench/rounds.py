"""Rounds: reference, candidate, reference, candidate, ... and what became of each."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from .rows import Reading, Row, summary

Step = Callable[[str], None]


def measure_all(rows: Sequence[Row], rounds: int, step: Step) -> list[dict[str, Any]]:
    """Measure each row's rounds; `step` is told of each measurement before it begins."""
    found = []
    for row in rows:
        pairs: list[tuple[Reading, Reading]] = []
        for number in range(1, rounds + 1):
            step(f"{row.name} {number}/{rounds} reference")
            reference = attempt(row.refer)
            step(f"{row.name} {number}/{rounds}")
            pairs.append((reference, attempt(row.candidate)))
        found.append({**summary(row, pairs), "distribution": _distribution(pairs)})
    return found


def attempt(measure: Callable[[], Reading]) -> Reading:
    """Measure once; what went wrong is said in the row, and nothing is dropped for it."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return Reading(None, f"{type(error).__name__}: {error}")


def _distribution(pairs: Sequence[tuple[Reading, Reading]]) -> list[float]:
    """Of the last round: for the picture."""
    return list(pairs[-1][1].distribution) if pairs else []
