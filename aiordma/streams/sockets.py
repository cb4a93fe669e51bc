"""What stands in for sockets, for programs that ask a transport or a server for them."""

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from aiordma._base.socket_address import SocketAddress

__all__ = ("Readiness", "StreamSocket", "socket_name")


def socket_name(address: SocketAddress) -> Any:
    """Return an address as Python's sockets name it: (host, port), or, for IPv6, (host, port, flow
    information, scope ID)."""
    host, _, scope = address[0].partition("%")
    return (host, address[1], 0, int(scope or 0)) if ":" in host else address


_FIXED: dict[tuple[int, int], int] = {
    (socket.SOL_SOCKET, socket.SO_TYPE): socket.SOCK_STREAM,
    (socket.SOL_SOCKET, socket.SO_ERROR): 0,
}
# What programs set to make TCP faster or to notice a dead peer. A stream sends at once, and
# notices by options of its own (StreamOptions).
_SETTABLE: dict[tuple[int, int], int] = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 0,
    (socket.SOL_SOCKET, socket.SO_RCVBUF): 0,
    (socket.SOL_SOCKET, socket.SO_REUSEADDR): 0,
    (socket.SOL_SOCKET, socket.SO_SNDBUF): 0,
    (socket.IPPROTO_TCP, socket.TCP_CORK): 0,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 0,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 0,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 0,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.IPPROTO_TCP, socket.TCP_QUICKACK): 0,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 0,
}


class Readiness:
    """A descriptor that poll() finds readable while `show` says so.

    Raises:
        OSError: the process has no descriptors left.
    """

    def __init__(self) -> None:
        self.descriptor: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_shown = False

    def show(self, is_readable: bool) -> None:
        """Make the descriptor readable, or not."""
        if is_readable and not self._is_shown:
            os.eventfd_write(self.descriptor, 1)
        elif self._is_shown and not is_readable:
            os.eventfd_read(self.descriptor)
        self._is_shown = is_readable

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class StreamSocket:
    """Stands in for a socket of asyncio's transports and servers (`get_extra_info("socket")`,
    `Server.sockets`), for programs that show its addresses, set its options, or poll it. It
    transfers nothing.

    Attributes:
        family: AF_INET or AF_INET6.
        type: SOCK_STREAM.
        proto: IPPROTO_TCP, as of the stream sockets whose place it takes.
    """

    def __init__(
        self,
        local: SocketAddress,
        peer: SocketAddress | None = None,
        descriptor: Callable[[], int] = lambda: -1,
    ) -> None:
        self._local = local
        self._peer = peer
        self._descriptor = descriptor
        self._options = dict(_SETTABLE)
        self.family: socket.AddressFamily = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
        self.type: socket.SocketKind = socket.SOCK_STREAM
        self.proto: int = socket.IPPROTO_TCP

    def __repr__(self) -> str:
        peer = "" if self._peer is None else f" to {self._peer}"
        return f"<StreamSocket at {self._local}{peer}: no socket, but RDMA>"

    def getsockname(self) -> Any:
        """The local (host, port), or, for IPv6, (host, port, flow information, scope ID).

        Raises: nothing.
        """
        return socket_name(self._local)

    def getpeername(self) -> Any:
        """The peer's address, as of `getsockname`.

        Raises:
            OSError: ENOTCONN: it is a server's.
        """
        if self._peer is None:
            raise OSError(errno.ENOTCONN, f"{self!r} is not connected")
        return socket_name(self._peer)

    def fileno(self) -> int:
        """A descriptor to poll, made at the first call: it is readable while the transport has
        bytes that its protocol has not got, or has ended. Each call brings it up to date, and
        otherwise the event loop does. It cannot be read from. -1: the transport is closed, or this
        is a server's.

        Raises:
            OSError: the process has no descriptors left.
        """
        return self._descriptor()

    def getsockopt(self, level: int, optname: int, buflen: int = 0) -> int:
        """SO_TYPE, SO_ERROR (0), or what was set.

        Args:
            level, optname: as of socket.getsockopt.
            buflen: without effect.

        Raises:
            OSError: ENOPROTOOPT: an option that has no meaning here.
        """
        known = {**_FIXED, **self._options}
        if (level, optname) not in known:
            raise self._unknown("getsockopt", level, optname)
        return known[level, optname]

    def setsockopt(self, level: int, optname: int, value: int, /) -> None:
        """Accept an option that makes TCP send at once, keep connections alive, or have larger
        buffers, without effect: a stream sends at once, and `StreamOptions` has the others.

        Args: as of socket.setsockopt.

        Raises:
            OSError: ENOPROTOOPT: another option.
        """
        if (level, optname) not in self._options:
            raise self._unknown("setsockopt", level, optname)
        self._options[level, optname] = value

    def gettimeout(self) -> float:
        """0.0, as of asyncio's sockets, which do not block.

        Raises: nothing.
        """
        return 0.0

    def _unknown(self, call: str, level: int, option: int) -> OSError:
        return OSError(errno.ENOPROTOOPT, f"{call}({level}, {option}): {self!r} has no such option")
