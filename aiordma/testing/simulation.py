"""Simulation: hosts and their network in one thread, on virtual time, from one seed.

Each host has an event loop of its own and a software device of its own. The scheduler runs one turn
of one host's loop at a time. Where asyncio and the network leave the order open, the seed decides:
which of the hosts that have something to do runs next, the order of descriptors that are ready at
the same time, and each packet's delay. When no host has anything to do, time jumps to the next
timer or arrival. So the same seed gives the same run, and an hour of sleep takes no time.
"""

import asyncio
import functools
import inspect
import itertools
import math
import os
import random
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import Any, TypeVar

from aiordma._base.calls import check_positive_errno
from aiordma._base.provider import software
from aiordma._base.socket_address import pack_address
from aiordma._loop.private import running_asyncio_loop
from aiordma._native import ffi, lib
from aiordma.testing.choices import Choices, ScenarioRandom, shorten
from aiordma.testing.scheduler import OwnershipError, Scheduler, SimulationError
from aiordma.testing.simulated_loop import NO_HOST, SECOND, SimulatedLoop

__all__ = (
    "Host",
    "OwnershipError",
    "Simulation",
    "SimulationError",
    "opened",
    "simulate",
    "simulated",
)

Result = TypeVar("Result")

SEED = "AIORDMA_SEED"
SHOWN_EVENTS = 30
MOST_SECONDS = 1e6
MOST_BANDWIDTH = 1e15

_lost: list[object] = []
"""What crashed hosts had: their tasks never run again, not even to be finalized."""


class _Outcome(asyncio.Future[Result]):
    """The future of `Host.run`."""

    is_awaited = False

    def __await__(self) -> Generator[Any, None, Result]:
        self.is_awaited = True
        return super().__await__()

    __iter__ = __await__

    def result(self) -> Result:
        """As asyncio's: of a future that `asyncio.wait` has waited for, for example."""
        self.is_awaited = True
        return super().result()

    def exception(self) -> BaseException | None:
        """As asyncio's: `asyncio.gather` takes it from here."""
        self.is_awaited = True
        return super().exception()

    @property
    def error(self) -> BaseException | None:
        """What the task raised, if nobody has waited for it."""
        if self.is_awaited or not self.done() or self.cancelled():
            return None
        return super().exception()


class Host:
    """A host of a simulation: `Simulation.host` makes it.

    Attributes:
        name: for the trace, and for `connect` on the hosts.
        addresses: its IP addresses.
    """

    def __init__(
        self, scheduler: Scheduler, name: str, addresses: tuple[str, ...], outcomes: "_Outcomes"
    ) -> None:
        self.name = name
        self.addresses = addresses
        self._scheduler = scheduler
        self._outcomes = outcomes
        self.number: int = lib.aiordma_simulated_host()
        if self.number < 0:
            raise MemoryError(f"no memory for the simulated host {name}")
        scheduler.names.append(name)
        for address in addresses:
            packed = ffi.from_buffer(pack_address(address, 0))
            error = lib.aiordma_simulated_address(
                self.number, ffi.cast("struct sockaddr *", packed)
            )
            check_positive_errno(error, "aiordma_simulated_address")
        scheduler.loops[self.number] = scheduler.new_loop(self.number, repr(self))

    def __repr__(self) -> str:
        return f"host {self.name} ({', '.join(self.addresses)})"

    @property
    def address(self) -> str:
        """The first of its addresses."""
        return self.addresses[0]

    @property
    def is_up(self) -> bool:
        """Whether it has its power."""
        return self.number in self._scheduler.loops

    def _note(self, text: str) -> None:
        self._scheduler.note(f"{self.name}: {text}")

    def run(
        self, function: Callable[..., Coroutine[Any, Any, Result]], *arguments: object
    ) -> "asyncio.Future[Result]":
        """Run a coroutine function as a task of the host.

        Args:
            function: called on the host.
            arguments: for it.

        Returns:
            A future of the caller's loop: await it for the result. To cancel it cancels the task.
            If the host crashes, it never completes. An exception that nobody awaits fails the
            simulation.

        Raises:
            SimulationError: the host is down.
        """
        loop = self._loop()
        caller = asyncio.get_running_loop()
        future: _Outcome[Result] = _Outcome(loop=caller)
        self._outcomes.append(future)
        name = getattr(function, "__name__", repr(function))
        self._note(f"runs {name}")

        def ended(task: "asyncio.Task[Result]") -> None:
            caller.call_soon(deliver, task)

        def deliver(task: "asyncio.Task[Result]") -> None:
            if future.done():
                return
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        def begin() -> None:
            if future.cancelled():
                return
            task = loop.create_task(function(*arguments), name=name)
            task.add_done_callback(ended)
            future.add_done_callback(
                lambda future: loop.call_soon(task.cancel) if future.cancelled() else None
            )

        loop.call_soon(begin)
        return future

    def enter(self) -> None:
        """Let the current task be the host's from now on, and those that it makes: a task of
        another simulation's own host (`simulated_network`).

        Raises:
            SimulationError: the host is down, or this is no task on another simulation's loop.
        """
        self._scheduler.adopt(self._loop())

    def _loop(self) -> SimulatedLoop:
        loop = self._scheduler.loops.get(self.number)
        if loop is None:
            raise SimulationError(f"{self} is down: boot() it first")
        return loop

    def crash(self) -> None:
        """Take the power away: its tasks run no more, its memory is gone, and no peer is told.

        If a program of the host calls this itself, the host crashes at the end of its turn: at
        the program's next await.
        """
        self._scheduler.between_turns(self.number, self._crash)

    def _crash(self) -> None:
        loop = self._scheduler.loops.pop(self.number, None)
        if loop is None:
            return
        self._note("crashes")
        lib.aiordma_simulated_crash(self.number)
        _lost.append((loop, loop.unfinished()))
        self._scheduler.forget(loop)

    def boot(self) -> None:
        """Give the power back. The host is empty: `run` its programs anew."""
        if self.is_up:
            return
        self._note("boots")
        lib.aiordma_simulated_boot(self.number)
        self._scheduler.thaw(self.number)
        self._scheduler.loops[self.number] = self._scheduler.new_loop(self.number, repr(self))

    def freeze(self) -> None:
        """Stop its program and its device, as of a virtual machine that is paused. What the network
        delivers waits."""
        self._note("freezes")
        self._scheduler.freeze(self.number)

    def thaw(self) -> None:
        """Let it go on."""
        self._note("thaws")
        self._scheduler.thaw(self.number)

    def set_clock_rate(self, rate: float) -> None:
        """Let the host's clock run faster or slower from now on.

        Args:
            rate: its seconds in a second of the simulation.

        Raises:
            SimulationError: the host is down.
            ValueError: the rate is not positive.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"rate={rate}: it must be positive")
        self._loop().set_rate(rate)


_Outcomes = list[_Outcome[Any]]


class Simulation:
    """What a scenario gets: it makes the hosts, the network and the faults.

    Attributes:
        seed: the seed of this run.
        random: random numbers of the seed, for the scenario.
    """

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler = scheduler
        self._outcomes: _Outcomes = []
        self._hosts: list[Host] = []
        self.seed = seed
        self.random: random.Random = ScenarioRandom()

    @property
    def now(self) -> float:
        """The simulation's time, in seconds since its beginning."""
        return self._scheduler.now / SECOND

    @property
    def trace(self) -> list[str]:
        """The events so far, one line each: time in seconds, who, what."""
        return list(self._scheduler.trace)

    def note(self, text: str) -> None:
        """Write a line into the trace.

        Args:
            text: the line; the time is added.
        """
        self._scheduler.note(text)

    def host(self, name: str = "", *addresses: str) -> Host:
        """Make a host, which is up.

        Args:
            name: for the trace, and for `connect` on the hosts.
            addresses: IP addresses. None: 10.0.x.y of its number.

        Raises:
            ValueError: an address is none, or another host's; or the name is.
        """
        taken = {each for host in self._hosts for each in host.addresses}
        if twice := taken & {*addresses}:
            raise ValueError(f"{twice.pop()} is the address of another host")
        number = len(self._hosts) + 1
        if not addresses:
            addresses = (f"10.0.{number >> 8}.{number & 255}",)
        name = name or f"host{number}"
        if name in self._scheduler.addresses:
            raise ValueError(f"{name!r} is the name of another host")
        host = Host(self._scheduler, name, addresses, self._outcomes)
        self._scheduler.addresses[name] = addresses
        self._hosts.append(host)
        return host

    def guarded_memory(self, size: int) -> memoryview:
        """Make memory that the program must not access while a request has it: not change it while
        it is sent, and neither read nor change it while a receive, READ or atomic writes it. An
        access is done nevertheless, and fails the run with an `OwnershipError` that has its line.

        Register it as any memory. Pages (4 KiB) are caught that belong to one request as a whole,
        of which the end of the memory may be a part. A system call does not do the access: it
        fails with EFAULT.

        Args:
            size: bytes.

        Returns:
            The memory, zeroed, on a page of its own. It is ordinary memory after the simulation.
            What a host's requests have when it crashes, they keep until then.

        Raises:
            OSError, ValueError: as of `mmap.mmap`.
        """
        pages = mmap(-1, size)
        self._scheduler.guarded.append(pages)
        error = lib.aiordma_simulated_guard(ffi.from_buffer(pages), size, self._scheduler.accessed)
        check_positive_errno(error, "aiordma_simulated_guard")
        return memoryview(pages)

    def link(
        self,
        sender: Host | None = None,
        receiver: Host | None = None,
        *,
        latency: float | None = None,
        jitter: float | None = None,
        bandwidth: float | None = None,
        loss: float | None = None,
        cut: bool | None = None,
    ) -> None:
        """Set the way from one host to another, in this direction.

        Args:
            sender: the host that sends. None: all ways that are not set by themselves.
            receiver: the host that receives. None: all, as without a sender.
            latency: seconds. None: as it is.
            jitter: seconds that a packet may take longer, at random. None: as it is.
            bandwidth: bytes per second, of all connections together; 0: without a limit. None: as
                it is.
            loss: 0 to 1: how many packets with data are lost. TCP sends them again, so that data
                come late. None: as it is.
            cut: whether nothing arrives. None: as it is.

        Raises:
            ValueError: a value is out of its range.
        """
        for name, value, most in (
            ("latency", latency, MOST_SECONDS),
            ("jitter", jitter, MOST_SECONDS),
            ("bandwidth", bandwidth, MOST_BANDWIDTH),
            ("loss", loss, 1.0),
        ):
            if value is not None and not 0 <= value <= most:
                raise ValueError(f"{name}={value}: it must be in 0..{most:g}")
        ends = [NO_HOST if each is None else each.number for each in (sender, receiver)]
        found = ffi.new("struct aiordma_simulated_link *")
        lib.aiordma_simulated_get_link(*ends, found)
        if latency is not None:
            found.latency = round(latency * SECOND)
        if jitter is not None:
            found.jitter = round(jitter * SECOND)
        if bandwidth is not None:
            found.bandwidth = math.ceil(bandwidth)
        if loss is not None:
            found.loss = loss
        if cut is not None:
            found.is_cut = cut
            names = [each.name if each else "all" for each in (sender, receiver)]
            self.note(f"{names[0]} > {names[1]}: {'cut' if cut else 'open'}")
        check_positive_errno(
            lib.aiordma_simulated_set_link(*ends, found), "aiordma_simulated_set_link"
        )

    def partition(self, *sides: "Host | tuple[Host, ...]") -> None:
        """Cut the network between sides, in both directions.

        Args:
            sides: hosts, or tuples of hosts that still reach each other.
        """
        self._cut(sides, True)

    def heal(self, *sides: "Host | tuple[Host, ...]") -> None:
        """Undo `partition`.

        Args:
            sides: as of `partition`; none: all hosts.
        """
        self._cut(sides or tuple(self._hosts), False)

    def _raise_unnoticed(self) -> None:
        """Raise the first error that nobody has noticed."""
        errors = [each.error for each in self._outcomes if each.error is not None]
        errors += self._scheduler.failures
        if errors:
            raise errors.pop(0) from None

    def _cut(self, sides: "tuple[Host | tuple[Host, ...], ...]", cut: bool) -> None:
        groups = [side if isinstance(side, tuple) else (side,) for side in sides]
        for one, other in itertools.permutations(groups, 2):
            for sender, receiver in itertools.product(one, other):
                self.link(sender, receiver, cut=cut)


def simulate(
    scenario: Callable[[Simulation], Coroutine[Any, Any, Result]],
    *,
    seed: int | str = 0,
    limit: float = 86400.0,
    any_order: bool = True,
) -> Result:
    """Run a scenario: a coroutine function that gets a `Simulation`.

    The scenario runs on a loop of its own, which belongs to no host. The software device stands
    still for all other threads meanwhile: none of them may use it.

    Args:
        scenario: called with the simulation.
        seed: a number that decides what asyncio and the network leave open. The same seed gives
            the same run. Or the text of a shortened run: what its failure shows.
        limit: seconds of virtual time.
        any_order: whether the bytes of a WRITE can become visible in any order, as on a device.

    Returns:
        What the scenario returns. The hosts' tasks that still run are cancelled then.

    Raises:
        SimulationError: nothing will ever happen again, or the limit is reached.
        RuntimeError: an event loop runs in this thread.
        ValueError: the seed is neither a number nor the text of a shortened run.
        Exception: of the scenario, or of a host's task that nobody awaits; its notes have the seed
            and the last events.
    """
    if running_asyncio_loop() is not None:
        raise RuntimeError(
            "simulate() runs event loops of its own: call it outside of one, from a plain function"
        )
    return _simulate(scenario, Choices(seed), limit, any_order)


def _simulate(
    scenario: Callable[[Simulation], Coroutine[Any, Any, Result]],
    choices: Choices,
    limit: float,
    any_order: bool = True,
) -> Result:
    scheduler = Scheduler()
    with opened(choices, scheduler, any_order):
        return _run(scheduler, scenario, Simulation(scheduler, choices.seed), limit)


@contextmanager
def opened(choices: Choices, scheduler: Scheduler, any_order: bool = True) -> Iterator[None]:
    """Begin a simulation, and end it. Errors get notes."""
    software()
    kept = choices.for_c()
    error = lib.aiordma_simulation_begin(choices.seed, any_order, scheduler.posted, *kept)
    check_positive_errno(error, "aiordma_simulation_begin")
    scheduler.begin()
    try:
        yield
    except BaseException as error:
        choices.ran(scheduler.now / SECOND)
        _explain(error, scheduler, choices)
        raise
    finally:
        scheduler.close()
        lib.aiordma_simulation_end()


def _run(
    scheduler: Scheduler,
    scenario: Callable[[Simulation], Coroutine[Any, Any, Result]],
    simulation: Simulation,
    limit: float,
) -> Result:
    scheduler.enter(scheduler.own)
    name = "the scenario"
    main: asyncio.Task[Result] = scheduler.own.create_task(scenario(simulation), name=name)
    try:
        scheduler.run_until(main, limit)
        simulation._raise_unnoticed()
    except SimulationError:
        simulation._raise_unnoticed()
        raise
    finally:
        scheduler.end_tasks()
    return main.result()


def _explain(error: BaseException, scheduler: Scheduler, choices: Choices) -> None:
    last = list(scheduler.trace)[-SHOWN_EVENTS:]
    error.add_note(
        f"in a simulation with seed {choices}, after {scheduler.now / SECOND:.6f} s. The last "
        "events (seconds, who, what):\n  " + "\n  ".join(last)
    )


def _run_seeds(
    scenario: Callable[[Simulation], Coroutine[Any, Any, None]], seeds: int, limit: float
) -> None:
    if only := os.environ.get(SEED, ""):
        try:
            choices = Choices(only)
        except ValueError as error:
            raise ValueError(f"{SEED}={error}") from None
        _simulate(scenario, choices, limit)
        return
    for seed in range(seeds):
        choices = Choices(seed)
        try:
            _simulate(scenario, choices, limit)
        except Exception as error:
            raise shorten(
                choices, error, lambda tried, most: _simulate(scenario, tried, min(limit, most))
            ) from None


def simulated(
    seeds: int = 100, *, limit: float = 86400.0
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Decorate a test: a coroutine function that gets a `Simulation` first, and runs once for each
    of the seeds 0, 1, ... The environment variable AIORDMA_SEED names a single one instead.

    A run that fails is shortened: some of what its seed decides is replaced by the default (no
    packet late or lost, turns in order) while it still fails at the same line, in at most 200 runs
    and about 10 s of processor time. The test raises the error of the shortest one; its notes say
    how to run it again.

    Args:
        seeds: how many.
        limit: seconds of virtual time of each run.

    Raises:
        ValueError: by the decorated test: AIORDMA_SEED is neither a whole number nor the text of a
            shortened run.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **options: Any) -> None:
            _run_seeds(lambda simulation: test(simulation, *arguments, **options), seeds, limit)

        signature = inspect.signature(test)
        _, *others = signature.parameters.values()
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        del run.__wrapped__  # pytest would look for its parameters
        return run

    return decorate
