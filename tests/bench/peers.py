"""Rows of the virtual machine: the same round trip by other Python libraries.

What is not on this machine is installed before the first boot, into build/bench; what cannot be
had is a row that says why.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiordma.bench.workload import Workload
from tests.ports import free_port

from ..vm import packages
from ..vm.report import TestBedError
from .candidates import Candidates
from .compiling import FOLDER, HERE
from .perftest import ProgramError
from .rows import Reading, Row, latency

SIZE = 64
FOUND = FOLDER / "peers.json"
INSTALL_SECONDS = 900.0
LAST_WORDS = 300
ANSWER_SECONDS = 60.0
"""For a program to start, and to measure."""

DEBIAN_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Peer:
    """A library, and which Python has it; or why none has."""

    python: str = ""
    why: str = ""
    note: str = ""


def rows(here: Candidates) -> list[Row]:
    """Return them all."""
    candidate = partial(_candidate, here)

    def row(name: str, reference: str, refer: Callable[[], Reading]) -> Row:
        return Row(f"peer/{name}/{SIZE}", "us", candidate, reference, refer, limit=1.0)

    return [
        *(
            row(f"{library}_{way}", f"{library}, {way}", _Program(here, library, way).ask)
            for library, way in (
                ("pyverbs", "polling"),
                ("pyverbs", "asyncio"),
                ("ucxx", "polling"),
                ("ucxx", "blocking"),
            )
        ),
        row("asyncio_streams", "asyncio TCP streams", partial(_streams, here, "asyncio")),
        row("asyncio_protocol", "asyncio TCP protocol", partial(_protocol, here, "asyncio")),
        row("uvloop_streams", "uvloop TCP streams", partial(_streams, here, "uvloop")),
        row("uvloop_protocol", "uvloop TCP protocol", partial(_protocol, here, "uvloop")),
    ]


def _candidate(here: Candidates) -> Reading:
    return latency(here.rdma(Workload("echo", SIZE)))


def _streams(here: Candidates, loop: str) -> Reading:
    return latency(here.streams(SIZE, loop))


def _protocol(here: Candidates, loop: str) -> Reading:
    return latency(here.protocol(SIZE, loop))


class _Program:
    """Its two sides, started when first asked, for all rounds: under emulation their imports take
    longer than what they measure. They are stopped between, since some of them never sleep."""

    def __init__(self, here: Candidates, library: str, way: str) -> None:
        self._here = here
        self._library = library
        self._script = HERE / f"{library}_peer.py"
        self._way = way
        self._sides: list[subprocess.Popen[str]] = []

    def ask(self) -> Reading:
        """Measure once."""
        peer = known().get(self._library, Peer(why="it was not looked for"))
        if not peer.python:
            return Reading(None, peer.why)
        if not self._sides:
            self._sides = self._here.keep(self._start(peer))
        for side in self._sides:
            side.send_signal(signal.SIGCONT)
        try:
            _, client = self._sides
            assert client.stdin is not None
            client.stdin.write("again\n")
            client.stdin.flush()
            found = json.loads(_line(client))
        finally:
            for side in self._sides:
                side.send_signal(signal.SIGSTOP)
        return Reading(found["p50_us"], peer.note, extra=found)

    @contextmanager
    def _start(self, peer: Peer) -> Iterator[list[subprocess.Popen[str]]]:
        here = self._here
        place = [] if self._library == "ucxx" else [here.device]
        words = [self._way, *place, here.host, str(free_port()), str(SIZE), str(here.seconds)]
        environment = {**os.environ, "UCX_TLS": "tcp", "UCX_WARN_UNUSED_ENV_VARS": "n"}
        with ExitStack() as stack:
            sides = []
            for role in ("serve", "ask"):
                side = subprocess.Popen(
                    [peer.python, str(self._script), role, *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
                stack.enter_context(side)
                stack.callback(side.kill)
                while _line(side).strip() != "ready":
                    pass
                sides.append(side)
            yield sides


def _line(side: subprocess.Popen[str]) -> str:
    """Return the next line that a program prints, in reasonable time."""
    assert side.stdout is not None
    if not select.select([side.stdout], [], [], ANSWER_SECONDS)[0]:
        raise ProgramError(f"{side.args!r}: nothing for {ANSWER_SECONDS:g} s")
    line = side.stdout.readline()
    if not line:
        raise ProgramError(f"{side.args!r} ended with status {side.wait()}")
    return line


# -- what is there --------------------------------------------------------------------------------


def known() -> dict[str, Peer]:
    """Return what `prepare` found."""
    if not FOUND.exists():
        return {}
    return {name: Peer(**found) for name, found in json.loads(FOUND.read_text()).items()}


def prepare() -> None:
    """Install what is missing; once, and what failed is not tried again until `make clean`."""
    if FOUND.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = {
        "pyverbs": _pyverbs(),
        "ucxx": _ucxx(),
        "mooncake": _mooncake(),
        "nixl": _nixl(),
    }
    FOUND.write_text(json.dumps({name: vars(peer) for name, peer in found.items()}, indent=1))


def _pyverbs() -> Peer:
    try:
        packages.ensure(["python3-pyverbs"])
    except TestBedError as error:
        return Peer(why=str(error))
    return Peer(DEBIAN_PYTHON, note="Debian's python3-pyverbs")


def _ucxx() -> Peer:
    python, why = _installed("ucxx", "ucxx-cu12")
    if not python:
        return Peer(why=f"PyPI's ucxx-cu12: {why}")
    return Peer(python, note="UCX of PyPI's wheel has no verbs transport: over TCP")


def _mooncake() -> Peer:
    package = "mooncake-transfer-engine-non-cuda"
    python, why = _installed("mooncake.engine", package, "numpy")
    return Peer(python, "" if python else f"PyPI's {package}: {why}", "its transport tcp")


def _nixl() -> Peer:
    # Without its dependencies, which are torch and CUDA.
    python, why = _installed("nixl._api", "nixl", "nixl-cu12", "numpy", options=["--no-deps"])
    return Peer(python, "" if python else f"PyPI's nixl: {why}", "UCX over TCP")


def _installed(module: str, *given: str, options: Sequence[str] = ()) -> tuple[str, str]:
    """Install packages of PyPI in an environment of their own; return its Python, or what went
    wrong."""
    folder = FOLDER / f"venv-{module}"
    shutil.rmtree(folder, ignore_errors=True)
    log = FOLDER / f"{module}.log"
    python = folder / "bin" / "python"
    with log.open("w") as written:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", *options, *given],
            [str(python), "-c", f"import {module}"],
        ):
            try:
                subprocess.run(
                    command,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=INSTALL_SECONDS,
                )
            except (OSError, subprocess.SubprocessError) as error:
                return "", f"{_reason(log) or error} (see {log.relative_to(FOLDER.parents[1])})"
    return str(python), ""


def _reason(log: Path) -> str:
    """Return the last error in a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "rror" in line]
    return errors[-1][:LAST_WORDS] if errors else ""
