"""Prefill hands thousands of blocks over to decode, and dies half way; a new one does it again.

    python examples/kv_handover.py 192.0.2.1

Decode owns the cache. It starts a prefill process, gives it a lease of the cache, and a page table:
the place of each block. Prefill WRITEs all blocks to their places with one call, and the last one
notifies decode. The first prefill process kills itself half way. Decode's wait then raises, but not
before the lease has ended: nothing of the dead process arrives in memory that is used again.
"""

import argparse
import asyncio
import mmap
import os
import random
import signal
import struct
import sys

import anyio

import aiordma
from aiordma import Access

BLOCK = 16 << 10
SECONDS = 60
"""The longest time that a prefill process may take."""
NUMBER = struct.Struct("!I")


def contents(block: int) -> bytes:
    """What prefill has computed for a block of the prompt."""
    return block.to_bytes(8, "big") * (BLOCK // 8)


# -- decode ---------------------------------------------------------------------------------------


async def take_over(listener: aiordma.Listener, cache: mmap.mmap, places: list[int]) -> None:
    """Let one prefill process write all blocks. Whatever happens, it writes none afterwards."""
    async with await listener.accept() as connection:
        await connection.receive()  # on iWARP, the side that connected sends first
        counter = connection.counter()
        async with connection.grant(cache, Access.REMOTE_WRITE) as lease:
            await connection.send(lease.remote.pack() + NUMBER.pack(counter.number))
            for start in range(0, len(places), 1000):
                part = places[start : start + 1000]
                await connection.send(struct.pack(f"!{len(part)}I", *part))
            async with asyncio.timeout(SECONDS):
                await lease.until(counter, 1)
        async for _ in connection:  # until prefill leaves: its last WRITE has completed then
            pass


async def decode(address: str, blocks: int) -> None:
    cache, places = mmap.mmap(-1, blocks * BLOCK), list(range(blocks))
    random.shuffle(places)
    async with aiordma.listen(address, 0, keepalive=5.0) as listener:
        for crashes in (True, False):
            prefill = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, address, "--blocks", str(blocks)),
                *("--prefill", str(listener.port), *(["--crash"] if crashes else [])),
            )
            try:
                await take_over(listener, cache, places)
                break
            except (aiordma.RdmaError, anyio.EndOfStream) as error:
                print(f"prefill is gone: {type(error).__name__}; the lease has ended")
            finally:
                await prefill.wait()
    right = sum(
        cache[place * BLOCK : (place + 1) * BLOCK] == contents(block)
        for block, place in enumerate(places)
    )
    print(f"{right} of {blocks} blocks are right")


# -- prefill --------------------------------------------------------------------------------------


async def prefill(address: str, port: int, blocks: int, crash: bool) -> None:
    async with aiordma.connect(address, port) as connection:
        computed = b"".join(contents(block) for block in range(blocks))
        region = connection.register(computed)
        await connection.send(b"ready")
        answer = await connection.receive()
        cache = aiordma.RemoteMemory.unpack(answer[: -NUMBER.size])
        (number,) = NUMBER.unpack(answer[-NUMBER.size :])
        places: list[int] = []
        while len(places) < blocks:
            message = await connection.receive()
            places += struct.unpack(f"!{len(message) // 4}I", message)

        def progress(done: int) -> None:
            if crash and done > len(computed) // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        ours = range(0, blocks * BLOCK, BLOCK)
        theirs = [place * BLOCK for place in places]
        await connection.write_blocks(
            aiordma.Blocks(region, cache, ours, theirs, BLOCK), immediate=number, progress=progress
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of an RDMA interface of this machine")
    parser.add_argument("--blocks", type=int, default=10_000, help="of 16 KiB")
    parser.add_argument("--prefill", type=int, metavar="PORT", help="be the prefill process")
    parser.add_argument("--crash", action="store_true", help="in the middle")
    given = parser.parse_args()
    if given.prefill:
        await prefill(given.address, given.prefill, given.blocks, given.crash)
    else:
        await decode(given.address, given.blocks)


if __name__ == "__main__":
    asyncio.run(main())
