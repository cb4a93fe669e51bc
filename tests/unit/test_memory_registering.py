"""How memory is registered beyond the plain way: with an iova, optional access, and again."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import Access, BusyError, ClosedError, MemoryRegion, NotSupportedError, VerbsCallError
from aiordma.verbs import memory as memory_module
from aiordma.verbs.capabilities import OnDemandPaging
from tests.internals import ffi, lib
from tests.unit.plain_domain import PlainDomain

WRITE = Access.LOCAL_WRITE
PAGE = mmap.PAGESIZE


class Domain(PlainDomain):
    """Notes how it was called; supports everything unless the test says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []
        self.again: list[tuple[int, int, int, int]] = []
        self.again_result = 0
        self.again_errno = 0
        self.provider.reg_mr_iova = self._register_iova
        self.provider.reg_mr_iova2 = self._register_iova2
        self.provider.rereg_mr = self._register_again
        self.attributes = SimpleNamespace(
            odp=SimpleNamespace(general=OnDemandPaging.SUPPORT), max_mw=1, vendor_id=0
        )
        self.context = SimpleNamespace(device_name="plain0", query=lambda: self.attributes)

    def _register_iova(self, domain: Any, start: Any, length: int, iova: int, access: int) -> Any:
        self.calls.append(("iova", iova, access))
        return self._register(domain, start, length, Access(access))

    def _register_iova2(self, domain: Any, start: Any, length: int, iova: int, access: int) -> Any:
        self.calls.append(("iova2", iova, access))
        return self._register(domain, start, length, Access(access))

    def _register_again(
        self, region: Any, flags: int, domain: Any, start: Any, length: int, access: int
    ) -> int:
        self.again.append((flags, int(ffi.cast("uintptr_t", start)), length, access))
        ffi.errno = self.again_errno
        if self.again_result in (0, lib.IBV_REREG_MR_ERR_DO_FORK_OLD):
            self.registered[region.lkey + 100] = self.registered.pop(region.lkey)
            region.lkey, region.rkey = region.lkey + 100, region.rkey + 100
        return self.again_result


@pytest.fixture
def domain() -> Iterator[Domain]:
    with Domain() as domain:
        yield domain


def register(domain: Domain, buffer: Any, access: Access | None = None, **more: Any) -> Any:
    any_domain: Any = domain
    return MemoryRegion(any_domain, buffer, access, **more)


# -- iova -----------------------------------------------------------------------------------------


def test_an_iova_is_the_address_of_the_first_byte(domain: Domain) -> None:
    memory = mmap.mmap(-1, PAGE)
    with register(domain, memory, Access.REMOTE_READ, iova=16 * PAGE) as region:
        assert domain.calls == [("iova", 16 * PAGE, Access.REMOTE_READ)]
        assert region.address == 16 * PAGE
        part = region[8:12]
        assert part.address == 16 * PAGE + 8
        assert part.remote().address == 16 * PAGE + 8
        memory[8:12] = b"here"
        assert bytes(part.view) == b"here"


def test_zero_based_is_an_iova_of_zero(domain: Domain) -> None:
    memory = mmap.mmap(-1, PAGE)
    with register(domain, memory, Access.REMOTE_READ | Access.ZERO_BASED) as region:
        assert domain.calls == [("iova", 0, Access.REMOTE_READ)]
        assert region.address == 0
        assert region[5:].remote().address == 5
        assert region.access & Access.ZERO_BASED
    with pytest.raises(ValueError, match="ZERO_BASED means iova=0"):
        register(domain, memory, Access.ZERO_BASED, iova=PAGE)


@pytest.mark.parametrize(
    ("iova", "words"),
    [
        (1, "1 bytes into a page, and the buffer 0"),
        (-PAGE, "beyond the address space"),
        (2**64 - PAGE, "beyond the address space"),
    ],
)
def test_an_iova_that_does_not_fit_is_refused(domain: Domain, iova: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        register(domain, mmap.mmap(-1, PAGE), iova=iova)
    assert domain.calls == []
    assert domain._children == {}


def test_a_driver_that_ignores_iovas_is_not_asked(domain: Domain) -> None:
    domain.attributes.vendor_id = 0x626D74
    with pytest.raises(NotSupportedError, match="plain0"):
        register(domain, mmap.mmap(-1, PAGE), iova=0)
    assert domain.calls == []


# -- access ---------------------------------------------------------------------------------------


def test_optional_access_goes_through_the_call_that_can_leave_it_out(domain: Domain) -> None:
    with register(domain, bytearray(8), WRITE | Access.RELAXED_ORDERING) as region:
        assert domain.calls == [("iova2", region.address, WRITE | Access.RELAXED_ORDERING)]


def test_what_not_every_device_has_is_asked_before_c_is(domain: Domain) -> None:
    register(domain, bytearray(8), Access.ON_DEMAND | Access.HUGETLB).close()
    register(domain, bytearray(8), Access.MW_BIND).close()
    with pytest.raises(ValueError, match="HUGETLB goes with ON_DEMAND"):
        register(domain, bytearray(8), Access.HUGETLB)
    domain.attributes.odp.general = OnDemandPaging(0)
    domain.attributes.max_mw = 0
    with pytest.raises(NotSupportedError, match="ON_DEMAND: plain0"):
        register(domain, bytearray(8), Access.ON_DEMAND)
    with pytest.raises(NotSupportedError, match="MW_BIND: plain0"):
        register(domain, bytearray(8), Access.MW_BIND)
    assert domain.count == 2


# -- again ----------------------------------------------------------------------------------------

CHANGE_ACCESS = lib.IBV_REREG_MR_CHANGE_ACCESS
CHANGE_PD = lib.IBV_REREG_MR_CHANGE_PD
CHANGE_TRANSLATION = lib.IBV_REREG_MR_CHANGE_TRANSLATION


def test_access_is_changed_and_keys_are_new(domain: Domain) -> None:
    with register(domain, bytearray(8)) as region:
        lkey, address = region.lkey, region.address
        region.reregister(Access.REMOTE_WRITE)
        wanted = Access.REMOTE_WRITE | WRITE
        assert domain.again == [(CHANGE_ACCESS, 0, 0, wanted)]
        assert (region.access, region.address, region.lkey) == (wanted, address, lkey + 100)
        assert region.remote().rkey == region.rkey == lkey + 1100


def test_memory_and_domain_are_changed(domain: Domain) -> None:
    with Domain() as other:
        other.context = domain.context
        other.provider = domain.provider
        region = register(domain, bytearray(8))
        longer = bytearray(b"longer than before")
        region.reregister(buffer=longer, domain=other)
        ((flags, start, length, _),) = domain.again
        assert flags == CHANGE_TRANSLATION | CHANGE_PD
        assert (start, length) == (region.address, len(longer))
        assert bytes(region.view) == longer
        assert region.domain is other
        assert domain._children == {}
        with pytest.raises(BufferError):
            longer.append(0)  # exported as any registered buffer
        region.close()
        longer.append(0)


def test_a_mark_for_forks_that_stays_behind_is_no_failure(domain: Domain) -> None:
    with register(domain, bytearray(8)) as region:
        domain.again_result = lib.IBV_REREG_MR_ERR_DO_FORK_OLD
        region.reregister(Access.REMOTE_READ)
        assert region.access == Access.REMOTE_READ


def test_unsupported_reregistration_keeps_the_region(domain: Domain) -> None:
    with register(domain, bytearray(8)) as region:
        before = (region.access, region.lkey, region.address)
        domain.again_result, domain.again_errno = lib.IBV_REREG_MR_ERR_CMD, errno.EOPNOTSUPP
        with pytest.raises(NotSupportedError, match="re-registering memory: plain0"):
            region.reregister(Access.REMOTE_READ)
        assert region._usable  # or its posts would take the general path
        domain.again_errno = errno.EINVAL
        with pytest.raises(VerbsCallError, match=r"ibv_rereg_mr.*can only be closed"):
            region.reregister(Access.REMOTE_READ)
        assert (region.access, region.lkey, region.address) == before


@pytest.mark.parametrize(
    "result", [lib.IBV_REREG_MR_ERR_CMD, lib.IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW]
)
def test_failed_change_keeps_both_memories_until_the_close(domain: Domain, result: int) -> None:
    """The man page says only that the region must not be used: the device may access either."""
    with Domain() as other:
        other.context, other.provider = domain.context, domain.provider
        old, new = bytearray(8), bytearray(16)
        region = register(domain, old)
        domain.again_result, domain.again_errno = result, errno.EIO
        with pytest.raises(VerbsCallError, match=r"ibv_rereg_mr.*can only be closed"):
            region.reregister(buffer=new, domain=other)
        for memory in (old, new):
            with pytest.raises(BufferError):
                memory.append(0)
        assert list(domain._children.values()) == list(other._children.values()) == [region]
        with pytest.raises(ClosedError, match="can only be closed"):
            region.reregister(Access.REMOTE_READ)
        region.close()
        for memory in (old, new):
            memory.append(0)
        assert domain._children == other._children == {}


@pytest.mark.parametrize("result", [lib.IBV_REREG_MR_ERR_INPUT, lib.IBV_REREG_MR_ERR_DONT_FORK_NEW])
def test_refused_change_keeps_the_region(domain: Domain, result: int) -> None:
    with register(domain, bytearray(8), WRITE | Access.MW_BIND) as region:
        before = (region.access, region.lkey, region.address)
        domain.again_result, domain.again_errno = result, errno.EINVAL
        with pytest.raises(VerbsCallError, match=r"ibv_rereg_mr.*The region is unchanged"):
            region.reregister(Access.REMOTE_READ)
        assert region._usable
        domain.again_errno = errno.EBUSY
        with pytest.raises(BusyError, match=r"unchanged.*close or invalidate the window"):
            region.reregister(Access.REMOTE_READ)
        assert region._usable
        assert (region.access, region.lkey, region.address) == before
        domain.again_result = 0
        region.reregister(Access.REMOTE_READ)
        assert region.access == Access.REMOTE_READ


def test_what_cannot_be_changed_is_refused_before_c_sees_it(domain: Domain) -> None:
    with register(domain, bytearray(8)) as region, Domain() as stranger:
        part = region[:]
        part._hold()
        with pytest.raises(BusyError, match="1 posted"):
            region.reregister(WRITE)
        part._release()
        with pytest.raises(ValueError, match="nothing to change"):
            region.reregister()
        with pytest.raises(ValueError, match="another opened device"):
            region.reregister(domain=stranger)
        with pytest.raises(TypeError, match="bytes is read-only"):
            region.reregister(WRITE, buffer=b"constant")
        with pytest.raises(TypeError, match="bytes is read-only"):
            region.reregister(buffer=b"constant")
        with pytest.raises(ValueError, match="empty"):
            region.reregister(buffer=b"")
        with pytest.raises(ValueError, match="ZERO_BASED"):
            region.reregister(Access.ZERO_BASED)
    assert domain.again == []


# -- new pages ------------------------------------------------------------------------------------


def resident(memory: mmap.mmap) -> int:
    """Return how many pages of a mapping are there."""
    found = (ctypes.c_ubyte * (len(memory) // PAGE))()
    start = ctypes.c_void_p(int(ffi.cast("uintptr_t", ffi.from_buffer(memory))))
    assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(memory)), found) == 0
    return sum(each & 1 for each in found)


@pytest.mark.parametrize("pages", [3, 1000, 3000])
def test_new_pages_are_there_before_they_are_pinned(
    domain: Any, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(memory_module, "LARGE", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    with mmap.mmap(-1, (pages + 2) * PAGE) as memory, memoryview(memory) as view:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        part = view[PAGE + 8 : (pages + 1) * PAGE]
        for access in (Access(0), WRITE | Access.ON_DEMAND):
            with MemoryRegion(domain, part, access):
                assert resident(memory) == 0
        with MemoryRegion(domain, part[: PAGE - 9], WRITE):  # shorter than LARGE
            assert resident(memory) == 0
        with MemoryRegion(domain, part, WRITE):
            assert resident(memory) == pages
        part.release()


def test_pages_that_cannot_be_there_are_left_to_the_driver(
    domain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_module, "LARGE", PAGE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    path = tmp_path / "short"
    path.write_bytes(bytes(4 * PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4 * PAGE) as memory:
        file.truncate(PAGE)
        with MemoryRegion(domain, memory, WRITE):
            assert [length for _, length, _ in domain.registered.values()] == [4 * PAGE]
