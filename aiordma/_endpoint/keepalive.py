"""Probes of a peer, so that a connection detects that it is dead: the request, and a timer."""

from collections.abc import Callable
from contextlib import suppress

from aiordma._base.enums import WorkRequestOpcode
from aiordma._base.errors import RdmaError
from aiordma._base.ranges import RemoteMemory
from aiordma._endpoint.work_queues import SendQueue
from aiordma._loop.event_loop import EventLoop, Timer
from aiordma._requests.request import WorkRequest
from aiordma.verbs import SendWork

KEEPALIVE = "keepalive (WRITE)"
"""The operation of the requests that a keepalive posts."""


class Probe:
    """A WRITE of zero bytes, which the peer's device must acknowledge (on iWARP, at least its TCP).
    Its failure ends the connection. One is in flight at a time.

    Args:
        sends: the send queue.
        is_reserved: whether the queue pair has an entry for the probe, so that a full queue does
            not prevent it.
    """

    def __init__(self, sends: SendQueue, *, is_reserved: bool) -> None:
        self._sends = sends
        self._is_reserved = is_reserved
        self._request: WorkRequest | None = None

    def post(self, operation: str) -> None:
        """Post the probe, unless it is in flight, or has no entry."""
        if self._request is not None and not self._request.done():
            return
        slots = self._sends.slots
        if not self._is_reserved and slots.free <= 0:
            return
        work = SendWork(operation, int(WorkRequestOpcode.RDMA_WRITE), remote=RemoteMemory(0, 0, 0))
        with suppress(RdmaError):
            self._request = self._sends.submit(work, slot=slots.take_reserved())
            self._request._set_on_done(WorkRequest.exception)


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
