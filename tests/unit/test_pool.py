"""The pool: a block belongs to one lease at a time, and all memory is given back."""

import errno
import mmap
import random
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiordma import VerbsCallError
from aiordma._requests.pool import KEPT, SLAB, SMALLEST, BufferPool, Lease
from aiordma._runtime.unmanaged_identifier import opened_device
from tests.internals import SOFTWARE, software
from tests.unit.plain_domain import PlainDomain


def make(domain: PlainDomain) -> BufferPool:
    any_domain: Any = domain
    return BufferPool(any_domain)


@pytest.fixture
def domain() -> Iterator[PlainDomain]:
    with PlainDomain() as domain:
        yield domain


def span(lease: Lease) -> tuple[int, int]:
    return lease.memory.address, lease.memory.address + lease.memory.length


lengths = st.one_of(
    st.integers(min_value=1, max_value=5000),
    st.sampled_from([SMALLEST - 1, SMALLEST, SMALLEST + 1, 65536, SLAB - 1, SLAB, SLAB + 1]),
)


@settings(max_examples=50)
@given(st.lists(st.tuples(lengths, st.booleans()), max_size=30), st.data())
def test_no_byte_is_leased_twice(plan: list[tuple[int, bool]], data: st.DataObject) -> None:
    with PlainDomain() as domain:
        pool = make(domain)
        leases: list[Lease] = []
        for length, give_back in plan:
            lease = pool.lease(length)
            assert lease.memory.length == length
            leases.append(lease)
            if give_back:
                leases.pop(data.draw(st.integers(0, len(leases) - 1))).release()
            assert pool.leased == len(leases)
            spans = sorted(map(span, leases))
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            for start, end in spans:
                assert any(
                    base <= start and end <= base + size
                    for base, size, _ in domain.registered.values()
                )
        for lease in leases:
            lease.release()
        pool.close()
        assert domain.registered == {}
        assert pool.leased == 0


@pytest.mark.parametrize("length", [1, SMALLEST, 5000, SLAB + 1])
def test_what_is_given_back_is_leased_again(domain: PlainDomain, length: int) -> None:
    pool = make(domain)
    for _ in range(3 * SLAB // SMALLEST):
        pool.lease(length).release()
    assert domain.count == 1
    pool.close()


def test_slabs_that_are_not_pinned_are_kept_up_to_a_limit(domain: PlainDomain) -> None:
    any_domain: Any = domain
    pool = BufferPool(any_domain, is_pinned=False)
    for _ in range(3):
        for lease in [pool.lease(SLAB) for _ in range(10)]:
            lease.release()
    assert domain.count == 10  # nothing was registered anew
    for lease in [pool.lease(SLAB) for _ in range(2 * KEPT // SLAB)]:
        lease.release()
    assert pool.registered == KEPT + SLAB
    pool.close()
    assert not domain.registered


def test_empty_slabs_are_deregistered(domain: PlainDomain) -> None:
    pool = make(domain)
    leases = [pool.lease(16384) for _ in range(10 * SLAB // 16384)]
    assert pool.registered == 10 * SLAB
    assert domain.count == 10
    random.Random(7).shuffle(leases)
    for lease in leases:
        lease.release()
    assert pool.registered == SLAB
    assert len(domain.registered) == 1
    pool.close()


def test_slab_with_a_lease_stays_registered(domain: PlainDomain) -> None:
    pool = make(domain)
    leases = [pool.lease(16384) for _ in range(10 * SLAB // 16384)]
    kept = leases[5 * SLAB // 16384]
    kept.memory.view[:] = b"7" * 16384
    for lease in leases:
        if lease is not kept:
            lease.release()
    assert pool.registered == 2 * SLAB
    assert bytes(kept.memory.view) == b"7" * 16384
    kept.release()
    assert pool.registered == SLAB
    pool.close()


def test_lease_at_a_slabs_edge_registers_once(domain: PlainDomain) -> None:
    pool = make(domain)
    leases = [pool.lease(16384) for _ in range(SLAB // 16384)]
    for _ in range(100):
        pool.lease(16384).release()
    assert domain.count == 2
    for lease in leases:
        lease.release()
    pool.close()


@pytest.mark.parametrize("length", [16384, SLAB])
def test_blocks_returned_during_a_registration_are_leased(domain: PlainDomain, length: int) -> None:
    """As a finalizer returns them, or another thread."""
    pool, register = make(domain), domain.provider.reg_mr
    leases = [pool.lease(length) for _ in range(SLAB // length)]

    def return_then_register(*arguments: Any) -> Any:
        while leases:
            leases.pop().release()
        return register(*arguments)

    domain.provider.reg_mr = return_then_register
    pool.lease(length).release()
    assert domain.count == 2
    assert pool.registered == SLAB
    again = [pool.lease(length) for _ in range(SLAB // length)]
    assert domain.count == 2
    for lease in again:
        lease.release()
    pool.close()


def test_fuller_slabs_are_leased_from_first(domain: PlainDomain) -> None:
    pool = make(domain)
    count = SLAB // 16384
    leases = [pool.lease(16384) for _ in range(3 * count)]
    for lease in (leases[0], leases[count]):
        lease.release()
    again = [pool.lease(16384) for _ in range(2)]
    assert pool.registered == 3 * SLAB
    for lease in again + leases:
        lease.release()
    pool.close()


def test_block_of_an_ended_request_goes_with_it(domain: PlainDomain) -> None:
    pool = make(domain)
    leases = [pool.lease(SLAB) for _ in range(2)]
    leases[0].memory._hold()  # as the request does whose callback releases the lease
    leases[0].release()
    leases[1].release()
    assert pool.registered <= 2 * SLAB
    leases[0].memory._release()
    pool.close()
    assert domain.registered == {}


@pytest.mark.parametrize("is_pinned", [False, True])
def test_unused_blocks_are_not_resident(is_pinned: bool) -> None:
    context = opened_device(software(), SOFTWARE)
    with closing(context), closing(context.alloc_pd()) as domain:
        pool = BufferPool(domain, is_pinned=is_pinned)
        lease = pool.lease(16384)
        lease.memory.view[:300] = b"1" * 300
        # The device does not keep what it does not pin: only what was used is there.
        assert resident(pool) == (SLAB if is_pinned else mmap.PAGESIZE)
        lease.release()
        pool.close()


def resident(pool: BufferPool) -> int:
    """How many bytes of the slabs are in memory, by the kernel's account of our mappings."""
    found, here = 0, False
    starts = {f"{slab.region.address:x}" for slab in pool._slabs}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            here = words[0].partition("-")[0] in starts
        elif here and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def test_many_small_blocks_are_one_registration(domain: PlainDomain) -> None:
    pool = make(domain)
    leases = [pool.lease(SMALLEST) for _ in range(SLAB // SMALLEST)]
    assert domain.count == 1
    leases.append(pool.lease(SMALLEST))
    assert domain.count == 2
    for lease in leases:
        lease.release()
    pool.close()


def test_a_returned_block_serves_any_length_of_its_class(domain: PlainDomain) -> None:
    pool = make(domain)
    pool.lease(1025).release()
    pool.lease(2048).release()
    assert domain.count == 1
    pool.close()


def test_slabs_are_whole_pages(domain: PlainDomain) -> None:
    # fork protection works by the page (MADV_DONTFORK): no other memory may share one.
    pool = make(domain)
    for length in (1, 70_000, SLAB + 1):
        pool.lease(length)
    for address, length, _ in domain.registered.values():
        assert address % 4096 == 0
        assert length % 4096 == 0
    pool.close()


def test_a_lease_is_written_and_read_through_its_memory(domain: PlainDomain) -> None:
    pool = make(domain)
    one, other = pool.lease(300), pool.lease(300)
    one.memory.view[:] = b"1" * 300
    other.memory.view[:] = b"2" * 300
    assert bytes(one.memory.view) == b"1" * 300
    pool.close()


def test_a_refused_registration_leaves_the_pool_as_it_was(domain: PlainDomain) -> None:
    pool = make(domain)
    pool.lease(300).release()
    domain.refuse = 12
    with pytest.raises(VerbsCallError, match="ibv_reg_mr"):
        pool.lease(SLAB)
    assert pool.leased == 0
    assert len(domain.registered) == 1
    domain.refuse = 0
    pool.lease(SLAB)
    assert pool.leased == 1
    pool.close()


def test_closing_twice_is_closing_once(domain: PlainDomain) -> None:
    pool = make(domain)
    pool.lease(1).release()
    pool.close()
    pool.close()
    assert domain.history == ["register 1", "deregister 1"]


def test_a_block_is_given_back_once(domain: PlainDomain) -> None:
    """A request that C refuses releases its lease, and so does the code that prepared it."""
    pool = make(domain)
    lease = pool.lease(100)
    lease.release()
    lease.release()
    assert pool.leased == 0
    assert span(pool.lease(100)) != span(pool.lease(100))
    pool.close()


@pytest.mark.promise("A buffer is held until its request completes")
def test_busy_slab_is_logged_and_deregistered_with_its_domain(
    domain: PlainDomain, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make(domain)
    leases = [pool.lease(SLAB) for _ in range(3)]
    domain.refuse_deregistration = errno.EBUSY
    for lease in leases:
        lease.release()  # the pool keeps one slab
    assert (pool.leased, len(domain.registered)) == (0, 3)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
    assert caplog.text.count("stays registered: [Errno 16] ibv_dereg_mr") == 2
    domain.refuse_deregistration = 0
    pool.close()
    assert len(domain.registered) == 2
    domain.close()
    assert not domain.registered
