"""Weak references to objects, for a collection that finalizers and other threads change while it is
read. A WeakSet would raise RuntimeError then ("Set changed size during iteration").
"""

from typing import Generic, TypeVar
from weakref import ref

Item = TypeVar("Item")


class WeakItems(Generic[Item]):
    """Objects in the order in which they were added, each until it is collected. The garbage
    collector can change it at any allocation, so every access to the dict is one step of Python's.
    """

    def __init__(self) -> None:
        self._references: dict[ref[Item], bool] = {}

    def add(self, item: Item) -> None:
        """Add an object. Idempotent."""
        references = self._references  # a reference to `self` would be a cycle
        references[ref(item, lambda ended: references.pop(ended, None))] = True

    def discard(self, item: Item) -> bool:
        """Remove an object, and return whether it was there."""
        return self._references.pop(ref(item), False)

    def alive(self) -> list[Item]:
        """Return the objects that exist."""
        found = (reference() for reference in list(self._references))
        return [item for item in found if item is not None]
