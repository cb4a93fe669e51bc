"""asyncio's own cancellation reaches through anyio's shields: Task.cancel, wait_for, the end of
asyncio.run. None of it leaves anything behind, whenever it comes."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import connected, reactor_in_use
from tests.devices import ADDRESS
from tests.internals import is_closed


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def _cancelled_after(delay: float, coroutine: Any) -> bool:
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(delay)
    task.cancel()
    try:
        result = await task
    except asyncio.CancelledError:
        return True
    if isinstance(result, aiordma.Connection):
        await result.aclose()
    return False


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1])
@pytest.mark.asyncio
async def test_a_cancelled_connect_leaves_nothing(delay: float) -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:

        async def serve(connection: aiordma.Connection) -> None:
            async for _ in connection:
                pass

        server = asyncio.ensure_future(listener.serve(serve))
        for _ in range(3):
            await _cancelled_after(delay, aiordma.connect(ADDRESS, listener.port))
        server.cancel()
        await asyncio.wait([server])


@pytest.mark.parametrize("delay", [0, 0.001, 0.005, 0.02])
@pytest.mark.asyncio
async def test_a_cancelled_close_closes_all_the_same(delay: float) -> None:
    async with connected() as (client, server):
        unread = client.post_send(b"unread")
        assert await _cancelled_after(delay, server.aclose()) in (True, False)
        await _until(lambda: is_closed(server))
        await server.aclose()
        with pytest.raises(aiordma.ClosedError):
            await server.send(b"x")
        with suppress(aiordma.RdmaError):
            await unread


@pytest.mark.asyncio
async def test_two_closes_at_once_both_wait_for_the_end() -> None:
    async with connected() as (client, _server):
        await asyncio.gather(client.aclose(), client.aclose())
        assert is_closed(client)


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.asyncio
async def test_an_accept_that_is_cancelled_refuses_the_peer() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        for delay in (0, 0.002, 0.01):
            client = asyncio.ensure_future(aiordma.connect(ADDRESS, listener.port))
            request = await listener.request()
            await _cancelled_after(delay, request.accept())
            try:
                connection = await client
            except aiordma.RdmaConnectionError:
                continue
            async with connection:
                with pytest.raises(anyio.EndOfStream):
                    await connection.receive()


@pytest.mark.asyncio
async def test_a_request_outlives_its_listener_and_can_still_be_answered() -> None:
    listener = await aiordma.listen(ADDRESS, 0)
    client = asyncio.ensure_future(aiordma.connect(ADDRESS, listener.port))
    request = await listener.request()
    await listener.aclose()
    async with await request.accept() as connection, await client as ours:
        await ours.send(b"still there")
        assert await connection.receive() == b"still there"


@pytest.mark.asyncio
async def test_closing_with_unread_messages_as_the_last_user_gives_everything_back() -> None:
    async with connected() as (client, server):
        await client.send(b"nobody reads this")
        await asyncio.sleep(0.05)
        await client.aclose()
        await server.aclose()


@pytest.mark.asyncio
@pytest.mark.capability("rnr")
async def test_a_region_in_use_on_another_connection_does_not_stop_a_close() -> None:
    async with connected() as (one, _):
        region = one.register(bytearray(64))
        # No receive is posted: the request stays in flight on the other connection.
        async with connected(server={"receive_buffers": 0}) as (three, _silent):
            request = three.post_send(region[:])
            await one.aclose()
            assert not region.closed
            await three.aclose()
            with pytest.raises(aiordma.FlushedError):
                await request
        assert region.closed


def test_the_end_of_asyncio_run_with_a_close_under_way() -> None:
    """One task closes, another awaits, main returns: run() ends, and nothing hangs."""

    async def main() -> None:
        async with await aiordma.listen(ADDRESS, 0) as listener:
            client = asyncio.ensure_future(aiordma.connect(ADDRESS, listener.port))
            server = await listener.accept()
            connection = await client
            background = [asyncio.ensure_future(connection.aclose())]
            background.append(asyncio.ensure_future(server.aclose()))
            await asyncio.sleep(0)
            for task in background:
                task.cancel()
            await asyncio.wait(background)
        assert not reactor_in_use()

    runner = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    runner.start()
    runner.join(60)
    assert not runner.is_alive()


@pytest.mark.parametrize("delay", [0, 0.005, 0.02, 0.05])
@pytest.mark.capability("datagrams")
@pytest.mark.asyncio
async def test_a_cancelled_datagram_socket_leaves_nothing(delay: float) -> None:
    async def use() -> None:
        async with await aiordma.open_datagram(ADDRESS) as socket:
            await socket.resolve(ADDRESS, other.port)
            await socket.join("239.1.2.3")
            await asyncio.sleep(60)

    async with await aiordma.open_datagram(ADDRESS) as other:
        task = asyncio.ensure_future(use())
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert not reactor_in_use()
