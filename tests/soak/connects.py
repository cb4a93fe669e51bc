"""Connections that come and go: what is left of them."""

import time

import anyio

import aiordma

from .figures import AT_MOST, Figure, count, scaled
from .numbered import Tally, message
from .process import all_closed, held, resident_kib, settled
from .server import HOST

AT_A_TIME = 8
WARM = 0.3
GROWTH_KIB = 2048


async def connects() -> list[Figure]:
    """5,000 connects, each with a message and its echo, and closes; both sides in one process."""
    total = scaled(5_000, 40)
    tally = Tally()
    echoed = Tally()

    async def echo(connection: aiordma.Connection) -> None:
        async for data in connection:
            tally.add(int.from_bytes(data[:4], "little"), 0, data)
            await connection.send(data)

    async def some(first: int, last: int) -> None:
        numbers = iter(range(first, last))

        async def one_after_the_other() -> None:
            for number in numbers:
                async with aiordma.connect(HOST, listener.port) as connection:
                    await connection.send(message(number, 0))
                    echoed.add(number, 0, await connection.receive())

        async with anyio.create_task_group() as clients:
            for _ in range(AT_A_TIME):
                clients.start_soon(one_after_the_other)

    async with (
        aiordma.listen(HOST, 0) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, echo)
        warm = round(total * WARM)
        began = time.perf_counter()
        await some(0, warm)
        # What the warm process holds is what it may hold at the end.
        await all_closed()
        before, before_kib = held(), resident_kib()
        await some(warm, total)
        seconds = time.perf_counter() - began
        left = await settled(before)
        after_kib = resident_kib()
        group.cancel_scope.cancel()
    for example in [*tally.examples, *echoed.examples]:
        print(example)
    return [
        Figure("connects, with a message each", echoed.received),
        Figure("connects and closes per second", total / seconds),
        count("messages that did not come", 2 * total - tally.received - echoed.received),
        count("wrong messages", tally.wrong + echoed.wrong),
        count("objects left", sum(left.values())),
        Figure(f"growth after {WARM:.0%}, KiB", after_kib - before_kib, (AT_MOST, GROWTH_KIB)),
    ]
