"""Start Python programs by forking a process that has imported aiordma already.

In the VM a Python process takes seconds to start, nearly all of them for imports. A test whose
subject is what a program does, not how Python starts it, puts `python()` where `sys.executable`
would be. The client (client.c), a program in C that starts at once, then stands for the process:
it has its arguments, environment, folder and descriptors, gets its signals and ends with its
status. If the client is killed, the process is killed, after the client has ended: what the process
had may still be there when the client was waited for, until `wait_for_the_killed` returns.

A benchmark's own server is forked in the same way: `aiordma bench local` starts `sys.executable`.

On the software device the same tests start a Python process each: so a program that needs an import
that the server happens to have is found there.
"""

import atexit
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import BUILT_IN, PATIENCE

__all__ = ("python", "wait_for_the_killed")

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "build" / "fork-client"
QUESTION = b"?"
"""What is sent instead of a client's first byte, to ask for the end of those that were killed."""


def python() -> tuple[str, ...]:
    """Return the first words of a command that runs Python; the arguments of python3 follow.

    Of its options there are -c, -m, -u and -W, before the program's own arguments.
    """
    return (sys.executable,) if BUILT_IN else (str(CLIENT), server())


@functools.cache
def server() -> str:
    """Start the server, which ends with this process; returns the name for the client."""
    assert CLIENT.exists(), f"{CLIENT} is missing: `make venv` compiles it"
    name = f"aiordma-fork-server-{os.getpid()}"
    folder = tempfile.mkdtemp(prefix="aiordma-forked.")
    atexit.register(shutil.rmtree, folder)
    executable = Path(folder, "python3")
    executable.write_text(f'#!/bin/sh\nexec {shlex.quote(str(CLIENT))} {name} "$@"\n')
    executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.forked.server"),
                *(str(listener.fileno()), str(executable)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,  # whose end the server takes for the end of this process
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests
        )
    atexit.register(end, process)
    return name


def wait_for_the_killed() -> None:
    """Wait until the processes have ended whose clients were killed, and so freed what they had."""
    if server.cache_info().currsize:
        with socket.socket(socket.AF_UNIX) as question:
            question.settimeout(PATIENCE)
            question.connect(f"\0{server()}")
            question.sendall(QUESTION)
            assert question.recv(1) == b"", "the server closes the connection, for an answer"


def end(process: subprocess.Popen[bytes]) -> None:
    """End the server by the end of its standard input."""
    process.communicate(timeout=PATIENCE)
