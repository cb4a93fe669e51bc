"""Detects that the peer of an established connection is dead, where the requests in flight do not:
by probes of an idle connection, and, where the device leaves that to TCP, by TCP's silence."""

from collections.abc import Callable

from aiordma._base.socket_address import SocketAddress
from aiordma._endpoint.keepalive import KEEPALIVE, Keepalive, Probe
from aiordma._endpoint.work_queues import SendQueue
from aiordma._loop.event_loop import EventLoop
from aiordma._native import OpenRequests
from aiordma._runtime.tcp_silence import TcpSilence


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
        self._sends = sends
        self._requests = requests
        self._probe = Probe(sends, is_reserved=is_reserved)
        self._running: list[TcpSilence | Keepalive] = []
        if silence is not None:
            self._running.append(TcpSilence(loop, *silence, self._probe_reads, on_silence))
        if keepalive is not None:
            self._running.append(Keepalive(loop, keepalive, self._probe_idle))

    def cancel(self) -> None:
        """Stop watching. Idempotent."""
        for each in self._running:
            each.stop()

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
