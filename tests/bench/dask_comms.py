"""Rows of Dask's comms over aiordma's backend, beside distributed's own over TCP: an array from
process to process, and what two workers exchange for a rechunk and for a shuffle of an array."""

import json
import subprocess
import sys
from functools import partial

from aiordma.bench.processes import announcing

from .candidates import Candidates
from .rows import MORE, Reading, Row

PEER = (sys.executable, "-m", "tests.bench.dask_peer")
MEGABYTE = 1e6


def rows(here: Candidates) -> list[Row]:
    """Return the rows."""
    known: dict[str, tuple[list[str], int]] = {}
    peer = ("env", f"AIORDMA_DEVICE={here.device}", *PEER)

    def measured(action: str, server: str, which: int) -> Reading:
        if server not in known:
            known[server] = here.keep(announcing([*peer, server, here.host]))
        addresses, pid = known[server]
        words = [*peer, action, addresses[which], str(here.seconds), str(pid)]
        printed = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
        length, took, used = json.loads(printed)
        return Reading(length / took / MEGABYTE, cpu_us=used * 1e6 / (length / MEGABYTE))

    return [
        Row(
            f"software/dask/{name}",
            "MB/s",
            partial(measured, action, server, 0),
            "Dask's comm over TCP",
            partial(measured, action, server, 1),
            better=MORE,
        )
        for name, action, server in (
            ("array/67108864", "array", "serve"),
            ("rechunk", "rechunk", "cluster"),
            ("shuffle", "shuffle", "cluster"),
        )
    ]
