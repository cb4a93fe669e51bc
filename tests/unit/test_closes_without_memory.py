"""Closes of the synchronous objects that find no memory: what was not destroyed is still open, and
a later close destroys it.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

pytestmark = pytest.mark.natively

SWEEP = """
import faulthandler
import _testcapi
import aiordma
from aiordma import Access, EventChannel, Identifier, QueuePairState, QueuePairType
from aiordma.testing import software_objects
from aiordma._base.provider import software
from aiordma.verbs import (
    CompletionChannel, CompletionQueue, Device, MemoryRegion, QueuePair, RawSharedReceiveQueue,
)
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(100, exit=True)

def verbs():
    context = Device("software").open()
    domain = context.alloc_pd()
    channel = CompletionChannel(context)
    queue = CompletionQueue(context, 4, channel)
    shared = RawSharedReceiveQueue(domain, 4)
    pair = QueuePair.create(domain, queue, queue, shared_receive=shared)
    alone = QueuePair.create(domain, queue, queue, service=QueuePairType.UD)
    alone.attach_multicast(GROUP)
    region = MemoryRegion(domain, bytearray(64), Access.REMOTE_WRITE)
    return context, [context, domain, channel, queue, shared, pair, alone, region]

def manager():
    channel = EventChannel(software())
    identifier = Identifier(channel)
    return channel, [channel, identifier]

GROUP = b"\\xff" + bytes(14) + b"\\1"

def attempt(make, number):
    before = software_objects()
    top, all_of_them = make()
    raised, is_over = None, False
    _testcapi.set_nomemory(number, number + 1)
    try:
        top.close()
        is_over = is_still_to_come()
    except (MemoryError, SystemError, aiordma.VerbsCallError) as error:
        raised = type(error)
    finally:
        _testcapi.remove_mem_hooks()
    top.close()
    assert all(each.closed for each in all_of_them), (number, raised)
    assert software_objects() == before, (number, raised, software_objects(), before)
    return is_over

def sweep(make):
    for number in range(2000):
        if attempt(make, number):
            return number
"""


@pytest.mark.parametrize("family", ["verbs", "manager"])
def test_close_without_memory_can_be_repeated(family: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        with Device("software").open():
            found = sweep({family})
        print("over" if found and found > 3 else f"after {{found}}")
        """,
    )
    assert printed == "over\n"
