"""Control messages, byte by byte."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import RemoteMemory
from aiordma.integrations.valkey import ValkeyProtocolError
from aiordma.integrations.valkey.control import (
    Opcode,
    memory_of,
    opcode_of,
    pack_memory,
    pack_opcode,
)


def test_memory_is_announced_as_the_server_reads_it() -> None:
    # struct ValkeyRdmaMemory: opcode, 14 reserved bytes, address, length, key; all big-endian
    message = pack_memory(RemoteMemory(0x0102030405060708, 0x00100000, 0x0A0B0C0D))
    assert message.hex() == "0003" + 14 * "00" + "0102030405060708" + "00100000" + "0a0b0c0d"


def test_a_question_for_features_selects_none() -> None:
    assert pack_opcode(Opcode.GET_SERVER_FEATURE) == bytes(32)
    assert pack_opcode(Opcode.KEEPALIVE).hex() == "0002" + 30 * "00"


@given(st.integers(0, 2**63), st.integers(1, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_memory_comes_back(address: int, length: int, rkey: int) -> None:
    memory = RemoteMemory(address, length, rkey)
    message = pack_memory(memory)
    assert opcode_of(message) is Opcode.REGISTER_XFER_MEMORY
    assert memory_of(message) == memory


@given(st.binary(max_size=64))
def test_any_message_is_understood_or_refused(message: bytes) -> None:
    with suppress(ValkeyProtocolError):  # and nothing else
        assert int.from_bytes(message[:2], "big") == opcode_of(message)
        assert len(message) == 32
        if opcode_of(message) is Opcode.REGISTER_XFER_MEMORY:
            memory = memory_of(message)
            assert 0 < memory.length < 2**64 - memory.address


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (bytes(31), "a message of 31 bytes, and Valkey's control messages have 32"),
        (b"", "a message of 0 bytes"),
        (b"\x00\x04" + bytes(30), "the unknown opcode 4"),
    ],
)
def test_what_is_no_control_message_is_named(message: bytes, text: str) -> None:
    with pytest.raises(ValkeyProtocolError, match=text):
        opcode_of(message)


@pytest.mark.parametrize(
    ("address", "length"),
    [(0, 0), (2**64 - 1, 2), (2**64 - 4096, 2**32 - 1), (2**64 - 4096, 4096)],
)
def test_impossible_memory_is_refused(address: int, length: int) -> None:
    message = b"\x00\x03" + bytes(14) + address.to_bytes(8, "big") + length.to_bytes(4, "big")
    with pytest.raises(ValkeyProtocolError, match=f"impossible memory: {length} bytes"):
        memory_of(message + bytes(4))
