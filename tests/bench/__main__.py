"""`make bench`: measure aiordma beside its references, here and in the virtual machine."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import peers, report
from .parts import MARK, PARTS, Part, Plan, words
from .rounds import Step
from .same_work import compile_same_work

PROJECT = Path(__file__).resolve().parents[2]
BUILD = PROJECT / "build"
TEST_BED = (sys.executable, "-m", "tests.vm")
RESULTS = BUILD / "vm"
"""Which the virtual machine sees too."""


def main() -> int:
    """Parse the command line and measure; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each row (BENCH_ROUNDS)")
    parser.add_argument("--seconds", type=float, default=1.0, help="a measurement (BENCH_SECONDS)")
    parser.add_argument("--rows", default="", help="part of a row's name, or a pattern (BENCH)")
    parser.add_argument(
        "--bed",
        choices=("qemu", "uml"),
        default=os.environ.get("BED") or "qemu",
        help="what the virtual machine is (BED): uml measures only its rows, by user-mode Linux",
    )
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("there has to be at least one round, of some time")
    plan = Plan(options.rounds, options.seconds, options.rows)
    parts = [part for part in PARTS if options.bed == "qemu" or not part.is_here]
    wanted = [part for part in parts if part.rows(plan)]
    if not wanted:
        names = [row.name for part in parts for row in part.rows(Plan())]
        print(f"no row is called {plan.pattern}; there are:", *names, sep="\n", file=sys.stderr)
        return 2
    os.environ["BED"] = options.bed
    if not prepare(wanted):
        return 1
    found, failed = measure(wanted, plan)
    report.show(found)
    name = "bench" if options.bed == "qemu" else f"bench-{options.bed}"
    report.keep(found, BUILD, name)
    print("written:", BUILD / f"{name}.json", BUILD / f"{name}.md")
    for failure in failed:
        print(f"not measured: {failure}", file=sys.stderr)
    return 1 if failed else 0


def prepare(parts: list[Part]) -> bool:
    """Make what the guest would make slowly, and what would count for a row.

    Returns whether the virtual machine can be started; if not, that has been explained.
    """
    compile_same_work()
    if any(part.name in ("peers", "blocks") for part in parts):
        print("looking for other libraries: the first time takes minutes", file=sys.stderr)
        peers.prepare()
    if all(part.is_here for part in parts):
        return True
    return subprocess.run([*TEST_BED, "prepare"], cwd=PROJECT).returncode == 0


def measure(parts: list[Part], plan: Plan) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all parts, and which part failed as a whole, and why."""
    found: list[dict[str, Any]] = []
    failed = []
    with report.bar(sum(2 * plan.rounds * len(part.rows(plan)) for part in parts)) as step:
        for part in parts:
            try:
                found += part.run(plan, step) if part.is_here else run_in_guest(part, plan, step)
            except (subprocess.CalledProcessError, OSError) as error:
                failed.append(f"{part.name}: {error}")
    return found, failed


def run_in_guest(part: Part, plan: Plan, step: Step) -> list[dict[str, Any]]:
    """Measure a part in the virtual machine."""
    results = RESULTS / f"bench-{part.name}.json"
    results.unlink(missing_ok=True)
    command = shlex.join(words(part, plan, results))
    environment = {"VM_TIMEOUT": "1800", **os.environ, "PROVIDER": part.place[1].rstrip("0")}
    if part.counts_instructions:
        environment |= {"VM_SMP": "1", "VM_QEMU": "-icount shift=1,sleep=off"}
    with subprocess.Popen(
        [*TEST_BED, "run", command],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                step(line.removeprefix(MARK).rstrip())
            else:
                print(f"{part.name}: {line}", end="", file=sys.stderr)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    rows: list[dict[str, Any]] = json.loads(results.read_text())
    return rows


if __name__ == "__main__":
    sys.exit(main())
