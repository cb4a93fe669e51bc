"""The choices that a seed makes in a simulation, and which of them a failing run needs.

Each choice has a default: the turn goes to the loop that waits longest, no packet is late or lost.
A run with the seed's choices at some places, and the default at all others, is a run like any
other. So a failing run is shortened by dropping choices while it still fails in the same way. What
is left has a text, "19:d3-5,l17", which names exactly this run.
"""

import os
import random
import re
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from aiordma._base.arguments import whole_number
from aiordma._native import ffi, lib

__all__ = ("Choices", "ScenarioRandom", "shorten")

MOST_RUNS = 200
MOST_SECONDS = 10.0
"""Of the processor: so a run is shortened alike on a machine that does much else."""

KINDS = "trdlpcs"
"""Letters for enum aiordma_simulated_choice: turn, ready, delay, loss, placing, completion,
scenario."""

Range = tuple[int, int, int]
"""The kind of some choices, the number of the first one, and the number after the last one."""

_TEXT = re.compile(rf"(\d+)(?::((?:[{KINDS}]\d+(?:-\d+)?(?:,|$))*))?")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Choices:
    """A seed, and which of its choices a run makes.

    Attributes:
        seed: the seed.
        kept: the choices, in their order; None: all.
        made: how many choices of each kind the run has made.
        now: the run's virtual time at its end, in seconds.
    """

    def __init__(self, seed: int | str, kept: Iterable[Range] | None = None) -> None:
        self.kept: list[Range] | None = None if kept is None else _merged(kept)
        self.made: list[int] = []
        self.now: float = 0.0
        if isinstance(seed, str):
            found = _TEXT.fullmatch(seed)
            if found is None:
                raise ValueError(
                    f"{seed!r}: give the seed of a run, a whole number, or the text of a shortened "
                    "run, as the failure shows it"
                )
            seed = int(found[1])
            if found[2] is not None:
                self.kept = _merged(map(_read_range, filter(None, found[2].split(","))))
        self.seed: int = whole_number(seed, "seed", 0, (1 << 64) - 1)

    def __str__(self) -> str:
        if self.kept is None:
            return str(self.seed)
        return f"{self.seed}:" + ",".join(
            f"{KINDS[kind]}{first}" + (f"-{end - 1}" if end - first > 1 else "")
            for kind, first, end in self.kept
        )

    def for_c(self) -> tuple[Any, int]:
        """Return the arguments of `aiordma_simulation_begin`."""
        if self.kept is None:
            return ffi.NULL, 0
        ranges = ffi.new("struct aiordma_simulated_range[]", len(self.kept) + 1)
        for i, (kind, first, end) in enumerate(self.kept):
            ranges[i].kind, ranges[i].first, ranges[i].end = kind, first, end
        return ranges, len(self.kept)

    def ran(self, now: float) -> None:
        """Note what a run has done, at its end."""
        self.now = now
        self.made = [lib.aiordma_simulated_choices(kind) for kind in range(len(KINDS))]


def _read_range(text: str) -> Range:
    first, _, last = text[1:].partition("-")
    return KINDS.index(text[0]), int(first), int(last or first) + 1


def _merged(kept: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for kind, first, end in sorted(kept):
        if merged and merged[-1][0] == kind and merged[-1][2] >= first:
            _, first, before = merged.pop()
            end = max(before, end)
        merged.append((kind, first, end))
    return merged


class ScenarioRandom(random.Random):
    """Random numbers of the seed, for the scenario. By default `random` is nearly 1, so that what
    happens with a probability does not."""

    def random(self) -> float:
        """As of random.Random."""
        parts = 1 << 53
        chosen = lib.aiordma_simulated_choose(lib.AIORDMA_SIMULATED_SCENARIO, parts)
        return float((parts - 1 - chosen) / parts)

    def getrandbits(self, k: int, /) -> int:
        """As of random.Random."""
        number = 0
        for _ in range(0, k, 32):
            chosen = lib.aiordma_simulated_choose(lib.AIORDMA_SIMULATED_SCENARIO, 1 << 32)
            number = number << 32 | chosen
        return number >> -k % 32


def _manner(error: BaseException) -> object:
    """What failures that are the same failure have in common: the lines outside of aiordma."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        (frame.filename, frame.lineno)
        for frame in frames
        if not frame.filename.startswith(_PACKAGE)
    ]
    return type(error), lines or str(error)


def _clip(kept: Iterable[Range], made: list[int]) -> set[Range]:
    """Leave out choices that a run has not made."""
    clipped = ((kind, first, min(end, made[kind])) for kind, first, end in kept)
    return {each for each in clipped if each[1] < each[2]}


def _count(kept: Iterable[Range]) -> int:
    return sum(end - first for _, first, end in kept)


def shorten(
    choices: Choices, error: Exception, run: Callable[[Choices, float], object]
) -> Exception:
    """Look for fewer choices with which a run still fails in the same way.

    Args:
        choices: of the run that has failed.
        error: how it has failed.
        run: runs again, with other choices, for at most so many seconds of virtual time.

    Returns:
        The error of the shortest run that fails, which says so in a note.
    """
    manner = _manner(error)
    limit = 2 * choices.now + 1
    ends = time.process_time() + MOST_SECONDS
    runs = 0

    def failure(kept: Iterable[Range]) -> tuple[Choices, Exception] | None:
        nonlocal runs
        runs += 1
        tried = Choices(choices.seed, kept)
        try:
            run(tried, limit)
        except Exception as found:
            return (tried, found) if _manner(found) == manner else None
        return None

    everything = {(kind, 0, count) for kind, count in enumerate(choices.made) if count}
    if (shortest := failure(everything)) is None:
        error.add_note(
            f"Not shortened: seed {choices} does not fail again in the same way, so something in "
            "the program does not come from the seed"
        )
        return error
    kept = everything
    if (found := failure(())) is not None:
        shortest, kept = found, set()
    untried, has_changed = kept, False
    while untried and runs < MOST_RUNS and time.process_time() < ends:
        largest = max(sorted(untried), key=lambda each: each[2] - each[1])
        untried, without = untried - {largest}, kept - {largest}
        if (found := failure(without)) is not None:
            shortest, has_changed = found, True
            untried, kept = (_clip(each, found[0].made) for each in (untried, without))
        elif _count([largest]) > 1:
            kind, first, end = largest
            halves = {(kind, first, (first + end) // 2), (kind, (first + end) // 2, end)}
            untried, kept = untried | halves, without | halves
        if not untried and has_changed:  # what was needed before may not be now
            untried, has_changed = kept, False
    shorter, error = shortest
    error.add_note(
        f"Shortened from seed {choices}: {_count(shorter.kept or ())} of its {_count(everything)} "
        f"choices are left. Run it again with AIORDMA_SEED={shorter}, or the whole of it with "
        f"AIORDMA_SEED={choices}"
    )
    return error
