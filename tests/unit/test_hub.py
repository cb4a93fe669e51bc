"""The hub: completions find their requests, no more of a queue is reserved than its size, a lost
event is looked for, and a device's failure reaches every user."""

import errno
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import DeviceEventError, VerbsCallError, WorkRequest
from aiordma._runtime.hub import (
    DRAIN_SECONDS,
    ROUNDS,
    WATCHDOG_MOST_SECONDS,
    CompletionQueueShare,
    DeviceHub,
)
from aiordma.verbs import AsyncEvent, AsyncEventType
from tests.internals import BATCH, async_events
from tests.unit.numbers_device import ASYNC_FD, MAX_CQE, Channel, Device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    device.install(monkeypatch)
    yield device
    device.making.set()


def new_request(then: Callable[[], object] = lambda: None) -> WorkRequest:
    """Return a request, of an owner that calls `then` when it completes."""
    owner: Any = SimpleNamespace(request_ended=lambda _: then())
    return WorkRequest(owner, "SEND", 0, ())


# -- completions ----------------------------------------------------------------------------------


def test_a_readable_channel_completes_each_request_with_its_own(device: Device) -> None:
    hub, loop = device.hub()
    requests = [new_request() for _ in range(5)]
    wr_ids = [hub.in_flight.add(request) for request in requests]
    for wr_id in reversed(wr_ids):
        device.complete(wr_id)
    loop.watched[Channel.fd]()
    for wr_id, request in zip(wr_ids, requests, strict=True):
        assert request.result().wr_id == wr_id
    assert len(hub.in_flight) == 0
    assert hub.poller.wakes == 1


def test_unknown_completion_is_dropped(device: Device) -> None:
    hub, loop = device.hub()
    spent, live = new_request(), new_request()
    stale = hub.in_flight.add(spent)
    hub.in_flight.take(stale)
    wr_id = hub.in_flight.add(live)  # the same slot, a generation later
    for number in (stale, 0, 2**64 - 1, wr_id, wr_id):
        device.complete(number)
    loop.watched[Channel.fd]()
    assert (spent.done(), live.done()) == (False, True)


def test_a_completion_that_raises_is_logged_and_stops_no_other(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    hub, loop = device.hub()
    requests = [new_request(lambda: 1 / 0), new_request()]
    for request in requests:
        device.complete(hub.in_flight.add(request))
    loop.watched[Channel.fd]()
    assert all(request.done() for request in requests)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("count", [BATCH - 1, BATCH, BATCH + 1, 3 * BATCH])
def test_more_than_a_batch_is_drained_in_one_wake(
    device: Device, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma._runtime.hub.DRAIN_SECONDS", 60.0)
    hub, loop = device.hub()
    requests = [new_request() for _ in range(count)]
    for request in requests:
        device.complete(hub.in_flight.add(request))
    loop.watched[Channel.fd]()
    assert all(request.done() for request in requests)
    assert hub.poller.wakes == 1


def test_a_flood_lets_others_have_their_turn_and_is_not_forgotten(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma._runtime.hub.DRAIN_SECONDS", 60.0)
    hub, loop = device.hub()
    requests = [new_request() for _ in range(BATCH * ROUNDS + 10)]
    for request in requests:
        device.complete(hub.in_flight.add(request))
    loop.watched[Channel.fd]()
    assert len(hub.in_flight) == 10
    assert [timer.delay for timer in loop.timers] == [0]
    loop.fire()
    assert len(hub.in_flight) == 0


def test_slow_flood_ends_after_a_bounded_time(device: Device) -> None:
    hub, loop = device.hub()
    slow = new_request(lambda: time.sleep(2 * DRAIN_SECONDS))
    device.complete(hub.in_flight.add(slow))
    for _ in range(3 * BATCH - 1):
        device.complete(hub.in_flight.add(new_request()))
    loop.watched[Channel.fd]()
    assert len(hub.in_flight) == 2 * BATCH  # the rest comes in the loop's next turn
    assert [timer.delay for timer in loop.timers] == [0]
    loop.fire()
    assert len(hub.in_flight) == 0
    assert slow.done()


def test_draining_from_a_completion_leaves_the_order_alone(device: Device) -> None:
    hub, loop = device.hub()
    order: list[str] = []
    third = hub.in_flight.add(new_request(lambda: order.append("third")))

    def drain_inside() -> None:
        device.complete(third)
        assert hub.drain() == 0
        order.append("first")

    device.complete(hub.in_flight.add(new_request(drain_inside)))
    device.complete(hub.in_flight.add(new_request(lambda: order.append("second"))))
    loop.watched[Channel.fd]()
    assert order == ["first", "second", "third"]  # by the poll behind the arming


# -- completion queues ----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_queues_are_shared_until_they_are_full(device: Device) -> None:
    hub, _ = device.hub()
    first = await hub.reserve(4000)
    assert await hub.reserve(96) is first
    second = await hub.reserve(1)
    assert second is not first
    hub.free(first, 4000)
    assert await hub.reserve(4000) is first
    assert device.sizes == [4096, 4096]


@pytest.mark.anyio
async def test_many_reservations_need_few_queues(device: Device) -> None:
    hub, _ = device.hub()
    for _ in range((2 * 4096 + 8192 + MAX_CQE) // 128):
        await hub.reserve(128)
    assert device.sizes == [4096, 4096, 8192, MAX_CQE]


@pytest.mark.anyio
async def test_one_reservation_is_as_large_as_the_largest_queue(device: Device) -> None:
    hub, _ = device.hub()
    assert (await hub.reserve(MAX_CQE)).queue.cqe == MAX_CQE
    with pytest.raises(
        ValueError,
        match=rf"max_send_wr \+ max_recv_wr, or depth: {MAX_CQE + 1} .* numbers0 holds {MAX_CQE}",
    ):
        await hub.reserve(MAX_CQE + 1)


@pytest.mark.anyio
async def test_a_new_queue_is_armed_at_once_and_the_old_ones_are_not_again(device: Device) -> None:
    hub, _ = device.hub()
    assert device.armed == [1]
    await hub.reserve(4096)
    await hub.reserve(4096)
    assert device.armed == [1, 2]
    hub.drain()
    assert device.armed == [1, 2]


@pytest.mark.anyio
async def test_a_queue_that_fills_each_batch_keeps_no_other_from_being_polled(
    device: Device,
) -> None:
    hub, loop = device.hub()
    await hub.reserve(4096)
    await hub.reserve(4096)
    device.polled.clear()
    for _ in range(3 * BATCH):
        device.complete(hub.in_flight.add(new_request()))
    while len(hub.in_flight):  # a drain ends early where the machine is slow
        loop.watched[Channel.fd]()
    assert device.polled.index(2) <= len(device.polled) // 3  # behind the first of the batches


@pytest.mark.anyio
async def test_reservations_at_once_share_the_new_queue(device: Device) -> None:
    hub, _ = device.hub()
    await hub.reserve(4096)
    got = []
    device.making.clear()  # a driver that takes its time

    async def reserve() -> None:
        got.append(await hub.reserve(1000))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(reserve)
        await anyio.sleep(0.01)
        assert got == []
        device.making.set()
    assert len(set(map(id, got))) == 1
    assert got[0].reserved == 4000
    assert device.sizes == [4096, 4096]


@pytest.mark.anyio
async def test_cancelled_reservation_reserves_nothing(device: Device) -> None:
    hub, _ = device.hub()
    await hub.reserve(4096)
    device.making.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(hub.reserve, 50)
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
        device.making.set()
    shared = await hub.reserve(4096 - 50)
    assert shared.reserved in (4096 - 50, 4096)
    assert shared.queue.cqe == 4096


@pytest.mark.anyio
async def test_unused_queues_are_given_back_except_one(device: Device) -> None:
    hub, _ = device.hub()
    queues = [await hub.reserve(entries) for entries in (4096, 4096, 8192, MAX_CQE)]
    for shared in queues[1:]:
        hub.free(shared, shared.reserved)
    destroy = hub.take_unused()
    assert destroy is not None
    assert hub._queues == queues[:2]
    assert not any(is_closed(shared) for shared in queues)  # that is for another thread
    destroy()
    assert [is_closed(shared) for shared in queues] == [False, False, True, True]
    destroy_unused(hub)
    assert hub._queues == queues[:2]
    assert await hub.reserve(4096) is queues[1]


@pytest.mark.anyio
async def test_queue_of_a_reservation_under_way_is_kept(device: Device) -> None:
    hub, _ = device.hub()
    device.complete(hub.in_flight.add(new_request(lambda: destroy_unused(hub))))
    shared = await hub.reserve(5000)  # delivers what has completed, as it arms the new queue
    assert not is_closed(shared)
    assert len(hub._queues) == 2


@pytest.mark.anyio
async def test_giving_queues_back_shrinks_the_in_flight_table(device: Device) -> None:
    hub, _ = device.hub()
    queues = [await hub.reserve(4096) for _ in range(2)]
    wr_ids = [hub.in_flight.add(new_request()) for _ in range(1000)]
    for wr_id in wr_ids[10:]:
        hub.in_flight.take(wr_id)
    for shared in queues:
        hub.free(shared, 4096)
    destroy_unused(hub)
    assert hub.in_flight.slots == 10


@pytest.mark.anyio
async def test_vectors_and_sizes_have_queues_of_their_own(device: Device) -> None:
    hub, _ = device.hub()
    usual = await hub.reserve(100)
    other = await hub.reserve(100, comp_vector=1)
    small = await hub.reserve(100, comp_vector=1, cqe=200)
    assert len({id(shared) for shared in (usual, other, small)}) == 3
    assert [shared.queue.comp_vector for shared in (usual, other, small)] == [0, 1, 1]
    assert device.sizes == [4096, 4096, 200]
    assert await hub.reserve(100, comp_vector=1, cqe=200) is small
    assert await hub.reserve(100, comp_vector=1, cqe=200) is not small  # that one is full
    assert await hub.reserve(3996, comp_vector=1) is other
    assert device.sizes == [4096, 4096, 200, 200]
    assert device.armed == [1, 2, 3, 4]


@pytest.mark.anyio
async def test_one_unused_queue_of_each_vector_is_kept(device: Device) -> None:
    hub, _ = device.hub()
    for vector, cqe in ((0, None), (0, 50), (1, None), (1, 50), (1, 60)):
        hub.free(await hub.reserve(10, vector, cqe), 10)
    destroy_unused(hub)
    # Of the size that was reserved last, so that a connection after the other shares it.
    assert [(shared.comp_vector, shared.cqe) for shared in hub._queues] == [(0, 50), (1, 60)]
    kept = hub._queues[0]
    assert await hub.reserve(10, 0, 50) is kept


def destroy_unused(hub: DeviceHub) -> None:
    destroy = hub.take_unused()
    if destroy is not None:
        destroy()


def is_closed(shared: CompletionQueueShare) -> bool:
    queue: Any = shared.queue
    closed: bool = queue.closed
    return closed


@given(st.lists(st.integers(min_value=1, max_value=6000), max_size=40), st.data())
def test_no_queue_has_more_reserved_than_its_size(sizes: list[int], data: st.DataObject) -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        device.install(patch)
        anyio.run(_reserve_and_free, device, sizes, data)


async def _reserve_and_free(device: Device, sizes: list[int], data: st.DataObject) -> None:
    hub, _ = device.hub()
    held: list[tuple[Any, int]] = []
    for size in sizes:
        held.append((await hub.reserve(size), size))
        while len(held) > 0 and data.draw(st.booleans()):
            at: int = data.draw(st.integers(0, len(held) - 1))
            hub.free(*held.pop(at))
        if data.draw(st.booleans()):
            destroy_unused(hub)
        assert all(not is_closed(shared) for shared, _ in held)
        for shared in hub._queues:
            assert shared.reserved == sum(size for other, size in held if other is shared)
            assert shared.reserved <= shared.queue.cqe


# -- the watchdog ---------------------------------------------------------------------------------


def test_a_lost_event_is_made_good_by_the_watchdog(device: Device) -> None:
    hub, loop = device.hub()
    request = new_request()
    device.complete(hub.in_flight.add(request))  # and no event
    hub.watch_over()
    assert len(loop.timers) == 1
    loop.fire()
    assert request.done()
    assert device.armed == [1, 1]  # armed again: for the kernel, the event has been delivered


def test_the_watchdog_looks_rarer_and_rarer_and_ends_with_the_last_request(device: Device) -> None:
    hub, loop = device.hub()
    wr_id = hub.in_flight.add(new_request())
    delays = []
    for _ in range(9):
        hub.watch_over()
        hub.watch_over()  # one is enough
        (timer,) = loop.timers
        delays.append(timer.delay)
        loop.fire()
    assert delays == [1, 2, 4, 8, 10, 10, 10, 10, WATCHDOG_MOST_SECONDS]
    other = hub.in_flight.add(new_request())
    device.complete(other)
    loop.watched[Channel.fd]()
    loop.fire()
    assert [timer.delay for timer in loop.timers] == [1]  # it works again: look soon
    device.complete(wr_id)
    loop.watched[Channel.fd]()
    loop.fire()
    loop.fire()
    assert loop.timers == []


# -- asynchronous events --------------------------------------------------------------------------


def owner_of(failed: list[DeviceEventError]) -> Any:
    """Return the owner of a queue pair that collects its errors."""
    return SimpleNamespace(queue_pair_failed=failed.append)


def test_object_event_calls_its_registered_callback(device: Device) -> None:
    hub, loop = device.hub()
    failed: list[DeviceEventError] = []
    heard: list[AsyncEventType] = []
    hub.pairs[0x10] = owner_of(failed)
    hub.on_object_event[0x20] = heard.append
    kinds = (
        AsyncEventType.QP_FATAL,
        AsyncEventType.QP_REQ_ERR,
        AsyncEventType.QP_ACCESS_ERR,
        AsyncEventType.SRQ_LIMIT_REACHED,
        AsyncEventType.QP_LAST_WQE_REACHED,
    )
    for kind in kinds:
        for key, qp_num in ((0x20, 0x10), (0x20, 0), (0x20, 0x30)):
            hub.handle_async_event(AsyncEvent(kind, key=key, qp_num=qp_num))
    hub.handle_async_event(AsyncEvent(AsyncEventType.PORT_ERR, port=1))
    assert failed == []
    loop.fire()
    assert [error.event for error in failed] == list(kinds[:3])
    assert "QP_FATAL" in str(failed[0])
    assert "numbers0" in str(failed[0])
    assert heard == list(kinds[3:])
    assert hub.failure is None


def test_a_queue_pairs_event_counts_for_less_than_its_completion(device: Device) -> None:
    hub, loop = device.hub()
    failed: list[DeviceEventError] = []
    hub.pairs[0x10] = owner_of(failed)

    def end() -> None:
        hub.forget_queue_pair(0x10)  # as the queue pair's owner does

    wr_id = hub.in_flight.add(new_request(end))
    hub.handle_async_event(AsyncEvent(AsyncEventType.QP_FATAL, qp_num=0x10))
    device.complete(wr_id)
    loop.fire()
    assert len(hub.in_flight) == 0
    assert failed == []


@pytest.mark.parametrize(
    "kind", [AsyncEventType.DEVICE_FATAL, AsyncEventType.CQ_ERR], ids=lambda kind: kind.name
)
def test_device_or_queue_failure_reaches_every_user(device: Device, kind: AsyncEventType) -> None:
    hub, loop = device.hub()
    event = AsyncEvent(kind, key=hub._queues[0].queue.key)
    told: list[Any] = []
    hub.on_failure.add(told.append)
    hub.handle_async_event(AsyncEvent(AsyncEventType.CQ_ERR, key=99))  # another loop's
    assert told == []
    hub.handle_async_event(event)
    hub.handle_async_event(event)
    assert [error.event for error in told] == [kind]
    assert loop.watched == {}


def test_a_device_that_has_no_events_any_more_has_failed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_provider: object, _pointer: object) -> None:
        raise VerbsCallError(errno.EIO, "ibv_get_async_event")

    monkeypatch.setattr(async_events, "take_async_event", gone)
    hub, loop = device.hub()
    told: list[Any] = []
    hub.on_failure.add(told.append)
    loop.watched[ASYNC_FD]()
    assert [error.errno for error in told] == [errno.EIO]
    assert loop.watched == {}


# -- the end --------------------------------------------------------------------------------------


def test_device_failure_reaches_every_user_once(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    hub, loop = device.hub()
    told: list[Any] = []
    hub.on_failure.add(told.append)
    request = new_request()
    hub.in_flight.add(request)
    hub.watch_over()
    device.failure = errno.EIO
    readable = loop.watched[Channel.fd]
    readable()
    assert [error.errno for error in told] == [errno.EIO]
    assert loop.watched == {}
    assert "numbers0" in caplog.text
    for _ in range(3):
        readable()
        loop.fire()
        hub.watch_over()
        assert hub.drain() == 0
    assert len(told) == 1
    assert len(caplog.records) == 1
    # Its memory is still the device's: the user destroys the queue pair first.
    assert not request.done()
    assert len(hub.in_flight) == 1


@pytest.mark.anyio
async def test_a_failed_device_takes_no_new_user(device: Device) -> None:
    hub, loop = device.hub()
    device.failure = errno.EIO
    loop.watched[Channel.fd]()
    with pytest.raises(VerbsCallError, match="ibv_poll_cq"):
        await hub.reserve(1)


def test_stop_delivers_the_rest_then_nothing(device: Device) -> None:
    hub, loop = device.hub()
    request = new_request()
    device.complete(hub.in_flight.add(request))
    hub.in_flight.add(new_request())
    hub.watch_over()
    readable, timers = loop.watched[Channel.fd], loop.timers
    hub.stop()
    assert request.done()
    assert loop.watched == {}
    assert [timer.cancelled for timer in timers] == [True]
    drained = device.polls
    readable()  # an event that was on its way
    assert device.polls == drained
    hub.close()
    assert hub.channel.closed
    assert hub.domain.closed
