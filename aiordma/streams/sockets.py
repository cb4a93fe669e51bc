"""What stands in for sockets, for programs that ask a transport or a server for them."""

import errno
import os
import socket
import struct
from collections.abc import Callable
from operator import index
from typing import Any, NoReturn, SupportsIndex, cast, overload

from aiordma._base.arguments import Buffer, wrong_type
from aiordma._base.socket_address import SocketAddress

__all__ = ("Readiness", "StreamSocket", "socket_name")


def socket_name(address: SocketAddress) -> Any:
    """Return an address as Python's sockets name it: (host, port), or, for IPv6, (host, port, flow
    information, scope ID)."""
    host, _, scope = address[0].partition("%")
    return (host, address[1], 0, int(scope or 0)) if ":" in host else address


# What programs set to make TCP faster, to notice a dead peer, or to have their packets preferred. A
# stream sends at once, and notices by options of its own (StreamOptions), of which `tos` is one.
_SETTABLE: dict[tuple[int, int], int] = {
    (socket.IPPROTO_IP, socket.IP_TOS): 0,
    (socket.IPPROTO_IPV6, socket.IPV6_TCLASS): 0,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 0,
    (socket.SOL_SOCKET, socket.SO_PRIORITY): 0,
    (socket.SOL_SOCKET, socket.SO_REUSEADDR): 0,
    (socket.IPPROTO_TCP, socket.TCP_CORK): 0,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 0,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 0,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 0,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT): 0,
    (socket.IPPROTO_TCP, socket.TCP_QUICKACK): 0,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 0,
}
_LINGER = (socket.SOL_SOCKET, socket.SO_LINGER)
_BUFFERS = ((socket.SOL_SOCKET, socket.SO_RCVBUF), (socket.SOL_SOCKET, socket.SO_SNDBUF))
_TYPE_OF_SERVICE = (socket.IPPROTO_IP, socket.IP_TOS)
_INT = struct.Struct("i")
_LINGERS = struct.Struct("ii")
"""Whether to linger, and for how many seconds."""


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

    Args:
        local: the local address.
        peer: the peer's address; None: it is a server's socket.
        descriptor: returns the descriptor to poll.
        buffer_sizes: the bytes that the peer can send before this side reads them, and those that
            this side can send before the peer's device has them.

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
        buffer_sizes: tuple[int, int] = (0, 0),
    ) -> None:
        self._local = local
        self._peer = peer
        self._descriptor = descriptor
        self._options = dict(_SETTABLE)
        self._linger = (0, 0)
        self.family: socket.AddressFamily = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
        self.type: socket.SocketKind = socket.SOCK_STREAM
        self.proto: int = socket.IPPROTO_TCP
        self._fixed = {
            (socket.SOL_SOCKET, socket.SO_TYPE): int(self.type),
            (socket.SOL_SOCKET, socket.SO_ERROR): 0,
            **dict(zip(_BUFFERS, buffer_sizes, strict=True)),
        }

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

    @overload
    def getsockopt(self, level: int, optname: int) -> int: ...

    @overload
    def getsockopt(self, level: int, optname: int, buflen: int) -> bytes: ...

    def getsockopt(self, level: int, optname: int, buflen: int = 0) -> int | bytes:
        """SO_TYPE, SO_ERROR (0), SO_RCVBUF and SO_SNDBUF (the stream's buffers), or what was set.

        Args: as of socket.getsockopt.

        Raises:
            OSError: ENOPROTOOPT: an option that has no meaning here.
        """
        if (level, optname) == _LINGER:
            packed = _LINGERS.pack(*self._linger)
        else:
            known = {**self._fixed, **self._options}
            if (level, optname) not in known:
                raise self._unknown("getsockopt", level, optname)
            packed = _INT.pack(known[level, optname])
        number: int = _INT.unpack_from(packed)[0]
        return packed[:buflen] if buflen else number

    def setsockopt(self, level: int, optname: int, value: Buffer | SupportsIndex, /) -> None:
        """Accept an option that makes TCP send at once, keeps connections alive, prefers packets,
        or sets the buffers' size, without effect: a stream sends at once, and `StreamOptions` has
        the others. SO_LINGER with a time of 0 has its usual effect: after a close or an abort, the
        peer gets an error in place of an end of the data. Another time has none.

        Args: as of socket.setsockopt.

        Raises:
            OSError: ENOPROTOOPT: another option. EINVAL: the value has too few bytes.
            TypeError, OverflowError: the value is neither an int of C nor bytes.
        """
        option = level, optname
        if not (option in self._options or option in _BUFFERS or option == _LINGER):
            raise self._unknown("setsockopt", level, optname)
        form = _LINGERS if option == _LINGER else _INT
        try:
            value = _INT.pack(index(cast(SupportsIndex, value)))
        except struct.error:
            raise OverflowError(f"setsockopt({level}, {optname}): {value} is no C int") from None
        except TypeError:
            try:
                value = bytes(memoryview(cast(Buffer, value)).cast("B"))
            except TypeError:
                raise wrong_type(value, "value", "an int or bytes", "setsockopt") from None
        if len(value) == 1 and option == _TYPE_OF_SERVICE:
            value = _INT.pack(value[0])  # Linux takes one byte, too
        if len(value) < form.size:
            raise OSError(
                errno.EINVAL,
                f"setsockopt({level}, {optname}): the value has {len(value)} bytes, and the option "
                f"{form.size}",
            )
        first, *rest = form.unpack_from(value)
        if option == _LINGER:
            self._linger = first, rest[0]
        elif option in self._options:
            self._options[option] = first

    @property
    def _resets_on_close(self) -> bool:
        """Whether a close is to reset the stream."""
        is_on, seconds = self._linger
        return bool(is_on) and not seconds

    def setblocking(self, flag: bool) -> None:
        """Accept False, as asyncio's sockets, which do not block.

        Args:
            flag: as of socket.setblocking.

        Raises:
            ValueError: another value.
        """
        if flag:
            raise ValueError("setblocking(): transport sockets cannot be blocking")

    def settimeout(self, value: float | None) -> None:
        """Accept 0, as asyncio's sockets, which do not block.

        Args:
            value: as of socket.settimeout.

        Raises:
            ValueError: another value.
        """
        if value != 0:
            raise ValueError("settimeout(): only 0 timeout is allowed on transport sockets")

    def gettimeout(self) -> float:
        """0.0, as of asyncio's sockets, which do not block.

        Raises: nothing.
        """
        return 0.0

    def get_inheritable(self) -> bool:
        """False: programs that this one starts do not inherit the descriptor.

        Raises: nothing.
        """
        return False

    def dup(self) -> NoReturn:
        """Refused: there is no socket.

        Raises:
            OSError: EOPNOTSUPP.
        """
        raise self._unsupported("dup()", "for a descriptor to poll, use os.dup(<this>.fileno())")

    def shutdown(self, how: int) -> NoReturn:
        """Refused: the transport, or the server, ends the stream.

        Args:
            how: as of socket.shutdown.

        Raises:
            OSError: EOPNOTSUPP.
        """
        instead = "use the transport's write_eof() to end the data, or close(), or abort()"
        if self._peer is None:
            instead = "use the server's close()"
        raise self._unsupported(f"shutdown({how})", instead)

    def _unsupported(self, call: str, instead: str) -> OSError:
        return OSError(errno.EOPNOTSUPP, f"{call}: {self!r}: {instead}")

    def _unknown(self, call: str, level: int, option: int) -> OSError:
        return OSError(errno.ENOPROTOOPT, f"{call}({level}, {option}): {self!r} has no such option")
