"""What opens something is awaited, or entered by `async with` without an await."""

import asyncio
import contextlib
import functools
import gc
import inspect
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio

import aiordma
from tests.device.players import both_ways, one_loop, reactor_in_use
from tests.devices import ADDRESS

pytestmark = pytest.mark.anyio

OPENERS: dict[str, Callable[..., Any]] = {
    "connect": aiordma.connect,
    "listen": aiordma.listen,
    "open_datagram": aiordma.open_datagram,
    "open_shared_receive": aiordma.open_shared_receive,
    "open_queue_pair": aiordma.open_queue_pair,
    "Listener.accept": aiordma.Listener.accept,
    "ConnectionRequest.accept": aiordma.ConnectionRequest.accept,
    "StreamListener.accept": aiordma.streams.StreamListener.accept,
}


async def test_connecting_and_accepting_without_await() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        done = anyio.Event()

        async def accept() -> None:
            async with listener.accept() as server:
                await server.send(await server.receive())
                await done.wait()
            assert not server.is_connected

        group.start_soon(accept)
        async with aiordma.connect(ADDRESS, listener.port) as client:
            await client.send(b"hello")
            assert await client.receive() == b"hello"
            done.set()
        with pytest.raises(aiordma.ClosedError):
            await client.send(b"closed at the end of the block")
    with pytest.raises(aiordma.ClosedError):
        await listener.request()


async def test_streams_connect_and_are_accepted_without_await() -> None:
    async with (
        aiordma.streams.listen_stream(ADDRESS) as listener,
        anyio.create_task_group() as group,
    ):

        async def accept() -> None:
            async with listener.accept() as server:
                await server.send(await server.receive())
            with pytest.raises(aiordma.ClosedError):
                await server.send(b"closed at the end of the block")

        group.start_soon(accept)
        async with aiordma.streams.connect_stream(ADDRESS, listener.port) as client:
            await client.send(b"hello")
            assert await client.receive() == b"hello"


async def test_a_listener_is_iterated_for_its_requests() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        served: list[bytes] = []

        async def serve() -> None:
            async for request in listener:
                served.append(request.private_data.rstrip(b"\0"))
                async with request.accept() as server:
                    await server.send(await server.receive())
                    with contextlib.suppress(anyio.EndOfStream):
                        await server.receive()
            served.append(b"over")

        group.start_soon(serve)
        for name in (b"one", b"two"):
            async with aiordma.connect(ADDRESS, listener.port, private_data=name) as client:
                await client.send(name)
                assert await client.receive() == name
        await listener.aclose()
    assert served == [b"one", b"two", b"over"]


async def test_shared_receives_open_without_await() -> None:
    async with aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        assert shared.depth == 8
    with pytest.raises(aiordma.ClosedError):
        shared.post_srq_recv([bytearray(8)])


@pytest.mark.capability("datagrams")
async def test_a_datagram_socket_opens_without_await() -> None:
    async with aiordma.open_datagram(ADDRESS) as socket:
        peer = await socket.resolve(ADDRESS, socket.port)
        await socket.send(b"to myself", peer)
        assert (await socket.receive()).data == b"to myself"
    with pytest.raises(aiordma.ClosedError):
        await socket.send(b"closed", peer)


@pytest.mark.capability("queue pairs by hand")
async def test_a_queue_pair_opens_without_await(device: Any) -> None:
    async with aiordma.open_queue_pair(device.by_hand) as pair:
        assert pair.address.qp_num
    with pytest.raises(aiordma.ClosedError):
        await pair.send(b"closed")


async def test_a_block_that_cannot_open_leaves_nothing() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        port = listener.port
    entered = False
    with pytest.raises(aiordma.RdmaConnectionError):
        async with aiordma.connect(ADDRESS, port):
            entered = True
    assert not entered
    assert not reactor_in_use()


async def test_an_opening_that_was_not_awaited_says_so() -> None:
    for opener, name in (
        (aiordma.connect, "connect"),
        (aiordma.streams.connect_stream, "connect_stream"),
    ):
        opening: Any = opener(ADDRESS, 1)
        hint = rf"this {name}\(\) was not awaited: `await {name}\(\.\.\.\)`"
        with pytest.raises(TypeError, match=rf"send\(\): {hint}"):
            await opening.send(b"hello")
        with pytest.raises(AttributeError, match=f"no attribute 'receive': {hint}") as caught:
            await opening.receive()
        assert caught.value.name == "receive"
        assert not hasattr(opening, "register")
        opening.close()


async def test_an_entered_opening_is_not_what_it_opened() -> None:
    opening: Any = aiordma.listen(ADDRESS, 0)
    async with opening as listener:
        assert listener.port
        with pytest.raises(
            AttributeError, match=r"returned this, not what it opens: `await listen"
        ):
            assert opening.port


async def test_an_opening_is_used_once() -> None:
    opening = aiordma.listen(ADDRESS, 0)
    async with opening:
        with pytest.raises(RuntimeError, match="already awaited"):
            await opening


async def test_openings_run_in_tasks_of_task_groups() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener, contextlib.AsyncExitStack() as stack:
        accepted: list[aiordma.Connection] = []
        for number in range(2):

            async def accept() -> None:
                accepted.append(await stack.enter_async_context(listener.accept()))

            async with anyio.create_task_group() as group:
                group.start_soon(accept)
                client = await stack.enter_async_context(
                    aiordma.connect(ADDRESS, listener.port, timeout=60)
                )
            await both_ways(client, accepted[number])
        async with anyio.create_task_group() as group:
            group.start_soon(functools.partial(_open_and_close, aiordma.listen, ADDRESS, 0))
            # As a task of its own: its result is lost, so what it opens is closed here.
            connecting = functools.partial(aiordma.connect, ADDRESS, listener.port, timeout=60)
            group.start_soon(_keep, connecting, accepted)
            await stack.enter_async_context(listener.accept())
        await accepted[-1].aclose()


async def _open_and_close(opener: Callable[..., Any], *arguments: Any) -> None:
    async with opener(*arguments):
        pass


async def _keep(opener: Callable[[], Awaitable[Any]], kept: list[Any]) -> None:
    kept.append(await opener())


async def _refused_port() -> int:
    async with aiordma.listen(ADDRESS, 0) as listener:
        return listener.port


async def test_task_groups_start_the_openers_themselves() -> None:
    # Each ends with its error, which shows that the group awaited it.
    port = await _refused_port()
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(aiordma.connect, ADDRESS, port)
    assert caught.group_contains(aiordma.RdmaConnectionError)


def test_trio_starts_the_openers_themselves() -> None:
    async def main() -> None:
        port = await _refused_port()
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(functools.partial(aiordma.connect, ADDRESS, port, timeout=60))
        assert caught.group_contains(aiordma.RdmaConnectionError)

    trio.run(main)


@one_loop
async def test_asyncio_takes_an_opening_for_a_coroutine() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        connecting = asyncio.create_task(aiordma.connect(ADDRESS, listener.port), name="connect")
        async with asyncio.timeout(60), listener.accept() as server, await connecting as client:
            await both_ways(client, server)
        server, client = await asyncio.gather(
            listener.accept(), aiordma.connect(ADDRESS, listener.port)
        )
        async with server, client:
            await both_ways(client, server)
        accepting = asyncio.ensure_future(listener.accept())
        async with (
            await asyncio.wait_for(aiordma.connect(ADDRESS, listener.port), 60) as client,
            await accepting as server,
        ):
            await both_ways(client, server)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(listener.accept(), 0.01)
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(listener.accept())
            connecting = group.create_task(aiordma.connect(ADDRESS, listener.port))
        async with accepting.result() as server, connecting.result() as client:
            await both_ways(client, server)


@one_loop
@pytest.mark.parametrize("name", ["connect", "listen", "open_datagram", "open_shared_receive"])
async def test_an_opening_never_awaited_warns(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        OPENERS[name](ADDRESS, *([1] if name == "connect" else []))
        gc.collect()
    assert [str(warning.message) for warning in caught] == [f"coroutine '{name}' was never awaited"]
    assert caught[0].category is RuntimeWarning


@pytest.mark.parametrize("name", OPENERS)
def test_an_opener_keeps_its_signature(name: str) -> None:
    opener = OPENERS[name]
    signature = inspect.signature(opener)
    assert opener.__name__ == name.rpartition(".")[2]
    assert "Args" in (inspect.getdoc(opener) or "") or name.endswith("Listener.accept")
    assert "Opening[" in str(signature.return_annotation)
    assert len(signature.parameters) > 1 or name in ("open_queue_pair", "StreamListener.accept")
