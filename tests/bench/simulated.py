"""Rows of the simulation: messages per second of one core, with many endpoints beside few."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from aiordma import Connection, connect, listen
from aiordma.testing import Host, Simulation, simulate
from tests.soak.process import resident_kib

from .candidates import Candidates
from .rows import MORE, Reading, Row

HOSTS = 50
MANY, FEW = 10_000, 100
ROUNDS = 20_000
PORT = 7471


def rows(here: Candidates) -> list[Row]:
    """Return the row: each connection has two endpoints."""
    return [
        Row(
            f"simulation/endpoints/{MANY}",
            "messages/s",
            partial(_measure, MANY),
            f"the same with {FEW} endpoints",
            partial(_measure, FEW),
            better=MORE,
        )
    ]


def _measure(endpoints: int) -> Reading:
    before = resident_kib()
    found: dict[str, float] = {}
    simulate(partial(_scenario, connections=endpoints // 2, found=found), seed=1)
    kib = (found["kib"] - before) / endpoints
    return Reading(
        found["rate"], extra={"kib_per_endpoint": kib, "events_per_second": found["events"]}
    )


async def _scenario(simulation: Simulation, connections: int, found: dict[str, float]) -> None:
    simulation.link(latency=1e-4, jitter=1e-5)
    hosts = [simulation.host() for _ in range(HOSTS)]
    ready: asyncio.Queue[None] = asyncio.Queue()
    go, stop = asyncio.Event(), asyncio.Event()
    for host in hosts:
        host.run(_serve, host)
    await asyncio.sleep(0.1)
    each = connections // HOSTS
    done = [
        host.run(
            _ask,
            hosts[(index + 1) % HOSTS],
            each,
            ROUNDS // connections or 1,
            ready.put_nowait,
            go,
            stop,
        )
        for index, host in enumerate(hosts)
    ]
    while ready.qsize() < HOSTS:
        await asyncio.sleep(0.01)
    found["kib"] = resident_kib()
    events = len(simulation.trace)
    began = time.process_time()
    go.set()
    while ready.qsize() < 2 * HOSTS:
        await asyncio.sleep(0.01)
    took = time.process_time() - began
    found["rate"] = 2 * connections * (ROUNDS // connections or 1) / took
    found["events"] = (len(simulation.trace) - events) / took
    stop.set()
    await asyncio.gather(*done)


async def _serve(host: Host) -> None:
    async def echo(connection: Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with listen(host.address, PORT, device="software", backlog=1024) as listener:
        await listener.serve(echo)


async def _ask(
    target: Host,
    count: int,
    rounds: int,
    ready: Callable[[None], None],
    go: asyncio.Event,
    stop: asyncio.Event,
) -> None:
    connections = [await connect(target.address, PORT, device="software") for _ in range(count)]
    ready(None)
    while not go.is_set():
        await asyncio.sleep(0.01)

    async def one(connection: Connection) -> None:
        for _ in range(rounds):
            await connection.send(b"x" * 64)
            await connection.receive()

    await asyncio.gather(*map(one, connections))
    ready(None)
    while not stop.is_set():  # closes are not measured
        await asyncio.sleep(0.01)
    for connection in connections:
        await connection.aclose()
