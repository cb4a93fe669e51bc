"""Find the code blocks of the documentation, and run programs as a reader would."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.devices import ADDRESS, DEVICE
from tests.forked import python
from tests.internals import SOFTWARE
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PORT = free_port()
"""What stands for the pages' 7471: another run on this machine may be at the same page."""
ROLES = ("server", "client", "alone", "conftest", "test")

_BLOCK = re.compile(r"^```(\w*)[ ]*(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    """A program in a page, the output that the page promises, and what is before it: the server, or
    the conftest.py of a test."""

    page: str
    line: int
    role: str
    source: str
    output: list[str] = field(default_factory=list)
    server: "Block | None" = None
    conftest: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Every python block of a page, in order."""
    text = page.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        language, role, body = match.groups()
        if language == "python":
            line = text.count("\n", 0, match.start()) + 2
            server = next((b for b in reversed(found) if b.role == "server"), None)
            source = ours(body)
            above = found[-1] if found and found[-1].role == "conftest" else None
            conftest = above.source if above is not None and role == "test" else ""
            path = str(page.relative_to(ROOT))
            found.append(Block(path, line, role, source, server=server, conftest=conftest))
        elif language == "text" and found:
            found[-1].output = ours(body).splitlines()
    return found


def ours(text: str) -> str:
    """Put the device's address and a port of this process into a page's text."""
    return text.replace("127.0.0.1", ADDRESS).replace("7471", str(PORT))


def _is_strict(arguments: tuple[str, ...]) -> bool:
    """Whether to run a program in development mode, with each warning an error. (In the virtual
    machine it is forked, without a start of Python.)"""
    return DEVICE == SOFTWARE and arguments[0].startswith("examples/")


def _command(arguments: tuple[str, ...]) -> list[str]:
    if _is_strict(arguments):
        return [sys.executable, "-u", "-X", "dev", "-W", "error", *arguments]
    return [*python(), *arguments]


_BATCHED = re.compile(
    r"^.* - distributed\.batched - INFO - Batched Comm Closed .*\n"
    r"Traceback .*\n(?:  .*\n)*.*CommClosedError: .*\n",
    re.MULTILINE,
)
"""distributed says so, over each transport, if a cluster takes more than 2 ms to close: it sends to
itself at most once in that time, and finds its own comm closed."""


def complaints(said: str) -> list[str]:
    """Return what a program has written to its standard error, without what distributed says of its
    own end, and the slow callbacks that asyncio's debug mode reports on a busy machine."""
    lines = _BATCHED.sub("", said).splitlines()
    return [line for line in lines if not line.startswith("Executing <")]


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its output is in the error if it does not end. An example must
    write nothing to its standard error."""
    done = subprocess.run(
        _command(arguments), cwd=folder, capture_output=True, text=True, timeout=90
    )
    assert not _is_strict(arguments) or complaints(done.stderr) == [], done.stderr
    return done


def printed(*arguments: str) -> str:
    """Run a program that succeeds, and return what it printed."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(*arguments: str, folder: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    """Run a server from when it says that it listens to the end of the block. An example that is
    then interrupted must give no warning."""
    process = subprocess.Popen(
        _command(arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("listening") or "Uvicorn running" in line:
                break
        else:
            raise AssertionError(f"the server ended early:\n{said}")
        yield process
    finally:
        process.send_signal(signal.SIGINT if _is_strict(arguments) else signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
    assert not _is_strict(arguments) or "Warning" not in said + rest, said + rest
