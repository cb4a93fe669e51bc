"""What a process holds: memory, descriptors, threads and the library's own objects."""

import ctypes
import gc
import os
import resource
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from enum import Enum
from pathlib import Path

import anyio

from aiordma.testing import software_objects
from tests.internals import THREAD_NAME

SETTLED_SECONDS = 20.0
"""How long the objects of closed connections may stay: a peer's answer to the end of its stream can
be late (docs/software-device.md)."""

SHARED = ("regions", "MemoryRegion", "Slab", "queues", "CompletionQueue", "CompletionQueueShare")
"""What a loop keeps for its next connections until it ends: blocks of its pool, and completion
queues. They are measured as memory."""

OTHER_DESCRIPTORS = 400
"""Descriptors of a process besides one for each connection."""


def resident_kib(pid: int | str = "self") -> int:
    """Return the memory of a process (Pss): with its share of what it shares with others."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss")


class _Malloc(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use_kib() -> float:
    """Return the memory that is allocated from the C library and not freed. With
    PYTHONMALLOC=malloc, that includes all objects of Python."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd) / 1024


MAY_WAIT = {"aiordma._loop.event_loop._Begun": 16, "aiordma._native._engine.Waiter": 16}
"""Tasks of a listener that wait for the next handshakes, and what they wait for."""


def held() -> dict[str, int]:
    """Count what this process holds now."""
    gc.collect()
    # Idle workers end by themselves.
    threads = [
        each
        for each in threading.enumerate()
        if each.name != THREAD_NAME and "AnyIO" not in each.name
    ]
    counts = Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        # Flags that are combined once stay.
        if not issubclass(kind, Enum)
        and f"{kind.__module__}.".startswith("aiordma.")
        and kind.__name__ not in SHARED
    )
    return {
        **_descriptors(),
        "threads": len(threads),
        **{kind: n for kind, n in software_objects().items() if kind not in SHARED},
        **counts,
    }


def _descriptors() -> Counter[str]:
    """Count the open files by what they are."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            name = os.readlink(f"/proc/self/fd/{fd}")
            found[name.partition("[" if name.startswith("socket:") else "\0")[0]] += 1
    return found


async def settled(before: dict[str, int]) -> dict[str, int]:
    """Return what is held more than before, by kind, when it has stopped to change: nothing, if
    all is well."""
    limit = time.monotonic() + SETTLED_SECONDS
    while (more := _more(before)) and time.monotonic() < limit:
        await anyio.sleep(0.1)
    if more:
        print(f"left: {more}", file=sys.stderr)
    return more


async def all_closed() -> None:
    """Wait until no queue pair is left: those of closed connections are destroyed soon after."""
    with anyio.fail_after(SETTLED_SECONDS):
        while software_objects()["queue_pairs"]:
            await anyio.sleep(0.05)


def _more(before: dict[str, int]) -> dict[str, int]:
    more = {kind: n - before.get(kind, 0) - MAY_WAIT.get(kind, 0) for kind, n in held().items()}
    return {kind: n for kind, n in more.items() if n > 0}


def connections_possible(wanted: int) -> int:
    """Raise the limit of descriptors to the hard one, and return how many connections a process
    can have with it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - OTHER_DESCRIPTORS)
