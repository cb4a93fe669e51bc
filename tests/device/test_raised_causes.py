"""What an ended object raises: an exception of its own for each call, so that the one that is
stored keeps no caller's frame, and with it no caller's buffer."""

import gc
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

import aiordma
from tests.alike import alike
from tests.device.players import OWN_RECEIVES, Outcome, connected, until
from tests.devices import ADDRESS
from tests.internals import endpoint_of, fail

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

NOWHERE = aiordma.RemoteMemory(4096, 8, 1)

POSTS: dict[str, Callable[[aiordma.Connection, Any], object]] = {
    "post_send": lambda connection, buffer: connection.post_send(buffer),
    "post_sendv": lambda connection, buffer: connection.post_sendv([buffer]),
    "post_recv": lambda connection, buffer: connection.post_recv(buffer),
    "post_read": lambda connection, buffer: connection.post_read(buffer, NOWHERE),
    "post_write": lambda connection, buffer: connection.post_write(buffer, NOWHERE),
    "register": lambda connection, buffer: connection.register(buffer),
}

CALLS: dict[str, Callable[[aiordma.Connection, Any], Awaitable[object]]] = {
    "send": lambda connection, buffer: connection.send(buffer),
    "sendv": lambda connection, buffer: connection.sendv([buffer]),
    "read": lambda connection, buffer: connection.read(buffer, NOWHERE),
    "write": lambda connection, buffer: connection.write(buffer, NOWHERE),
    "fetch_add": lambda connection, buffer: connection.fetch_add(NOWHERE, len(buffer)),
    "receive": lambda connection, buffer: connection.receive(),
}


def _resize(buffer: bytearray) -> None:
    gc.collect()  # a task's frame can be part of a cycle of its own
    buffer.append(0)  # BufferError while any view of it is left


@pytest.mark.parametrize("name", POSTS)
async def test_refused_post_keeps_no_view_of_the_buffer(name: str) -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        await client.aclose()
        await until(lambda: not server.is_connected)
        buffer = bytearray(64)

        def post() -> None:
            view = memoryview(buffer)
            with pytest.raises(aiordma.DisconnectedError):
                POSTS[name](server, view)

        post()
        _resize(buffer)


@pytest.mark.parametrize("name", CALLS)
async def test_refused_call_keeps_no_view_of_the_buffer(name: str) -> None:
    async with connected() as (client, server):
        await client.aclose()
        await until(lambda: not server.is_connected)
        buffer = bytearray(64)

        async def call() -> None:
            view = memoryview(buffer)
            with pytest.raises((aiordma.RdmaError, anyio.EndOfStream)):
                await CALLS[name](server, view)

        await call()
        _resize(buffer)


@pytest.mark.capability("named_refusals")
async def test_failed_wait_for_a_slot_keeps_no_buffer() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(max_send_wr=1)}) as (
        client,
        _,
    ):
        buffers = [bytearray(64) for _ in range(3)]
        failing = client.post_read(bytearray(8), NOWHERE)

        async def send(buffer: bytearray) -> None:
            view = memoryview(buffer)
            with pytest.raises(aiordma.RemoteAccessError):
                await client.send(view)

        async with anyio.create_task_group() as group:
            for buffer in buffers:
                group.start_soon(send, buffer)
        assert isinstance(failing.exception(), aiordma.RemoteAccessError)
        del group
        for buffer in buffers:
            _resize(buffer)
        assert isinstance(failing.exception(), aiordma.RemoteAccessError)


@pytest.mark.promise("Every posted request completes or fails")
async def test_request_raises_each_awaiter_its_own_exception() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        receive = server.post_recv(bytearray(8))
        outcomes = [Outcome() for _ in range(3)]

        async def wait() -> Any:
            return await receive

        async with anyio.create_task_group() as group:
            for outcome in outcomes:
                group.start_soon(outcome.of, wait)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(server.aclose)
        one, two, three = [outcome.error for outcome in outcomes]
        for other in (two, three, receive.exception()):
            assert alike(one, other)
            assert other is not None
            assert isinstance(other.__cause__, aiordma.ClosedError)


@pytest.mark.promise("Every posted request completes or fails")
async def test_failed_request_keeps_no_awaiters_buffer() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        receive = server.post_recv(bytearray(8))
        await server.aclose()
        buffer = bytearray(64)

        async def wait() -> None:
            view = memoryview(buffer)
            with pytest.raises(aiordma.FlushedError) as caught:
                await receive
            with pytest.raises(aiordma.ClosedError):
                raise caught.value.__cause__ or AssertionError
            assert len(view) == 64

        await wait()
        _resize(buffer)
        assert receive.done()


async def test_raised_cause_does_not_grow() -> None:
    async with connected() as (client, server):
        await client.aclose()
        await until(lambda: not server.is_connected)
        depths = set()
        for _ in range(5):
            with pytest.raises(aiordma.DisconnectedError) as caught:
                server.post_send(b"x")
            causes, error = 0, caught.value.__cause__
            while error is not None:
                causes, error = causes + 1, error.__cause__
            depths.add((len(caught.traceback), causes))
        assert len(depths) == 1


async def test_closed_shared_queue_keeps_no_view() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        pass
    buffer = bytearray(64)

    def post() -> None:
        view = memoryview(buffer)
        with pytest.raises(aiordma.ClosedError):
            shared.post_srq_recv([view])

    post()
    _resize(buffer)


@pytest.mark.capability("datagrams")
async def test_ended_datagram_socket_keeps_no_view() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        peer = socket.peer(socket.gid, socket.qp_num)
        fail(socket, aiordma.DeviceRemovedError("it was removed"))
        buffer = bytearray(64)

        def post() -> None:
            view = memoryview(buffer)
            with pytest.raises(aiordma.DeviceRemovedError):
                socket.post_ud_send(view, peer)

        async def send() -> None:
            view = memoryview(buffer)
            with pytest.raises(aiordma.DeviceRemovedError):
                await socket.send(view, peer)

        post()
        await send()
        _resize(buffer)


async def test_listener_without_a_device_keeps_no_frame() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        endpoint_of(listener).failure = aiordma.DeviceRemovedError("it was removed")
        buffer = bytearray(64)

        async def accept() -> None:
            view = memoryview(buffer)
            with pytest.raises(aiordma.DeviceRemovedError):
                await listener.accept()
            assert len(view) == 64

        await accept()
        _resize(buffer)
