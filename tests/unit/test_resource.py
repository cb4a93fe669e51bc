"""Resources close once, children first, and are never collected in silence."""

import errno
import gc
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import BusyError, ClosedError, MemoryRegion, VerbsCallError
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    Context,
    Device,
    QueuePair,
    RawSharedReceiveQueue,
    Resource,
)
from tests.internals import check_positive_errno
from tests.unit.software_device import nothing_left


class RefusingOnce:
    """A provider whose function is refused with EBUSY once."""

    def __init__(self, table: Any, function: str) -> None:
        self._table = table
        self._function = function
        self._refusals = [errno.EBUSY]

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._table, name)
        if name != self._function:
            return function
        return lambda pointer: self._refusals.pop() if self._refusals else function(pointer)


def make_queue_pair(context: Context) -> QueuePair:
    queue = CompletionQueue(context, 2)
    return QueuePair.create(context.alloc_pd(), queue, queue)


class Thing(Resource):
    def __init__(self, name: str, log: list[str], *parents: Resource, rank: int = 0) -> None:
        self.name = name
        self.log = log
        self._closing_rank = rank
        self.pointer = object()
        super().__init__(*parents)

    def __repr__(self) -> str:
        return f"<Thing {self.name}>"

    def _destroy(self) -> None:
        self.log.append(self.name)


def test_closing_is_idempotent() -> None:
    log: list[str] = []
    thing = Thing("a", log)
    assert not thing.closed
    thing.close()
    thing.close()
    assert thing.closed
    assert log == ["a"]


def test_children_close_before_their_parent_by_rank_then_newest_first() -> None:
    log: list[str] = []
    parent = Thing("parent", log)
    children = [
        Thing("channel", log, parent, rank=2),
        Thing("queue", log, parent, rank=1),
        Thing("old pair", log, parent),
        Thing("new pair", log, parent),
    ]
    parent.close()
    assert log == ["new pair", "old pair", "queue", "channel", "parent"]
    assert all(child.closed for child in children)


def test_a_child_closed_by_itself_is_not_closed_again() -> None:
    log: list[str] = []
    parent = Thing("parent", log)
    child = Thing("child", log, parent)
    child.close()
    parent.close()
    assert log == ["child", "parent"]


def test_neither_parent_nor_child_is_collected_under_the_other() -> None:
    log: list[str] = []
    child = Thing("child", log, Thing("parent", log))
    gc.collect()
    assert log == []
    (parent,) = child._parents
    del child
    gc.collect()
    assert log == []
    parent.close()
    assert log == ["child", "parent"]


@pytest.mark.filterwarnings("ignore:unclosed <Thing:ResourceWarning")
def test_a_family_that_is_forgotten_is_destroyed_children_first() -> None:
    # Whichever object the collector begins with.
    log: list[str] = []

    def forget() -> None:
        parent = Thing("domain", log)
        for name, rank in (("channel", 2), ("queue", 1), ("pair", 0)):
            Thing(name, log, parent, rank=rank)

    forget()
    gc.collect()
    assert log == ["pair", "queue", "channel", "domain"]


def test_a_child_of_two_parents_closes_with_the_first() -> None:
    log: list[str] = []
    one, other = Thing("one", log), Thing("other", log)
    child = Thing("child", log, one, other)
    one.close()
    assert child.closed
    other.close()
    assert log == ["child", "one", "other"]


def test_nothing_is_made_from_what_is_closed() -> None:
    log: list[str] = []
    parent = Thing("parent", log)
    parent.close()
    with pytest.raises(ClosedError, match="this Thing is closed"):
        Thing("child", log, parent)
    with pytest.raises(ClosedError), parent:
        pass


def test_a_with_block_closes_also_after_an_exception() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError), Thing("a", log):
        raise ZeroDivisionError
    assert log == ["a"]


def test_what_is_collected_unclosed_warns_and_is_closed() -> None:
    log: list[str] = []
    with pytest.warns(ResourceWarning, match="unclosed <Thing a>"):
        Thing("a", log)
    assert log == ["a"]


def test_what_c_refused_to_make_is_not_destroyed_and_does_not_warn() -> None:
    log: list[str] = []

    class Refused(Thing):
        def __init__(self, parent: Resource) -> None:
            super().__init__("refused", log, parent)
            self.pointer = None
            self._give_up()
            raise OSError("no")

    with Thing("parent", log) as parent:
        with pytest.raises(OSError, match="no"):
            Refused(parent)
        gc.collect()
        assert parent._children == {}
    assert log == ["parent"]


def test_failed_destruction_is_not_repeated() -> None:
    log: list[str] = []

    class Stubborn(Thing):
        def _destroy(self) -> None:
            log.append("asked")
            raise OSError("no such device")

    parent = Thing("parent", log)
    thing = Stubborn("stubborn", log, parent)
    for closed in (thing, thing, parent, parent):
        with pytest.raises(OSError, match="no such device"):
            closed.close()
    assert (thing.closed, parent.closed) == (True, False)
    assert log == ["asked"]


def test_a_child_that_refuses_does_not_keep_its_siblings_open() -> None:
    log: list[str] = []

    class Stubborn(Thing):
        def _destroy(self) -> None:
            raise OSError("still in use")

    parent = Thing("parent", log)
    children = [Thing("old", log, parent), Stubborn("x", log, parent), Thing("new", log, parent)]
    with pytest.raises(OSError, match="still in use"):
        parent.close()
    assert [child.closed for child in children] == [True, True, True]
    assert log == ["new", "old"]


def test_a_child_that_moves_closes_with_its_new_parent_only() -> None:
    log: list[str] = []
    old, new = Thing("old", log), Thing("new", log)
    child = Thing("child", log, old)
    child._move(new)
    old.close()
    assert not child.closed
    new.close()
    assert log == ["old", "child", "new"]


def test_refused_object_and_its_parents_stay_open_until_a_later_close() -> None:
    log: list[str] = []
    refusals = [errno.EBUSY, errno.EBUSY, 0]

    class Refused(Thing):
        def _destroy(self) -> None:
            check_positive_errno(refusals.pop(0), "ibv_destroy_x")
            super()._destroy()

    parent = Thing("parent", log)
    thing, sibling = Refused("refused", log, parent), Thing("sibling", log, parent)
    with pytest.raises(VerbsCallError, match="ibv_destroy_x: Device or resource busy"):
        thing.close()
    assert not thing.closed
    with pytest.raises(VerbsCallError, match="ibv_destroy_x: Device or resource busy"):
        parent.close()
    assert (thing.closed, sibling.closed, parent.closed) == (False, True, False)
    parent.close()
    assert (thing.closed, parent.closed) == (True, True)
    parent.close()
    assert log == ["sibling", "refused", "parent"]


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda context: context.alloc_pd(), "dealloc_pd"),
        (lambda context: CompletionQueue(context, 1), "destroy_cq"),
        (lambda context: CompletionChannel(context), "destroy_comp_channel"),
        (lambda context: MemoryRegion(context.alloc_pd(), bytearray(64)), "dereg_mr"),
        (lambda context: RawSharedReceiveQueue(context.alloc_pd(), 1), "destroy_srq"),
        (make_queue_pair, "destroy_qp"),
    ],
)
def test_what_the_driver_refuses_to_destroy_can_be_closed_again(
    make: Callable[[Context], Resource], function: str
) -> None:
    with nothing_left(), Device("software").open() as context:
        context.provider = RefusingOnce(context.provider, function)  # type: ignore[assignment]
        thing = make(context)
        with pytest.raises((VerbsCallError, BusyError), match="Device or resource busy"):
            thing.close()
        assert not thing.closed
        thing.close()
        assert thing.closed


def test_what_the_driver_refuses_to_close_can_be_closed_again() -> None:
    with nothing_left():
        context = Device("software").open()
        context.provider = RefusingOnce(context.provider, "close_device")  # type: ignore[assignment]
        with pytest.raises(VerbsCallError, match="ibv_close_device: Device or resource busy"):
            context.close()
        assert not context.closed
        context.close()
