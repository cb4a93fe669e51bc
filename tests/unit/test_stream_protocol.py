"""The handshake of rsockets' protocol, without I/O. What follows: test_stream_vectors.py."""

import struct
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import RemoteMemory
from aiordma.streams import StreamProtocolError
from aiordma.streams.protocol import GRANT_BYTES, HELLO_BYTES, TABLE_ENTRIES, Hello

TABLE = RemoteMemory(0x7000, TABLE_ENTRIES * GRANT_BYTES, 7)
RING = RemoteMemory(0x10000, 64, 9)
HELLO = Hello(4, TABLE, RING[:32])

# The private data of rdma-core 44's rstream, as it arrived on rxe with RoCE's padding.
RECORDED = bytes.fromhex(
    "010201800000000000007f9d70003000000003fb0000000200007f9d75d05000000004a5000800000000000000000000"
    "0000000000000000"
)


@pytest.mark.parametrize("takes_immediate", [False, True])
def test_a_hello_survives_packing(takes_immediate: bool) -> None:
    hello = replace(HELLO, takes_immediate=takes_immediate)
    assert len(hello.pack()) == HELLO_BYTES
    assert Hello.unpack(hello.pack() + bytes(16)) == hello


def test_the_c_librarys_hello_is_read() -> None:
    hello = Hello.unpack(RECORDED)
    assert hello.credits == 384
    assert not hello.takes_immediate
    assert hello.table == RemoteMemory(0x7F9D70003000, 2 * GRANT_BYTES, 0x3FB)
    assert hello.buffer == RemoteMemory(0x7F9D75D05000, 512 * 1024, 0x4A5)
    assert not hello.is_big_endian


@pytest.mark.parametrize(
    ("private_data", "said"),
    [
        (b"", "sent 0 bytes of private data, and rsockets sends 40"),
        (b"\1" * 39, "sent 39 bytes"),
        (b"\2" + HELLO.pack()[1:], "begins with version 2, and rsockets has 1"),
        (bytes(56), "begins with version 0"),
        (Hello(0xFFFF, TABLE, RING).pack(), "announces 65535 credits"),
        (Hello(4, TABLE[:GRANT_BYTES], RING).pack(), r"and 1 grants \(2 to 65534\)"),
        (Hello(4, RemoteMemory(0, 16 * 0xFFFF, 1), RING).pack(), "and 65535 grants"),
        (
            HELLO.pack()[:24] + struct.pack("!QII", 2**64 - 1, 0, 2),
            "memory at 0xffffffffffffffff of 2 bytes, which ends beyond",
        ),
    ],
)
def test_a_wrong_hello_is_refused(private_data: bytes, said: str) -> None:
    with pytest.raises(StreamProtocolError, match=said):
        Hello.unpack(private_data)


@given(st.binary(max_size=80))
def test_any_private_data_is_read_or_refused(private_data: bytes) -> None:
    with suppress(StreamProtocolError):
        assert len(Hello.unpack(private_data).pack()) == HELLO_BYTES
