"""The stand-in for a Python process that starts slowly: tests/forked."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import CLIENT, server, wait_for_the_killed
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SAYS_WHAT_IT_IS = "import os, sys; print(sys.argv, os.getcwd(), os.environ.get('WORD'), input())"
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def run(
    *arguments: str, cwd: Path | None = None, words: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CLIENT), server(), *arguments],
        cwd=cwd,
        env=os.environ | environment,
        input=words,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def waiting() -> subprocess.Popen[str]:
    """A program that has printed its process identifier, and waits."""
    command = [str(CLIENT), server(), "-c", WAITS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_program_has_what_its_process_has(tmp_path: Path) -> None:
    done = run("-c", SAYS_WHAT_IT_IS, "one word", "", cwd=tmp_path, words="from input", WORD="a=b")
    assert done.stderr == ""
    assert done.stdout == f"['-c', 'one word', ''] {tmp_path} a=b from input\n"


@pytest.mark.parametrize("words", [("-m", "program"), ("-u", "program.py")])
def test_program_in_a_file_imports_its_neighbours(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'hello'\n")
    (tmp_path / "program.py").write_text(
        "import sys, neighbour\nif __name__ == '__main__': print(neighbour.WORD, sys.argv[1:])\n"
    )
    assert run(*words, "and more", cwd=tmp_path).stdout == "hello ['and more']\n"


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


def test_warnings_are_filtered_as_options_say() -> None:
    source = "import warnings; warnings.warn('one', ResourceWarning); warnings.warn('two')"
    assert run(
        "-W", "always::ResourceWarning", "-W", "ignore::UserWarning", "-c", source
    ).stderr == ("<string>:1: ResourceWarning: one\n")
    assert run("-W", "ignore", "-u", "-c", source).stderr == ""


def test_program_runs_its_exit_handlers_and_shares_nothing() -> None:
    source = "import atexit, aiordma; atexit.register(print, hasattr(aiordma, 'changed'))"
    for _ in range(2):
        assert run("-c", f"{source}; aiordma.changed = True").stdout == "False\n"


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


def test_killed_program_ends_its_client(waiting: subprocess.Popen[str]) -> None:
    with waiting:
        assert waiting.stdout is not None
        os.kill(int(waiting.stdout.readline()), signal.SIGKILL)
        assert waiting.wait(30) == -signal.SIGKILL


STARTS_AND_DIES = f"""
import os, subprocess
from tests.forked import CLIENT, server
command = [str(CLIENT), server(), "-c", {WAITS!r}]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
print(process.stdout.readline(), end="", flush=True)
os._exit(0)
"""


def test_programs_end_with_the_process_that_started_the_server() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STARTS_AND_DIES],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    program = Path("/proc", ran.stdout.strip())
    assert program.name.isdigit()
    wait_until(lambda: not program.exists())
