"""Resource: the base class of verbs objects, which close after their children."""

import errno
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from aiordma._base.call_all import call_all
from aiordma._base.errors import BusyError, ClosedError, VerbsCallError, detached
from aiordma._base.process import forked, here
from aiordma._base.system import system
from aiordma._loop.event_loop import runs_event_loop
from aiordma._native import leak

__all__ = ("Resource", "is_busy")

logger: logging.Logger = logging.getLogger("aiordma")

LONGEST_CLOSE = 20.0
"""Seconds after the beginning of a close for which another thread's close of the object, or of a
parent, waits at most. rxe can take 12 s to destroy a queue pair."""

_TURN_SECONDS = 0.002
"""Seconds between two checks whether another thread's close has returned."""


def is_busy(error: BaseException) -> bool:
    """Return whether a close failed because the object is in use, so that it can be repeated."""
    if isinstance(error, VerbsCallError):
        return error.errno == errno.EBUSY
    return isinstance(error, BusyError)


def _never() -> bool:
    return False


class Resource:
    """Base class of objects in the device or its driver.

    Parents and children hold strong references to each other until one of them is closed. So the
    first object that the garbage collector finalizes closes its children before itself, in order.
    (Weak references to children would be lost by then, because the collector clears weak references
    before it calls finalizers.) Children close by `_closing_rank`, then newest first. The close of
    a closed object does nothing. Objects that are collected unclosed are then closed, with a
    ResourceWarning.

    If the driver refuses to destroy an object because it is in use (EBUSY), the object stays open,
    and the close can be repeated. After any other failure, the device may use the object and its
    memory forever: the object leaks. It is closed, but it stays for the life of the process, with
    all that it refers to. Every further close raises the same error, and so does every close of an
    object that it was created on.

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

    _can_be_in_use = False
    """Whether `_require_closable` can raise."""

    _process: int
    """The process that made the object."""

    _closed: bool
    """Whether the object cannot be used any more."""

    key: int = 0
    """The C object's address, for objects that events refer to."""

    pointer: Any = None
    """The C object. None until the constructor has made it: the close then destroys nothing."""

    _is_gone: bool = False
    """Whether the C object does not exist any more."""

    _refusal: BaseException | None = None
    """The failure because of which the object leaks."""

    _closing_in: int = 0
    """The thread that closes the object, or has tried to, last."""

    _closing_since: float = 0.0
    """When that thread has begun, by the monotonic clock."""

    _is_left_to_owner: Callable[[], bool]
    """Whether the finalizer does nothing. This is so if an object made by aiordma owns the
    resource, and is collected as well. The owner closes its resources in order, and its warning
    names the program's objects."""

    def __init__(self, *parents: "Resource") -> None:
        pid = here.pid
        for parent in parents:
            if parent._closed or parent._process != pid:
                parent._require_open()
        self._process = pid
        self._children: dict[int, Resource] = {}
        self._parents = parents
        self._is_left_to_owner = parents[0]._is_left_to_owner if parents else _never
        self._closed = False
        for parent in parents:
            parent._children[id(self)] = self

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
        object, wait for that, and if the object is in use there, try again here.

        Raises:
            BusyError: posted requests or bound windows still use a memory region, or another thread
                is closing an object for long (on an event loop's thread: at all, except for a
                memory region). That object stays open, and so does every object that it was created
                on, which includes this object: close it again later. All other objects are closed.
            VerbsCallError: the driver refused to destroy an object. EBUSY: as BusyError. Otherwise,
                the object and all that it was created on stay for the life of the process, and
                every further close raises this error. All other objects are closed.
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
        if self._can_be_in_use and not self._closed:
            self._require_closable()
        thread, since = get_ident(), system.now()
        if self._closed:
            if self._process != here.pid:
                return True
            if self._refusal is not None:
                raise detached(self._refusal)
            return self._is_gone
        # Without a call in between, at which another thread could run.
        self._closing_in = thread
        self._closing_since = since
        self._closed = True
        if self._process != here.pid:
            return True
        try:
            if self._children:
                self._close_children()
        except BaseException:
            self._closed = False
            raise
        try:
            if self.pointer is not None:
                self._destroy()
        except BaseException as error:
            if is_busy(error):
                self._closed = False
            else:
                leak(self)
                self._refusal = detached(error)
            raise
        self._is_gone = True  # only now: another thread's close waits for that
        for parent in self._parents:
            parent._children.pop(id(self), None)
        return True

    def _close_children(self) -> None:
        # Of each rank, last in, first out. A child that cannot be closed does not stop the others.
        children = reversed(list(self._children.values()))
        ranked = sorted(children, key=lambda child: child._closing_rank)
        call_all([child._close_before_parent for child in ranked])

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
            or system.now() > self._closing_since + LONGEST_CLOSE
        ):
            raise BusyError(
                f"{self!r} is being closed by another thread, or by a caller of this function: "
                "repeat the call later"
            )
        time.sleep(_TURN_SECONDS)

    def _destroy(self) -> None:
        """Destroy the C object, after every child was closed. Called again only if it raised an
        error that `is_busy`."""
        raise NotImplementedError

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
        except Exception as error:
            leak(self)
            logger.error("%r was collected unclosed, and cannot be destroyed: %s", self, error)
        else:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def _disown(self) -> None:
        """Count no more posted requests that use memory regions. The garbage collector has found
        the regions together with the requests and their queue pair."""
        for child in list(self._children.values()):
            child._disown()

    def _move(self, *parents: "Resource") -> None:
        """Become the child of other parents, which are open."""
        before, self._parents = self._parents, parents
        for parent in parents:
            parent._children[id(self)] = self
        for parent in before:
            if parent not in parents:
                parent._children.pop(id(self), None)

    def _give_up(self) -> None:
        """End a constructor that raises: destroy the C object, if it exists."""
        with suppress(Exception):
            self.close()
