"""Cancelling a wait abandons the result: never the memory, a slot or a message."""

import anyio
import anyio.lowlevel
import pytest

import aiordma
from tests.device.players import (
    OWN_RECEIVES,
    REMOTE,
    connected,
    until,
)
from tests.internals import (
    endpoint_of,
    free_sends,
    pool_of,
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
