"""Rounds: reference, candidate, reference, candidate, ... and what became of each."""

import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .rows import Reading, Row, summary

Step = Callable[[str], None]

MOST_SECONDS = 300.0
"""For one measurement, with all that it prepares: what hangs is a row that says so."""
AGAIN_SECONDS = 5.0
"""Then again, as leaving what hangs may hang, too."""


def measure_all(rows: Sequence[Row], rounds: int, step: Step) -> list[dict[str, Any]]:
    """Measure each row's rounds; `step` is called before each measurement."""
    found = []
    for row in rows:
        pairs: list[tuple[Reading, Reading]] = []
        for number in range(1, rounds + 1):
            step(f"{row.name} {number}/{rounds} reference")
            reference = attempt(row.refer)
            step(f"{row.name} {number}/{rounds}")
            pairs.append((reference, attempt(row.candidate)))
        found.append(summary(row, pairs))
    return found


def attempt(measure: Callable[[], Reading]) -> Reading:
    """Measure once; what went wrong is said in the row, and nothing is dropped for it."""
    try:
        with _limited():
            return measure()
    except Exception as error:
        traceback.print_exc()
        return Reading(None, f"{type(error).__name__}: {error}")


@contextmanager
def _limited() -> Iterator[None]:
    def over(*_: object) -> None:
        raise TimeoutError(f"not done after {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
