"""The programs of tests/simulation under many seeds: what is mended survives all of them."""

import time

import anyio.to_thread

from aiordma.testing import simulate
from tests.simulation.planted import PLANTED

from .figures import Figure, count, scaled
from .process import resident_kib


async def simulated() -> list[Figure]:
    """Six mended programs on simulated hosts, with 10,000 seeds each."""
    return await anyio.to_thread.run_sync(_run)  # simulate() has event loops of its own


def _run() -> list[Figure]:
    seeds = scaled(10_000)
    failed, began, before = 0, time.perf_counter(), resident_kib()
    for name, make in PLANTED.items():
        for seed in range(seeds):
            try:
                simulate(make(True), seed=seed)
            except Exception as error:
                failed += 1
                print(f"{name}: seed {seed}: {error!r}")
    runs = seeds * len(PLANTED)
    return [
        Figure("runs per second", runs / (time.perf_counter() - began)),
        Figure("KiB that each run left", (resident_kib() - before) / runs),
        count("runs", runs, len(PLANTED) * seeds),
        count("failed", failed),
    ]
