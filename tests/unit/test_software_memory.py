"""The software device's regions, windows, keys and protection domains, as C has them."""

import errno
import mmap
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.internals import ffi, lib, software
from tests.unit.child import run_child
from tests.unit.software_device import (
    address_of,
    failed,
    make_pair,
    make_queue,
    nothing_left,
    opened_domain,
    sge,
)
from tests.unit.sources import ROOT
from tests.unit.test_native import FLAGS, WITHOUT_RUNTIME

LOCAL = lib.IBV_ACCESS_LOCAL_WRITE
READ, WRITE = lib.IBV_ACCESS_REMOTE_READ, lib.IBV_ACCESS_REMOTE_WRITE
ATOMIC, BIND = lib.IBV_ACCESS_REMOTE_ATOMIC, lib.IBV_ACCESS_MW_BIND
ZERO_BASED = lib.IBV_ACCESS_ZERO_BASED
ON_DEMAND, HUGE = lib.IBV_ACCESS_ON_DEMAND, lib.IBV_ACCESS_HUGETLB
CHANGE_MEMORY = lib.IBV_REREG_MR_CHANGE_TRANSLATION
CHANGE_DOMAIN = lib.IBV_REREG_MR_CHANGE_PD
CHANGE_ACCESS = lib.IBV_REREG_MR_CHANGE_ACCESS
PAGE = mmap.PAGESIZE


@pytest.fixture
def device() -> Iterator[tuple[Any, Any]]:
    """A context and a domain of it, of which nothing is left."""
    with nothing_left(), opened_domain() as both:
        yield both


@pytest.fixture
def domain(device: tuple[Any, Any]) -> Any:
    return device[1]


@pytest.fixture
def memory() -> Any:
    return ffi.new("char[]", 4096)


def register(domain: Any, memory: Any, access: int = LOCAL, length: int = 4096) -> Any:
    region = software().reg_mr(domain, memory, length, access)
    assert region
    return region


def test_keys_are_random_and_unlike_in_their_upper_bits(domain: Any, memory: Any) -> None:
    regions = [register(domain, memory) for _ in range(3000)]  # the table grows twice
    keys = [region.lkey for region in regions]
    assert keys == [region.rkey for region in regions]
    assert len({key >> 8 for key in keys}) == 3000
    # Each bit is set in about half of them: six standard deviations are 5.5 %.
    for bit in range(32):
        assert 0.4 < sum(key >> bit & 1 for key in keys) / 3000 < 0.6
    steps = {(later - key) % 2**32 for key, later in pairwise(keys)}
    assert len(steps) > 2990
    for region in regions:
        assert software().dereg_mr(region) == 0
    again = [register(domain, memory) for _ in range(3000)]
    # A key that was used is not the next one's: the memory behind it is another's.
    assert len(set(keys) & {region.lkey for region in again}) < 3
    for region in again:
        assert software().dereg_mr(region) == 0


@pytest.mark.parametrize(
    ("access", "error"),
    [
        (WRITE, errno.EINVAL),
        (ATOMIC | READ, errno.EINVAL),
        (1 << 8, errno.EINVAL),
        (1 << 30, errno.EINVAL),
        (LOCAL | HUGE, errno.EINVAL),
        (LOCAL | ON_DEMAND, errno.EOPNOTSUPP),
        (LOCAL | ON_DEMAND | HUGE, errno.EOPNOTSUPP),
    ],
)
def test_an_access_that_makes_no_sense_is_refused(
    domain: Any, memory: Any, access: int, error: int
) -> None:
    assert failed(software().reg_mr(domain, memory, 4096, access)) == error
    assert failed(software().reg_mr_iova2(domain, memory, 4096, address_of(memory), access)) == (
        error
    )


@pytest.mark.parametrize(
    "access", [0, READ, LOCAL | WRITE | ATOMIC | BIND, LOCAL | ZERO_BASED, LOCAL | 1 << 20]
)
def test_an_access_that_makes_sense_is_given(domain: Any, memory: Any, access: int) -> None:
    region = register(domain, memory, access)
    assert (region.addr, region.length) == (ffi.cast("void *", memory), 4096)
    assert software().dereg_mr(region) == 0


@pytest.mark.parametrize("length", [0, 2**56 + 1, 2**64 - 1, 2**64 - 4096])
def test_a_length_that_cannot_be_is_refused(domain: Any, memory: Any, length: int) -> None:
    for start in (memory, ffi.NULL, ffi.cast("void *", 2**64 - PAGE)):
        assert failed(software().reg_mr(domain, start, length, LOCAL)) == errno.EINVAL


def mappings() -> list[tuple[int, int, str]]:
    """This process's: where each begins and ends, and what it permits."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line) for line in lines]
    return [(int(m[1], 16), int(m[2], 16), m[3]) for m in found if m]


def test_memory_that_is_not_there_is_refused(domain: Any) -> None:
    found = [mapping for mapping in mappings() if mapping[1] < 2**47]
    # In the middle of the widest gap, where nothing else of the process gets in between.
    gap, end = max((b[0] - a[1], a[1]) for a, b in pairwise(found))
    hole = ffi.cast("void *", end + gap // 2 // PAGE * PAGE)
    for start in (ffi.NULL, hole):
        for access in (0, LOCAL):
            assert failed(software().reg_mr(domain, start, 8, access)) == errno.EFAULT


def test_memory_that_cannot_be_written_is_refused_where_it_would_be(domain: Any) -> None:
    code = next(start for start, _, permits in mappings() if permits == "r-xp")
    start = ffi.cast("void *", code)
    region = register(domain, start, READ, PAGE)
    assert software().dereg_mr(region) == 0
    assert failed(software().reg_mr(domain, start, PAGE, LOCAL)) == errno.EFAULT


def test_an_iova_lies_as_far_into_a_page_as_the_memory(domain: Any, memory: Any) -> None:
    in_page = address_of(memory) % PAGE
    for function in (software().reg_mr_iova, software().reg_mr_iova2):
        region = function(domain, memory, 4096, 5 * PAGE + in_page, LOCAL)
        assert region
        assert software().dereg_mr(region) == 0
        wrong = function(domain, memory, 4096, 5 * PAGE + in_page + 8, LOCAL)
        assert failed(wrong) == errno.EINVAL
        beyond = function(domain, memory, 2 * PAGE, 2**64 - PAGE + in_page, LOCAL)
        assert failed(beyond) == errno.EINVAL
        other = function(domain, memory, 4096, 5 * PAGE + in_page, LOCAL | ZERO_BASED)
        assert failed(other) == errno.EINVAL


def test_reregistration_changes_all_or_nothing(device: tuple[Any, Any], memory: Any) -> None:
    context, domain = device
    other = software().alloc_pd(context)
    region = register(domain, memory)
    key = region.lkey
    rereg, null = software().rereg_mr, ffi.NULL

    def refused(result: int) -> int:
        assert result == lib.IBV_REREG_MR_ERR_INPUT
        assert (region.lkey, region.rkey, region.length) == (key, key, 4096)
        return int(ffi.errno)

    assert refused(rereg(region, 0, null, null, 0, 0)) == errno.EINVAL
    assert refused(rereg(region, 1 << 3, null, null, 0, 0)) == errno.EINVAL
    assert refused(rereg(region, CHANGE_DOMAIN, null, null, 0, 0)) == errno.EINVAL
    assert refused(rereg(region, CHANGE_ACCESS, null, null, 0, WRITE)) == errno.EINVAL
    assert refused(rereg(region, CHANGE_ACCESS, null, null, 0, ON_DEMAND)) == errno.EOPNOTSUPP
    assert refused(rereg(region, CHANGE_MEMORY, null, null, 8, 0)) == errno.EFAULT
    assert refused(rereg(region, CHANGE_MEMORY, null, memory, 0, 0)) == errno.EINVAL
    with opened_domain() as (_, foreign):
        assert refused(rereg(region, CHANGE_DOMAIN, foreign, null, 0, 0)) == errno.EINVAL
    assert rereg(region, CHANGE_DOMAIN, other, null, 0, 0) == 0
    assert software().dealloc_pd(other) == errno.EBUSY
    assert rereg(region, CHANGE_MEMORY | CHANGE_ACCESS, null, memory + 64, 32, LOCAL | WRITE) == 0
    assert (region.addr, region.length) == (ffi.cast("void *", memory + 64), 32)
    assert software().dereg_mr(region) == 0
    assert software().dealloc_pd(other) == 0


def test_domains_and_contexts_go_last(device: tuple[Any, Any], memory: Any) -> None:
    context, domain = device
    region = register(domain, memory)
    assert software().dealloc_pd(domain) == errno.EBUSY
    assert software().close_device(context) == errno.EBUSY
    assert software().dereg_mr(region) == 0


# -- windows --------------------------------------------------------------------------------------


def bind(pair: Any, window: Any, region: Any, address: int, length: int, access: int) -> int:
    return int(
        lib.aiordma_bind_window(pair, window, 1, 0, region or ffi.NULL, address, length, access)
    )


def test_windows_have_keys_of_their_own(domain: Any, memory: Any) -> None:
    region = register(domain, memory, LOCAL | BIND)
    windows = [lib.aiordma_alloc_window(domain, kind) for kind in (1, 2, 1, 2)]
    assert [window.type for window in windows] == [1, 2, 1, 2]
    assert len({window.rkey >> 8 for window in windows} | {region.rkey >> 8}) == 5
    for kind in (0, 3):
        assert failed(lib.aiordma_alloc_window(domain, kind)) == errno.EINVAL
    assert software().dealloc_pd(domain) == errno.EBUSY
    for window in windows:
        assert lib.aiordma_dealloc_window(window) == 0
    assert software().dereg_mr(region) == 0


def test_a_window_is_bound_over_a_connection_only(device: tuple[Any, Any], memory: Any) -> None:
    context, domain = device
    queue = make_queue(context)
    pair = make_pair(domain, queue, queue)
    region = register(domain, memory, LOCAL | BIND)
    window = lib.aiordma_alloc_window(domain, lib.IBV_MW_TYPE_1)
    rkey = window.rkey
    assert bind(pair, window, region, address_of(memory), 8, READ) == errno.EINVAL
    assert window.rkey == rkey
    assert software().dereg_mr(region) == 0  # nothing is bound to it
    assert lib.aiordma_dealloc_window(window) == 0
    assert software().destroy_qp(pair) == 0
    assert software().destroy_cq(queue) == 0


ADVICE = tuple(
    getattr(lib, f"IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH{each}")
    for each in ("", "_WRITE", "_NO_FAULT")
)


def test_advice_finds_the_errors_of_the_man_page(domain: Any, memory: Any) -> None:
    region = register(domain, memory)
    constant = register(domain, memory, 0)
    start = address_of(memory)

    def advise(advice: int, length: int, key: int, flags: int = 0) -> int:
        parts = sge(start, 8, region.lkey) + sge(start + 8, length, key)
        return int(lib.aiordma_advise_mr(domain, advice, flags, parts, 2))

    read, write, _ = ADVICE
    for advice in ADVICE:
        assert advise(advice, 4088, region.lkey, lib.IB_UVERBS_ADVISE_MR_FLAG_FLUSH) == 0
        assert advise(advice, 4089, region.lkey) == errno.EFAULT
        assert advise(advice, 8, region.lkey ^ 0xFF00) == errno.EFAULT
    assert advise(read, 8, constant.lkey) == 0
    assert advise(write, 8, constant.lkey) == errno.EPERM
    assert advise(read, 8, region.lkey, flags=2) == errno.EINVAL
    assert advise(3, 8, region.lkey) == errno.EINVAL
    assert lib.aiordma_advise_mr(domain, read, 0, b"", 0) == errno.EINVAL
    other = software().alloc_pd(domain.context)
    assert lib.aiordma_advise_mr(other, read, 0, sge(start, 8, region.lkey), 1) == errno.EPERM
    assert software().dealloc_pd(other) == 0
    for each in (region, constant):
        assert software().dereg_mr(each) == 0


POPULATES = """
import ctypes, mmap, os
import aiordma

os.sched_getaffinity = lambda _: {0, 1, 2, 3}
preloaded = ctypes.CDLL(None)
preloaded.longest_populated.restype = preloaded.populated_beside.restype = ctypes.c_size_t
with aiordma.verbs.Device("software").open() as context, context.alloc_pd() as domain:
    with mmap.mmap(-1, (64 << 20) + 4096) as memory, memoryview(memory) as view:
        beside = []
        for buffer in (view, view, view.toreadonly()):
            with aiordma.MemoryRegion(domain, buffer):
                beside.append(preloaded.populated_beside())
        del buffer
print(preloaded.longest_populated(), *beside)
"""


def test_large_memory_is_populated_in_steps(tmp_path: Path) -> None:
    """Each step has the lock that other threads need for mmap and malloc."""
    library, source = tmp_path / "populates.so", ROOT / "tests/native/populates.c"
    compiling = ["gcc", *FLAGS, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(compiling, check=True, env=WITHOUT_RUNTIME)
    longest, new, again, read_only = run_child(POPULATES, LD_PRELOAD=str(library)).split()
    assert longest == str(4 << 20)
    # Each of four threads has five steps, and the last one what is left.
    assert new == str((44 << 20) + 4096)
    assert again == read_only == new  # by the calling thread only
