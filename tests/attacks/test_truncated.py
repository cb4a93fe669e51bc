"""A peer reaches for memory of a file that somebody truncated: its access fails, and no more."""

import mmap
import tempfile

import pytest

import aiordma
from aiordma import Access, RemoteMemory
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import RawPeer
from tests.attacks.victim import HOST, Ready, Victim
from tests.unit.stream_peer import TERMINATE

SIZE = 1 << 16


async def serve_file(ready: Ready) -> None:
    """Echo every message but "truncate", which empties the file and is answered with its memory."""

    async def serve(connection: aiordma.Connection) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            access = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
            memory = connection.register(mmap.mmap(file.fileno(), SIZE), access)
            async for message in connection:
                if bytes(message) == b"truncate":
                    file.truncate(0)
                    await connection.send(memory.remote().pack())
                else:
                    await connection.send(message)

    async with await aiordma.listen(HOST, 0) as listener:
        ready(listener.port)
        await listener.serve(serve)


@pytest.mark.promise("A truncated file fails only its requests")
@pytest.mark.parametrize("access", ["small_write", "large_write", "read"])
def test_truncated_file_fails_the_access(access: str) -> None:
    with Victim(serve_file) as victim, GoodClient(victim.port) as client:
        for _ in range(20):
            with RawPeer(victim.port) as peer:
                peer.send(peer.message(b"truncate"))
                memory = RemoteMemory.unpack(peer.receive_message())
                if access == "read":
                    peer.send(peer.read_request(memory.rkey, memory.address, SIZE))
                else:
                    size = 64 if access == "small_write" else SIZE // 2
                    peer.send(peer.write(memory.rkey, memory.address, bytes(size)))
                while peer.receive()[0] != TERMINATE:
                    pass
            client.must_progress()
