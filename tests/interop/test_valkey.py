"""The Valkey server itself, with RDMA, and valkey-py's client over aiordma."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from valkey import exceptions
from valkey.asyncio import ConnectionPool, Valkey

import aiordma
from aiordma.integrations.valkey import RdmaConnection, open_connection
from tests.conftest import DEVICE
from tests.devices import ADDRESS
from tests.internals import SOFTWARE
from tests.interop.programs import Program, for_everyone, running
from tests.ports import free_port

SERVER = Path(__file__).parents[2] / "build" / "valkey-server"

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.capability("immediate"),
    pytest.mark.skipif(
        not SERVER.exists(),
        reason="this checkout lacks build/valkey-server: python3 -m tests.tasks valkey_server",
    ),
]


@asynccontextmanager
async def running_server() -> AsyncIterator[tuple[Program, int]]:
    port = free_port()
    program = for_everyone(SERVER) if DEVICE == SOFTWARE else SERVER
    command = [
        program,
        "--dir",
        "/tmp",
        "--port",
        0,
        "--save",
        "",
        "--rdma-bind",
        ADDRESS,
        "--rdma-port",
        port,
    ]
    async with running(*map(str, command), status=None, within=70) as server:
        await server.has_written("Ready to accept connections rdma")
        try:
            yield server, port
        finally:
            with suppress(ProcessLookupError):
                server.stop(signal.SIGKILL)


@asynccontextmanager
async def server_and_client(**options: Any) -> AsyncIterator[tuple[Program, Any]]:
    async with running_server() as (program, port):
        pool = ConnectionPool(connection_class=RdmaConnection, host=ADDRESS, port=port, **options)
        client = Valkey(connection_pool=pool)
        try:
            yield program, client
        finally:
            await client.aclose()
            await pool.disconnect()


async def test_the_server_stores_publishes_and_ends_connections() -> None:
    async with server_and_client() as (_, client):
        value = bytes(range(256)) * 10_000  # more than twice either side's buffer
        for _ in range(2):
            await client.set("big", value)
            assert await client.get("big") == value
        async with client.pipeline(transaction=False) as pipeline:
            for _ in range(1000):
                pipeline.incr("count")
            assert await pipeline.execute() == list(range(1, 1001))
        async with client.pubsub() as subscriber:
            await subscriber.subscribe("news")
            assert (await subscriber.get_message(timeout=10))["type"] == "subscribe"
            for number in range(20):
                await client.publish("news", number)
            for number in range(20):
                message = await subscriber.get_message(timeout=10)
                assert message["data"] == str(number).encode()
        number = await client.client_id()
        with suppress(exceptions.ConnectionError):  # the answer may come too late
            await client.client_kill_filter(_id=str(number), skipme=False)
            await client.ping()
        assert await client.client_id() != number


@pytest.mark.natively
async def test_a_server_that_stands_still_gets_no_more_messages_than_it_has_receives() -> None:
    # It permits no retries: one message more than its receives would end the connection.
    async with running_server() as (program, port):
        reader, writer = await open_connection(ADDRESS, port)
        writer.write(b"PING\r\n")
        assert await reader.readline() == b"+PONG\r\n"
        program.stop(signal.SIGSTOP)
        waiting, sent = writer.transport.get_write_buffer_size, 0
        while not waiting() and sent < 2000:
            writer.write(b"PING\r\n")  # one at a time: those that wait would be joined
            sent += 1
            with anyio.move_on_after(1):  # for the device to send what it may
                while waiting():
                    await anyio.sleep(0.001)
        assert waiting() > 0
        for _ in range(2000 - sent):
            writer.write(b"PING\r\n")
        program.stop(signal.SIGCONT)
        for _ in range(2000):
            assert await reader.readline() == b"+PONG\r\n"
        writer.close()
        await writer.wait_closed()


@pytest.mark.natively
async def test_keepalives_of_the_server_and_its_end_are_noticed() -> None:
    async with server_and_client() as (program, client):
        assert await client.ping()
        await anyio.sleep(4)  # it sends one every three seconds
        assert await client.ping()
        program.stop(signal.SIGKILL)
        with pytest.raises(exceptions.ConnectionError):
            await client.blpop(["nothing"], timeout=0)


@pytest.mark.natively
async def test_a_program_that_is_no_valkey_server_is_named() -> None:
    port = free_port()
    async with await aiordma.listen(ADDRESS, port) as listener, anyio.create_task_group() as group:

        async def greet() -> None:
            async with await listener.accept() as peer:
                await peer.send(b"220 welcome")
                await peer.ended()

        group.start_soon(greet)
        with pytest.raises(ConnectionError, match="a message of 11 bytes"):
            await open_connection(ADDRESS, port)
