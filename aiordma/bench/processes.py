"""Servers in processes of their own, on this machine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from aiordma.bench.loops import SPIN, run
from aiordma.bench.server import serve

__all__ = ("Ports", "main", "serving")

WORDS = "import sys; from aiordma.bench.processes import main; main(sys.argv[1])"

START_SECONDS = 60.0
END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a server listens: for RDMA, for TCP streams, for a TCP protocol (0: not at all)."""

    rdma: int
    streams: int
    protocol: int
    pid: int


def main(settings: str) -> None:
    """Be the server that `serving` starts."""
    given = json.loads(settings)
    loop, spin = given.pop("loop"), given.pop("spin")

    def announce(*ports: int) -> None:
        print(json.dumps(ports), flush=True)

    with suppress(KeyboardInterrupt):
        run(partial(serve, announce=announce, **given), loop=loop, spin=spin)


@contextmanager
def serving(
    host: str, *, loop: str = "auto", spin: float = SPIN, device: str = "auto"
) -> Iterator[Ports]:
    """Have a server on this machine during the block.

    Raises:
        RuntimeError: it did not start; what it wrote is on standard error.
    """
    settings = {"host": host, "port": 0, "device": device, "loop": loop, "spin": spin}
    process = subprocess.Popen(
        [sys.executable, "-c", WORDS, json.dumps(settings)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the benchmark's server ended with status {process.wait()}")
        rdma, streams, protocol = json.loads(line)
        yield Ports(rdma, streams, protocol, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
