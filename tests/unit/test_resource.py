"""Resources close once, children first, and are never collected in silence."""

import gc
from collections.abc import Callable

import pytest

from aiordma._base.errors import ClosedError
from aiordma.testing import software_objects
from aiordma.verbs import (
    CompletionChannel,
    CompletionQueue,
    Context,
    Device,
    MemoryRegion,
    ProtectionDomain,
    Resource,
)


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
            self._abandon()
            raise OSError("no")

    with Thing("parent", log) as parent:
        with pytest.raises(OSError, match="no"):
            Refused(parent)
        gc.collect()
        assert parent._children == {}
    assert log == ["parent"]


def test_a_refused_destruction_is_raised_once() -> None:
    log: list[str] = []

    class Stubborn(Thing):
        def _destroy(self) -> None:
            raise OSError("still in use")

    parent = Thing("parent", log)
    thing = Stubborn("stubborn", log, parent)
    with pytest.raises(OSError, match="still in use"):
        thing.close()
    assert thing.closed
    thing.close()
    parent.close()
    assert log == ["parent"]


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
    assert log == ["new", "old", "parent"]


def test_a_child_that_moves_closes_with_its_new_parent_only() -> None:
    log: list[str] = []
    old, new = Thing("old", log), Thing("new", log)
    child = Thing("child", log, old)
    child._move(new)
    old.close()
    assert not child.closed
    new.close()
    assert log == ["old", "child", "new"]


Maker = Callable[[Context, ProtectionDomain], object]

HALF_MADE: dict[str, Maker] = {
    "domain": lambda context, _domain: ProtectionDomain(context),
    "queue": lambda context, _domain: CompletionQueue(context, 4),
    "channel": lambda context, _domain: CompletionChannel(context),
    "region": lambda _context, domain: MemoryRegion(domain, bytearray(8)),
}


@pytest.mark.parametrize("make", HALF_MADE.values(), ids=HALF_MADE)
def test_interrupt_within_a_constructor_does_not_disturb_the_close(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is a child of its parent then, and there is nothing in the device to destroy."""
    before = software_objects()
    context = Device("software").open()
    domain = ProtectionDomain(context)
    original = Resource.__init__

    def interrupted(self: Resource, *parents: Resource) -> None:
        original(self, *parents)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Resource, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(context, domain)
    context.close()
    assert software_objects() == before
