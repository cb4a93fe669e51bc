"""The end of a process, at any moment and in any way: no hang, no traceback, nothing left unsaid.

Each case is a process of its own (life_program.py), which has everything open.
"""

import random
import threading

import anyio
import pytest

from tests.conftest import BACKENDS
from tests.device.life import LOOPS, PATIENCE, begin, errors_in, finish, interrupt, said_by_us
from tests.device.players import both_ways, connected
from tests.devices import BUILT_IN, DeviceUnderTest

pytestmark = pytest.mark.slow

FEW_LOOPS = LOOPS if BUILT_IN else ["asyncio", "trio"]
"""Event loops in the VM, where each process takes seconds. Each of LOOPS ends with all open there,
too, in `test_what_a_program_left_open_is_named_once`."""

ENDS = [
    (loop, end)
    for loop in FEW_LOOPS
    for end in ("return", "exit", "stop", "cut")
    if loop != "trio" or end in ("return", "exit")  # trio's loop ends with its main function
]
"""Event loops, and the ends of life_program.py with everything open."""

ONE_LOOP = LOOPS if BUILT_IN else ["asyncio"]
DEVELOPED = ENDS if BUILT_IN else [("asyncio", "exit"), ("asyncio", "cut")]
"""What the VM runs of the cases that start Python anew, which takes it 10 to 18 s each."""

SIGINTS = 6 if BUILT_IN else 2
"""Programs that a SIGINT meets, on each event loop; `make soak` has a hundred on each."""

DESTROYED = ("Task was destroyed but it is pending!", "task: <Task pending")
"""asyncio's report of the program's task (a stream's callback), whose loop was never to run again.
"""


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.one_kernel_device
@pytest.mark.parametrize("loop", ONE_LOOP)
def test_closed_program_is_silent_in_development_mode(loop: str, device: DeviceUnderTest) -> None:
    """With -X dev the event loops run in debug mode, and with -W error each warning is an error."""
    ended = finish(begin(device, loop, "close", "-X", "dev", "-W", "error"))
    assert (ended.status, ended.printed, said_by_us(ended.said)) == (0, "open\n", [])


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.parametrize(("loop", "end"), ENDS)
def test_program_with_all_open_ends_by_itself(loop: str, end: str, device: DeviceUnderTest) -> None:
    ended = finish(begin(device, loop, end, "-W", "ignore"))
    assert (ended.status, ended.printed) == (0, "open\n"), ended.said
    lines = [line for line in ended.said.splitlines() if not line.startswith(DESTROYED)]
    assert lines == []


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.parametrize(("loop", "end"), DEVELOPED)
def test_requests_in_flight_harm_no_end_in_development_mode(
    loop: str, end: str, device: DeviceUnderTest
) -> None:
    """READs, WRITEs and SENDs are in flight: no crash, no hang, and no error but the warnings of
    what was left open. Of those that were errors by -W error, no caller could get one."""
    ended = finish(begin(device, loop, end, "-X", "dev", "-W", "error"))
    assert (ended.status, ended.printed) == (0, "open\n"), ended.said
    assert "Fatal" not in ended.said
    # "Exception ignored in" is how Python reports a finalizer's.
    assert errors_in(ended.said) <= {"ResourceWarning", "Exception"}, ended.said
    if end in ("return", "exit"):
        (line,) = said_by_us(ended.said)
        assert line.startswith("ResourceWarning: left open at the end of the event loop: ")


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_program_left_open_is_named_once(loop: str, device: DeviceUnderTest) -> None:
    ended = finish(begin(device, loop, "return", "-W", "always::ResourceWarning"))
    assert ended.status == 0, ended.said
    (text,) = [line for line in ended.said.splitlines() if "left open at the end" in line]
    streams = loop != "trio"  # a listener, and a connection's two ends
    expected = {"Domain": 1, "SharedReceiveQueue": 1, "Listener": 1 + streams}
    expected |= {"Connection": 2 + 2 * streams, "Datagram": 1 - bool(device.lacks("datagrams"))}
    for kind, count in expected.items():
        assert text.count(f"<{kind} ") == count, (kind, text)
    assert text.count("life_program.py:") == sum(expected.values()), text


@pytest.mark.promise(
    "SIGINT ends a program as the event loop says", "A process ends, whatever is open"
)
@pytest.mark.one_kernel_device
@pytest.mark.parametrize("loop", ONE_LOOP)
def test_sigint_at_any_moment_ends_the_program(loop: str, device: DeviceUnderTest) -> None:
    """Moments from the event loop's start to the last close: it ends, with Python's status for a
    KeyboardInterrupt, and names no other error."""
    ends = interrupt(device, loop, SIGINTS, random.Random(20261123))
    assert [end for end in ends if not end.is_clean] == []


# -- several loops --------------------------------------------------------------------------------


@pytest.mark.promise("A process ends, whatever is open")
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
