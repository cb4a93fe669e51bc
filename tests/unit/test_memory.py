"""Registered memory, on an ordinary domain: which buffers, with which access, and their slices."""

import array
import ctypes
import gc
import mmap
import struct
from collections.abc import Iterator
from typing import Any

import anyio
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma import Access, ClosedError, MemoryRegion, RemoteMemory, VerbsCallError
from aiordma.verbs.memory import gather
from tests.unit.plain_domain import PlainDomain

WRITE, REMOTE = Access.LOCAL_WRITE, Access.REMOTE_READ


def register(domain: PlainDomain, buffer: Any, access: Access | None = None) -> MemoryRegion:
    any_domain: Any = domain
    return MemoryRegion(any_domain, buffer, access)


@pytest.fixture
def domain() -> Iterator[PlainDomain]:
    with PlainDomain() as domain:
        yield domain


@pytest.mark.parametrize(
    ("buffer", "length"),
    [
        (bytearray(10), 10),
        (memoryview(bytearray(10))[2:8], 6),
        (array.array("d", [1.0, 2.0]), 16),
        (mmap.mmap(-1, 8192), 8192),
        (numpy.zeros((3, 4), dtype=">i4"), 48),
        (numpy.zeros((3, 4), dtype=numpy.float64).T, 96),
        (numpy.zeros(3, dtype=[("O", "i4"), ("b", "f8")]), 36),
        ((ctypes.c_uint16 * 5)(), 10),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_any_contiguous_buffer_is_registered_as_its_bytes(
    domain: PlainDomain, buffer: Any, length: int
) -> None:
    with register(domain, buffer) as region:
        assert len(region) == region.length == length
        assert domain.registered == {region.lkey: (region.address, length, WRITE)}
        ctypes.memset(region.address, 0xAB, length)  # as a device would, behind Python's back
        assert bytes(region.view) == b"\xab" * length
        assert memoryview(buffer).tobytes("A") == b"\xab" * length


@pytest.mark.parametrize("buffer", [5, "text", None, [1, 2], object()])
def test_what_has_no_buffer_is_refused(domain: PlainDomain, buffer: object) -> None:
    with pytest.raises(TypeError, match=f"{type(buffer).__name__} has no buffer: give"):
        register(domain, buffer)


@pytest.mark.parametrize("buffer", [b"", bytearray(), memoryview(b""), numpy.zeros(0)])
def test_an_empty_buffer_is_refused(domain: PlainDomain, buffer: object) -> None:
    with pytest.raises(ValueError, match="an empty buffer"):
        register(domain, buffer)


@pytest.mark.parametrize("buffer", [memoryview(bytearray(9))[::2], numpy.zeros((4, 4))[:, 1]])
def test_memory_in_pieces_is_refused(domain: PlainDomain, buffer: object) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        register(domain, buffer)


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        (None, WRITE),
        (Access(0), Access(0)),
        (REMOTE, REMOTE),
        (Access.REMOTE_WRITE, Access.REMOTE_WRITE | WRITE),
        (Access.REMOTE_ATOMIC, Access.REMOTE_ATOMIC | WRITE),
        (REMOTE | WRITE, REMOTE | WRITE),
    ],
)
def test_access_is_what_was_asked_for_and_what_that_needs(
    domain: PlainDomain, asked: Access | None, granted: Access
) -> None:
    # man ibv_reg_mr: remote write and atomics need local write.
    with register(domain, bytearray(8), asked) as region:
        assert region.access == granted
        assert domain.registered[region.lkey][2] == granted


@pytest.mark.parametrize("access", [WRITE, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC])
def test_read_only_memory_is_never_opened_to_writing(domain: PlainDomain, access: Access) -> None:
    with pytest.raises(TypeError, match="bytes is read-only, and"):
        register(domain, b"12345678", access)
    assert domain.count == 0


@pytest.mark.parametrize("access", [None, Access(0), REMOTE])
def test_read_only_memory_may_be_read(domain: PlainDomain, access: Access | None) -> None:
    with register(domain, b"12345678", access) as region:
        assert not region.access & WRITE


def test_a_buffer_lives_as_long_as_it_is_registered(domain: PlainDomain) -> None:
    region = register(domain, bytearray(b"12345678"))
    gc.collect()
    assert ctypes.string_at(region.address, 8) == b"12345678"
    region.close()


def test_memory_that_a_request_owns_is_not_deregistered(domain: PlainDomain) -> None:
    region = register(domain, bytearray(8))
    part = region[2:4]
    part._hold()
    with pytest.raises(anyio.BusyResourceError, match="in use by 1 posted work requests"):
        region.close()
    assert not region.closed
    assert region.lkey in domain.registered
    part._release()
    region.close()
    region.close()
    assert domain.history == ["register 1", "deregister 1"]
    with pytest.raises(ClosedError):
        region[0:1]


def test_a_refused_registration_names_the_call_and_leaves_nothing(domain: PlainDomain) -> None:
    domain.refuse = 12
    buffer = bytearray(8)
    with pytest.raises(VerbsCallError, match=r"ibv_reg_mr: .*RLIMIT_MEMLOCK"):
        register(domain, buffer)
    gc.collect()
    buffer.append(1)


def test_a_forgotten_region_stays_registered_until_its_domain_closes(domain: PlainDomain) -> None:
    register(domain, bytearray(8))
    gc.collect()
    assert len(domain.registered) == 1
    domain.close()
    assert domain.registered == {}


def test_a_retired_region_is_deregistered_when_its_last_request_has_ended(
    domain: PlainDomain,
) -> None:
    region = register(domain, bytearray(8))
    part = region[2:4]
    part._hold()
    region._retire()
    assert domain.registered
    part._release()
    assert region.closed
    assert domain.registered == {}


# -- slices ---------------------------------------------------------------------------------------


@given(st.data())
def test_a_slice_is_the_bytes_that_it_names(data: st.DataObject) -> None:
    with PlainDomain() as domain, register(domain, bytearray(range(200)), REMOTE) as region:
        part, bytes_ = region[:], bytes(range(200))
        for _ in range(3):
            start = data.draw(st.integers(0, len(part)))
            stop = data.draw(st.integers(start, len(part)))
            part, bytes_ = part[start:stop], bytes_[start:stop]
            assert bytes(part.view) == bytes_
            assert len(part) == len(bytes_)
            assert struct.unpack("=QII", part._sge) == (part.address, len(part), region.lkey)
            assert part.remote() == RemoteMemory(part.address, len(part), region.rkey)
            assert region.address <= part.address
            assert part.address + part.length <= region.address + region.length
        with pytest.raises(IndexError, match="outside a memory slice"):
            part[: len(part) + 1]


def test_only_memory_registered_for_it_is_described_to_a_peer(domain: PlainDomain) -> None:
    with (
        register(domain, bytearray(8)) as region,
        pytest.raises(ValueError, match="without remote access"),
    ):
        region.remote()
    with register(domain, bytearray(8), REMOTE) as region:
        assert region.remote() == region[:].remote()


def test_slices_are_gathered_in_order(domain: PlainDomain) -> None:
    with register(domain, bytearray(64)) as region:
        sges = gather([region[0:4], region[32:64]])
        assert list(struct.iter_unpack("=QII", sges)) == [
            (region.address, 4, region.lkey),
            (region.address + 32, 32, region.lkey),
        ]
