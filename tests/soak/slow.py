"""Slow readers beside fast ones: the slow ones hold nobody up, and lose nothing."""

import statistics
import time
from dataclasses import dataclass, field

import anyio

import aiordma

from .figures import AT_LEAST, AT_MOST, Figure, count, scaled
from .many import opened
from .numbered import Tally, message
from .process import held, resident_kib, settled
from .server import HOST

PAUSE = 0.2
"""Seconds that a slow reader sleeps after each message, until the fast readers have finished."""

WARM = 0.3
"""The part of the fast readers' messages after which the memory should not grow any more: the slow
readers' writers have stopped by then, and each fast connection has used all of its receives."""

GROWTH_KIB = 4096

MOST_KIB = 512
"""Memory of a connection whose reader is slow, both sides: their 16 receives of 16 KiB each, the
messages that wait in the sockets, and the rest."""


class _Reader:
    def __init__(self, number: int, connection: aiordma.Connection, total: int) -> None:
        self.received = 0
        self._number = number
        self._connection = connection
        self._total = total

    async def read(self, tally: Tally, pause: float, stop: anyio.Event) -> None:
        await self._connection.send(b"%d" % self._number)
        while self.received < self._total:
            tally.add(self._number, self.received, await self._connection.receive())
            self.received += 1
            if pause and not stop.is_set():
                with anyio.move_on_after(pause):
                    await stop.wait()


@dataclass
class _Writers:
    """The server: it writes to each peer that gives its number."""

    total: int
    sent: int = 0

    async def write(self, connection: aiordma.Connection) -> None:
        whose = int(await connection.receive())
        for number in range(self.total):
            await connection.send(message(whose, number))
            self.sent += 1
        await connection.ended()


@dataclass
class _Readers:
    slow: list[_Reader]
    fast: list[_Reader]
    tally: Tally = field(default_factory=Tally)
    halfway: list[int] = field(default_factory=list)
    """Messages of each fast reader when half of those of all fast readers have come."""
    warm_kib: int = 0
    """The memory when WARM of the messages of all fast readers have come."""
    of_the_slow: int = 0
    """Messages of the slow readers when the fast ones have theirs."""
    seconds: float = 0.0
    kib: int = 0

    async def read(self, total: int) -> None:
        fast_are_done = anyio.Event()
        async with anyio.create_task_group() as slow_tasks:
            for each in self.slow:
                slow_tasks.start_soon(each.read, self.tally, PAUSE, fast_are_done)
            # The slow ones have stopped their writers when the fast ones begin.
            await anyio.sleep(2 * PAUSE)
            began = time.perf_counter()
            async with anyio.create_task_group() as fast_tasks:
                fast_tasks.start_soon(self._watch, total * len(self.fast))
                for each in self.fast:
                    fast_tasks.start_soon(each.read, self.tally, 0, fast_are_done)
            self.seconds = time.perf_counter() - began
            self.of_the_slow = sum(each.received for each in self.slow)
            self.kib = resident_kib()
            fast_are_done.set()

    async def _watch(self, all_messages: int) -> None:
        await self._until(round(all_messages * WARM))
        self.warm_kib = resident_kib()
        await self._until(all_messages // 2)
        self.halfway = sorted(each.received for each in self.fast)

    async def _until(self, received: int) -> None:
        while sum(each.received for each in self.fast) < received:
            await anyio.sleep(0.005)


async def slow_readers() -> list[Figure]:
    """200 readers that receive five messages a second beside 200 that receive all they can."""
    each_kind, total = scaled(200, 4), scaled(1_000, 100)
    writers = _Writers(total)
    async with (
        aiordma.listen(HOST, 0) as listener,
        anyio.create_task_group() as servers,
    ):
        servers.start_soon(listener.serve, writers.write)
        await _use(listener.port, 1, total)
        before, before_kib = held(), resident_kib()
        writers.sent = 0
        readers = await _use(listener.port, each_kind, total)
        tally, of_the_slow, halfway = readers.tally, readers.of_the_slow, readers.halfway
        fast_rate, kib = each_kind * total / readers.seconds, readers.kib - before_kib
        growth = readers.kib - readers.warm_kib
        del readers
        left = await settled(before)
        servers.cancel_scope.cancel()
    for example in tally.examples:
        print(example)
    return [
        Figure("readers of each kind", each_kind),
        Figure("messages of a reader", total),
        Figure("messages per second of the fast readers", fast_rate),
        count("messages that were not sent", 2 * each_kind * total - writers.sent),
        count("messages that did not come", writers.sent - tally.received),
        count("wrong messages", tally.wrong),
        Figure(
            "slowest fast reader / median, halfway",
            halfway[0] / statistics.median(halfway),
            (AT_LEAST, 0.5),
        ),
        Figure(
            "messages of the slow when the fast had theirs, share",
            of_the_slow / (each_kind * total),
            (AT_MOST, 0.5),
        ),
        Figure(
            "KiB per connection, both sides, with the slow waiting",
            kib / 2 / each_kind,
            (AT_MOST, MOST_KIB),
        ),
        Figure(f"growth after {WARM:.0%}, KiB", growth, (AT_MOST, GROWTH_KIB)),
        count("objects left", sum(left.values())),
    ]


async def _use(port: int, each_kind: int, total: int) -> _Readers:
    async with opened(port, 2 * each_kind) as connections:
        made = [_Reader(number, each, total) for number, each in enumerate(connections)]
        readers = _Readers(made[:each_kind], made[each_kind:])
        await readers.read(total)
    return readers
