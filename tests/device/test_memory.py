"""Registered memory: whose it is, for how long, and what a slice of it may be."""

import errno
import gc
import mmap
import random
import threading
import weakref
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Access, MemoryRegion
from tests.connections import connect_to
from tests.device.players import OWN_RECEIVES, REMOTE, both_ways, connected, one_loop, until
from tests.devices import ADDRESS, DEVICE
from tests.internals import SOFTWARE, endpoint_of, staging

pytestmark = pytest.mark.anyio


@pytest.mark.promise("A buffer is held until its request completes")
@one_loop
async def test_a_registered_buffer_cannot_move_and_can_afterwards() -> None:
    async with connected() as (client, _):
        buffer = bytearray(100)
        region = client.register(buffer)
        with pytest.raises(BufferError):
            buffer.append(1)
        region.close()
        region.close()
        assert region.closed
        buffer.append(1)
        remaining = client.register(buffer)
    assert remaining.closed
    buffer.append(2)


@one_loop
async def test_bytes_of_registered_memory_copy_it() -> None:
    async with connected() as (client, _):
        region = client.register(bytearray(b"registered"))
        assert bytes(region) == b"registered"
        assert bytes(region[2:5]) == b"gis"
        for thing in (region, region[2:5]):
            with pytest.raises(TypeError, match=r"taken by slice.*its bytes are its view"):
                bytearray(thing)  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"taken by slice.*its bytes are its view"):
                list(thing)  # type: ignore[call-overload]
        part = region[:1]
        region.close()
        for closed in (region, part):
            with pytest.raises(aiordma.ClosedError):
                bytes(closed)
        remote = aiordma.RemoteMemory(4096, 8, 1)
        with pytest.raises(TypeError, match=r"at the peer: await connection\.read_bytes\(remote\)"):
            bytes(remote)  # type: ignore[call-overload]


@pytest.mark.promise("Invalid arguments raise before any C call")
@one_loop
async def test_slices_are_checked_and_never_clamped() -> None:
    async with connected() as (client, _):
        region = client.register(bytearray(range(100)), REMOTE)
        part = region[10:50]
        assert bytes(part.view) == bytes(range(10, 50))
        assert bytes(part[-10:].view) == bytes(range(40, 50))
        assert bytes(part[5:10][1:3].view) == bytes(range(16, 18))
        assert len(part[40:]) == len(part[7:7]) == 0
        assert part.remote()[5:10].address == part[5:10].address
        for thing in (region, part, region.remote(), part.remote()):
            for outside in (slice(0, 101), slice(101, None), slice(-101, None), slice(9, 8)):
                with pytest.raises(IndexError, match="outside"):
                    thing[outside]
            with pytest.raises(ValueError, match="step"):
                thing[0:10:2]
            with pytest.raises(TypeError, match="slice"):
                thing[3]  # type: ignore[index]
        with pytest.raises(IndexError):
            part[0:41]


@pytest.mark.promise("A buffer is held until its request completes")
async def test_memory_in_flight_is_held_and_its_close_refused() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        region = server.register(bytearray(64))
        first, second = server.post_recv(region[:32]), server.post_recv(region[32:])
        assert region._users == 2
        with pytest.raises(anyio.BusyResourceError):
            region.close()
        assert not region.closed
        await client.send(b"one")
        await first
        assert region._users == 1
        with pytest.raises(anyio.BusyResourceError):
            region.close()
        await client.send(b"two")
        await second
        assert region._users == 0
        assert bytes(region.view[:3]) == b"one"
        assert bytes(region.view[32:35]) == b"two"
        region.close()


async def test_closing_a_connection_deregisters_its_memory_once_its_requests_ended() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        region = server.register(bytearray(64))
        receive = server.post_recv(region)
        await server.aclose()
        assert receive.done()
        assert region._users == 0
        assert region.closed


async def test_memory_of_a_closed_connection_that_another_one_uses_outlives_it() -> None:
    """Connections of a loop share a protection domain, so one may post another's memory."""
    async with connected(server=OWN_RECEIVES) as (client, server), connected() as (other, _):
        region = other.register(bytearray(16))
        receive = server.post_recv(region)
        await other.aclose()
        assert not region.closed
        await client.send(b"to the survivor")
        assert (await receive).byte_len == 15
        assert region.closed
    # That nothing is left is checked after every test: the other connection closed fully.


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
async def test_register_in_thread_leaves_the_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (client, server):
        threads: list[int] = []
        provider = client.protection_domain.provider
        register = provider.reg_mr

        def watched(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return register(*arguments)

        monkeypatch.setattr(provider, "reg_mr", watched)
        buffer = bytearray(b"from a thread")
        region = await client.register_in_thread(buffer, REMOTE)
        assert threads
        assert threading.get_ident() not in threads
        assert await server.read_bytes(region.remote()) == b"from a thread"
    assert region.closed


class Counted(bytearray):
    """A buffer that can be referred to weakly."""


async def _read_in_thread(client: aiordma.Connection, remote: aiordma.RemoteMemory) -> Any:
    buffer = Counted(len(remote))
    with suppress(aiordma.VerbsCallError):
        await client.read(buffer, remote)
    return weakref.ref(buffer)


@pytest.mark.promise("A buffer is held until its request completes")
async def test_failed_registration_keeps_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a call that exceeds RLIMIT_MEMLOCK: the program frees the buffer, and tries again."""

    def refuse(*_: object) -> None:
        raise aiordma.VerbsCallError(errno.ENOMEM, "ibv_reg_mr")

    async with connected() as (client, server):
        remote = server.register(bytearray(2 << 20), Access.REMOTE_READ).remote()
        monkeypatch.setattr(staging, "register_memory", refuse)
        gc.collect()
        gc.disable()
        try:
            buffer = await _read_in_thread(client, remote)
            await until(lambda: buffer() is None)
        finally:
            gc.enable()


@one_loop
async def test_a_connection_does_not_remember_every_region_it_ever_had() -> None:
    async with connected() as (client, _):
        for _ in range(50):
            client.register(bytearray(8)).close()
        assert len(endpoint_of(client).memory.regions) < 10


@one_loop
async def test_memory_registered_by_hand_in_another_domain_is_refused(device: Any) -> None:
    async with connected() as (client, server):
        with (
            aiordma.verbs.Device(device.name).open() as context,
            context.alloc_pd() as domain,
            MemoryRegion(domain, bytearray(8)) as region,
        ):
            with pytest.raises(ValueError, match="another device or event loop"):
                client.post_send(region)
            with pytest.raises(ValueError, match="another device or event loop"):
                await client.send(region)
        await both_ways(client, server)


# -- closing a region that a peer writes to -----------------------------------------------------

CANARY = 0xC5
CLOSES = {SOFTWARE: 100, "siw0": 10}.get(DEVICE, 3)


async def write_until_refused(client: aiordma.Connection, remote: aiordma.RemoteMemory) -> None:
    data = client.register(bytearray([1]) * remote.length)
    with suppress(aiordma.RdmaError):
        while True:
            await client.write(data, remote)


@pytest.mark.promise("A closed region is written to no more")
@one_loop
@pytest.mark.parametrize("closed", ["region", "connection"])
async def test_no_late_byte_after_a_region_was_closed(closed: str) -> None:
    """By itself, or with its connection. (A domain in use cannot be closed.)"""
    chance = random.Random(1)
    size = 1 << 17
    for _ in range(CLOSES if closed == "region" else max(1, CLOSES // 5)):
        async with connected() as (client, server), anyio.create_task_group() as group:
            await both_ways(client, server)
            buffer = bytearray(size)
            region = server.register(buffer, Access.REMOTE_WRITE)
            group.start_soon(write_until_refused, client, region.remote())
            await until(lambda: buffer[-1] == 1)  # noqa: B023
            await anyio.sleep(chance.random() * 0.002)
            if closed == "region":
                region.close()
            else:
                await server.aclose()
                assert region.closed
            buffer[:] = bytes([CANARY]) * size
            await client.ended()
            assert buffer.count(CANARY) == size


def pinned_kib() -> int:
    """The pinned memory of this process, which RLIMIT_MEMLOCK limits."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmPin" in line
    ]
    return int(line.split()[1])


@pytest.mark.promise("Load loses nothing, and leaves nothing")
@one_loop
@pytest.mark.capability("kernel")
@pytest.mark.parametrize(("options", "each"), [({}, 256), ({"receive_size": 1024}, 16)])
async def test_connections_pin_their_receives_only(options: dict[str, Any], each: int) -> None:
    """As docs/memory.md says: and what is not used any more is given back, but for a part."""
    count, slab = 8, 1024
    async with aiordma.listen(ADDRESS, 0, **options) as listener, AsyncExitStack() as stack:
        before = pinned_kib()
        for _ in range(count):
            for end in await connect_to(listener, ADDRESS, **options):
                await stack.enter_async_context(end)
        grown = pinned_kib() - before
        assert 2 * count * each <= grown <= 2 * count * each + slab
        await stack.aclose()
        assert pinned_kib() - before <= slab


@pytest.mark.parametrize("operation", ["write", "read", "send"])
async def test_large_buffer_is_free_when_the_await_returns(operation: str) -> None:
    """More than 1 MiB is deregistered in a thread: nobody has to wait for that."""
    size = staging.THREAD_LIMIT + 4096
    async with connected(server=OWN_RECEIVES) as (client, server):
        region = server.register(bytearray(size), REMOTE)
        buffer = bytearray(size)
        for _ in range(5):
            if operation == "write":
                await client.write(buffer, region.remote())
            elif operation == "read":
                await client.read(buffer, region.remote())
            else:
                receive = server.post_recv(region)
                await client.send(buffer)
                await receive
            buffer.append(1)
            buffer.pop()
        with mmap.mmap(-1, size) as mapped:
            await client.write(mapped, region.remote())
