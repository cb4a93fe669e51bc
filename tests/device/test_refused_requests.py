"""Requests that a device refuses: with which status, and in which state the queue pair is then."""

import errno
import time

import pytest

import aiordma
from aiordma import Access, MemoryRegion, RemoteMemory
from aiordma.verbs import (
    ConnectionParameters,
    MemoryWindow,
    QueuePairState,
    SendFlag,
    SendWork,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from tests.device import by_hand
from tests.device.raw_ends import End, connected
from tests.device.test_datagram_by_hand import open_end as open_datagrams
from tests.devices import DeviceUnderTest

pytestmark = [pytest.mark.capability("named_refusals")]

REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
Status = WorkCompletionStatus
S = QueuePairState

OPERATIONS = {
    "write": WorkRequestOpcode.RDMA_WRITE,
    "read": WorkRequestOpcode.RDMA_READ,
    "atomic": WorkRequestOpcode.ATOMIC_FETCH_AND_ADD,
}
operations = pytest.mark.parametrize("operation", OPERATIONS)
without_atomics = pytest.mark.parametrize("operation", ["write", "read"])


def state_of(pair: aiordma.verbs.QueuePair) -> QueuePairState:
    """Its state now: type checkers take a property for what it was when last compared."""
    return pair.state


def comes_to_err(end: End) -> bool:
    limit = time.monotonic() + 10
    while state_of(end.pair) is not S.ERR:
        assert time.monotonic() < limit, state_of(end.pair)
    return True


def status_of(end: End, operation: str, remote: RemoteMemory, length: int = 8) -> Status:
    """Post a request of so many bytes to the peer's memory, and return its completion's status."""
    with MemoryRegion(end.domain, bytearray(8)) as own:
        parts = [own[:length]] if length else []
        end.pair.post_send(1, parts, opcode=OPERATIONS[operation], remote=remote)
        completion = end.completion()
    assert completion.wr_id == 1
    return Status(completion.status)


# -- what the queue pair permits ------------------------------------------------------------------


@operations
def test_access_flags_of_the_queue_pair_forbid_an_operation(operation: str) -> None:
    with connected() as (ours, theirs):
        theirs.pair.modify(access=Access.LOCAL_WRITE)
        memory = MemoryRegion(theirs.domain, bytearray(b"12345678"), REMOTE)
        theirs.pair.post_recv(2, [memory])
        assert status_of(ours, operation, memory.remote()) == Status.REM_INV_REQ_ERR
        assert bytes(memory) == b"12345678"
        assert theirs.completion().status == Status.WR_FLUSH_ERR
        assert comes_to_err(theirs)
        assert comes_to_err(ours)


@without_atomics
def test_access_flags_of_the_queue_pair_and_no_bytes(
    device: DeviceUnderTest, operation: str
) -> None:
    with connected() as (ours, theirs):
        theirs.pair.modify(access=Access.LOCAL_WRITE)
        memory = MemoryRegion(theirs.domain, bytearray(8), REMOTE)
        expected = Status.REM_INV_REQ_ERR
        if device.lacks("empty_accesses_refused"):
            expected = Status.SUCCESS
        assert status_of(ours, operation, memory.remote(), 0) == expected


@pytest.mark.parametrize("operation", ["read", "atomic"])
def test_read_without_depth(device: DeviceUnderTest, operation: str) -> None:
    with connected(accepting=ConnectionParameters(responder_resources=0)) as (ours, theirs):
        memory = MemoryRegion(theirs.domain, bytearray(8), REMOTE)
        if device.lacks("depth_of_none_ends"):
            own = MemoryRegion(ours.domain, bytearray(8))
            opcode = OPERATIONS[operation]
            ours.pair.post_send(1, [own], opcode=opcode, remote=memory.remote())
            ours.pair.post_send(2, [own], opcode=OPERATIONS["write"], remote=memory.remote())
            assert ours.nothing_completes()
            assert state_of(ours.pair) is S.RTS
        else:
            assert status_of(ours, operation, memory.remote()) == Status.LOC_QP_OP_ERR
            assert state_of(ours.pair) is S.ERR


@pytest.mark.capability("queue pairs by hand")
def test_peer_without_depth_refuses_a_read(device: DeviceUnderTest) -> None:
    with by_hand.open_end(device) as one, by_hand.open_end(device) as other:
        one.connect(other)
        other.connect(one, max_dest_rd_atomic=0)
        own = MemoryRegion(one.domain, bytearray(8))
        memory = MemoryRegion(other.domain, bytearray(8), by_hand.REMOTE)
        opcode = WorkRequestOpcode.RDMA_READ
        one.pair.post_send(1, [own], opcode=opcode, remote=memory.remote())
        assert one.completions(1)[0].status == Status.REM_INV_REQ_ERR


# -- what the memory permits ----------------------------------------------------------------------


def refused(case: str, ours: End, theirs: End) -> tuple[MemoryRegion, RemoteMemory]:
    """Memory of 64 bytes, and a range that is refused."""
    domain = ours.domain if case == "of another domain" else theirs.domain
    access = Access.LOCAL_WRITE if case == "without remote access" else REMOTE
    memory = MemoryRegion(domain, bytearray(64), access)
    address, rkey = memory.address, memory.rkey
    if case == "before the region":
        address -= 8
    elif case == "after the region":
        address += 64
    elif case == "of another rkey":
        rkey ^= 0x5500
    elif case == "closed":
        memory.close()
    return memory, RemoteMemory(address, 8, rkey)


CASES = [
    "before the region",
    "after the region",
    "of another rkey",
    "of another domain",
    "closed",
    "without remote access",
]


@operations
@pytest.mark.parametrize("case", CASES)
def test_access_is_refused(operation: str, case: str) -> None:
    with connected() as (ours, theirs):
        memory, remote = refused(case, ours, theirs)
        assert status_of(ours, operation, remote) == Status.REM_ACCESS_ERR
        assert comes_to_err(ours)
        assert comes_to_err(theirs)
        del memory


@without_atomics
@pytest.mark.parametrize("case", CASES)
def test_access_to_no_bytes_needs_no_memory(operation: str, case: str) -> None:
    with connected() as (ours, theirs):
        memory, remote = refused(case, ours, theirs)
        assert status_of(ours, operation, remote, 0) == Status.SUCCESS
        assert state_of(theirs.pair) is S.RTS
        del memory


@pytest.mark.parametrize("offset", [8, 4])
def test_atomic_on_a_windows_unaligned_memory(offset: int) -> None:
    """The address that the peer gives is aligned: the window counts from its first byte."""
    with connected() as (ours, theirs):
        memory = MemoryRegion(theirs.domain, bytearray(64), REMOTE | Access.MW_BIND)
        assert not memory.address % 8
        with MemoryWindow(theirs.domain) as window:
            rkey = window.next_rkey()
            work = SendWork(
                "BIND_MW",
                WorkRequestOpcode.BIND_MW,
                window=window,
                bound=memory[offset : offset + 16],
                access=Access.REMOTE_ATOMIC | Access.ZERO_BASED,
                rkey=rkey,
            )
            assert theirs.pair.post_send_chain([work], [3], [SendFlag.SIGNALED]) == (0, 1)
            assert theirs.completion().ok
            expected = Status.REM_INV_REQ_ERR if offset % 8 else Status.SUCCESS
            assert status_of(ours, "atomic", RemoteMemory(0, 8, rkey)) == expected
        assert not any(memory.view)


# -- what a post refuses --------------------------------------------------------------------------


def test_post_refuses_an_unaligned_atomic() -> None:
    with connected() as (ours, theirs):
        memory = MemoryRegion(theirs.domain, bytearray(64), REMOTE)
        own = MemoryRegion(ours.domain, bytearray(8))
        unaligned = RemoteMemory(memory.address + 4, 8, memory.rkey)
        with pytest.raises(aiordma.VerbsCallError, match="ibv_post_send: Invalid argument"):
            ours.pair.post_send(1, [own], opcode=OPERATIONS["atomic"], remote=unaligned)
        assert ours.nothing_completes()
        assert status_of(ours, "write", memory.remote()) == Status.SUCCESS


def test_post_refuses_more_inline_bytes_than_the_capacity_has() -> None:
    with connected() as (ours, theirs):
        memory = MemoryRegion(theirs.domain, bytearray(1 << 16), REMOTE)
        theirs.pair.post_recv(2, [memory])
        flags = SendFlag.INLINE | SendFlag.SIGNALED
        most = ours.pair.capacity.max_inline_data
        with pytest.raises(aiordma.VerbsCallError, match=f"max_inline_data={most}"):
            ours.pair.post_send(1, [bytes(most + 1)], flags=flags)
        assert ours.nothing_completes()
        ours.pair.post_send(1, [bytes(most)], flags=flags)
        assert theirs.completion().byte_len == most


# -- states ---------------------------------------------------------------------------------------


def test_requests_posted_in_err_are_flushed(device: DeviceUnderTest) -> None:
    with connected() as (ours, _):
        own = MemoryRegion(ours.domain, bytearray(8))
        ours.pair.modify(S.ERR)
        ours.pair.post_recv(1, [own])
        ours.pair.post_send(2, [own])
        flushed = [ours.completion()]
        if not device.lacks("late_receives_flushed"):
            flushed.append(ours.completion())
        assert {each.status for each in flushed} == {Status.WR_FLUSH_ERR}
        assert [each.wr_id for each in flushed][-1] == 2
        assert ours.nothing_completes()


def test_queue_pair_that_is_moved_to_err(device: DeviceUnderTest) -> None:
    with connected() as (ours, theirs):
        memory = MemoryRegion(theirs.domain, bytearray(8))
        theirs.pair.post_recv(1, [memory])
        ours.pair.modify(S.ERR)
        if device.lacks("err_ends_the_peer"):
            assert theirs.nothing_completes()
            assert state_of(theirs.pair) is S.RTS
        else:
            assert theirs.completion().status == Status.WR_FLUSH_ERR
            assert comes_to_err(theirs)


@pytest.mark.capability("datagrams")
@pytest.mark.parametrize("state", [S.RESET, S.INIT, S.RTR])
def test_send_posted_before_rts(device: DeviceUnderTest, state: QueuePairState) -> None:
    with open_datagrams(device) as end:
        if state is not S.RESET:
            end.start(state)
        error, posted = end.post(end.region[:5], 8)
        if device.lacks("early_sends_refused"):
            assert (error, posted) == (-errno.EINVAL, 1)
        else:
            assert (error, posted) == (errno.EINVAL, 0)
        assert end.nothing_completes()
        if state is S.RESET:
            end.start(S.INIT)
        if state is not S.RTR:
            end.pair.modify(S.RTR)
        end.pair.modify(S.RTS, sq_psn=0)
        assert end.nothing_completes()
        end.send(end.region[:5])
        expected = [8, 7] if device.lacks("early_sends_refused") else [7]
        assert [each.wr_id for each in end.completions(len(expected))] == expected


@pytest.mark.capability("datagrams")
def test_receives_are_posted_from_init_on(device: DeviceUnderTest) -> None:
    with open_datagrams(device) as end:
        with pytest.raises(aiordma.VerbsCallError, match="ibv_post_recv: Invalid argument"):
            end.pair.post_recv(1, [end.region[:100]])
        end.start(S.INIT)
        end.pair.post_recv(2, [end.region[:100]])
        end.pair.modify(S.RTR)
        end.pair.modify(S.RTS, sq_psn=0)
        end.send(end.region[200:205])
        assert sorted(each.wr_id for each in end.completions(2)) == [2, 7]


@pytest.mark.capability("datagrams")
def test_send_posted_in_sqd(device: DeviceUnderTest) -> None:
    with open_datagrams(device) as end:
        end.start()
        end.pair.modify(S.SQD)
        assert end.post(end.region[:5], 8) == (0, 1)
        assert end.nothing_completes()
        end.pair.modify(S.RTS)
        expected = [8]
        if device.lacks("sqd_resumed"):
            assert end.nothing_completes()
            end.send(end.region[:5])
            expected = [8, 7]
        assert [each.wr_id for each in end.completions(len(expected))] == expected
