"""Resource: the base class of verbs objects, which close after their children."""

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from aiordma._base.errors import (
    BusyError,
    ClosedError,
    VerbsCallError,
    check_pointer,
    check_positive_errno,
)
from aiordma._base.process import forked, here
from aiordma._base.provider import Provider
from aiordma._loop.event_loop import runs_event_loop
from aiordma._native import ffi, lib

__all__ = ("Resource",)

LONGEST_CLOSE = 20.0
"""Seconds after the beginning of a close for which another thread's close of the object, or of a
parent, waits at most. rxe can take 12 s to destroy a queue pair."""

_TURN_SECONDS = 0.002
"""Seconds between two checks whether another thread's close has returned."""

_CDATA = type(ffi.NULL)


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


class Resource:
    """Base class of objects in the device or its driver.

    Parents and children hold strong references to each other until one of them is closed. So the
    first object that the garbage collector finalizes closes its children before itself, in order.
    (Weak references to children would be lost by then, because the collector clears weak references
    before it calls finalizers.) Children close by `_closing_rank`, then newest first. The close of
    a closed object does nothing. An object that the driver refuses to destroy stays open, and so
    does every object that it was created on: the device may still use them. Objects that are
    collected unclosed are then closed, with a ResourceWarning.

    Threads may close objects at the same time. A close waits for another thread that is destroying
    the object, or one of its children, or it raises: once it has returned, the object is gone.

    A forked child inherits copies that it cannot use. Closing a copy leaves the parent's object
    alone.
    """

    _closing_rank = 0
    """Children close in the order of their rank. Queue pairs have 0, so that they close before the
    objects that they use."""

    _closes_at_once = False
    """Whether an event loop's thread may wait for the call that destroys the object, also if
    another thread makes it."""

    key: int = 0
    """The C object's address, for objects that events refer to."""

    pointer: Any = None
    """The C object. None until the constructor has made it: an interrupt within the constructor
    leaves a child without one, and its close destroys nothing."""

    _made: Any = None
    """Where C has stored the pointer: there can be no memory for `pointer` after the call. None
    before the call."""

    _is_refused: bool = False
    """Whether the driver has refused to destroy the C object, or there was no memory to ask it. The
    C object still exists."""

    _was_asked: bool = False
    """Whether the driver has answered the call that destroys the C object."""

    _is_gone: bool = False
    """Whether the C object does not exist any more."""

    _closing_in: int = 0
    """The thread that closes the object, or has tried to, last."""

    _closing_since: float = 0.0
    """When that thread has begun, by the monotonic clock."""

    _on_destroyed: Callable[[], object] = staticmethod(_nothing)
    """Called once the driver has destroyed the C object, in the thread that closes it."""

    _is_left_to_owner: Callable[[], bool]
    """Whether the finalizer does nothing. This is so if an object made by aiordma owns the
    resource, and is collected as well. The owner closes its resources in order, and its warning
    names the program's objects."""

    def __init__(self, *parents: "Resource") -> None:
        for parent in parents:
            parent._require_open()
        self._process = here.pid
        self._children: dict[int, Resource] = {}
        self._parents = parents
        self._is_left_to_owner = parents[0]._is_left_to_owner if parents else _never
        self._made = None  # it needs no memory to replace these
        self._closing_in = 0
        self._closing_since = 0.0
        self._closed = False
        try:
            for parent in parents:
                parent._children[id(self)] = self
        except BaseException:
            self._abandon()  # no memory
            raise

    @property
    def closed(self) -> bool:
        """Whether the object, or one of its parents, was closed."""
        return self._closed

    def _require_open(self) -> None:
        """Check that the object is open.

        Raises:
            ClosedError: the object is closed.
            ForkError: this process is a forked child of the process that opened it.
        """
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} is closed")
        if self._process != here.pid:
            raise forked(self._process, f"this {type(self).__name__}")

    def _find(self, key: int) -> "Resource | None":
        """Return the descendant of this object that has the key; None if it is closed."""
        for child in list(self._children.values()):
            found = child if child.key == key and not child._closed else child._find(key)
            if found is not None:
                return found
        return None

    def close(self) -> None:
        """Destroy the object and all of its children. Idempotent. If another thread is closing the
        object, wait for that, and if the driver refuses there, try again here.

        Raises:
            BusyError: posted requests or bound windows still use a memory region, or another thread
                is closing an object for long (on an event loop's thread: at all, except for a
                memory region). That object stays open, and so does every object that it was created
                on, which includes this object: close it again later. All other objects are closed.
            VerbsCallError: the driver refused to destroy an object. It stays open, and so does
                every object that it was created on: close it again later. All others are closed.
        """
        while not self._close_once():
            if self._closing_in == get_ident():
                return  # the destruction calls a function that calls this
            self._await_turn()

    def _close_before_parent(self) -> None:
        """Close, so that the object is gone.

        Raises:
            as `close`.
            BusyError: the destruction of this object calls a function that closes the parent.
        """
        while not self._close_once():
            self._await_turn()

    def _close_once(self) -> bool:
        """Close, unless the object is being closed: return whether it is gone."""
        if not self._closed:
            self._require_closable()
        thread, since = get_ident(), time.monotonic()
        if self._closed:
            return self._is_gone or self._process != here.pid
        # Without a call in between, at which another thread could run.
        self._closing_in = thread
        self._closing_since = since
        self._closed = True
        if self._process != here.pid:
            return True
        try:
            children = list(self._children.values())
            # Last in, first out. A callback that fails does not stop the others.
            with ExitStack() as stack:
                stack.callback(self._finish_closing, children)
                for child in sorted(children, key=lambda child: child._closing_rank, reverse=True):
                    stack.callback(child._close_before_parent)
        finally:
            if not self._is_gone:
                self._closed = False
        return True

    def _require_closable(self) -> None:
        """Check that the object may be closed now. Called before its children are closed.

        Raises:
            BusyError: it may not.
        """

    def _await_turn(self) -> None:
        """Pause before the next attempt to close an object that is being closed.

        Raises:
            BusyError: that takes too long, or this thread must not wait for it.
        """
        must_not_wait = runs_event_loop() and not self._closes_at_once
        if (
            self._closing_in == get_ident()
            or must_not_wait
            or time.monotonic() > self._closing_since + LONGEST_CLOSE
        ):
            raise BusyError(
                f"{self!r} is being closed by another thread, or by a caller of this function: "
                "repeat the call later"
            )
        time.sleep(_TURN_SECONDS)

    def _finish_closing(self, children: "list[Resource]") -> None:
        """Destroy the C object, unless a child exists: the child still needs its parent."""
        if not all(child._is_gone for child in children):
            return
        self._is_refused = self._was_asked = self._is_gone = False
        notify, self._on_destroyed = self._on_destroyed, _nothing
        try:
            if self.pointer is None and self._made is not None:
                self.pointer = self._made[0] or None
            if self.pointer is not None:
                self._destroy()
        except (MemoryError, SystemError):  # a call in C can lose its MemoryError
            self._is_refused = self._is_refused or not self._was_asked
            raise
        finally:
            if self._is_refused:
                self._on_destroyed = notify
            else:
                try:
                    notify()
                finally:
                    self._is_gone = True  # only now: another thread's close waits for that
                    for parent in self._parents:
                        parent._children.pop(id(self), None)

    def _destroy(self) -> None:
        """Destroy the C object, and pass the result to `_check_destroyed`. This is called after
        every child was closed, and again if the driver refused."""
        raise NotImplementedError

    def _check_destroyed(self, result: int, call: str) -> None:
        """Check the result of the call that destroys the C object: 0, or a positive errno.

        Raises:
            VerbsCallError: the driver refused. The C object exists, and so this object stays open.
        """
        self._was_asked = True
        if result:
            self._is_refused = True  # first: without memory for the error, it still exists
            check_positive_errno(result, call)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BusyError:
            # The block's own error, a cancellation for instance, counts more if another thread is
            # closing the object.
            if kind is None or not self._closed:
                raise

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or self._process != here.pid or self._is_left_to_owner():
            return
        try:
            self._disown()
            self.close()
        finally:
            # Last, because a filter can turn the warning into an exception.
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def _disown(self) -> None:
        """Count no more posted requests that use memory regions. The garbage collector has found
        the regions together with the requests and their queue pair."""
        for child in list(self._children.values()):
            child._disown()

    def _move(self, *parents: "Resource") -> None:
        """Become the child of other parents, which are open. Without memory, this stays the child
        of the earlier ones, and can have become the child of the others, too."""
        key, before = id(self), self._parents
        for parent in parents:
            parent._children[key] = self
        self._parents = parents
        for parent in before:
            if parent not in parents:
                parent._children.pop(key, None)

    def _create(
        self,
        kind: str,
        provider: Provider,
        slot: str,
        *arguments: Any,
        call: str,
        hint: str | None = None,
    ) -> Any:
        """Create the C object. If this, or anything behind it, raises, the constructor has to
        `_give_up`.

        Args:
            kind: the C type of the object.
            provider, slot: the function that creates it.
            arguments: the function's arguments.
            call, hint: as of `check_pointer`.

        Returns:
            the pointer, for `pointer`.

        Raises:
            VerbsCallError: the driver refused.
        """
        function = getattr(provider, slot)
        self._made = made = ffi.new(f"{kind} **")
        if isinstance(function, _CDATA):
            getattr(lib, f"aiordma_make_{slot}")(made, provider.table, *arguments)
            return check_pointer(made[0], call, hint)
        pointer = made[0] = function(*arguments)  # replaced by a test
        return check_pointer(pointer, call, hint)

    def _give_up(self) -> None:
        """End a constructor that raises: destroy the C object, if it exists. If this is not
        possible now, it is destroyed with one of the parents."""
        if self._made is None and self.pointer is None:
            self._abandon()
            return
        # Without `suppress`, which takes memory.
        try:  # noqa: SIM105
            self.close()
        except (MemoryError, SystemError, VerbsCallError, BusyError):
            pass

    def _abandon(self) -> None:
        """Mark the object as closed, because its constructor failed before a C object existed."""
        self._closed = self._is_gone = True
        for parent in self._parents:
            parent._children.pop(id(self), None)
