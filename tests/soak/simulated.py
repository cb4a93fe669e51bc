"""The programs of tests/simulation under many seeds: what is mended survives all of them."""

import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import anyio.to_thread

from aiordma.testing import simulate
from tests.simulation.planted import PLANTED

from .figures import Figure, count, scaled
from .process import resident_kib


async def simulated() -> list[Figure]:
    """Six mended programs on simulated hosts, with 10,000 seeds each."""
    return await anyio.to_thread.run_sync(_run)  # simulate() has event loops of its own


def _survive(name: str, seeds: int) -> tuple[int, int]:
    """Return how many seeds fail, and the KiB that all runs left."""
    failed, before = 0, resident_kib()
    for seed in range(seeds):
        try:
            simulate(PLANTED[name](True), seed=seed)
        except Exception as error:
            failed += 1
            print(f"{name}: seed {seed}: {error!r}")
    return failed, resident_kib() - before


def _run() -> list[Figure]:
    seeds, began = scaled(10_000), time.perf_counter()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        results = list(pool.map(_survive, PLANTED, repeat(seeds)))
    runs = seeds * len(results)
    return [
        Figure("runs per second", runs / (time.perf_counter() - began)),
        Figure("KiB that each run left", sum(kib for _, kib in results) / runs),
        count("runs", runs, len(PLANTED) * seeds),
        count("failed", sum(failed for failed, _ in results)),
    ]
