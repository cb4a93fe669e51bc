"""What the driver refuses to destroy stays for the life of the process, with its memory."""

import errno
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from aiordma import BusyError, MemoryRegion, VerbsCallError
from aiordma.testing import Faults, software_objects
from aiordma.verbs import (
    AddressHandle,
    AddressVector,
    CompletionChannel,
    CompletionQueue,
    Context,
    Device,
    EventChannel,
    Identifier,
    MemoryWindow,
    ProtectionDomain,
    QueuePair,
    RawSharedReceiveQueue,
    Resource,
    memory_window,
)
from tests.internals import software
from tests.unit.child import run_child
from tests.unit.software_device import nothing_left

pytestmark = pytest.mark.natively


@pytest.fixture(autouse=True, scope="module")
def _context_of_the_manager() -> None:
    """The connection manager opens a context, which stays."""
    with EventChannel("software") as channel:
        Identifier(channel)


def opened() -> Context:
    return Device("software").open()


def queue_pair() -> QueuePair:
    queue = CompletionQueue(opened(), 2)
    return QueuePair.create(queue.context.alloc_pd(), queue, queue)


def address_handle() -> AddressHandle:
    context = opened()
    (local,) = [entry for entry in context.gid_table() if entry.address == "127.0.0.1"]
    return AddressHandle(context.alloc_pd(), AddressVector(gid=local.gid, gid_index=local.index))


KINDS: dict[str, tuple[str, Callable[[], Resource]]] = {
    "contexts": ("close_device", opened),
    "domains": ("dealloc_pd", lambda: ProtectionDomain(opened())),
    "regions": ("dereg_mr", lambda: MemoryRegion(opened().alloc_pd(), bytearray(8))),
    "channels": ("destroy_comp_channel", lambda: CompletionChannel(opened())),
    "queues": ("destroy_cq", lambda: CompletionQueue(opened(), 2)),
    "queue_pairs": ("destroy_qp", queue_pair),
    "shared_receives": ("destroy_srq", lambda: RawSharedReceiveQueue(opened().alloc_pd(), 1)),
    "address_handles": ("destroy_ah", address_handle),
    "identifiers": ("destroy_id", lambda: Identifier(EventChannel("software"))),
}


def root_of(thing: Resource) -> Resource:
    return root_of(thing._parents[0]) if thing._parents else thing


def clean_up(reference: "weakref.ref[Resource]") -> None:
    """Destroy what has leaked, which nothing else does."""
    leaked = reference()
    assert leaked is not None
    leaked._closed, leaked._refusal = False, None
    root_of(leaked).close()


def refused_and_dropped(thing: Resource) -> "weakref.ref[Resource]":
    """Close an object that the driver refuses to destroy, and forget it."""
    for closed in (thing, thing, root_of(thing)):
        with pytest.raises(VerbsCallError, match="Input/output error"):
            closed.close()
    assert (thing.closed, thing._is_gone) == (True, False)
    return weakref.ref(thing)


@pytest.mark.parametrize("kind", KINDS)
def test_refused_object_stays_and_is_not_asked_again(kind: str) -> None:
    slot, make = KINDS[kind]
    with nothing_left():
        before = software_objects()[kind]
        with Faults() as faults:
            fault = faults.refuse_call(slot, errno.EIO, times=0)
            leaked = refused_and_dropped(make())
            gc.collect()
            assert fault.struck == 1
        assert software_objects()[kind] == before + 1
        clean_up(leaked)


def test_refused_window_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_left():
        window = MemoryWindow(opened().alloc_pd())
        refusing = SimpleNamespace(aiordma_dealloc_window=lambda _: errno.EIO)
        with monkeypatch.context() as patch:
            patch.setattr(memory_window, "lib", refusing)
            leaked = refused_and_dropped(window)
        del window
        gc.collect()
        assert software_objects()["windows"] == 1
        clean_up(leaked)


@pytest.mark.parametrize("kind", KINDS)
def test_busy_object_can_be_closed_again(kind: str) -> None:
    slot, make = KINDS[kind]
    with nothing_left(), Faults() as faults:
        faults.refuse_call(slot, errno.EBUSY)
        thing = make()
        with pytest.raises((VerbsCallError, BusyError), match="Device or resource busy"):
            thing.close()
        assert not thing.closed
        thing.close()
        assert thing._is_gone
        root_of(thing).close()


def test_parents_close_all_but_the_refused_object() -> None:
    with nothing_left(), Faults() as faults:
        faults.refuse_call("dereg_mr", errno.EIO)
        context = opened()
        queue, domain = CompletionQueue(context, 2), context.alloc_pd()
        regions = [MemoryRegion(domain, bytearray(8)) for _ in range(2)]
        for _ in range(2):
            with pytest.raises(VerbsCallError, match="ibv_dereg_mr: Input/output error"):
                context.close()
            assert [each._is_gone for each in (queue, domain, context)] == [True, False, False]
        assert sorted(region._is_gone for region in regions) == [False, True]
        clean_up(weakref.ref(next(region for region in regions if not region._is_gone)))


LATE_WRITE = """
import errno, gc
from contextlib import ExitStack
from aiordma import Access, MemoryRegion, VerbsCallError
from aiordma._native import ffi
from aiordma.testing import Faults
from tests.unit.stream_peer import Wire, tagged
from tests.waiting import wait_until

def leak():
    wire = Wire(stack := ExitStack())
    region = MemoryRegion(wire.domain, bytearray(64), Access.REMOTE_WRITE)
    where = region.address, region.rkey
    for each in (region, wire.pair, region, wire.domain, wire.identifier):
        try:
            each.close()
        except VerbsCallError as error:
            assert error.errno == errno.EIO
        else:
            raise AssertionError(each)
    stack.pop_all()  # forgets its objects
    return wire.peer, *where

with Faults() as faults:
    faults.refuse_call("dereg_mr", errno.EIO, times=0)
    faults.refuse_call("destroy_qp", errno.EIO, times=0)
    peer, address, rkey = leak()
    for _ in range(3):  # a finalizer that fails keeps its object until the next collection
        gc.collect()
    others = [bytearray(64) for _ in range(1000)]  # where freed memory was
    peer.sendall(tagged(0, rkey, address, b"too late"))  # an RDMA WRITE
    memory = ffi.buffer(ffi.cast("char *", address), 64)
    wait_until(lambda: memory[:8] == b"too late")
    assert memory[8:] == bytes(56)
    assert not any(map(any, others))
"""


@pytest.mark.promise("A buffer is held until its request completes")
def test_late_write_reaches_the_memory_of_a_refused_region() -> None:
    """And the process ends with all that has leaked."""
    run_child(LATE_WRITE)


@pytest.mark.filterwarnings("error")
def test_refused_finalizer_logs_and_keeps_the_object(caplog: pytest.LogCaptureFixture) -> None:
    with nothing_left():
        with Faults() as faults:
            faults.refuse_call("close_device", errno.EIO)
            pointer = opened().pointer
            gc.collect()
        (record,) = caplog.records
        assert "<Context software> was collected unclosed" in record.message
        assert "ibv_close_device: Input/output error" in record.message
        assert software().close_device(pointer) == 0


def test_failed_constructor_destroys_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_fd: int, _blocking: bool) -> None:
        raise OSError("no such descriptor")

    with nothing_left(), opened() as context:
        monkeypatch.setattr("os.set_blocking", fail)
        with pytest.raises(OSError, match="no such descriptor"):
            CompletionChannel(context)
        monkeypatch.undo()
        assert context._children == {}
