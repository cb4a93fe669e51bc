"""Byte streams between two ends of this package, on the device under test."""

import errno
import gc
import os
import re
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import anyio
import numpy
import pytest
from anyio.abc import SocketAttribute

import aiordma
from aiordma.streams import Stream, StreamOptions, connect_stream, connecting, listen_stream
from aiordma.streams.protocol import Hello
from aiordma.streams.stream import COPY_BYTES
from tests.device.players import Outcome, one_loop, until
from tests.devices import ADDRESS, BUILT_IN
from tests.internals import Buffer, connector, endpoint_of, has_immediate

pytestmark = [pytest.mark.anyio, pytest.mark.loop_and_device]


@asynccontextmanager
async def streams(**options: Unpack[StreamOptions]) -> AsyncIterator[tuple[Stream, Stream]]:
    """Yield (client, server)."""
    async with listen_stream(ADDRESS, **options) as listener:
        accepted: list[Stream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            client = await connect_stream(ADDRESS, listener.port, **options)
        (server,) = accepted
        async with client, server:
            # On iWARP the side that connected sends first.
            await client.send(b"?")
            assert await server.receive() == b"?"
            yield client, server


async def receive_exactly(stream: Stream, length: int) -> bytes:
    got = bytearray()
    while len(got) < length:
        got += await stream.receive(length - len(got))
    return bytes(got)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes", [True, False])
@one_loop
async def test_immediate_data_is_used_on_iwarp_if_both_sides_have_it(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C's rsockets on iWARP never has it, and sends a word behind the data.
    unpack = Hello.unpack
    monkeypatch.setattr(Hello, "unpack", lambda data: replace(unpack(data), takes_immediate=takes))
    async with streams() as (client, server):
        endpoint = client.connection._endpoint
        expected = endpoint.hub.is_iwarp and not (takes and has_immediate(endpoint))
        assert client._path.uses_words is server._path.uses_words is expected
        data = os.urandom(300_000)
        async with anyio.create_task_group() as group:
            group.start_soon(client.send, data)
            assert await receive_exactly(server, len(data)) == data


async def test_a_short_receive_leaves_the_rest() -> None:
    async with streams() as (client, server):
        await client.send(b"abcdef")
        assert await receive_exactly(server, 2) == b"ab"
        assert await receive_exactly(server, 4) == b"cdef"


async def test_nothing_sent_is_nothing_received() -> None:
    async with streams() as (client, server):
        await client.send(b"")
        await client.send(b"x")
        assert await server.receive() == b"x"


@pytest.mark.parametrize("size", [1, 1000, 4096, 70_000, 300_000, 3_000_001])
async def test_every_size_arrives_whole(size: int) -> None:
    data = os.urandom(size)
    async with streams() as (client, server), anyio.create_task_group() as group:
        group.start_soon(client.send, data)
        assert await receive_exactly(server, size) == data
        group.start_soon(server.send, data)
        assert await receive_exactly(client, size) == data


async def test_both_sides_may_send_at_the_same_time() -> None:
    data = os.urandom(1_000_000)
    async with streams() as (client, server), anyio.create_task_group() as group:
        for stream in (client, server):
            group.start_soon(stream.send, data)
            group.start_soon(receive_all, stream, data)


async def receive_all(stream: Stream, data: bytes) -> None:
    assert await receive_exactly(stream, len(data)) == data


async def test_small_rings_and_queues_carry_everything() -> None:
    data = os.urandom(200_000)
    async with (
        streams(buffer_size=4096, queue_depth=16) as (client, server),
        anyio.create_task_group() as group,
    ):
        group.start_soon(client.send, data)
        assert await receive_exactly(server, len(data)) == data


async def test_receive_into_fills_the_buffer() -> None:
    async with streams() as (client, server):
        await client.send(b"abcdef")
        buffer, got = bytearray(6), 0
        while got < 6:
            got += await server.receive_into(memoryview(buffer)[got:])
        assert buffer == b"abcdef"


async def test_registered_memory_is_sent_from_where_it_is() -> None:
    async with streams() as (client, server), anyio.create_task_group() as group:
        region = client.connection.register(bytearray(os.urandom(500_000)))
        group.start_soon(client.send, region[1000:])
        assert await receive_exactly(server, 499_000) == bytes(region.view[1000:])


LARGE = COPY_BYTES + 1000
"""Data of so many bytes is not copied."""


async def test_large_data_is_sent_from_where_it_is() -> None:
    data = os.urandom(LARGE)
    async with streams() as (client, server), anyio.create_task_group() as group:

        async def send() -> None:
            await client.send(data)
            await client.send(b"behind it")

        group.start_soon(send)
        assert await receive_exactly(server, LARGE) == data
        assert await receive_exactly(server, 9) == b"behind it"


@one_loop
async def test_a_cancelled_send_of_large_data_has_sent_its_beginning() -> None:
    data = os.urandom(LARGE)
    async with streams(buffer_size=65536) as (client, server):
        with anyio.move_on_after(0.2) as scope:
            await client.send(data)
        assert scope.cancelled_caught
        await client.send_eof()
        received = bytearray()
        async for part in server:
            received += part
        assert 0 < len(received) <= 65536
        assert received == data[: len(received)]


# -- back-pressure --------------------------------------------------------------------------------


async def test_a_peer_that_does_not_receive_holds_the_sender_back() -> None:
    sent = 0

    async def send_without_end(stream: Stream) -> None:
        nonlocal sent
        while True:
            await stream.send(bytes(1000))
            sent += 1000

    async with streams(buffer_size=16384) as (client, server):
        async with anyio.create_task_group() as group:
            group.start_soon(send_without_end, client)
            await until(lambda: sent > 0)
            before = -1
            while sent != before:  # until it stops
                before = sent
                await anyio.sleep(0.2)
            group.cancel_scope.cancel()
        assert sent <= 2 * 16384
        assert len(await receive_exactly(server, sent)) == sent


# -- the end --------------------------------------------------------------------------------------


async def test_send_eof_ends_one_direction() -> None:
    async with streams() as (client, server):
        await client.send(b"last")
        await client.send_eof()
        await client.send_eof()
        assert await server.receive() == b"last"
        for _ in range(2):
            with pytest.raises(anyio.EndOfStream):
                await server.receive()
        await server.send(b"the other direction")
        assert await client.receive() == b"the other direction"
        with pytest.raises(aiordma.ClosedError, match="send_eof"):
            await client.send(b"x")


async def test_both_directions_may_end() -> None:
    async with streams() as (client, server):
        await client.send_eof()
        await server.send_eof()
        for stream in (client, server):
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()


async def test_aclose_delivers_what_was_sent() -> None:
    data = os.urandom(50_000)
    async with streams() as (client, server):
        await client.send(data)
        await client.aclose()
        assert await receive_exactly(server, len(data)) == data
        with pytest.raises(anyio.EndOfStream):
            await server.receive()


async def test_a_peer_that_closed_cannot_be_sent_to() -> None:
    async with streams() as (client, server):
        await client.aclose()
        with pytest.raises(anyio.EndOfStream):
            await server.receive()
        with pytest.raises(anyio.BrokenResourceError):
            await server.send(b"x" * 1_000_000)
        await server.send_eof()


async def test_a_closed_stream_is_closed() -> None:
    async with streams() as (client, _server):
        await client.aclose()
        await client.aclose()
        for call in (client.receive(), client.send(b"x"), client.send_eof()):
            with pytest.raises(anyio.ClosedResourceError):
                await call


async def test_second_close_waits_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where both tasks of a proxy close the stream while its data is on the way."""
    arrived = anyio.Event()
    async with streams() as (client, server):
        with monkeypatch.context() as patch:
            patch.setattr(client._rsocket, "drained", arrived.wait)
            async with anyio.create_task_group() as group:
                group.start_soon(client.aclose)
                group.start_soon(client.aclose)
                with pytest.raises(anyio.EndOfStream):
                    await server.receive()
                assert client.connection.is_connected
                arrived.set()
            assert not client.connection.is_connected


async def test_cancelled_second_close_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with streams() as (client, _server):
        with monkeypatch.context() as patch:
            patch.setattr(client._rsocket, "drained", anyio.Event().wait)
            async with anyio.create_task_group() as group:
                group.start_soon(client.aclose)
                await anyio.wait_all_tasks_blocked()
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await client.aclose()
                assert not client.connection.is_connected
                group.cancel_scope.cancel()


async def test_closing_ends_the_calls_that_wait() -> None:
    async with streams() as (client, _server), anyio.create_task_group() as group:
        waiting = Outcome()
        group.start_soon(waiting.of, client.receive)
        await anyio.sleep(0.05)
        await client.aclose()
        await until(lambda: waiting.error is not None)
        assert isinstance(waiting.error, anyio.ClosedResourceError)


async def test_a_peer_that_breaks_off_is_no_end_of_the_data() -> None:
    async with streams() as (client, server):
        await client.connection.aclose()
        with pytest.raises(aiordma.DisconnectedError, match="without an end of its data"):
            await server.receive()


def drop(held: list[Stream]) -> None:
    held.clear()
    gc.collect()


async def test_a_forgotten_stream_is_closed_with_a_warning() -> None:
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        accepted = Outcome()
        group.start_soon(accepted.of, listener.accept)
        forgotten = [await connect_stream(ADDRESS, listener.port)]
        await forgotten[0].send(b"last words")
        await until(lambda: accepted.value is not None)
        async with accepted.value as server:
            with pytest.warns(ResourceWarning, match="unclosed <Connection to"):
                drop(forgotten)
            assert await receive_exactly(server, 10) == b"last words"
            with pytest.raises(aiordma.DisconnectedError):
                await server.receive()


# -- use ------------------------------------------------------------------------------------------


async def test_memory_of_python_objects_is_refused() -> None:
    async with streams() as (client, server):
        names: Any = numpy.array(["alice", None], dtype=object)
        structures: Any = numpy.array([7], dtype=[("O", "i8")])
        await client.send(structures)
        with pytest.raises(TypeError, match=r"receive_into\(\): buffer=.* Python objects"):
            await server.receive_into(names)
        with pytest.raises(TypeError, match=r"send\(\): item=.* Python objects"):
            await client.send(names)
        assert await server.receive() == (7).to_bytes(8, "little")
        assert list(names) == ["alice", None]


async def test_only_one_task_receives_at_a_time() -> None:
    async with streams() as (client, _server), anyio.create_task_group() as group:
        group.start_soon(client.receive)
        await anyio.sleep(0.05)
        with pytest.raises(aiordma.BusyError, match="already receiving from <Stream over"):
            await client.receive()
        group.cancel_scope.cancel()


@one_loop
async def test_a_receive_that_is_dropped_lets_another_one_receive() -> None:
    async with streams() as (client, server):
        for drop in ("close", "forget"):
            call = server.receive()
            call.send(None)
            with pytest.raises(aiordma.BusyError, match="already receiving from <Stream over"):
                await server.receive()
            if drop == "close":
                call.close()
            del call
            await client.send(drop.encode())
            assert await server.receive() == drop.encode()


async def test_data_in_any_buffer_is_sent() -> None:
    items: list[Buffer] = [
        b"bytes",
        bytearray(b"an array"),
        memoryview(b"a view"),
        array("I", [1, 2]),
    ]
    async with streams() as (client, server):
        for item in (*items, memoryview(array("I", range(4)))[1:]):
            await client.send(item)
            assert await server.receive() == bytes(item)
            await client.send(item=item)
            buffer = bytearray(100)
            length = await server.receive_into(buffer=buffer)
            assert buffer[:length] == bytes(item)


async def test_a_cancelled_scope_is_noticed_by_each_call() -> None:
    async with streams() as (client, server):
        await client.send(b"data")
        await anyio.sleep(0.05)
        done = []
        for call in (lambda: client.send(b"more"), server.receive):
            with anyio.CancelScope() as scope:
                scope.cancel()
                done.append(await call())
        assert not done
        assert await server.receive() == b"data"


@one_loop
async def test_attributes_are_those_of_sockets() -> None:
    async with streams() as (client, server):
        address: Any = client.extra(SocketAttribute.remote_address)
        host, port = address
        assert host == ADDRESS
        assert port == client.extra(SocketAttribute.remote_port)
        assert server.extra(SocketAttribute.local_port) == port
        assert client.extra(aiordma.types.ConnectionInfo.device_name)
        assert "established" in repr(client)


@one_loop
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffer_size": 4095}, "buffer_size=4095"),
        ({"buffer_size": "x"}, "buffer_size='x'"),
        ({"queue_depth": 15}, "queue_depth=15"),
        ({"queue_depth": 65535}, "queue_depth=65535"),
        ({"close_timeout": -0.1}, "close_timeout=-0.1"),
        ({"close_timeout": 3601}, "close_timeout=3601"),
        ({"close_timeout": "soon"}, "close_timeout='soon'"),
    ],
)
async def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        await connect_stream(ADDRESS, 1, **options)
    with pytest.raises((TypeError, ValueError), match=said):
        await listen_stream(ADDRESS, **options)


@one_loop
async def test_wrong_arguments_are_refused_and_nothing_is_lost() -> None:
    async with streams() as (client, server):
        for max_bytes in (0, -1):
            with pytest.raises(ValueError, match=f"max_bytes={max_bytes}"):
                await client.receive(max_bytes)
        with pytest.raises(TypeError, match="read-only"):
            await client.receive_into(b"abc")
        with pytest.raises(ValueError, match="empty"):
            await client.receive_into(bytearray())
        with pytest.raises(TypeError, match="has no buffer"):
            await client.send(1)  # type: ignore[arg-type]
        await client.send(b"x")
        assert await server.receive() == b"x"


@one_loop
async def test_serving_ends_when_the_device_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def removed(**_: object) -> None:
        endpoint_of(listener).failure = aiordma.DeviceRemovedError("the device was removed")
        raise endpoint_of(listener).end_error()

    async with listen_stream(ADDRESS) as listener:
        monkeypatch.setattr(endpoint_of(listener), "accept", removed)
        with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(10):
            await listener.serve(Stream.aclose)
        assert isinstance(caught.value.exceptions[0], aiordma.DeviceRemovedError)


@one_loop
async def test_serving_goes_on_after_a_shortage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [
        aiordma.VerbsCallError(errno.EMFILE, "rdma_create_id"),
        aiordma.DisconnectedError("a peer withdrew"),
        aiordma.ClosedError("a handshake was given up"),
        aiordma.DeviceRemovedError("the device of a handshake was removed"),
        ValueError("queue_depth exceeds a limit of the peer's device"),
    ]
    expected = [str(error) for error in errors]
    caplog.set_level("INFO", "aiordma")

    async def failing(request: aiordma.ConnectionRequest, _private_data: bytes) -> Any:
        await request.reject()
        raise errors.pop(0)

    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        monkeypatch.setattr(endpoint_of(listener).handshakes, "_establish", failing)
        group.start_soon(listener.serve, Stream.aclose)
        for _ in expected:
            with pytest.raises(aiordma.RejectedError):
                await connect_stream(ADDRESS, listener.port)
        await listener.aclose()
    records = [each for each in caplog.records if "a stream was not accepted" in each.message]
    assert [record.levelname for record in records] == [
        "WARNING",
        "INFO",
        "WARNING",
        "INFO",
        "WARNING",
    ]
    for text, said in zip(expected, records, strict=True):
        assert text in said.message


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@pytest.mark.skipif(not BUILT_IN, reason="70,000 messages take an emulated machine minutes")
@one_loop
async def test_a_stream_goes_on_where_message_numbers_wrap() -> None:
    """Numbers of messages have 16 bits."""
    count, window = 70_000, 50
    async with streams() as (client, server):
        for first in range(0, count, window):
            for number in range(first, first + window):
                await client.send(bytes([number % 256]))
            expected = bytes(number % 256 for number in range(first, first + window))
            assert await receive_exactly(server, window) == expected
        posted = client.connection.statistics().posted_sends
        assert posted > 1 << 16  # each byte was a message


# -- a full backlog ------------------------------------------------------------------------------


async def test_a_burst_of_clients_waits_for_room_in_the_backlog() -> None:
    async with listen_stream(ADDRESS, backlog=1) as listener, anyio.create_task_group() as group:
        connecting = [Outcome() for _ in range(4)]
        for outcome in connecting:
            group.start_soon(outcome.of, lambda: connect_stream(ADDRESS, listener.port))
        await until(lambda: endpoint_of(listener).statistics().backlog_full >= 4)  # some came again
        for _ in connecting:
            async with await listener.accept():
                pass
    for outcome in connecting:
        assert outcome.error is None
        await outcome.value.aclose()


async def test_a_full_backlog_refuses_once_the_timeout_is_over() -> None:
    async with listen_stream(ADDRESS, backlog=1) as listener, anyio.create_task_group() as group:
        group.start_soon(Outcome().of, lambda: connect_stream(ADDRESS, listener.port))
        await until(lambda: endpoint_of(listener).statistics().waiting == 1)
        # The time can end between two attempts, or, on a slow machine, in the middle of one: an
        # attempt can take more than a second there.
        refused = (aiordma.RejectedError, aiordma.ConnectTimeoutError)
        with pytest.raises(refused, match=r"the listener's backlog (is|was) full"):
            await connect_stream(ADDRESS, listener.port, timeout=3.0)
        assert endpoint_of(listener).statistics().backlog_full > 1
        group.cancel_scope.cancel()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.natively
@one_loop
async def test_pauses_for_a_full_backlog_leave_time_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listen_stream(ADDRESS, backlog=1) as listener, anyio.create_task_group() as group:
        counts = endpoint_of(listener).statistics
        connect = partial(connect_stream, ADDRESS, listener.port)
        scope, second = anyio.CancelScope(), Outcome()
        pause = connecting._FullBacklog.pause

        async def pause_until_it_is_empty(waits: connecting._FullBacklog) -> None:
            scope.cancel()
            await until(lambda: counts().waiting == 0)
            await pause(waits)

        async def fill() -> None:
            with scope:
                await connect()

        monkeypatch.setattr(connecting, "FULL_SECONDS", 1000.0)
        monkeypatch.setattr(connecting._FullBacklog, "pause", pause_until_it_is_empty)
        group.start_soon(fill)
        await until(lambda: counts().waiting == 1)
        await second.of(partial(connect, timeout=1.0))  # it waits in the backlog, and in vain
        assert counts().backlog_full == 1
    assert isinstance(second.error, aiordma.ConnectTimeoutError)
    found = re.search(r"accept took longer than 1 s; .* full for ([\d.]+) s", str(second.error))
    assert found is not None
    assert float(found[1]) <= 0.5


@pytest.mark.natively
@one_loop
async def test_a_full_backlog_is_named_if_the_time_ends_before_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, prepared = connector.Attempt._prepare, 0

    async def prepare_twice(attempt: connector.Attempt, *arguments: Any) -> aiordma.Connection:
        nonlocal prepared
        prepared += 1
        if prepared == 3:
            raise TimeoutError  # as at the end of any of its steps
        return await prepare(attempt, *arguments)

    monkeypatch.setattr(connector.Attempt, "_prepare", prepare_twice)
    async with listen_stream(ADDRESS, backlog=1) as listener, anyio.create_task_group() as group:
        group.start_soon(Outcome().of, lambda: connect_stream(ADDRESS, listener.port))
        await until(lambda: endpoint_of(listener).statistics().waiting == 1)
        with pytest.raises(aiordma.ConnectTimeoutError, match="the listener's backlog was full"):
            await connect_stream(ADDRESS, listener.port)
        group.cancel_scope.cancel()
