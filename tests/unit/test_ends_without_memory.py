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
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(100, exit=True)  # what hangs fails, and says where
logging.disable(logging.CRITICAL)  # what is logged here is that there was no memory

BOUND = 10  # seconds; an end takes a flush_timeout at most
EXPECTED = MemoryError, SystemError, aiordma.RdmaError  # a call in C can lose its MemoryError
OPTIONS = {"device": "software", "receive_buffers": 0, "flow_control": False, "flush_timeout": 0.01}

def calls(number, function, *arguments):
    # Call the function, and return what it raised, and whether no allocation failed.
    raised, is_over = None, False
    _testcapi.set_nomemory(number, number + 1)
    try:
        function(*arguments)
        is_over = is_still_to_come()
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


STEPS = ["_destroy", "_last_steps", "_is_over", "_release"]
"""The steps of an end, in order. `_last_steps` returns some, of which each is one of its own."""


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("step", STEPS)
def test_later_step_of_an_end_without_memory_is_done_again(step: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        import aiordma._loop.ending
        aiordma._loop.ending.RETRY_SECONDS = 0.001
        failures, finished = [], []

        def fails_once(function, number):
            def call():
                if is_first:
                    is_first.clear()
                    raised, is_over = calls(number, function)
                    finished.append(is_over)
                    if raised is not None:
                        failures.append(raised)
                        raise raised
                else:
                    function()

            is_first = [True]
            return call

        async def attempt(name, number, which):
            async with connections.connected("127.0.0.1", server=OPTIONS, client=OPTIONS) as both:
                client, server = both
                endpoint = endpoint_of(client)
                region = client.register(bytearray(64), Access.LOCAL_WRITE)
                waiting = client.post_send(region[:9])  # for which the peer has no receive
                function = getattr(endpoint, name)
                if name == "_last_steps":
                    steps = function()
                    is_end = which == len(steps)
                    if not is_end:
                        steps[which] = fails_once(steps[which], number)
                    setattr(endpoint, name, lambda: steps)
                else:
                    is_end = which == 1
                    setattr(endpoint, name, fails_once(function, number))
                async with asyncio.timeout(BOUND):
                    await client.aclose()
                assert waiting.done() and not region._users and region.closed, number
            return is_end

        def state(connection):
            hub = hub_of(connection)
            reserved = sum(queue.reserved for queue in hub._queues)
            return len(hub.in_flight), reserved, endpoint_of(connection).reactor.users

        async def steps(name):
            async with connections.connected("127.0.0.1", server=OPTIONS, client=OPTIONS) as both:
                before, which = state(both[0]), 0
                while True:
                    for number in range(400):
                        if await attempt(name, number, which):
                            return
                        async with asyncio.timeout(BOUND):
                            while state(both[0]) > before:
                                await asyncio.sleep(0)
                        assert state(both[0]) == before, (number, state(both[0]), before)
                        if finished[-1]:
                            break
                    else:
                        raise AssertionError("not over")
                    which += 1

        prepare()
        asyncio.run(steps({step!r}))
        print("some failed" if failures or {step!r} == "_destroy" else "none failed")
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "some failed\n"


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["listener", "domain", "shared receive queue", "datagram"])
def test_close_without_memory_is_done_again(kind: str, engine: str) -> None:
    """Whether the close raises MemoryError or not: once there is memory, the object is closed."""
    printed = run_child(
        SWEEP,
        f"""
        import aiordma._loop.ending
        aiordma._loop.ending.RETRY_SECONDS = 0.001
        LOCAL, DEVICE = "127.0.0.1", {{"device": "software"}}

        async def make():
            match {kind!r}:
                case "listener":
                    made = await aiordma.listen(LOCAL, 0, **DEVICE)
                    return made, made._close, made._reactor
                case "domain":
                    made = await aiordma.open_domain(LOCAL, **DEVICE)
                    await made.register(bytearray(9))
                    return made, made._state.close_when_unused, made._state.reactor
                case "shared receive queue":
                    made = await aiordma.open_shared_receive(LOCAL, depth=8, **DEVICE)
                    made.register(bytearray(9))
                case "datagram":
                    made = await aiordma.open_datagram(LOCAL, 0, **DEVICE)
            return made, made._endpoint.close, made._endpoint.reactor

        async def sweep():
            async with connections.connected(LOCAL, server=OPTIONS, client=OPTIONS) as (client, _):
                endpoint = endpoint_of(client)
                for number in range(400):
                    users = endpoint.reactor.users
                    reserved = reserved_of(client)
                    made, close, reactor = await make()
                    assert reactor is endpoint.reactor
                    raised, is_over = calls(number, close)
                    async with asyncio.timeout(BOUND):
                        await made.aclose()
                        while (reactor.users, reserved_of(client)) > (users, reserved):
                            await asyncio.sleep(0)
                    assert (reactor.users, reserved_of(client)) == (users, reserved), number
                    if is_over:
                        return "over"

        def reserved_of(connection):
            return sum(queue.reserved for queue in hub_of(connection)._queues)

        print(asyncio.run(sweep()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


@pytest.mark.natively
@pytest.mark.parametrize("kind", ["domain", "shared receive queue"])
def test_end_of_shared_object_gives_back_once(kind: str) -> None:
    """A step of the end finds no memory, whichever it is: none of the others is done twice."""
    printed = run_child(
        SWEEP,
        f"""
        import aiordma._loop.ending
        aiordma._loop.ending.RETRY_SECONDS = 0.001
        real = aiordma._loop.ending.Ending.__init__

        def init(self, loop, *steps):
            real(self, loop, *(failing(step) for step in steps))

        def failing(step):
            def call():
                count[0] += 1
                if count[0] == number[0]:
                    raise MemoryError  # before the step has done anything
                step()
            return call

        async def sweep():
            async with connections.connected("127.0.0.1", server=OPTIONS, client=OPTIONS) as both:
                hub, reactor = hub_of(both[0]), endpoint_of(both[0]).reactor
                before = sum(queue.reserved for queue in hub._queues), reactor.users
                aiordma._loop.ending.Ending.__init__ = init
                for number[0] in range(1, 100):
                    count[0] = -1000  # while it is opened
                    if {kind!r} == "domain":
                        made = await aiordma.open_domain("127.0.0.1", device="software")
                    else:
                        made = await aiordma.open_shared_receive(
                            "127.0.0.1", depth=500, device="software"
                        )
                    count[0] = 0
                    async with asyncio.timeout(BOUND):
                        await made.aclose()
                        while reactor.users > before[1]:
                            await asyncio.sleep(0)
                    after = sum(queue.reserved for queue in hub._queues), reactor.users
                    assert after == before, (number[0], after, before)
                    if count[0] < number[0]:
                        aiordma._loop.ending.Ending.__init__ = real
                        return "over" if number[0] > 5 else "few"

        count, number = [0], [0]
        print(asyncio.run(sweep()))
        """,
    )
    assert printed == "over\n"
