"""The end of a stream in the background: a callback closes its connection."""

import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from aiordma._connection.connection import Connection

__all__ = ("ABORT_SECONDS", "Drains", "call_weakly", "close_once_drained")

ABORT_SECONDS = 5.0
"""The longest time for which a connection outlives an abort or the end of its event loop, however
long a close may wait."""

Result = TypeVar("Result")


class Drains(Protocol):
    """What knows when the peer's device has everything; an Rsocket, for instance. See there."""

    @property
    def close_timeout(self) -> float:
        """How many seconds a close waits until the peer's device has everything."""

    def notify_drained(self, callback: Callable[[], object], /) -> bool:
        """Call the callback, once or several times, when the peer's device has everything that was
        written, or at the end. Return False, and do nothing, if that is so now."""


def call_weakly(method: Callable[[], Result], gone: Result) -> Callable[[], Result]:
    """Return a function that calls a method, or returns `gone` once its object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> Result:
        found = reference()
        return gone if found is None else found()

    return call


def close_once_drained(connection: Connection, channel: Drains) -> None:
    """Close a connection as soon as the peer's device has everything that was written, or after
    `close_timeout` seconds, at most ABORT_SECONDS."""
    held = [connection]  # without this, it would be collected, and closed, now

    def close() -> None:
        timer.cancel()
        while held:
            held.pop()._endpoint.close()

    most = min(channel.close_timeout, ABORT_SECONDS)
    timer = connection._endpoint.loop.call_later(most, close)
    if not channel.notify_drained(close):
        close()
