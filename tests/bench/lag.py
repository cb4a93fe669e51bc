"""How far behind the event loop of a server is while peers write to it without pause.

A writer's program is `python -m tests.bench.lag HOST PORT SIZE`: a plain socket that sends WRITE
frames of SIZE bytes until it is terminated.
"""

import json
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial

import anyio

from aiordma import Access, Connection, RemoteMemory, connect, listen
from aiordma.bench.loops import run
from aiordma.bench.processes import announcing
from aiordma.bench.workload import Workload
from tests.attacks.peer import RawPeer

from .candidates import Candidates
from .rows import Reading

SIZES = (0, 0, 4096)
"""Of the WRITEs of each writer."""
CHUNK = 1 << 18
"""Bytes of frames that a writer gives to TCP with one call."""
TICK = 0.001
ROUND = 5
"""Measurements of the usual length, since the longest lags are rare."""


def measure(here: Candidates) -> Reading:
    """Return the longest lag, in milliseconds, of a loop that echoes messages meanwhile."""
    port = here.ports("auto", False).rdma
    return run(partial(_measure, here, port), spin=0.0)


async def _measure(here: Candidates, port: int) -> Reading:
    written = bytearray(max(SIZES))

    async def be_written_to(connection: Connection) -> None:
        region = connection.register(written, access=Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        await connection.send(region[:].remote().pack())
        await anyio.sleep_forever()

    async with (
        await listen(here.host, 0, device=here.device) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, be_written_to)
        with ExitStack() as writers:
            for size in SIZES:
                words = [sys.executable, "-m", "tests.bench.lag"]
                words += [here.host, str(listener.port), str(size)]
                await anyio.to_thread.run_sync(writers.enter_context, announcing(words))
            async with await connect(
                here.host, port, device=here.device, private_data=Workload("echo", 64).pack()
            ) as connection:
                lags = await _lags(connection, ROUND * here.seconds)
        group.cancel_scope.cancel()
    return Reading(
        max(lags) * 1e3,
        extra={"count": len(lags), "median_ms": sorted(lags)[len(lags) // 2] * 1e3},
    )


async def _lags(connection: Connection, seconds: float) -> list[float]:
    """Return how late the loop woke a task, each time, while another one echoes messages."""
    lags = []

    async def echo() -> None:
        while True:
            await connection.send(bytes(64))
            await connection.receive()

    async with anyio.create_task_group() as group:
        group.start_soon(echo)
        end = time.perf_counter() + seconds
        now = time.perf_counter()
        while now < end:
            await anyio.sleep(TICK)
            later = time.perf_counter()
            lags.append(later - now - TICK)
            now = later
        group.cancel_scope.cancel()
    return lags


def write(host: str, port: int, size: int) -> None:
    """Be a writer."""
    with RawPeer(port) as peer:
        remote = RemoteMemory.unpack(peer.receive_message())
        frame = peer.write(remote.rkey, remote.address, bytes(size))
        peer.socket.settimeout(None)
        print(json.dumps(size), flush=True)
        chunk = frame * (CHUNK // len(frame))
        with suppress(ConnectionError):
            while True:
                peer.send(chunk)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
