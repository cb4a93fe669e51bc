"""Regions of dma-bufs, on a table whose driver registers them: no device of the tests does."""

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiordma
from aiordma import Access, Device, DmabufRegion, RemoteMemory, Sge
from aiordma._base.provider import SOFTWARE
from aiordma._native import ffi
from aiordma.verbs.raw_parts import packed_parts


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


def test_region_is_registered_addressed_and_freed() -> None:
    with Device(SOFTWARE).open() as context, context.alloc_pd() as domain:
        region = SimpleNamespace(lkey=7, rkey=9)
        driver = Driver(domain.provider, lambda: region)
        domain.provider = driver  # type: ignore[assignment]
        memory = DmabufRegion(
            domain, 5, 4096, offset=8192, access=Access.REMOTE_WRITE, iova=0x7F00_0000_0000
        )
        # REMOTE_WRITE needs LOCAL_WRITE.
        access = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        assert driver.calls == [(domain.pointer, 8192, 4096, 0x7F00_0000_0000, 5, access)]
        assert memory.remote() == RemoteMemory(0x7F00_0000_0000, 4096, 9)
        sges, length, _ = packed_parts([memory, Sge(memory.address + 8, 8, memory.lkey)], "call")
        first, second = (ffi.from_buffer("struct ibv_sge[]", sges)[i] for i in range(2))
        assert (first.addr, first.length, first.lkey) == (0x7F00_0000_0000, 4096, 7)
        assert (second.addr, second.length, second.lkey) == (0x7F00_0000_0008, 8, 7)
        assert (length, len(memory)) == (4104, 4096)
        memory.close()
        assert driver.freed == [region]
        with pytest.raises(aiordma.ClosedError):
            memory.remote()
        with pytest.raises(aiordma.ClosedError):
            packed_parts([memory], "call")


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (errno.EOPNOTSUPP, aiordma.NotSupportedError, "registering a dma-buf: software"),
        (errno.EINVAL, aiordma.VerbsCallError, "ibv_reg_dmabuf_mr: Invalid.*descriptor 5"),
    ],
)
def test_refusal_names_the_call_and_leaves_nothing(
    error: int, raised: type[Exception], text: str
) -> None:
    def refuse() -> Any:
        ffi.errno = error
        return ffi.NULL

    with Device(SOFTWARE).open() as context, context.alloc_pd() as domain:
        domain.provider = Driver(domain.provider, refuse)  # type: ignore[assignment]
        with pytest.raises(raised, match=text):
            DmabufRegion(domain, 5, 4096)
        assert domain._children == {}


def test_arguments_are_checked_by_name() -> None:
    with Device(SOFTWARE).open() as context, context.alloc_pd() as domain:
        with pytest.raises(TypeError, match="domain="):
            DmabufRegion(None, 5, 4096)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="fd=-1"):
            DmabufRegion(domain, -1, 4096)
        with pytest.raises(ValueError, match="offset=-1"):
            DmabufRegion(domain, 5, 4096, offset=-1)
        with pytest.raises(TypeError, match="access="):
            DmabufRegion(domain, 5, 4096, access="read")  # type: ignore[arg-type]
