"""The software device's registration of descriptors, as C has it (ibv_reg_dmabuf_mr)."""

import errno
import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.internals import ffi, lib, software
from tests.unit.child import run_child
from tests.unit.software_device import failed, nothing_left, opened_domain
from tests.unit.sources import ROOT
from tests.unit.test_native import FLAGS, WITHOUT_RUNTIME

LOCAL = lib.IBV_ACCESS_LOCAL_WRITE
READ, WRITE = lib.IBV_ACCESS_REMOTE_READ, lib.IBV_ACCESS_REMOTE_WRITE
RELAXED = lib.IBV_ACCESS_RELAXED_ORDERING
PAGE = mmap.PAGESIZE
NAME = "/memfd:dmabuf"


@pytest.fixture
def domain() -> Iterator[Any]:
    """A protection domain of which nothing is left, no mapping either."""
    with nothing_left(), opened_domain() as (_, made):
        yield made
    assert mappings() == []


@pytest.fixture
def fd() -> Iterator[int]:
    """Four pages of memory."""
    descriptor = os.memfd_create("dmabuf", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4 * PAGE)
    yield descriptor
    os.close(descriptor)


def mappings() -> list[int]:
    """The lengths of the mappings of that memory."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if NAME in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            found.append(end - start)
    return found


def register(
    domain: Any, fd: int, length: int, *, offset: int = 0, iova: int = 0, access: int = LOCAL
) -> Any:
    return software().reg_dmabuf_mr(domain, offset, length, iova, fd, access)


def test_memory_is_mapped_by_the_page_until_it_is_deregistered(domain: Any, fd: int) -> None:
    region = register(domain, fd, 16, offset=PAGE + 8, iova=0x7000 * PAGE + 8)
    assert region
    assert mappings() == [PAGE]
    both = register(domain, fd, 16, offset=2 * PAGE - 8, iova=PAGE - 8)
    assert sorted(mappings()) == [PAGE, 2 * PAGE]
    assert region.lkey != both.lkey
    assert software().dereg_mr(region) == 0
    assert software().dereg_mr(both) == 0


def test_descriptor_may_be_closed(domain: Any) -> None:
    descriptor = os.memfd_create("dmabuf")
    os.ftruncate(descriptor, PAGE)
    region = register(domain, descriptor, PAGE)
    os.close(descriptor)
    assert region
    assert mappings() == [PAGE]
    assert software().dereg_mr(region) == 0


def test_memory_of_all_pages_is_registered(domain: Any, fd: int) -> None:
    region = register(domain, fd, 4 * PAGE, access=LOCAL | READ | WRITE | RELAXED)
    assert region
    assert software().dereg_mr(region) == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"length": 0}, errno.EINVAL),
        ({"offset": 4 * PAGE}, errno.EINVAL),
        ({"offset": 1, "iova": 1, "length": 4 * PAGE}, errno.EINVAL),
        ({"length": 2**63}, errno.EINVAL),
        ({"offset": 2**64 - PAGE, "length": 2 * PAGE}, errno.EINVAL),
        ({"iova": 1}, errno.EINVAL),
        ({"iova": 2**64 - PAGE, "length": 2 * PAGE}, errno.EINVAL),
        ({"access": WRITE}, errno.EINVAL),
        ({"access": LOCAL | lib.IBV_ACCESS_MW_BIND}, errno.EINVAL),
        ({"access": LOCAL | lib.IBV_ACCESS_ZERO_BASED}, errno.EINVAL),
        ({"access": LOCAL | lib.IBV_ACCESS_ON_DEMAND}, errno.EINVAL),
        ({"access": 1 << 29}, errno.EINVAL),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(
    domain: Any, fd: int, wrong: dict[str, int], error: int
) -> None:
    assert failed(register(domain, fd, **{"length": PAGE, **wrong})) == error


def test_without_a_domain_nothing_is_registered(fd: int) -> None:
    assert failed(register(ffi.NULL, fd, PAGE)) == errno.EINVAL


def test_closed_descriptor_is_refused(domain: Any) -> None:
    descriptor = os.memfd_create("closed")
    os.close(descriptor)
    assert failed(register(domain, descriptor, PAGE)) == errno.EBADF


def test_what_is_no_memory_is_refused(domain: Any, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for descriptor in (folder, null):
            assert failed(register(domain, descriptor, 1)) == errno.EINVAL
    finally:
        os.close(folder)
        os.close(null)
    with socket.socket() as plain:
        assert failed(register(domain, plain.fileno(), 1)) == errno.EINVAL


def test_memory_that_cannot_be_mapped_is_refused(domain: Any) -> None:
    # A file of the kernel's with a size and without a mapping, as the dma-buf of some GPUs.
    descriptor = os.open("/sys/devices/system/cpu/online", os.O_RDONLY)
    try:
        assert failed(register(domain, descriptor, 1, access=READ)) == errno.EOPNOTSUPP
    finally:
        os.close(descriptor)


def test_memory_open_for_reading_permits_no_writing(domain: Any, fd: int) -> None:
    descriptor = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        assert failed(register(domain, descriptor, PAGE)) == errno.EACCES
        region = register(domain, descriptor, PAGE, access=READ)
        assert region
        assert software().dereg_mr(region) == 0
    finally:
        os.close(descriptor)


def test_memory_of_a_descriptor_cannot_be_reregistered(domain: Any, fd: int) -> None:
    region = register(domain, fd, PAGE)
    change = lib.IBV_REREG_MR_CHANGE_ACCESS
    result = software().rereg_mr(region, change, ffi.NULL, ffi.NULL, 0, LOCAL | READ)
    assert (result, ffi.errno) == (lib.IBV_REREG_MR_ERR_INPUT, errno.EOPNOTSUPP)
    assert software().dereg_mr(region) == 0


ACCESSES = """
import asyncio, mmap, os
import aiordma, aiordma.testing

async def main():
    fd = os.memfd_create("dmabuf")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    access = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
    async with aiordma.testing.connected_pair() as (client, server):
        region = server.register_dmabuf(fd, mmap.PAGESIZE, offset=mmap.PAGESIZE, access=access)
        await client.write(b"by the peer", region[:11].remote())
        assert await client.read_bytes(region[:11].remote()) == b"by the peer"
        await server.send(region[3:6])
        assert await client.receive() == b"the"
    assert os.pread(fd, 11, mmap.PAGESIZE) == b"by the peer"

asyncio.run(main())
"""


def test_pages_that_the_kernel_does_not_copy_are_accessed(tmp_path: Path) -> None:
    """As those of some GPUs' dma-bufs: tests/native/dmabuf.c makes the memory of files such."""
    library = tmp_path / "dmabuf.so"
    command = ["gcc", *FLAGS, "-shared", "-fPIC", "tests/native/dmabuf.c", "-o", str(library)]
    subprocess.run(command, cwd=ROOT, env=WITHOUT_RUNTIME, check=True)
    run_child(ACCESSES, LD_PRELOAD=str(library))
