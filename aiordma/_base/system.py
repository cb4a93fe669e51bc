"""What a simulation replaces below the package: the clock, the process, and descriptors' flags.

The software device has the same seam in C (software/system.h).
"""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from aiordma._base.process import here
from aiordma._native import set_engine_process


class _System:
    """The clock of time limits, in seconds, the module with getaddrinfo, and whether they
    are a simulation's. A simulation has no threads and no real devices. guest: the simulated host
    that runs, where the hosts share an event loop; else None."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        self.names: Any = socket
        self.is_simulated: bool = False
        self.guest: Any = None


system: _System = _System()


def set_nonblocking(fd: int) -> None:
    """Let calls that read a descriptor return at once."""
    if not system.is_simulated:
        os.set_blocking(fd, False)


def enter_process(number: int, engine_number: int) -> None:
    """Be another process from now on: objects of earlier ones are as inherited by a fork's child,
    which neither uses nor closes them."""
    here.pid = number
    set_engine_process(engine_number)
