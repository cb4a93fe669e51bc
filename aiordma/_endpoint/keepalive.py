"""Calls a probe at fixed intervals, so that an idle connection detects a dead peer."""

from collections.abc import Callable

from aiordma._loop.event_loop import EventLoop, Timer

__all__ = ("Keepalive",)


class Keepalive:
    """Calls a function every so many seconds, until `stop`.

    Args:
        loop: the loop that runs the timer.
        seconds: the interval.
        probe: sends a probe if nothing else would detect a dead peer.
    """

    def __init__(self, loop: EventLoop, seconds: float, probe: Callable[[], object]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._probe = probe
        self._stopped = False
        self._timer: Timer = loop.call_later(seconds, self._expire)

    def stop(self) -> None:
        """Send no more probes. Idempotent."""
        self._stopped = True
        self._timer.cancel()

    def _expire(self) -> None:
        self._probe()
        if not self._stopped:  # the probe may have ended the connection
            self._timer = self._loop.call_later(self._seconds, self._expire)
