"""What a peer reaches over a connection of the software device: regions and windows, by READ,
whose refusal is reported to the requester."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import aiordma
from aiordma import Access, Connection, RemoteMemory
from aiordma.verbs import MemoryWindowType
from aiordma.verbs.send_work import SendWork
from tests import connections
from tests.internals import endpoint_of, hub_of, lib, queue_pair_of, software

pytestmark = pytest.mark.anyio

SIZE = 64
BYTES = bytes(range(SIZE))
READ, WRITE, ATOMIC = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
LOCAL, BIND, ZERO_BASED = Access.LOCAL_WRITE, Access.MW_BIND, Access.ZERO_BASED
TYPE_1, TYPE_2 = MemoryWindowType.TYPE_1, MemoryWindowType.TYPE_2


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # nothing here is a loop's


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, Connection]]:
    options = {"device": "software"}
    async with connections.connected("127.0.0.1", server=options, client=options) as ends:
        yield ends


async def is_refused(client: Connection, remote: RemoteMemory) -> bool:
    """Whether the peer's device refuses a READ of it; the connection is over then."""
    try:
        await client.read_bytes(remote)
    except aiordma.RemoteAccessError:
        return True
    return False


def moved(remote: RemoteMemory, by: int, length: int) -> RemoteMemory:
    return RemoteMemory(remote.address + by, length, remote.rkey)


@pytest.mark.parametrize(
    ("by", "length"), [(-1, 1), (-1, SIZE), (0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (SIZE + 1, 1)]
)
async def test_beside_a_region_nothing_is_reached(by: int, length: int) -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(BYTES), READ).remote()
        assert await client.read_bytes(theirs) == BYTES
        assert await client.read_bytes(moved(theirs, SIZE - 1, 1)) == BYTES[-1:]
        assert await is_refused(client, moved(theirs, by, length))


@pytest.mark.parametrize("flip", [1, 0x80, 0x100, 1 << 31])
async def test_a_key_that_differs_in_a_bit_reaches_nothing(flip: int) -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(BYTES), READ).remote()
        assert await is_refused(client, replace(theirs, rkey=theirs.rkey ^ flip))


async def test_a_deregistered_regions_key_reaches_nothing() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(BYTES), READ)
        theirs = region.remote()
        region.close()
        assert await is_refused(client, theirs)


async def test_a_region_of_another_domain_is_not_reached() -> None:
    async with connected() as (client, server):
        context = server.context
        with (
            context.alloc_pd() as other,
            aiordma.MemoryRegion(other, bytearray(BYTES), READ) as region,
        ):
            assert await is_refused(client, region.remote())


async def test_a_region_that_permits_only_writing_is_not_read() -> None:
    async with connected() as (client, server):
        assert await is_refused(client, server.register(bytearray(BYTES), WRITE).remote())


async def test_a_changed_region_is_reached_as_it_is_now() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(BYTES), READ)
        before = region.remote()
        region.reregister(buffer=bytearray(b"elsewhere"))
        assert await client.read_bytes(region.remote()) == b"elsewhere"
        assert await is_refused(client, replace(before, rkey=region.rkey))
    async with connected() as (client, server):
        region = server.register(bytearray(BYTES), READ)
        theirs = region.remote()
        region.reregister(LOCAL)
        assert await is_refused(client, theirs)


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TYPE_1, TYPE_2])
@pytest.mark.parametrize(("by", "length"), [(-1, 1), (0, 17), (16, 1), (-16, 64)])
async def test_beside_a_window_nothing_is_reached(
    kind: MemoryWindowType, by: int, length: int
) -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(BYTES), LOCAL | BIND)
        theirs = (await server.bind(region[16:32], READ, kind)).remote
        assert await client.read_bytes(theirs) == BYTES[16:32]
        assert await is_refused(client, moved(theirs, by, length))


@pytest.mark.parametrize("kind", [TYPE_1, TYPE_2])
async def test_a_revoked_window_reaches_nothing(kind: MemoryWindowType) -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(BYTES), LOCAL | BIND)
        window = await server.bind(region[:], READ, kind)
        theirs = window.remote
        assert await client.read_bytes(theirs) == BYTES
        await server.revoke(window)
        assert await is_refused(client, theirs)


async def test_a_window_bound_for_writing_is_not_read() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(BYTES), LOCAL | BIND | READ)
        assert await is_refused(client, (await server.bind(region[:], WRITE)).remote)


async def test_a_window_of_type_2_is_its_queue_pairs_and_one_of_type_1_the_domains() -> None:
    async with connected() as (client, server), connected() as (other, _):
        region = server.register(bytearray(BYTES), LOCAL | BIND)
        assert other.protection_domain is server.protection_domain
        first = (await server.bind(region[:], READ, TYPE_1)).remote
        second = (await server.bind(region[:], READ, TYPE_2)).remote
        assert await other.read_bytes(first) == BYTES
        assert await is_refused(other, second)
        assert await client.read_bytes(second) == BYTES


async def test_windows_of_type_2_are_unbound_as_their_queue_pair_goes() -> None:
    async with connected() as (_, server):
        hub = hub_of(server)
        with (
            aiordma.MemoryRegion(hub.domain, bytearray(BYTES), LOCAL | BIND) as region,
            aiordma.verbs.MemoryWindow(hub.domain) as window,
        ):
            await bind(server, window, region)
            assert deregister(region) == errno.EBUSY
            await server.aclose()
            assert deregister(region) == 0
            region._closed = region._is_gone = True


async def test_windows_of_type_2_are_unbound_as_their_queue_pair_is_reset() -> None:
    async with connected() as (_, server):
        hub = hub_of(server)
        with (
            aiordma.MemoryRegion(hub.domain, bytearray(BYTES), LOCAL | BIND) as region,
            aiordma.verbs.MemoryWindow(hub.domain) as window,
        ):
            await bind(server, window, region)
            assert deregister(region) == errno.EBUSY
            queue_pair_of(server).modify(aiordma.verbs.QueuePairState.RESET)
            assert deregister(region) == 0
            region._closed = region._is_gone = True


def deregister(region: aiordma.MemoryRegion) -> int:
    return int(software().dereg_mr(region.pointer))


# -- binding, by requests that Python would refuse ------------------------------------------------


async def bind(
    server: Connection,
    window: aiordma.verbs.MemoryWindow,
    region: aiordma.MemoryRegion,
    access: Access = READ,
    *,
    offset: int = 0,
    length: int = SIZE,
    flip: int = 1,
) -> RemoteMemory:
    """Bind a window of type 2 to a region, and return what its peer may read."""
    to: Any = SimpleNamespace(region=region, address=region.address + offset, length=length)
    rkey = window.rkey ^ flip
    work = SendWork(
        "BIND_MW", lib.IBV_WR_BIND_MW, window=window, bound=to, access=access, rkey=rkey
    )
    request = endpoint_of(server).work.sends.submit(work)
    await request
    assert window.rkey == rkey
    return RemoteMemory(0 if access & ZERO_BASED else to.address, length, rkey)


async def is_unbindable(server: Connection, *arguments: Any, **how: Any) -> bool:
    try:
        await bind(server, *arguments, **how)
    except aiordma.WorkCompletionError as error:
        return error.status == aiordma.verbs.WorkCompletionStatus.MW_BIND_ERR
    return False


@pytest.mark.parametrize(
    ("registered", "access", "how"),
    [
        (LOCAL, READ, {}),
        (LOCAL | BIND, READ, {"offset": -1}),
        (LOCAL | BIND, READ, {"offset": 1}),
        (LOCAL | BIND, READ, {"offset": SIZE + 1, "length": 1}),
        (LOCAL | BIND, READ, {"length": SIZE + 1}),
        (LOCAL | BIND, READ, {"length": 2**64 - 8}),
        (LOCAL | BIND, READ, {"length": 0}),
        (LOCAL | BIND, READ, {"flip": 1 << 8}),
        (BIND, READ | WRITE, {}),
        (BIND, ATOMIC, {}),
    ],
)
async def test_what_makes_no_sense_is_not_bound(
    registered: Access, access: Access, how: dict[str, int]
) -> None:
    async with connected() as (_, server):
        domain = server.protection_domain
        with (
            aiordma.MemoryRegion(domain, bytearray(BYTES), registered) as region,
            aiordma.verbs.MemoryWindow(domain) as window,
        ):
            assert await is_unbindable(server, window, region, access, **how)


async def test_local_write_of_a_window_is_taken_as_by_other_devices() -> None:
    """pyverbs' tests bind with it."""
    async with connected() as (_, server):
        domain = server.protection_domain
        with (
            aiordma.MemoryRegion(domain, bytearray(BYTES), LOCAL | BIND) as region,
            aiordma.verbs.MemoryWindow(domain) as window,
        ):
            assert not await is_unbindable(server, window, region, READ | LOCAL)


async def test_a_window_is_bound_to_its_own_domain_only() -> None:
    async with connected() as (_, server), connected() as (_, second):
        hub = hub_of(server)
        with hub.context.alloc_pd() as other:
            region = aiordma.MemoryRegion(other, bytearray(BYTES), LOCAL | BIND)
            with aiordma.verbs.MemoryWindow(hub.domain) as window:
                assert await is_unbindable(server, window, region)
            with pytest.raises(aiordma.VerbsCallError):  # refused at once: it is looked at
                await bind(second, aiordma.verbs.MemoryWindow(other), region)


async def test_a_bound_window_of_type_2_is_not_bound_again() -> None:
    async with connected() as (client, server):
        domain = server.protection_domain
        region = server.register(bytearray(BYTES), LOCAL | BIND)
        with aiordma.verbs.MemoryWindow(domain) as window:
            theirs = await bind(server, window, region)
            assert await client.read_bytes(theirs) == BYTES
            assert await is_unbindable(server, window, region)


async def test_a_region_that_is_gone_is_not_bound() -> None:
    async with connected() as (_, server):
        domain = server.protection_domain
        region = aiordma.MemoryRegion(domain, bytearray(BYTES), LOCAL | BIND)
        region.close()
        region._closed = False  # or Python would refuse it, and the device not be asked
        with aiordma.verbs.MemoryWindow(domain) as window:
            assert await is_unbindable(server, window, region)
        region._closed = region._is_gone = True


async def test_a_window_may_count_from_zero() -> None:
    async with connected() as (client, server):
        domain = server.protection_domain
        region = server.register(bytearray(BYTES), LOCAL | BIND)
        with aiordma.verbs.MemoryWindow(domain) as window:
            theirs = await bind(server, window, region, READ | ZERO_BASED, offset=16, length=16)
            assert await client.read_bytes(theirs) == BYTES[16:32]
            assert await client.read_bytes(moved(theirs, 15, 1)) == BYTES[31:32]
            assert await is_refused(client, moved(theirs, region.address + 16, 1))
