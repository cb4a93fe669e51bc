"""Which process things belong to: a fork's child must not touch what its parent has open.

A child inherits copies of our objects, and descriptors of the very ones of the device. Whatever it
destroyed would be gone for its parent, and what it took from a queue its parent would never see.
"""

import os

from aiordma._base.errors import ForkError

__all__ = ("forked", "here", "require_same_process")


class _Here:
    """This process; asking the system for its number would cost each post a system call."""

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.pid = os.getpid()


here: _Here = _Here()


def forked(process: int, what: str) -> ForkError:
    """Return the error of a child that uses what belongs to another process."""
    return ForkError(
        f"{what} belongs to process {process}, of which this one, {here.pid}, is a forked child: "
        'open it anew here (or start children by "spawn" or "forkserver", which inherit nothing)'
    )


def require_same_process(process: int, what: str) -> None:
    """Do nothing in the process that something belongs to.

    Raises:
        ForkError: this is another one.
    """
    if process != here.pid:
        raise forked(process, what)
