"""Regions of dma-bufs, on a table whose driver answers as the test says."""

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import aiordma
from aiordma import Access, MemoryRegion, RemoteMemory
from aiordma.verbs import Device, DmabufRegion, Sge
from aiordma.verbs.raw_parts import RawPart, packed_parts
from tests.internals import RDMA_CORE_VERSIONS, SOFTWARE, Provider, ffi


class Driver:
    """Registers by what `register` returns, and records calls."""

    def __init__(self, table: Any, register: Callable[..., Any]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.freed: list[Any] = []
        self.register = register
        self.table = table

    def reg_dmabuf_mr(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.register()

    def dereg_mr(self, pointer: Any) -> int:
        self.freed.append(pointer)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


@pytest.fixture
def domain() -> Iterator[Any]:
    """A domain of which no descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))
    with Device(SOFTWARE).open() as context, context.alloc_pd() as made:
        within = len(os.listdir("/proc/self/fd"))
        yield made
        assert len(os.listdir("/proc/self/fd")) == within
    assert len(os.listdir("/proc/self/fd")) <= max(before, within)


def refuse(error: int) -> Callable[[], Any]:
    def register() -> Any:
        ffi.errno = error
        return ffi.NULL

    return register


def test_region_is_registered_addressed_and_freed(domain: Any) -> None:
    region = ffi.new("struct ibv_mr *", {"lkey": 7, "rkey": 9})
    driver = Driver(domain.provider, lambda: region)
    domain.provider = driver
    memory = DmabufRegion(
        domain, 0, 4096, offset=8192, access=Access.REMOTE_WRITE, iova=0x7F00_0000_0000
    )
    assert isinstance(memory, MemoryRegion)
    assert repr(memory) == "<DmabufRegion of 4096 bytes>"
    # REMOTE_WRITE needs LOCAL_WRITE.
    access = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    assert driver.calls == [(domain.pointer, 8192, 4096, 0x7F00_0000_0000, 0, access)]
    assert memory.remote() == RemoteMemory(0x7F00_0000_0000, 4096, 9)
    parts: list[RawPart] = [memory, memory[8:16], Sge(memory.address + 8, 8, memory.lkey)]
    sges, length, _ = packed_parts(parts, "call")
    first, second, third = (ffi.from_buffer("struct ibv_sge[]", sges)[i] for i in range(3))
    assert (first.addr, first.length, first.lkey) == (0x7F00_0000_0000, 4096, 7)
    for part in (second, third):
        assert (part.addr, part.length, part.lkey) == (0x7F00_0000_0008, 8, 7)
    assert (length, len(memory)) == (4112, 4096)
    memory.close()
    assert driver.freed == [region]
    with pytest.raises(aiordma.ClosedError):
        memory.remote()
    with pytest.raises(aiordma.ClosedError):
        packed_parts([memory], "call")


def test_address_without_an_iova_is_the_offset(domain: Any) -> None:
    region = ffi.new("struct ibv_mr *")
    driver = Driver(domain.provider, lambda: region)
    domain.provider = driver
    DmabufRegion(domain, 0, 64, offset=100).close()
    assert driver.calls == [(domain.pointer, 100, 64, 100, 0, int(Access.LOCAL_WRITE))]


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (errno.EOPNOTSUPP, aiordma.NotSupportedError, "registering a dma-buf: software.*: copy"),
        (524, aiordma.NotSupportedError, "registering a dma-buf: software.*: copy"),  # ENOTSUPP
        (errno.EINVAL, aiordma.VerbsCallError, "ibv_reg_dmabuf_mr: Invalid.*descriptor 0"),
    ],
)
def test_refusal_names_the_call_and_leaves_nothing(
    domain: Any, error: int, raised: type[Exception], text: str
) -> None:
    domain.provider = Driver(domain.provider, refuse(error))
    with pytest.raises(raised, match=text):
        DmabufRegion(domain, 0, 4096)
    assert domain._children == {}


def test_old_library_is_named_with_its_function(domain: Any) -> None:
    empty = ffi.new("struct aiordma_provider *")
    usual, domain.provider = domain.provider, Provider("rdma-core", empty, RDMA_CORE_VERSIONS)
    expected = (
        "registering a dma-buf: rdma-core has no ibv_reg_dmabuf_mr: install rdma-core 34 or newer"
    )
    with pytest.raises(aiordma.NotSupportedError, match=f"^{expected}$"):
        DmabufRegion(domain, 0, 4096)
    domain.provider = usual
    assert domain._children == {}


def test_closed_descriptor_is_named(domain: Any) -> None:
    descriptor = os.memfd_create("closed")
    os.close(descriptor)
    with pytest.raises(aiordma.VerbsCallError, match=f"descriptor {descriptor}") as caught:
        DmabufRegion(domain, descriptor, 4096)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"fd": -1}, ValueError, "fd=-1"),
        ({"length": 0}, ValueError, "length=0"),
        ({"offset": -1}, ValueError, "offset=-1"),
        ({"iova": -1}, ValueError, "iova=-1"),
        ({"iova": 1}, ValueError, "iova=0x1: it lies 1 bytes into a page, and offset=0 0"),
        ({"iova": 2**64 - 4096, "length": 8192}, ValueError, "beyond the address space"),
        ({"access": "read"}, TypeError, "access='read'"),
        ({"access": Access.MW_BIND}, ValueError, r"access=Access\.MW_BIND: for a dma-buf"),
        ({"access": Access.ZERO_BASED}, ValueError, "ZERO_BASED"),
    ],
    ids=str,
)
def test_arguments_are_checked_by_name(
    domain: Any, given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        DmabufRegion(domain, **{"fd": 0, "length": 4096, **given})


def test_domain_is_checked_by_name() -> None:
    with pytest.raises(TypeError, match="domain="):
        DmabufRegion(None, 5, 4096)  # type: ignore[arg-type]


@pytest.mark.promise("The CPU does not access memory of other devices")
def test_cpu_does_not_access_the_memory(domain: Any) -> None:
    domain.provider = Driver(domain.provider, lambda: ffi.new("struct ibv_mr *"))
    with DmabufRegion(domain, 0, 4096) as memory:
        for access in (
            lambda: memory.view,
            lambda: bytes(memory),
            lambda: memory[:8].view,
            lambda: bytes(memory[:8]),
        ):
            with pytest.raises(aiordma.NotSupportedError, match="which the CPU does not access"):
                access()
        with pytest.raises(aiordma.NotSupportedError, match="cannot be re-registered"):
            memory.reregister(Access.REMOTE_READ)
        for part in (memory, memory[:8]):
            with pytest.raises(ValueError, match=r"call\(\): .*INLINE copies the bytes"):
                packed_parts([part], "call", inline=True)


def test_inline_parts_are_read_where_the_cpu_has_them() -> None:
    with Device(SOFTWARE).open() as context, context.alloc_pd() as domain:
        buffer = bytearray(b"0123456789abcdef")
        usual = MemoryRegion(domain, buffer)
        moved = MemoryRegion(domain, buffer, iova=usual.address + 0x10000)
        for region in (usual, moved):
            for part, start in ((region, usual.address), (region[8:], usual.address + 8)):
                sges, _, _ = packed_parts([part], "call", inline=True)
                assert ffi.from_buffer("struct ibv_sge[]", sges)[0].addr == start
