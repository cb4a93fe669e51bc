"""Grants that end while their peer writes: not one byte arrives afterwards."""

import random
import time

import aiordma
from tests.device.late_writes import SIZES, end_under_writes

from .figures import AT_LEAST, AT_MOST, Figure, count, scaled
from .process import all_closed, held, resident_kib, settled
from .server import HOST

KINDS = ("plain", "bindable")
WARM = 0.3
GROWTH_KIB = 4096


async def grants() -> list[Figure]:
    """10,000 grants that end while the peer writes to them in a loop, among canary bytes."""
    total = scaled(10_000, 20)
    warm = round(total * WARM)
    before: dict[str, int] = {}
    before_kib = 0
    chance = random.Random(total)
    ends = successes = wrong = 0
    async with aiordma.listen(
        HOST,
        0,
        receive_buffers=1,
        receive_size=64,
        options=aiordma.ConnectionOptions(max_send_wr=8),
    ) as listener:
        began = time.perf_counter()
        for number in range(total):
            if number == warm:
                await all_closed()
                before, before_kib = held(), resident_kib()
            written, bad = await end_under_writes(
                listener, KINDS[number % len(KINDS)], chance.choice(SIZES), chance
            )
            ends, successes, wrong = ends + 1, successes + written, wrong + bad
        seconds = time.perf_counter() - began
        left = await settled(before)
        growth = resident_kib() - before_kib
    return [
        count("grants that ended under WRITEs", ends, total),
        Figure("grants per second", total / seconds),
        Figure("WRITEs that succeeded, per grant", successes / total, (AT_LEAST, 0.5)),
        count("bytes that arrived late, or beside the granted ones", wrong),
        count("objects left", sum(left.values())),
        Figure(f"growth after {WARM:.0%}, KiB", growth, (AT_MOST, GROWTH_KIB)),
    ]
