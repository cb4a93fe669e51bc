"""Peers that send WRITEs without pause do not keep the event loop from the device.

What this proves: a client whose messages do not come back within a minute each, a writer that is
cut off or not served, and a victim that ends, fail the test. What it does not prove: that the lock
of the device is handed over in turn. A lock without turns only makes the client slower; by how much
depends on the machine, and no test asserts times. tests/native/turns.c proves the turns by counting
them; the row software/lag_beside_writers of `make bench` measures the event loop's lag.
"""

from contextlib import ExitStack

import pytest

import aiordma
from aiordma import Access, RemoteMemory
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import RawPeer, Stream
from tests.attacks.victim import HOST, Ready, Victim

SIZE = 4096
WRITERS = 3
ROUNDS = 200
MOST_BYTES = 1 << 18
"""Of frames that a writer gives to TCP with one call."""


async def serve_memory(ready: Ready) -> None:
    """Echo every message but "where?", whose answer is memory that the peer may write to."""

    async def serve(connection: aiordma.Connection) -> None:
        memory = connection.register(bytearray(SIZE), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        async for message in connection:
            is_question = bytes(message) == b"where?"
            await connection.send(memory.remote().pack() if is_question else message)

    async with await aiordma.listen(HOST, 0) as listener:
        ready(listener.port)
        await listener.serve(serve)


def granted(peer: RawPeer) -> RemoteMemory:
    """Ask the victim for memory to write to."""
    peer.send(peer.message(b"where?"))
    return RemoteMemory.unpack(peer.receive_message())


@pytest.mark.parametrize("size", [0, SIZE])
def test_writers_do_not_lock_others_out(size: int) -> None:
    with Victim(serve_memory) as victim, GoodClient(victim.port) as client, ExitStack() as stack:
        streams = []
        for _ in range(WRITERS):
            peer = stack.enter_context(RawPeer(victim.port))
            memory = granted(peer)
            frame = peer.write(memory.rkey, memory.address, bytes(size))
            composed = frame * (MOST_BYTES // len(frame))
            streams.append(stack.enter_context(Stream(peer, composed)))
        before = [stream.sent for stream in streams]
        client.must_progress(ROUNDS)
        # The writers were served as well: none was disconnected, or held back for ever.
        assert all(stream.sent > sent for stream, sent in zip(streams, before, strict=True))
