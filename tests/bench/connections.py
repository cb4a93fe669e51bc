"""Rows of the virtual machine: a thousand connections, what they cost and how fast they are."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import anyio

from aiordma import Connection, MemorySlice, connect
from aiordma.bench.loops import run
from aiordma.bench.processes import Ports
from aiordma.bench.workload import Workload

from .candidates import Candidates
from .rows import MORE, Reading, Row, constant
from .same_work import rounds_of
from .shared_server import SIZE, serving

COUNT = 1000
WINDOW = 16
AT_A_TIME = 8

Place = tuple[Connection, MemorySlice, MemorySlice]


def rows(here: Candidates) -> list[Row]:
    """Return them all; they are measured together, when the first is asked for."""
    server = cache(lambda: here.keep(serving(here.host, here.device, here.spin)))
    shared = _Thousand(here, server)
    own = _Thousand(here, lambda: here.ports("auto", True))
    in_c = _InC(here).next
    name = f"rxe/connections/{COUNT}"
    return [
        Row(
            name,
            "echoes per second",
            partial(shared.next, "many"),
            "one connection",
            partial(shared.next, "one"),
            limit=0.8,
            better=MORE,
            note=f"{WINDOW} in flight: over all connections in turn, and on one; one task serves",
        ),
        Row(
            f"{name}/own_tasks",
            "echoes per second",
            partial(own.next, "many"),
            "one connection",
            partial(own.next, "one"),
            better=MORE,
            note="the server has receives and a task for each connection",
        ),
        Row(
            f"{name}/in_c",
            "echoes per second",
            partial(in_c, COUNT),
            "one connection",
            partial(in_c, 1),
            better=MORE,
            note="C on both sides, polling for ever: what the device and the guest make of it",
        ),
        Row(
            f"{name}/fds",
            "descriptors",
            partial(shared.next, "fds"),
            "4",
            constant(4.0),
            limit=1.0,
            note="of either process for all of its connections: the larger number",
        ),
        Row(
            f"{name}/memory",
            "KiB",
            partial(shared.next, "memory"),
            "none",
            partial(Reading, None),
            note="per idle connection and side, kernel and process together (MemAvailable)",
        ),
    ]


class _InC:
    """The same in C: made once for all rounds."""

    def __init__(self, here: Candidates) -> None:
        self._here = here
        self._found: dict[int, list[Reading]] = {}

    def next(self, connections: int) -> Reading:
        here = self._here
        if connections not in self._found:
            self._found[connections] = rounds_of(
                here.host,
                here.device,
                Workload("echo", SIZE, WINDOW),
                here.seconds,
                connections=connections,
                rounds=here.rounds,
            )
        return self._found[connections].pop(0)


class _Thousand:
    """Made once for all rounds of all rows."""

    def __init__(self, here: Candidates, start: Callable[[], Ports]) -> None:
        self._here = here
        self._start = start
        self._found: dict[str, list[Reading]] = {}

    def next(self, what: str) -> Reading:
        if not self._found:
            run(self._measure, spin=self._here.spin)
        return self._found[what].pop(0)

    async def _measure(self) -> None:
        here = self._here
        ports = self._start()
        async with AsyncExitStack() as stack:

            async def add(depth: int) -> Connection:
                work = Workload("echo", SIZE, depth)
                connection = await connect(
                    here.host,
                    ports.rdma,
                    device=here.device,
                    private_data=work.pack(),
                    receive_buffers=0,
                    max_recv_wr=depth,
                    max_send_wr=depth + 1,
                    max_send_sge=1,
                    max_recv_sge=1,
                )
                return await stack.enter_async_context(connection)

            fds = _descriptors(os.getpid())
            server_fds = _descriptors(ports.pid)
            one = await add(WINDOW)
            places = _places(one, [one] * WINDOW)
            await _echoes(places, 0.2)
            many: list[Connection] = []
            limiter = anyio.CapacityLimiter(AT_A_TIME)

            async def add_one() -> None:
                async with limiter:
                    many.append(await add(1))

            await add_one()
            free = _available_kib()
            began = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(COUNT - 1):
                    group.start_soon(add_one)
            seconds = time.perf_counter() - began
            kib = (free - _available_kib()) / (COUNT - 1) / 2
            spread = _places(one, many)
            opened = max(_descriptors(os.getpid()) - fds, _descriptors(ports.pid) - server_fds)
            extra: dict[str, Any] = {"connections_per_second": COUNT / seconds}
            found: dict[str, list[Reading]] = {"one": [], "many": [], "fds": [], "memory": []}
            await _echoes(spread, 0.2)
            for _ in range(here.rounds):
                found["one"].append(Reading(await _echoes(places, here.seconds)))
                found["many"].append(Reading(await _echoes(spread, here.seconds), extra=extra))
                found["fds"].append(Reading(float(opened)))
                found["memory"].append(Reading(kib))
            self._found = found


def _places(owner: Connection, connections: Sequence[Connection]) -> list[Place]:
    """Memory for one echo each, of one region: connections of a loop share their domain."""
    memory = owner.register(bytearray(2 * SIZE * len(connections)))
    return [
        (each, memory[at : at + SIZE], memory[at + SIZE : at + 2 * SIZE])
        for each, at in zip(connections, range(0, len(memory), 2 * SIZE), strict=True)
    ]


async def _echoes(places: Sequence[Place], seconds: float) -> float:
    """Return the echoes per second, over the connections in turn."""
    flight: deque[tuple[Any, Any]] = deque()
    count = 0
    began = time.perf_counter()
    for connection, ours, place in cycle(places):
        flight.append((connection.post_recv(place), connection.post_send(ours)))
        if len(flight) < WINDOW:
            continue
        answer, sent = flight.popleft()
        await answer
        await sent
        count += 1
        if not count % WINDOW and time.perf_counter() - began > seconds:
            break
    for answer, sent in flight:
        await answer
        await sent
    return (count + len(flight)) / (time.perf_counter() - began)


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _available_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise ValueError("/proc/meminfo does not tell what is available")
