"""Socket addresses: what Python says and what C reads are the same, and bad input is refused."""

import ctypes
import ipaddress
import socket
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma._base.socket_address import pack_address, unpack_address

ports = st.integers(min_value=0, max_value=0xFFFF)
scopes = st.integers(min_value=1, max_value=2**32 - 1)
LOOPBACK = socket.if_nametoindex("lo")


@given(st.ip_addresses(v=4), ports)
def test_ipv4_comes_back(address: ipaddress.IPv4Address, port: int) -> None:
    packed = pack_address(str(address), port)
    assert len(packed) == 16
    assert unpack_address(packed) == (str(address), port)


@given(st.ip_addresses(v=6), ports)
@example(ipaddress.IPv6Address("::"), 0)
@example(ipaddress.IPv6Address("::ffff:192.0.2.1"), 7471)
def test_ipv6_comes_back(address: ipaddress.IPv6Address, port: int) -> None:
    packed = pack_address(str(address), port)
    assert len(packed) == 28
    unpacked = unpack_address(packed)
    assert unpacked is not None
    host, back = unpacked
    assert (ipaddress.IPv6Address(host), back) == (address, port)
    assert "%" not in host


@given(st.ip_addresses(v=6), ports, scopes)
def test_a_scope_comes_back(address: ipaddress.IPv6Address, port: int, scope: int) -> None:
    unpacked = unpack_address(pack_address(f"{address}%{scope}", port))
    assert unpacked is not None
    host, _, back = unpacked[0].partition("%")
    assert (ipaddress.IPv6Address(host), int(back), unpacked[1]) == (address, scope, port)


def test_a_scope_may_be_an_interface_name() -> None:
    assert unpack_address(pack_address("fe80::1%lo", 7471)) == (f"fe80::1%{LOOPBACK}", 7471)


def test_an_ipv4_address_has_c_layout() -> None:
    # struct sockaddr_in: family in native order, port and address in network order, 8 zeros.
    packed = pack_address("192.0.2.1", 7471)
    assert packed == struct.pack("=H", socket.AF_INET) + bytes.fromhex("1d2f c0000201") + bytes(8)


def test_an_ipv6_address_has_c_layout() -> None:
    packed = pack_address("fe80::1%3", 7471)
    address = socket.inet_pton(socket.AF_INET6, "fe80::1")
    assert packed == (
        struct.pack("=H", socket.AF_INET6)
        + bytes.fromhex("1d2f")
        + bytes(4)
        + address
        + struct.pack("=I", 3)
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_takes_it(host: str) -> None:
    # bind(2) by the C library itself, on exactly these bytes.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        packed = pack_address(host, 0)
        listening.bind((host, 0))
    with socket.socket(family) as ours:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.bind(ours.fileno(), packed, len(packed)) == 0
        assert ours.getsockname()[0] == host


@given(st.binary(min_size=28, max_size=28), st.sampled_from([0, 1, socket.AF_INET6 + 1, 27]))
def test_another_family_is_no_address(raw: bytes, family: int) -> None:
    assert unpack_address(struct.pack("=H", family) + raw[2:]) is None


@given(st.binary(min_size=26, max_size=26))
def test_bytes_behind_an_ipv4_address_do_not_matter(rest: bytes) -> None:
    # librdmacm's accessors return a sockaddr_storage.
    unpacked = unpack_address(struct.pack("=H", socket.AF_INET) + rest)
    expected = (socket.inet_ntoa(rest[2:6]), int.from_bytes(rest[:2], "big"))
    assert unpacked == expected


@pytest.mark.parametrize("port", [-1, 65536, 2**40])
def test_a_port_is_16_bits(port: int) -> None:
    with pytest.raises(ValueError, match=f"port={port} is not in 0..65535"):
        pack_address("192.0.2.1", port)


BAD_HOSTS = [
    "",
    "localhost",
    "example.com",
    "192.0.2",
    "192.0.2.256",
    "192.0.2.1 ",
    "192.0.2.1\0",
    "192.0.2.1%lo",
    "192.0.2.1%",
    "::1::",
    "fe80::1%",
    "fe80::1%no-such-interface",
    "fe80::1%4294967296",
    "fe80::1%-1",
    "fe80::1%²",
    "[::1]",
    "::1\udcff",
]


@pytest.mark.parametrize("host", BAD_HOSTS, ids=ascii)
def test_what_is_no_numeric_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="is not a numeric IP address"):
        pack_address(host, 7471)


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_a_value_error(host: str) -> None:
    try:
        packed = pack_address(host, 1)
    except ValueError:
        return
    assert unpack_address(packed) is not None
