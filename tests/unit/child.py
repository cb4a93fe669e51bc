"""Python source in a process of its own, so that a crash is a failing test."""

import os
import subprocess
import sys
import textwrap

from tests.unit.sources import ROOT

# A shell that starts a job in the background has it ignore SIGINT, and so all its children.
AS_IN_THE_FOREGROUND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

PATIENCE = 300
"""Seconds for one child: what hangs fails."""


def run_child(*sources: str, **environment: str) -> str:
    """Run Python sources, one after the other in one process, and return what they printed; the
    process has to end with status 0."""
    source = "".join(textwrap.dedent(each) for each in (AS_IN_THE_FOREGROUND, *sources))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", source],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


RUN = """
import asyncio
import aiordma

def run(loop, main):
    if loop == "trio":
        import trio
        return trio.run(main)
    if loop == "uvloop":
        import uvloop
        factory = uvloop.new_event_loop
    else:
        factory = {"asyncio": None, "polling": aiordma.new_event_loop}[loop]
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
"""
"""Source that defines `run(loop, main)`: run a coroutine function on an event loop of that name."""
