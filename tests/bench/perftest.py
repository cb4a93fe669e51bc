"""References in C: the programs of perftest.

Each run starts a server and a client of its own. The latency programs of perftest that exchange
messages print half of a round trip: it is doubled here.
"""

import re
import subprocess
import time

from tests.ports import free_port

from .processor import ended_processor_seconds
from .rows import Reading

SECONDS = 60.0
"""For any of these programs: each takes a few at most, and what hangs is said in its row. The time
of a guest that counts its instructions jumps while it waits for its disk: by 9 s were seen."""

MEBIBYTE = 1 << 20


class ProgramError(RuntimeError):
    """A reference did not run; says what it wrote."""


def against_itself(
    program: list[str], client: list[str], server: list[str], more_seconds: float = 0.0
) -> str:
    """Run a program's two sides; return what the client printed.

    Args:
        program: the words that both begin with.
        client: the client's other words.
        server: the server's.
        more_seconds: that they may take beside SECONDS.
    """
    limit = SECONDS + more_seconds
    serving = subprocess.Popen([*program, *server], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + limit
        while True:
            # A client that comes before the server listens ends at once.
            time.sleep(0.3)
            asked = subprocess.run(
                [*program, *client], capture_output=True, text=True, timeout=limit
            )
            if asked.returncode == 0:
                return asked.stdout
            if serving.poll() is not None or time.monotonic() > deadline:
                raise ProgramError(f"{' '.join(program)}: {asked.stdout}{asked.stderr}")
    finally:
        try:
            serving.wait(2)
        except subprocess.TimeoutExpired:
            serving.kill()
            serving.wait()


def columns(output: str) -> list[float]:
    """Return the numbers of perftest's one line of results.

    Raises:
        ProgramError: there is none.
    """
    for line in output.splitlines():
        if re.fullmatch(r"\s*\d+\s+\d+(\s+[\d.]+)+\s*", line):
            return [float(word) for word in line.split()]
    raise ProgramError(f"no results in what perftest printed:\n{output}")


def run_perftest(
    name: str, host: str, size: int, rounds: int, *words: str, within: tuple[str, ...] = ()
) -> list[float]:
    """Run one of perftest's programs, connected by the connection manager.

    Args:
        name: the program.
        host: the server's address.
        size: of a message, in bytes.
        rounds: how many.
        words: more of its options.
        within: the command, if any, that runs the program.
    """
    program = [*within, name, "-R", "-F", "-s", str(size), "-n", str(rounds), *words]
    program += ["-p", str(free_port())]
    return columns(against_itself(program, [host], []))


LATENCY = ("size", "count", "min", "max", "typical", "mean", "deviation", "p99", "p99.9")


def latency_of(
    name: str,
    host: str,
    size: int,
    rounds: int,
    *words: str,
    halves: bool = False,
    within: tuple[str, ...] = (),
) -> Reading:
    """Return the median that ib_*_lat calls typical, in microseconds; the rest is beside it."""
    printed = run_perftest(name, host, size, rounds, *words, within=within)
    found = dict(zip(LATENCY, printed, strict=False))
    factor = 2 if halves else 1
    times = {f"{key}_us": value * factor for key, value in found.items() if key not in LATENCY[:2]}
    return Reading(times["typical_us"], extra={"count": found["count"], **times})


def rate_of(
    name: str, host: str, size: int, rounds: int, depth: int, within: tuple[str, ...] = ()
) -> Reading:
    """Return messages per second of ib_*_bw, each of them signaled."""
    before = ended_processor_seconds()
    found = run_perftest(
        name, host, size, rounds, "-t", str(depth), *_signaled(name), within=within
    )
    used = (ended_processor_seconds() - before) / rounds * 1e6
    return Reading(found[4] * 1e6, extra={"mebibytes_per_second": found[3]}, cpu_us=used)


def bandwidth_of(
    name: str, host: str, size: int, rounds: int, depth: int, within: tuple[str, ...] = ()
) -> Reading:
    """Return megabytes (10**6) per second of ib_*_bw."""
    before = ended_processor_seconds()
    found = run_perftest(
        name, host, size, rounds, "-t", str(depth), *_signaled(name), within=within
    )
    used = (ended_processor_seconds() - before) / (rounds * size / 1e6) * 1e6
    return Reading(found[3] * MEBIBYTE / 1e6, cpu_us=used)


def _signaled(name: str) -> tuple[str, ...]:
    # ib_read_bw knows no -Q: a READ is signaled in any case.
    return () if name == "ib_read_bw" else ("-Q", "1")
