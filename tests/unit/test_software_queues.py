"""The software device's completion queues, channels and shared receive queues, as C has them."""

import errno
import os
import select
from collections.abc import Iterator
from typing import Any

import pytest

from tests.internals import Drain, InFlightTable, ffi, lib, software
from tests.unit.software_device import (
    Aside,
    address_of,
    fail,
    failed,
    make_pair,
    make_queue,
    nothing_left,
    opened_domain,
    polled,
    post_receive,
    post_receives,
    take_async_event,
    take_event,
)

MOST_COMPLETIONS = 1 << 22


@pytest.fixture
def device() -> Iterator[tuple[Any, Any]]:
    """A context and a domain of it, of which nothing is left."""
    with nothing_left(), opened_domain() as both:
        yield both


@pytest.fixture
def channel(device: tuple[Any, Any]) -> Iterator[Any]:
    made = software().create_comp_channel(device[0])
    os.set_blocking(made.fd, False)
    yield made
    assert software().destroy_comp_channel(made) == 0


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


# -- queues ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "vector"), [(0, 0), (-1, 0), (MOST_COMPLETIONS + 1, 0), (1, 1)]
)
def test_a_queue_beyond_the_limits_is_refused(
    device: tuple[Any, Any], entries: int, vector: int
) -> None:
    assert (
        failed(software().create_cq(device[0], entries, ffi.NULL, ffi.NULL, vector)) == errno.EINVAL
    )


def test_a_queue_has_the_size_that_was_asked_for_and_can_be_resized(
    device: tuple[Any, Any],
) -> None:
    context, domain = device
    queue = make_queue(context, 5)
    assert queue.cqe == 5
    pair = make_pair(domain, queue, queue)
    post_receives(pair, range(4))
    fail(pair)
    assert software().resize_cq(queue, 3) == errno.EINVAL
    for entries in (0, -1, MOST_COMPLETIONS + 1):
        assert software().resize_cq(queue, entries) == errno.EINVAL
    assert queue.cqe == 5
    assert polled(queue, 1) == [0]
    post_receives(pair, range(4, 6))  # flushed at once; the ring has wrapped around
    assert software().resize_cq(queue, 100) == 0
    assert queue.cqe == 100
    assert polled(queue, 3) == [1, 2, 3]
    assert software().resize_cq(queue, 2) == 0
    assert polled(queue) == [4, 5]
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


def test_destroying_a_queue_pair_takes_its_completions_out(device: tuple[Any, Any]) -> None:
    context, domain = device
    queue = make_queue(context)
    one, other = make_pair(domain, queue, queue), make_pair(domain, queue, queue)
    for pair in (one, other):
        post_receives(pair, range(address_of(pair), address_of(pair) + 3))
    fail(one)
    fail(other)
    assert software().destroy_cq(queue) == errno.EBUSY
    assert software().destroy_qp(one) == 0
    assert polled(queue) == [address_of(other) + i for i in range(3)]
    assert software().destroy_qp(other) == 0
    assert software().destroy_cq(queue) == 0


def overrun(context: Any, domain: Any, queue: Any) -> None:
    pair = make_pair(domain, queue, queue)
    post_receives(pair, range(6))
    fail(pair)
    seen = polled(queue)
    post_receives(pair, range(6, 8))
    seen += polled(queue)
    assert software().destroy_qp(pair) == 0
    assert seen == ([0, 1, 2, 3] if queue.cqe == 4 else [])


def test_overrun_queue_reports_once_and_fails(device: tuple[Any, Any]) -> None:
    context, domain = device
    os.set_blocking(context.async_fd, False)
    queue = make_queue(context, 4)
    overrun(context, domain, queue)
    assert is_readable(context.async_fd)
    assert take_async_event(context) == (lib.IBV_EVENT_CQ_ERR, address_of(queue))
    assert take_async_event(context) == (0, errno.EAGAIN)
    assert not is_readable(context.async_fd)
    assert software().destroy_cq(queue) == 0


def test_a_queue_that_ignores_overruns_keeps_the_latest(device: tuple[Any, Any]) -> None:
    context, domain = device
    os.set_blocking(context.async_fd, False)
    flags = lib.IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN | lib.IBV_CREATE_CQ_ATTR_SINGLE_THREADED
    queue = lib.aiordma_create_cq_ex(context, 4, ffi.NULL, 0, flags, 0)
    pair = make_pair(domain, queue, queue)
    post_receives(pair, range(6))
    fail(pair)
    assert polled(queue) == [2, 3, 4, 5]
    assert take_async_event(context) == (0, errno.EAGAIN)
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0
    assert failed(lib.aiordma_create_cq_ex(context, 4, ffi.NULL, 0, 1 << 7, 0)) == errno.EOPNOTSUPP
    cvlan = 1 << 8  # IBV_WC_EX_WITH_CVLAN
    assert failed(lib.aiordma_create_cq_ex(context, 4, ffi.NULL, 0, 0, cvlan)) == errno.EOPNOTSUPP


def timestamped(queue: Any, most: int) -> tuple[list[int], list[int]]:
    batch, times = ffi.new("struct aiordma_completion[]", most), ffi.new("uint64_t[]", most)
    count = lib.aiordma_poll_timestamped(queue, batch, times, most)
    assert count >= 0
    return [batch[i].wr_id for i in range(count)], list(times[0:count])


def test_timestamps_stay_with_completions_that_move(device: tuple[Any, Any]) -> None:
    context, domain = device
    with_times = lib.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    queue = lib.aiordma_create_cq_ex(context, 4, ffi.NULL, 0, 0, with_times)
    pairs = [make_pair(domain, queue, queue) for _ in range(3)]
    clock = ffi.new("uint64_t *")
    readings = []
    for wr_id, pair in enumerate(pairs):
        post_receives(pair, range(wr_id, wr_id + 1))
        assert lib.aiordma_read_clock(context, clock) == 0
        readings.append(clock[0])
        fail(pair)
    assert timestamped(queue, 1)[0] == [0]  # the ring begins at its second place
    assert software().destroy_qp(pairs[1]) == 0  # and its completion goes: the last one moves
    assert software().resize_cq(queue, 8) == 0
    assert timestamped(queue, 0) == ([], [])
    (wr_id,), (time,) = timestamped(queue, 4)
    assert (wr_id, time >= readings[2]) == (2, True)
    assert lib.aiordma_read_clock(context, clock) == 0
    assert time <= clock[0]
    assert timestamped(queue, 4) == ([], [])
    for pair in (pairs[0], pairs[2]):
        assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


def test_untaken_event_is_dropped_with_its_queue(device: tuple[Any, Any]) -> None:
    context, domain = device
    os.set_blocking(context.async_fd, False)
    queues = [make_queue(context, 4) for _ in range(3)]
    for queue in queues:
        overrun(context, domain, queue)
    for queue in queues[1:]:
        assert software().destroy_cq(queue) == 0
    assert take_async_event(context) == (lib.IBV_EVENT_CQ_ERR, address_of(queues[0]))
    assert take_async_event(context) == (0, errno.EAGAIN)
    assert software().destroy_cq(queues[0]) == 0
    assert not is_readable(context.async_fd)


def test_untaken_events_are_all_delivered(device: tuple[Any, Any]) -> None:
    context, domain = device
    os.set_blocking(context.async_fd, False)
    queue = make_queue(context)
    pair = make_pair(domain, queue, queue)
    kinds = (lib.IBV_EVENT_COMM_EST, lib.IBV_EVENT_QP_FATAL, lib.IBV_EVENT_COMM_EST)
    for kind in kinds:
        assert lib.aiordma_software_raise(kind, pair) == 0
    assert lib.aiordma_software_raise(lib.IBV_EVENT_CQ_ERR, queue) == 0
    assert lib.aiordma_software_raise(lib.IBV_EVENT_PORT_ERR, ffi.NULL) == 0
    # Those of one kind and object come together.
    for kind in sorted(kinds, key=kinds.index):
        assert take_async_event(context) == (kind, address_of(pair))
    assert take_async_event(context) == (lib.IBV_EVENT_CQ_ERR, address_of(queue))
    assert take_async_event(context) == (lib.IBV_EVENT_PORT_ERR, 1)
    assert take_async_event(context) == (0, errno.EAGAIN)
    assert not is_readable(context.async_fd)
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


def test_an_event_of_no_object_or_no_known_kind_is_not_raised() -> None:
    for kind in (lib.IBV_EVENT_QP_FATAL, lib.IBV_EVENT_CQ_ERR, lib.IBV_EVENT_SRQ_ERR):
        assert lib.aiordma_software_raise(kind, ffi.NULL) == errno.EINVAL
    for kind in (lib.IBV_EVENT_WQ_FATAL, 77):
        assert lib.aiordma_software_raise(kind, ffi.new("int *")) == errno.EINVAL


def test_descriptor_read_by_program_blocks_no_thread(device: tuple[Any, Any]) -> None:
    context, _ = device
    assert lib.aiordma_software_raise(lib.IBV_EVENT_PORT_ERR, ffi.NULL) == 0
    assert os.get_blocking(context.async_fd)
    os.read(context.async_fd, 8)
    taking = Aside(lambda: take_async_event(context))
    assert taking.end() == (lib.IBV_EVENT_PORT_ERR, 1)


def test_destroying_a_queue_waits_for_its_taken_async_event(device: tuple[Any, Any]) -> None:
    context, domain = device
    queue = make_queue(context, 4)
    overrun(context, domain, queue)
    event = ffi.new("struct ibv_async_event *")
    assert software().get_async_event(context, event) == 0
    destroying = Aside(lambda: software().destroy_cq(queue))
    assert destroying.blocks()
    software().ack_async_event(event)
    assert destroying.end() == 0


def test_a_blocking_wait_for_an_async_event_ends_with_one(device: tuple[Any, Any]) -> None:
    context, domain = device
    queue = make_queue(context, 4)
    waiting = Aside(lambda: take_async_event(context))
    assert waiting.blocks()
    overrun(context, domain, queue)
    assert waiting.end() == (lib.IBV_EVENT_CQ_ERR, address_of(queue))
    assert software().destroy_cq(queue) == 0


# -- channels -------------------------------------------------------------------------------------


def test_channel_delivers_one_event_per_arming(device: tuple[Any, Any], channel: Any) -> None:
    context, domain = device
    queue = make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    fail(pair)
    post_receives(pair, range(1))
    assert not is_readable(channel.fd)  # it was not armed
    assert take_event(channel) == errno.EAGAIN
    assert lib.aiordma_request_notification(queue, 0) == 0
    assert not is_readable(channel.fd)  # what is in it already does not count
    post_receives(pair, range(1, 3))
    assert is_readable(channel.fd)
    assert take_event(channel) == queue
    assert not is_readable(channel.fd)
    assert take_event(channel) == errno.EAGAIN
    software().ack_cq_events(queue, 1)
    # Failing counts as solicited; the wider request holds.
    assert lib.aiordma_request_notification(queue, 1) == 0
    post_receives(pair, range(3, 4))
    assert take_event(channel) == queue
    software().ack_cq_events(queue, 1)
    assert polled(queue) == [0, 1, 2, 3]
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


def test_events_of_many_queues_come_in_their_order(device: tuple[Any, Any], channel: Any) -> None:
    context, domain = device
    queues = [make_queue(context, 16, channel) for _ in range(3)]
    pairs = [make_pair(domain, queue, queue) for queue in queues]
    for order in ((0, 1, 2), (2, 0, 1)):
        for i in order:
            fail(pairs[i])
            assert lib.aiordma_request_notification(queues[i], 0) == 0
            post_receives(pairs[i], range(1))
        for i in order:
            assert take_event(channel) == queues[i]
            software().ack_cq_events(queues[i], 1)
    assert not is_readable(channel.fd)
    for pair in pairs:
        assert software().destroy_qp(pair) == 0
    for queue in queues:
        assert software().destroy_cq(queue) == 0


def test_a_queue_asked_again_has_several_events(device: tuple[Any, Any], channel: Any) -> None:
    context, domain = device
    queue = make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    fail(pair)
    for number in range(3):
        assert lib.aiordma_request_notification(queue, 0) == 0
        post_receives(pair, range(number, number + 1))
    for _ in range(3):
        assert is_readable(channel.fd)
        assert take_event(channel) == queue
    assert take_event(channel) == errno.EAGAIN
    software().ack_cq_events(queue, 3)
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


def test_destroying_a_queue_drops_what_waits_and_waits_for_what_was_taken(
    device: tuple[Any, Any], channel: Any
) -> None:
    context, domain = device
    queue = make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    fail(pair)
    for number in range(3):
        assert lib.aiordma_request_notification(queue, 0) == 0
        post_receives(pair, range(number, number + 1))
    assert take_event(channel) == queue
    assert take_event(channel) == queue
    assert software().destroy_qp(pair) == 0
    assert software().destroy_comp_channel(channel) == errno.EBUSY
    destroying = Aside(lambda: software().destroy_cq(queue))
    assert destroying.blocks()
    assert take_event(channel) == errno.EAGAIN
    assert not is_readable(channel.fd)
    software().ack_cq_events(queue, 1)
    assert destroying.blocks()
    software().ack_cq_events(queue, 1)
    assert destroying.end() == 0


def test_a_blocking_wait_for_an_event_ends_with_one(device: tuple[Any, Any], channel: Any) -> None:
    context, domain = device
    os.set_blocking(channel.fd, True)
    queue = make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    waiting = [Aside(lambda: take_event(channel)) for _ in range(2)]
    assert all(aside.blocks() for aside in waiting)
    fail(pair)
    for number in range(2):  # each of the two gets one
        assert lib.aiordma_request_notification(queue, 0) == 0
        post_receives(pair, range(number, number + 1))
    assert [aside.end() for aside in waiting] == [queue, queue]
    software().ack_cq_events(queue, 2)
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


def test_wait_for_event_ends_if_completions_are_left(device: tuple[Any, Any], channel: Any) -> None:
    context, domain = device
    os.set_blocking(channel.fd, True)
    others, queue = make_queue(context, 16, channel), make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    fail(pair)
    post_receives(pair, range(2))
    assert lib.aiordma_request_notification(others, 0) == 0
    assert lib.aiordma_request_notification(queue, 0) == 0
    assert Aside(lambda: take_event(channel)).end() == queue
    waiting = Aside(lambda: take_event(channel))
    assert waiting.blocks()  # the arming is used up
    post_receives(pair, range(2, 3))
    assert waiting.blocks()
    assert lib.aiordma_request_notification(queue, 0) == 0
    post_receives(pair, range(3, 4))
    assert waiting.end() == queue
    software().ack_cq_events(queue, 2)
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0
    assert software().destroy_cq(others) == 0


def test_a_channel_of_another_context_is_refused(device: tuple[Any, Any], channel: Any) -> None:
    with opened_domain() as (other, _):
        assert failed(software().create_cq(other, 4, ffi.NULL, channel, 0)) == errno.EINVAL


# -- shared receive queues ------------------------------------------------------------------------


def make_shared(domain: Any, max_wr: int = 8, max_sge: int = 2) -> Any:
    init = ffi.new("struct ibv_srq_init_attr *")
    init.attr.max_wr, init.attr.max_sge = max_wr, max_sge
    return software().create_srq(domain, init)


def asked(shared: Any) -> tuple[int, int, int]:
    attr = ffi.new("struct ibv_srq_attr *")
    assert software().query_srq(shared, attr) == 0
    return attr.max_wr, attr.max_sge, attr.srq_limit


def modify(shared: Any, mask: int, max_wr: int = 0, limit: int = 0) -> int:
    attr = ffi.new("struct ibv_srq_attr *")
    attr.max_wr, attr.srq_limit = max_wr, limit
    return int(software().modify_srq(shared, attr, mask))


def post_shared(shared: Any, sizes: list[int]) -> tuple[int, int]:
    """Post receives of so many parts each; the errno, and how many were taken."""
    requests: Any = ffi.new("struct aiordma_receive_request[]", len(sizes))
    for request, size in zip(requests, sizes, strict=True):
        request.sge_count = size
    posted = ffi.new("uint32_t *")
    sges = bytes(16 * sum(sizes))
    error = lib.aiordma_post_recv_chain(
        ffi.NULL, shared, requests, len(sizes), sges, len(sges), posted
    )
    return error, posted[0]


@pytest.mark.parametrize(("max_wr", "max_sge"), [(0, 1), (32769, 1), (8, 33), (2**32 - 1, 1)])
def test_a_shared_queue_beyond_the_limits_is_refused(
    device: tuple[Any, Any], max_wr: int, max_sge: int
) -> None:
    assert failed(make_shared(device[1], max_wr, max_sge)) == errno.EINVAL


def test_a_shared_queue_is_full_at_its_size_and_names_what_it_refused(
    device: tuple[Any, Any],
) -> None:
    shared = make_shared(device[1])
    assert asked(shared) == (8, 2, 0)
    assert post_shared(shared, [0, 2, 3, 1]) == (errno.EINVAL, 2)
    assert post_shared(shared, [1] * 9) == (errno.ENOMEM, 6)
    assert modify(shared, lib.IBV_SRQ_MAX_WR, max_wr=7) == errno.EINVAL
    assert modify(shared, lib.IBV_SRQ_MAX_WR, max_wr=10) == 0
    assert post_shared(shared, [1] * 3) == (errno.ENOMEM, 2)
    assert asked(shared) == (10, 2, 0)
    assert software().destroy_srq(shared) == 0


def test_what_is_invalid_modifies_nothing(device: tuple[Any, Any]) -> None:
    shared = make_shared(device[1])
    both = lib.IBV_SRQ_MAX_WR | lib.IBV_SRQ_LIMIT
    assert modify(shared, both, max_wr=100, limit=101) == errno.EINVAL
    assert modify(shared, lib.IBV_SRQ_LIMIT, limit=9) == errno.EINVAL
    assert modify(shared, 1 << 5) == errno.EINVAL
    assert modify(shared, lib.IBV_SRQ_MAX_WR, max_wr=32769) == errno.EINVAL
    assert asked(shared) == (8, 2, 0)
    assert modify(shared, both, max_wr=20, limit=20) == 0
    assert modify(shared, lib.IBV_SRQ_MAX_WR, max_wr=19) == errno.EINVAL  # below its limit
    assert asked(shared) == (20, 2, 20)
    assert software().destroy_srq(shared) == 0


def test_a_shared_queue_outlives_its_queue_pairs(device: tuple[Any, Any]) -> None:
    context, domain = device
    shared, queue = make_shared(domain), make_queue(context)
    pair = make_pair(domain, queue, queue, shared)
    assert post_receive(pair, 1) == errno.EINVAL  # only to the shared one
    assert software().destroy_srq(shared) == errno.EBUSY
    assert software().destroy_qp(pair) == 0
    assert software().destroy_srq(shared) == 0
    assert software().destroy_cq(queue) == 0


def test_drain_acknowledges_events_of_unknown_queues(device: tuple[Any, Any], channel: Any) -> None:
    context, domain = device
    queue = make_queue(context, 16, channel)
    pair = make_pair(domain, queue, queue)
    fail(pair)
    assert lib.aiordma_request_notification(queue, 0) == 0
    post_receives(pair, range(1))
    table, address = (int(ffi.cast("uintptr_t", each)) for each in (software().table, channel))
    drain = Drain(None, table, address, InFlightTable())
    # It drains none of the channel's queues: this one has been given back.
    assert drain.step(False, False) == 0
    assert drain.events == 1
    assert software().destroy_qp(pair) == 0
    destroying = Aside(lambda: software().destroy_cq(queue))
    assert destroying.end() == 0
