"""What Dask's distributed moves, over rdma:// and tcp://: a program by itself, since distributed
changes what Python does with errors.

dask_peer.py serve HOST     prints the addresses of its two listeners, as JSON
dask_peer.py cluster HOST   prints the addresses of its two schedulers; each has two workers
dask_peer.py array ADDRESS SECONDS PID      prints bytes, seconds, processor seconds of both sides
dask_peer.py rechunk ADDRESS SECONDS PID    the same, of the workers
dask_peer.py shuffle ADDRESS SECONDS PID    the same
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
from dask import array as dask_array
from distributed import Client, LocalCluster, wait
from distributed.comm.core import Comm, CommClosedError, connect, listen
from distributed.protocol.serialize import to_serialize

from .processor import processor_seconds

SIZE = 64 << 20
WARM_UP = 3
"""Messages before those that are measured."""
SIDE = 6144
"""Rows and columns of the array of doubles that the workers move: 288 MiB."""
STRIPE = 512
"""Rows, or columns, of each of its chunks."""


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


async def ask(address: str, seconds: float, pid: int) -> None:
    """Send one array again and again, each after the answer to the one before."""
    array = numpy.random.default_rng().integers(0, 256, SIZE, "u1")
    comm = await connect(address)
    count, start, processor = -WARM_UP, 0.0, 0.0
    while count < 1 or time.perf_counter() < start + seconds:
        if not count:
            start, processor = time.perf_counter(), processor_seconds(pid)
        await comm.write(to_serialize(array))
        assert await comm.read() == array[-1]
        count += 1
    took, used = time.perf_counter() - start, processor_seconds(pid) - processor
    await comm.close()
    print(json.dumps([count * SIZE, took, used]))


def cluster(host: str) -> None:
    settings = {"host": host, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(protocol="rdma", **settings) as ours,
        LocalCluster(protocol="tcp", **settings) as tcp,
    ):
        print(json.dumps([ours.scheduler_address, tcp.scheduler_address]), flush=True)
        sys.stdin.read()


def rechunked(array: Any) -> Any:
    return array.rechunk((SIDE, STRIPE))


def shuffled(array: Any) -> Any:
    order = numpy.random.default_rng(1).permutation(SIDE)
    return array.shuffle(order.reshape(-1, STRIPE).tolist(), axis=0)


def compute(move: Callable[[Any], Any], address: str, seconds: float) -> None:
    """Move an array between the workers again and again: another one each time, because the
    scheduler knows the result of the same. The first time is not measured."""
    with Client(address) as client:
        count, took, used = 0, 0.0, dict[str, float]()
        while took < seconds or count < 2:
            array = dask_array.random.random((SIDE, SIDE), chunks=(STRIPE, SIDE)).persist()
            wait(array)
            before, start = client.run(time.process_time), time.perf_counter()
            done = move(array).persist()
            wait(done)
            spent = time.perf_counter() - start
            after = client.run(time.process_time)
            if count:
                took += spent
                for worker in after:
                    used[worker] = used.get(worker, 0.0) + after[worker] - before[worker]
            count += 1
            length = array.nbytes
            del array, done
        print(json.dumps([(count - 1) * length, took, sum(used.values())]))


if __name__ == "__main__":
    action, place, *rest = sys.argv[1:]
    if action == "cluster":
        cluster(place)
    elif action in ("rechunk", "shuffle"):
        compute(rechunked if action == "rechunk" else shuffled, place, float(rest[0]))
    else:
        asyncio.run(serve(place) if action == "serve" else ask(place, float(rest[0]), int(rest[1])))
