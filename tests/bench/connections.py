"""Rows of many connections: what they cost, and how fast they are. A thousand in the virtual
machine, and on this machine's software device, where there are ten thousand, too.
"""

import errno
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import anyio

from aiordma import Connection, ConnectionOptions, connect
from aiordma.bench.loops import run
from aiordma.bench.processes import Ports
from aiordma.bench.workload import Workload
from aiordma.types import MemorySlice
from tests.ports import free_port

from . import default_server
from .candidates import Candidates
from .compiling import compiled
from .perftest import against_itself
from .processor import ended_processor_seconds, processor_seconds
from .rows import MORE, Reading, Row, constant, in_turn, together
from .same_work import rounds_of
from .shared_server import SIZE, serving

COUNT = 1000
MANY = 10_000
WINDOW = 16
AT_A_TIME = 8
RECEIVES = 16
"""Of a connection with default options: after so many messages each of its blocks has been used."""
TCP_CONNECTION_SECONDS = 0.01
OTHER_DESCRIPTORS = 400
"""That a process has, besides one for each connection: its files and libraries, and those that the
software device reserves for the program (docs/software-device.md)."""

Place = tuple[Connection, MemorySlice, MemorySlice]


def _echoes_row(
    name: str,
    many: Callable[[], Reading],
    one: Callable[[], Reading],
    note: str,
    limit: float | None = None,
) -> Row:
    """Return a row of the echoes over all connections, beside those on one."""
    return Row(name, "echoes per second", many, "one connection", one, limit, MORE, note)


def rows(here: Candidates) -> list[Row]:
    """Return them all; they are measured together, when the first is asked for."""
    server = cache(lambda: here.keep(serving(here.host, here.device, here.spin)))
    shared = _Many(here, COUNT, server)
    own = _Many(here, COUNT, lambda: here.ports("auto", True))
    in_c = in_turn(partial(_in_c, here, True))
    name = f"rxe/connections/{COUNT}"
    return [
        _echoes_row(
            name,
            partial(shared.next, "many"),
            partial(shared.next, "one"),
            f"{WINDOW} in flight: over all connections in turn, and on one; one task serves",
            limit=0.8,
        ),
        _echoes_row(
            f"{name}/own_tasks",
            partial(own.next, "many"),
            partial(own.next, "one"),
            "the server has receives and a task for each connection",
            limit=0.8,
        ),
        _echoes_row(
            f"{name}/in_c",
            partial(in_c, COUNT),
            partial(in_c, 1),
            "C on both sides, polling for ever: what the device and the guest make of it",
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


def software_rows(here: Candidates) -> list[Row]:
    """Return the rows of the software device, on this machine."""
    thousand = _Many(here, COUNT, lambda: here.ports("auto", True))
    start = cache(lambda: here.keep(default_server.serving(here.host, here.device, here.spin)))
    many = _Many(here, MANY, start, echoes_before=RECEIVES * MANY)
    in_c = in_turn(partial(_in_c, here, False))
    name = f"software/connections/{COUNT}"
    return [
        _echoes_row(
            f"{name}/own_tasks",
            partial(thousand.next, "many"),
            partial(thousand.next, "one"),
            "the server has receives and a task for each connection",
            limit=0.8,
        ),
        _echoes_row(
            f"{name}/in_c",
            partial(in_c, COUNT),
            partial(in_c, 1),
            "C on both sides, sleeping on the completion channel",
        ),
        _over_tcp(here, COUNT),
        *_rows_of_default_server(many),
        _over_tcp(here, MANY),
    ]


def _over_tcp(here: Candidates, connections: int) -> Row:
    tcp = in_turn(partial(_tcp_in_c, here))
    return _echoes_row(
        f"software/connections/{connections}/tcp",
        partial(tcp, connections),
        partial(tcp, 1),
        "plain C over TCP, without RDMA: what the kernel makes of so many connections",
    )


def _rows_of_default_server(many: "_Many") -> list[Row]:
    name = f"software/connections/{MANY}"
    return [
        _echoes_row(
            name,
            partial(many.next, "many"),
            partial(many.next, "one"),
            "the server has default options, and a task for each connection",
            limit=0.6,
        ),
        Row(
            f"{name}/memory",
            "KiB",
            partial(many.next, "server_memory"),
            "64 KiB",
            constant(64.0),
            limit=1.0,
            note="of the server's process (Pss) per idle connection",
        ),
        Row(
            f"{name}/fds",
            "descriptors",
            partial(many.next, "extra_fds"),
            "6",
            constant(6.0),
            limit=1.0,
            note="of either process, besides one for each connection: the larger number",
        ),
    ]


def _in_c(here: Candidates, polling: bool, connections: int) -> list[Reading]:
    """The same in C."""
    return rounds_of(
        here.host,
        here.device,
        Workload("echo", SIZE, WINDOW),
        here.seconds,
        polling=polling,
        connections=connections,
        rounds=here.rounds,
    )


def _tcp_in_c(here: Candidates, connections: int) -> list[Reading]:
    """The same in C over plain TCP."""
    place = [here.host, str(free_port())]
    numbers = (SIZE, WINDOW, connections, round(here.seconds * 1000), here.rounds)
    before = ended_processor_seconds()
    with _descriptors_for(connections):
        printed = against_itself(
            [str(compiled("tcp_echoes.c", "-std=gnu11"))],
            ["ask", *place, *map(str, numbers)],
            ["serve", *place],
            more_seconds=here.rounds * here.seconds + connections * TCP_CONNECTION_SECONDS,
        )
    pairs = [[*map(int, line.split())] for line in printed.splitlines()]
    cpu_us = (ended_processor_seconds() - before) / sum(count for count, _ in pairs) * 1e6
    return [
        Reading(count / nanoseconds * 1e9, extra={"count": count}, cpu_us=cpu_us)
        for count, nanoseconds in pairs
    ]


class _Many:
    """Made once for all rounds of all rows. echoes_before: over all connections, before they are
    measured."""

    def __init__(
        self,
        here: Candidates,
        count: int,
        start: Callable[[], Ports],
        *,
        echoes_before: int | None = None,
    ) -> None:
        self._here = here
        self._count = count
        self._start = start
        self._echoes_before = count if echoes_before is None else echoes_before
        self.next = together(self._measured)

    def _measured(self) -> dict[str, list[Reading]]:
        with _descriptors_for(self._count):
            return run(self._measure, spin=self._here.spin)

    async def _measure(self) -> dict[str, list[Reading]]:
        here, count = self._here, self._count
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
                    options=ConnectionOptions(
                        max_recv_wr=depth, max_send_wr=depth + 1, max_send_sge=1, max_recv_sge=1
                    ),
                )
                return await stack.enter_async_context(connection)

            fds = descriptors(os.getpid())
            server_fds = descriptors(ports.pid)
            one = await add(WINDOW)
            places = _places(one, [one] * WINDOW)
            await _echoes(places, 0.2, ports.pid)
            many: list[Connection] = []
            limiter = anyio.CapacityLimiter(AT_A_TIME)

            async def add_one() -> None:
                async with limiter:
                    many.append(await add(1))

            await add_one()
            free, before_kib = _available_kib(), process_kib(ports.pid)
            began = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(count - 1):
                    group.start_soon(add_one)
            seconds = time.perf_counter() - began
            kib = (free - _available_kib()) / (count - 1) / 2
            server_kib = (process_kib(ports.pid) - before_kib) / (count - 1)
            spread = _places(one, many)
            opened = max(descriptors(os.getpid()) - fds, descriptors(ports.pid) - server_fds)
            extra: dict[str, Any] = {"connections_per_second": count / seconds}
            found: dict[str, list[Reading]] = {
                each: [] for each in ("one", "many", "fds", "extra_fds", "memory", "server_memory")
            }
            before = await _echoes(spread, 0.2, ports.pid, self._echoes_before)
            extra["before"] = before.value
            used_kib = (process_kib(ports.pid) - before_kib) / (count - 1)
            for _ in range(here.rounds):
                found["one"].append(await _echoes(places, here.seconds, ports.pid))
                many_echo = await _echoes(spread, here.seconds, ports.pid)
                found["many"].append(replace(many_echo, extra=extra))
                found["fds"].append(Reading(float(opened)))
                found["extra_fds"].append(Reading(float(opened - count - 1)))
                found["memory"].append(Reading(kib))
                found["server_memory"].append(Reading(server_kib, extra={"used": used_kib}))
            return found


@contextmanager
def _descriptors_for(connections: int) -> Iterator[None]:
    """Raise the soft limit of descriptors to the hard one during the block. Processes that are
    started in the block inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"{connections} connections need {needed} descriptors in each process, and the hard "
            f"limit (ulimit -Hn, RLIMIT_NOFILE) is {hard}: raise it, and measure again",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _places(owner: Connection, connections: Sequence[Connection]) -> list[Place]:
    """Memory for one echo each, of one region: connections of a loop share their domain."""
    memory = owner.register(bytearray(2 * SIZE * len(connections)))
    return [
        (each, memory[at : at + SIZE], memory[at + SIZE : at + 2 * SIZE])
        for each, at in zip(connections, range(0, len(memory), 2 * SIZE), strict=True)
    ]


async def _echoes(places: Sequence[Place], seconds: float, pid: int, least: int = 0) -> Reading:
    """Return the echoes per second, over the connections in turn. least: so many at least."""
    flight: deque[tuple[Any, Any]] = deque()
    count = 0
    began, before = time.perf_counter(), processor_seconds(pid)
    for connection, ours, place in cycle(places):
        flight.append((connection.post_recv(place), connection.post_send(ours)))
        if len(flight) < WINDOW:
            continue
        answer, sent = flight.popleft()
        await answer
        await sent
        count += 1
        if not count % WINDOW and count >= least and time.perf_counter() - began > seconds:
            break
    for answer, sent in flight:
        await answer
        await sent
    count += len(flight)
    took, used = time.perf_counter() - began, processor_seconds(pid) - before
    return Reading(count / took, cpu_us=used / count * 1e6)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def process_kib(pid: int) -> int:
    """Return the memory of a process, its share of what it shares with others included."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise ValueError("/proc/PID/smaps_rollup does not tell the memory of a process")


def _available_kib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise ValueError("/proc/meminfo does not tell what is available")
