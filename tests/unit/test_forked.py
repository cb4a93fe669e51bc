"""The stand-in for a Python process that starts slowly: tests/forked."""

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import CLIENT, server, wait_for_the_killed
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(CLIENT), server(), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def waiting() -> subprocess.Popen[str]:
    """A program that has printed its process identifier, and waits."""
    command = [str(CLIENT), server(), "-c", WAITS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
    ],
)
def test_client_ends_as_its_program(source: str, status: int, words: str) -> None:
    done = run("-c", source)
    assert done.returncode == status
    assert done.stderr.endswith(words)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_program(number: int, waiting: subprocess.Popen[str]) -> None:
    with waiting:
        assert waiting.stdout is not None
        program = Path("/proc", waiting.stdout.readline().strip())
        assert program.exists()
        # Again: one SIGINT was seen to do nothing, as Python ignores one that meets a finalizer.
        for _ in range(30):
            waiting.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                waiting.wait(1)
                break
        assert waiting.returncode == -number
        wait_until(lambda: not program.exists())


def test_a_killed_client_ends_first_and_its_program_can_be_waited_for(
    waiting: subprocess.Popen[str],
) -> None:
    with waiting:
        assert waiting.stdout is not None
        program = Path("/proc", waiting.stdout.readline().strip())
        forker = int(program.joinpath("stat").read_text().split()[3])
        os.kill(forker, signal.SIGSTOP)
        try:
            waiting.kill()
            assert waiting.wait(30) == -signal.SIGKILL
            assert program.exists()
        finally:
            threading.Timer(0.2, os.kill, (forker, signal.SIGCONT)).start()
        wait_for_the_killed()
        assert not program.exists()
