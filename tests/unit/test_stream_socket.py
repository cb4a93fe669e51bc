"""What stands in for a stream's socket."""

import errno
import os
import select
import socket

import pytest

from aiordma.streams import StreamSocket
from aiordma.streams.sockets import Readiness

CONNECTED = StreamSocket(("192.0.2.1", 5), ("192.0.2.2", 6))


def test_the_addresses_are_the_streams() -> None:
    assert CONNECTED.getsockname() == ("192.0.2.1", 5)
    assert CONNECTED.getpeername() == ("192.0.2.2", 6)
    assert "192.0.2.2" in repr(CONNECTED)
    assert CONNECTED.family == socket.AF_INET
    assert StreamSocket(("::1", 5)).family == socket.AF_INET6


def test_a_servers_socket_has_no_peer() -> None:
    with pytest.raises(OSError, match="not connected") as raised:
        StreamSocket(("192.0.2.1", 5)).getpeername()
    assert raised.value.errno == errno.ENOTCONN


def is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def test_readiness_is_what_poll_finds() -> None:
    readiness = Readiness()
    for shown in (False, True, True, False, False, True):
        readiness.show(shown)
        assert is_readable(readiness.descriptor) is shown
    descriptor = readiness.descriptor
    del readiness
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_nothing_can_be_transferred() -> None:
    assert CONNECTED.fileno() == -1
    assert CONNECTED.gettimeout() == 0
    assert not any(hasattr(CONNECTED, name) for name in ("send", "recv", "accept", "close"))


def test_options_for_tcp_are_kept_without_effect() -> None:
    below = StreamSocket(("192.0.2.1", 5))
    assert below.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    below.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    assert below.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert CONNECTED.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    assert below.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == below.type
    assert below.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


@pytest.mark.parametrize("level", [socket.SOL_SOCKET, socket.IPPROTO_IP])
@pytest.mark.parametrize("option", [socket.SO_LINGER, 99])
def test_another_option_is_refused(level: int, option: int) -> None:
    with pytest.raises(OSError, match="no such option") as raised:
        CONNECTED.setsockopt(level, option, 1)
    assert raised.value.errno == errno.ENOPROTOOPT
    with pytest.raises(OSError, match="no such option"):
        CONNECTED.getsockopt(level, option)
