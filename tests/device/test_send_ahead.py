"""`send_ahead`: `send` returns when its message is posted, and nothing else changes."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import ConnectionOptions
from tests.connections import connect_to
from tests.device.players import connected, until
from tests.devices import ADDRESS
from tests.internals import COPY_LIMIT

pytestmark = pytest.mark.anyio

AHEAD = 8
RECEIVES = 64
OPTIONS: dict[str, Any] = {"options": ConnectionOptions(send_ahead=AHEAD)}
FEW_RECEIVES: dict[str, Any] = {"receive_buffers": 2}
waits = pytest.mark.capability("rnr")


async def returns(client: aiordma.Connection, item: Any) -> bool:
    """Whether a send returns soon, although the peer takes nothing."""
    with anyio.move_on_after(0.2) as scope:
        await client.send(item)
    return not scope.cancelled_caught


@waits
async def test_so_many_sends_return_before_their_messages_have_arrived() -> None:
    async with connected(server=FEW_RECEIVES, client=OPTIONS) as (client, server):
        for sent in range(AHEAD):
            await client.send(b"%d" % sent)
        sent = AHEAD
        while await returns(client, b"%d" % sent):
            sent += 1
        assert sent <= 2 + AHEAD
        # The one that was cancelled is under way, too.
        assert [await server.receive() for _ in range(sent + 1)] == [
            b"%d" % number for number in range(sent + 1)
        ]
        await client.drain()


@waits
async def test_without_it_a_send_waits_for_the_peers_receive() -> None:
    async with connected(server=FEW_RECEIVES) as (client, server):
        for _ in range(2):
            await client.send(b"fits")
        assert not await returns(client, b"waits")
        await client.drain()  # of nothing
        assert [await server.receive() for _ in range(3)] == [b"fits", b"fits", b"waits"]


@waits
@pytest.mark.promise("A buffer is held until its request completes")
async def test_a_buffer_may_be_changed_when_its_send_has_returned() -> None:
    async with connected(
        server=FEW_RECEIVES | {"receive_size": 2 * COPY_LIMIT}, client=OPTIONS
    ) as (
        client,
        server,
    ):
        for _ in range(2):
            await client.send(b"fills the receives")
        short, long = bytearray(b"short"), bytearray(2 * COPY_LIMIT)
        registered = client.register(bytearray(b"registered"))
        await client.send(short)  # was copied
        short[:] = b"XXXXX"
        await client.send(bytes(2 * COPY_LIMIT))  # cannot change
        for item in (long, registered):
            assert not await returns(client, item)
        found = [len(await server.receive()) for _ in range(2)]
        assert [await server.receive(), len(await server.receive())] == [b"short", 2 * COPY_LIMIT]
        assert [len(await server.receive()), await server.receive()] == [
            2 * COPY_LIMIT,
            b"registered",
        ]
        assert found == [18, 18]
        await client.drain()  # before the peer leaves


async def test_the_end_of_the_block_waits_for_every_message() -> None:
    async with await aiordma.listen(ADDRESS, 0, receive_buffers=RECEIVES) as listener:
        client, server = await connect_to(listener, ADDRESS, **OPTIONS)
        async with server:
            async with client:
                for number in range(40):
                    await client.send(b"%d" % number)
            assert [message async for message in server] == [b"%d" % n for n in range(40)]


async def lose(client: aiordma.Connection, server: aiordma.Connection, how: str) -> None:
    async with client:
        for _ in range(AHEAD):
            await client.send(b"lost")
        await server.aclose()
        if how == "drain":
            await client.drain()
        while how == "send":
            await client.send(b"more")
            await anyio.sleep(0.01)


@waits
@pytest.mark.parametrize("how", ["send", "drain", "end of the block"])
async def test_a_message_that_failed_is_reported(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with await aiordma.listen(ADDRESS, 0, **FEW_RECEIVES) as listener:
        client, server = await connect_to(listener, ADDRESS, **OPTIONS)
        with pytest.raises((aiordma.FlushedError, aiordma.DisconnectedError)):
            await lose(client, server, how)
    assert "never retrieved" not in caplog.text


@waits
async def test_every_task_that_waits_gets_the_error() -> None:
    async with await aiordma.listen(ADDRESS, 0, **FEW_RECEIVES) as listener:
        client, server = await connect_to(listener, ADDRESS, **OPTIONS)
        failed: list[Exception] = []

        async def expect_failure(wait: Callable[[], Awaitable[None]]) -> None:
            try:
                await wait()
            except aiordma.RdmaError as error:
                failed.append(error)

        async with server:
            for _ in range(AHEAD):
                await client.send(b"lost")
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(expect_failure, client.drain)
                group.start_soon(expect_failure, partial(client.send, b"lost"))
                await anyio.wait_all_tasks_blocked()
                await server.aclose()
        await expect_failure(client.drain)  # also later
        assert len(failed) == 4
        await client.aclose()


@waits
@pytest.mark.promise("A listener's peers do not hold each other up")
async def test_end_of_a_handler_that_failed_waits_for_no_message() -> None:
    async def fail(connection: aiordma.Connection) -> None:
        await connection.receive()
        for _ in range(AHEAD):
            await connection.send(b"not taken")
        raise ZeroDivisionError

    async with (
        await aiordma.listen(ADDRESS, 0, **OPTIONS) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, fail)
        async with aiordma.connect(ADDRESS, listener.port, **FEW_RECEIVES) as client:
            await client.send(b"begin")
            assert await client.ended() is not None
        group.cancel_scope.cancel()


@waits
async def test_cancelled_end_of_the_block_reports_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server=FEW_RECEIVES, client=OPTIONS) as (client, _):
        for _ in range(AHEAD):
            await client.send(b"lost")
        with anyio.move_on_after(0.1) as scope:
            await client.__aexit__(None, None, None)
        assert scope.cancelled_caught
        assert not client.is_connected
    assert "never retrieved" not in caplog.text


async def test_the_end_of_a_reconnecting_block_waits_for_every_message() -> None:
    received: list[bytes] = []

    async def serve(connection: aiordma.Connection) -> None:
        async for message in connection:
            received.append(message)

    async with (
        await aiordma.listen(ADDRESS, 0, receive_buffers=RECEIVES) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, serve)
        async for session in aiordma.reconnecting(ADDRESS, listener.port, **OPTIONS):
            async with session as connection:
                for number in range(40):
                    await connection.send(b"%d" % number)
            break
        await until(lambda: len(received) == 40)
        group.cancel_scope.cancel()
