"""Several event loops in threads of one process, which are each other's clients."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import anyio.to_thread

import aiordma
from tests.conftest import BACKENDS

from .figures import AT_MOST, Figure, count, scaled
from .numbered import HEADER, Tally, message
from .process import held, resident_kib, settled
from .server import HOST

LOOPS = 8
KINDS = ("asyncio", "uvloop", "trio", "polling")
CLIENTS = 8
"""Connections of each loop to the next one."""
WARM = 0.3
GROWTH_KIB = 4096


class _Ring:
    """Ports of the loops, their tallies, and the moments at which all of them have come so far."""

    def __init__(self) -> None:
        self.ports = [0] * LOOPS
        self.served = [Tally() for _ in range(LOOPS)]
        self.echoed = [Tally() for _ in range(LOOPS)]
        self.listening = threading.Barrier(LOOPS)
        self.received = threading.Barrier(LOOPS + 1)
        """The last one is `growth`, which measures before the first connection closes."""
        self.done = threading.Barrier(LOOPS)

    def growth(self, total: int) -> int:
        """Return by how many KiB the process grows after WARM of the messages, while all
        connections are open."""
        while sum(each.received for each in self.echoed) < total * WARM:
            time.sleep(0.05)
        warm = resident_kib()
        while self.received.n_waiting < LOOPS:
            time.sleep(0.05)
        growth = resident_kib() - warm
        self.received.wait(300)
        return growth


async def _wait(barrier: threading.Barrier) -> None:
    await anyio.to_thread.run_sync(barrier.wait, 300)


async def _turn(ring: _Ring, place: int, each: int) -> None:
    """Serve the loop before this one, and send messages to the one after it."""
    served, echoed = ring.served[place], ring.echoed[place]

    async def serve(connection: aiordma.Connection) -> None:
        number = 0
        async for data in connection:
            served.add(HEADER.unpack_from(data)[0], number, data)
            number += 1
            await connection.send(data)

    talking = set(range(CLIENTS))
    all_received = anyio.Event()

    async def ask(client: int) -> None:
        whose = place * CLIENTS + client
        async with aiordma.connect(HOST, ring.ports[(place + 1) % LOOPS]) as connection:
            for number in range(each):
                await connection.send(message(whose, number))
                echoed.add(whose, number, await connection.receive())
            talking.remove(client)
            if not talking:
                await _wait(ring.received)
                all_received.set()
            await all_received.wait()

    async with aiordma.listen(HOST, 0) as listener, anyio.create_task_group() as group:
        ring.ports[place] = listener.port
        await _wait(ring.listening)
        group.start_soon(listener.serve, serve)
        async with anyio.create_task_group() as clients:
            for client in range(CLIENTS):
                clients.start_soon(ask, client)
        await _wait(ring.done)
        group.cancel_scope.cancel()


def _run(ring: _Ring, each: int, place: int) -> None:
    backend, options = BACKENDS[KINDS[place % len(KINDS)]]
    anyio.run(partial(_turn, ring, place, each), backend=backend, backend_options=options)


async def _all(each: int) -> tuple[_Ring, int]:
    """Run all loops. Return their tallies, and the growth of memory in KiB."""
    ring = _Ring()
    with ThreadPoolExecutor(LOOPS + 1) as pool:
        growth = pool.submit(ring.growth, LOOPS * CLIENTS * each)
        futures = [pool.submit(_run, ring, each, place) for place in range(LOOPS)]

        def results() -> int:
            for future in futures:
                future.result()
            return growth.result()

        return ring, await anyio.to_thread.run_sync(results)


async def eight_loops() -> list[Figure]:
    """Eight event loops in eight threads, of four kinds, each the client of the next one."""
    each = scaled(200_000 // LOOPS // CLIENTS, 10)
    await _all(1)  # what the device and the loops open once stays
    before = held()
    began = time.perf_counter()
    ring, growth = await _all(each)
    seconds = time.perf_counter() - began
    total = LOOPS * CLIENTS * each
    left = await settled(before)
    for tally in [*ring.served, *ring.echoed]:
        for example in tally.examples:
            print(example)
    served, echoed = (sum(each.received for each in of) for of in (ring.served, ring.echoed))
    wrong = sum(each.wrong for each in [*ring.served, *ring.echoed])
    return [
        Figure("loops", LOOPS),
        Figure("messages, each echoed", served),
        Figure("echoes per second", total / seconds),
        count("messages that did not come", total - served),
        count("echoes that did not come", total - echoed),
        count("wrong", wrong),
        Figure(f"growth after {WARM:.0%}, KiB", growth, (AT_MOST, GROWTH_KIB)),
        count("objects left", sum(left.values())),
    ]
