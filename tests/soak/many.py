"""Parts with many connections to one server: their messages, their memory and their shares."""

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

import aiordma

from .figures import AT_LEAST, AT_MOST, Figure, count, scaled
from .numbered import Tally, message
from .process import connections_possible, held, resident_kib, settled
from .server import HELD, HOST, REPORT, Control, controlled

AT_A_TIME = 16
WARM_UP = 60
IN_FLIGHT = 2
IDLE_KIB = 64
GIVEN_BACK_KIB = 4
"""What may stay: tables that have grown, for the next connections."""
IDLE_GROWTH_KIB = 1024
GROWTH = 1.02
GROWTH_KIB = 4096


@dataclass
class _Memory:
    """Of the client and of the server, in KiB."""

    client: int
    server: int


async def messages() -> list[Figure]:
    """A million messages over 1,000 connections, each of which is echoed."""
    return await _many(connections_possible(scaled(1_000, 4)), scaled(1_000_000, 2_000), 0.3)


async def ten_thousand() -> list[Figure]:
    """1,500,000 messages over 10,000 connections, or as many as the limit of descriptors allows."""
    # Until each connection has had about 90, some pages of its receives are not used yet.
    return await _many(connections_possible(scaled(10_000, 4)), scaled(1_500_000, 2_000), 0.6)


async def idle() -> list[Figure]:
    """The memory of 1,000 idle connections, which are opened and closed three times."""
    connections = connections_possible(scaled(1_000, 20))
    in_use: list[float] = []
    left = 0
    async with controlled(is_counting=True) as (port, control):
        await _warm_up(port)
        before = (await control.ask(HELD))["in_use"]
        for _ in range(3):
            async with opened(port, connections):
                in_use.append((await control.ask(REPORT))["in_use"])
            after = await control.ask(HELD)
            in_use.append(after["in_use"])
            left += sum(after["left"].values())
    first, first_after, _, second_after, third, third_after = in_use
    return [
        Figure("connections", connections),
        Figure("KiB in use per connection", (first - before) / connections, (AT_MOST, IDLE_KIB)),
        Figure("the same, the third time", (third - before) / connections, (AT_MOST, IDLE_KIB)),
        Figure(
            "KiB in use per connection after the first close",
            (first_after - before) / connections,
            (AT_MOST, GIVEN_BACK_KIB),
        ),
        Figure(
            "growth from the second close to the third, KiB",
            third_after - second_after,
            (AT_MOST, IDLE_GROWTH_KIB),
        ),
        count("objects left at the server", left),
    ]


async def _many(connections: int, total: int, warm: float) -> list[Figure]:
    async with controlled() as (port, control):
        idle = await control.ask(REPORT)
        await _warm_up(port)
        await control.ask(HELD)
        before = held()
        figures = await _use(port, control, idle["kib"], connections, total, warm)
        left = await settled(before)
        after = await control.ask(HELD)
    return [
        Figure("connections", connections),
        *figures,
        count("objects left at the server", sum(after["left"].values())),
        count("objects left at the client", sum(left.values())),
        Figure(
            "server after close, KiB per connection",
            (after["kib"] - idle["kib"]) / connections,
        ),
    ]


async def _use(
    port: int, control: Control, idle_kib: int, connections: int, total: int, warm: float
) -> list[Figure]:
    async with opened(port, connections) as connected:
        open_kib = (await control.ask(REPORT))["kib"]
        clients = [_Client(number, each) for number, each in enumerate(connected)]
        work = _Work(total, warm, control)
        began = time.perf_counter()
        await work.over(clients)
        seconds = time.perf_counter() - began
        report = await control.ask(REPORT)
    for example in [*work.tally.examples, *report["examples"]]:
        print(example)
    counts = sorted(work.at_the_end)
    return [
        Figure("messages, each echoed", work.tally.received),
        Figure("echoes per second", work.tally.received / seconds),
        count("messages that did not come", total + WARM_UP - report["received"]),
        count("echoes that did not come", total - work.tally.received),
        count("wrong at the server", report["wrong"]),
        count("wrong echoes", work.tally.wrong),
        Figure(
            "slowest connection / median",
            counts[0] / statistics.median(counts),
            (AT_LEAST, 0.5),
        ),
        Figure(
            "idle server, KiB per connection",
            (open_kib - idle_kib) / connections,
            (AT_MOST, IDLE_KIB),
        ),
        Figure("used server, KiB per connection", (report["kib"] - idle_kib) / connections),
        *work.growth(),
    ]


async def _warm_up(port: int) -> None:
    """Let both processes open what they open once."""
    async with opened(port, WARM_UP) as connections:
        for connection in connections:
            await connection.send(message(0, 0))
            await connection.receive()


@asynccontextmanager
async def opened(port: int, connections: int) -> AsyncIterator[list[aiordma.Connection]]:
    opened: list[aiordma.Connection] = []
    limiter = anyio.CapacityLimiter(AT_A_TIME)

    async def open_one() -> None:
        async with limiter:
            opened.append(await aiordma.connect(HOST, port))

    async def close_one(connection: aiordma.Connection) -> None:
        async with limiter:
            await connection.aclose()

    try:
        async with anyio.create_task_group() as group:
            for _ in range(connections):
                group.start_soon(open_one)
        yield opened
    finally:
        async with anyio.create_task_group() as group:
            for connection in opened:
                group.start_soon(close_one, connection)


class _Client:
    """One connection, which keeps some messages in flight."""

    def __init__(self, number: int, connection: aiordma.Connection) -> None:
        self.number = number
        self.connection = connection
        self.sent = self.received = 0

    async def send(self) -> None:
        await self.connection.send(message(self.number, self.sent))
        self.sent += 1

    async def receive(self, tally: Tally) -> None:
        data = await self.connection.receive()
        tally.add(self.number, self.received, data)
        self.received += 1


class _Work:
    """So many messages over all connections, which take as many of them as each can.

    Args:
        total: the number of messages.
        warm: the part of them after which the memory should not grow any more. Each connection
            has used all of its 16 receives then.
        control: the server's.
    """

    def __init__(self, total: int, warm: float, control: Control) -> None:
        self.tally = Tally()
        self.at_the_end: list[int] = []
        """Echoes of each connection when the last message was sent."""
        self._total = total
        self._sent = 0
        self._control = control
        self._warm_at = total * warm
        self._warm: _Memory | None = None
        self._last: _Memory | None = None

    async def over(self, clients: list[_Client]) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._measure)
            for client in clients:
                group.start_soon(self._drive, client, clients)

    async def _drive(self, client: _Client, clients: list[_Client]) -> None:
        for _ in range(IN_FLIGHT):
            await self._send(client, clients)
        while client.received < client.sent:
            await client.receive(self.tally)
            await self._send(client, clients)

    async def _send(self, client: _Client, clients: list[_Client]) -> None:
        if self._sent == self._total:
            return
        self._sent += 1
        if self._sent == self._total:
            self.at_the_end = [each.received for each in clients]
        await client.send()

    async def _measure(self) -> None:
        while self.tally.received < self._warm_at:
            await anyio.sleep(0.05)
        self._warm = await self._memory()
        while self.tally.received < self._total:
            await anyio.sleep(0.05)
        self._last = await self._memory()

    async def _memory(self) -> _Memory:
        return _Memory(resident_kib(), (await self._control.ask(REPORT))["kib"])

    def growth(self) -> list[Figure]:
        """Return the growth of both processes since they were warm, beyond what is permitted."""
        assert self._warm
        assert self._last
        pairs = (
            ("client", self._warm.client, self._last.client),
            ("server", self._warm.server, self._last.server),
        )
        return [
            Figure(
                f"growth of the {whose} once warm, KiB",
                last - warm,
                (AT_MOST, warm * (GROWTH - 1) + GROWTH_KIB),
            )
            for whose, warm, last in pairs
        ]
