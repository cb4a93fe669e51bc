"""The 40 bytes before a datagram: its source and destination, in each of their forms."""

from typing import Any

import pytest

from aiordma import DatagramPeer
from aiordma._datagram.message import is_multicast
from aiordma.verbs import AddressVector
from tests.internals import grh_ends

MAPPED = bytes(10) + b"\xff\xff"
ONE, OTHER = bytes(range(16)), bytes(range(100, 116))


def ipv6(next_header: int) -> bytes:
    return bytes([0x60, 0, 0, 0, 0, 64, next_header, 64]) + ONE + OTHER


def ipv4(before: bytes) -> bytes:
    header = bytes([0x45, 0, 0, 60, 0, 0, 0, 0, 64, 17, 0, 0])
    return before + header + bytes([10, 1, 1, 1]) + bytes([239, 1, 2, 3])


@pytest.mark.parametrize("next_header", [17, 27], ids=["RoCE v2", "InfiniBand"])
def test_a_whole_header_has_both_gids(next_header: int) -> None:
    assert grh_ends(ipv6(next_header)) == (ONE, OTHER)


@pytest.mark.parametrize("before", [bytes(20), b"\x60" + b"\xff" * 19], ids=["zeros", "left over"])
def test_an_ipv4_header_stands_at_the_end_behind_anything(before: bytes) -> None:
    assert grh_ends(ipv4(before)) == (
        MAPPED + bytes([10, 1, 1, 1]),
        MAPPED + bytes([239, 1, 2, 3]),
    )


def test_nothing_else_has_the_length_of_one() -> None:
    with pytest.raises(ValueError, match="a GRH has 40 bytes, and this has 39"):
        grh_ends(bytes(39))


@pytest.mark.parametrize(
    ("gid", "group"),
    [
        (MAPPED + bytes([224, 0, 0, 1]), True),
        (MAPPED + bytes([239, 255, 255, 255]), True),
        (MAPPED + bytes([223, 255, 255, 255]), False),
        (MAPPED + bytes([240, 0, 0, 0]), False),
        (b"\xff\x0e" + bytes(14), True),
        (b"\xfe\x80" + bytes(14), False),
    ],
)
def test_groups_are_distinguished_from_hosts(gid: bytes, group: bool) -> None:
    assert is_multicast(gid) is group


@pytest.mark.parametrize(
    ("name", "value"), [("qp_num", 1 << 24), ("qkey", 1 << 32), ("qp_num", -1)]
)
def test_a_peer_has_numbers_in_range(name: str, value: int) -> None:
    numbers: dict[str, Any] = {"qp_num": 1, name: value}
    with pytest.raises(ValueError, match=f"{name}="):
        DatagramPeer(AddressVector(), **numbers)


def test_peer_equality_ignores_private_data() -> None:
    one, other = (DatagramPeer(AddressVector(), 5, private_data=data) for data in (b"", b"hello"))
    assert one == other
    assert hash(one) == hash(other)
    assert one != DatagramPeer(AddressVector(), 6)


@pytest.mark.parametrize("checksum_is_right", [True, False])
def test_old_bytes_that_look_like_ipv6_do_not_hide_an_ipv4_header(checksum_is_right: bool) -> None:
    old = bytes([0x60, 0, 0, 0, 0, 0, 17, 0]) + bytes(12)
    header = bytearray.fromhex("45000040 00000000 4011 0000 0a010101 e1020304")
    total = sum(int.from_bytes(header[at : at + 2], "big") for at in range(0, 20, 2))
    checksum = 0xFFFF - ((total & 0xFFFF) + (total >> 16))
    header[10:12] = (checksum if checksum_is_right else checksum ^ 1).to_bytes(2, "big")
    source, _ = grh_ends(old + bytes(header))
    assert (source[12:] == bytes([10, 1, 1, 1])) is checksum_is_right
