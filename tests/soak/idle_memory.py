"""Measure what idle connections with default options hold, on the device that reaches an address:

    python -m tests.soak.idle_memory HOST [CONNECTIONS]

Server and client are processes of their own on this machine. It prints, in KiB for each connection:
the memory of both processes (without the device's queues, which the kernel allocates and a process
maps), the server's pinned memory, which is a part of that (VmPin), and the kernel's own memory for
one side: what is neither free, nor a process's, nor a cache of files. So nothing else should run.
`make vm` runs it on the kernel's devices.
"""

import gc
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

import aiordma
from tests.bench.default_server import serving

from .many import AT_A_TIME, WARM_UP
from .process import connections_possible

CONNECTIONS = 200
SETTLED_SECONDS = 3.0
"""After a close: the peer's end follows, and the kernel frees what it freed later."""
MESSAGES = 16
"""Of each connection: then each of its receives has been used."""


@dataclass(frozen=True)
class Held:
    """KiB that both processes and the kernel hold."""

    server: int
    client: int
    pinned: int
    kernel: int

    def since(self, before: "Held", connections: int) -> dict[str, float]:
        """Return what is held more than before, for each connection."""
        return {
            "server": round((self.server - before.server) / connections, 1),
            "client": round((self.client - before.client) / connections, 1),
            "pinned": round((self.pinned - before.pinned) / connections, 1),
            "kernel": round((self.kernel - before.kernel) / 2 / connections, 1),
        }


def _fields(path: str) -> dict[str, int]:
    """Return the numbers of a file of /proc by their names."""
    lines = [line.split() for line in Path(path).read_text().splitlines()]
    return {
        words[0].rstrip(":"): int(words[1]) for words in lines if words[1:2] and words[1].isdigit()
    }


def _process_kib(pid: int | str) -> int:
    """Return the memory of a process that is no mapped file."""
    fields = _fields(f"/proc/{pid}/smaps_rollup")
    return fields["Pss_Anon"] + fields["Pss_Shmem"]


def _kernel_kib() -> int:
    """Return the memory that is neither free, nor a process's, nor a cache of files."""
    fields = _fields("/proc/meminfo")
    others = ("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable")
    return fields["MemTotal"] - sum(fields[name] for name in others)


async def _held(server: int) -> Held:
    gc.collect()
    await anyio.sleep(SETTLED_SECONDS)
    return Held(
        _process_kib(server),
        _process_kib("self"),
        _fields(f"/proc/{server}/status")["VmPin"],
        _kernel_kib(),
    )


async def _open(host: str, port: int, count: int) -> list[aiordma.Connection]:
    opened: list[aiordma.Connection] = []
    limiter = anyio.CapacityLimiter(AT_A_TIME)

    async def open_one() -> None:
        async with limiter:
            connection = await aiordma.connect(host, port)
            opened.append(connection)
            await _echo(connection, 1)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(open_one)
    return opened


async def _echo(connection: aiordma.Connection, count: int) -> None:
    for _ in range(count):
        await connection.send(b"x")
        await connection.receive()


async def _measure(host: str, port: int, server: int, count: int) -> None:
    # The first connections are those that open what is opened once.
    for connection in await _open(host, port, WARM_UP):
        await connection.aclose()
    before = await _held(server)
    for number in (1, 2):
        began = time.monotonic()
        connections = await _open(host, port, count)
        seconds = time.monotonic() - began
        _print(f"open {number}", (await _held(server)).since(before, count), seconds)
        for connection in connections:
            await _echo(connection, MESSAGES)
        _print(f"used {number}", (await _held(server)).since(before, count))
        for connection in connections:
            await connection.aclose()
        connections.clear()
        _print(f"closed {number}", (await _held(server)).since(before, count))


def _print(what: str, found: dict[str, float], seconds: float = 0) -> None:
    took = {"seconds": round(seconds, 1)} if seconds else {}
    print(what, json.dumps(found | took), flush=True)


def main(host: str, connections: str = str(CONNECTIONS)) -> None:
    """Measure, and print KiB for each connection."""
    count = connections_possible(int(connections))
    with serving(host, "auto", 0.0) as ports:
        anyio.run(partial(_measure, host, ports.rdma, ports.pid, count))


if __name__ == "__main__":
    main(*sys.argv[1:])
