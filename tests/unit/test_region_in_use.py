"""A memory region in use by posted work requests stays open, and so does all that it needs."""

import gc
import os
from collections.abc import Callable

import pytest

from aiordma import BusyError, MemoryRegion
from aiordma.testing import software_objects
from aiordma.verbs import CompletionQueue, Device, DmabufRegion, ProtectionDomain
from tests.unit.software_device import nothing_left


@pytest.mark.promise("A buffer is held until its request completes")
def test_domain_stays_open_while_a_region_is_in_use() -> None:
    with nothing_left(), Device("software").open() as context:
        domain = ProtectionDomain(context)
        used, idle = MemoryRegion(domain, bytearray(64)), MemoryRegion(domain, bytearray(64))
        part = used[:]
        part._hold()
        with pytest.raises(BusyError, match="1 posted"):
            domain.close()
        assert (domain.closed, used.closed, idle.closed) == (False, False, True)
        assert software_objects()["domains"] == 1
        part._release()
        domain.close()
        assert (domain.closed, used.closed) == (True, True)


@pytest.mark.promise("A buffer is held until its request completes")
def test_context_stays_open_while_a_region_is_in_use() -> None:
    with nothing_left():
        context = Device("software").open()
        queue, domain = CompletionQueue(context, 1), ProtectionDomain(context)
        part = MemoryRegion(domain, bytearray(64))[:]
        part._hold()
        with pytest.raises(BusyError, match="1 posted"):
            context.close()
        assert (context.closed, domain.closed, queue.closed) == (False, False, True)
        part._release()
        context.close()


def of_memfd(domain: ProtectionDomain) -> DmabufRegion:
    memory = os.memfd_create("pages")
    os.ftruncate(memory, 64)
    region = DmabufRegion(domain, memory, 64)
    os.close(memory)
    return region


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.filterwarnings("ignore:unclosed <:ResourceWarning")
@pytest.mark.parametrize(
    "register",
    [lambda domain: MemoryRegion(domain, bytearray(64)), of_memfd],
    ids=["host", "memfd"],
)
def test_collected_family_is_closed_though_a_region_is_in_use(
    register: Callable[[ProtectionDomain], MemoryRegion],
) -> None:
    def forget() -> None:
        domain = ProtectionDomain(Device("software").open())
        register(domain)[:]._hold()

    with nothing_left():
        forget()
        gc.collect()
