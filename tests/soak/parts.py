"""The parts of the soak. `python -m tests.soak.parts PART` runs one, in this process; the last line
that it prints has its figures, as JSON."""

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict

import anyio

from . import connects, grants, many, sigint, simulated, slow, threads
from .figures import Figure

PARTS: dict[str, Callable[[], Awaitable[list[Figure]]]] = {
    "messages": many.messages,
    "ten_thousand": many.ten_thousand,
    "idle": many.idle,
    "connects": connects.connects,
    "grants": grants.grants,
    "sigint": sigint.sigint,
    "simulated": simulated.simulated,
    "slow_readers": slow.slow_readers,
    "eight_loops": threads.eight_loops,
}

if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in anyio.run(PARTS[sys.argv[1]])]))
