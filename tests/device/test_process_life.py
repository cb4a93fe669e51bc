"""The end of a process, at any moment and in any way: no hang, no traceback, nothing left unsaid.

Each case is a process of its own (life_program.py), which has everything open.
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from tests.conftest import BACKENDS
from tests.device.players import both_ways, connected
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest
from tests.forked import python
from tests.unit.sources import ROOT

LOOPS = ["asyncio", "uvloop", "polling", "trio"]
FEW_LOOPS = LOOPS if DEVICE == "software" else ["asyncio", "trio"]
"""Event loops in the VM, where each process takes seconds. Each of LOOPS ends with all open there,
too, in `test_what_a_program_left_open_is_named_once`."""

PATIENCE = 90
"""Seconds for one process: what hangs fails."""

SIGINTS = int(os.environ.get("AIORDMA_SIGINTS", "6" if DEVICE == "software" else "2"))
"""Interrupted processes for each event loop. Of four event loops, 25 make a hundred."""

DESTROYED = ("Task was destroyed but it is pending!", "task: <Task pending")
"""asyncio's report of the program's task (a stream's callback), whose loop was never to run again.
"""

ERROR_LINE = re.compile(r"^(?:[ |+-]*)((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Warning|Group))\b")


def begin(
    device: DeviceUnderTest, loop: str, end: str, *flags: str, **environment: str
) -> "subprocess.Popen[str]":
    """Start the program, and return it when it has imported all that it needs."""
    capable = [] if device.lacks("datagrams") else ["datagrams"]
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
    assert child.stdout.readline() == "begin\n"
    return child


def finish(child: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the program, and return its status, what it printed, and its standard error."""
    try:
        printed, said = child.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        printed, said = child.communicate()
        pytest.fail(f"it hangs\n{printed}\n{said[-3000:]}")
    return child.returncode, printed, said


def errors_in(said: str) -> set[str]:
    """Return the classes of the errors and warnings at the starts of a standard error's lines."""
    return {match[1] for line in said.splitlines() if (match := ERROR_LINE.match(line))}


@pytest.mark.parametrize("loop", FEW_LOOPS)
def test_closed_program_is_silent_in_development_mode(loop: str, device: DeviceUnderTest) -> None:
    """With -X dev the event loops run in debug mode, and with -W error each warning is an error."""
    status, printed, said = finish(begin(device, loop, "close", "-X", "dev", "-W", "error"))
    # asyncio's debug mode reports slow callbacks, which a busy machine has.
    lines = [line for line in said.splitlines() if not line.startswith("Executing <")]
    assert (status, printed, lines) == (0, "open\n", [])


@pytest.mark.parametrize("end", ["return", "exit", "stop", "cut"])
@pytest.mark.parametrize("loop", FEW_LOOPS)
def test_program_with_all_open_ends_by_itself(loop: str, end: str, device: DeviceUnderTest) -> None:
    if loop == "trio" and end in ("stop", "cut"):
        pytest.skip("trio's event loop ends with its main function")
    status, printed, said = finish(begin(device, loop, end, "-W", "ignore"))
    assert (status, printed) == (0, "open\n"), said
    lines = [line for line in said.splitlines() if not line.startswith(DESTROYED)]
    assert lines == []


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_program_left_open_is_named_once(loop: str, device: DeviceUnderTest) -> None:
    status, _, said = finish(begin(device, loop, "return", "-W", "always::ResourceWarning"))
    assert status == 0, said
    (text,) = [line for line in said.splitlines() if "left open at the end" in line]
    streams = loop != "trio"  # a listener, and a connection's two ends
    expected = {"Domain": 1, "SharedReceiveQueue": 1, "Listener": 1 + streams}
    expected |= {"Connection": 2 + 2 * streams, "Datagram": 1 - bool(device.lacks("datagrams"))}
    for kind, count in expected.items():
        assert text.count(f"<{kind} ") == count, (kind, text)
    assert text.count("life_program.py:") == sum(expected.values()), text


@pytest.mark.parametrize("loop", FEW_LOOPS)
def test_sigint_at_any_moment_ends_the_program(loop: str, device: DeviceUnderTest) -> None:
    """Moments from the event loop's start to the last close: it ends, with Python's status for a
    KeyboardInterrupt, and names no other error."""
    chance = random.Random(20261123)
    child = begin(device, loop, "close")
    at = time.monotonic()
    assert finish(child)[0] == 0
    duration = time.monotonic() - at

    def interrupt(fraction: float) -> tuple[float, int, str]:
        child = begin(device, loop, "close")
        time.sleep(fraction * duration)
        child.send_signal(signal.SIGINT)
        status, _, said = finish(child)
        return fraction, status, said

    results: list[tuple[float, int, str]] = []
    with ThreadPoolExecutor(2) as pool:
        # Until a third of the moments met the program: of a late one this test says nothing.
        while 3 * sum(status != 0 for _, status, _ in results) < SIGINTS:
            assert len(results) < 10 * SIGINTS, "the program ends before each SIGINT"
            results += pool.map(interrupt, [chance.random() for _ in range(SIGINTS)])
    for fraction, status, said in results:
        # asyncio.run makes a KeyboardInterrupt of the main task's cancellation.
        allowed = {"KeyboardInterrupt", "asyncio.exceptions.CancelledError"}
        assert status in (0, -signal.SIGINT), (fraction, status, said)
        assert errors_in(said) <= allowed, (fraction, status, said)


# -- several loops --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(
    "backend", ["asyncio", pytest.param("uvloop", marks=pytest.mark.natively), "trio"]
)
def test_loops_in_threads_end_in_any_order(
    backend: str, order: tuple[int, ...], device: DeviceUnderTest
) -> None:
    """Loops that began in one order and end in another: the others' connections keep working."""
    name, options = BACKENDS[backend]
    started = [threading.Event() for _ in order]
    ends = [threading.Event() for _ in order]
    errors: list[BaseException] = []

    async def talk(number: int) -> None:
        async with connected() as (client, server):
            started[number].set()
            while not ends[number].is_set():
                await both_ways(client, server)

    def run(number: int) -> None:
        try:
            anyio.run(talk, number, backend=name, backend_options=options)
        except BaseException as error:
            errors.append(error)
            started[number].set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(order))]
    for thread, event in zip(threads, started, strict=True):
        thread.start()
        assert event.wait(PATIENCE)
    for number in order:
        ends[number].set()
        threads[number].join(PATIENCE)
        assert not threads[number].is_alive()
    assert errors == []
