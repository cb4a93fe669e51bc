"""Detects that the peer of an established connection is dead, where the requests in flight do not:
by probes of an idle connection, and, where the device leaves that to TCP, by TCP's silence."""

from collections.abc import Callable
from contextlib import suppress

from aiordma._base.enums import WorkRequestOpcode
from aiordma._base.errors import RdmaError
from aiordma._base.ranges import RemoteMemory
from aiordma._base.socket_address import SocketAddress
from aiordma._endpoint.work_queues import SendQueue
from aiordma._loop.event_loop import EventLoop, Timer
from aiordma._native import OpenRequests
from aiordma._requests.request import WorkRequest
from aiordma._runtime.tcp_silence import TcpSilence
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


class PeerWatch:
    """Watches the peer of one connection, until `cancel`.

    Args:
        loop: the connection's event loop.
        sends: the send queue, for the probes. A probe that fails ends the connection.
        requests: the connection's open requests.
        is_reserved: whether the queue pair has an entry for the probe.
        keepalive: seconds between the probes of an idle connection; None: no probes.
        silence: the local address, the peer's, and the seconds after which TCP's silence means that
            the peer is dead. None: the device detects that.
        on_silence: called once, when the peer is dead by TCP's silence.
    """

    def __init__(
        self,
        loop: EventLoop,
        sends: SendQueue,
        requests: OpenRequests,
        *,
        is_reserved: bool,
        keepalive: float | None,
        silence: tuple[tuple[SocketAddress, SocketAddress], float] | None,
        on_silence: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._sends = sends
        self._requests = requests
        self._probe = Probe(sends, is_reserved=is_reserved)
        self._keepalive = keepalive
        self._silence = silence and TcpSilence(loop, *silence, self._probe_reads, on_silence)
        self._timer: Timer | None = None
        self._set_timer()

    def cancel(self) -> None:
        """Stop watching. Idempotent."""
        self._keepalive = None
        if self._timer is not None:
            self._timer.cancel()
        if self._silence is not None:
            self._silence.stop()

    def _set_timer(self) -> None:
        if self._keepalive is not None:
            self._timer = self._loop.call_later(self._keepalive, self._probe_idle)

    def _probe_reads(self) -> None:
        """Send a probe if a request on the send queue is outstanding."""
        if self._sends.is_in_use:
            self._probe.post("WRITE")

    def _probe_idle(self) -> None:
        """Send a probe if no request on the send queue is outstanding: the device detects a dead
        peer by the others. A request that is not posted yet has a slot, too."""
        if not self._sends.is_in_use or not any(
            request.wr_id and not request.is_receive for request in self._requests
        ):
            self._probe.post(KEEPALIVE)
        self._set_timer()  # unless the probe has ended the connection
