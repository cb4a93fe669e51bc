"""SIGINT at random moments: the process ends by it, without a hang and without another error."""

import random
import time
from functools import partial

import anyio.to_thread

from tests.device.life import LOOPS, End, interrupt
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest

from .figures import AT_LEAST, Figure, count, scaled

SEED = 20261125


async def sigint() -> list[Figure]:
    """Programs with everything open, each with a SIGINT at a random moment: 100 of each loop."""
    wanted = scaled(100)
    device = DeviceUnderTest(DEVICE, DEVICE, ADDRESS)
    ends: dict[str, list[End]] = {}
    began = time.perf_counter()
    for loop in LOOPS:
        run = partial(interrupt, device, loop, wanted, random.Random(f"{SEED} {loop}"))
        ends[loop] = await anyio.to_thread.run_sync(run)
    every = [end for found in ends.values() for end in found]
    for loop, found in ends.items():
        for end in found:
            if not end.is_clean:
                print(f"{loop}: SIGINT at {end.at:.3f}: status {end.status}\n{end.said[-2000:]}")
    return [
        Figure("processes", len(every)),
        Figure("processes per second", len(every) / (time.perf_counter() - began)),
        *(
            Figure(
                f"SIGINTs that met the program on {loop}",
                sum(end.was_interrupted for end in found),
                (AT_LEAST, wanted),
                counted=True,
            )
            for loop, found in ends.items()
        ),
        count("processes that did not end", sum(end.status is None for end in every)),
        count("other errors or statuses", sum(not end.is_clean for end in every)),
    ]
