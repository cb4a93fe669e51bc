"""The errors of an established connection or stream say with which peer."""

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

import aiordma
from aiordma import Connection, RemoteMemory
from aiordma.streams import Stream, listen_stream
from aiordma.streams.protocol import Hello
from aiordma.testing import Faults
from aiordma.verbs import AsyncEvent, AsyncEventType, CmEventType
from aiordma.verbs.event_channel import Event
from tests.device.players import OWN_RECEIVES, REMOTE, connected, one_loop
from tests.device.test_failures import NOWHERE
from tests.device.test_verbs_events import inject
from tests.devices import ADDRESS
from tests.internals import address_text, endpoint_of, queue_pair_of

pytestmark = pytest.mark.anyio


def name_of_peer(connection: Connection) -> str:
    return address_text(connection.peer_address)


async def raised(call: Callable[[], Awaitable[object]]) -> Exception:
    """The error of an asynchronous call."""
    try:
        await call()
    except Exception as error:
        return error
    pytest.fail("it raised nothing")


async def _result(request: aiordma.WorkRequest) -> None:
    await request


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[Stream, aiordma.Connection, Hello]]:
    """Yield a stream's server, its peer, which can send anything, and the server's Hello."""
    async with listen_stream(ADDRESS, queue_depth=16) as listener:
        accepted: list[Stream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            peer = await aiordma.prepare_connection(ADDRESS, listener.port, receive_buffers=64)
            memory = peer.register(bytearray(4096), REMOTE | aiordma.Access.LOCAL_WRITE).remote()
            hello = Hello(8, memory[:32], memory[64:128])
            await peer.establish(private_data=hello.pack())
        async with peer, accepted[0] as server:
            yield server, peer, Hello.unpack(peer.private_data)


async def send_word(peer: aiordma.Connection, immediate: int) -> None:
    if peer._endpoint.hub.is_iwarp:
        await peer.send(struct.pack("=I", immediate))
    else:
        await peer.write(b"", RemoteMemory(0, 0, 0), immediate=immediate)


# -- connections ----------------------------------------------------------------------------------


@one_loop
@pytest.mark.capability("named_refusals")
async def test_refused_access_names_the_peer() -> None:
    async with connected() as (client, _):
        error = await raised(lambda: client.read_bytes(NOWHERE))
        assert isinstance(error, aiordma.RemoteAccessError)
        assert f", peer {name_of_peer(client)})" in str(error)
        later = await raised(lambda: client.send(b"too late"))
        assert str(later) == str(error)


@one_loop
async def test_message_that_is_too_long_names_the_peer_at_its_receiver() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receive, spare = server.post_recv(bytearray(8)), server.post_recv(bytearray(8))
        client.post_send(bytes(9)).add_done_callback(aiordma.WorkRequest.exception)
        for each in (receive, spare):
            error = await raised(partial(_result, each))
            assert str(error).count(name_of_peer(server)) == 1


@one_loop
async def test_flush_without_a_cause_names_the_peer() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        receive = server.post_recv(bytearray(8))
        error = endpoint_of(server)._flush_error(receive)
        assert error.__cause__ is None
        assert f", peer {name_of_peer(server)})" in str(error)


@one_loop
async def test_closed_connection_names_the_peer() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        peer = name_of_peer(server)
        receive = server.post_recv(bytearray(8))
        await server.aclose()
        flushed = await raised(lambda: receive)
        assert str(flushed).endswith(f": this side closed the connection to {peer}")
        for call in (lambda: server.send(b""), server.establish):
            closed = await raised(call)
            assert isinstance(closed, aiordma.ClosedError)
            assert str(closed) == f"the connection to {peer} is closed"


@one_loop
async def test_event_of_the_queue_pair_names_the_peer() -> None:
    async with connected() as (_, server):
        pair = queue_pair_of(server)
        assert pair is not None
        inject(server, AsyncEvent(AsyncEventType.QP_FATAL, qp_num=pair.qp_num))
        error = await raised(server.receive)
        assert isinstance(error, aiordma.DeviceEventError)
        assert error.what == f"the connection to {name_of_peer(server)} on {server.device_name}"


@one_loop
async def test_removal_of_the_device_names_the_peer() -> None:
    async with connected() as (client, _):
        endpoint_of(client).handle_event(
            Event(CmEventType.DEVICE_REMOVAL, 0, 1, 0, b"", 0, 0, 0, 0, 0)
        )
        error = await raised(lambda: client.send(b"too late"))
        assert isinstance(error, aiordma.DeviceRemovedError)
        assert str(error) == (
            f"the connection to {name_of_peer(client)}: {client.device_name} was removed"
        )


@one_loop
@pytest.mark.natively
async def test_post_that_the_device_refuses_names_the_peer() -> None:
    async with connected() as (client, _):
        with Faults() as faults:
            faults.refuse_post(times=2)
            sent = await raised(lambda: client.send(b"refused"))
            with pytest.raises(aiordma.VerbsCallError) as chain, client.chain() as requests:
                requests.post_send(b"refused")
        for error in (sent, chain.value):
            assert isinstance(error, aiordma.VerbsCallError)
            assert f"the connection to {name_of_peer(client)}" in str(error)


# -- streams --------------------------------------------------------------------------------------


@one_loop
async def test_violation_of_the_protocol_names_the_peer() -> None:
    async with attacked() as (server, peer, _):
        name = f"the connection to {name_of_peer(server.connection)}"
        await send_word(peer, 7 << 29 | 9)
        for call in (server.receive, lambda: server.send(b"x")):
            error = await raised(call)
            assert isinstance(error, aiordma.streams.StreamProtocolError)
            assert str(error) == f"{name}: the peer sent control message 9, which is reserved"


@one_loop
async def test_end_of_a_stream_names_the_peer() -> None:
    async with attacked() as (server, peer, _):
        name = f"the connection to {name_of_peer(server.connection)}"
        await send_word(peer, 7 << 29 | 0)  # it disconnects
        assert type(end := await raised(server.receive)) is anyio.EndOfStream
        assert str(end) == f"{name}: the peer has ended its data"
        closed = await raised(lambda: server.send(b"x"))
        assert isinstance(closed, aiordma.DisconnectedError)
        assert str(closed) == f"{name}: the peer has closed the stream"


@one_loop
async def test_use_after_the_end_of_a_stream_names_the_peer() -> None:
    async with attacked() as (server, _, _hello):
        name = f"the connection to {name_of_peer(server.connection)}"
        await server.send_eof()
        ended = await raised(lambda: server.send(b"x"))
        assert str(ended) == f"{name}: this stream cannot send any more: send_eof() was called"
        await server.aclose()
        for call in (server.receive, lambda: server.send(b"x")):
            closed = await raised(call)
            assert isinstance(closed, aiordma.ClosedError)
            assert str(closed) == f"{name}: this stream is closed"
