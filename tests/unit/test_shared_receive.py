"""What no device of ours does: a queue pair whose last receive is reported as completed, a
queue that fails, numbers that come again."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiordma
from aiordma._connection.shared_members import LAST_WQE_SECONDS
from aiordma._connection.shared_settings import SharedReceiveSettings
from aiordma.types import RegistrationCache
from tests.alike import alike
from tests.internals import SharedReceiveEndpoint
from tests.unit.numbers_device import Device, Loop

LAST = aiordma.verbs.AsyncEventType.QP_LAST_WQE_REACHED


class Hub:
    """What a shared receive queue asks of a device's hub."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.context = SimpleNamespace(device_name="numbers0")
        self.counters = SimpleNamespace(add=lambda _: None, remove=lambda _: None)
        self.domain = None
        self.pool = SimpleNamespace(registrations=RegistrationCache())
        self.attributes = SimpleNamespace(max_srq=1, max_srq_wr=100, max_srq_sge=2)
        self.on_object_event: dict[int, Callable[[aiordma.verbs.AsyncEventType], None]] = {}
        self.drains = 0
        self.on_drain: Callable[[], None] = lambda: None

    def require_here(self, what: object) -> None:
        """Do nothing: one event loop plays."""

    def drain(self) -> None:
        self.drains += 1
        self.on_drain()


class Member:
    """An endpoint, as the queue sees it."""

    def __init__(self, hub: Any, qp_num: int) -> None:
        self.hub = hub
        self.memory = SimpleNamespace(domain=hub.domain)
        self.pair = SimpleNamespace(number=qp_num, raw=SimpleNamespace(key=1000 + qp_num))
        self.on_close: list[Callable[[], None]] = []
        self.teardown = SimpleNamespace(on_closed=self.on_close)
        self.failures: list[Exception] = []
        self.then = 0

    def destroy(self) -> None:
        self.then += 1

    def fail(self, error: Exception) -> None:
        self.failures.append(error)


class Messages:
    def __init__(self) -> None:
        self.delivered: list[Any] = []

    def deliver(self, lease: Any, completion: Any) -> None:
        self.delivered.append(lease)


class Connection:
    pass


def make(hub: Any, **settings: int) -> Any:
    reactor: Any = SimpleNamespace(loop=hub.loop, blocks=False, enter=lambda _: None)
    shared: Any = SharedReceiveEndpoint(reactor, hub, SharedReceiveSettings(**settings))
    shared._made = True
    return shared


def join(shared: Any, qp_num: int) -> tuple[Any, Messages, Connection]:
    member, messages, connection = Member(shared.hub, qp_num), Messages(), Connection()
    shared.join(member)
    shared.serve(member, messages, connection)
    return member, messages, connection


@pytest.mark.promise("A connection's end flushes no shared receive")
def test_queue_pair_waits_for_last_wqe_reached() -> None:
    hub = Hub()
    shared = make(hub)
    member, *_ = join(shared, 1)
    assert shared.delays(member, member.destroy)
    assert shared.delays(member, member.destroy)  # asked again meanwhile: still one wait
    (timer,) = hub.loop.timers
    before = hub.drains
    hub.on_object_event[member.pair.number](LAST)
    assert (member.then, timer.cancelled) == (1, True)
    assert hub.drains == before + 1  # before the queue pair goes
    assert not shared.delays(member, member.destroy)
    shared.leave(member)


def test_early_last_wqe_reached_needs_no_wait() -> None:
    hub = Hub()
    shared = make(hub)
    member, *_ = join(shared, 1)
    hub.on_object_event[member.pair.number](LAST)
    assert not shared.delays(member, member.destroy)
    assert hub.loop.timers == []


@pytest.mark.promise("A connection's end flushes no shared receive")
def test_a_device_that_is_silent_is_waited_for_once() -> None:
    hub = Hub()
    shared = make(hub)
    first, *_ = join(shared, 1)
    second, *_ = join(shared, 2)
    assert shared.delays(first, first.destroy)
    assert [timer.delay for timer in hub.loop.timers] == [LAST_WQE_SECONDS]
    hub.loop.fire()
    assert first.then == 1
    assert not shared.delays(first, first.destroy)
    assert not shared.delays(second, second.destroy)


def test_reporting_device_is_awaited_again() -> None:
    hub = Hub()
    shared = make(hub)
    first, *_ = join(shared, 1)
    second, *_ = join(shared, 2)
    hub.on_object_event[first.pair.number](LAST)
    assert shared.delays(second, second.destroy)
    hub.loop.fire()  # too late, this time
    third, *_ = join(shared, 3)
    assert shared.delays(third, third.destroy)


def test_what_the_first_owner_of_a_number_took_is_not_its_next_owners() -> None:
    hub = Hub()
    shared = make(hub)
    _, old_messages, _old = join(shared, 7)
    completion = aiordma.verbs.WorkCompletion(1, 0, 0, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0)

    def late() -> None:
        shared._members.queues[completion.qp_num].deliver("late", completion)

    hub.on_drain = late
    new, new_messages, connection = join(shared, 7)
    assert (old_messages.delivered, new_messages.delivered) == (["late"], [])
    assert shared.connection_of(completion) is connection
    for closed in new.on_close:
        closed()
    assert shared.connection_of(completion) is None


def test_a_connection_that_closes_late_takes_no_other_out() -> None:
    shared = make(Hub())
    old, *_kept = join(shared, 7)
    _, _, connection = join(shared, 7)
    for closed in old.on_close:
        closed()
    completion = aiordma.verbs.WorkCompletion(1, 0, 0, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0)
    assert shared.connection_of(completion) is connection


def test_a_queue_that_fails_ends_its_members() -> None:
    shared = make(Hub())
    member, *_ = join(shared, 1)
    shared._device_event(aiordma.verbs.AsyncEventType.SRQ_ERR)
    (error,) = member.failures
    assert isinstance(error, aiordma.DeviceEventError)
    with pytest.raises(aiordma.DeviceEventError):
        aiordma.SharedReceiveQueue(shared).post_srq_recv([bytearray(1)])


def test_another_devices_connections_are_refused() -> None:
    shared = make(Hub())
    other: Any = Hub()
    other.context.device_name = "numbers1"
    member: Any = Member(other, 1)
    with pytest.raises(ValueError, match=r"on numbers0 .* the connection on numbers1"):
        shared.join(member)
    assert shared.members == 0


def test_a_device_without_them_is_named() -> None:
    hub: Any = Hub()
    hub.attributes.max_srq = 0
    with pytest.raises(aiordma.NotSupportedError, match="numbers0 has no shared receive queues"):
        SharedReceiveSettings().check(hub)


def test_more_of_a_completion_queue_is_reserved_up_to_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    device.install(monkeypatch)
    hub, _ = device.hub()
    (shared,) = hub._queues
    hub.reserve_more(shared, shared.queue.cqe - 1)
    hub.reserve_more(shared, 1)
    with pytest.raises(ValueError, match=r"resize\(\): depth: 1 more .* of which 0 are free"):
        hub.reserve_more(shared, 1)
    assert shared.reserved == shared.queue.cqe


def test_partial_post_fails_the_queue() -> None:
    hub = Hub()
    shared = make(hub)
    member, *_ = join(shared, 1)
    posted: list[Any] = [object(), object()]
    assert shared.posted_in_part(5, posted, ["one", "other"]) is posted
    assert isinstance(shared.cause, aiordma.VerbsCallError)
    (failure,) = member.failures
    assert alike(failure, shared.cause)
    with pytest.raises(aiordma.verbs.PartialPostError, match="receive 1 of 2") as caught:
        shared.posted_in_part(12, posted[:1], ["one", "other"])
    assert (caught.value.refused, caught.value.errno) == (1, 12)
