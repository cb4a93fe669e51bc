"""Waiting for the end of a connection, and asking why it ended."""

from typing import Any

import anyio
import pytest

import aiordma
from tests.alike import alike
from tests.device.players import OWN_RECEIVES, Outcome, both_ways, connected, until
from tests.internals import hub_of

pytestmark = [pytest.mark.anyio, pytest.mark.loop_and_device]

NOWHERE = aiordma.RemoteMemory(4096, 8, 1)


@pytest.mark.promise("Every posted request completes or fails")
async def test_cause_is_none_while_connected() -> None:
    async with connected() as (client, server):
        await both_ways(client, server)
        assert client.cause is None
        assert server.cause is None


@pytest.mark.promise("Every posted request completes or fails")
async def test_ended_returns_the_peers_disconnect() -> None:
    async with connected() as (client, server):
        waiting = [Outcome() for _ in range(3)]
        async with anyio.create_task_group() as group:
            for outcome in waiting:
                group.start_soon(outcome.of, server.ended)
            await anyio.wait_all_tasks_blocked()
            assert server.cause is None
            await client.aclose()
        for outcome in waiting:
            assert type(outcome.value) is aiordma.DisconnectedError
            assert alike(outcome.value, server.cause)
        assert not server.is_connected
        await server.aclose()
        assert type(await server.ended()) is aiordma.DisconnectedError  # the first cause counts


async def test_ended_returns_our_own_close() -> None:
    async with connected() as (client, _):
        outcome = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.of, client.ended)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(client.aclose)
        assert type(outcome.value) is aiordma.ClosedError
        assert type(client.cause) is aiordma.ClosedError


@pytest.mark.promise("Every posted request completes or fails")
@pytest.mark.capability("named_refusals")
async def test_ended_returns_the_request_that_failed() -> None:
    async with connected() as (client, server):
        with pytest.raises(aiordma.RemoteAccessError) as caught:
            await client.read_bytes(NOWHERE)
        assert alike(await client.ended(), caught.value)
        assert isinstance(await server.ended(), aiordma.RdmaError)


@pytest.mark.promise("Every posted request completes or fails")
async def test_requests_are_done_when_the_connection_has_ended() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receives = [server.post_recv(bytearray(8)) for _ in range(10)]
        done: list[bool] = []

        async def watch() -> None:
            await server.ended()
            done.extend(receive.done() for receive in receives)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            await client.aclose()
        assert done == [True] * 10
        for receive in receives:
            assert isinstance(receive.exception(), aiordma.FlushedError)


async def test_messages_can_be_received_after_the_end() -> None:
    async with connected() as (client, server):
        await client.send(b"last words")
        await client.aclose()
        await server.ended()
        assert await server.receive() == b"last words"
        with pytest.raises(aiordma.EndOfStream):
            await server.receive()


@pytest.mark.capability("rnr")
@pytest.mark.parametrize(
    "options", [{}, {"options": aiordma.ConnectionOptions(linger=0.0)}], ids=["default", "none"]
)
async def test_sends_in_flight_end_after_the_disconnect(options: dict[str, Any]) -> None:
    async with connected(client=options, server=OWN_RECEIVES) as (client, server):
        send = client.post_send(b"no receive takes this")
        await server.aclose()
        await client.ended()
        assert send.done()
        with pytest.raises(aiordma.FlushedError):
            await send


@pytest.mark.capability("rnr")
async def test_linger_holds_back_the_flush_but_on_iwarp() -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(linger=1000.0)}, server=OWN_RECEIVES
    ) as (client, server):
        send = client.post_send(b"no receive takes this")
        await server.aclose()
        await until(lambda: not client.is_connected)
        if hub_of(client).is_iwarp:
            await client.ended()
        else:
            assert not send.done()
            await client.aclose()
        with pytest.raises(aiordma.FlushedError):
            await send
        assert type(client.cause) is aiordma.DisconnectedError
