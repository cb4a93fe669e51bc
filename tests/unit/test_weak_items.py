"""Weak references that may change while they are read."""

from aiordma._base.weak_items import WeakItems


class Thing:
    pass


def test_objects_are_kept_in_order_and_weakly() -> None:
    items: WeakItems[Thing] = WeakItems()
    things = [Thing() for _ in range(3)]
    for thing in [*things, things[0]]:
        items.add(thing)
    assert items.alive() == things
    assert items.discard(things[1])
    assert not items.discard(things[1])
    things.pop()
    assert items.alive() == things[:1]
    del things, thing
    assert items.alive() == []
