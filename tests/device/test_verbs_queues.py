"""Completion queues beyond the plain ones: resized, with flags, on each vector, and notified of
solicited completions only."""

import select
from contextlib import ExitStack

import anyio
import pytest

import aiordma
from aiordma import MemoryRegion
from aiordma.verbs import (
    Capacity,
    CmEventType,
    CompletionChannel,
    CompletionQueue,
    CompletionQueueFlag,
    ConnectionParameters,
    Device,
    EventChannel,
    QueuePair,
    SendFlag,
    WorkRequestOpcode,
)
from tests.device.by_hand import connected_pair, open_end
from tests.device.identifiers import expect, resolved
from tests.device.peers import peer_process
from tests.device.players import one_loop
from tests.devices import DeviceUnderTest


@pytest.mark.capability("resized_queues")
@pytest.mark.capability("queue pairs by hand")
def test_a_resized_queue_keeps_what_is_in_it(device: DeviceUnderTest) -> None:
    with connected_pair(device) as (one, other):
        for wr_id in range(4):
            other.pair.post_recv(wr_id, [])
        for wr_id in range(4):
            one.pair.post_send(wr_id, [])
        one.completions(4)
        other.queue.resize(100)
        assert other.queue.cqe >= 100
        with pytest.raises(aiordma.VerbsCallError, match="to 2 entries: poll it empty first"):
            other.queue.resize(2)
        assert other.queue.cqe >= 100
        assert [completion.wr_id for completion in other.completions(4)] == [0, 1, 2, 3]
        other.queue.resize(2)
        assert 2 <= other.queue.cqe < 100


def test_a_size_beyond_the_device_is_refused_before_it_is_asked(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, CompletionQueue(context, 16) as queue:
        most = context.query().max_cqe
        for entries in (0, most + 1):
            with pytest.raises(ValueError, match=rf"1\.\.{most}"):
                queue.resize(entries)
        if device.lacks("resized_queues"):
            with pytest.raises(aiordma.NotSupportedError, match=rf"resizing.*{device.name}"):
                queue.resize(32)
        assert queue.cqe >= 16
    with pytest.raises(aiordma.ClosedError):
        queue.resize(16)


@pytest.mark.capability("extended_queues")
@pytest.mark.capability("queue pairs by hand")
def test_a_queue_without_locks_works_as_any_other(device: DeviceUnderTest) -> None:
    with (
        open_end(device) as one,
        open_end(device) as other,
        CompletionChannel(one.domain.context) as channel,
        CompletionQueue(
            one.domain.context,
            16,
            channel,
            comp_vector=one.domain.context.num_comp_vectors - 1,
            flags=CompletionQueueFlag.SINGLE_THREADED,
        ) as queue,
        QueuePair.create(one.domain, queue, queue) as pair,
    ):
        one.pair.close()
        one.pair, one.queue = pair, queue
        one.connect(other)
        other.connect(one)
        queue.request_notification()
        other.pair.post_recv(1, [])
        one.pair.post_send(2, [])
        select.select([channel.fd], [], [])
        assert channel.events() == [queue]
        (sent,) = one.completions(1)
        assert (sent.wr_id, sent.ok) == (2, True)
        other.completions(1)


def test_a_flag_or_a_vector_that_the_device_lacks_is_refused(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context:
        for flag, capability in (
            (CompletionQueueFlag.IGNORE_OVERRUN, "ignored_overruns"),
            (CompletionQueueFlag.SINGLE_THREADED, "extended_queues"),
        ):
            if not device.lacks(capability):
                CompletionQueue(context, 16, flags=flag).close()
                continue
            with pytest.raises(aiordma.NotSupportedError, match=rf"{flag.name}.*{device.name}"):
                CompletionQueue(context, 16, flags=flag)
        vectors = context.num_comp_vectors
        assert vectors >= 1
        for vector in (-1, vectors):
            with pytest.raises(ValueError, match=rf"comp_vector={vector}.*0\.\.{vectors - 1}"):
                CompletionQueue(context, 16, comp_vector=vector)
        for vector in range(vectors):
            CompletionQueue(context, 16, comp_vector=vector).close()
        assert context._children == {}


@pytest.mark.capability("queue pairs by hand")
def test_a_queue_armed_for_solicited_completions_is_silent_about_others(
    device: DeviceUnderTest,
) -> None:
    with connected_pair(device) as (one, other):

        def readable() -> bool:
            return bool(select.select([other.channel.fd], [], [], 0)[0])

        target = MemoryRegion(other.domain, bytearray(8))
        for wr_id in range(3):
            other.pair.post_recv(wr_id, [target[:]])
        other.queue.request_notification(solicited_only=True)
        one.pair.post_send(0, [])
        one.completions(1)
        assert other.completions(1)[0].wr_id == 0
        assert not readable()
        one.pair.post_send(1, [], flags=SendFlag.SIGNALED | SendFlag.SOLICITED)
        one.completions(1)
        select.select([other.channel.fd], [], [])
        assert other.channel.events() == [other.queue]
        assert other.completions(1)[0].wr_id == 1
        # A failure always makes an event.
        other.queue.request_notification(solicited_only=True)
        other.pair.modify(aiordma.verbs.QueuePairState.ERR)
        select.select([other.channel.fd], [], [])
        assert [completion.wr_id for completion in other.completions(1)] == [2]
        assert other.channel.events() == [other.queue]


@pytest.mark.anyio
@one_loop
async def test_posts_of_a_program_that_polls_need_no_further_call() -> None:
    """The software device's RoCE sends them with the next poll, if that comes soon."""
    nowhere = aiordma.RemoteMemory(0, 0, 0)
    async with peer_process("silent") as peer:
        with ExitStack() as stack:
            channel = stack.enter_context(EventChannel())
            client = resolved(channel, peer.port, stack)
            context = stack.enter_context(client.context())
            domain = stack.enter_context(context.alloc_pd())
            queue = stack.enter_context(CompletionQueue(context, 16))
            pair = client.create_queue_pair(domain, queue, queue, Capacity(8, 1))
            client.connect(ConnectionParameters())
            expect(channel, CmEventType.ESTABLISHED)
            for turn in range(201):
                for number in range(8):
                    pair.post_send(number, [], opcode=WorkRequestOpcode.RDMA_WRITE, remote=nowhere)
                if turn % 50 == 0:
                    # Shorter than the time after which packets are sent again.
                    await anyio.sleep(0.2)
                    assert len(queue.poll()) == 8
                else:
                    found = 0
                    while found < 8:
                        found += len(queue.poll())
