"""Ends of connections that find no memory: every request ends, every close returns, and the device
has all memory until the request that uses it has ended.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

SWEEP = """
import asyncio, contextlib, errno, faulthandler, logging
import _testcapi
import aiordma
from aiordma import Access
from tests import connections
from tests.bench.instant import doorbell_fails, doorbell_is_due, instant, prepare
from tests.internals import endpoint_of, free_sends, hub_of

faulthandler.dump_traceback_later(120, exit=True)  # what hangs fails, and says where
logging.disable(logging.CRITICAL)  # what is logged here is that there was no memory

BOUND = 10  # seconds; an end takes a flush_timeout at most
EXPECTED = MemoryError, SystemError, aiordma.RdmaError  # a call in C can lose its MemoryError
OPTIONS = {"device": "software", "receive_buffers": 0, "flow_control": False, "flush_timeout": 0.01}

def over():
    # Whether the allocation that fails is one of the next: the call did not get as far as that.
    try:
        for _ in range(12):
            bytearray(9)
    except MemoryError:
        return True
    return False

def calls(number, function, *arguments):
    # Call the function, and return what it raised, and whether no allocation failed.
    raised, is_over = None, False
    _testcapi.set_nomemory(number, number + 1)
    try:
        function(*arguments)
        is_over = over()
    except EXPECTED as error:
        raised = type(error)
    finally:
        _testcapi.remove_mem_hooks()
    return raised, is_over

TAKEN = []  # for each number: how many requests the device has got besides the waiting one

async def ended(requests):
    async with asyncio.timeout(BOUND):
        for request in requests:
            with contextlib.suppress(aiordma.RdmaError):
                await request

async def attempt(ends, number):
    async with connections.connected("127.0.0.1", server=OPTIONS, client=OPTIONS) as ends_of_it:
        client, server = ends_of_it
        held, slots = len(hub_of(client).in_flight), free_sends(client)
        region = client.register(bytearray(64), Access.LOCAL_WRITE)
        target = server.register(bytearray(64), Access.REMOTE_WRITE).remote()
        waiting = [client.post_send(region[:9])]  # for which the peer has no receive
        watching = asyncio.create_task(client.ended())
        await asyncio.sleep(0)
        raised, is_over = ends(client, region[:], target, waiting, number)
        users = 1 + (TAKEN[-1] if TAKEN else 0)
        assert region._users >= users, (number, region._users, users)
        if raised is None:
            await ended(waiting)
        async with asyncio.timeout(BOUND):
            await client.aclose()
            await watching
        assert all(request.done() for request in waiting), number
        left = len(hub_of(client).in_flight), free_sends(client)
        assert left == (held, slots), (number, left, raised)
        assert not region._users and region.closed, (number, region._users, raised)
    return is_over

async def sweep(ends):
    prepare()
    for number in range(400):
        if await attempt(ends, number):
            return number

def report(ends):
    found = asyncio.run(sweep(ends))
    print("over" if found and found > 5 else f"after {found}")
"""


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("how", ["close", "fail"])
def test_end_without_memory_ends_all(how: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        ARGUMENTS = {{"close": (), "fail": (aiordma.RdmaError("broken"),)}}[{how!r}]

        def ends(client, local, remote, waiting, number):
            return calls(number, getattr(endpoint_of(client), {how!r}), *ARGUMENTS)

        report(ends)
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


@pytest.mark.natively
def test_wake_up_without_memory_is_done_again() -> None:
    """With the engine. The backend in Python wakes by asyncio's futures, and loses a wake-up."""
    printed = run_child(
        SWEEP,
        """
        from aiordma._loop.event_loop import current_event_loop
        from aiordma._loop.threads import Once

        async def wakes():
            for number in range(100):
                once = Once(current_event_loop())
                task = asyncio.create_task(once.wait())
                await asyncio.sleep(0)
                raised, is_over = calls(number, once.set)
                once.set()
                async with asyncio.timeout(BOUND):
                    await task
                if is_over:
                    return "over"

        print(asyncio.run(wakes()))
        """,
        AIORDMA_BACKEND="c",
    )
    assert printed == "over\n"


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["plain", "general", "chain", "general chain"])
def test_failed_doorbell_without_memory_ends_all(kind: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        def ends(client, local, remote, waiting, number):
            post, arguments = client.post_write, (local, remote)
            if {kind!r} == "general":
                post, arguments = client.post_writev, (iter([local]), remote)
            if "chain" in {kind!r}:
                chain = client.chain(signal_last_only=True)
                chain.__enter__()
                waiting += [chain.post_write(local, remote) for _ in range(2)]
                if "general" in {kind!r}:
                    waiting.append(chain.post_writev(iter([local]), remote))
                post, arguments = chain.__exit__, (None, None, None)
            with instant(client):
                doorbell_fails(errno.EINVAL)
                outcome = calls(number, post, *arguments)
                TAKEN.append(0 if doorbell_is_due() else len(waiting) - 1 or 1)
                doorbell_fails(0)
                return outcome

        report(ends)
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


STEPS = {"_destroy": 60, "_finish": 60, "_is_over": 40, "_release": 60}
"""The steps of an end, in order, and how many allocations are tried of each."""


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("step", STEPS)
def test_later_step_of_an_end_without_memory_is_done_again(step: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        import aiordma._loop.ending
        aiordma._loop.ending.RETRY_SECONDS = 0.001
        failures = []

        def fails_once(function, number):
            def call():
                if is_first:
                    is_first.clear()
                    raised, _ = calls(number, function)
                    if raised is not None:
                        failures.append(raised)
                        raise raised
                else:
                    function()

            is_first = [True]
            return call

        def ends(client, local, remote, waiting, number):
            endpoint = endpoint_of(client)
            setattr(endpoint, {step!r}, fails_once(getattr(endpoint, {step!r}), number))
            endpoint.close()
            return None, False

        async def steps():
            for number in range({STEPS[step]}):
                await attempt(ends, number)

        prepare()
        asyncio.run(steps())
        print("some failed" if failures or {step!r} == "_destroy" else "none failed")
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "some failed\n"
