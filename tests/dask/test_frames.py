"""The messages of a comm on the wire: every message arrives as it was, and no number of the peer's
is believed."""

import random
import struct
from collections.abc import Callable
from contextlib import suppress

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import RemoteMemory
from aiordma.integrations.dask import frames
from aiordma.integrations.dask.frames import BULK, MESSAGE_BYTES, ProtocolError

pytestmark = pytest.mark.natively

MOST = 1 << 30


def _transferred(views: list[memoryview]) -> list[memoryview]:
    """Send frames, as two channels do: the bulk is copied here."""
    message = frames.at_once(frames.pack(views))
    assert len(message.announcement) <= MESSAGE_BYTES
    announcement = frames.parse_announcement(message.announcement, MOST)
    head = announcement.head
    assert (head is None) == (message.head is not None)
    if head is None:
        assert message.head is not None
        assert len(message.head) == announcement.head_length
        head = memoryview(message.head)
    sizes = frames.at_once(frames.parse_table(announcement, head))
    buffers = [memoryview(bytearray(b"".join(parts))) for parts in message.bulk]
    assert sizes == [buffer.nbytes for buffer in buffers]
    return frames.at_once(frames.assembled(announcement, head, buffers))


sizes = st.one_of(
    st.integers(0, 40),
    st.integers(BULK - 2, BULK + 2),
    st.integers(MESSAGE_BYTES - 60, MESSAGE_BYTES + 2),
)


@given(st.lists(sizes, max_size=12))
def test_frames_arrive_as_they_were(lengths: list[int]) -> None:
    sent = [random.randbytes(length) for length in lengths]
    arrived = _transferred([memoryview(each) for each in sent])
    assert [bytes(each) for each in arrived] == sent
    assert len({id(each.obj) for each in arrived}) == len(arrived)
    assert not any(each.readonly for each in arrived)


@given(st.lists(st.integers(1, 3 * BULK), min_size=1, max_size=5), st.binary(max_size=3))
def test_shards_of_an_array_arrive_in_one_buffer(lengths: list[int], small: bytes) -> None:
    lengths[0] += BULK
    array = numpy.frombuffer(random.randbytes(sum(lengths)), "u1")
    places = [sum(lengths[:number]) for number in range(len(lengths))]
    shards = [array.data[at : at + size] for at, size in zip(places, lengths, strict=True)]
    first, *arrived = _transferred([memoryview(small), *shards])
    assert bytes(first) == small
    assert b"".join(arrived) == array.tobytes()
    assert len({id(each.obj) for each in arrived}) == 1


def test_neighbours_of_different_owners_are_no_shards() -> None:
    one, other = (numpy.zeros(BULK, "u1") for _ in range(2))
    arrived = _transferred([one.data, other.data, one.data])
    assert len({id(each.obj) for each in arrived}) == 3


def test_too_many_frames_are_not_sent() -> None:
    with pytest.raises(ValueError, match="at most 1048576"):
        frames.at_once(frames.pack([b""] * (frames.MOST_FRAMES + 1)))


MESSAGE = struct.Struct("!B3xIQQ")


def announced(count: int, head: int, bulk: int, rest: bytes = b"") -> bytes:
    return MESSAGE.pack(frames.MESSAGE, count, head, bulk) + rest


VIOLATIONS: dict[str, tuple[bytes, str]] = {
    "cut off": (b"\1", "a MESSAGE of 1 bytes"),
    "more frames than the head": (announced(3, 16, 0, bytes(16)), "3 frames with a head of 16"),
    "millions of frames": (announced(1 << 21, 1 << 24, 0), "2097152 frames"),
    "beyond the limit": (announced(1, 8, MOST, bytes(8)), "max-message-size"),
    "beyond all memory": (announced(1, 2**64 - 1, 2**64 - 1), "at most 1073741824"),
    "short head": (announced(1, 20, 0, bytes(8)), "announces a head of 20"),
    "long head": (announced(1, 8, 0, bytes(20)), "announces a head of 8"),
    "head left out that fits": (announced(1, 8, 0), "announces a head of 8"),
}


@pytest.mark.parametrize(("data", "text"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_announcement_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        frames.parse_announcement(data, MOST)


def _table(*lengths: int) -> bytes:
    return struct.pack(f"!{len(lengths)}Q", *lengths)


TABLES: dict[str, tuple[bytes, int, int, str]] = {
    "longer small frames": (_table(5), 8 + 4, 0, "a table of 13 bytes"),
    "bulk that was not announced": (_table(BULK), 8, 0, "of bulk: announced were 8 and 0"),
    "bulk that is missing": (_table(0), 8, BULK, "0 of bulk"),
    "continued small frame": (_table(4, 2**63 + BULK), 20, BULK, "that is not bulk"),
    "continued nothing": (_table(2**63), 8, 0, "continues a frame that is not bulk"),
    "continued beyond": (_table(BULK, 2**64 - 1), 16, BULK, "of bulk"),
}


@pytest.mark.parametrize(("table", "head", "bulk", "text"), TABLES.values(), ids=TABLES)
def test_table_is_refused(table: bytes, head: int, bulk: int, text: str) -> None:
    rest = table + bytes(head - len(table))
    found = frames.parse_announcement(announced(len(table) // 8, head, bulk, rest), MOST)
    assert found.head is not None
    with pytest.raises(ProtocolError, match=text):
        frames.at_once(frames.parse_table(found, found.head))


def test_ready_carries_its_ranges() -> None:
    ranges = [RemoteMemory(number << 12, number, number) for number in range(frames.BATCH)]
    assert frames.parse_ready(frames.ready(ranges)) == ranges


READIES: dict[str, tuple[bytes, str]] = {
    "cut off": (b"\2", "a READY of 1 bytes"),
    "too many": (struct.pack("!B3xI", 2, 17) + bytes(17 * 20), "for 17 ranges"),
    "too few": (struct.pack("!B3xI", 2, 2) + bytes(20), "for 2 ranges"),
    "no range": (struct.pack("!B3xI", 2, 1) + b"\xff" * 20, "a range that is none"),
}


@pytest.mark.parametrize(("data", "text"), READIES.values(), ids=READIES)
def test_ready_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        frames.parse_ready(data)


@given(st.integers(0, 2**40), st.integers(0, 16))
def test_credit_counts_beyond_32_bits(known: int, more: int) -> None:
    data = frames.credit(known + more)
    assert frames.parse_credit(data, known, known + more) == known + more


def test_credit_for_more_than_was_sent_is_refused() -> None:
    with pytest.raises(ProtocolError, match="for 3 messages: 2 were sent"):
        frames.parse_credit(frames.credit(3), 0, 2)
    with pytest.raises(ProtocolError, match="a CREDIT of 1 bytes"):
        frames.parse_credit(b"\4", 0, 2)


def _parse_all(data: bytes) -> None:
    announcement = frames.parse_announcement(data, MOST)
    if announcement.head is not None:
        frames.at_once(frames.parse_table(announcement, announcement.head))


PARSERS: list[Callable[[bytes], object]] = [
    _parse_all,
    frames.parse_ready,
    lambda data: frames.parse_credit(data, 5, 9),
]


@pytest.mark.parametrize("parse", PARSERS, ids=["announcement", "ready", "credit"])
@given(st.binary(max_size=80))
def test_bytes_of_any_kind_are_parsed_or_refused(
    parse: Callable[[bytes], object], data: bytes
) -> None:
    with suppress(ProtocolError):
        parse(data)
