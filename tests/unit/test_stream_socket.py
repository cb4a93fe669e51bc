"""What stands in for a stream's socket."""

import errno
import os
import select
import socket
import struct
from array import array
from asyncio.trsock import TransportSocket
from ctypes import c_int
from typing import Any

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


@pytest.mark.parametrize(
    ("level", "option"),
    [
        (socket.IPPROTO_IP, socket.IP_TOS),
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
        (socket.SOL_SOCKET, socket.SO_PRIORITY),
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT),
    ],
)
def test_options_for_the_network_are_kept_without_effect(level: int, option: int) -> None:
    below = StreamSocket(("192.0.2.1", 5))
    assert below.getsockopt(level, option) == 0
    below.setsockopt(level, option, 16)
    assert below.getsockopt(level, option) == 16
    below.setsockopt(level, option, struct.pack("i", 8))
    assert below.getsockopt(level, option) == 8
    assert below.getsockopt(level, option, 4) == struct.pack("i", 8)
    assert below.getsockopt(level, option, 100) == struct.pack("i", 8)
    assert below.getsockopt(level, option, 1) == struct.pack("i", 8)[:1]


@pytest.mark.parametrize(("option", "size"), [(socket.SO_RCVBUF, 100), (socket.SO_SNDBUF, 200)])
def test_the_sizes_of_buffers_are_those_of_the_rings(option: int, size: int) -> None:
    below = StreamSocket(("192.0.2.1", 5), buffer_sizes=(100, 200))
    assert below.getsockopt(socket.SOL_SOCKET, option) == size
    below.setsockopt(socket.SOL_SOCKET, option, 70_000)
    assert below.getsockopt(socket.SOL_SOCKET, option) == size


@pytest.mark.parametrize(
    ("linger", "resets"), [((1, 0), True), ((1, 5), False), ((0, 0), False), ((0, 5), False)]
)
def test_linger_of_no_time_asks_for_a_reset(linger: tuple[int, int], resets: bool) -> None:
    below = StreamSocket(("192.0.2.1", 5))
    for on in (False, True):
        chosen = struct.pack("ii", *(linger if on else (0, 0)))
        if on:
            below.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, chosen)
        assert below._resets_on_close is (resets and on)
        assert below.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == chosen
        assert below.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER) == (linger[0] if on else 0)


@pytest.mark.parametrize(
    ("option", "value"),
    [(socket.SO_LINGER, 1), (socket.SO_LINGER, b"1234"), (socket.SO_KEEPALIVE, b"1")],
)
def test_a_value_that_is_too_short_is_refused(option: int, value: int | bytes) -> None:
    """As by the kernel."""
    with pytest.raises(OSError, match=r"setsockopt.*bytes") as raised:
        StreamSocket(("192.0.2.1", 5)).setsockopt(socket.SOL_SOCKET, option, value)
    assert raised.value.errno == errno.EINVAL


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_a_value_that_is_too_large_is_refused(value: int) -> None:
    with pytest.raises(OverflowError, match="setsockopt"):
        CONNECTED.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, value)


@pytest.mark.parametrize("value", [None, "1", 1.5])
def test_a_value_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="setsockopt"):
        CONNECTED.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, value)


@pytest.mark.parametrize(
    ("level", "option"),
    [
        (socket.SOL_SOCKET, 99),
        (socket.IPPROTO_IP, socket.SO_LINGER),
        (socket.IPPROTO_TCP, socket.TCP_INFO),
        (socket.IPPROTO_TCP, socket.TCP_MAXSEG),
        (socket.IPPROTO_IP, 99),
    ],
)
def test_another_option_is_refused(level: int, option: int) -> None:
    with pytest.raises(OSError, match="no such option") as raised:
        CONNECTED.setsockopt(level, option, 1)
    assert raised.value.errno == errno.ENOPROTOOPT
    with pytest.raises(OSError, match="no such option"):
        CONNECTED.getsockopt(level, option)


@pytest.mark.parametrize("option", [socket.SO_TYPE, socket.SO_ERROR])
def test_an_option_to_be_read_is_not_set(option: int) -> None:
    with pytest.raises(OSError, match="no such option"):
        CONNECTED.setsockopt(socket.SOL_SOCKET, option, 1)


def test_it_has_the_methods_of_asyncios() -> None:
    names = {name for name in vars(TransportSocket) if not name.startswith("_")}
    assert names - {"getsockbyname"} <= set(dir(CONNECTED))  # which no socket has


def test_it_does_not_block() -> None:
    """As asyncio's: it accepts what is so already."""
    below: Any = CONNECTED
    below.setblocking(False)
    below.settimeout(0)
    for name, value in (("setblocking", True), ("settimeout", 1.5), ("settimeout", None)):
        with pytest.raises(ValueError, match="transport sockets"):
            getattr(below, name)(value)
    assert not below.get_inheritable()


@pytest.mark.parametrize(
    ("peer", "name", "arguments", "said"),
    [
        (("192.0.2.2", 6), "shutdown", [socket.SHUT_WR], r"write_eof\(\)"),
        (None, "shutdown", [socket.SHUT_RD], r"the server's close\(\)"),
        (("192.0.2.2", 6), "dup", [], r"os\.dup\(.*\.fileno\(\)\)"),
    ],
)
def test_what_needs_a_socket_is_refused(
    peer: Any, name: str, arguments: list[int], said: str
) -> None:
    with pytest.raises(OSError, match=said) as raised:
        getattr(StreamSocket(("192.0.2.1", 5), peer), name)(*arguments)
    assert raised.value.errno == errno.EOPNOTSUPP


class Seven:
    """A number by its method only."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("value", [array("i", [7]), c_int(7), Seven(), b"\7\0\0\0"])
def test_value_of_an_option_is_what_sockets_take(value: Any) -> None:
    below = StreamSocket(("192.0.2.1", 5))
    below.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, value)
    assert below.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 7


def test_type_of_service_may_be_one_byte() -> None:
    below = StreamSocket(("192.0.2.1", 5))
    below.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, b"\x10")
    assert below.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 16
