"""Misuse is refused in Python's words before C sees it, and nothing is lost by it."""

import mmap
from collections.abc import Callable
from typing import Any

import anyio
import numpy
import pytest

import aiordma
from aiordma import Access, Connection, RemoteMemory
from tests.device.players import OWN_RECEIVES, REMOTE, connected, one_loop
from tests.internals import endpoint_of, open_on, open_regions, pool_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

MAP_NORESERVE = 0x4000  # man mmap; Python's module has it from 3.13 on


def held(connection: Connection) -> tuple[int, ...]:
    """Everything that a refused request must have given back."""
    endpoint = endpoint_of(connection)
    return (
        endpoint.work.sends.slots.free,
        endpoint.work.receives.slots.free,
        endpoint.hub.pool.leased,
        len(endpoint.hub.in_flight),
        open_regions(connection),
    )


def _far(client: Connection) -> RemoteMemory:
    return RemoteMemory(client.register(bytearray(64), REMOTE).address, 64, 1)


def _closed(client: Connection) -> Any:
    part = client.register(bytearray(64))[:8]
    part.region.close()
    return part


def _too_long(client: Connection) -> Any:
    # Never touched, so it takes no memory, whatever the device's limit.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return mmap.mmap(-1, endpoint_of(client).max_message + 1, flags=flags)


def _objects() -> Any:
    return numpy.array(["alice", None], dtype=object)


def _structures() -> Any:
    return numpy.zeros(2, dtype=[("O", "i4"), ("name", "O")])


def _dates_and_objects() -> Any:
    # numpy gives no buffer format for a date, nor for a name with a colon.
    return numpy.zeros(4, dtype=[("t", "M8[s]"), ("o", object)])


def _odd_names_and_objects() -> Any:
    return numpy.zeros(4, dtype=[("a:b", object)])


Post = Callable[[Connection], Any]
WITH_GAPS: Any = numpy.zeros(64)[::2]
BAD: dict[str, tuple[Post, type[Exception], str]] = {
    "send with gaps": (
        lambda c: c.post_send(WITH_GAPS),
        ValueError,
        "not contiguous",
    ),
    "send of too many parts": (
        lambda c: c.post_sendv([b"x"] * 9),
        ValueError,
        "9 parts: one request takes at most [1-8];",
    ),
    "send of a closed region": (lambda c: c.post_send(_closed(c)), aiordma.ClosedError, "closed"),
    "send of a closed region and bytes": (
        lambda c: c.post_sendv([_closed(c), b"x"]),
        aiordma.ClosedError,
        "closed",
    ),
    "send beyond the device": (lambda c: c.post_send(_too_long(c)), ValueError, "at most"),
    "send of objects": (
        lambda c: c.post_send(_objects()),
        TypeError,
        "post_send\\(\\): data=.* Python objects",
    ),
    "send of a view of objects": (
        lambda c: c.post_send(memoryview(_objects())),
        TypeError,
        "Python objects",
    ),
    "send of structures with objects": (
        lambda c: c.post_sendv([b"x", _structures()]),
        TypeError,
        "parts\\[1\\]=.* Python objects",
    ),
    "write of objects": (lambda c: c.post_write(_objects(), _far(c)), TypeError, "Python objects"),
    "receive into objects": (lambda c: c.post_recv(_objects()), TypeError, "Python objects"),
    "read into objects": (lambda c: c.post_read(_objects(), _far(c)), TypeError, "Python objects"),
    "register objects": (lambda c: c.register(_objects()), TypeError, "Python objects"),
    "send of dates with objects": (
        lambda c: c.post_send(_dates_and_objects()),
        TypeError,
        "post_send\\(\\): data=.* Python objects",
    ),
    "send of objects with a colon in their name": (
        lambda c: c.post_send(_odd_names_and_objects()),
        TypeError,
        "Python objects",
    ),
    "register dates with objects": (
        lambda c: c.register(_dates_and_objects()),
        TypeError,
        "register\\(\\): buffer=.* Python objects",
    ),
    "receive into bytes": (lambda c: c.post_recv(bytes(8)), TypeError, "read-only"),
    "receive into registered bytes": (
        lambda c: c.post_recv(c.register(bytes(8))),
        TypeError,
        "LOCAL_WRITE",
    ),
    "receive into memory without local write": (
        lambda c: c.post_recv(c.register(bytearray(8), Access.REMOTE_READ)),
        TypeError,
        "LOCAL_WRITE",
    ),
    "receive into a closed region": (
        lambda c: c.post_recv(_closed(c)),
        aiordma.ClosedError,
        "closed",
    ),
    "receive into too many parts": (
        lambda c: c.post_recvv([bytearray(1) for _ in range(9)]),
        ValueError,
        "9 parts",
    ),
    "read into bytes": (lambda c: c.post_read(bytes(64), _far(c)), TypeError, "read-only"),
    "read into a read-only view": (
        lambda c: c.post_read(memoryview(bytearray(64)).toreadonly(), _far(c)),
        TypeError,
        "read-only",
    ),
    "read of another length": (
        lambda c: c.post_read(bytearray(63), _far(c)),
        ValueError,
        "local has 63 bytes, and remote 64",
    ),
    "read into nothing": (
        lambda c: c.post_read(bytearray(), _far(c)),
        ValueError,
        "local has 0 bytes",
    ),
    "readv of another length": (
        lambda c: c.post_readv([bytearray(60), bytearray(5)], _far(c)),
        ValueError,
        "parts has 65 bytes",
    ),
    "write of another length": (
        lambda c: c.post_write(bytes(1000), _far(c)),
        ValueError,
        "local has 1000 bytes, and remote 64",
    ),
    "write to our own region": (
        lambda c: c.post_write(bytes(64), c.register(bytearray(64), REMOTE)),  # type: ignore[arg-type]
        TypeError,
        "expected RemoteMemory, got MemoryRegion: local memory comes first",
    ),
}


NEEDS = {"readv of another length": "scattered_read"}


@pytest.mark.promise("Invalid arguments raise before any C call")
@one_loop
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.capability(NEEDS[case])] if case in NEEDS else [])
        for case in BAD
    ],
)
async def test_refused_with_nothing_lost(case: str) -> None:
    post, error, text = BAD[case]
    async with connected(server=OWN_RECEIVES, client=OWN_RECEIVES) as (client, server):
        before = held(client)
        with pytest.raises(error, match=text):
            post(client)
        regions = open_regions(client)
        assert held(client) == (*before[:4], regions)
        assert regions <= 1  # what the case itself registered
        receive = server.post_recv(bytearray(8))
        await client.send(b"intact")
        assert (await receive).byte_len == 6


COROUTINES: dict[str, tuple[Post, type[Exception]]] = {
    "send": (lambda c: c.send(5), TypeError),  # type: ignore[arg-type]
    "sendv": (lambda c: c.sendv([b"x"] * 9), ValueError),
    "read": (lambda c: c.read(bytes(64), _far(c)), TypeError),
    "readv": (lambda c: c.readv([bytearray(1)], _far(c)), ValueError),
    "write": (lambda c: c.write(b"x", _far(c)), ValueError),
    "writev": (lambda c: c.writev([_closed(c)], _far(c)), aiordma.ClosedError),
    "a long write": (lambda c: c.write(bytes(1 << 21), _far(c)), ValueError),
    "receive": (lambda c: c.receive(), ValueError),
}


@one_loop
@pytest.mark.parametrize("name", COROUTINES)
async def test_the_coroutines_refuse_the_same_and_give_their_slot_back(name: str) -> None:
    call, error = COROUTINES[name]
    options = {"options": aiordma.ConnectionOptions(max_send_wr=1), **OWN_RECEIVES}
    async with connected(server=OWN_RECEIVES, client=options) as (client, server):
        before = held(client)[:4]
        for _ in range(3):
            with pytest.raises(error):
                await call(client)
        assert held(client)[:4] == before
        receive = server.post_recv(bytearray(8))
        await client.send(b"intact")
        assert (await receive).byte_len == 6


@one_loop
async def test_own_receives_and_pooled_ones_do_not_mix() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        with pytest.raises(ValueError, match="receive_buffers=0"):
            await server.receive()
        with pytest.raises(ValueError, match="receive_buffers=0"):
            client.post_recv(bytearray(8))
        receive = server.post_recv(bytearray(8))
        await client.send(b"intact")
        assert (await receive).byte_len == 6


USES: dict[str, Post] = {
    "post_send": lambda c: c.post_send(b"x"),
    "post_recv": lambda c: c.post_recv(bytearray(1)),
    "post_read": lambda c: c.post_read(bytearray(1), RemoteMemory(0, 1, 0)),
    "post_write": lambda c: c.post_write(b"x", RemoteMemory(0, 1, 0)),
    "register": lambda c: c.register(bytearray(1)),
}
ASYNC_USES: dict[str, Post] = {
    "send": lambda c: c.send(b"x"),
    "receive": lambda c: c.receive(),
    "read": lambda c: c.read(bytearray(1), RemoteMemory(0, 1, 0)),
    "write": lambda c: c.write(b"x", RemoteMemory(0, 1, 0)),
    "register_in_thread": lambda c: c.register_in_thread(bytearray(1)),
}


@one_loop
async def test_every_use_of_a_closed_connection_says_that_it_is_closed() -> None:
    async with connected(client=OWN_RECEIVES) as (client, server):
        await server.aclose()
        await client.aclose()
        for name, use in USES.items():
            connection = server if name == "receive" else client
            with pytest.raises(aiordma.ClosedError):
                use(connection)
        for name, use in ASYNC_USES.items():
            connection = server if name == "receive" else client
            with pytest.raises(aiordma.ClosedError):
                await use(connection)
        assert "closed" in repr(client)
        assert not client.is_connected


@one_loop
@pytest.mark.parametrize("name", ["initiator_depth", "responder_resources"])
async def test_a_depth_beyond_the_device_is_refused_with_its_limit(device: Any, name: str) -> None:
    async with await aiordma.listen(device.address, 0) as listener:
        depth: Any = {name: 200}
        options = aiordma.ConnectionOptions(**depth)
        with pytest.raises(ValueError, match=f"{name}=200: {device.name} has 0.."):
            await aiordma.connect(device.address, listener.port, options=options)
        assert open_on(listener) == 1


# -- the send queue is full -------------------------------------------------------------------


@pytest.mark.promise("A full queue waits or raises, and loses nothing")
async def test_posts_beyond_the_depth_are_refused_and_nothing_is_lost() -> None:
    options = aiordma.ConnectionOptions(max_send_wr=4)
    # With private data of its own it is not told how long the receives are.
    async with connected(client={"options": options, "private_data": b"-"}) as (client, server):
        # In a chain they take their slots, and end no sooner than its block.
        with client.chain() as chain:
            sends = [chain.post_send(b"%d" % i) for i in range(4)]
            for data in (b"inline", bytes(1000), bytes(100_000)):
                with pytest.raises(aiordma.QueueFullError, match="4 requests are in flight"):
                    client.post_send(data)
            assert pool_of(client).leased == 32  # both ends' receives, nothing else
            assert len(endpoint_of(client).memory.regions) == 0
        for send in sends:
            await send
        await client.post_send(b"again")
        assert [await server.receive() for _ in range(5)] == [b"0", b"1", b"2", b"3", b"again"]


async def test_receives_beyond_the_depth_are_refused_and_nothing_is_lost() -> None:
    options = {"options": aiordma.ConnectionOptions(max_recv_wr=2), **OWN_RECEIVES}
    async with connected(server=options) as (client, server):
        receives = [server.post_recv(bytearray(8)) for _ in range(2)]
        with pytest.raises(aiordma.QueueFullError, match="2 receives are posted"):
            server.post_recv(bytearray(8))
        await client.send(b"one")
        assert (await receives[0]).byte_len == 3
        receives.append(server.post_recv(bytearray(8)))
        await client.send(b"two")
        await client.send(b"three")
        assert [(await receive).byte_len for receive in receives] == [3, 3, 5]


async def test_coroutines_wait_for_a_slot_first_come_first_served() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(max_send_wr=1)}) as (
        client,
        server,
    ):
        first = client.post_send(b"0")
        async with anyio.create_task_group() as group:
            for i in range(1, 10):
                group.start_soon(client.send, b"%d" % i)
                await anyio.wait_all_tasks_blocked()
            assert [await server.receive() for _ in range(10)] == [b"%d" % i for i in range(10)]
        await first
