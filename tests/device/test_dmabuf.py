"""Dma-bufs as memory of connections: parts of requests, memory of the peer's, grants."""

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiordma
from aiordma import Access, RemoteMemory
from tests.device.dmabufs import Pages, pages
from tests.device.players import OWN_RECEIVES, REMOTE, both_ways, connected, one_loop
from tests.device.test_streams import streams
from tests.devices import ADDRESS
from tests.internals import endpoint_of

pytestmark = [pytest.mark.anyio, pytest.mark.capability("dmabuf")]

PAGE = mmap.PAGESIZE
IOVA = 0x1000_0000_0000 + 64
"""An address at which this process has no memory: the processor would fault there."""
MEMORY = pytest.mark.parametrize(
    "udmabuf",
    [
        pytest.param(False, marks=pytest.mark.capability("dmabuf_of_file")),
        pytest.param(True, marks=pytest.mark.capability("udmabuf")),
    ],
    ids=str,
)


@asynccontextmanager
async def registered(
    *, udmabuf: bool | None = None, access: Access = REMOTE, **options: Any
) -> AsyncIterator[
    tuple[aiordma.Connection, aiordma.Connection, Pages, aiordma.verbs.DmabufRegion]
]:
    """Yield (client, server), and memory of the server's that begins 64 bytes into the second page.

    The descriptor is closed, and the address is none of this process's.
    """
    with pages(4, udmabuf=udmabuf) as memory:
        async with connected(**options) as (client, server):
            first = None if server.options.receive_buffers else server.post_recv(bytearray(8))
            await client.send(b"first")  # as the connecting side must on iWARP
            await (server.receive() if first is None else first)
            region = server.register_dmabuf(
                memory.fd, 2 * PAGE, offset=PAGE + 64, access=access, iova=IOVA
            )
            yield client, server, memory, region


@pytest.mark.promise("The CPU does not access memory of other devices")
@MEMORY
async def test_peer_reads_and_writes_the_memory(udmabuf: bool) -> None:
    async with registered(udmabuf=udmabuf) as (client, _, memory, region):
        assert region.remote() == RemoteMemory(IOVA, 2 * PAGE, region.rkey)
        await client.write(b"from the peer", region.remote()[:13])
        assert memory.bytes[PAGE + 64 : PAGE + 77] == b"from the peer"
        large = bytes(range(256)) * (2 * PAGE // 256)
        await client.write(large, region.remote())
        assert memory.bytes[PAGE + 64 : 3 * PAGE + 64] == large
        assert memory.bytes[: PAGE + 64] == bytes(PAGE + 64)
        assert memory.bytes[3 * PAGE + 64 :] == bytes(PAGE - 64)
        memory.bytes[PAGE + 64 : PAGE + 68] = b"ours"
        assert await client.read_bytes(region[:8].remote()) == b"ours" + large[4:8]


@pytest.mark.promise("The CPU does not access memory of other devices")
@MEMORY
async def test_memory_is_local_memory_of_requests(udmabuf: bool) -> None:
    async with registered(udmabuf=udmabuf) as (client, server, memory, region):
        target = client.register(bytearray(PAGE), REMOTE)
        memory.bytes[PAGE + 64 : 2 * PAGE + 64] = bytes(range(256)) * (PAGE // 256)
        # Short enough to go inline, which the processor would copy.
        await server.write(region[1:9], target[:8].remote())
        assert bytes(target[:8]) == bytes(range(1, 9))
        await server.post_write(region[:PAGE], target.remote())
        assert bytes(target) == bytes(range(256)) * (PAGE // 256)
        await server.send(region[:4])
        assert await client.receive() == bytes(range(4))
        target.view[:] = b"x" * PAGE
        await server.read(region[8:12], target[:4].remote())
        assert memory.bytes[PAGE + 71 : PAGE + 77] == b"\x07xxxx\x0c"


async def test_whole_region_is_a_part() -> None:
    async with registered(server=OWN_RECEIVES) as (client, server, memory, region):
        receive = server.post_recv(region)
        await client.send(b"into the region")
        assert (await receive).byte_len == 15
        assert memory.bytes[PAGE + 64 : PAGE + 79] == b"into the region"


@pytest.mark.promise("The CPU does not access memory of other devices")
@pytest.mark.parametrize("length", [4, 1000])
async def test_memory_goes_with_buffers_in_one_request(length: int) -> None:
    """Whatever is short enough to be copied is registered instead."""
    async with registered() as (client, server, memory, region):
        memory.bytes[PAGE + 64 : PAGE + 64 + length] = b"g" * length
        expected = b"head" + b"g" * length + b"tail"
        tail = server.register(bytearray(b"tail"))
        await server.sendv([b"head", region[:length], tail])
        assert await client.receive() == expected
        await server.post_sendv([b"head", region[:length], b"", bytearray(b"tail")])
        assert await client.receive() == expected
        with server.chain() as chain:
            request = chain.post_sendv([b"head", region[:length], b"tail"])
        await request
        assert await client.receive() == expected
        target = client.register(bytearray(length + 8), REMOTE)
        await server.writev([b"head", region[:length], b"tail"], target.remote())
        assert bytes(target) == expected
        head = bytearray(4)
        await server.readv([head, region[4 : 4 + length]], target[4:].remote())
        assert (bytes(head), memory.bytes[PAGE + 68 : PAGE + 72]) == (b"gggg", (expected * 2)[8:12])
        assert endpoint_of(server).memory.regions == {id(each): each for each in (region, tail)}


async def test_wrong_part_beside_the_memory_is_named() -> None:
    async with registered() as (_, server, _, region):
        wrong: Any = 42
        with pytest.raises(TypeError, match=r"parts\[1\]=42"):
            server.post_sendv([region[:8], wrong])


@pytest.mark.capability("atomics")
async def test_atomics_work_on_the_memory() -> None:
    access = REMOTE | Access.REMOTE_ATOMIC
    async with registered(access=access) as (client, server, memory, region):
        memory.bytes[PAGE + 64] = 5
        assert await client.fetch_add(region[:8].remote(), 2) == 5
        target = client.register(bytearray(8), Access.REMOTE_ATOMIC)
        target.view[0] = 9
        await server.post_fetch_add(region[8:16], target.remote(), 1)
        assert memory.bytes[PAGE + 64 : PAGE + 80] == bytes([7, *[0] * 7, 9, *[0] * 7])


@pytest.mark.promise("The CPU does not access memory of other devices")
async def test_region_in_use_is_not_closed() -> None:
    async with registered(server=OWN_RECEIVES) as (client, server, _, region):
        receive = server.post_recv(region[:8])
        with pytest.raises(aiordma.BusyError, match="in use by 1 posted"):
            region.close()
        await client.send(b"8 bytes.")
        await receive
        region.close()
        assert region.closed
        with pytest.raises(aiordma.ClosedError):
            server.post_recv(region[:8])


async def test_closed_region_is_refused_to_the_peer() -> None:
    async with registered() as (client, _, memory, region):
        remote = region.remote()
        region.close()
        request = client.post_write(b"late", remote[:4])
        request.add_done_callback(aiordma.WorkRequest.exception)
        await client.ended()
        assert memory.bytes[PAGE + 64 : PAGE + 68] == bytes(4)


@pytest.mark.capability("dmabuf_of_file")
async def test_truncated_memory_fails_the_access() -> None:
    """It is a file here, and its pages are gone. A dma-buf cannot be truncated."""
    async with registered() as (client, server, memory, region):
        os.ftruncate(memory.fd, PAGE)
        request = client.post_write(b"gone", region[:4].remote())
        request.add_done_callback(aiordma.WorkRequest.exception)
        await client.ended()
        await server.ended()
        assert os.fstat(memory.fd).st_size == PAGE


async def test_region_ends_with_its_connection() -> None:
    async with registered() as (_, server, _, region):
        await server.aclose()
        assert region.closed


async def test_access_that_was_not_given_is_refused() -> None:
    async with registered(access=Access.REMOTE_READ) as (client, server, _, region):
        with pytest.raises(TypeError, match=r"takes Access\.LOCAL_WRITE$"):
            await server.read(region[8:16], region[:8].remote())
        request = client.post_write(b"no", region[:2].remote())
        request.add_done_callback(aiordma.WorkRequest.exception)
        assert isinstance(await client.ended(), Exception)


@pytest.mark.promise("The CPU does not access memory of other devices")
@MEMORY
async def test_grant_ends_with_its_block(udmabuf: bool) -> None:
    async with registered(udmabuf=udmabuf, access=Access.LOCAL_WRITE) as ends:
        client, server, memory, region = ends
        with pytest.raises(ValueError, match="without remote access"):
            region.remote()
        async with server.grant(region[PAGE : PAGE + 8], REMOTE) as grant:
            with pytest.raises(aiordma.BusyError):
                region.close()
            await client.write(b"granted.", grant.remote)
            assert memory.bytes[2 * PAGE + 64 : 2 * PAGE + 72] == b"granted."
            assert await client.read_bytes(grant.remote) == b"granted."
        await both_ways(client, server)
        region.close()
        request = client.post_write(b"too late", grant.remote)
        request.add_done_callback(aiordma.WorkRequest.exception)
        await client.ended()
        assert memory.bytes[2 * PAGE + 64 : 2 * PAGE + 72] == b"granted."


@pytest.mark.promise("The CPU does not access memory of other devices")
@one_loop
async def test_grant_gives_no_access_beside_its_part() -> None:
    async with registered(access=Access.LOCAL_WRITE) as (client, server, memory, region):
        async with server.grant(region[8:16], REMOTE) as grant:
            remote = grant.remote
            beside = RemoteMemory(remote.address + 8, 1, remote.rkey)
            request = client.post_write(b"x", beside)
            request.add_done_callback(aiordma.WorkRequest.exception)
            await client.ended()
        assert memory.bytes[:] == bytes(4 * PAGE)


async def test_domain_registers_for_all_of_its_connections() -> None:
    with pages(2) as memory:
        async with aiordma.open_domain(ADDRESS) as domain:
            region = domain.register_dmabuf(memory.fd, PAGE, offset=PAGE, access=REMOTE)
            assert region.address == PAGE
            async with connected(server={"domain": domain}) as (client, server):
                await client.write(b"shared", region[:6].remote())
                await server.send(region[:6])
                assert await client.receive() == b"shared"
            assert not region.closed
        assert region.closed
        assert memory.bytes[PAGE : PAGE + 6] == b"shared"


async def test_region_of_another_domain_is_refused() -> None:
    async with registered() as (client, _, memory, _), aiordma.open_domain(ADDRESS) as domain:
        foreign = domain.register_dmabuf(memory.fd, PAGE)
        with pytest.raises(ValueError, match="another protection domain"):
            await client.send(foreign[:8])


async def test_stream_sends_the_memory() -> None:
    with pages(1) as memory:
        memory.bytes[:] = bytes(range(256)) * (PAGE // 256)
        async with streams() as (client, server):
            region = client.connection.register_dmabuf(memory.fd, PAGE, iova=IOVA - 64)
            await client.send(region)
            received = b""
            while len(received) < PAGE:
                received += await server.receive()
            assert received == memory.bytes[:]


@one_loop
async def test_wrong_descriptors_are_refused_by_name() -> None:
    async with registered() as (client, server, memory, _):
        with pytest.raises(ValueError, match="fd=-1"):
            server.register_dmabuf(-1, 8)
        with pytest.raises(aiordma.VerbsCallError, match="ibv_reg_dmabuf_mr: Invalid argument"):
            server.register_dmabuf(memory.fd, 4 * PAGE, offset=PAGE)
        async with aiordma.open_domain(ADDRESS) as domain:
            with pytest.raises(ValueError, match="length=0"):
                domain.register_dmabuf(memory.fd, 0)
            assert domain.members == 0
        await both_ways(client, server)
