"""Rows of Valkey: GETs from one server over RDMA, beside the same over TCP by asyncio's streams. On
the software device, the server runs under `aiordma exec`.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from aiordma.bench.loops import run
from aiordma.bench.mistakes import ServerEndedError
from aiordma.integrations.valkey import open_connection
from tests.ports import free_port

from .candidates import Candidates
from .processor import processor_seconds
from .rows import MORE, Reading, Row

SERVER = Path(__file__).parents[2] / "build" / "valkey-server"
WITHOUT = "no build/valkey-server: python3 -m tests.vm valkey-server"
KEY = "value"
READY = "Ready to accept connections rdma"
ON_SOFTWARE = [sys.executable, "-m", "aiordma", "exec"]
GOAL = 0.7

Open = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def rows(here: Candidates) -> list[Row]:
    """Return the rows: small values by one client and by ten, in pipelines, and a large value."""
    ports: list[int] = []
    where, before = ("software", ON_SOFTWARE) if here.device == "software" else ("rxe", [])

    def measured(
        connect: Open, which: int, loop: str, clients: int, size: int, depth: int
    ) -> Reading:
        if not SERVER.exists():
            return Reading(None, WITHOUT)
        if not ports:
            ports.extend(here.keep(_serving(here.host, before)))
        *rdma_and_tcp, pid = ports
        place = here.host, rdma_and_tcp[which]
        main = partial(_gets, connect, *place, clients, size, depth, here.seconds, pid)
        return run(main, loop=loop, spin=here.spin)

    def row(name: str, *how: int, limit: float | None = None) -> Row:
        return Row(
            f"{where}/valkey/{name}",
            "/s",
            partial(measured, open_connection, 0, "auto", *how),
            "the same over TCP",
            partial(measured, asyncio.open_connection, 1, "asyncio", *how),
            limit,
            better=MORE,
        )

    return [
        row("get/1_client", 1, 16, 1),
        row("get/10_clients", 10, 16, 1, limit=GOAL),
        row("get/pipelines", 1, 16, 50),
        row("get/1048576", 1, 1 << 20, 1, limit=GOAL),
    ]


@contextmanager
def _serving(host: str, before: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Run a server during the block, with words before its command; yields its ports for RDMA and
    TCP, and its pid."""
    rdma, tcp = free_port(), free_port()
    words = [*before, str(SERVER), "--save", "", "--protected-mode", "no"]
    words += ["--bind", host, "--port", str(tcp), "--rdma-bind", host, "--rdma-port", str(rdma)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            if not any(READY in line for line in server.stdout):
                raise ServerEndedError(f"valkey-server ended with status {server.wait()}")
            yield rdma, tcp, server.pid
        finally:
            server.kill()


def command(*words: bytes) -> bytes:
    """Return a command as RESP has it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


async def _gets(
    connect: Open,
    host: str,
    port: int,
    clients: int,
    size: int,
    depth: int,
    seconds: float,
    pid: int,
) -> Reading:
    """Return how many GETs per second all clients got, each with so many on the way."""
    ends = [await connect(host, port) for _ in range(clients)]
    reader, writer = ends[0]
    writer.write(command(b"SET", KEY.encode(), bytes(size)))
    assert await reader.readline() == b"+OK\r\n"
    answer = len(b"$%d\r\n" % size) + size + len(b"\r\n")
    questions = command(b"GET", KEY.encode()) * depth
    until = 0.0
    count = 0

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        while not count or time.perf_counter() < until:
            writer.write(questions)
            await writer.drain()
            await reader.readexactly(answer * depth)
            count += depth

    await asyncio.gather(*(ask(*end) for end in ends))  # once each: the warm-up
    count, start, before = 0, time.perf_counter(), processor_seconds(pid)
    until = start + seconds
    await asyncio.gather(*(ask(*end) for end in ends))
    took, used = time.perf_counter() - start, processor_seconds(pid) - before
    for _, writer in ends:
        writer.close()
        await writer.wait_closed()
    return Reading(count / took, cpu_us=used / count * 1e6)
