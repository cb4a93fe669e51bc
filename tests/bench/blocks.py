"""Rows of blocks: 256 pieces of memory that are no neighbours, by one await; and their peer, which
offers memory: python3 -m tests.bench.blocks JSON
"""

import json
import random
import struct
import subprocess
import sys
import time
from functools import partial
from mmap import mmap
from multiprocessing.shared_memory import SharedMemory

import anyio

from aiordma import Access, Connection, RemoteMemory, connect, listen
from aiordma.bench.loops import run
from aiordma.bench.processes import announcing
from aiordma.bench.workload import Workload

from . import peers, streams
from .candidates import Candidates
from .compiling import HERE
from .rows import MORE, Reading, Row, bandwidth
from .same_work import rounds_of

COUNT = 256
SIZES = (1 << 10, 16 << 10, 64 << 10, 256 << 10)
COPIED = 64 << 10
RIVALS = ("mooncake", "nixl")
RIVAL_SECONDS = 60.0
DEPTH = 32
"""Requests in flight in C."""
MEGABYTE, GIB = 1e6, 1 << 30
ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
TIME = struct.Struct("!d")


def rows(here: Candidates) -> list[Row]:
    """Return them all."""
    at = streams.Peers(here)
    each = [(operation, size) for operation in ("write", "read") for size in SIZES]
    found = [row for operation, size in each for row in _rows(here, at, operation, size)]
    beside = Row(
        f"software/write_blocks/{COPIED}/beside_shared_memory",
        "MB/s",
        lambda: Reading(_measured(here, "write", COPIED)[0]),
        "copies into shared memory",
        partial(_copied, here, COPIED),
        better=MORE,
        note="a copy is one; the software device makes two, by the kernel",
    )
    return [*found, beside]


def _rows(here: Candidates, at: streams.Peers, operation: str, size: int) -> list[Row]:
    name = f"software/{operation}_blocks/{size}"
    found = partial(_measured, here, operation, size)
    tcp = partial(streams.tcp_writes, at, size)
    return [
        Row(
            name,
            "MB/s",
            lambda: Reading(found()[0]),
            "asyncio TCP streams",
            lambda: bandwidth(tcp()),
            limit=1.0,
            better=MORE,
        ),
        Row(
            f"{name}/processor_time",
            "s per GiB",
            lambda: Reading(found()[1]),
            "asyncio TCP streams",
            lambda: streams.each_gib(tcp(), size),
            limit=1.0,
            note="of both sides",
        ),
        Row(
            f"{name}/beside_c",
            "MB/s",
            lambda: Reading(found()[0]),
            f"the same in C, sleeping, {DEPTH} in flight",
            partial(_in_c, here, operation, size),
            limit=0.95,
            better=MORE,
        ),
        *(_beside(library, here, operation, size) for library in RIVALS),
    ]


def _beside(library: str, here: Candidates, operation: str, size: int) -> Row:
    return Row(
        f"software/{operation}_blocks/{size}/beside_{library}",
        "MB/s",
        lambda: Reading(_measured(here, operation, size)[0]),
        f"{library} over TCP",
        partial(_rival, library, here, operation, size),
        limit=1.0,
        better=MORE,
    )


def _rival(library: str, here: Candidates, operation: str, size: int) -> Reading:
    peer = peers.known().get(library, peers.Peer(why="it was not looked for"))
    if not peer.python:
        return Reading(None, peer.why)
    words = [operation, str(size), str(COUNT), str(here.seconds)]
    done = subprocess.run(
        [peer.python, str(HERE / "blocks_peer.py"), library, *words],
        capture_output=True,
        text=True,
        timeout=RIVAL_SECONDS,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return Reading(found["rate"], peer.note, extra={"s_per_gib": found["processor"]})


def _in_c(here: Candidates, operation: str, size: int) -> Reading:
    work = Workload(operation, size, DEPTH)
    (found,) = rounds_of(here.host, here.device, work, here.seconds, polling=False, receives=COUNT)
    assert found.value is not None
    return Reading(found.value * size / MEGABYTE, extra=found.extra)


def _order() -> list[int]:
    places = list(range(COUNT))
    random.Random(1).shuffle(places)
    return places


def _copied(here: Candidates, size: int) -> Reading:
    source = memoryview(bytearray(size * COUNT))
    shared = SharedMemory(create=True, size=size * COUNT)
    target, count = memoryview(shared.buf or b""), 0
    began = time.perf_counter()
    while time.perf_counter() - began < here.seconds:
        for i, place in enumerate(_order()):
            target[place * size : (place + 1) * size] = source[i * size : (i + 1) * size]
        count += COUNT
    rate = count * size / (time.perf_counter() - began) / MEGABYTE
    target.release()
    shared.close()
    shared.unlink()
    return Reading(rate)


def _measured(here: Candidates, operation: str, size: int) -> tuple[float, float]:
    """Return MB/s, and the processor seconds of both sides for a GiB."""
    settings = json.dumps({"host": here.host, "device": here.device, "bytes": size * COUNT})
    with announcing([sys.executable, "-m", "tests.bench.blocks", settings]) as (port, _):
        return run(partial(_client, here, port, operation, size), spin=0.0)


async def _client(here: Candidates, port: int, operation: str, size: int) -> tuple[float, float]:
    async with connect(here.host, port, device=here.device) as connection:
        await connection.send(b"where?")
        theirs = RemoteMemory.unpack(await connection.receive())
        memory = connection.register(mmap(-1, size * COUNT))
        pairs = [
            (memory[i * size : (i + 1) * size], theirs[place * size : (place + 1) * size])
            for i, place in enumerate(_order())
        ]
        move = connection.write_blocks if operation == "write" else connection.read_blocks
        await move(pairs)  # the pages are there
        count, before = 0, await _processor_time(connection)
        began = time.perf_counter()
        while time.perf_counter() - began < here.seconds:
            await move(pairs)
            count += COUNT
        took = time.perf_counter() - began
        seconds = await _processor_time(connection) - before
        return count * size / took / MEGABYTE, seconds / (count * size) * GIB


async def _processor_time(connection: Connection) -> float:
    """Return the processor time of both processes."""
    await connection.send(b"how long?")
    (theirs,) = TIME.unpack(await connection.receive())
    return float(theirs) + time.process_time()


async def _serve(host: str, device: str, size: int) -> None:
    async with listen(host, 0, device=device) as listener:
        print(json.dumps(listener.port), flush=True)
        async with await listener.accept() as connection:
            memory = connection.register(mmap(-1, size), ACCESS)
            await connection.receive()
            await connection.send(memory.remote().pack())
            async for _ in connection:
                await connection.send(TIME.pack(time.process_time()))


def main(settings: str) -> None:
    """Be the peer."""
    given = json.loads(settings)
    anyio.run(_serve, given["host"], given["device"], given["bytes"])


if __name__ == "__main__":
    main(sys.argv[1])
