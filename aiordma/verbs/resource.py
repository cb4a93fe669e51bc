"""The life of a verbs object: opened by its constructor, closed once, children first."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from aiordma._base.errors import ClosedError
from aiordma._base.process import forked, here

__all__ = ("Resource",)


def _never() -> bool:
    return False


class Resource:
    """Base of everything that stands for an object in the device or its driver.

    Parents and children hold each other until one of them is closed: whatever the garbage collector
    finds first closes what was made from it before itself, in order. (Parents that knew their
    children weakly would have forgotten them by then: the collector clears weak references before
    it calls finalizers.) Children close by `closing_rank`, then newest first. Closing twice is
    allowed and does nothing. A family that is collected unclosed is closed then, with a
    ResourceWarning.

    A forked child has copies, which it cannot use; closing one there leaves its parent's alone.
    """

    closing_rank = 0
    """Whatever the device works with (queue pairs: 0) closes before what it works on."""

    key: int = 0
    """The C object's address, of those by which events name them."""

    is_left_to_owner: Callable[[], bool]
    """Whether nothing is done when it is collected unclosed. Its owner, collected as well, made it
    for the program: it closes its resources in their order, and warns in the program's terms."""

    def __init__(self, *parents: "Resource") -> None:
        for parent in parents:
            parent.require_open()
        self._closed = False
        self._process = here.pid
        self._children: dict[int, Resource] = {}
        self._parents = parents
        self.is_left_to_owner = parents[0].is_left_to_owner if parents else _never
        for parent in parents:
            parent._children[id(self)] = self

    @property
    def closed(self) -> bool:
        """Whether `close` was called (here, or on a parent)."""
        return self._closed

    def require_open(self) -> None:
        """Do nothing on an open resource.

        Raises:
            ClosedError: it is closed.
            ForkError: this process is a child of the one that opened it.
        """
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed")
        if self._process != here.pid:
            raise forked(self._process, f"this {type(self).__name__}")

    def find(self, key: int) -> "Resource | None":
        """Return what was made from this, or from that, and has the key; None if it is closed."""
        for child in list(self._children.values()):
            found = child if child.key == key else child.find(key)
            if found is not None:
                return found
        return None

    def close(self) -> None:
        """Destroy the object and all that was made from it. Idempotent.

        Raises:
            BusyError, VerbsCallError: posted requests still own a memory region, which stays open;
                or the driver refused. The object counts as closed all the same, and everything else
                that was to be closed has been.
        """
        if self._closed:
            return
        self._closed = True
        if self._process != here.pid:
            return
        children = list(self._children.values())
        # Last in, first out; one that fails does not stop the others.
        with ExitStack() as stack:
            for parent in self._parents:
                stack.callback(parent._children.pop, id(self), None)
            stack.callback(self._destroy)
            for child in sorted(children, key=lambda child: child.closing_rank, reverse=True):
                stack.callback(child.close)

    def _destroy(self) -> None:
        """Give the C object back; called once, with every child closed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._process != here.pid or self.is_left_to_owner():
            return
        try:
            self.close()
        finally:
            # Last, since a filter can make it an exception.
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def _move(self, *parents: "Resource") -> None:
        """Become the child of others, which are open."""
        for parent in self._parents:
            parent._children.pop(id(self), None)
        self._parents = parents
        for parent in parents:
            parent._children[id(self)] = self

    def _abandon(self) -> None:
        """Mark as closed an object whose constructor failed before C made anything."""
        self._closed = True
        for parent in self._parents:
            parent._children.pop(id(self), None)
