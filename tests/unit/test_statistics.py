"""Counters: each request is counted once, a forked child begins anew, unknown numbers are kept."""

import subprocess
import sys

import pytest

from aiordma.types import RequestStatistics
from aiordma.verbs import WorkCompletionOpcode, WorkCompletionStatus
from tests.unit.child import run_child

SCENARIO = """
import asyncio, aiordma, aiordma.testing
from aiordma import Access
from aiordma._base.statistics import added

async def main():
    options = {"options": aiordma.ConnectionOptions(receive_buffers=0, max_send_wr=4)}
    async with aiordma.testing.connected_pair(**options) as (client, server):
        memory = server.register(bytearray(64), Access.REMOTE_READ | Access.REMOTE_WRITE)
        parts = client.register(bytearray(64))
        receives = [server.post_recv(bytearray(16)) for _ in range(9)]
        for i in range(4):
            await client.send(bytes(i))
        await client.sendv([b"ab", parts[:3]])
        await client.write(b"x" * 64, memory.remote())
        await client.readv([parts[:4], parts[4:8]], memory.remote()[:8])
        with client.chain(signal_last_only=True) as chain:
            requests = [chain.post_send(b"c"), chain.post_sendv([b"d", b"e"])]
        await requests[1]
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(client.read(bytearray(64), memory.remote()))
        wrong = aiordma.RemoteMemory(memory.remote().address, 64, memory.remote().rkey ^ 1)
        failing = client.post_read(parts, wrong)
        flushed = client.post_send(b"f")
        for request in (failing, flushed):
            try:
                await request
            except aiordma.WorkCompletionError:
                pass
        await client.ended()
        await server.ended()
        for receive in receives:
            receive.exception()
    for each in (client.statistics(), server.statistics()):
        print(each.posted_sends, each.posted_receives, each.in_flight, each.discarded)
        print(each.bytes_sent, each.bytes_received, each.queue_full_waits)
        print({opcode.name: count for opcode, count in each.completed.items()})
        print({status.name: count for status, count in each.failed.items()}, each.flushed)
    total = aiordma.statistics()["software"].requests
    assert total == added(client.statistics(), server.statistics())

asyncio.run(main())
"""


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.promise("Counters add up")
def test_requests_of_each_path_are_counted_once() -> None:
    lines = run(SCENARIO).splitlines()
    assert lines[:4] == [
        "17 0 0 0",
        "78 392 2",
        "{'SEND': 7, 'RDMA_WRITE': 1, 'RDMA_READ': 7}",
        "{'REM_ACCESS_ERR': 1} 1",
    ]
    assert lines[4:] == ["0 9 0 0", "0 14 0", "{'RECV': 7}", "{} 2"]


def test_a_forked_child_begins_with_counters_of_its_own() -> None:
    code = """
import asyncio, os, aiordma, aiordma.testing

async def main():
    async with aiordma.testing.connected_pair() as (client, server):
        await client.send(b"x")
        await server.receive()

asyncio.run(main())
assert aiordma.statistics()["software"].requests.bytes_sent == 1
if os.fork():
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert aiordma.statistics()["software"].requests.bytes_sent == 1
    print("done")
else:
    assert aiordma.statistics() == {}
    asyncio.run(main())
    assert aiordma.statistics()["software"].requests.bytes_sent == 1
"""
    assert run(code) == "done\n"


COLLECTED = """
import faulthandler, gc
from types import SimpleNamespace
from aiordma import statistics
from aiordma._runtime.device_statistics import HubCounters

class Queue:
    def __init__(self, sends):
        self.sends = sends

    def counters(self):
        return (self.sends, 0, 0, 0, 0, 0, {}, {}), 0

class Forgotten:
    def __init__(self, end):
        self.end, self.itself = end, self

    def __del__(self):
        self.end()
        ended.append(1)

def hub(queue):
    counters = HubCounters("numbers0", SimpleNamespace(polls=1, wakes=0, events=0, delivered=0))
    counters.add(queue)
    return counters

def sends():
    return statistics()["numbers0"].requests.posted_sends

def before_the_end(queue, counters):
    return lambda: counters.remove(queue)

def at_the_end(queue, counters):
    return lambda: (counters.remove(queue), counters.end())

faulthandler.dump_traceback_later(60, exit=True)
gc.collect()
gc.freeze()
gc.disable()
total, within = 1000, 0
kept_hub = hub(Queue(1000))
CALLS = {
    "statistics": lambda: None,
    "remove": lambda: kept_hub.remove(removed),
    "end": lambda: other_hub.end(),
}
for call in CALLS:
    for is_held in (True, False):
        for end in (before_the_end, at_the_end)[not is_held :]:
            for allocations in range(0, 250, 3):
                ended = []
                removed, other = Queue(100), Queue(10)
                kept_hub.add(removed)
                other_hub = hub(other)
                queue = Queue(1)
                counters = hub(queue)
                total += 111
                Forgotten(end(queue, counters))
                held = (queue, counters) if is_held else None
                del queue, counters
                gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
                gc.enable()
                CALLS[call]()
                found = sends()
                gc.disable()
                within += bool(ended)
                assert found == total, (call, is_held, end, allocations, found, total)
                gc.collect()
                kept_hub.remove(removed)
                other_hub.end()
                if held:
                    held[1].end()
                assert sends() == total, (call, is_held, end, allocations)
                del held, other, other_hub, removed
                total = sends()
print("ended within", within)
"""


@pytest.mark.promise("Counters add up")
def test_hub_that_ends_meanwhile_is_counted_once() -> None:
    """The garbage collector ends hubs at any allocation, also while their counters are summed."""
    assert int(run_child(COLLECTED).split()[-1]) > 0


@pytest.mark.promise("Counters add up")
@pytest.mark.parametrize("count", [1, 3])
def test_statistics_add_up(count: int) -> None:
    counted = (5, 4, 3, 2, 100, 200, {0: 1, 128: 2}, {5: 1, 10: 7}), 6
    total = RequestStatistics._sum([counted] * count)
    assert (total.posted_sends, total.posted_receives) == (5 * count, 4 * count)
    assert (total.in_flight, total.discarded) == (3 * count, 2 * count)
    assert (total.bytes_sent, total.bytes_received) == (100 * count, 200 * count)
    assert total.queue_full_waits == 6 * count
    assert total.completed == {
        WorkCompletionOpcode.SEND: count,
        WorkCompletionOpcode.RECV: 2 * count,
    }
    assert total.failed == {WorkCompletionStatus.REM_ACCESS_ERR: 7 * count}
    assert total.flushed == count


def test_a_status_of_a_newer_device_is_a_general_error() -> None:
    counters = RequestStatistics._of(((1, 0, 0, 0, 0, 0, {}, {77: 2, 21: 1}), 0))
    assert counters.failed == {WorkCompletionStatus.GENERAL_ERR: 3}
