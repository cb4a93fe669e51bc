"""Memory beyond the plain registration: with an iova, every access flag, and registered again."""

import mmap
from typing import Any

import pytest

import aiordma
from aiordma import Access, MemoryRegion
from aiordma.verbs import Device
from tests.device.players import connected, one_loop
from tests.devices import DeviceUnderTest

REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE
PAGE = mmap.PAGESIZE


@pytest.mark.anyio
@one_loop
@pytest.mark.capability("iova")
@pytest.mark.parametrize(
    ("access", "options", "address"),
    [(REMOTE, {"iova": 0x7000_0000}, 0x7000_0000), (REMOTE | Access.ZERO_BASED, {}, 0)],
    ids=["iova", "ZERO_BASED"],
)
async def test_peers_and_requests_reach_memory_by_the_address_that_it_was_given(
    access: Access, options: dict[str, Any], address: int
) -> None:
    async with connected() as (client, server):
        memory = mmap.mmap(-1, 2 * PAGE)
        with MemoryRegion(server.protection_domain, memory, access, **options) as region:
            remote = region.remote()
            assert remote.address == region.address == address
            await client.write(b"over there", remote[PAGE : PAGE + 10])
            assert memory[PAGE : PAGE + 10] == b"over there"
            assert await client.read_bytes(remote[PAGE + 5 : PAGE + 10]) == b"there"
            memory[7:11] = b"mine"
            await server.send(region[7:11])
            assert await client.receive() == b"mine"


def test_where_iovas_are_ignored_they_are_refused(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain:
        memory = mmap.mmap(-1, PAGE)
        with pytest.raises(ValueError, match="into a page"):
            MemoryRegion(domain, memory, iova=8)
        if device.lacks("iova"):
            for access in (Access.LOCAL_WRITE, Access.ZERO_BASED):
                with pytest.raises(aiordma.NotSupportedError, match=rf"iova.*{device.name}"):
                    MemoryRegion(domain, memory, access, iova=0)
        assert domain._children == {}


REFUSED: dict[Access, type[Exception]] = {
    Access.ON_DEMAND: aiordma.NotSupportedError,
    Access.HUGETLB: ValueError,
}
REFUSED_BY_SIW = (Access.MW_BIND, Access.ZERO_BASED)


@pytest.mark.parametrize("access", Access, ids=lambda access: access.name)
def test_every_access_is_given_or_refused_by_name(device: DeviceUnderTest, access: Access) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain:
        memory = mmap.mmap(-1, PAGE)
        error = REFUSED.get(access)
        if device.driver == "siw" and access in REFUSED_BY_SIW:
            error = aiordma.NotSupportedError
        if error is None:
            with MemoryRegion(domain, memory, access) as region:
                assert region.access & access
        else:
            # ZERO_BASED is an iova of zero.
            with pytest.raises(error, match=rf"{access.name}|iova"):
                MemoryRegion(domain, memory, access)


def test_memory_does_not_move_to_a_closed_domain(device: DeviceUnderTest) -> None:
    with Device(device.name).open() as context, context.alloc_pd() as domain:
        closed = context.alloc_pd()
        closed.close()
        with MemoryRegion(domain, bytearray(8)) as region:
            with pytest.raises(aiordma.ClosedError, match="ProtectionDomain is closed"):
                region.reregister(domain=closed)
            assert region.domain is domain
            assert bytes(region) == bytes(8)


def test_memory_is_registered_again_or_the_device_is_named(device: DeviceUnderTest) -> None:
    with (
        Device(device.name).open() as context,
        context.alloc_pd() as domain,
        context.alloc_pd() as other,
        MemoryRegion(domain, bytearray(8)) as region,
    ):
        before = (region.lkey, region.access)
        if not device.lacks("reregistration"):
            longer = bytearray(64)
            region.reregister(REMOTE, buffer=longer, domain=other)
            assert (len(region.view), region.domain) == (64, other)
            assert region.access & REMOTE == REMOTE
            return
        for change in ({"access": REMOTE}, {"buffer": bytearray(64)}, {"domain": other}):
            with pytest.raises(aiordma.NotSupportedError, match=device.name):
                region.reregister(**change)
        assert (region.lkey, region.access) == before
