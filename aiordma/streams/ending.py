"""The end of a stream in the background: a callback closes its connection."""

from collections.abc import Callable
from typing import Protocol

from aiordma._connection.connection import Connection
from aiordma._loop.event_loop import Timer

__all__ = ("ABORT_SECONDS", "ClosesOnceDrained", "Drains", "close_once_drained")

ABORT_SECONDS = 5.0
"""The longest time for which a connection outlives an abort or the end of its event loop, however
long a close may wait."""


class Drains(Protocol):
    """What knows when the peer's device has everything; an Rsocket, for instance. See there."""

    @property
    def close_timeout(self) -> float:
        """How many seconds a close waits until the peer's device has everything."""

    def notify_drained(self, callback: Callable[[], object], /) -> bool:
        """Call the callback, once or several times, when the peer's device has everything that was
        written, or at the end. Return False, and do nothing, if that is so now."""


class ClosesOnceDrained:
    """Closes a connection in the background, within a limit. See Above."""

    _is_ending: bool = True

    def __init__(self, connection: Connection, channel: Drains) -> None:
        endpoint = connection._endpoint
        self._held: list[Connection] = [connection]  # else it would be collected, and closed, now
        most = min(channel.close_timeout, ABORT_SECONDS)
        self._timer: Timer = endpoint.loop.call_later(most, self.close)
        endpoint.teardown.above = self

    def close(self) -> None:
        """Close the connection now. Idempotent."""
        self._timer.cancel()
        while self._held:
            self._held.pop()._endpoint.close()

    def _end_soon(self) -> None:
        pass


def close_once_drained(connection: Connection, channel: Drains) -> None:
    """Close a connection as soon as the peer's device has everything that was written, or after
    `close_timeout` seconds, at most ABORT_SECONDS."""
    closing = ClosesOnceDrained(connection, channel)
    if not channel.notify_drained(closing.close):
        closing.close()
