"""Cancelling a wait abandons the result: never the memory, a slot or a message."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from tests.device.players import (
    OWN_RECEIVES,
    REMOTE,
    connected,
    reactor_in_use,
    until,
)
from tests.devices import ADDRESS
from tests.internals import (
    connector,
    endpoint_of,
    free_sends,
    has_ended,
    hubs_of,
    open_on,
    pool_of,
    queues_of,
    requests_of,
)

pytestmark = [pytest.mark.anyio, pytest.mark.loop_and_device]


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
async def test_a_cancelled_receive_loses_no_message() -> None:
    async with connected() as (client, server):
        for i in range(10):
            async with anyio.create_task_group() as group:
                group.start_soon(server.receive)
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
            await client.send(b"%d" % i)
            assert await server.receive() == b"%d" % i


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
async def test_a_receive_cancelled_as_the_message_arrives_loses_none() -> None:
    async with connected() as (client, server):
        received: list[bytes] = []

        async def receive() -> None:
            received.append(await server.receive())

        for i in range(20):
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await anyio.wait_all_tasks_blocked()
                arrived = client.post_send(b"%d" % i)
                # Our own completion and the peer's message come in one wake, or nearly: the
                # receiver has been woken, and is cancelled before it runs.
                arrived.add_done_callback(lambda _: group.cancel_scope.cancel())
                await arrived
        while len(received) < 20:
            await receive()
        assert received == [b"%d" % i for i in range(20)]


async def test_a_timed_out_receive_loses_no_message() -> None:
    async with connected() as (client, server):
        with anyio.move_on_after(0.05) as scope:
            await server.receive()
        assert scope.cancelled_caught
        await client.send(b"late")
        assert await server.receive() == b"late"


@pytest.mark.promise(
    "A buffer is held until its request completes",
    "Cancellation loses no message and leaves nothing open",
)
async def test_a_cancelled_wait_for_a_request_leaves_it_in_flight_with_its_memory() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        region = server.register(bytearray(16))
        receive = server.post_recv(region)

        async def wait() -> None:
            await receive

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert not receive.done()
        assert region._users == 1
        assert receive in endpoint_of(server).work.requests
        with pytest.raises(anyio.BusyResourceError):
            region.close()
        # The peer's message still lands there, and the request can be awaited again.
        await client.send(b"into our buffer")
        assert (await receive).byte_len == 15
        assert bytes(region.view[:15]) == b"into our buffer"
        assert region._users == 0
        region.close()


async def test_one_cancelled_waiter_does_not_touch_the_others() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive = server.post_recv(bytearray(16))
        lengths: list[int] = []
        scope = anyio.CancelScope()

        async def wait(own_scope: anyio.CancelScope) -> None:
            with own_scope:
                lengths.append((await receive).byte_len)

        async with anyio.create_task_group() as group:
            group.start_soon(wait, scope)
            group.start_soon(wait, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            await client.send(b"four")
        assert lengths == [4]


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.capability("rnr")
async def test_a_plain_buffer_stays_pinned_after_its_read_or_receive_was_cancelled() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        buffer = bytearray(100_000)
        receive = server.post_recv(buffer)
        with anyio.move_on_after(0.05):
            await receive
        with pytest.raises(BufferError):
            buffer.append(1)
        data = bytes(range(250)) * 400
        await client.send(data)
        await receive
        assert buffer == data
        await until(lambda: not endpoint_of(server).memory.regions)
        buffer.append(1)


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.capability("rnr")
async def test_a_cancelled_send_keeps_its_copy_until_the_message_is_decided() -> None:
    """The peer has no receive: the device holds the message, and with it our pooled copy."""
    async with connected(server=OWN_RECEIVES) as (client, server):
        pool = pool_of(client)
        before = pool.leased
        async with anyio.create_task_group() as group:
            group.start_soon(client.send, b"x" * 1000)
            await until(lambda: pool.leased == before + 1)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert pool.leased == before + 1
        assert free_sends(client) == client.options.max_send_wr - 1
        target = bytearray(2000)
        receive = server.post_recv(target)
        assert (await receive).byte_len == 1000
        assert target == b"x" * 1000 + bytes(1000)
        await until(lambda: pool.leased == before)
        assert free_sends(client) == client.options.max_send_wr


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.capability("rnr")
async def test_a_cancelled_wait_for_a_slot_neither_sends_nor_leaks_it() -> None:
    options = {"options": aiordma.ConnectionOptions(max_send_wr=1)}
    async with connected(server=OWN_RECEIVES, client=options) as (client, server):
        endpoint = endpoint_of(client)
        first = client.post_send(b"first")
        leased = endpoint.hub.pool.leased
        scopes = [anyio.CancelScope() for _ in range(4)]

        async def send(number: int) -> None:
            with scopes[number]:
                await client.send(b"%d" % number * 100)

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(send, number)
                await anyio.wait_all_tasks_blocked()
            # A task that waits for a slot holds no memory.
            assert endpoint.hub.pool.leased == leased
            scopes[0].cancel()
            scopes[2].cancel()
            await anyio.wait_all_tasks_blocked()
            buffers = [bytearray(100) for _ in range(3)]
            receives = [server.post_recv(buffer) for buffer in buffers]
            lengths = [(await receive).byte_len for receive in receives]
        assert lengths == [5, 100, 100]
        assert [bytes(buffer[:1]) for buffer in buffers] == [b"f", b"1", b"3"]
        await first
        assert endpoint.work.sends.slots.free == 1


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
async def test_a_cancelled_read_may_still_write_but_only_to_its_own_buffer() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"r" * 4096), REMOTE)
        ours = client.register(bytearray(8192))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.read(ours[:4096], theirs.remote())
        await until(lambda: ours._users == 0)
        assert bytes(ours.view[4096:]) == bytes(4096)
        assert await client.read_bytes(theirs.remote()) == b"r" * 4096


@pytest.mark.promise("A buffer is held until its request completes")
async def test_an_abandoned_request_whose_connection_is_closed_releases_its_memory() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        buffer = bytearray(64)
        receive = server.post_recv(buffer)
        with anyio.move_on_after(0.05):
            await receive
        await server.aclose()
        assert receive.done()
        buffer.append(1)


# -- connecting and closing -------------------------------------------------------------------


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    class Recorded(connector.Attempt):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(connector, "Attempt", Recorded)
    return made


STEPS = (
    "looking up the name",
    "making the identifier",
    "resolving the address",
    "resolving the route",
    "waiting for the peer to accept",
)


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.parametrize("step", STEPS)
async def test_a_connect_cancelled_at_any_step_leaves_nothing(
    step: str, attempts: list[Any]
) -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(aiordma.connect, ADDRESS, listener.port)
            # A device may be past it before we look.
            while not attempts or attempts[-1].step in STEPS[: STEPS.index(step)]:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        # What the peer has withdrawn is given back in the background.
        await until(lambda: open_on(listener) == 1 + len(requests_of(listener)))
        for hub in hubs_of(listener):
            assert [queue.reserved for queue in queues_of(hub)] == [0] * len(queues_of(hub))
            assert len(hub.in_flight) == 0
            assert hub.pool.leased == 0
    # siw connects inside the call: it is cleaned up when that has returned, in a worker thread.
    await until(lambda: not reactor_in_use())


# Three of these are abandoned while siw waits for the peer's answer: ten seconds each.
@pytest.mark.capability("connect_returns_at_once")
async def test_a_connect_cancelled_after_any_number_of_turns_leaves_nothing() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
            async with anyio.create_task_group() as group:
                group.start_soon(aiordma.connect, ADDRESS, listener.port)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            # What the peer has withdrawn is given back in the background.
            await until(lambda: open_on(listener) == 1 + len(requests_of(listener)))
            for hub in hubs_of(listener):
                assert sum(queue.reserved for queue in queues_of(hub)) == 0
    assert not reactor_in_use()


async def test_cancelled_accept_keeps_the_listener_working() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with anyio.move_on_after(0.05):
            await listener.accept()
        async with anyio.create_task_group() as group:

            async def serve() -> None:
                async with await listener.accept() as connection:
                    assert await connection.receive() == b"hello"

            group.start_soon(serve)
            async with await aiordma.connect(ADDRESS, listener.port) as client:
                await client.send(b"hello")


@pytest.mark.promise(
    "Cancellation loses no message and leaves nothing open", "Closing leaves nothing open"
)
async def test_a_cancelled_close_closes_all_the_same() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:

        async def accept_and_close() -> None:
            await (await listener.accept()).aclose()

        async with anyio.create_task_group() as group:
            group.start_soon(accept_and_close)
            client = await aiordma.connect(ADDRESS, listener.port)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.aclose()
        assert has_ended(client)
        # What the peer has withdrawn is given back in the background.
        await until(lambda: open_on(listener) == 1 + len(requests_of(listener)))
