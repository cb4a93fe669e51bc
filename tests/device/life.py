"""Processes of life_program.py, and how they end."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.devices import ADDRESS, DeviceUnderTest
from tests.forked import python
from tests.unit.sources import ROOT

__all__ = ("LOOPS", "PATIENCE", "End", "begin", "errors_in", "finish", "interrupt", "said_by_us")

LOOPS = ["asyncio", "uvloop", "polling", "trio"]

PATIENCE = 90
"""Seconds for one process: what takes longer hangs."""

AT_A_TIME = 2
ERROR_LINE = re.compile(r"^(?:[ |+-]*)((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Warning|Group))\b")
UNRETRIEVED = re.compile(
    r"^.*\bfailed, and the errors? never retrieved:.*\n.*\n"
    r"(?:\nThe above exception was the direct cause of the following exception:\n\n.*\n)*",
    re.MULTILINE,
)
STREAM_WRITER = re.compile(
    r"^(?:Exception ignored (?:in|while)\b.*<function StreamWriter\.__del__.*\n"
    r"(?:Traceback .*\n)?(?:  .*\n)*)(?:\w*Warning|\w*Error): .*\n",
    re.MULTILINE,
)
"""From Python 3.12 on, asyncio's StreamWriter itself warns when it is collected unclosed."""
AT_EXIT = re.compile(
    r"^Exception ignored in atexit callback: <function shutdown at .*\n"
    r"(?:Traceback .*\n)?(?:  .*\n|\n)*KeyboardInterrupt: ?\n",
    re.MULTILINE,
)
"""The SIGINT met logging.shutdown of a program that had ended: Python ignores it, with status 0."""
INTERRUPTS = {"KeyboardInterrupt", "asyncio.exceptions.CancelledError"}
"""asyncio.run makes a KeyboardInterrupt of the main task's cancellation."""
OF_LOOPS = ("RuntimeError: Event loop stopped before Future completed.", "Loop._pause_signals")
"""What names an event loop's own end by an error, of any program. asyncio, with a second task: the
SIGINT comes between the main task's last step and the loop's stop, which then meets what
Runner.close runs. uvloop: it comes when the loop has run, but says that it runs (3 of 500 programs
without aiordma end so)."""


def said_by_us(said: str) -> list[str]:
    """Return the lines of a standard error, without what asyncio says by itself: of slow callbacks,
    which a busy machine has, and of its StreamWriter."""
    lines = STREAM_WRITER.sub("", said).splitlines()
    return [line for line in lines if not line.startswith("Executing <")]


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        status: its status, or None if it did not end.
        printed: its standard output.
        said: its standard error.
        at: the moment of its SIGINT, as a fraction of the time that it takes without one.
    """

    status: int | None
    printed: str
    said: str
    at: float = 0.0

    @property
    def was_interrupted(self) -> bool:
        """Whether a SIGINT met the program."""
        return self.status != 0

    @property
    def is_clean(self) -> bool:
        """Whether it ended by itself or by its SIGINT, and named no other error."""
        if self.status == 1 and any(each in self.said for each in OF_LOOPS):
            return errors_in(self.said) == {"KeyboardInterrupt", "RuntimeError"}
        return self.status in (0, -signal.SIGINT) and errors_in(self.said) <= INTERRUPTS


def begin(
    device: DeviceUnderTest, loop: str, end: str, *flags: str, **environment: str
) -> "subprocess.Popen[str]":
    """Start the program, and return it when it has imported all that it needs."""
    capable = [each for each in ("datagrams", "rnr") if not device.lacks(each)]
    # A fork has no development mode: that is of Python's start.
    command = (sys.executable,) if "-X" in flags else python()
    arguments = [*flags, "-m", "tests.device.life_program", ADDRESS, loop, end, *capable]
    child = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "AIORDMA_DEVICE": device.name, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    # No byte more: `communicate` does not see what `readline` has put into the file's buffer.
    begun = b""
    while len(begun) < len(b"begin\n"):
        begun += os.read(child.stdout.fileno(), len(b"begin\n") - len(begun)) or b"(the end)"
    assert begun == b"begin\n"
    return child


def finish(child: "subprocess.Popen[str]", at: float = 0.0) -> End:
    """Wait for the program, and return how it ended."""
    try:
        printed, said = child.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        return End(None, *child.communicate(), at)
    return End(child.returncode, printed, said, at)


def errors_in(said: str) -> set[str]:
    """Return the classes of the errors and warnings at the starts of a standard error's lines.

    Without those of the report on requests that nobody awaits any more: an interrupt comes also
    between the posts and the lines that would await them.
    """
    said = AT_EXIT.sub("", UNRETRIEVED.sub("", said))
    return {match[1] for line in said.splitlines() if (match := ERROR_LINE.match(line))}


def interrupt(device: DeviceUnderTest, loop: str, wanted: int, chance: random.Random) -> list[End]:
    """Send a SIGINT to one process after the other, at random moments from the event loop's start
    to the last close, until so many have met the program: of a late one it knows nothing."""
    child = begin(device, loop, "close")
    began = time.monotonic()
    whole = finish(child)
    assert whole.status == 0, whole
    duration = time.monotonic() - began
    ends: list[End] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        while (met := sum(end.was_interrupted for end in ends)) < wanted:
            assert len(ends) < 30 * wanted, "the program ends before each SIGINT"
            moments = [chance.random() for _ in range(max(wanted - met, AT_A_TIME))]
            ends += pool.map(partial(_interrupt_at, device, loop, duration), moments)
    return ends


def _interrupt_at(device: DeviceUnderTest, loop: str, duration: float, fraction: float) -> End:
    child = begin(device, loop, "close")
    time.sleep(fraction * duration)
    child.send_signal(signal.SIGINT)
    return finish(child, fraction)
