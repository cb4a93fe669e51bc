"""The scheduler of a simulation: which loop has the next turn, and when time passes."""

import asyncio
import heapq
import itertools
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiordma._base.process import here
from aiordma._base.system import enter_process, system
from aiordma._native import ffi, lib, set_engine_process
from aiordma.testing.simulated_loop import MOST_EVENTS, NEVER, NO_HOST, SECOND, SimulatedLoop

__all__ = ("END_SECONDS", "LINGER_SECONDS", "OwnershipError", "Scheduler", "SimulationError")

END_SECONDS = 300.0
"""Virtual time that tasks have to end when they are cancelled."""
LINGER_SECONDS = 3.0
"""What the device's streams take to end, after their queue pairs."""
KEPT_EVENTS = 100_000
TURNS_AT_ONCE = 1_000
"""Of each loop: far more than a program needs that waits."""

ENGINE_PROCESSES = 1 << 30
"""Added to the numbers of loops: the engine's own counts forks."""

EVENTS = (
    "connect to port %d",
    "refused at port %d",
    "%d bytes",
    "end%.0s",
    "reset%.0s",
    "datagram of %d bytes",
    "lost: %d bytes",
    "changed %d bytes of a posted request",
    "writes %d bytes by two requests",
    "accesses %d bytes of a posted request",
    "denies an access: the key was taken back or is unknown, or the range or kind is wrong%.0s",
)
"""Texts for enum aiordma_simulated_kind."""

MISUSES = {
    lib.AIORDMA_SIMULATED_CHANGED: "changed memory of %d bytes that was the device's: of a request "
    "that was not complete",
    lib.AIORDMA_SIMULATED_TWICE: "gave the device memory of %d bytes, some of which an earlier "
    "request of the connection still writes: by a request",
    lib.AIORDMA_SIMULATED_ACCESSED: "accessed memory of %d bytes that was the device's: of a "
    "request that was not complete",
}

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class SimulationError(Exception):
    """The simulation cannot go on: no host has anything to do and nothing is on its way, or its
    limit of time is over."""


class OwnershipError(Exception):
    """A program changed the memory of a posted request before its completion, or let two requests
    write the same memory. The message has the line that posted it, and of guarded memory the line
    that accessed it."""


def _place_of_program() -> str:
    """The line outside of aiordma that makes the present call."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"


class Scheduler:
    """See the module.

    Attributes:
        own: the scenario's loop.
        now: nanoseconds of the simulation's time.
        names: the hosts' names, by their numbers.
        addresses: the hosts' addresses, by their names.
        loops: the loops of the hosts that are up, by their numbers.
        frozen: the numbers of hosts that have no turns.
        failures: errors that reached a loop's exception handler, and of ownership.
        posted, accessed: functions for the device: a request was posted, or its memory accessed.
        guarded: memory that stays mapped until the end.
    """

    def __init__(self) -> None:
        self.now: int = 1
        self.names: list[str] = []
        self.addresses: dict[str, tuple[str, ...]] = {"localhost": ("127.0.0.1", "::1")}
        self.loops: dict[int, SimulatedLoop] = {}
        self.frozen: set[int] = set()
        self.failures: list[BaseException] = []
        self.trace: deque[str] = deque(maxlen=KEPT_EVENTS)
        self.posted: Any = ffi.callback("void(uint64_t, uint32_t)", self._posted)
        self.accessed: Any = ffi.callback("void()", self._accessed)
        self.guarded: list[Any] = []
        self._posts: dict[tuple[int, int, int], str] = {}
        self._accesses: list[str] = []
        self._current = NO_HOST
        self._turns = 0  # at this time
        self._traced = 0
        self._event = ffi.new("struct aiordma_simulated_event *")
        self._hosts = ffi.new("int[]", MOST_EVENTS)
        self._after_turn: list[Callable[[], None]] = []
        self._awake: list[SimulatedLoop] = []
        self._timers: list[tuple[int, int, SimulatedLoop]] = []
        self._order = itertools.count()
        self._outside: tuple[int, int, Callable[[], float]] = (0, 0, system.now)

    def take_system(self) -> None:
        """Take the place of the system: the clock, the process, names, threads."""
        self._outside = here.pid, set_engine_process(ENGINE_PROCESSES), system.now
        system.names = self
        system.is_simulated = True

    def begin(self) -> None:
        """Take the place of the system, and make the scenario's loop."""
        self.take_system()
        self.own: SimulatedLoop = SimulatedLoop(self, NO_HOST, "the scenario")

    def new_loop(self, host: int, name: str) -> SimulatedLoop:
        """Make the loop of a host that comes up."""
        return SimulatedLoop(self, host, name)

    def getaddrinfo(
        self, host: str | None, port: int | str | None, family: int = 0, *others: int
    ) -> list[Any]:
        """As socket.getaddrinfo, for the hosts' names and for addresses."""
        kind, protocol, flags = (*others, 0, 0, 0)[:3]
        found: list[Any] = []
        for address in self.addresses.get(host or "", (host,)):
            with suppress(socket.gaierror):  # an address of the other family
                found += socket.getaddrinfo(
                    address, port, family, kind, protocol, flags | socket.AI_NUMERICHOST
                )
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no host of the simulation has this name")
        return found

    # -- waking --------------------------------------------------------------------------------

    def wake(self, loop: SimulatedLoop) -> None:
        """Give the loop a turn soon."""
        if not loop.is_awake:
            loop.is_awake = True
            self._awake.append(loop)

    def wake_at(self, when: int, loop: SimulatedLoop) -> None:
        """Give the loop a turn at this time."""
        heapq.heappush(self._timers, (when, next(self._order), loop))

    def forget(self, loop: SimulatedLoop) -> None:
        """Give the loop no more turns."""
        loop.lose()
        self._awake = [each for each in self._awake if each is not loop]
        self._timers = [each for each in self._timers if each[2] is not loop]
        heapq.heapify(self._timers)

    def _wake_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            self.wake(heapq.heappop(self._timers)[2])
        while count := lib.aiordma_simulated_awake(self._hosts, MOST_EVENTS):
            for i in range(count):
                if (loop := self.loops.get(self._hosts[i])) is not None:
                    self.wake(loop)

    def adopt(self, loop: SimulatedLoop) -> None:
        """Raise SimulationError: a host's loop runs the host's tasks only."""
        raise SimulationError("enter() is for hosts of simulated_network: here, run() the program")

    def freeze(self, host: int) -> None:
        """Give the host's loop no turns."""
        self.frozen.add(host)

    def thaw(self, host: int) -> None:
        """Give it turns again."""
        self.frozen.discard(host)

    # -- turns ---------------------------------------------------------------------------------

    def between_turns(self, host: int, call: Callable[[], None]) -> None:
        """Call a function that takes a host's device away: now, or after the host's own turn."""
        if host == self._current:
            self._after_turn.append(call)
            return
        call()
        lib.aiordma_simulated_enter(self._current)  # the caller's turn goes on

    def enter(self, loop: SimulatedLoop) -> None:
        """Be the loop's host from now on: its process, its device, its clock."""
        self._current = loop.host
        lib.aiordma_simulated_enter(loop.host)
        enter_process(-loop.number, ENGINE_PROCESSES + loop.number)
        system.now = loop.time

    def leave(self) -> None:
        """Be no host, and the process outside. Give back what `take_system` has taken."""
        self._current = NO_HOST
        lib.aiordma_simulated_enter(NO_HOST)
        enter_process(*self._outside[:2])
        system.now = self._outside[2]
        system.guest = None
        system.names = socket
        system.is_simulated = False

    def _next(self) -> int:
        """When the next timer or arrival is."""
        arrival: int = lib.aiordma_simulated_next()
        return min([arrival, *(each[0] for each in self._timers[:1])])

    def _most_turns(self) -> int:
        """After so many turns at one time, time passes although loops are busy: a program polls."""
        return TURNS_AT_ONCE * (1 + len(self.loops))

    def step(self) -> None:
        """Run one turn, or let time pass.

        Raises:
            SimulationError: nothing will ever happen, or nothing that lets time pass.
        """
        self._wake_due()
        ready = [each for each in self._awake if each.host not in self.frozen]
        most = self._most_turns()
        if ready and (self._turns < most or (self._turns < 100 * most and self._next() == NEVER)):
            self._turns += 1
            chosen = len(ready) > 1 and lib.aiordma_simulated_choose(
                lib.AIORDMA_SIMULATED_TURN, len(ready)
            )
            loop = ready[chosen]
            self._awake.remove(loop)
            loop.is_awake = False
            self.enter(loop)
            loop.turn()
            self._current = NO_HOST
            while self._after_turn:
                self._after_turn.pop(0)()
        else:
            when = self._next()
            if when == NEVER:
                raise SimulationError(
                    f"{self._turns} turns at one time, and time would bring nothing: a program "
                    "loops without waiting for anything"
                    if ready
                    else "nothing will ever happen: all tasks wait for each other"
                )
            if when > self.now:
                self.now = when
                self._turns = 0
            lib.aiordma_simulated_advance(self.now)
        self._read_trace()

    def run_until(self, future: "asyncio.Future[Any]", limit: float) -> None:
        """Run turns until the future is done.

        Raises:
            SimulationError: as of `step`, or after so many seconds.
        """
        end = self.now + round(limit * SECOND)
        while not future.done():
            self.step()
            if self.now > end:
                raise SimulationError(f"after {limit:g} s of virtual time: not done")

    # -- the trace -----------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Write a line into the trace."""
        self._read_trace()
        self._line(self.now, text)

    def _line(self, time: int, text: str) -> None:
        self.trace.append(f"{time / SECOND:.9f} {text}")

    def _read_trace(self) -> None:
        count = lib.aiordma_simulated_count()
        event = self._event
        for i in range(max(self._traced, count - lib.AIORDMA_SIMULATED_TRACE), count):
            lib.aiordma_simulated_trace(i, event)
            sender = self.names[event.sender]
            receiver = self.names[event.receiver] if event.receiver != NO_HOST else "nobody"
            is_own = event.kind >= lib.AIORDMA_SIMULATED_CHANGED
            way = sender if is_own else f"{sender} > {receiver}"
            self._line(event.time, f"{way}: {EVENTS[event.kind] % event.size}")
            if event.kind in MISUSES:
                place = self._posts.get((event.sender, event.qp_num, event.wr_id), "unknown")
                text = MISUSES[event.kind] % event.size
                if event.kind == lib.AIORDMA_SIMULATED_ACCESSED:
                    place += f"; accessed at {self._accesses.pop(0)}"
                self.failures.append(OwnershipError(f"{sender} {text}, posted at {place}"))
        self._traced = count

    def _posted(self, wr_id: int, qp_num: int) -> None:
        self._posts[self._current, qp_num, wr_id] = _place_of_program()

    def _accessed(self) -> None:
        self._accesses.append(_place_of_program())

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loops' exception handler."""
        error = context.get("exception")
        if not isinstance(error, BaseException):
            error = SimulationError(str(context.get("message")))
        error.add_note(f"{loop!r}: {context.get('message')}")
        self.failures.append(error)

    # -- the end -------------------------------------------------------------------------------

    def end_tasks(self) -> None:
        """Cancel all tasks, the scenario's and the hosts', and run until they have ended."""
        loops = [self.own, *self.loops.values()]
        self.frozen.clear()
        for loop in loops:
            self.enter(loop)
            for task in loop.unfinished():
                task.cancel()
        end = self.now + round(END_SECONDS * SECOND)
        with suppress(SimulationError):
            while any(loop.unfinished() for loop in loops) and self.now < end:
                self.step()
            end = self.now + round(LINGER_SECONDS * SECOND)
            while self.now < end:
                self.step()

    def close(self) -> None:
        """Close the loops, and what is open on them. Be outside again."""
        for loop in (self.own, *self.loops.values()):
            self.enter(loop)
            loop.close()
        self.leave()
