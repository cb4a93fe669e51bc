"""Connections that are prepared first: receives are posted before the handshake."""

from collections.abc import Callable

import anyio
import pytest

import aiordma
from aiordma import RemoteMemory
from tests.device.players import OWN_RECEIVES, Outcome, both_ways, until
from tests.devices import ADDRESS
from tests.internals import endpoint_of, requests_of

pytestmark = pytest.mark.anyio

COUNT = 8


def post_receives(
    connection: aiordma.Connection,
) -> tuple[list[bytearray], list[aiordma.WorkRequest]]:
    buffers = [bytearray(16) for _ in range(COUNT)]
    return buffers, [connection.post_recv(buffer) for buffer in buffers]


async def test_a_prepared_server_has_receives_at_once() -> None:
    async with aiordma.listen(ADDRESS, 0, **OWN_RECEIVES) as listener:

        async def send_at_once() -> None:
            async with aiordma.connect(ADDRESS, listener.port) as client:
                for number in range(COUNT):
                    await client.send(b"%d" % number)
                assert await client.receive() == b"all are here"

        async with anyio.create_task_group() as group:
            group.start_soon(send_at_once)
            request = await listener.request()
            async with request.prepare() as connection:
                buffers, receives = post_receives(connection)
                await connection.establish()
                assert connection.is_connected
                assert [(await receive).byte_len for receive in receives] == [1] * COUNT
                assert [buffer[:1] for buffer in buffers] == [b"%d" % n for n in range(COUNT)]
                await connection.send(b"all are here")


@pytest.mark.capability("passive_side_first")
async def test_a_prepared_client_has_receives_at_once() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:

        async def greet() -> None:
            async with listener.accept() as server:
                for number in range(COUNT):
                    await server.send(b"%d" % number)
                assert await server.receive() == b"all are here"

        async with anyio.create_task_group() as group:
            group.start_soon(greet)
            async with aiordma.prepare_connection(ADDRESS, listener.port, **OWN_RECEIVES) as client:
                buffers, receives = post_receives(client)
                await client.establish()
                assert [(await receive).byte_len for receive in receives] == [1] * COUNT
                assert [buffer[:1] for buffer in buffers] == [b"%d" % n for n in range(COUNT)]
                await client.send(b"all are here")


async def test_both_sides_can_be_prepared() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: client.establish(private_data=b"from the client"))
            request = await listener.request()
            assert request.private_data.rstrip(b"\0") == b"from the client"
            server = await request.prepare()
            assert not server.is_connected
            await server.establish(private_data=b"from the server")
        async with client, server:
            assert client.private_data.rstrip(b"\0") == b"from the server"
            assert server.private_data.rstrip(b"\0") == b"from the client"
            await both_ways(client, server)


async def test_closing_a_prepared_server_rejects_the_peer() -> None:
    async with aiordma.listen(ADDRESS, 0, **OWN_RECEIVES) as listener:
        connected = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(connected.of, lambda: aiordma.connect(ADDRESS, listener.port))
            async with (await listener.request()).prepare() as connection:
                _, receives = post_receives(connection)
        assert isinstance(connected.error, aiordma.RejectedError)
        for receive in receives:
            with pytest.raises(aiordma.FlushedError):
                await receive
        with pytest.raises(aiordma.ClosedError):
            await connection.establish()


async def test_closing_a_prepared_client_sends_nothing() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        async with aiordma.prepare_connection(ADDRESS, listener.port, **OWN_RECEIVES) as client:
            _, receives = post_receives(client)
        for receive in receives:
            with pytest.raises(aiordma.FlushedError):
                await receive
        assert not requests_of(listener)


@pytest.mark.promise("Every posted request completes or fails")
async def test_receives_of_a_refused_connection_name_the_refusal() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port, **OWN_RECEIVES)
        _, receives = post_receives(client)
        async with anyio.create_task_group() as group:
            establishing = Outcome()
            group.start_soon(establishing.of, client.establish)
            await (await listener.request()).reject()
        assert isinstance(establishing.error, aiordma.RejectedError)
        for receive in receives:
            with pytest.raises(aiordma.FlushedError) as caught:
                await receive
            # The device may have flushed it before it reported the refusal.
            assert isinstance(caught.value.__cause__, aiordma.RejectedError | None)


async def test_closing_ends_an_establish_under_way() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port)
        establishing = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(establishing.of, client.establish)
            request = await listener.request()
            await client.aclose()
        assert isinstance(establishing.error, aiordma.ClosedError)
        await request.reject()


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.parametrize("is_server", [True, False])
async def test_a_cancelled_establish_closes_the_connection(is_server: bool) -> None:
    async with aiordma.listen(ADDRESS, 0, **OWN_RECEIVES) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port, **OWN_RECEIVES)
        async with anyio.create_task_group() as group:
            if is_server:
                other = Outcome()
                group.start_soon(other.of, client.establish)
                connection = await (await listener.request()).prepare()
            else:
                connection = client
            _, receives = post_receives(connection)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await connection.establish()
            assert scope.cancelled_caught
            for receive in receives:
                with pytest.raises(aiordma.FlushedError):
                    await receive
            with pytest.raises(aiordma.ClosedError):
                await connection.establish()
        await client.aclose()
        await connection.aclose()


async def test_a_peer_that_leaves_fails_establish() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(aiordma.connect, ADDRESS, listener.port)
                connection = await (await listener.request()).prepare()
                scope.cancel()
        left = Outcome()

        async def use() -> None:
            await connection.establish()
            await connection.receive()  # where only the accept finds out

        await left.of(use)
        assert isinstance(left.error, (aiordma.RdmaError, anyio.EndOfStream))
        await connection.aclose()


async def test_too_much_private_data_leaves_it_prepared() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port)
        async with client:
            with pytest.raises(ValueError, match=r"57 bytes: .* at most 56"):
                await client.establish(private_data=bytes(57))
            async with anyio.create_task_group() as group:
                group.start_soon(client.establish)
                server = await (await listener.request()).prepare()
                with pytest.raises(ValueError, match=r"197 bytes: .* at most 196"):
                    await server.establish(private_data=bytes(197))
                await server.establish()
            async with server:
                await both_ways(client, server)


async def test_a_connection_is_established_once() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port)
        async with anyio.create_task_group() as group:
            group.start_soon(client.establish)
            server = await listener.accept()
        async with client, server:
            for connection in (client, server):
                with pytest.raises(ValueError, match="established before"):
                    await connection.establish()
            await both_ways(client, server)


@pytest.mark.parametrize(
    "post",
    [
        lambda client: client.post_send(b"too early"),
        lambda client: client.post_write(b"too early", RemoteMemory(0, 9, 1)),
        lambda client: client.post_read(bytearray(8), RemoteMemory(0, 8, 1)),
        lambda client: client.post_fetch_add(bytearray(8), RemoteMemory(0, 8, 1), 1),
        lambda client: client.post_compare_swap(bytearray(8), RemoteMemory(0, 8, 1), 1, 2),
    ],
    ids=["send", "write", "read", "fetch_add", "compare_swap"],
)
async def test_a_prepared_connection_posts_nothing(
    post: Callable[[aiordma.Connection], object],
) -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port)
        with pytest.raises(ValueError, match="not connected yet"):
            post(client)
        await client.aclose()


async def test_a_forgotten_prepared_connection_warns() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client = await aiordma.prepare_connection(ADDRESS, listener.port)
        endpoint = endpoint_of(client)
        forgotten = [client]
        del client
        with pytest.warns(ResourceWarning, match="unclosed <Connection"):
            forgotten.clear()
        await until(endpoint.teardown.closed.is_set)


async def test_a_peer_can_be_prepared_or_accepted_once() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(Outcome().of, lambda: aiordma.connect(ADDRESS, listener.port))
        request = await listener.request()
        async with request.prepare():
            for answer in (request.prepare, request.accept, request.reject):
                with pytest.raises(aiordma.ClosedError, match="answered"):
                    await answer()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.capability("slow_handshakes")
async def test_prepared_connection_has_the_time_limit() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:  # accepts nothing
        prepared = aiordma.prepare_connection(ADDRESS, listener.port, timeout=3.0)
        async with prepared as client:
            with pytest.raises(aiordma.ConnectTimeoutError, match="took longer than 3 s"):
                await client.establish()
