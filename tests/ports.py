"""Ports for tests and benchmarks: no other process that runs any of them has the same.

A process takes a block of ports, and the name of an abstract Unix socket (unix(7)) with it, which
the kernel gives back when the process ends, however it ends.
"""

import itertools
import os
import socket
from collections.abc import Iterator

from tests.kernel_objects import has_port

FIRST, BLOCK, BLOCKS = 10000, 150, 150
"""Below those that the system gives to clients (ip_local_port_range)."""

_blocks: list[socket.socket] = []


def _ports() -> Iterator[int]:
    # Others than those of the process before, some of which may be in TIME_WAIT.
    for number in itertools.count(os.getpid()):
        taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            taken.bind(f"\0aiordma tests: ports {number % BLOCKS}")
        except OSError:
            taken.close()
            continue
        _blocks.append(taken)
        first = FIRST + number % BLOCKS * BLOCK
        yield from range(first, first + BLOCK)


_free = _ports()


def free_port() -> int:
    """Return a port that nobody listens on, and that this process has not had before."""
    return next(port for port in _free if not has_port(port))
