"""Messages go there and back, on every loop."""

import anyio
import pytest

import aiordma
from tests.device.conftest import ADDRESS
from tests.device.players import connected

pytestmark = [pytest.mark.anyio, pytest.mark.loop_and_device]


async def test_a_message_comes_back() -> None:
    async with connected() as (client, server):
        await client.send(b"hello")
        assert await server.receive() == b"hello"
        await server.send(b"there")
        assert await client.receive() == b"there"


@pytest.mark.promise("Messages arrive whole and in order")
async def test_iteration_ends_when_the_peer_disconnects() -> None:
    async with connected() as (client, server):
        await client.send(b"1")
        await client.send(b"2")
        await client.aclose()
        assert [message async for message in server] == [b"1", b"2"]
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
        with pytest.raises(aiordma.DisconnectedError):
            await server.send(b"3")


async def test_serve_runs_a_handler_for_each_connection() -> None:
    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with (
        await aiordma.listen(ADDRESS, 0) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, echo)
        for number in range(3):
            async with await aiordma.connect(ADDRESS, listener.port) as connection:
                await connection.send(str(number).encode())
                assert await connection.receive() == str(number).encode()
        group.cancel_scope.cancel()
