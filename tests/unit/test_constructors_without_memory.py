"""Constructors of the verbs objects that find no memory: what C has created is destroyed, in order,
and the program's memory is released.

One allocation fails at a time, each in turn, until there is none left to fail."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

pytestmark = pytest.mark.natively

SWEEP = """
import faulthandler
import _testcapi
import aiordma
from aiordma import (
    Access, AddressVector, CompletionQueueFlag, EventChannel, Identifier, MemoryWindowType,
    PortSpace, QueuePairType,
)
from aiordma.testing import software_objects
from aiordma._base.provider import software
from aiordma.verbs import (
    AddressHandle, Capacity, CompletionChannel, CompletionQueue, Device, MemoryRegion, MemoryWindow,
    ProtectionDomain, QueuePair, RawSharedReceiveQueue,
)
from tests.unit.failing_allocation import is_still_to_come

faulthandler.dump_traceback_later(100, exit=True)

def sweep(make):
    # Call `make`, which returns an object to close, until it needs no more memory.
    raised = 0
    for number in range(2000):
        before = software_objects()
        made, is_over = None, False
        _testcapi.set_nomemory(number, number + 1)
        try:
            made = make()
            is_over = is_still_to_come()
        except (MemoryError, SystemError, RuntimeError):  # the last: of a lock
            raised += 1
        finally:
            _testcapi.remove_mem_hooks()
        if made is not None:
            made.close()
        assert software_objects() == before, (number, made, software_objects(), before)
        if is_over:
            assert raised > 3
            return print("over")

context = Device("software").open()
domain = ProtectionDomain(context)
channel = CompletionChannel(context)
queue = CompletionQueue(context, 8, channel)
"""

MAKES = {
    "context": "lambda: Device('software').open()",
    "domain": "lambda: ProtectionDomain(context)",
    "channel": "lambda: CompletionChannel(context)",
    "queue": "lambda: CompletionQueue(context, 8, channel)",
    "extended queue": "lambda: CompletionQueue(context, 8, channel, timestamps=True)",
    "shared receive queue": "lambda: RawSharedReceiveQueue(domain, 8)",
    "queue pair": "lambda: QueuePair.create(domain, queue, queue)",
    "address handle": "lambda: AddressHandle(domain, vector)",
    "window": "lambda: MemoryWindow(domain)",
    "event channel": "lambda: EventChannel(software())",
    "identifier": "lambda: Identifier(events)",
}

PARTS = """
vector = AddressVector(gid=bytes(10) + b"\\xff\\xff" + bytes([127, 0, 0, 1]), port=1)
events = EventChannel(software())
"""


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_constructor_without_memory_leaves_nothing(make: str) -> None:
    assert run_child(SWEEP, PARTS, f"sweep({make})") == "over\n"


@pytest.mark.parametrize("access", ["None", "Access.RELAXED_ORDERING", "Access.ZERO_BASED"])
def test_region_without_memory_releases_the_buffer(access: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        import mmap
        memory = mmap.mmap(-1, 4096)
        access = {access}

        def make():
            try:
                return MemoryRegion(domain, memory, access)
            except BaseException as error:
                error.__traceback__ = None
                raise

        sweep(make)
        memory.close()  # it is not exported any more
        """,
    )
    assert printed == "over\n"


def test_dmabuf_region_without_memory_closes_its_descriptor() -> None:
    printed = run_child(
        SWEEP,
        """
        import os
        from aiordma.verbs import DmabufRegion

        fd = os.memfd_create("memory")
        os.truncate(fd, 4096)
        descriptors = set(os.listdir("/proc/self/fd"))
        sweep(lambda: DmabufRegion(domain, fd, 4096))
        assert set(os.listdir("/proc/self/fd")) == descriptors
        """,
    )
    assert printed == "over\n"


def test_queue_pair_of_an_identifier_is_destroyed_before_it() -> None:
    printed = run_child(
        SWEEP,
        """
        events = EventChannel(software())
        capacity = Capacity()
        order = []

        def noting(name):
            real = getattr(software(), name)
            setattr(software(), name, lambda pointer: (order.append(name), real(pointer))[1])

        noting("destroy_id")
        noting("destroy_qp")

        class Made:
            def __init__(self):
                self.identifier = Identifier(events, PortSpace.UDP)
                self.identifier.bind("127.0.0.1", 0)
                self.context = self.identifier.context()
                self.domain = ProtectionDomain(self.context)
                self.queue = CompletionQueue(self.context, 8)

            def close(self):
                self.identifier.close()
                self.context.close()

        first = Made()
        raised = 0
        for number in range(2000):
            before = software_objects()
            made, is_over = Made(), False
            order.clear()
            _testcapi.set_nomemory(number, number + 1)
            try:
                made.identifier.create_queue_pair(
                    made.domain, made.queue, made.queue, capacity, QueuePairType.UD
                )
                is_over = is_still_to_come()
            except (MemoryError, SystemError, RuntimeError):  # the last: of a lock
                raised += 1
            finally:
                _testcapi.remove_mem_hooks()
            made.close()
            assert order in (["destroy_qp", "destroy_id"], ["destroy_id"]), (number, order)
            assert software_objects() == before, (number, software_objects(), before)
            if is_over:
                break
        print("over" if is_over and raised > 3 else "not over")
        """,
    )
    assert printed == "over\n"
