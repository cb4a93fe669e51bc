"""Ranges: a slice never reaches outside its parent, and what is packed is what is unpacked."""

import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiordma import RemoteMemory
from aiordma._base.ranges import resolve_slice

lengths = st.integers(min_value=0, max_value=300)
bounds = st.one_of(st.none(), st.integers(min_value=-310, max_value=310))


@st.composite
def ranges(draw: st.DrawFn) -> RemoteMemory:
    length = draw(st.one_of(lengths, st.integers(min_value=0, max_value=2**64 - 1)))
    address = draw(st.integers(min_value=0, max_value=2**64 - 1 - length))
    return RemoteMemory(address, length, draw(st.integers(min_value=0, max_value=2**32 - 1)))


def expected(start: int | None, stop: int | None, length: int) -> tuple[int, int] | None:
    """Python's own meaning of the bounds, None where it would have to clamp one."""
    for bound in (start, stop):
        if bound is not None and not -length <= bound <= length:
            return None
    first, last, _ = slice(start, stop).indices(length)
    return (first, last - first) if first <= last else None


@given(bounds, bounds, lengths)
@example(None, None, 0)
@example(0, 0, 0)
@example(-1, None, 1)
@example(None, -1, 1)
@example(2, 1, 3)
def test_a_slice_means_what_it_means_to_a_list_or_is_refused(
    start: int | None, stop: int | None, length: int
) -> None:
    wanted = expected(start, stop, length)
    if wanted is None:
        with pytest.raises(IndexError, match="lies outside a test of"):
            resolve_slice(slice(start, stop), length, "a test")
    else:
        assert resolve_slice(slice(start, stop), length, "a test") == wanted
        numbers = list(range(length))
        assert numbers[wanted[0] : sum(wanted)] == numbers[start:stop]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (slice(0, 9), "[0:9] lies outside a test of 8 bytes"),
        (slice(None, 9), "[:9] lies outside a test of 8 bytes"),
        (slice(-9, None), "[-9:] lies outside a test of 8 bytes"),
        (slice(5, 3), "[5:3] lies outside a test of 8 bytes"),
    ],
)
def test_an_index_error_names_the_slice_and_the_length(key: slice, text: str) -> None:
    with pytest.raises(IndexError) as caught:
        resolve_slice(key, 8, "a test")
    assert str(caught.value) == text


@pytest.mark.parametrize("key", [3, "a", None, (0, 1), b"x"])
def test_only_a_slice_is_taken(key: Any) -> None:
    with pytest.raises(TypeError, match=rf"taken by slice, .* not by {type(key).__name__}"):
        resolve_slice(key, 8, "a test")


@pytest.mark.parametrize("key", [slice("a", None), slice(None, 1.5), slice(0.0, 4)])
def test_bounds_are_whole_numbers(key: slice) -> None:
    with pytest.raises(TypeError):
        resolve_slice(key, 8, "a test")


def test_bounds_may_be_any_whole_numbers() -> None:
    class Whole:
        def __index__(self) -> int:
            return 2

    assert resolve_slice(slice(Whole(), True + 4), 8, "a test") == (2, 3)


@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_step_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="no step"):
        resolve_slice(slice(0, 4, step), 8, "a test")


def test_a_step_of_one_is_no_step() -> None:
    assert resolve_slice(slice(1, 4, 1), 8, "a test") == (1, 3)


# -- RemoteMemory ---------------------------------------------------------------------------------


@given(ranges())
@example(RemoteMemory(0, 0, 0))
@example(RemoteMemory(2**64 - 1, 0, 2**32 - 1))
@example(RemoteMemory(0, 2**64 - 1, 1))
def test_what_is_packed_is_what_is_unpacked(memory: RemoteMemory) -> None:
    packed = memory.pack()
    assert len(packed) == 20
    for data in (packed, bytearray(packed), memoryview(packed)):
        assert RemoteMemory.unpack(data) == memory


def test_the_packed_form_is_address_length_rkey_in_network_order() -> None:
    memory = RemoteMemory(0x0102030405060708, 0x1112, 0xA1A2A3A4)
    assert memory.pack().hex() == "0102030405060708" + "0000000000001112" + "a1a2a3a4"


@given(st.binary(max_size=40))
def test_unpacking_takes_exactly_what_is_a_range(data: bytes) -> None:
    if len(data) != 20:
        with pytest.raises(
            ValueError, match=rf"unpack\(\): data has {len(data)} bytes: expected the 20"
        ):
            RemoteMemory.unpack(data)
        return
    address, length, rkey = struct.unpack("!QQI", data)
    if address + length >= 2**64:
        with pytest.raises(ValueError, match="beyond the address space"):
            RemoteMemory.unpack(data)
    else:
        assert RemoteMemory.unpack(data) == RemoteMemory(address, length, rkey)


@given(st.integers(0, 2**64), st.integers(0, 2**64), st.integers(0, 2**32 - 1))
@example(2**64, 0, 0)
@example(0, 0, 0)
def test_no_range_ends_beyond_the_address_space(address: int, over: int, rkey: int) -> None:
    with pytest.raises(ValueError, match="range"):
        RemoteMemory(address, 2**64 - address + over, rkey)


@pytest.mark.parametrize(
    ("address", "length", "rkey"),
    [(-1, 1, 1), (0, -1, 1), (0, 1, -1), (0, 1, 2**32), (-1, 2**64 - 1, 0)],
)
def test_no_range_holds_what_cannot_be_packed(address: int, length: int, rkey: int) -> None:
    with pytest.raises(ValueError, match="range"):
        RemoteMemory(address, length, rkey)


@given(ranges())
@example(RemoteMemory(2**64 - 4096, 4095, 0))
def test_both_ends_have_an_empty_part(memory: RemoteMemory) -> None:
    assert memory[:0] == RemoteMemory(memory.address, 0, memory.rkey)
    end = memory.address + memory.length
    assert memory[memory.length :] == RemoteMemory(end, 0, memory.rkey)


@given(ranges(), st.data())
def test_a_part_lies_inside_its_parent(memory: RemoteMemory, data: st.DataObject) -> None:
    part = memory
    for _ in range(3):
        near = st.integers(min_value=-part.length - 3, max_value=part.length + 3)
        start, stop = data.draw(st.none() | near), data.draw(st.none() | near)
        try:
            smaller = part[start:stop]
        except IndexError:
            assert expected(start, stop, part.length) is None
            continue
        assert part.address <= smaller.address
        assert smaller.address + smaller.length <= part.address + part.length
        assert smaller.rkey == part.rkey
        assert smaller.length == part.length or (start, stop) != (None, None)
        part = smaller


@pytest.mark.promise("Invalid arguments raise before any C call")
@given(ranges(), st.integers(min_value=1, max_value=2**65))
def test_nothing_outside_can_be_reached_by_slicing(memory: RemoteMemory, beyond: int) -> None:
    for key in (
        slice(0, memory.length + beyond),
        slice(memory.length + beyond, None),
        slice(-memory.length - beyond, None),
        slice(None, -memory.length - beyond),
    ):
        with pytest.raises(IndexError):
            memory[key]


def test_parts_side_by_side_meet() -> None:
    memory = RemoteMemory(1000, 128, 7)
    assert memory[:64] == RemoteMemory(1000, 64, 7)
    assert memory[64:] == RemoteMemory(1064, 64, 7)
    assert memory[-1:] == RemoteMemory(1127, 1, 7)
    assert memory[64:][:8][4:] == RemoteMemory(1068, 4, 7)
    assert len(memory[5:9]) == 4


def test_remote_memory_is_a_value() -> None:
    memory = RemoteMemory(1000, 128, 7)
    assert memory == RemoteMemory(1000, 128, 7)
    assert hash(memory) == hash(RemoteMemory(1000, 128, 7))
    assert str(memory) == "128 bytes at 0x3e8, rkey 0x7"
    with pytest.raises(AttributeError):
        memory.length = 4096  # type: ignore[misc]


def test_numbers_are_read_as_a_range_is_made() -> None:
    """Reading them runs their own code, which must not happen in the middle of a post."""

    class Number:
        def __index__(self) -> int:
            return 4096

    number: Any = Number()
    remote = RemoteMemory(number, number, number)
    assert [type(each) for each in (remote.address, remote.length, remote.rkey)] == [int] * 3
    wrong: Any = 1.5
    with pytest.raises(TypeError, match="float"):
        RemoteMemory(wrong, 1, 1)
