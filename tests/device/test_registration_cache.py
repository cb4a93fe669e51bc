"""The registration cache: large arrays stay registered, and never longer than they exist."""

import errno
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy
import pytest

import aiordma
from aiordma import MemoryRegion
from aiordma.verbs import gpu_memory
from tests.connections import connect_to
from tests.device.players import OWN_RECEIVES, connected, until
from tests.devices import ADDRESS, DEVICE, kernel_objects
from tests.internals import staging

pytestmark = pytest.mark.anyio

SIZE = 1 << 20


def array(fill: int, size: int = SIZE) -> Any:
    return numpy.full(size, fill, numpy.uint8)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Yield (client, server) that can exchange messages of two arrays."""
    big = {"receive_size": 2 * SIZE, "receive_buffers": 4}
    async with connected(client=big, server=big) as ends:
        assert ends[0].registrations is ends[1].registrations
        yield ends


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_hit_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        await client.send(data.data)
        regions = kernel_objects(DEVICE)["mr"]
        monkeypatch.setattr(staging, "MemoryRegion", _Refused)
        for fill in (2, 3, 4):
            await server.receive()
            data[:] = fill
            await client.send(data.data)
        assert await server.receive() == bytes(data)
        assert kernel_objects(DEVICE)["mr"] == regions
        assert (cache.hits, cache.misses, len(cache), cache.registered) == (3, 1, 1, SIZE)


class _RefusedMeta(type):
    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, aiordma.MemoryRegion)


class _Refused(metaclass=_RefusedMeta):
    def __init__(self, *_: object) -> None:
        pytest.fail("this registers memory")


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_parts_of_an_array_have_registrations_of_their_own() -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        data[SIZE // 2 :] = 2
        for _ in range(2):
            for part in (data[: SIZE // 2], data[SIZE // 2 :]):
                await client.send(part.data)
                assert await server.receive() == bytes(part)
        assert (cache.hits, cache.misses) == (2, 2)


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_entry_ends_with_its_array() -> None:
    async with pair() as (client, server):
        cache = client.registrations
        regions = kernel_objects(DEVICE)["mr"]
        data = array(1)
        await client.send(data.data)
        await server.receive()
        assert len(cache) == 1
        gone = weakref.ref(data)
        del data
        gc.collect()
        assert gone() is None
        assert len(cache) == 0
        await until(lambda: kernel_objects(DEVICE)["mr"] == regions)


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_array_at_the_same_address_is_registered_anew() -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        seen = {data.ctypes.data}
        await client.send(data.data)
        assert await server.receive() == bytes(data)
        reused = 0
        for fill in range(2, 20):
            del data
            gc.collect()
            data = array(fill)  # a mapping of its own, usually where the one before was
            reused += data.ctypes.data in seen
            seen.add(data.ctypes.data)
            await client.send(data.data)
            assert await server.receive() == bytes(data)
        assert reused > 0
        assert (cache.hits, cache.misses) == (0, 19)


@pytest.mark.promise("The registration cache keeps no memory alive")
@pytest.mark.capability("rnr")
async def test_array_in_flight_outlives_its_last_reference() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        data = array(7)
        gone = weakref.ref(data)
        request = client.post_send(data.data)
        del data
        gc.collect()
        assert gone() is not None
        client.registrations.clear()
        target = bytearray(SIZE)
        await server.post_recv(target)
        await request
        assert target == bytes([7]) * SIZE
        del request
        await until(lambda: gone() is None)


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_least_recently_used_registration_is_removed_first() -> None:
    async with pair() as (client, server):
        cache = client.registrations
        cache.max_bytes = 2 * SIZE
        one, two, three = (array(i) for i in range(3))
        for data in (one, two, one, three, one):
            await client.send(data.data)
            await server.receive()
        assert (cache.hits, cache.misses, cache.evictions) == (2, 3, 1)
        assert cache.registered == 2 * SIZE
        await client.send(two.data)
        await server.receive()
        assert cache.misses == 4


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_parts_of_one_request_may_exceed_the_bound() -> None:
    async with pair() as (client, server):
        cache = client.registrations
        cache.max_bytes = SIZE
        one, two = array(1), array(2)
        await client.sendv([one.data, two.data])
        assert await server.receive() == bytes(one) + bytes(two)
        assert cache.registered <= SIZE


async def test_same_array_twice_in_a_request() -> None:
    async with pair() as (client, server):
        one = array(1)
        for _ in range(2):
            await client.sendv([one.data, one.data])
            assert await server.receive() == bytes(one) * 2
        one.setflags(write=False)
        await client.sendv([one.data, one.data])
        assert await server.receive() == bytes(one) * 2


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_zero_bytes_disable_the_cache() -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        await client.send(data.data)
        cache.max_bytes = 0
        assert len(cache) == 0
        for _ in range(2):
            await server.receive()
            await client.send(data.data)
        assert (cache.hits, cache.misses, len(cache)) == (0, 1, 0)
        with pytest.raises(ValueError, match="max_bytes=-1"):
            cache.max_bytes = -1


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_only_memory_that_cannot_move_is_kept() -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        resizable = bytearray(SIZE)
        for buffer in (resizable, bytes(SIZE), numpy.frombuffer(resizable, numpy.uint8).data):
            await client.send(buffer)
            await server.receive()
        assert len(cache) == 0
        del buffer
        resizable.extend(b"moves")
        await client.send(data.data)
        with pytest.raises(ValueError, match="cannot resize"):
            data.resize(2 * SIZE, refcheck=False)
        cache.clear()
        data.resize(2 * SIZE, refcheck=False)


async def test_reads_into_an_array_use_its_registration() -> None:
    async with pair() as (client, server):
        cache, source, target = client.registrations, array(9), array(0)
        region = server.register(source.data, aiordma.Access.REMOTE_READ)
        for _ in range(2):
            target[:] = 0
            await client.read(target.data, region.remote())
            assert bytes(target) == bytes(source)
        assert (cache.hits, cache.misses) == (1, 1)


async def test_registration_in_the_cache_needs_no_thread() -> None:
    async with pair() as (client, _):
        data = array(1, 2 * SIZE)
        assert client._staging.is_heavy([data.data], "data")
        await client.send(data.data)
        assert not client._staging.is_heavy([data.data], "data")


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_lack_of_memory_releases_idle_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        await client.send(data.data)
        await server.receive()
        register_anywhere = gpu_memory.register_anywhere
        lacking = [aiordma.VerbsCallError(errno.ENOMEM, "ibv_reg_mr")]

        def register(*arguments: Any) -> aiordma.MemoryRegion:
            if lacking:
                raise lacking.pop()
            return register_anywhere(*arguments)

        monkeypatch.setattr(staging, "register_anywhere", register)
        region = client.register(bytearray(8))
        assert len(region) == 8
        assert len(cache) == 0
        lacking.append(aiordma.VerbsCallError(errno.ENOMEM, "ibv_reg_mr"))
        with pytest.raises(aiordma.VerbsCallError):
            client.register(bytearray(8))  # there is nothing to release


WAYS = ("register", "in a thread", "in a domain", "grant", "connect", "shared queue")


async def register_by(
    way: str, client: aiordma.Connection, listener: aiordma.Listener, domain: aiordma.Domain
) -> None:
    match way:
        case "register":
            client.register(bytearray(8)).close()
        case "in a thread":
            (await client.register_in_thread(bytearray(8))).close()
        case "in a domain":
            domain.register(bytearray(8)).close()
        case "grant":
            async with client.grant(bytearray(8), aiordma.Access.REMOTE_READ):
                pass
        case "connect":  # a size of which the pool has no block
            own: dict[str, Any] = {"receive_size": 4 * SIZE, "receive_buffers": 1}
            for each in await connect_to(listener, ADDRESS, domain=domain, **own):
                await each.aclose()
        case _:
            async with aiordma.open_shared_receive(ADDRESS, domain=domain) as shared:
                shared.register(bytearray(8)).close()


@pytest.mark.promise("The registration cache keeps no memory alive")
@pytest.mark.parametrize("way", WAYS)
async def test_each_registration_that_lacks_memory_is_repeated(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, lacking = MemoryRegion._register, [0]

    def register_unless_lacking(region: MemoryRegion, iova: int | None) -> Any:
        if region.domain is domain.protection_domain and lacking.pop():
            raise aiordma.VerbsCallError(errno.ENOMEM, "ibv_reg_mr")
        lacking.append(0)
        return register(region, iova)

    big: dict[str, Any] = {"receive_size": 2 * SIZE, "receive_buffers": 4}
    async with (
        aiordma.open_domain(ADDRESS) as domain,
        aiordma.listen(ADDRESS, 0, domain=domain, **big) as listener,
    ):
        client, server = await connect_to(listener, ADDRESS, domain=domain, **big)
        async with client, server:
            cache, data = client.registrations, array(1)
            await client.send(data.data)
            await server.receive()
            assert len(cache) == 1
            monkeypatch.setattr(MemoryRegion, "_register", register_unless_lacking)
            lacking[:] = [0, 1]
            await register_by(way, client, listener, domain)
            assert len(cache) == 0
            assert cache.evictions == 1


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_lack_of_memory_releases_what_waits_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        await client.send(data.data)
        await server.receive()
        del data
        assert len(cache) == 0  # its region is deregistered in the loop's next turn
        register, before = MemoryRegion._register, kernel_objects(DEVICE)["mr"]

        def register_if_room(region: MemoryRegion, iova: int | None) -> Any:
            if kernel_objects(DEVICE)["mr"] >= before:
                raise aiordma.VerbsCallError(errno.ENOMEM, "ibv_reg_mr")
            return register(region, iova)

        monkeypatch.setattr(MemoryRegion, "_register", register_if_room)
        client.register(bytearray(8)).close()


class _NotIterated(dict[Any, Any]):
    def __iter__(self) -> Iterator[Any]:
        pytest.fail("this iterates over all entries")


async def test_use_within_the_bound_iterates_over_no_entries() -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(1)
        cache._entries = _NotIterated(cache._entries)
        for part in (data[: SIZE // 2], data[SIZE // 2 :], data[: SIZE // 2]):
            await client.send(part.data)
            await server.receive()
        cache._entries = dict(cache._entries.items())
        assert cache._bytes == cache.registered == SIZE
        del part, data
        cache.clear()
        assert cache._bytes == cache.registered == 0


@pytest.mark.promise("The registration cache keeps no memory alive")
async def test_domains_have_caches_of_their_own() -> None:
    async with aiordma.listen(ADDRESS, 0, domain="each") as listener:
        ends: list[aiordma.Connection] = []

        async def accept() -> None:
            ends.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            client = await aiordma.connect(ADDRESS, listener.port)
        async with client, ends[0] as server:
            assert client.registrations is not server.registrations


@pytest.mark.capability("rnr")  # eight messages in flight
async def test_concurrent_requests_share_a_registration() -> None:
    async with pair() as (client, server):
        cache, data = client.registrations, array(5, 2 * SIZE)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(client.send, data.data)
            for _ in range(8):
                assert await server.receive() == bytes(data)
        assert cache.hits + cache.misses <= 8
        assert len(cache) == 1
