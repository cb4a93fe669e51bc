"""The parts of `make test`: several targets of the Makefile at the same time.

What a part prints goes into its log, build/<part>.log, and is shown in one piece when the part
ends. Until then a line a minute says how far each one is.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from . import packages
from .report import TestBedError, say

PROGRESS_SECONDS = 60
START_OF_TESTS = "= test session starts ="
NICENESS = {"test-native": 5, "test-siw": 3}  # they are shorter than test-rxe
ENOUGH_PROCESSORS = 4  # for guests of two processors beside each other
END_SECONDS = 30  # what a part that was interrupted takes at most to end its own programs


class Part:
    """A target that runs, and its log."""

    def __init__(self, make: str, target: str, logs: Path) -> None:
        self.target = target
        self.log = logs / f"{target}.log"
        self.started = time.monotonic()
        niceness = NICENESS.get(target)
        way = [] if niceness is None else ["nice", "-n", str(niceness)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*way, make, "--keep-going", "--no-print-directory", target],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def show(self) -> None:
        """Print its whole output, below a line that says how it ended."""
        seconds = time.monotonic() - self.started
        how = f"status {self.process.returncode} after {duration(seconds)}"
        print(f"\n== {self.target}: {how}\n\n{self.output}", flush=True)


Ended: TypeAlias = "queue.SimpleQueue[Part | None]"
"""The parts that have ended; None for an interrupt."""


def run(make: str, targets: list[str], logs: Path) -> int:
    """Run the targets of the Makefile here, all at once; returns 1 if one of them failed, else 0.

    An interrupt, or SIGTERM, ends them all and raises KeyboardInterrupt.
    """
    install()
    logs.mkdir(parents=True, exist_ok=True)
    ended: Ended = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not raised where it comes, which can be between the start of a part and its first mention.
        signal.signal(number, lambda *_: ended.put(None))
    running: list[Part] = []
    started = time.monotonic()
    print(f"== {', '.join(targets)}: at the same time, each writes its log", flush=True)
    try:
        for target in targets:
            running.append(Part(make, target, logs))
            threading.Thread(target=wait, args=(running[-1], ended), daemon=True).start()
            print(f"   {running[-1].log}", flush=True)
        failed = False
        while running:
            try:
                part = ended.get(timeout=PROGRESS_SECONDS)
            except queue.Empty:
                print(f"{duration(time.monotonic() - started):>8}: {progress(running)}", flush=True)
                continue
            if part is None:
                raise KeyboardInterrupt
            running.remove(part)
            failed |= part.process.returncode != 0
            part.show()
        return int(failed)
    finally:
        end(running)


def install() -> None:
    """Install what the parts need, before one of them runs on libraries that are replaced below it.

    The parts that can do without go on without; the others say it again.
    """
    try:
        packages.ensure(packages.TESTS)
    except TestBedError as error:
        say(str(error))


def environment() -> dict[str, str]:
    """The parts' environment: it has VM_SMP=1 where the machine has few processors, unless it says
    otherwise.

    A guest's processor that waits for another one spins. Where the other one has to wait for a turn
    on this machine, that takes half of rxe's processor time again.
    """
    few = (os.cpu_count() or 1) < ENOUGH_PROCESSORS
    return ({"VM_SMP": "1"} if few else {}) | os.environ


def wait(part: Part, ended: Ended) -> None:
    """Wait for the part's end, in a thread of its own, and report it."""
    part.process.wait()
    ended.put(part)


def end(parts: Iterable[Part]) -> None:
    """End what still runs: make passes SIGTERM on to what it started."""
    for part in parts:
        part.process.terminate()
    for part in parts:
        try:
            part.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{part.target} does not end", file=sys.stderr)
            part.process.kill()


def progress(parts: Iterable[Part]) -> str:
    """How far each part is."""
    return ", ".join(f"{part.target} {percentage(part.output)}" for part in parts)


def percentage(output: str) -> str:
    """What pytest's output says last; the run is counted where there were others before it."""
    _, *runs = output.split(START_OF_TESTS)
    if not runs:
        return "prepares"
    found = re.findall(r"\[ *(\d+)%\]", runs[-1])
    number = f" of its run {len(runs)}" if len(runs) > 1 else ""
    return f"{found[-1] if found else 0} %{number}"


def duration(seconds: float) -> str:
    """Minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
