"""Which rows are measured where; and one part's run, by itself: python3 -m tests.bench.parts

A part in the virtual machine has a boot of its own, as a guest that has been busy for minutes gets
slow. Here is only what the guest needs: under emulation every import takes its time.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiordma.bench.loops import SPIN

from . import (
    beside_c,
    beside_siw,
    beside_tcp,
    blocks,
    connections,
    connects,
    dask_comms,
    native,
    peers,
    rxe,
    simulated,
    software_roce,
    streams,
    valkey_gets,
)
from .candidates import Candidates
from .place import place
from .rounds import Step, measure_all
from .rows import Row, chosen

HERE = ("127.0.0.1", "software")
GUEST = ("10.1.1.1", "rxe0")
GUEST_ON_SIW = ("10.1.1.1", "siw0")

LONG_SPIN = 20 * SPIN
"""What SPIN is elsewhere, where Python is some twenty times slower, in QEMU's guest; and for rows
beside C that polls for ever."""

MARK = "::bench:: "
"""Begins a line by which a part in the virtual machine reports its progress."""


@dataclass(frozen=True)
class Plan:
    """What is asked for: how many rounds, of how many seconds, and which rows."""

    rounds: int = 5
    seconds: float = 1.0
    pattern: str = ""


@dataclass(frozen=True)
class Part:
    """Rows that are measured in one process."""

    name: str
    make: Callable[[Candidates], list[Row]]
    place: tuple[str, str]
    spin: float = LONG_SPIN
    counts_instructions: bool = False
    """Whether the guest's time is the number of its instructions, on one processor: what else runs
    on this machine changes nothing."""

    @property
    def is_here(self) -> bool:
        return self.place == HERE

    def rows(self, plan: Plan) -> list[Row]:
        """Return those that are asked for; nothing is measured yet."""
        return chosen(self.make(self._candidates(plan)), plan.pattern)

    def run(self, plan: Plan, step: Step) -> list[dict[str, Any]]:
        """Measure them, in this process."""
        with self._candidates(plan) as here:
            rows = measure_all(chosen(self.make(here), plan.pattern), plan.rounds, step)
        return [{**row, **place()} for row in rows]

    def _candidates(self, plan: Plan) -> Candidates:
        return Candidates(*self.place, plan.seconds, plan.rounds, self.spin)


PARTS = (
    Part("native", native.rows, HERE, SPIN),
    Part("beside_c", beside_c.rows, HERE),
    Part("beside_tcp", beside_tcp.rows, HERE, SPIN),
    Part("streams", streams.rows, HERE),
    Part("blocks", blocks.rows, HERE),
    Part("dask", dask_comms.rows, HERE),
    Part("connects", connects.rows, HERE, SPIN),
    Part("software_connections", connections.software_rows, HERE, SPIN),
    Part("valkey", valkey_gets.rows, HERE, SPIN),
    Part("simulation", simulated.rows, HERE, SPIN),
    Part("software_roce", software_roce.rows, HERE),
    Part("latency", rxe.latency_rows, GUEST),
    Part("throughput", rxe.throughput_rows, GUEST),
    Part("roce_beside_rxe", software_roce.rows_beside_rxe, GUEST),
    Part("connects_rxe", connects.rxe_rows, GUEST),
    Part("connections", connections.rows, GUEST),
    Part("streams_rxe", streams.rxe_rows, GUEST),
    Part("valkey_rxe", valkey_gets.rows, GUEST, counts_instructions=True),
    Part("peers", peers.rows, GUEST),
    Part("beside_siw", beside_siw.rows, GUEST_ON_SIW, counts_instructions=True),
)


def words(part: Part, plan: Plan, results: Path) -> list[str]:
    """Return the command that runs a part in the virtual machine."""
    return [
        *("python", "-m", "tests.bench.parts", part.name, str(results)),
        *(str(plan.rounds), str(plan.seconds), plan.pattern or "*"),
    ]


def main(arguments: Sequence[str]) -> None:
    """Be that command."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.bench.parts", description=__doc__)
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("results", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("pattern")
    given = parser.parse_args(arguments)
    (part,) = (part for part in PARTS if part.name == given.part)
    plan = Plan(given.rounds, given.seconds, given.pattern)
    rows = part.run(plan, lambda what: print(f"{MARK}{what}", flush=True))
    given.results.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
