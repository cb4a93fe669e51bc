"""Verbs that not every device has: timestamps, moderation, advice, dma-bufs; and raw posts."""

import errno
import mmap

import pytest

import aiordma
from aiordma import Access, MemoryRegion, RemoteMemory
from aiordma.verbs import (
    CompletionQueue,
    Device,
    DmabufRegion,
    MemoryAdvice,
    SendFlag,
    Sge,
    WorkRequestOpcode,
)
from tests.device.dmabufs import pages
from tests.device.raw_ends import connected
from tests.devices import DeviceUnderTest

# -- raw posts ------------------------------------------------------------------------------------


@pytest.mark.capability("atomics")
def test_raw_atomics_return_the_former_value() -> None:
    with connected() as (ours, theirs):
        target = MemoryRegion(theirs.domain, bytearray(8), Access.REMOTE_ATOMIC)
        former = MemoryRegion(ours.domain, bytearray(8))
        target.view[:] = (5).to_bytes(8, "little")
        add, swap = WorkRequestOpcode.ATOMIC_FETCH_AND_ADD, WorkRequestOpcode.ATOMIC_CMP_AND_SWP
        ours.pair.post_send(1, [former], opcode=add, remote=target.remote(), compare_add=3)
        assert ours.completion().ok
        assert int.from_bytes(bytes(former), "little") == 5
        assert int.from_bytes(bytes(target), "little") == 8
        for compared, expected in ((7, 8), (8, 2**64 - 1)):
            ours.pair.post_send(
                2,
                [former[:]],
                opcode=swap,
                remote=target.remote(),
                compare_add=compared,
                swap=2**64 - 1,
            )
            assert ours.completion().ok
            assert int.from_bytes(bytes(former), "little") == 8
            assert int.from_bytes(bytes(target), "little") == expected


def test_raw_atomics_need_eight_bytes_and_a_target() -> None:
    with connected() as (ours, _), MemoryRegion(ours.domain, bytearray(16)) as region:
        add, remote = WorkRequestOpcode.ATOMIC_FETCH_AND_ADD, RemoteMemory(0, 8, 1)
        with pytest.raises(ValueError, match="parts of 8 bytes together; these have 16"):
            ours.pair.post_send(1, [region], opcode=add, remote=remote)
        with pytest.raises(ValueError, match="needs remote="):
            ours.pair.post_send(1, [region[:8]], opcode=add)


def test_parts_can_be_sges_regions_and_inline_buffers() -> None:
    with connected() as (ours, theirs):
        place, source = MemoryRegion(theirs.domain, bytearray(9)), bytearray(b"abc")
        region = MemoryRegion(ours.domain, source)
        raw = Sge(region.address + 1, 2, region.lkey)
        theirs.pair.post_recv(1, [Sge(place.address, 9, place.lkey)])
        theirs.pair.post_recv(2, [place])
        ours.pair.post_send(1, [region, raw, region[2:]])
        assert theirs.completion().byte_len == 6
        assert bytes(place)[:6] == b"abcbcc"
        assert ours.completion().ok
        flags = SendFlag.INLINE | SendFlag.SIGNALED
        ours.pair.post_send(2, [b"inline", memoryview(bytearray(b"012345"))[::1][:3]], flags=flags)
        assert theirs.completion().byte_len == 9
        assert bytes(place) == b"inline012"
        assert ours.completion().ok


def test_parts_reject_buffers_that_are_not_registered() -> None:
    with connected() as (ours, _), MemoryRegion(ours.domain, bytearray(8)) as region:
        with pytest.raises(TypeError, match=r"not registered needs flags=SendFlag\.INLINE"):
            ours.pair.post_send(1, [b"abc"])
        with pytest.raises(TypeError, match="a list of parts"):
            ours.pair.post_send(1, Sge(1, 2, 3))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="4 GiB or more in one part"):
            ours.pair.post_send(1, [Sge(0, 2**32, region.lkey)])
        part = region[:]
    with pytest.raises(aiordma.ClosedError):
        ours.pair.post_send(1, [part])


# -- completion queues ----------------------------------------------------------------------------


@pytest.mark.capability("completion_timestamps")
def test_timestamps_lie_between_readings_of_the_clock() -> None:
    with connected(timestamps=True) as (ours, theirs):
        context = ours.domain.context
        assert context.query().completion_timestamp_mask
        assert context.query().hca_core_clock
        while not ours.queue.poll_timestamped():
            pass
        before = context.read_clock()
        for wr_id in range(3):
            theirs.pair.post_recv(wr_id, [])
        ours.pair.post_send(0, [])
        ours.pair.post_send(1, [])
        found: list[tuple[aiordma.verbs.WorkCompletion, int]] = []
        while len(found) < 1:
            found += ours.queue.poll_timestamped(1)
        while len(found) < 2:
            found += ours.queue.poll_timestamped()
        after = context.read_clock()
        assert [completion.wr_id for completion, _ in found] == [0, 1]
        assert all(completion.ok for completion, _ in found)
        assert before <= found[0][1] <= found[1][1] <= after
        # A plain poll takes from the same queue.
        ours.pair.post_send(2, [])
        assert ours.completion().wr_id == 2


@pytest.mark.capability("completion_timestamps")
@pytest.mark.capability("resized_queues")
def test_timestamps_stay_with_their_completions_through_a_resize() -> None:
    with connected(timestamps=True) as (ours, theirs):
        context = ours.domain.context
        while not ours.queue.poll_timestamped():
            pass
        for wr_id in range(4):
            theirs.pair.post_recv(wr_id, [])
            ours.pair.post_send(wr_id, [])
            theirs.completion()
        # A failure: the message for which no part is valid.
        ours.pair.post_send(4, [Sge(0, 8, 0xBAD)])
        found = ours.queue.poll_timestamped(1)
        while not found:
            found = ours.queue.poll_timestamped(1)
        ours.queue.resize(64)
        while len(found) < 5:
            found += ours.queue.poll_timestamped(2)
        after = context.read_clock()
        assert [completion.wr_id for completion, _ in found] == [0, 1, 2, 3, 4]
        assert [completion.ok for completion, _ in found] == [True] * 4 + [False]
        times = [time for _, time in found]
        assert times == sorted(times)
        assert 0 < times[0] <= times[-1] <= after


def test_queue_without_timestamps_says_how_to_get_them(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context:
        with (
            CompletionQueue(context, 16) as queue,
            pytest.raises(aiordma.NotSupportedError, match="timestamps=True"),
        ):
            queue.poll_timestamped()
        if device.lacks("completion_timestamps"):
            with pytest.raises(aiordma.NotSupportedError, match=f"timestamps: {device.name}"):
                CompletionQueue(context, 16, timestamps=True)
            with pytest.raises(aiordma.NotSupportedError, match=f"clock: {device.name}"):
                context.read_clock()
        assert context._children == {}


def test_moderation_is_taken_within_limits_or_refused(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, CompletionQueue(context, 16) as queue:
        if device.lacks("moderation"):
            with pytest.raises(aiordma.NotSupportedError, match=f"moderating.*{device.name}"):
                queue.moderate(4, 10)
            return
        most = context.query().cq_mod_caps.max_cq_count
        queue.moderate(most, 10)
        queue.moderate(0, 0)
        with pytest.raises(ValueError, match=rf"count={most + 1} is not in 0\.\.{most}"):
            queue.moderate(most + 1, 10)
    with pytest.raises(aiordma.ClosedError):
        queue.moderate(1, 1)


# -- memory and queue pairs -----------------------------------------------------------------------


def test_advice_is_taken_or_refused_by_name(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain:
        region = MemoryRegion(domain, bytearray(100))
        if device.lacks("memory_advice"):
            with pytest.raises(aiordma.NotSupportedError, match=f"PREFETCH: {device.name}"):
                region[:].advise(MemoryAdvice.PREFETCH)
            return
        for advice in MemoryAdvice:
            region[10:20].advise(advice)
            region[:].advise(advice, flush=True)
        constant = MemoryRegion(domain, b"constant")
        with pytest.raises(aiordma.VerbsCallError, match="PREFETCH_WRITE") as caught:
            constant[:].advise(MemoryAdvice.PREFETCH_WRITE)
        assert caught.value.errno == errno.EPERM
        part = region[:]
        region.close()
        with pytest.raises(aiordma.ClosedError):
            part.advise(MemoryAdvice.PREFETCH)


def test_no_tested_device_promises_data_in_order() -> None:
    with connected() as (ours, _):
        for opcode in (WorkRequestOpcode.RDMA_WRITE, WorkRequestOpcode.RDMA_READ):
            assert ours.pair.query_data_in_order(opcode) is False
        with pytest.raises(ValueError, match="opcode=99"):
            ours.pair.query_data_in_order(99)  # type: ignore[arg-type]
    with pytest.raises(aiordma.ClosedError):
        ours.pair.query_data_in_order(WorkRequestOpcode.RDMA_WRITE)


def test_dmabuf_is_registered_or_refused_by_name(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain, pages(2) as memory:
        if device.lacks("dmabuf"):
            with pytest.raises(aiordma.NotSupportedError, match="registering a dma-buf"):
                DmabufRegion(domain, memory.fd, memory.length)
        else:
            DmabufRegion(domain, memory.fd, memory.length).close()
        with pytest.raises(ValueError, match="length=0"):
            DmabufRegion(domain, 0, 0)
        assert domain._children == {}


@pytest.mark.capability("dmabuf")
def test_dmabuf_is_a_part_of_raw_posts() -> None:
    with connected() as (ours, theirs), pages(2) as memory:
        source = DmabufRegion(ours.domain, memory.fd, 4096, iova=1 << 40)
        target = DmabufRegion(
            theirs.domain, memory.fd, 16, offset=4096, access=Access.REMOTE_WRITE, iova=2 << 40
        )
        memory.bytes[:8] = b"by parts"
        write = WorkRequestOpcode.RDMA_WRITE
        ours.pair.post_send(1, [source[:8]], opcode=write, remote=target[8:].remote())
        assert ours.completion().ok
        assert memory.bytes[4096:4112] == bytes(8) + b"by parts"


@pytest.mark.capability("iova")
def test_inline_post_copies_memory_that_has_an_iova() -> None:
    with connected() as (ours, theirs):
        page = mmap.mmap(-1, 4096)
        page[:8] = b"by value"
        source = MemoryRegion(ours.domain, page, iova=1 << 40)
        target = MemoryRegion(theirs.domain, bytearray(8))
        theirs.pair.post_recv(1, [target])
        flags = SendFlag.INLINE | SendFlag.SIGNALED
        ours.pair.post_send(2, [source[:8]], flags=flags)
        assert theirs.completion().byte_len == 8
        assert ours.completion().ok
        assert bytes(target) == b"by value"
