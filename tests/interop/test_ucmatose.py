"""ucmatose of rdma-core: many connections of one process, messages both ways on each.

Its server speaks first, which iWARP forbids the accepting side: siw then ends the other side's
handshake now and then (seen under load), so that only connections without messages are a promise
there.
"""

from typing import Unpack

import anyio
import pytest

import aiordma
from aiordma.types import ConnectionKeywords
from tests.devices import ADDRESS
from tests.interop.peers import be_ucmatose_client, be_ucmatose_server
from tests.interop.programs import running
from tests.ports import free_port

pytestmark = pytest.mark.anyio

passive_side_first = pytest.mark.capability("passive_side_first")


async def serve(
    connections: int, count: int, size: int, *options: str, **ours: Unpack[ConnectionKeywords]
) -> None:
    """Be the server of a ucmatose client."""
    answers: list[list[bytes]] = []
    messages = [bytes([number]) * size for number in range(count)]

    async def serve_one(connection: aiordma.Connection) -> None:
        answers.append(await be_ucmatose_server(connection, messages))

    sizes = ("-c", connections, "-C", count, "-S", size)
    async with (
        await aiordma.listen(ADDRESS, 0, **ours) as listener,
        anyio.create_task_group() as servers,
    ):
        servers.start_soon(listener.serve, serve_one)
        target = ("-s", ADDRESS, "-p", listener.port)
        async with running("ucmatose", *target, *sizes, *options) as client:
            pass
        servers.cancel_scope.cancel()
    assert ("data transfers complete\n" in client.output) == (count > 0)
    assert client.output.endswith("test complete\nreturn status 0\n")
    # It receives all into one buffer, and sends what lies there in the end as often as it received.
    assert answers == [messages[-1:] * count] * connections


async def run_clients(connections: int, count: int, size: int, *options: str) -> None:
    """Be the clients of a ucmatose server."""
    received: list[list[bytes]] = []

    async def run_client() -> None:
        async with await aiordma.connect(ADDRESS, port) as connection:
            received.append(await be_ucmatose_client(connection, count))

    port = free_port()
    sizes = ("-c", connections, "-C", count, "-S", size)
    async with running("ucmatose", "-p", port, *sizes, *options) as server:
        await server.listens(port)
        async with anyio.create_task_group() as clients:
            for _ in range(connections):
                clients.start_soon(run_client)
    assert ("data transfers complete\n" in server.output) == (count > 0)
    assert server.output.endswith("disconnected\ntest complete\nreturn status 0\n")
    # What it sends is memory that it never filled, the same for each message of a connection.
    assert [[len(message) for message in messages] for messages in received] == [
        [size] * count
    ] * connections
    assert all(len(set(messages)) == min(count, 1) for messages in received)


@passive_side_first
async def test_ten_connections_of_a_c_client() -> None:
    await serve(10, 10, 100)


@passive_side_first
async def test_ten_connections_to_a_c_server() -> None:
    await run_clients(10, 10, 100)


@pytest.mark.natively
@passive_side_first
async def test_long_messages_of_a_c_client() -> None:
    await serve(2, 5, 100_000, receive_buffers=5, receive_size=100_000)


@pytest.mark.natively
@passive_side_first
async def test_a_c_client_waits_for_our_receives() -> None:
    await serve(2, 20, 100, receive_buffers=2)


@pytest.mark.natively
@passive_side_first
async def test_a_c_client_that_moves_its_connections_to_another_channel() -> None:
    await serve(3, 10, 100, "-m")


@pytest.mark.natively
@passive_side_first
async def test_a_c_server_that_moves_its_connections_to_another_channel() -> None:
    await run_clients(3, 10, 100, "-m")


async def test_ten_connections_of_a_c_client_without_messages() -> None:
    await serve(10, 0, 100)


async def test_ten_connections_to_a_c_server_without_messages() -> None:
    await run_clients(10, 0, 100)
