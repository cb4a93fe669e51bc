"""Closes of verbs objects in several threads: nothing is destroyed before its children are."""

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import trio

from aiordma import Access, BusyError, MemoryRegion, VerbsCallError
from aiordma.testing import software_objects
from aiordma.verbs import (
    Capacity,
    CompletionQueue,
    EventChannel,
    Identifier,
    PortSpace,
    ProtectionDomain,
    QueuePair,
    QueuePairType,
    Resource,
    resource,
)
from tests.internals import check_positive_errno, software
from tests.waiting import wait_until

pytestmark = pytest.mark.natively

PATIENCE = 20


class Thing(Resource):
    """An object whose destruction waits, and can be refused."""

    def __init__(self, *parents: Resource) -> None:
        super().__init__(*parents)
        self.pointer = object()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.refusals: list[int] = []
        self.within: Callable[[], object] = lambda: None

    def _destroy(self) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE)
        self.within()
        check_positive_errno(self.refusals.pop(0) if self.refusals else 0, "ibv_destroy_x")


class Closing(threading.Thread):
    """A thread that closes an object, and keeps the error."""

    def __init__(self, closed: Resource) -> None:
        super().__init__(daemon=True)
        self._closed_object = closed
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._closed_object.close()
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error


@contextmanager
def being_closed(child: Thing) -> Iterator[Closing]:
    """Another thread is destroying the child during the block."""
    child.may_end.clear()
    closing = Closing(child)
    try:
        assert child.begun.wait(PATIENCE)
        yield closing
    finally:
        child.may_end.set()
        closing.ended()


def test_parent_waits_for_the_child_that_another_thread_destroys() -> None:
    parent = Thing()
    child = Thing(parent)
    with being_closed(child) as first:
        second = Closing(parent)
        wait_until(lambda: parent.closed)
        assert not parent.begun.wait(0.05)
    assert (first.ended(), second.ended()) == (None, None)
    assert child._is_gone
    assert parent._is_gone


def test_siblings_and_other_parents_wait_as_well() -> None:
    one, other = Thing(), Thing()
    child = Thing(one, other)
    with being_closed(child):
        closings = [Closing(one), Closing(other)]
        wait_until(lambda: one.closed and other.closed)
        assert not one.begun.wait(0.05)
        assert not other.begun.is_set()
    assert [closing.ended() for closing in closings] == [None, None]
    assert one._is_gone
    assert other._is_gone


@pytest.mark.parametrize("refusals", [1, 2])
def test_refused_child_is_closed_again_by_the_parent_that_waited(refusals: int) -> None:
    parent = Thing()
    child = Thing(parent)
    child.refusals = [errno.EBUSY] * refusals
    with being_closed(child) as first:
        second = Closing(parent)
        wait_until(lambda: parent.closed)
    assert isinstance(first.ended(), VerbsCallError)
    if refusals == 1:
        assert second.ended() is None
    else:
        assert isinstance(second.ended(), VerbsCallError)
        assert (child.closed, parent.closed, parent.begun.is_set()) == (False, False, False)
        parent.close()
    assert child._is_gone
    assert parent._is_gone


def test_parent_stays_open_if_the_other_thread_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = Thing()
    child = Thing(parent)
    monkeypatch.setattr(resource, "LONGEST_CLOSE", 0.05)
    with being_closed(child):
        error = Closing(parent).ended()
        assert isinstance(error, BusyError)
        assert "Thing" in str(error)
        assert (parent.closed, parent.begun.is_set()) == (False, False)
    parent.close()
    assert parent._is_gone


def test_close_within_the_destruction_of_a_child_is_refused_at_once() -> None:
    parent = Thing()
    child = Thing(parent)
    errors: list[BaseException | None] = []

    def close_parent() -> None:
        with pytest.raises(BusyError) as caught:
            parent.close()
        errors.append(caught.value)

    child.within = close_parent
    child.close()
    assert len(errors) == 1
    assert (child._is_gone, parent.closed) == (True, False)
    parent.close()
    assert parent._is_gone


@pytest.mark.promise("A closed region is written to no more")
@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_second_close_waits_for_the_first(refusals: int) -> None:
    """Once a close has returned, the object is gone."""
    thing = Thing()
    thing.refusals = [errno.EBUSY] * refusals
    with being_closed(thing) as first:
        second = Closing(thing)
        second.join(0.05)
        assert second.is_alive()
    assert isinstance(first.ended(), VerbsCallError if refusals else type(None))
    assert isinstance(second.ended(), VerbsCallError if refusals == 2 else type(None))
    assert thing._is_gone == (refusals < 2)
    thing.close()


def test_close_that_was_refused_elsewhere_in_between_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other thread is refused after this one has seen that it closes the object."""
    parent = Thing()
    child = Thing(parent)
    child.refusals = [errno.EBUSY]
    close_once = Thing._close_once

    def with_pause(thing: Resource) -> bool:
        is_gone = close_once(thing)
        if thing is child and not is_gone:
            child.may_end.set()
            wait_until(lambda: not child.closed)
        return is_gone

    monkeypatch.setattr(Thing, "_close_once", with_pause)
    with being_closed(child) as first:
        parent.close()
    assert isinstance(first.ended(), VerbsCallError)
    assert child._is_gone
    assert parent._is_gone


def test_close_within_the_own_destruction_does_nothing() -> None:
    thing = Thing()
    thing.within = thing.close
    thing.close()
    assert thing._is_gone


@pytest.mark.promise("A closed region is written to no more")
@pytest.mark.parametrize("run", [asyncio.run, lambda main: trio.run(lambda: main)])
@pytest.mark.parametrize("refusals", [0, 1])
def test_region_that_another_thread_closes_is_gone_after_its_close(
    run: Any, refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an event loop's thread, too: no byte of a peer's arrives then."""
    provider = software()
    begun, may_end, deregister = threading.Event(), threading.Event(), provider.dereg_mr
    answers = [errno.EBUSY] * refusals

    def slowly(pointer: Any) -> int:
        begun.set()
        assert may_end.wait(PATIENCE)
        return answers.pop() if answers else deregister(pointer)

    monkeypatch.setattr(provider, "dereg_mr", slowly)
    before = objects()
    with ExitStack() as stack:
        identifier = Identifier(stack.enter_context(EventChannel()), PortSpace.TCP)
        identifier.bind("127.0.0.1", 0)
        domain = ProtectionDomain(stack.enter_context(identifier.context()))
        region = MemoryRegion(domain, bytearray(8), Access.REMOTE_WRITE)
        first = Closing(region)
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, may_end.set).start()

        async def main() -> None:
            region.close()
            assert (region._is_gone, objects()["regions"]) == (True, before["regions"])

        run(main())
        assert isinstance(first.ended(), VerbsCallError if refusals else type(None))


@pytest.mark.promise("A closed region is written to no more")
@pytest.mark.parametrize("run", [asyncio.run, lambda main: trio.run(lambda: main)])
def test_event_loop_does_not_wait_for_another_thread(run: Any) -> None:
    parent = Thing()
    child = Thing(parent)

    async def main() -> None:
        with pytest.raises(BusyError, match="another thread"):
            parent.close()

    with being_closed(child):
        run(main())
        assert (parent.closed, parent.begun.is_set()) == (False, False)
    parent.close()


def test_error_of_a_block_counts_more_than_another_threads_close() -> None:
    thing = Thing()
    closings: list[Closing] = []

    async def main(error: Exception | None) -> None:
        thing.begun.clear()
        thing.may_end.clear()
        thing.refusals = [errno.EBUSY]
        with thing:
            closings.append(Closing(thing))
            assert thing.begun.wait(PATIENCE)
            if error is not None:
                raise error

    for error, expected in ((ZeroDivisionError(), ZeroDivisionError), (None, BusyError)):
        with pytest.raises(expected):
            asyncio.run(main(error))
        thing.may_end.set()
        assert isinstance(closings.pop().ended(), VerbsCallError)
    thing.close()


def test_identifier_waits_for_its_queue_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, before = software(), objects()
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()
    destroy_qp, destroy_id = provider.destroy_qp, provider.destroy_id

    def slowly(pointer: Any) -> int:
        begun.set()
        assert may_end.wait(PATIENCE)
        result = destroy_qp(pointer)
        order.append("destroy_qp")
        return int(result)

    def noted(pointer: Any) -> int:
        order.append("destroy_id")
        return int(destroy_id(pointer))

    monkeypatch.setattr(provider, "destroy_qp", slowly)
    monkeypatch.setattr(provider, "destroy_id", noted)
    with EventChannel(provider) as channel:
        identifier, pair = with_queue_pair(channel)
        closings = [Closing(pair)]
        assert begun.wait(PATIENCE)
        closings.append(Closing(identifier))
        closings.append(Closing(pair.domain))
        wait_until(lambda: identifier.closed and pair.domain.closed)
        closings[1].join(0.05)
        assert order == []
        may_end.set()
        assert [closing.ended() for closing in closings] == [None] * 3
        assert order == ["destroy_qp", "destroy_id"]
        pair.domain.context.close()
    assert objects() == before


def objects() -> dict[str, int]:
    """The device's objects, without librdmacm's context, which stays open for the process."""
    return {**software_objects(), "contexts": 0}


def with_queue_pair(channel: EventChannel) -> tuple[Identifier, QueuePair]:
    identifier = Identifier(channel, PortSpace.UDP)
    identifier.bind("127.0.0.1", 0)
    context = identifier.context()
    domain, queue = ProtectionDomain(context), CompletionQueue(context, 8)
    pair = identifier.create_queue_pair(domain, queue, queue, Capacity(), QueuePairType.UD)
    return identifier, pair
