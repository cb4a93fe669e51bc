"""Servers in separate processes on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

from aiordma.bench.loops import SPIN, run
from aiordma.bench.mistakes import ServerEndedError, first_error, one_line, status_of
from aiordma.bench.server import serve

__all__ = ("Ports", "announcing", "main", "serving")

WORDS = "import sys; from aiordma.bench.processes import main; main(sys.argv[1])"

END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Ports:
    """A server's ports for RDMA, TCP streams, a TCP protocol and streams over RDMA (0: not served),
    and its pid."""

    rdma: int
    streams: int
    protocol: int
    over_rdma: int
    pid: int


def main(settings: str) -> None:
    """Run the server, in the process that `serving` starts.

    It announces the ports. If it cannot start, it announces the reason instead.
    """
    given = json.loads(settings)
    loop, spin = given.pop("loop"), given.pop("spin")
    announced = False
    # Ctrl-C ends the parent, and so this process: the client must not see its server leave before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()

    def announce(*ports: int) -> None:
        nonlocal announced
        print(json.dumps(ports), flush=True)
        announced = True

    try:
        run(partial(serve, announce=announce, **given), loop=loop, spin=spin)
    except Exception as error:
        status = status_of(error)
        if announced or status is None:
            raise
        reason = {"reason": one_line(first_error(error)), "status": status}
        print(json.dumps(reason), flush=True)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, in whatever way: the other end of
    standard input is its."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def serving(
    host: str, *, loop: str = "auto", spin: float = SPIN, device: str = "auto"
) -> Iterator[Ports]:
    """Run a server on this machine during the block.

    Raises:
        ServerEndedError: the server did not start; the text says why.
    """
    settings = {"host": host, "port": 0, "device": device, "loop": loop, "spin": spin}
    with announcing([sys.executable, "-c", WORDS, json.dumps(settings)]) as (ports, pid):
        if isinstance(ports, dict):
            raise ServerEndedError(**ports)
        rdma, streams, protocol, over_rdma = ports
        yield Ports(rdma, streams, protocol, over_rdma, pid)


@contextmanager
def announcing(words: list[str]) -> Iterator[tuple[Any, int]]:
    """Run a program during the block that prints a line of JSON when it is ready. Yield the value
    of that line, and the process's pid. Its standard input ends when this process ends.

    Raises:
        ServerEndedError: the program ended without the line. Its own messages are on standard
            error.
    """
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ServerEndedError(f"the benchmark's server ended with status {process.wait()}")
            yield json.loads(line), process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
