"""A READ or WRITE needs no help at the target: its whole interpreter stands still meanwhile.

The target is a process of its own. It says how to reach its memory, and then blocks until it is
told to go on: in a call of Python, or in a C function that is called with the interpreter's lock
held, so that not even another thread of it runs Python.
"""

import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import aiordma
from tests.device.players import one_loop
from tests.devices import ADDRESS, DEVICE
from tests.forked import python

pytestmark = pytest.mark.anyio

ROUNDS = 100

SLOT = 16  # bytes, so that none crosses a page: see `short_reads_across_pages` in tests/devices.py

TARGET = """
import asyncio, ctypes, hashlib, mmap, os, sys
import aiordma

address, device, way = sys.argv[1:]

def block():
    if way == "os.read":
        assert os.read(0, 1) == b"!"
    else:  # PyDLL keeps the interpreter's lock
        assert ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1) == 1

async def main():
    async with await aiordma.listen(address, device=device) as listener:
        print(listener.port, flush=True)
        async with await listener.accept() as connection:
            access = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
            region = connection.register(mmap.mmap(-1, 8192), access)
            region.view[:12] = b"beforebefore"
            assert await connection.receive() == b"where?"
            await connection.send(region.remote().pack())
            print("blocking", flush=True)
            block()
            print(hashlib.sha256(region.view).hexdigest(), flush=True)
            assert await connection.receive() == b"that is all"

asyncio.run(main())
"""


@contextmanager
def target(way: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*python(), "-c", TARGET, ADDRESS, DEVICE, way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@one_loop
@pytest.mark.parametrize("way", ["os.read", "a C function that holds the lock"])
async def test_memory_is_read_and_written_while_its_process_is_blocked(way: str) -> None:
    with target(way) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        async with await aiordma.connect(ADDRESS, port, device=DEVICE) as connection:
            await connection.send(b"where?")
            remote = aiordma.RemoteMemory.unpack(await connection.receive())
            assert process.stdout.readline() == "blocking\n"
            assert await connection.read_bytes(remote[:12]) == b"beforebefore"
            for number in range(ROUNDS):
                written = b"round %05d" % number
                place = remote[number * SLOT : number * SLOT + len(written)]
                await connection.write(written, place)
                assert await connection.read_bytes(place) == written
            expected = await connection.read_bytes(remote)
            # All of that while the target stood still; it has woken when it answers.
            process.stdin.write("!")
            process.stdin.flush()
            digest = process.stdout.readline().strip()
            assert digest == hashlib.sha256(expected).hexdigest()
            await connection.send(b"that is all")
