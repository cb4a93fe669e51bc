"""A numpy array through a comm of Dask's distributed: a program by itself, since distributed
changes what Python does with errors.

dask_peer.py serve HOST             prints the addresses of its listeners, rdma:// and tcp://
dask_peer.py ask ADDRESS SECONDS    prints bytes sent, seconds and processor seconds, as JSON
"""

import asyncio
import json
import sys
import time
from contextlib import suppress

import numpy
from distributed.comm.core import Comm, CommClosedError, connect, listen
from distributed.protocol.serialize import to_serialize

SIZE = 64 << 20
WARM_UP = 3
"""Messages before those that are measured."""


async def answer(comm: Comm) -> None:
    """Answer each array with its last byte."""
    with suppress(CommClosedError):
        while True:
            array = await comm.read()
            await comm.write(int(array[-1]))


async def serve(host: str) -> None:
    async with listen(f"rdma://{host}", answer) as ours, listen(f"tcp://{host}", answer) as tcp:
        print(json.dumps([ours.contact_address, tcp.contact_address]), flush=True)
        await asyncio.Event().wait()


async def ask(address: str, seconds: float) -> None:
    """Send one array again and again, each after the answer to the one before."""
    array = numpy.random.default_rng().integers(0, 256, SIZE, "u1")
    comm = await connect(address)
    count, start, processor = -WARM_UP, 0.0, 0.0
    while count < 1 or time.perf_counter() < start + seconds:
        if not count:
            start, processor = time.perf_counter(), time.process_time()
        await comm.write(to_serialize(array))
        assert await comm.read() == array[-1]
        count += 1
    took, used = time.perf_counter() - start, time.process_time() - processor
    await comm.close()
    print(json.dumps([count * SIZE, took, used]))


if __name__ == "__main__":
    action, place, *rest = sys.argv[1:]
    asyncio.run(serve(place) if action == "serve" else ask(place, *map(float, rest)))
