"""The process that an object belongs to. A forked child must not use its parent's objects.

A child inherits copies of the Python objects, and the same device descriptors. An object that the
child destroys would be destroyed for its parent, and its parent would not receive an event that the
child takes.
"""

import os
from threading import RLock
from typing import NoReturn

from aiordma._base.errors import ForkError
from aiordma._base.weak_items import WeakItems


class _Here:
    """The number of this process, stored to save each post a system call."""

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.pid = os.getpid()


here: _Here = _Here()


class _Locks:
    """The locks of `reentrant_lock`."""

    def __init__(self) -> None:
        self._all: WeakItems[RLock] = WeakItems()
        os.register_at_fork(after_in_child=self._forked)

    def make(self) -> RLock:
        lock = RLock()
        self._all.add(lock)
        return lock

    def _forked(self) -> None:
        for lock in self._all.alive():
            lock._at_fork_reinit()  # type: ignore[attr-defined] # as the standard library's own


_locks: _Locks = _Locks()


def reentrant_lock() -> RLock:
    """Return a lock for state that finalizers use. The garbage collector runs them at any
    allocation, so also in the thread that holds the lock. A forked child inherits the lock
    unlocked, because it does not have the thread that would release it."""
    return _locks.make()


def forked(process: int, what: str) -> ForkError:
    """Return the error for a child that uses an object of another process."""
    return ForkError(
        f"{what} belongs to process {process}, of which this one, {here.pid}, is a forked child: "
        'open it anew here (or start children by "spawn" or "forkserver", which inherit nothing)'
    )


def require_same_process(process: int, what: object) -> None:
    """Check that an object belongs to this process.

    Args:
        process: the process that made it.
        what: the object, or a text that names it, for the message.

    Raises:
        ForkError: the object belongs to another process.
    """
    if process != here.pid:
        raise forked(process, what if isinstance(what, str) else repr(what))


def never_pickled(what: object) -> NoReturn:
    """`__reduce__` of an object of this process, which can be neither pickled nor copied.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        f"{what!r} cannot be pickled or copied: it belongs to this process; open another one where "
        "it is needed"
    )
