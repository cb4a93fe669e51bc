"""Random use of connections on the software device: the rules of the state machine.

Each rule does one thing in an event loop that stands still between the rules, so a rule meets
requests, tasks and closes in every stage. The rules draw only numbers, and choose from what there
is by them, so that a run can be repeated although the device has its own pace.

Here both sides of each pair are on one event loop. tests/simulation/hosts.py has them on simulated
hosts.
"""

import asyncio
import errno
import functools
import gc
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import aiordma
from aiordma import ConnectionOptions
from aiordma.testing import Faults, software_objects
from aiordma.types import Chain
from tests.cells import Cell
from tests.connections import connect_to
from tests.faults.model import PERMITTED, End, Pair
from tests.internals import BufferPool, Lease, close_unused_reactors, fail, is_closed, pool_of

__all__ = (
    "CLIENT",
    "PATIENCE",
    "SERVER",
    "SIDES",
    "Machine",
    "Place",
    "action",
    "unwatched_objects",
)

PATIENCE = float(os.environ.get("AIORDMA_PATIENCE", 20))
"""Seconds in which everything ends that has to."""
MOST_PAIRS = 3
HOST = "127.0.0.1"
CLIENT, SERVER = SIDES = 0, 1
OPTIONS = [
    ConnectionOptions(),
    ConnectionOptions(max_send_wr=1, receive_buffers=1, receive_size=256),
    ConnectionOptions(max_send_wr=4, receive_buffers=3, receive_size=256),
    ConnectionOptions(max_send_wr=4, receive_buffers=0, max_recv_wr=3),
    ConnectionOptions(max_send_wr=16, receive_buffers=0, max_recv_wr=8, max_inline_data=0),
    ConnectionOptions(max_send_wr=3, receive_buffers=2, receive_size=256, max_inline_data=0),
]

Result = TypeVar("Result")


def action(**strategies: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Decorate a rule after which everything is checked."""

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def run(self: "Machine", **drawn: Any) -> None:
            given = ", ".join(f"{name}={value!r}" for name, value in drawn.items())
            self.history.append(f"{function.__name__}({given})")
            with self.recording():
                function(self, **drawn)
                self.check()

        given: Any = rule
        return given(**strategies)(run)

    return decorate


numbers = st.integers(min_value=0, max_value=255)
sizes = st.sampled_from([1, 30, 64, 200, 256, 600])
kinds = st.sampled_from(["send", "send cell", "write", "write", "read"])


async def _awaited(opening: Awaitable[Result]) -> Result:
    return await opening


async def _cancel_all() -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@contextmanager
def unwatched_objects() -> Iterator[None]:
    """Let the garbage collector look only at objects that are made from now on: a collection takes
    a hundredth of the time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def _open_what_stays() -> None:
    """Use the device once: the connection manager keeps its context for the process."""

    async def use() -> None:
        async with aiordma.listen(HOST, 0) as listener:
            for end in await connect_to(listener, HOST):
                await end.aclose()

    asyncio.run(use())
    gc.collect()


class Place(Protocol):
    """Where the machine runs.

    Attributes:
        address: of the server's side.
        reported: what reached an event loop's exception handler.
    """

    address: str
    is_simulated: bool
    reported: list[Any]

    def now(self) -> float:
        """Return the time, in seconds."""

    def start(self, coroutine: Coroutine[Any, Any, Result], side: int) -> "asyncio.Task[Result]":
        """Start a task of the client's side (0) or of the server's (1)."""

    def finish(self, task: "asyncio.Task[Result]") -> Result:
        """Run until the task has ended."""

    def call(self, function: Callable[[], Result], side: int) -> Result:
        """Call a function in the running event loop of a side."""

    def close(self) -> None:
        """End the event loops."""

    def left(self) -> dict[str, int]:
        """Return the objects of the device that are left, by their kinds."""


class OneLoop:
    """Both sides on one event loop, with the device's own pace."""

    address = HOST
    is_simulated = False

    def __init__(self) -> None:
        _open_what_stays()
        self.before = software_objects()
        self.reported: list[Any] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.reported.append(context))

    def now(self) -> float:
        return time.monotonic()

    def start(self, coroutine: Coroutine[Any, Any, Result], side: int) -> "asyncio.Task[Result]":
        return self.loop.create_task(coroutine)

    def finish(self, task: "asyncio.Task[Result]") -> Result:
        return self.loop.run_until_complete(task)

    def call(self, function: Callable[[], Result], side: int) -> Result:
        async def call() -> Result:
            return function()

        return self.loop.run_until_complete(call())

    def close(self) -> None:
        self.loop.close()

    def left(self) -> dict[str, int]:
        deadline = time.monotonic() + PATIENCE
        while True:
            now = software_objects()
            left = {name: now[name] - count for name, count in self.before.items()}
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            gc.collect()
            time.sleep(0.005)


class Machine(RuleBasedStateMachine):
    """See the module."""

    failures: ClassVar[list[Exception]] = []
    """The failures of all runs."""

    def __init__(self) -> None:
        super().__init__()
        self.are_all_disturbed = False
        self.has_failed = False
        self.history: list[str] = []
        self.pairs: list[Pair] = []
        self.leases: list[tuple[Lease, bytes]] = []
        self.releases: list[asyncio.Event] = []
        self.loose: list[asyncio.Task[Any]] = []
        self.number = 0
        self._begin()

    def _begin(self) -> None:
        self._begin_at(OneLoop())

    def _begin_at(self, place: Place) -> None:
        self.place = place
        self.faults = Faults(seed=1)
        self.faults.__enter__()
        self.listener = self._run(self._listen(receive_buffers=2, receive_size=256), SERVER)
        # Keeps the pool of blocks for the whole run.
        self.anchor = self._connect_both(self.listener, None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep a failure with its history: another run may not fail, as the device has its own
        pace, and Hypothesis then reports that instead."""
        try:
            yield
        except Exception as error:
            self.has_failed = True
            error.add_note("after\n    " + "\n    ".join(self.history))
            self.failures.append(error)
            raise

    # -- the loop -------------------------------------------------------------------------------

    async def _listen(self, **options: Any) -> aiordma.Listener:
        return await aiordma.listen(self.place.address, 0, **options)

    def _start(self, coroutine: Coroutine[Any, Any, Result], side: int) -> "asyncio.Task[Result]":
        async def bounded() -> Result:
            async with asyncio.timeout(2 * PATIENCE):
                return await coroutine

        return self.place.start(bounded(), side)

    def _run(self, coroutine: Coroutine[Any, Any, Result], side: int) -> Result:
        return self.place.finish(self._start(coroutine, side))

    def _call(self, function: Callable[[], Result], side: int) -> Result:
        """Call a function in the running loop."""
        return self.place.call(function, side)

    def _next_number(self) -> int:
        self.number += 1
        return self.number

    # -- choosing -------------------------------------------------------------------------------

    def _end(self, number: int) -> End | None:
        ends = [end for pair in self.pairs for end in pair.ends]
        return ends[number % len(ends)] if ends else None

    def _event(self) -> asyncio.Event:
        self.releases.append(asyncio.Event())
        return self.releases[-1]

    # -- connecting and ending --------------------------------------------------------------------

    @initialize(one=st.integers(0, 5), other=st.integers(0, 5))
    def connect_first(self, one: int, other: int) -> None:
        self.history.append(f"connect_first(one={one}, other={other})")
        self._connect(one, other)

    @action(one=st.integers(0, 5), other=st.integers(0, 5))
    def connect(self, one: int, other: int) -> None:
        """Connect another pair, unless there are enough."""
        self._connect(one, other)

    def _connect(self, one: int, other: int) -> None:
        alive = [pair for pair in self.pairs if not all(is_closed(e.connection) for e in pair.ends)]
        if len(alive) >= MOST_PAIRS:
            return

        try:
            listener = self._run(self._listen(options=OPTIONS[other]), SERVER)
            try:
                connections = self._connect_both(listener, OPTIONS[one])
            finally:
                self._run(listener.aclose(), SERVER)
        except PERMITTED:
            if not self.are_all_disturbed:
                raise
            return
        pair = Pair(len(self.pairs), self._next_number, self.place.is_simulated)
        try:
            for side in SIDES:
                self._call(partial(pair.add_end, side, connections[side]), side)
        except PERMITTED:
            assert self.are_all_disturbed
            for side in SIDES:
                self._run(connections[side].aclose(), side)
            return
        pair.is_disturbed = self.are_all_disturbed
        self.pairs.append(pair)

    def _connect_both(
        self, listener: aiordma.Listener, options: ConnectionOptions | None
    ) -> list[aiordma.Connection]:
        """Return a client's connection and the server's."""
        connecting = aiordma.connect(self.place.address, listener.port, options=options)
        tasks = [
            self._start(_awaited(connecting), CLIENT),
            self._start(_awaited(listener.accept()), SERVER),
        ]
        try:
            return [self.place.finish(each) for each in tasks]
        except PERMITTED:
            self._call(tasks[SERVER].cancel, SERVER)
            for side, task in enumerate(tasks):
                with suppress(asyncio.CancelledError, *PERMITTED):
                    connection = self.place.finish(task)
                    self._run(connection.aclose(), side)
            raise

    @action(steps=st.integers(0, 12))
    def abandon_connect(self, steps: int) -> None:
        """Cancel a connect after so many iterations of the loop."""

        async def abandon() -> None:
            task = asyncio.ensure_future(aiordma.connect(self.place.address, self.listener.port))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                if task.exception() is None:
                    await task.result().aclose()
                elif not isinstance(task.exception(), PERMITTED) or not self.are_all_disturbed:
                    task.result()

        async def accept() -> None:
            """The listener still has its request."""
            with suppress(TimeoutError, *PERMITTED):
                async with asyncio.timeout(0.01):
                    await (await self.listener.accept()).aclose()

        self._run(abandon(), CLIENT)
        self._run(accept(), SERVER)

    @action(number=numbers)
    def close(self, number: int) -> None:
        """Begin to close an end."""
        if (end := self._end(number)) is None:
            return
        end.pair.is_disturbed = True
        self._call(lambda: end.watch_task("aclose", end.connection.aclose()), end.side)

    @action(number=numbers)
    def lose(self, number: int) -> None:
        """End a connection as the failure of a device does."""
        if (end := self._end(number)) is None or number % 3:
            return
        end.pair.is_disturbed = True
        error = aiordma.RdmaError("the test breaks it")
        self._call(lambda: fail(end.connection, error), end.side)

    # -- posting --------------------------------------------------------------------------------

    def _post_one(
        self,
        end: End,
        port: aiordma.Connection | Chain,
        kind: str,
        number: int,
        size: int,
    ) -> Callable[[bool], None] | None:
        """Post a request, and return a function that watches it: posted alone and for certain, or
        not. None: there is no memory for it."""
        if kind == "send":
            name, data = end.message(size)
            request = port.post_send(data)
            return lambda posted: end.watch_message(name, request, posted)
        if kind == "send cell":
            cell = end.arena.find(number, min(size, end.longest))
            if cell is None:
                return None
            name = self._next_number()
            length = max(4, min(size, end.longest, cell.size))
            data = name.to_bytes(4, "little") + bytes(length - 4)
            end.arena.buffer[cell._start : cell._start + length] = data
            cell.contents[:length] = data
            end.out.sent[name] = data
            request = port.post_send(cell.memory[:length])
            return lambda posted: end.watch_source(cell, name, request, posted)
        found = self._target(end, number, size)
        if found is None:
            return None
        remote, theirs = found
        if kind == "write":
            data = os.urandom(theirs.size)
            request = port.post_write(data, remote)
            return lambda _: end.watch_write(theirs, data, request)
        ours = end.arena.find(number + 3, theirs.size)
        if ours is None:
            return None
        request = port.post_read(ours.memory[: theirs.size], remote)
        return lambda _: end.watch_read(theirs, ours, theirs.size, request)

    def _target(self, end: End, number: int, size: int) -> tuple[aiordma.RemoteMemory, Cell] | None:
        """Choose a cell of the peer's that is free: one that is offered, or another one."""
        offers = [offer for offer in end.peer.offers if offer[1].is_free]
        if offers and number % 2:
            return offers[number // 2 % len(offers)]
        cell = end.peer.arena.find(number, size)
        if cell is None:
            return None
        return cell.remote, cell

    @action(number=numbers, kind=kinds, place=numbers, size=sizes)
    def post(self, number: int, kind: str, place: int, size: int) -> None:
        """Post a request."""
        if (end := self._end(number)) is None:
            return

        def post() -> None:
            try:
                watch = self._post_one(end, end.connection, kind, place, size)
            except PERMITTED as error:
                end.expect_error(f"post_{kind}", error)
                return
            if watch is not None:
                watch(True)

        self._call(post, end.side)

    @action(
        number=numbers,
        plan=st.lists(st.tuples(kinds, numbers, sizes), min_size=1, max_size=5),
        last_only=st.booleans(),
        gives_up=st.booleans(),
    )
    def chain(
        self, number: int, plan: list[tuple[str, int, int]], last_only: bool, gives_up: bool
    ) -> None:
        """Post requests in one call, or raise in the block."""
        if (end := self._end(number)) is None:
            return
        gives_up = gives_up and number % 4 == 0

        def post() -> None:
            watches: list[Callable[[bool], None]] = []
            posted = False
            used: list[Cell] = []
            try:
                with end.connection.chain(signal_last_only=last_only) as chain:
                    for kind, place, size in plan:
                        if kind != "send" and used:
                            continue  # the model notes the use of a cell after the post
                        watch = self._post_one(end, chain, kind, place, size)
                        if watch is not None:
                            watches.append(watch)
                            if kind != "send":
                                used.append(end.arena.cells[0])
                    if gives_up:
                        raise ZeroDivisionError
                posted = True
            except ZeroDivisionError:
                pass
            except PERMITTED as error:
                end.expect_error("chain", error)
            for watch in watches:
                watch(posted)
                end.operations[-1].may_fail = not posted

        self._call(post, end.side)

    @action(number=numbers, place=numbers)
    def post_recv(self, number: int, place: int) -> None:
        """Post a receive, on an end without pooled ones."""
        end = self._end(number)
        if end is None or end.is_pooled:
            return
        cell = end.inbox.find(place)
        if cell is None:
            return
        found = cell

        def post() -> None:
            try:
                request = end.connection.post_recv(found.memory)
            except PERMITTED as error:
                end.expect_error("post_recv", error)
                return
            end.watch_receive(found, request)

        self._call(post, end.side)

    # -- tasks ----------------------------------------------------------------------------------

    @action(number=numbers, kind=kinds, place=numbers, size=sizes)
    def start(self, number: int, kind: str, place: int, size: int) -> None:
        """Start a task that posts when a slot is free, and waits."""
        if (end := self._end(number)) is None:
            return

        def start() -> None:
            if kind.startswith("send"):
                name, data = end.message(size)
                sending = asyncio.ensure_future(end.connection.send(data))
                end.watch_message(name, sending, posted=False)
                return
            if (found := self._target(end, place, size)) is None:
                return
            remote, theirs = found
            if kind == "write":
                data = os.urandom(theirs.size)
                writing = asyncio.ensure_future(end.connection.write(data, remote))
                end.watch_write(theirs, data, writing)
                return
            ours = end.arena.find(place + 3, theirs.size)
            if ours is not None and not ours.arena.region.closed:
                memory = ours.memory[: theirs.size]
                reading = asyncio.ensure_future(end.connection.read(memory, remote))
                end.watch_read(theirs, ours, theirs.size, reading)

        self._call(start, end.side)

    @action(number=numbers)
    def fetch_add(self, number: int) -> None:
        """Count in the peer's first cell."""
        if (end := self._end(number)) is None:
            return
        cell = end.peer.arena.cells[0]

        def start() -> None:
            end.watch_add(asyncio.ensure_future(end.connection.fetch_add(cell.remote, 1)))

        self._call(start, end.side)

    @action(number=numbers, is_view=st.booleans())
    def receive(self, number: int, is_view: bool) -> None:
        """Start a task that receives a message, or holds a view of it."""
        end = self._end(number)
        if end is None or not end.is_pooled:
            return
        found = end

        def start() -> None:
            if is_view:
                found.watch_task("receive_view", found.hold_view(self._event()))
            else:
                found.watch_task("receive", found.receive())

        self._call(start, end.side)

    @action(number=numbers, place=numbers, is_window=st.booleans())
    def offer(self, number: int, place: int, is_window: bool) -> None:
        """Grant a cell to the peer, or bind a window to it."""
        if (end := self._end(number)) is None:
            return
        cell = end.arena.find(place, 64)
        if cell is None:
            return
        found = cell
        found.is_offered = True

        def start() -> None:
            way = end.offer_window if is_window else end.offer_grant
            end.watch_offer(found, "window" if is_window else "grant", way(found, self._event()))

        self._call(start, end.side)

    @action(number=numbers)
    def release(self, number: int) -> None:
        """Let a view, grant or window go."""
        if self.releases:
            self.releases.pop(number % len(self.releases)).set()

    @action(number=numbers)
    def write_late(self, number: int) -> None:
        """Write through a grant or window that has ended: this ends the connection."""
        if (end := self._end(number)) is not None:
            self._call(lambda: self._write_late(end), end.side)

    def _write_late(self, end: End) -> None:
        for remote in end.peer.withdrawn[-1:]:
            end.pair.is_disturbed = True
            with suppress(*PERMITTED):
                end.watch_late_write(end.connection.post_write(bytes(remote.length), remote))

    @action(number=numbers)
    def cancel(self, number: int) -> None:
        """Cancel a task."""
        tasks = [
            (operation.running, end.side)
            for pair in self.pairs
            for end in pair.ends
            for operation in end.operations
            if isinstance(operation.running, asyncio.Task)
        ]
        if tasks:
            task, side = tasks[number % len(tasks)]
            self._call(task.cancel, side)

    # -- the loop, memory and faults ------------------------------------------------------------

    @action(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        """Run some iterations of the loop."""

        async def steps_() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self._run(steps_(), steps % 2)

    @action(milliseconds=st.integers(1, 3))
    def rest(self, milliseconds: int) -> None:
        """Let the device work."""
        self._run(asyncio.sleep(milliseconds / 1000), CLIENT)

    @action(number=numbers, size=st.sampled_from([256, 256, 512, 1024]))
    def take_blocks(self, number: int, size: int) -> None:
        """Lease free blocks and overwrite them; keep some, which nobody else may write to."""

        def take() -> None:
            leases = [self._pool.lease(size) for _ in range(24)]
            for place, lease in enumerate(leases):
                data = bytes([(number + place) % 256]) * size
                lease.memory.view[:size] = data
                if place % 8 == 0 and len(self.leases) < 30:
                    self.leases.append((lease, data))
                else:
                    lease.release()

        with suppress(*PERMITTED):  # an injected fault: no memory
            self._call(take, CLIENT)

    @action()
    def give_blocks(self) -> None:
        """Give the kept blocks back."""
        self._call(self._give_blocks, CLIENT)

    def _give_blocks(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()

    @property
    def _pool(self) -> BufferPool:
        return pool_of(self.anchor[0])

    @action(kind=st.integers(0, 15), after=st.integers(0, 8))
    def fault(self, kind: int, after: int) -> None:
        """Inject a fault. The first five disturb nothing but the time."""
        chance = 0.5
        gentle: list[Callable[[], object]] = [
            lambda: self.faults.delay_completions(0.002, spread=0.003, chance=chance, times=9),
            lambda: self.faults.spurious_events(chance=chance, times=9),
            lambda: self.faults.merge_events(0.002, chance=chance, times=9),
            lambda: self.faults.receiver_not_ready(0.003, after=after),
            lambda: self.faults.delay_connection(0.003, after=after),
        ]
        harsh: list[Callable[[], object]] = [
            lambda: self.faults.drop_connection(after_requests=after),
            lambda: self.faults.drop_connection(after_bytes=100 * after),
            lambda: self.faults.silence_peer(0.02, after=after),
            lambda: self.faults.refuse_post(errno.ENOMEM, after=after),
            lambda: self.faults.refuse_connection(after=after),
            lambda: self.faults.refuse_call("reg_mr", after=after),
            lambda: self.faults.refuse_call("create_cq", after=after),
            lambda: self.faults.refuse_call("cm_create_qp", after=after),
            lambda: self.faults.refuse_call("create_comp_channel", after=after),
        ]
        if kind >= len(gentle) and after % 2:
            return  # most runs shall have connections that nothing disturbs
        chosen = (gentle + harsh)[kind % len(gentle + harsh)]
        if chosen in harsh:
            self.are_all_disturbed = True
            for pair in self.pairs:
                pair.is_disturbed = True
        chosen()

    @action()
    def collect_garbage(self) -> None:
        """Let the garbage collector run."""
        self._call(gc.collect, len(self.history) % 2)

    # -- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Check memory, requests and queues."""
        self._call(self._check, CLIENT)

    def _check(self) -> None:
        for pair in self.pairs:
            for end in pair.ends:
                end.update()
        for pair in self.pairs:
            for end in pair.ends:
                end.check()
        for lease, data in self.leases:
            found = bytes(lease.memory.view[: len(data)])
            assert found == data, "a leased block has changed"
        assert not self.place.reported, self.place.reported

    def _quiet(self) -> None:
        """Receive everything until every request and task is over."""
        for release in self.releases:
            release.set()
        deadline = self.place.now() + PATIENCE
        while True:
            self.check()
            ends = [end for pair in self.pairs for end in pair.ends]
            busy = [operation for end in ends for operation in end.operations]
            owing = [
                end for end in ends if not end.pair.is_disturbed and end.out.owed - end.out.received
            ]
            if not busy and not owing:
                return
            now = self.place.now()
            assert now < deadline, f"not over within {PATIENCE} s: {busy} {owing}"
            for side in SIDES:
                self._run(self._receive_all([end for end in ends if end.side == side]), side)
            for operation in busy:
                running = operation.running
                if isinstance(running, asyncio.Task) and operation.what.startswith("receive"):
                    self._call(running.cancel, operation.end.side)
            self._run(asyncio.sleep(0.001), CLIENT)

    async def _receive_all(self, ends: list[End]) -> None:
        for end in ends:
            with suppress(TimeoutError, *PERMITTED):
                if not end.is_pooled:
                    cell = end.inbox.find(0)
                    if cell is not None:
                        end.watch_receive(cell, end.connection.post_recv(cell.memory))
                    continue
                async with asyncio.timeout(0.001):
                    await end.receive()

    @property
    def _connections(self) -> list[tuple[aiordma.Connection, int]]:
        ends = [(end.connection, end.side) for pair in self.pairs for end in pair.ends]
        return [*ends, *((self.anchor[side], side) for side in SIDES)]

    def _close_all(self) -> None:
        for pair in self.pairs:
            for end in pair.ends:
                self._call(partial(self._write_late, end), end.side)
        self._quiet()
        for pair in self.pairs:
            pair.is_disturbed = True
        for task in [self._start(each.aclose(), side) for each, side in self._connections]:
            self.place.finish(task)
        self._run(self.listener.aclose(), SERVER)
        assert all(is_closed(each) for each, _ in self._connections)
        self.check()
        for side in SIDES:
            self._run(close_unused_reactors(), side)

    def _clean_up(self) -> None:
        """Leave nothing after a failure, whose report counts."""
        self._call(self._give_blocks, CLIENT)
        for side in SIDES:
            self._run(_cancel_all(), side)
        for each, side in self._connections:
            self._run(each.aclose(), side)
        self._run(self.listener.aclose(), SERVER)
        for side in SIDES:
            self._run(close_unused_reactors(), side)

    def teardown(self) -> None:
        """End everything in bounded time, and compare what is left with what was before."""
        with self.recording():
            self._end_everything()

    def _end_everything(self) -> None:
        self.faults.__exit__(None, None, None)
        try:
            if self.has_failed:
                self._clean_up()
                return
            self._quiet()
            self._call(self._give_blocks, CLIENT)
            self._close_all()
        finally:
            self.place.close()
        # A lost completion or a slot that is not given back has been found by now; objects here.
        left = self.place.left()
        assert not any(left.values()), f"left: {left}"
