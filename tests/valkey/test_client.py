"""valkey-py's asyncio client over RDMA, with a real server at the other end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from valkey import exceptions
from valkey.asyncio import ConnectionPool, Valkey

import aiordma
from aiordma.integrations.valkey import RdmaConnection
from tests.devices import ADDRESS
from tests.valkey.server import ValkeyServer, bridged

pytestmark = [pytest.mark.anyio, pytest.mark.capability("immediate")]


@asynccontextmanager
async def client_of(port: int, **options: Any) -> AsyncIterator[Any]:
    pool = ConnectionPool(connection_class=RdmaConnection, host=ADDRESS, port=port, **options)
    client = Valkey(connection_pool=pool)
    try:
        yield client
    finally:
        await client.aclose()
        await pool.disconnect()


@asynccontextmanager
async def client_and_server(server: ValkeyServer, **options: Any) -> AsyncIterator[Any]:
    async with bridged(server) as port, client_of(port, **options) as client:
        await client.flushall()
        yield client


@pytest.mark.parametrize("protocol", [2, 3])
async def test_values_of_all_bytes_come_back(valkey_server: ValkeyServer, protocol: int) -> None:
    value = bytes(range(256)) * 3
    async with client_and_server(valkey_server, protocol=protocol) as client:
        await client.set("key", value)
        await client.hset("map", mapping={"one": 1, "two": 2})
        assert await client.get("key") == value
        assert await client.hgetall("map") == {b"one": b"1", b"two": b"2"}


async def test_a_value_longer_than_the_buffers_goes_round_them(
    valkey_server: ValkeyServer,
) -> None:
    value = bytes(range(251)) * 20_000
    async with client_and_server(valkey_server) as client:
        for _ in range(2):
            await client.set("big", value)
            assert await client.get("big") == value


async def test_a_pipeline_of_thousands(valkey_server: ValkeyServer) -> None:
    async with (
        client_and_server(valkey_server) as client,
        client.pipeline(transaction=False) as pipeline,
    ):
        for _ in range(5000):
            pipeline.incr("count")
        assert await pipeline.execute() == list(range(1, 5001))


async def test_concurrent_requests_take_connections_of_their_own(
    valkey_server: ValkeyServer,
) -> None:
    async with client_and_server(valkey_server) as client:

        async def count(name: str) -> None:
            for number in range(1, 20):
                assert await client.incr(name) == number

        await asyncio.gather(*(count(f"count {number}") for number in range(12)))
        kinds = {type(each) for each in client.connection_pool._available_connections}
        assert kinds == {RdmaConnection}


async def test_subscribers_get_what_is_published(valkey_server: ValkeyServer) -> None:
    async with client_and_server(valkey_server) as client, client.pubsub() as subscriber:
        await subscriber.subscribe("news")
        assert (await subscriber.get_message(timeout=10))["type"] == "subscribe"
        for number in range(500):
            await client.publish("news", number)
        for number in range(500):
            message = await subscriber.get_message(timeout=10)
            assert message["data"] == str(number).encode()


async def test_a_transaction_that_was_watched_fails(valkey_server: ValkeyServer) -> None:
    async with client_and_server(valkey_server) as client, client.pipeline() as pipeline:
        await pipeline.watch("key")
        await client.set("key", "changed by another one")
        pipeline.multi()
        pipeline.set("key", "ours")
        with pytest.raises(Exception, match="Watched variable changed"):
            await pipeline.execute()


async def test_a_reply_that_does_not_come_ends_in_valkeys_timeout(
    valkey_server: ValkeyServer,
) -> None:
    limits = {"socket_timeout": 3.0, "socket_connect_timeout": 30.0}
    async with client_and_server(valkey_server, **limits) as client:
        with pytest.raises(exceptions.TimeoutError):
            await client.blpop(["nothing"], timeout=0)
        assert await client.ping()


async def test_a_cancelled_request_leaves_the_client_usable(valkey_server: ValkeyServer) -> None:
    async with client_and_server(valkey_server) as client:
        await client.set("key", "value")
        for _ in range(3):
            waiting = asyncio.ensure_future(client.blpop(["nothing"], timeout=0))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await client.get("key") == b"value"


async def test_a_connection_that_the_server_closed_is_replaced(
    valkey_server: ValkeyServer,
) -> None:
    async with bridged(valkey_server) as port, client_of(port) as client, client_of(port) as other:
        number = await client.client_id()
        await other.client_kill_filter(_id=str(number))
        # The client hears of it at its next request at the latest.
        with suppress(exceptions.ConnectionError):
            assert await client.client_id() != number
        assert await client.client_id() != number


async def test_a_wrong_password_is_valkeys_error(valkey_server: ValkeyServer) -> None:
    async with bridged(valkey_server) as port, client_of(port, password="wrong") as client:
        with pytest.raises(exceptions.AuthenticationError):
            await client.ping()


async def test_an_address_without_a_server_is_valkeys_error() -> None:
    async with await aiordma.listen(ADDRESS) as listener:
        port = listener.port
    async with client_of(port) as client:
        with pytest.raises(exceptions.ConnectionError, match=f"{ADDRESS}:{port}"):
            await client.ping()


async def test_a_peer_that_announces_nothing_ends_in_valkeys_timeout() -> None:
    async def accept() -> aiordma.Connection:
        return await listener.accept()

    async with await aiordma.listen(ADDRESS) as listener:
        peer = asyncio.ensure_future(accept())
        async with client_of(listener.port, socket_connect_timeout=3.0) as client:
            with pytest.raises(exceptions.TimeoutError):
                await client.ping()
        await (await peer).aclose()


async def test_a_url_names_a_server(valkey_server: ValkeyServer) -> None:
    async with bridged(valkey_server) as port:
        url = f"valkey://{ADDRESS}:{port}/3"
        client: Any = Valkey.from_url(url, connection_class=RdmaConnection)
        await client.set("key", "value")
        assert await client.get("key") == b"value"
        await client.aclose()


async def test_options_reach_the_connection(valkey_server: ValkeyServer) -> None:
    options = {"rdma": {"buffer_size": 65536, "keepalive": 1.0}, "device": "auto"}
    async with client_and_server(valkey_server, **options) as client:
        await client.set("key", bytes(200_000))
        assert await client.get("key") == bytes(200_000)
    async with bridged(valkey_server) as port, client_of(port, rdma={"buffer_size": 1}) as client:
        with pytest.raises(exceptions.ConnectionError, match="buffer_size"):
            await client.ping()


@pytest.mark.natively
async def test_a_required_device_is_refused_as_valkeys_error(valkey_server: ValkeyServer) -> None:
    async with bridged(valkey_server) as port, client_of(port, device="rdma") as client:
        with pytest.raises(exceptions.ConnectionError, match="rdma"):
            await client.ping()


def test_the_text_of_a_pool_says_that_it_is_rdma() -> None:
    pool = ConnectionPool(connection_class=RdmaConnection, host="192.0.2.1")
    assert "host=192.0.2.1,port=6379,db=0,transport=rdma" in repr(pool)
