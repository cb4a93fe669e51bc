"""Find the code blocks of the documentation, and run programs as a reader would."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.devices import ADDRESS
from tests.forked import python

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PORT = 10000 + os.getpid() % 20000
"""What stands for the pages' 7471: another run on this machine may be at the same page."""
ROLES = ("server", "client", "alone", "test")

_BLOCK = re.compile(r"^```(\w*)[ ]*(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    """A program in a page, the output that the page promises, and the server before it."""

    page: str
    line: int
    role: str
    source: str
    output: list[str] = field(default_factory=list)
    server: "Block | None" = None

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
            found.append(Block(str(page.relative_to(ROOT)), line, role, source, server=server))
        elif language == "text" and found:
            found[-1].output = ours(body).splitlines()
    return found


def ours(text: str) -> str:
    """Put the device's address and a port of this process into a page's text."""
    return text.replace("127.0.0.1", ADDRESS).replace("7471", str(PORT))


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its output is in the error if it does not end."""
    return subprocess.run(
        [*python(), *arguments], cwd=folder, capture_output=True, text=True, timeout=90
    )


@contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a server from when it says "listening" to the end of the block."""
    process = subprocess.Popen(
        [*python(), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("listening"):
                break
        else:
            raise AssertionError(f"the server ended early:\n{said}")
        yield process
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
