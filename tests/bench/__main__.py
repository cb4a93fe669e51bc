"""`make bench`: measure aiordma beside its references, here and in the virtual machine."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import native, report
from .candidates import Candidates
from .rounds import Step, measure_all
from .rows import Row, chosen

PROJECT = Path(__file__).resolve().parents[2]
BUILD = PROJECT / "build"
RESULTS = BUILD / "vm"
"""Which the virtual machine sees too."""

GUEST = ("10.1.1.1", "rxe0")
HERE = ("127.0.0.1", "software")


@dataclass(frozen=True)
class Part:
    """Rows that are measured in one process: in a virtual machine each in a boot of its own, as
    one that has been busy for minutes gets slow."""

    name: str
    rows: Callable[[Candidates], list[Row]]
    place: tuple[str, str]

    @property
    def is_here(self) -> bool:
        return self.place == HERE


PARTS = (Part("native", native.rows, HERE),)


def main() -> int:
    """Run every part, or one of them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each row (BENCH_ROUNDS)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rows", default="", help="part of a row's name, or a pattern (BENCH)")
    parser.add_argument("--part", help="only this part, here and now; its rows go to --results")
    parser.add_argument("--results", type=Path, help="a file for a part's rows")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("there has to be at least one round, of some time")
    if options.part:
        (part,) = [part for part in PARTS if part.name == options.part]
        rows = run_here(part, options, report.tell)
        options.results.write_text(json.dumps(rows))
        return 0
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    """Run what has rows of that name; show and keep what was found."""
    wanted = [part for part in PARTS if rows_of(part, options)]
    if not wanted:
        names = [row.name for part in PARTS for row in rows_of(part, None)]
        print(f"no row is called {options.rows}; there are:", *names, sep="\n", file=sys.stderr)
        return 2
    total = sum(2 * options.rounds * len(rows_of(part, options)) for part in wanted)
    found: list[dict[str, Any]] = []
    failed = []
    with report.bar(total) as step:
        for part in wanted:
            run = run_here if part.is_here else run_in_guest
            try:
                found += run(part, options, step)
            except (subprocess.CalledProcessError, OSError) as error:
                failed.append(f"{part.name}: {error}")
    report.show(found)
    report.keep(found, BUILD)
    print(f"written: {BUILD / 'bench.json'}")
    for words in failed:
        print(f"not measured: {words}", file=sys.stderr)
    return 1 if failed or any(row["value"] is None and not row["note"] for row in found) else 0


def candidates(part: Part, options: argparse.Namespace | None) -> Candidates:
    """Return what measures a part's rows."""
    seconds = options.seconds if options else 1.0
    return Candidates(*part.place, seconds, options.rounds if options else 1)


def rows_of(part: Part, options: argparse.Namespace | None) -> list[Row]:
    """Return a part's rows that are asked for."""
    return chosen(part.rows(candidates(part, options)), options.rows if options else "")


def run_here(part: Part, options: argparse.Namespace, step: Step) -> list[dict[str, Any]]:
    """Measure a part in this process."""
    with candidates(part, options) as here:
        return measure_all(chosen(part.rows(here), options.rows), options.rounds, step)


def run_in_guest(part: Part, options: argparse.Namespace, step: Step) -> list[dict[str, Any]]:
    """Measure a part in the virtual machine."""
    results = RESULTS / f"bench-{part.name}.json"
    results.unlink(missing_ok=True)
    inner = ["python", "-m", "tests.bench", "--part", part.name, "--results", str(results)]
    inner += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    inner += ["--rows", options.rows]
    environment = {"PROVIDER": "rxe", "VM_TIMEOUT": "1800", **os.environ}
    command = [sys.executable, "-m", "tests.vm", "run", shlex.join(inner)]
    with subprocess.Popen(
        command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(report.MARK):
                step(line.removeprefix(report.MARK).rstrip())
            else:
                print(f"{part.name}: {line}", end="", file=sys.stderr)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "the virtual machine's part")
    rows: list[dict[str, Any]] = json.loads(results.read_text())
    return rows


if __name__ == "__main__":
    sys.exit(main())
