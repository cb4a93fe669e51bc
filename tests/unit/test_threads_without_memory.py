"""Calls into the driver that find no memory, in the loop's thread or in the worker's: each call
runs and is reported, or raises and never runs, and the lane serves the calls behind it.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

SWEEP = """
import asyncio, faulthandler, logging, time
import _testcapi
from aiordma._loop.event_loop import current_event_loop
from aiordma._loop.threads import DESTROYS, Lane, in_thread, start_call, start_destroy
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(60, exit=True)  # what hangs fails, and says where
logging.disable(logging.CRITICAL)  # what is logged here is that there was no memory

BOUND = 10  # seconds
LAST = 400  # later allocations are none of a call's

def start(loop, function, then, lane):
    if lane is DESTROYS:
        start_destroy(loop, function, then)
    else:
        start_call(loop, function, then, lane)

async def attempt(loop, lane, number):
    ran, reported, raised, over = [], [], None, False
    _testcapi.set_nomemory(number, number + 1)
    try:
        start(loop, lambda: ran.append(1), reported.append, lane)
        time.sleep(0.002)  # the worker's allocations
        over = is_still_to_come()
    except Exception as error:
        raised = error
    finally:
        _testcapi.remove_mem_hooks()
    async with asyncio.timeout(BOUND):
        while raised is None and not reported:
            await asyncio.sleep(0.001)
        assert await in_thread(loop, lambda: "works", lane) == "works"
        while lane.workers.calls:
            await asyncio.sleep(0.001)
    outcomes = ([1], [None]), ([], ["MemoryError()"]) if raised is None else ([], [])
    assert (ran, [error and repr(error) for error in reported]) in outcomes, (number, raised)
    assert not loop.calls, (number, raised)
    assert 0 < lane.workers._count <= 2, (number, lane.workers._count)
    return over

async def sweep(lane):
    loop = current_event_loop()
    await in_thread(loop, lambda: None, lane())
    for number in range(LAST):
        if await attempt(loop, lane(), number):
            return "over"
"""


@pytest.mark.natively
def test_start_of_a_worker_without_memory_loses_no_call() -> None:
    printed = run_child(SWEEP, "print(asyncio.run(sweep(lambda: Lane(16))))")
    assert printed == "over\n"


@pytest.mark.natively
def test_call_of_an_idle_worker_without_memory_is_not_lost() -> None:
    printed = run_child(
        SWEEP,
        """
        lane = Lane(16)
        print(asyncio.run(sweep(lambda: lane)))
        """,
    )
    assert printed == "over\n"


@pytest.mark.natively
@pytest.mark.parametrize("workers", ["no worker", "an idle worker"])
def test_destroying_call_without_memory_runs_or_raises(workers: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        def lane():
            if {workers!r} == "no worker":
                DESTROYS.reset()
            return DESTROYS

        print(asyncio.run(sweep(lane)))
        """,
    )
    assert printed == "over\n"
