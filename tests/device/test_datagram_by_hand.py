"""UD queue pairs without sockets' help: what a send or a receive ends with, and what is refused."""

import errno
import ipaddress
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

import aiordma
from aiordma import Access, MemoryRegion, RemoteMemory
from aiordma.types import MemorySlice
from aiordma.verbs import (
    GRH_BYTES,
    AddressHandle,
    AddressVector,
    AsyncEvent,
    AsyncEventType,
    CmEventType,
    CompletionChannel,
    CompletionQueue,
    Device,
    EventChannel,
    Identifier,
    PortSpace,
    QueuePair,
    QueuePairState,
    QueuePairType,
    RawSharedReceiveQueue,
    SendFlag,
    SendWork,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from aiordma.verbs.memory import gather
from tests.conftest import DEVICE
from tests.device.identifiers import expect
from tests.devices import ADDRESS, DeviceUnderTest, own_group
from tests.internals import find_gid

pytestmark = [pytest.mark.capability("datagrams")]

QKEY = 0x00112233
GROUP_ADDRESS = own_group(4)
GROUP = bytes(10) + b"\xff\xff" + ipaddress.ip_address(GROUP_ADDRESS).packed


class End:
    """A UD queue pair that can send to itself, with memory of two pages."""

    def __init__(self, device: DeviceUnderTest, stack: ExitStack, shared: bool = False) -> None:
        self.context = stack.enter_context(Device(device.name).open())
        self.domain = stack.enter_context(self.context.alloc_pd())
        self.channel = stack.enter_context(CompletionChannel(self.context))
        self.queue = stack.enter_context(CompletionQueue(self.context, 64, self.channel))
        self.shared = stack.enter_context(RawSharedReceiveQueue(self.domain, 8)) if shared else None
        self.memory = bytearray(8192)
        self.region = stack.enter_context(
            MemoryRegion(self.domain, self.memory, Access.LOCAL_WRITE)
        )
        self.pair = stack.enter_context(
            QueuePair.create(
                self.domain,
                self.queue,
                self.queue,
                service=QueuePairType.UD,
                shared_receive=self.shared,
            )
        )
        self.index, self.gid = find_gid(self.context, 1, ADDRESS)
        self.handle = stack.enter_context(self.handle_to(self.gid))

    def handle_to(self, gid: bytes | None, **changes: int) -> AddressHandle:
        fields: dict[str, Any] = {"gid": gid, "gid_index": self.index, **changes}
        return AddressHandle(self.domain, AddressVector(**fields))

    def start(self, last: QueuePairState = QueuePairState.RTS) -> None:
        self.pair.modify(QueuePairState.INIT, pkey_index=0, port=1, qkey=QKEY)
        if last >= QueuePairState.RTR:
            self.pair.modify(QueuePairState.RTR)
        if last >= QueuePairState.RTS:
            self.pair.modify(QueuePairState.RTS, sq_psn=0)

    def send(self, part: MemorySlice, *, to: "End | None" = None, qkey: int = QKEY) -> None:
        error, _ = self.post(part, to=to, qkey=qkey)
        assert not error

    def post(
        self,
        part: MemorySlice,
        wr_id: int = 7,
        *,
        to: "End | None" = None,
        qkey: int = QKEY,
    ) -> tuple[int, int]:
        work = SendWork(
            "SEND",
            WorkRequestOpcode.SEND,
            gather([part]),
            1,
            part.length,
            address=self.handle,
            remote_qpn=(to or self).pair.qp_num,
            remote_qkey=qkey,
        )
        return self.pair.post_send_chain([work], [wr_id], [SendFlag.SIGNALED])

    def completions(self, count: int) -> list[aiordma.verbs.WorkCompletion]:
        found: list[aiordma.verbs.WorkCompletion] = []
        end = time.monotonic() + 10
        while len(found) < count:
            assert time.monotonic() < end, found
            found += self.queue.poll()
        assert len(found) == count
        return found

    def nothing_completes(self) -> bool:
        time.sleep(0.05)
        return not list(self.queue.poll())


@contextmanager
def open_end(device: DeviceUnderTest, **options: bool) -> Iterator[End]:
    with ExitStack() as stack:
        yield End(device, stack, **options)


def test_a_queue_pair_sends_to_itself(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        end.memory[:5] = b"hello"
        end.pair.post_recv(1, [end.region[4096:4200]])
        end.send(end.region[:5])
        sent, received = sorted(end.completions(2), key=lambda completion: -completion.wr_id)
        assert (sent.status, received.status) == (WorkCompletionStatus.SUCCESS,) * 2
        assert received.byte_len == GRH_BYTES + 5
        assert received.src_qp == end.pair.qp_num
        assert end.memory[4096 + GRH_BYTES :][:5] == b"hello"


def test_one_with_another_key_is_dropped(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        end.pair.post_recv(1, [end.region[4096:4200]])
        end.send(end.region[:5], qkey=QKEY + 1)
        end.send(end.region[:6])
        received = [each for each in end.completions(3) if each.wr_id == 1]
        assert [each.byte_len for each in received] == [GRH_BYTES + 6]


@pytest.mark.capability("own_qkey")
def test_the_highest_bit_of_a_key_stands_for_the_queue_pairs_own(device: DeviceUnderTest) -> None:
    """man ibv_post_send."""
    with open_end(device) as end:
        end.start()
        end.pair.post_recv(1, [end.region[4096:4200]])
        end.send(end.region[:6], qkey=0x80000000)
        received = [each for each in end.completions(2) if each.wr_id == 1]
        assert [each.byte_len for each in received] == [GRH_BYTES + 6]


@pytest.mark.capability("drained_at_once")
def test_a_drained_send_queue_is_reported_if_requested(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        for wanted in (0, 1):
            end.pair.modify(QueuePairState.SQD, en_sqd_async_notify=wanted)
            events = list(iter(end.context.take_async_event, None))
            expected = AsyncEvent(
                AsyncEventType.SQ_DRAINED,
                key=end.pair.key,
                resource=end.pair,
                qp_num=end.pair.qp_num,
            )
            assert events == ([expected] if wanted else [])
            end.pair.modify(QueuePairState.RTS)


@pytest.mark.parametrize("name", ["path_mig_state", "alt_timeout"])
def test_attributes_of_an_alternate_path_are_unknown(device: DeviceUnderTest, name: str) -> None:
    with open_end(device) as end, pytest.raises(TypeError, match=f"'{name}' is no attribute"):
        end.pair.modify(**cast(Any, {name: 1}))


@pytest.mark.capability("handles_copied")
def test_a_queued_datagram_outlives_its_handle(device: DeviceUnderTest) -> None:
    with open_end(device) as end, ExitStack() as others:
        end.start()
        end.pair.post_recv(1, [end.region[4096:4200]])
        end.pair.modify(QueuePairState.SQD)
        end.send(end.region[:5])
        end.handle.close()
        for _ in range(20):  # where the handle was
            others.enter_context(end.handle_to(GROUP))
        assert end.nothing_completes()
        end.pair.modify(QueuePairState.RTS)
        assert sorted(each.wr_id for each in end.completions(2)) == [1, 7]


def test_a_closed_handle_is_not_posted(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        end.handle.close()
        with pytest.raises(aiordma.ClosedError, match="AddressHandle is closed"):
            end.send(end.region[:5])
        assert end.nothing_completes()


@pytest.mark.parametrize("state", [QueuePairState.INIT, QueuePairState.RTR])
def test_one_that_is_not_ready_drops_what_comes(
    device: DeviceUnderTest, state: QueuePairState
) -> None:
    with open_end(device) as one, open_end(device) as other:
        one.start()
        other.start(state)
        other.pair.post_recv(1, [other.region[:100]])
        one.send(one.region[:5], to=other)
        one.completions(1)
        if state is QueuePairState.INIT:
            assert other.nothing_completes()
        else:
            assert [each.wr_id for each in other.completions(1)] == [1]


def test_an_error_flushes_its_receives(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        end.pair.post_recv(1, [end.region[:100]])
        end.pair.modify(QueuePairState.ERR)
        assert [each.status for each in end.completions(1)] == [WorkCompletionStatus.WR_FLUSH_ERR]


def test_nothing_of_one_longer_than_the_mtu_arrives(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        end.pair.post_recv(1, [end.region[:]])
        end.send(end.region[:4097])
        (sent, *flushed) = end.completions(1 if device.lacks("datagram_length_checked") else 2)
        assert sent.wr_id == 7
        if device.lacks("datagram_length_checked"):
            assert end.nothing_completes()
            assert end.pair.state is QueuePairState.RTS
        else:
            assert sent.status == WorkCompletionStatus.LOC_LEN_ERR
            statuses = {each.wr_id: each.status for each in flushed}
            assert statuses == {1: WorkCompletionStatus.WR_FLUSH_ERR}
            assert end.pair.state is QueuePairState.ERR


def test_memory_that_is_not_registered_is_an_error(device: DeviceUnderTest) -> None:
    wrong = WorkCompletionStatus.LOC_PROT_ERR
    if device.lacks("local_errors_named"):
        wrong = WorkCompletionStatus.LOC_QP_OP_ERR
    with open_end(device) as end, open_end(device) as other:
        end.start()
        other.start()
        end.send(other.region[:5])  # another domain's
        assert [each.status for each in end.completions(1)] == [wrong]
        assert end.pair.state is QueuePairState.ERR
        other.pair.post_recv(1, [end.region[:100]])
        other.send(other.region[:5])
        statuses = {each.wr_id: each.status for each in other.completions(2)}
        assert statuses[1] == wrong
        # A device may see the receive's error before the send has ended.
        assert statuses[7] in (WorkCompletionStatus.SUCCESS, WorkCompletionStatus.WR_FLUSH_ERR)
        assert other.pair.state is QueuePairState.ERR


@pytest.mark.parametrize("shared", [False, True])
def test_a_receive_that_is_too_small_stays_for_another_or_ends_the_queue_pair(
    device: DeviceUnderTest, shared: bool
) -> None:
    with open_end(device, shared=shared) as end:
        end.start()
        part = [end.region[4096 : 4096 + GRH_BYTES + 5]]
        if end.shared is None:
            end.pair.post_recv(1, part)
        else:
            end.shared.post_srq_recv([(1, part)])
        if device.lacks("small_receives_kept"):
            end.send(end.region[:6])
            statuses = {each.wr_id: each.status for each in end.completions(2)}
            assert statuses[1] == WorkCompletionStatus.LOC_QP_OP_ERR
            assert end.pair.state is QueuePairState.ERR
            return
        for length in (6, 4096, 5):
            end.send(end.region[:length])
        received = [each for each in end.completions(4) if each.wr_id == 1]
        assert [each.byte_len for each in received] == [GRH_BYTES + 5]


def test_post_without_an_address_is_refused(device: DeviceUnderTest) -> None:
    """A driver would take what stands in the address's place for a pointer."""
    with open_end(device) as end:
        end.start()
        part = end.region[:5]
        for remote in (None, RemoteMemory(0x1000, 8, 5)):
            with pytest.raises(ValueError, match=r"^post_send\(\): .*UD.*address=AddressHandle"):
                end.pair.post_send(1, [part], remote=remote)
        works = {
            "needs address=": SendWork("SEND", WorkRequestOpcode.SEND, gather([part]), 1, 5),
            "sends datagrams only": SendWork(
                "FETCH_ADD",
                WorkRequestOpcode.ATOMIC_FETCH_AND_ADD,
                *(gather([part]), 1, 5),
                remote=RemoteMemory(0x1000, 8, 5),
                address=end.handle,
            ),
        }
        for message, work in works.items():
            with pytest.raises(ValueError, match=f"^{work.operation}: .*{message}"):
                end.pair.post_send_chain([work], [7], [SendFlag.SIGNALED])
        assert end.nothing_completes()


@pytest.mark.parametrize("case", ["nowhere", "port", "gid index", "version"])
def test_a_way_that_is_none_is_refused(device: DeviceUnderTest, case: str) -> None:
    with open_end(device) as end:
        bad = {
            "nowhere": lambda: end.handle_to(bytes(16)),
            "port": lambda: end.handle_to(end.gid, port=2),
            "gid index": lambda: end.handle_to(end.gid, gid_index=255),
            "version": lambda: end.handle_to(bytes(15) + b"\1"),
        }
        with pytest.raises(aiordma.VerbsCallError, match="ibv_create_ah") as caught:
            bad[case]()
        # A kernel that looks for the index finds no such entry.
        allowed = {errno.EINVAL, errno.ENODATA} if case == "gid index" else {errno.EINVAL}
        assert caught.value.errno in allowed
        with pytest.raises(aiordma.VerbsCallError, match="ibv_create_ah: Invalid argument"):
            end.handle_to(None)


def test_groups_are_attached_and_detached(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        end.start()
        with pytest.raises(aiordma.VerbsCallError, match="ibv_attach_mcast: Invalid argument"):
            end.pair.attach_multicast(end.gid)
        with pytest.raises(aiordma.VerbsCallError, match="ibv_detach_mcast: Invalid argument"):
            end.pair.detach_multicast(GROUP)
        end.pair.attach_multicast(GROUP)
        end.pair.attach_multicast(GROUP)  # it is a member already
        end.pair.detach_multicast(GROUP)
        with pytest.raises(aiordma.VerbsCallError, match="ibv_detach_mcast: Invalid argument"):
            end.pair.detach_multicast(GROUP)
        end.pair.attach_multicast(GROUP)
        # One that is in a group is not destroyed; `close` takes it out first.
        assert end.pair.provider.destroy_qp(end.pair.pointer)


def join_by_an_identifier(stack: ExitStack) -> None:
    channel = stack.enter_context(EventChannel(DEVICE))
    identifier = stack.enter_context(Identifier(channel, PortSpace.UDP))
    identifier.bind(ADDRESS, 0)
    identifier.join_multicast(GROUP_ADDRESS)
    expect(channel, CmEventType.MULTICAST_JOIN)


def test_a_group_reaches_queue_pairs_of_all_interfaces(device: DeviceUnderTest) -> None:
    """By hand, there is no address that says which interface is meant."""
    with ExitStack() as stack:
        if device.lacks("groups_by_hand"):
            join_by_an_identifier(stack)
        ends = [End(device, stack) for _ in range(3)]
        for end in ends:
            end.start()
            end.pair.post_recv(1, [end.region[4096:4200]])
        for end in ends[1:]:
            end.pair.attach_multicast(GROUP)
        sender = ends[0]
        handle = stack.enter_context(sender.handle_to(GROUP))
        work = SendWork(
            "SEND", 2, gather([sender.region[:5]]), 1, 5, (), address=handle,
            remote_qpn=0xFFFFFF, remote_qkey=QKEY,
        )  # fmt: skip
        assert sender.pair.post_send_chain([work], [7], [SendFlag.SIGNALED]) == (0, 1)
        for end in ends[1:]:
            (received,) = end.completions(1)
            assert received.byte_len == GRH_BYTES + 5
            assert end.memory[4096:][36:40] == GROUP[12:]
        assert [each.wr_id for each in sender.completions(1)] == [7]
        assert sender.nothing_completes()
