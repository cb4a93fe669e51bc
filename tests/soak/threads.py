"""Several event loops in threads of one process, which are each other's clients."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import anyio.to_thread

import aiordma
from tests.conftest import BACKENDS

from .figures import Figure, count, scaled
from .numbered import HEADER, Tally, message
from .process import held, settled
from .server import HOST

LOOPS = 8
KINDS = ("asyncio", "uvloop", "trio", "polling")
CLIENTS = 8
"""Connections of each loop to the next one."""


class _Ring:
    """Ports of the loops, and the moments at which all of them have come so far."""

    def __init__(self) -> None:
        self.ports = [0] * LOOPS
        self.listening = threading.Barrier(LOOPS)
        self.done = threading.Barrier(LOOPS)


async def _wait(barrier: threading.Barrier) -> None:
    await anyio.to_thread.run_sync(barrier.wait, 300)


async def _turn(ring: _Ring, place: int, each: int) -> tuple[Tally, Tally]:
    """Serve the loop before this one, and send messages to the one after it."""
    served, echoed = Tally(), Tally()

    async def serve(connection: aiordma.Connection) -> None:
        number = 0
        async for data in connection:
            served.add(HEADER.unpack_from(data)[0], number, data)
            number += 1
            await connection.send(data)

    async def ask(whose: int) -> None:
        async with aiordma.connect(HOST, ring.ports[(place + 1) % LOOPS]) as connection:
            for number in range(each):
                await connection.send(message(whose, number))
                echoed.add(whose, number, await connection.receive())

    async with aiordma.listen(HOST, 0) as listener, anyio.create_task_group() as group:
        ring.ports[place] = listener.port
        await _wait(ring.listening)
        group.start_soon(listener.serve, serve)
        async with anyio.create_task_group() as clients:
            for client in range(CLIENTS):
                clients.start_soon(ask, place * CLIENTS + client)
        await _wait(ring.done)
        group.cancel_scope.cancel()
    return served, echoed


def _run(ring: _Ring, each: int, place: int) -> tuple[Tally, Tally]:
    backend, options = BACKENDS[KINDS[place % len(KINDS)]]
    return anyio.run(partial(_turn, ring, place, each), backend=backend, backend_options=options)


async def _all(each: int) -> list[tuple[Tally, Tally]]:
    ring = _Ring()
    with ThreadPoolExecutor(LOOPS) as pool:
        futures = [pool.submit(_run, ring, each, place) for place in range(LOOPS)]
        return await anyio.to_thread.run_sync(lambda: [future.result() for future in futures])


async def eight_loops() -> list[Figure]:
    """Eight event loops in eight threads, of four kinds, each the client of the next one."""
    each = scaled(200_000 // LOOPS // CLIENTS, 10)
    await _all(1)  # what the device and the loops open once stays
    before = held()
    began = time.perf_counter()
    found = await _all(each)
    seconds = time.perf_counter() - began
    total = LOOPS * CLIENTS * each
    left = await settled(before)
    for served, echoed in found:
        for example in [*served.examples, *echoed.examples]:
            print(example)
    return [
        Figure("loops", LOOPS),
        Figure("messages, each echoed", sum(served.received for served, _ in found)),
        Figure("echoes per second", total / seconds),
        count("messages that did not come", total - sum(served.received for served, _ in found)),
        count("echoes that did not come", total - sum(echoed.received for _, echoed in found)),
        count("wrong", sum(served.wrong + echoed.wrong for served, echoed in found)),
        count("objects left", sum(left.values())),
    ]
