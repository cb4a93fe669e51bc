"""The process under attack: runs one coroutine of a test module, with limits on its resources.

A test starts it by `Victim(serve_something)`, where `serve_something` is an async function at the
top of a module, `async def serve_something(ready: Ready) -> None`. It opens what it serves on and
calls `ready(port, ...)`; everything else that it passes is in `Victim.said`.
"""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import anyio

from tests.conftest import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
HOST = "127.0.0.1"


class Ready(Protocol):
    """Announces that the victim serves."""

    def __call__(self, port: int, **said: Any) -> None: ...


Scenario = Callable[[Ready], Awaitable[None]]


class Victim:
    """A process that serves a scenario until the end of the block.

    Args:
        scenario: an async function at the top of a module.
        address_space: RLIMIT_AS in KiB, as `ulimit -v`.
        descriptors: RLIMIT_NOFILE, as `ulimit -n`.
        loop: the event loop: asyncio, uvloop or trio.
        environment: variables beside those of this process.

    Leaving the block fails if the process ended before, by itself or by a signal. Its log is in
    `log()` and in that failure.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        address_space: int | None = None,
        descriptors: int | None = None,
        loop: str = "asyncio",
        environment: dict[str, str] | None = None,
    ) -> None:
        limits = {"address_space": address_space, "descriptors": descriptors}
        words = [scenario.__module__, scenario.__name__, loop, json.dumps(limits)]
        self._log: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.victim", *words],
            cwd=ROOT,
            env=os.environ | {"AIORDMA_DEVICE": "software"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.said = self._first_line()
        self.port: int = self.said["port"]

    def _first_line(self) -> dict[str, Any]:
        # A victim that neither serves nor ends is killed, after which the line is empty.
        guard = threading.Timer(START_SECONDS, self._process.kill)
        guard.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        guard.cancel()
        if not line:
            self._end()
            raise AssertionError(f"the victim did not start:\n{self.log()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)

    @property
    def pid(self) -> int:
        """Of the process, for /proc."""
        return self._process.pid

    def log(self) -> str:
        """Return what it wrote on its standard error so far."""
        return "".join(self._log)

    def resident_kib(self) -> int:
        """Return its resident memory in KiB."""
        return self._status("VmRSS:")

    def descriptors(self) -> int:
        """Return how many file descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def _status(self, field: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1])
        raise AssertionError(f"no {field} in the status of the victim")

    def require_alive(self) -> None:
        """Fail, with its log, if the process has ended."""
        status = self._process.poll()
        if status is not None:
            self._reader.join(10)
            raise AssertionError(f"the victim ended with status {status}:\n{self.log()}")

    def __enter__(self) -> "Victim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.require_alive()
        finally:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def announce(port: int, **said: Any) -> None:
    """Print the line that `Victim` waits for."""
    print(json.dumps({"port": port, **said}), flush=True)


def main() -> None:
    """Serve a scenario: python -m tests.attacks.victim MODULE FUNCTION LOOP LIMITS"""
    module, name, loop, limits = sys.argv[1:]
    given = json.loads(limits)
    # Imports come first: what is limited is the service, not the start of the interpreter.
    scenario = getattr(import_module(module), name)
    if given["address_space"] is not None:
        size = given["address_space"] * 1024
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if given["descriptors"] is not None:
        count = given["descriptors"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    backend, options = BACKENDS[loop]
    anyio.run(scenario, announce, backend=backend, backend_options=options)


if __name__ == "__main__":
    main()
