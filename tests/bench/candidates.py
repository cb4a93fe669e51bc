"""aiordma as the candidate: servers that stay for all rounds, and one measurement at a time."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aiordma.bench.client import measure
from aiordma.bench.loops import SPIN, run
from aiordma.bench.meter import Measurement
from aiordma.bench.processes import Ports, serving
from aiordma.bench.tcp import measure_protocol, measure_streams
from aiordma.bench.workload import Workload

from .processor import of_both

Kept = TypeVar("Kept")


@dataclass
class Candidates:
    """Measures on one device; a context manager, since servers are started as they are needed.

    Attributes:
        host: the address of the device.
        device: its name.
        seconds: of one measurement.
        rounds: how often each will be made.
        spin: seconds of polling before a sleep, at most.
    """

    host: str
    device: str
    seconds: float
    rounds: int
    spin: float = SPIN
    _servers: dict[tuple[str, float], Ports] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Candidates":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._servers.clear()

    def keep(self, what: AbstractContextManager[Kept]) -> Kept:
        """Enter something that is left when all is measured."""
        return self._stack.enter_context(what)

    def ports(self, loop: str, polling: bool) -> Ports:
        """Return the server on such a loop, started if there is none yet."""
        spin = self.spin if polling else 0.0
        known = self._servers.get((loop, spin))
        if known is None:
            server = serving(self.host, loop=loop, spin=spin, device=self.device)
            known = self._servers[loop, spin] = self.keep(server)
        return known

    def rdma(
        self, work: Workload, *, polling: bool = True, timed: bool = True, loop: str = "auto"
    ) -> Measurement:
        """Measure a workload, both sides on such a loop."""
        server = self.ports(loop, polling)
        main = partial(
            measure, self.host, server.rdma, work, self.seconds, device=self.device, timed=timed
        )
        spin = self.spin if polling else 0.0
        return of_both(partial(run, main, loop=loop, spin=spin), server.pid)

    def streams(self, size: int, loop: str = "asyncio", depth: int = 1) -> Measurement:
        """Measure asyncio's TCP streams."""
        server = self.ports(loop, False)
        main = partial(measure_streams, self.host, server.streams, size, self.seconds, depth)
        return of_both(partial(run, main, loop=loop), server.pid)

    def protocol(self, size: int, loop: str = "asyncio") -> Measurement:
        """Measure an asyncio TCP protocol."""
        server = self.ports(loop, False)
        main = partial(measure_protocol, self.host, server.protocol, size, self.seconds)
        return of_both(partial(run, main, loop=loop), server.pid)
