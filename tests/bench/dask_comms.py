"""A row of Dask's comms: an array over aiordma's backend, beside distributed's own over TCP."""

import json
import subprocess
import sys

from aiordma.bench.processes import announcing

from .candidates import Candidates
from .rows import MORE, Reading, Row

PEER = (sys.executable, "-m", "tests.bench.dask_peer")
MEGABYTE = 1e6


def rows(here: Candidates) -> list[Row]:
    """Return the row."""
    known: list[str] = []
    peer = ("env", f"AIORDMA_DEVICE={here.device}", *PEER)

    def measured(which: int) -> Reading:
        if not known:
            known[:], _ = here.keep(announcing([*peer, "serve", here.host]))
        words = [*peer, "ask", known[which], str(here.seconds)]
        printed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
        length, took, used = json.loads(printed)
        return Reading(length / took / MEGABYTE, extra={"cpu_us_per_mb": used * 1e12 / length})

    return [
        Row(
            "software/dask/array/67108864",
            "MB/s",
            lambda: measured(0),
            "Dask's comm over TCP",
            lambda: measured(1),
            better=MORE,
        )
    ]
