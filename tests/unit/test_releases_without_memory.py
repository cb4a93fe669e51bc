"""Grants, registrations for one request, identifiers and counters that find no memory at their end:
nothing is kept, and no wait hangs.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

pytestmark = pytest.mark.natively

COMMON = """
import asyncio, faulthandler, logging
from functools import partial
import _testcapi
import aiordma
import aiordma._loop.ending
from aiordma import Access
from aiordma.testing import connected_pair, software_objects
from tests.internals import endpoint_of, hub_of
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(40, exit=True)  # what hangs fails, and says where
logging.disable(logging.CRITICAL)  # what is logged here is that there was no memory
aiordma._loop.ending.RETRY_SECONDS = 0.001

BOUND = 10  # seconds
LAST = 600

def without(number, function, *arguments):
    # Call the function, and return what it raised, and whether no allocation failed.
    raised, is_over = None, False
    _testcapi.set_nomemory(number, number + 1)
    try:
        function(*arguments)
        is_over = is_still_to_come()
    except (MemoryError, SystemError) as error:
        raised = type(error)
    finally:
        _testcapi.remove_mem_hooks()
    return raised, is_over

async def until(condition):
    for _ in range(1000 * BOUND):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")

async def sweep(attempt):
    for number in range(LAST):
        if await attempt(number):
            return "over"
"""


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("size", [64, 1 << 21])
def test_end_of_a_grant_without_memory_ends_the_access(size: int, engine: str) -> None:
    printed = run_child(
        COMMON,
        f"""
        async def main():
            async with connected_pair() as (client, server):
                users, regions = endpoint_of(server).reactor.users, software_objects()["regions"]

                async def attempt(number):
                    memory = bytearray({size})
                    grant = await server.grant(memory, Access.REMOTE_WRITE)
                    raised, is_over = without(number, grant._start_ending)
                    async with asyncio.timeout(BOUND):
                        await grant.aclose()
                    await until(lambda: endpoint_of(server).reactor.users == users)
                    assert software_objects()["regions"] == regions, (number, raised)
                    assert software_objects()["windows"] == 0, (number, raised)
                    memory.append(0)
                    return is_over

                return await sweep(attempt)

        print(asyncio.run(main()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("size", [100_000, 1 << 21])
def test_registration_for_one_request_is_given_back_without_memory(size: int, engine: str) -> None:
    printed = run_child(
        COMMON,
        f"""
        async def main():
            async with connected_pair(receive_buffers=0, flow_control=False) as (client, server):
                endpoint = endpoint_of(client)
                users, regions = endpoint.reactor.users, software_objects()["regions"]
                target = bytearray(64)

                async def attempt(number):
                    memory = bytearray({size})
                    temporary = client.register(memory)
                    raised, is_over = without(
                        number, client._posts._staging._give_back, [temporary]
                    )
                    if raised is not None:
                        assert id(temporary) in endpoint.regions, number  # the end closes it
                        temporary.close()
                    await until(lambda: temporary.closed and endpoint.reactor.users == users)
                    assert software_objects()["regions"] == regions, (number, raised)
                    assert id(temporary) not in endpoint.regions
                    del temporary
                    memory.append(0)
                    return is_over

                return await sweep(attempt)

        print(asyncio.run(main()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "over\n"


def test_identifier_without_memory_keeps_no_use_of_the_reactor() -> None:
    printed = run_child(
        COMMON,
        """
        from aiordma._runtime.identifiers import new_identifier

        async def main():
            async with connected_pair() as (client, server):
                reactor = endpoint_of(client).reactor
                users, identifiers = reactor.users, software_objects()["identifiers"]

                class FirstStep:
                    # Awaits a coroutine, whose first step has no memory.

                    def __init__(self, number, coroutine):
                        self.number, self.coroutine = number, coroutine

                    def __await__(self):
                        steps, awaited = self.coroutine.__await__(), None
                        _testcapi.set_nomemory(self.number, self.number + 1)
                        try:
                            awaited = steps.send(None)
                            self.is_over = is_still_to_come()
                        except (MemoryError, SystemError, StopIteration):
                            self.is_over = is_still_to_come()
                        finally:
                            _testcapi.remove_mem_hooks()
                        while awaited is not None:
                            yield awaited
                            try:
                                awaited = steps.send(None)
                            except (StopIteration, MemoryError, SystemError):
                                return

                async def use():
                    try:
                        async with new_identifier(reactor):
                            raise ValueError
                    except ValueError:
                        pass

                async def attempt(number):
                    step = FirstStep(number, use())
                    await step
                    await until(lambda: reactor.users == users)
                    await until(lambda: software_objects()["identifiers"] == identifiers)
                    return step.is_over

                return await sweep(attempt)

        print(asyncio.run(main()))
        """,
    )
    assert printed == "over\n"


def test_answer_without_memory_keeps_no_use_of_the_reactor() -> None:
    printed = run_child(
        COMMON,
        """
        async def main():
            options = {"device": "software", "receive_buffers": 2}
            async with (
                aiordma.open_datagram("127.0.0.1", 0, **options) as client,
                aiordma.open_datagram("127.0.0.1", 0, **options) as server,
            ):
                endpoint = endpoint_of(server)
                users, answer = endpoint.reactor.users, endpoint._answer
                identifiers = software_objects()["identifiers"]

                async def attempt(number):
                    outcome = []

                    def failing(event):
                        endpoint._answer = answer
                        outcome.append(without(number, endpoint.handle_event, event))

                    endpoint._answer = failing
                    # It answers, or the peer asks again.
                    await client.resolve("127.0.0.1", server.port, timeout=BOUND)
                    await until(lambda: endpoint.reactor.users == users)
                    await until(lambda: software_objects()["identifiers"] == identifiers)
                    assert endpoint.cause is None
                    return outcome[0][1]

                return await sweep(attempt)

        print(asyncio.run(main()))
        """,
    )
    assert printed == "over\n"


def test_counters_of_a_hub_without_memory_are_kept_once() -> None:
    printed = run_child(
        COMMON,
        """
        from types import SimpleNamespace
        from aiordma._base.statistics import RequestStatistics
        from aiordma._runtime.device_statistics import HubCounters, statistics

        class Counted:
            def statistics(self):
                return RequestStatistics(posted_sends=5)

        def sends(device):
            return statistics()[device].requests.posted_sends

        async def attempt(ends, number):
            device, counted = f"{ends}{number}", Counted()
            steps = SimpleNamespace(polls=1, wakes=0, events=0, delivered=0)
            counters = HubCounters(device, steps)
            counters.add(counted)
            function, *arguments = (
                (counters.end,) if ends == "end" else (counters.remove, counted)
            )
            raised, is_over = without(number, function, *arguments)
            if raised is not None:
                assert sends(device) == 5, (number, raised)
                function(*arguments)
            assert sends(device) == 5, (number, raised)
            counters.end()
            assert sends(device) == 5, (number, raised)
            return is_over

        for ends in ("end", "remove"):
            print(asyncio.run(sweep(partial(attempt, ends))))
        """,
    )
    assert printed == "over\nover\n"
