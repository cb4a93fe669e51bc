"""Detects dead peers of the kernel's iWARP devices.

siw relies on TCP to detect a dead peer, which takes a quarter of an hour (sysctl
net.ipv4.tcp_retries2). Its sockets belong to the kernel, so aiordma cannot set their options. But
it can query the state of every socket (man sock_diag): whether TCP retransmits, and the time of the
last acknowledgement. So each connection queries its own socket once a second. If TCP has nothing to
retransmit, but the response to a READ is outstanding, the connection sends a probe.
"""

import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from aiordma._base.socket_address import SocketAddress
from aiordma._base.system import system
from aiordma._loop.event_loop import EventLoop, Timer

logger: logging.Logger = logging.getLogger("aiordma")

CHECK_SECONDS = 1.0

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY, of a query and of its reply
_REQUEST = 1  # NLM_F_REQUEST
_INFO = 2  # INET_DIAG_INFO
_ANY_COOKIE = 0xFFFFFFFF  # INET_DIAG_NOCOOKIE
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_QUERY = struct.Struct("=BBBxI")  # inet_diag_req_v2, without the inet_diag_sockid at its end
_PORTS = struct.Struct("!HH")
_REST = struct.Struct("=III")  # interface and cookie of an inet_diag_sockid
_ANSWER_BYTES = 72  # inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # nlattr
_TCP_INFO = struct.Struct("=xxBB52xI")  # of tcp_info: retransmits, probes, last_ack_recv


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The fields of struct tcp_info that are used here (man tcp, TCP_INFO).

    Attributes:
        retransmits: unanswered retransmissions of the oldest data, and unanswered probes of a
            closed window.
        unheard: seconds since the last acknowledgement.
    """

    retransmits: int
    unheard: float


def query_of(local: SocketAddress, peer: SocketAddress) -> bytes:
    """Return the query for the socket between two addresses."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    (ours, _, zone), (theirs, _, _) = local[0].partition("%"), peer[0].partition("%")
    interface = int(zone) if zone.isdecimal() else 0
    body = (
        _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0xFFFFFFFF)
        + _PORTS.pack(local[1], peer[1])
        + socket.inet_pton(family, ours).ljust(16, b"\0")
        + socket.inet_pton(family, theirs).ljust(16, b"\0")
        + _REST.pack(interface, _ANY_COOKIE, _ANY_COOKIE)
    )
    return _HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body


def parse_answer(answer: bytes) -> TcpInfo | None:
    """Decode a reply; None if there is no such socket, or the reply has no tcp_info."""
    if len(answer) < _HEADER.size or _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    at = _HEADER.size + _ANSWER_BYTES
    while at + _ATTRIBUTE.size <= len(answer):
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == _INFO and length >= _ATTRIBUTE.size + _TCP_INFO.size:
            retransmits, probes, unheard = _TCP_INFO.unpack_from(answer, at + _ATTRIBUTE.size)
            return TcpInfo(retransmits + probes, unheard / 1000)
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return None


def tcp_info(local: SocketAddress, peer: SocketAddress) -> TcpInfo | None:
    """Query the kernel for the TCP socket between two addresses; None if there is no such socket,
    or the kernel cannot reply (its module tcp_diag is missing)."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    try:
        with socket.socket(socket.AF_NETLINK, kind, _SOCK_DIAG) as diag:
            diag.send(query_of(local, peer))
            return parse_answer(diag.recv(4096))
    except OSError as error:
        logger.debug("asking for the TCP socket %s to %s: %s", local, peer, error)
        return None


class TcpSilence:
    """Checks once a second whether a connection's peer is dead, until `stop`.

    The peer counts as dead if TCP has been retransmitting without an acknowledgement for `patience`
    seconds. A peer that acknowledges is alive, even if its program does not respond.

    Args:
        loop: the loop that runs the checks.
        addresses: the local address and the peer's.
        patience: seconds.
        probe: called if nothing was received for a second and TCP does not retransmit. It sends a
            probe if a response of the peer is outstanding.
        on_silence: called once, when the peer is dead.
    """

    def __init__(
        self,
        loop: EventLoop,
        addresses: tuple[SocketAddress, SocketAddress],
        patience: float,
        probe: Callable[[], object],
        on_silence: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._addresses = addresses
        self._patience = max(patience, CHECK_SECONDS)
        self._probe = probe
        self._on_silence = on_silence
        self._since: float | None = None
        self._stopped = False
        self._timer: Timer = loop.call_later(CHECK_SECONDS, self._check)

    def stop(self) -> None:
        """Stop checking. Idempotent."""
        self._stopped = True
        self._timer.cancel()

    def _check(self) -> None:
        info = tcp_info(*self._addresses)
        now = system.now()
        if info is None or not info.retransmits:
            self._since = None
            if info is not None and info.unheard >= CHECK_SECONDS:
                self._probe()
        elif self._since is None:
            self._since = now  # the last acknowledgement may be old, if nothing was sent since
        else:
            self._since = max(self._since, now - info.unheard)
        if self._since is not None and now - self._since >= self._patience:
            self._stopped = True
            self._on_silence()
        if not self._stopped:  # the probe may have stopped it, too
            self._timer = self._loop.call_later(CHECK_SECONDS, self._check)
