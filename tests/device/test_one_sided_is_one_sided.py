"""A READ or WRITE needs nobody's help at the target: its whole interpreter stands still meanwhile.

The target is a process of its own. It says how to reach its memory, and then blocks: in time.sleep,
or in a C function that is called with the interpreter's lock held, so that not even another thread
of it runs Python.
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import aiordma
from tests.device.players import one_loop
from tests.devices import ADDRESS, DEVICE

pytestmark = pytest.mark.anyio

SECONDS = 4 if DEVICE == "software" else 10  # an emulated machine takes its time
ROUNDS = 100

TARGET = """
import asyncio, ctypes, hashlib, sys, time
import aiordma

address, device, way, seconds = *sys.argv[1:4], float(sys.argv[4])

def block():
    if way == "time.sleep":
        time.sleep(seconds)
    else:  # PyDLL keeps the interpreter's lock
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

async def main():
    async with await aiordma.listen(address, device=device) as listener:
        print(listener.port, flush=True)
        async with await listener.accept() as connection:
            access = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
            region = connection.register(bytearray(b"before" * 1000), access)
            assert await connection.receive() == b"where?"
            await connection.send(region.remote().pack())
            print("blocking", flush=True)
            block()
            print(time.monotonic(), hashlib.sha256(region.view).hexdigest(), flush=True)
            assert await connection.receive() == b"that is all"

asyncio.run(main())
"""


@contextmanager
def target(way: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TARGET, ADDRESS, DEVICE, way, str(SECONDS)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@one_loop
@pytest.mark.parametrize("way", ["time.sleep", "a C function that holds the lock"])
async def test_memory_is_read_and_written_while_its_process_is_blocked(way: str) -> None:
    with target(way) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        async with await aiordma.connect(ADDRESS, port, device=DEVICE) as connection:
            await connection.send(b"where?")
            remote = aiordma.RemoteMemory.unpack(await connection.receive())
            assert process.stdout.readline() == "blocking\n"
            assert await connection.read_bytes(remote[:12]) == b"beforebefore"
            for number in range(ROUNDS):
                written = b"round %05d" % number
                place = remote[number * 11 : number * 11 + 11]
                await connection.write(written, place)
                assert await connection.read_bytes(place) == written
            done = time.monotonic()  # one clock for all processes of a machine
            expected = await connection.read_bytes(remote)
            woke, digest = process.stdout.readline().split()
            # All of that while the target stood still, and not as it woke.
            assert done < float(woke)
            assert digest == hashlib.sha256(expected).hexdigest()
            await connection.send(b"that is all")
