"""The synchronous verbs objects: without a loop, closed in order, whatever the order of events."""

import gc
import select
from typing import Any

import pytest

import aiordma
from aiordma import Access, MemoryRegion
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    Device,
    QueuePair,
    QueuePairState,
    WorkCompletionOpcode,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from tests.device.by_hand import REMOTE, connected_pair, open_end
from tests.devices import DeviceUnderTest, kernel_objects


def state_of(pair: QueuePair) -> QueuePairState:
    """Its state now: type checkers take a property for what it was when last compared."""
    return pair.state


@pytest.mark.capability("queue pairs by hand")
def test_two_queue_pairs_connected_by_hand_exchange_messages(device: DeviceUnderTest) -> None:
    with open_end(device) as one, open_end(device) as other:
        assert state_of(one.pair) is QueuePairState.RESET
        one.connect(other)
        other.connect(one)
        assert state_of(one.pair) is QueuePairState.RTS
        source = MemoryRegion(one.domain, bytearray(b"by hand"))
        target = MemoryRegion(other.domain, bytearray(16))
        other.pair.post_recv(5, [target[:]])
        one.pair.post_send(7, [source[:2], source[2:]])
        (sent,) = one.completions(1)
        (received,) = other.completions(1)
        assert (sent.wr_id, sent.operation, sent.ok) == (7, WorkCompletionOpcode.SEND, True)
        assert (received.wr_id, received.operation) == (5, WorkCompletionOpcode.RECV)
        assert received.byte_len == 7
        assert received.qp_num == other.pair.qp_num
        assert bytes(target.view[:8]) == b"by hand\0"
        assert one.queue.poll() == []


@pytest.mark.capability("queue pairs by hand")
def test_one_sided_operations_by_hand(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (one, other):
        ours = MemoryRegion(one.domain, bytearray(8))
        theirs = MemoryRegion(other.domain, bytearray(b"12345678"), REMOTE)
        one.pair.post_send(1, [ours[:]], opcode=WorkRequestOpcode.RDMA_READ, remote=theirs.remote())
        (read,) = one.completions(1)
        assert (read.ok, read.operation) == (True, WorkCompletionOpcode.RDMA_READ)
        assert bytes(ours.view) == b"12345678"
        ours.view[:] = b"abcdefgh"
        one.pair.post_send(
            2, [ours[4:]], opcode=WorkRequestOpcode.RDMA_WRITE, remote=theirs.remote()[:4]
        )
        assert one.completions(1)[0].ok
        assert bytes(theirs.view) == b"efgh5678"


@pytest.mark.capability("queue pairs by hand")
def test_immediate_data_arrives_in_host_order(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (one, other):
        other.pair.post_recv(1, [])
        one.pair.post_send(2, [], opcode=WorkRequestOpcode.SEND_WITH_IMM, immediate=0x01020304)
        (received,) = other.completions(1)
        assert received.immediate == 0x01020304
        assert aiordma.verbs.WorkCompletionFlag.WITH_IMM in received.flags


@pytest.mark.capability("queue pairs by hand")
def test_an_armed_queue_makes_its_channel_readable_once(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (one, other):

        def readable() -> bool:
            return bool(select.select([other.channel.fd], [], [], 0)[0])

        target = MemoryRegion(other.domain, bytearray(8))
        for wr_id in range(3):
            other.pair.post_recv(wr_id, [target[:]])
        one.pair.post_send(0, [])
        one.completions(1)
        assert other.completions(1)[0].wr_id == 0
        assert not readable()  # it was not armed
        other.queue.request_notification()
        for wr_id in (1, 2):
            one.pair.post_send(wr_id, [])
        one.completions(2)
        select.select([other.channel.fd], [], [])
        assert other.channel.events() == [other.queue]
        assert not readable()  # armed once, one event
        assert other.channel.events() == []
        assert [completion.wr_id for completion in other.completions(2)] == [1, 2]


@pytest.mark.capability("queue pairs by hand")
def test_events_left_on_the_channel_do_not_hold_up_the_close(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (one, other):
        for queue in (one.queue, other.queue):
            queue.request_notification()
        other.pair.post_recv(1, [])
        one.pair.post_send(1, [])
        for end in (one, other):
            select.select([end.channel.fd], [], [])
        assert one.channel.events() == [one.queue]
        # The other's event stays unread.


@pytest.mark.capability("queue pairs by hand")
def test_a_queue_pair_in_its_error_state_flushes_what_was_posted(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (one, _):
        target = MemoryRegion(one.domain, bytearray(8))
        for wr_id in range(3):
            one.pair.post_recv(wr_id, [target[:]])
        one.pair.modify(QueuePairState.ERR)
        flushed = one.completions(3)
        assert [completion.wr_id for completion in flushed] == [0, 1, 2]
        for completion in flushed:
            assert completion.status == WorkCompletionStatus.WR_FLUSH_ERR
            assert completion.status_name == "WR_FLUSH_ERR"
        assert state_of(one.pair) is QueuePairState.ERR
        one.pair.modify(QueuePairState.RESET)
        assert state_of(one.pair) is QueuePairState.RESET


@pytest.mark.capability("queue pairs by hand")
def test_a_full_queue_is_an_error_with_the_capacity_in_it(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (_, other):
        most = other.pair.capacity.max_recv_wr
        for wr_id in range(most):
            other.pair.post_recv(wr_id, [])

        def fill() -> None:
            # A device may have rounded its queue up without saying so.
            for wr_id in range(most, 4 * most):
                other.pair.post_recv(wr_id, [])

        with pytest.raises(aiordma.VerbsCallError, match="max_recv_wr="):
            fill()


@pytest.mark.capability("queue pairs by hand")
def test_a_bad_transition_is_refused_with_the_attributes_name(device: DeviceUnderTest) -> None:
    with open_end(device) as end:
        pair = end.pair
        with pytest.raises(ValueError, match="from RESET to RTS"):
            pair.modify(QueuePairState.RTS)
        with pytest.raises(ValueError, match="needs PKEY_INDEX"):
            pair.modify(QueuePairState.INIT, port=1, access=REMOTE)
        with pytest.raises(ValueError, match="does not take QKEY"):
            pair.modify(QueuePairState.INIT, port=1, access=REMOTE, pkey_index=0, qkey=1)
        with pytest.raises(TypeError, match="'colour' is no attribute"):
            pair.modify(QueuePairState.INIT, colour=1)
        assert state_of(pair) is QueuePairState.RESET
        pair.modify(QueuePairState.INIT, port=1, access=REMOTE, pkey_index=0)
        with pytest.raises(ValueError, match="needs AV, PATH_MTU"):
            pair.modify(QueuePairState.RTR)
        assert state_of(pair) is QueuePairState.INIT


# -- the end ----------------------------------------------------------------------------------


def _family(device: DeviceUnderTest) -> dict[str, aiordma.verbs.Resource]:
    context = Device(device.name).open()
    domain = context.alloc_pd()
    channel = CompletionChannel(context)
    queue = CompletionQueue(context, 16, channel)
    pair = QueuePair.create(domain, queue, queue)
    region = MemoryRegion(domain, bytearray(64))
    return {
        "context": context,
        "domain": domain,
        "channel": channel,
        "queue": queue,
        "pair": pair,
        "region": region,
    }


def _drop(held: dict[str, Any]) -> None:
    held.clear()
    gc.collect()


CLOSED_BY = {
    "context": {"context", "domain", "channel", "queue", "pair", "region"},
    "domain": {"domain", "pair", "region"},
    "channel": {"channel", "queue", "pair"},
    "queue": {"queue", "pair"},
    "pair": {"pair"},
    "region": {"region"},
}


@pytest.mark.parametrize("first", CLOSED_BY)
def test_closing_closes_what_was_made_from_it_first(device: DeviceUnderTest, first: str) -> None:
    before = kernel_objects(device.name)
    family = _family(device)
    family[first].close()
    assert {name for name, thing in family.items() if thing.closed} == CLOSED_BY[first]
    for thing in family.values():
        thing.close()
        thing.close()
        assert thing.closed
    assert kernel_objects(device.name) == before


def test_a_parent_knows_no_longer_about_closed_children(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain:
        for _ in range(10):
            MemoryRegion(domain, bytearray(8)).close()
        assert domain._children == {}


def test_closed_object_raises_closed_error(device: DeviceUnderTest) -> None:
    family: dict[str, Any] = _family(device)
    family["context"].close()
    context, domain, channel = family["context"], family["domain"], family["channel"]
    queue, pair, region = family["queue"], family["pair"], family["region"]
    for use in (
        context.query,
        context.query_port,
        context.query_gid,
        context.alloc_pd,
        context.__enter__,
        channel.events,
        queue.poll,
        queue.request_notification,
        lambda: CompletionChannel(context),
        lambda: MemoryRegion(domain, bytearray(8)),
        lambda: QueuePair.create(domain, queue, queue),
        pair.query,
        lambda: pair.modify(QueuePairState.ERR),
        lambda: pair.post_send(1, []),
        lambda: pair.post_recv(1, []),
        lambda: region[:],
    ):
        with pytest.raises(aiordma.ClosedError, match="is closed"):
            use()


def test_what_is_dropped_is_closed_with_a_warning(device: DeviceUnderTest) -> None:
    before = kernel_objects(device.name)
    family = _family(device)
    # Which of them the collector finds first is its business; that one closes the others.
    with pytest.warns(ResourceWarning, match="unclosed"):
        _drop(family)
    assert kernel_objects(device.name) == before


def test_what_is_dropped_as_part_of_a_cycle_is_closed_as_well(device: DeviceUnderTest) -> None:
    """A failure's traceback makes such cycles: then the collector finds all at once."""
    before = kernel_objects(device.name)
    family: dict[str, Any] = _family(device)
    for thing in family.values():
        thing.everything = family
    held = {"cycle": family}
    del thing, family
    with pytest.warns(ResourceWarning, match="unclosed"):
        _drop(held)
    assert kernel_objects(device.name) == before


def test_a_constructor_that_fails_leaves_nothing(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain:
        with pytest.raises(aiordma.VerbsCallError, match="ibv_reg_mr"):
            MemoryRegion(domain, bytearray(8), Access(1 << 19))
        gc.collect()
        assert domain._children == {}
