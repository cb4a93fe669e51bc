"""The state machine of tests/faults on simulated hosts, one for each side of the pairs, on virtual
time. So a run repeats exactly, and Hypothesis shortens one that fails.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize

import aiordma
from aiordma.testing import Simulation, software_objects
from aiordma.testing.choices import Choices
from aiordma.testing.scheduler import Scheduler
from aiordma.testing.simulation import opened
from tests.connections import connect_to
from tests.faults.machine import CLIENT, SERVER, SIDES, Machine, action
from tests.internals import close_unused_reactors

__all__ = ("SimulatedMachine",)

Result = TypeVar("Result")

MOST_SECONDS = 600.0
LINGER_SECONDS = 4.0


class TwoHosts:
    """Each side on a host, which has an event loop and a device."""

    is_simulated = True

    def __init__(self, seed: int, jitter: float, loss: float) -> None:
        self._stack = ExitStack()
        self.scheduler = Scheduler()
        self._stack.enter_context(opened(Choices(seed), self.scheduler))
        self.simulation = Simulation(self.scheduler, seed)
        self.reported: list[Any] = self.scheduler.failures
        self.hosts = [self.simulation.host(name) for name in ("client", "server")]
        self.address = self.hosts[SERVER].address
        self._loops = [self.scheduler.loops[each.number] for each in self.hosts]
        self.simulation.link(latency=2e-5, jitter=jitter, loss=loss)
        for side in SIDES:
            self.finish(self.start(_use(self.hosts[side].address), side))
        self._before = self._objects()

    def _objects(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        # Connections of the device end after their queue pairs.
        self.finish(self.start(asyncio.sleep(LINGER_SECONDS), CLIENT))
        for loop in self._loops:
            self.scheduler.enter(loop)
            for name, count in software_objects().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def now(self) -> float:
        return self.simulation.now

    def start(self, coroutine: Coroutine[Any, Any, Result], side: int) -> "asyncio.Task[Result]":
        self.scheduler.enter(self._loops[side])
        return self._loops[side].create_task(coroutine)

    def finish(self, task: "asyncio.Task[Result]") -> Result:
        self.scheduler.run_until(task, MOST_SECONDS)
        return task.result()

    def call(self, function: Callable[[], Result], side: int) -> Result:
        async def call() -> Result:
            return function()

        return self.finish(self.start(call(), side))

    def close(self) -> None:
        self.after = self._objects()
        self._stack.close()

    def left(self) -> dict[str, int]:
        return {name: self.after[name] - count for name, count in self._before.items()}


async def _use(address: str) -> None:
    """Use the device once: the connection manager keeps its context."""
    async with aiordma.listen(address, 0) as listener:
        for end in await connect_to(listener, address):
            await end.aclose()
    await close_unused_reactors()


class SimulatedMachine(Machine):
    """See the module."""

    place: TwoHosts

    def _begin(self) -> None:
        pass

    @initialize(
        one=st.integers(0, 5),
        other=st.integers(0, 5),
        seed=st.integers(0, 2**32),
        jitter=st.sampled_from([0.0, 1e-5, 1e-4, 2e-3]),
        loss=st.sampled_from([0.0, 0.0, 0.01, 0.1]),
    )
    def connect_first(self, one: int, other: int, seed: int, jitter: float, loss: float) -> None:
        self.history.append(f"connect_first({one=}, {other=}, {seed=}, {jitter=}, {loss=})")
        with self.recording():
            self._begin_at(TwoHosts(seed, jitter, loss))
            self._connect(one, other)

    @action(side=st.integers(0, 1), seconds=st.sampled_from([1e-4, 1e-3, 0.01, 0.1]))
    def cut(self, side: int, seconds: float) -> None:
        """Cut one direction of the network: TCP sends again."""
        way = self.place.hosts[side], self.place.hosts[1 - side]
        self.place.simulation.link(*way, cut=True)
        self._run(asyncio.sleep(seconds), CLIENT)
        self.place.simulation.link(*way, cut=False)

    @action(side=st.integers(0, 1), seconds=st.sampled_from([1e-4, 1e-3, 0.01, 0.1]))
    def freeze(self, side: int, seconds: float) -> None:
        """Stop a host for a time."""
        self.place.hosts[side].freeze()
        self._run(asyncio.sleep(seconds), 1 - side)
        self.place.hosts[side].thaw()

    def teardown(self) -> None:
        if hasattr(self, "place"):
            super().teardown()
