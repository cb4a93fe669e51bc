"""What a row is: a candidate, its reference, and what their ratio has to be (pure)."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from statistics import median
from typing import Any, TypeVar

from aiordma.bench.meter import Measurement

LESS = "less"
MORE = "more"

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Reading:
    """One measured value, and what else is known of it. None: not available, see `why`.

    Attributes:
        cpu_us: the processor time of both sides, in microseconds, for each of what the row's unit
            counts: an operation, a message, a MB. None: not measured.
    """

    value: float | None
    why: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    cpu_us: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: as docs/benchmarks.md has it.
        unit: of the values.
        candidate: measures aiordma once.
        reference: what it is compared with, in words.
        refer: measures that once.
        limit: what the ratio (candidate / reference) may be at most, or, where more is better, at
            least; None: nothing is asked.
        better: LESS or MORE.
        note: what a reader has to know.
    """

    name: str
    unit: str
    candidate: Callable[[], Reading]
    reference: str
    refer: Callable[[], Reading]
    limit: float | None = None
    better: str = LESS
    note: str = ""


def constant(value: float) -> Callable[[], Reading]:
    """Return a reference that is a number."""
    return lambda: Reading(value)


def in_turn(measure: Callable[[Key], Iterable[Reading]]) -> Callable[[Key], Reading]:
    """Return a function that returns the next round's reading of a key: they are measured together,
    when the first is asked for."""
    found: dict[Key, Iterator[Reading]] = {}

    def following(key: Key) -> Reading:
        if key not in found:
            found[key] = iter(measure(key))
        return next(found[key])

    return following


def together(measure: Callable[[], Mapping[Key, Iterable[Reading]]]) -> Callable[[Key], Reading]:
    """As `in_turn`, for keys that are measured together."""
    measured = cache(measure)
    return in_turn(lambda key: measured()[key])


def latency(found: Measurement) -> Reading:
    """Return the median of one measurement, in microseconds, with the rest beside it."""
    return Reading(found.percentile_us(50), extra=found.as_dict(), cpu_us=found.cpu_us)


def rate(found: Measurement) -> Reading:
    """Return the operations per second."""
    return Reading(found.rate, extra=found.as_dict(), cpu_us=found.cpu_us)


def bandwidth(found: Measurement) -> Reading:
    """Return megabytes (10**6) per second."""
    cpu_us = found.cpu_us / found.size * 1e6
    return Reading(found.megabytes_per_second, extra=found.as_dict(), cpu_us=cpu_us)


def ratio(value: float | None, reference: float | None) -> float | None:
    """Return value / reference; None if either is None, or the reference is 0."""
    if value is None or not reference:
        return None
    return value / reference


def chosen(rows: Sequence[Row], pattern: str) -> list[Row]:
    """Return the rows whose names have the pattern: a part of the name, or with * and ? all."""
    if not any(letter in pattern for letter in "*?["):
        pattern = f"*{pattern}*"
    return [row for row in rows if fnmatchcase(row.name, pattern)]


def summary(row: Row, pairs: Sequence[tuple[Reading, Reading]]) -> dict[str, Any]:
    """Return a row of build/bench.json, of its rounds' (reference, candidate)."""
    values = [candidate.value for _, candidate in pairs if candidate.value is not None]
    references = [reference.value for reference, _ in pairs if reference.value is not None]
    cpu_us = [candidate.cpu_us for _, candidate in pairs if candidate.cpu_us is not None]
    their_cpu_us = [reference.cpu_us for reference, _ in pairs if reference.cpu_us is not None]
    ratios = [ratio(candidate.value, reference.value) for reference, candidate in pairs]
    known = [each for each in ratios if each is not None]
    middle = median(known) if known else None
    whys = dict.fromkeys([row.note] + [reading.why for pair in pairs for reading in pair], None)
    return {
        "name": row.name,
        "value": median(values) if values else None,
        "unit": row.unit,
        "reference": row.reference,
        "reference_value": median(references) if references else None,
        "ratio": middle,
        "cpu_us": median(cpu_us) if cpu_us else None,
        "reference_cpu_us": median(their_cpu_us) if their_cpu_us else None,
        "rounds": len(pairs),
        "better": row.better,
        "limit": row.limit,
        "met": met(row, middle, values),
        "note": "; ".join(why for why in whys if why),
        "samples": [
            {
                "value": candidate.value,
                "reference_value": reference.value,
                "ratio": each,
                "details": candidate.extra,
                "reference_details": reference.extra,
            }
            for (reference, candidate), each in zip(pairs, ratios, strict=True)
        ],
    }


def met(row: Row, middle: float | None, values: Sequence[float]) -> bool | None:
    """Whether the row's goal is reached; None where it has none, or nothing was measured."""
    if row.limit is None:
        return None
    if middle is None:
        # Nothing to divide by: the goal is nothing.
        return median(values) <= row.limit if values and row.limit == 0 else None
    return middle <= row.limit if row.better == LESS else middle >= row.limit
