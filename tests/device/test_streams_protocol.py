"""Peers of a stream that do not use rsockets, or violate its protocol, on the device."""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

import aiordma
from aiordma import RemoteMemory
from aiordma.streams import Stream, StreamProtocolError, connect_stream, listen_stream
from aiordma.streams.protocol import Hello
from tests.device.players import REMOTE, Outcome, until
from tests.devices import ADDRESS

pytestmark = pytest.mark.anyio


async def test_a_peer_without_rsockets_is_rejected() -> None:
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        waiting = Outcome()
        group.start_soon(waiting.of, listener.accept)
        with pytest.raises(aiordma.RejectedError):
            await aiordma.connect(ADDRESS, listener.port, private_data=b"hello")
        await until(lambda: waiting.error is not None)
        assert isinstance(waiting.error, StreamProtocolError)
        assert "does not use rsockets" in str(waiting.error) or "version" in str(waiting.error)
        assert str(waiting.error).startswith(f"accept ('{ADDRESS}', ")


async def test_a_listener_without_rsockets_is_named() -> None:
    async with aiordma.listen(ADDRESS) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, aiordma.Connection.ended)
        with pytest.raises(StreamProtocolError, match="private data") as caught:
            await connect_stream(ADDRESS, listener.port)
        assert str(caught.value).startswith(f"connect to {ADDRESS}:{listener.port}: ")
        group.cancel_scope.cancel()


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


WRONG = [
    (0 << 29, "wrote 0 bytes"),
    (0 << 29 | 1 << 28, "wrote 268435456 bytes"),
    (1 << 29, "reserves operation 1"),
    (4 << 29 | 100, "up to number 100"),
    (6 << 29, "maps memory"),
    (7 << 29 | 9, "control message 9"),
]


@pytest.mark.parametrize(("immediate", "said"), WRONG)
async def test_a_peer_that_violates_the_protocol_is_disconnected(immediate: int, said: str) -> None:
    async with attacked() as (server, peer, _hello):
        await send_word(peer, immediate)
        with pytest.raises(StreamProtocolError, match=said):
            await server.receive()
        await peer.ended()


async def send_word(peer: aiordma.Connection, immediate: int) -> None:
    if peer._endpoint.hub.is_iwarp:
        await peer.send(struct.pack("=I", immediate))
    else:
        await peer.write(b"", RemoteMemory(0, 0, 0), immediate=immediate)


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
async def test_a_peer_cannot_write_beyond_the_ring_and_the_table() -> None:
    async with attacked() as (_server, peer, hello):
        end = hello.table.address + hello.table.length
        with suppress(aiordma.RemoteAccessError):  # on iWARP the write itself has succeeded
            await peer.write(b"x" * 8, RemoteMemory(end, 8, hello.table.rkey))
        await peer.ended()


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
async def test_forged_grants_end_the_connection() -> None:
    async with attacked() as (server, peer, hello):
        with suppress(aiordma.RdmaError):  # the last one may be cut off
            for number in range(3):
                entry = hello.table[16 * ((number + 1) % 2) :][:16]
                await peer.write(struct.pack("=QII", 1 << 63, 5, 1), entry)
                await send_word(peer, 4 << 29 | 8)
        with pytest.raises(StreamProtocolError, match="a third time"):
            await server.receive()
