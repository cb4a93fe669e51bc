"""What a correct library may do with connections, beside what it does: the model of the state
machine in test_machine.py.

Each operation has an expected effect: a message that arrives at most once, or bytes of one cell.
An operation that fails or is cancelled leaves the effect open, until the device is done with it.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

import aiordma
from tests.cells import POISON, Arena, Cell
from tests.internals import endpoint_of, has_ended, hub_of, queues_of

__all__ = ("CELLS", "End", "Operation", "Pair")

CELLS = [8, 64, 64, 64, 256, 256, 600, 600, 600, 600, 70_000]
"""The sizes of an end's cells. The first one counts the peer's fetch-and-adds."""
POOLED, POSTED = 256, 600
"""The longest message to an end with pooled receives, and to one that posts its own."""
PERMITTED = (aiordma.RdmaError, anyio.BusyResourceError, anyio.EndOfStream)


class Operation:
    """A posted request or a running task, and what follows from its outcome.

    Args:
        what: a name, for messages.
        end: the side that does it.
        running: the request or the task.
        succeeded: called with the result.
        unknown: called if it failed or was cancelled, so that its effect may yet come.
    """

    def __init__(
        self,
        what: str,
        end: "End",
        running: aiordma.WorkRequest | asyncio.Task[Any],
        succeeded: Callable[[Any], object],
        unknown: Callable[[], object],
    ) -> None:
        self.what = what
        self.end = end
        self.running = running
        self.may_fail = False
        """Whether it may fail although nothing disturbs the connection."""
        self._succeeded = succeeded
        self._unknown = unknown
        if isinstance(running, aiordma.WorkRequest):
            running.add_done_callback(aiordma.WorkRequest.exception)

    @property
    def is_over(self) -> bool:
        """Whether the request or the task is done."""
        return self.running.done()

    def conclude(self) -> None:
        """Note the outcome."""
        if self.running.cancelled():
            self._unknown()
            return
        error = self.running.exception()
        if error is None:
            self._succeeded(self.running.result())
            return
        if not isinstance(error, PERMITTED):
            raise error
        if not self.may_fail:
            self.end.expect_error(self.what, error)
        self._unknown()

    def __repr__(self) -> str:
        return f"{self.what} of {self.end}"


class Direction:
    """The messages that one end sends."""

    def __init__(self) -> None:
        self.sent: dict[int, bytes] = {}
        self.received: set[int] = set()
        self.order: list[int] = []
        """The posted messages that have not arrived: they arrive in this order."""
        self.owed: set[int] = set()
        """The messages whose send has succeeded: they arrive unless the connection ends."""

    def arrived(self, data: bytes) -> None:
        """Check a message, and note its arrival."""
        number = int.from_bytes(data[:4], "little")
        assert number in self.sent, f"a message that was not sent: {data[:8]!r}"
        assert number not in self.received, f"message {number} has arrived twice"
        assert data == self.sent[number], f"message {number} has other bytes than were sent"
        self.received.add(number)
        if number in self.order:
            assert self.order[0] == number, f"{self.order[0]} should come before {number}"
            self.order.pop(0)

    def forget(self, number: int) -> None:
        """The send of a message has failed: it may arrive or not."""
        if number in self.order:
            self.order.remove(number)


class End:
    """One side of a pair: its connection, memory and operations."""

    def __init__(self, pair: "Pair", name: str, side: int, connection: aiordma.Connection) -> None:
        self.pair = pair
        self.name = name
        self.side = side
        self.connection = connection
        self.is_pooled = bool(connection.options.receive_buffers)
        self.arena = Arena(connection, name, CELLS)
        self.inbox = Arena(connection, f"{name}'s inbox", [POSTED] * 8)
        """For receives only: the messages in front of a WRITE need receives, before it is done."""
        self.arena.cells[0].is_lent = True
        self.arena.buffer[64:72] = bytes(8)
        self.out = Direction()
        self.peer: End
        self.operations: list[Operation] = []
        self.receives: list[tuple[aiordma.WorkRequest, Cell]] = []
        self.orphans: list[tuple[Cell, Cell | None]] = []
        """Cells that a request of this end may change or not, and the cell that it reads."""
        self.views: list[tuple[memoryview, bytes]] = []
        self.offers: list[tuple[aiordma.RemoteMemory, Cell]] = []
        """Cells to which the peer has access by a grant or a window."""
        self.withdrawn: list[aiordma.RemoteMemory] = []
        """What the peer had access to, and has no more."""
        self.adds = 0
        self.added: set[int] = set()

    def __repr__(self) -> str:
        return self.name

    def expect_error(self, what: str, error: BaseException) -> None:
        """Fail if nothing that the test did explains the error."""
        if isinstance(error, aiordma.QueueFullError | anyio.BusyResourceError):
            return
        assert self.pair.is_disturbed, f"{what} of {self.name} failed: {error!r}"

    @property
    def longest(self) -> int:
        """The longest message that this end may send."""
        return POOLED if self.peer.is_pooled else POSTED

    # -- operations -----------------------------------------------------------------------------

    def message(self, size: int) -> tuple[int, bytes]:
        """Make a message that no other one equals."""
        number = self.pair.next_number()
        size = max(4, min(size, self.longest))
        data = number.to_bytes(4, "little") + random.Random(number).randbytes(size - 4)
        self.out.sent[number] = data
        return number, data

    def watch_message(
        self, number: int, running: aiordma.WorkRequest | asyncio.Task[Any], posted: bool
    ) -> None:
        """Expect the message to arrive, once; if it was posted, in order."""
        if posted:
            self.out.order.append(number)
        self._watch(
            f"send of message {number}",
            running,
            lambda _: self.out.owed.add(number),
            lambda: self.out.forget(number),
        )

    def watch_write(
        self, cell: Cell, data: bytes, running: aiordma.WorkRequest | asyncio.Task[Any]
    ) -> None:
        """Expect the data in a cell of the peer's."""
        cell.begin(data)

        def succeeded(_: object) -> None:
            if cell.future is not None:  # else the access was taken away meanwhile
                cell.finish()

        self._watch("write", running, succeeded, lambda: self.orphans.append((cell, None)))

    def watch_read(
        self,
        source: Cell,
        target: Cell,
        length: int,
        running: aiordma.WorkRequest | asyncio.Task[Any],
    ) -> None:
        """Expect the bytes of a cell of the peer's in a cell of this end's."""
        target.begin(bytes(source.contents[:length]), length if self.pair.is_simulated else 0)
        source.readers += 1

        def succeeded(_: object) -> None:
            source.readers -= 1
            target.finish()

        self._watch("read", running, succeeded, lambda: self.orphans.append((target, source)))

    def watch_late_write(self, request: aiordma.WorkRequest) -> None:
        """Expect that a write to withdrawn memory fails."""

        def succeeded(_: object) -> None:
            raise AssertionError("a write through a grant or window that has ended")

        self._watch("late write", request, succeeded, lambda: None)

    def watch_add(self, running: asyncio.Task[int]) -> None:
        """Expect a value that no other fetch-and-add of this end has returned."""
        self.adds += 1

        def succeeded(before: int) -> None:
            assert before not in self.added, f"two fetch-and-adds have returned {before}"
            assert before < self.adds
            self.added.add(before)

        self._watch("fetch_add", running, succeeded, lambda: None)

    def watch_source(
        self, cell: Cell, number: int, request: aiordma.WorkRequest, posted: bool
    ) -> None:
        """As `watch_message`, for a message that is in a cell of this end's."""
        cell.readers += 1

        def over(_: object) -> None:
            cell.readers -= 1

        request.add_done_callback(over)
        self.watch_message(number, request, posted)

    def watch_receive(self, cell: Cell, request: aiordma.WorkRequest) -> None:
        """Expect a message in the cell."""
        request.add_done_callback(aiordma.WorkRequest.exception)
        cell.is_lent = True
        self.receives.append((request, cell))

    def watch_task(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a task whose result says nothing."""
        self._watch(what, asyncio.ensure_future(coroutine), lambda _: None, lambda: None)

    def watch_offer(self, cell: Cell, what: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a task that gives the peer access to a cell."""

        def over(_: object = None) -> None:
            cell.is_offered = False

        self._watch(what, asyncio.ensure_future(coroutine), over, over)

    def _watch(self, what: str, running: Any, succeeded: Any, unknown: Any) -> None:
        self.operations.append(Operation(what, self, running, succeeded, unknown))

    # -- coroutines that check what they get ------------------------------------------------------

    async def receive(self) -> None:
        """Receive a message, and check it."""
        self.peer.out.arrived(await self.connection.receive())

    async def hold_view(self, release: asyncio.Event) -> None:
        """Hold a view until the event."""
        async with self.connection.receive_view() as view:
            held = (view, bytes(view))
            self.peer.out.arrived(held[1])
            self.views.append(held)
            try:
                await release.wait()
            finally:
                self.views.remove(held)
                assert bytes(view) == held[1]

    async def offer_grant(self, cell: Cell, release: asyncio.Event) -> None:
        """Grant a cell until the event. From then on no byte arrives there."""
        access = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
        async with self.connection.grant(cell.memory, access) as grant:
            offer = (grant.remote, cell)
            self.offers.append(offer)
            try:
                await release.wait()
            finally:
                self.offers.remove(offer)
                if not cell.is_free:
                    self.pair.is_disturbed = True  # the peer's request fails
        if cell.future is not None:
            cell.freeze()
        self.withdrawn.append(grant.remote)

    async def offer_window(self, cell: Cell, release: asyncio.Event) -> None:
        """Bind a window to a cell until the event."""
        access = aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
        window = await self.connection.bind(cell.memory, access)
        offer = (window.remote, cell)
        self.offers.append(offer)
        try:
            await release.wait()
        finally:
            self.offers.remove(offer)
            if not cell.is_free:
                self.pair.is_disturbed = True
            try:
                await self.connection.revoke(window)
                self.withdrawn.append(offer[0])
                if cell.future is not None:
                    cell.freeze()
            finally:
                window.close()

    # -- checks -----------------------------------------------------------------------------------

    def update(self) -> None:
        """Note the outcomes of what is over, in the order in which it began."""
        for operation in [each for each in self.operations if each.is_over]:
            self.operations.remove(operation)
            operation.conclude()
        while self.receives and self.receives[0][0].done():
            request, cell = self.receives.pop(0)
            if request.exception() is None:
                length = request.result().byte_len
                before = bytes(cell.contents)
                if self.pair.is_simulated:
                    before = POISON * len(before)
                cell.freeze()
                assert cell.contents[length:] == before[length:], "bytes behind a message changed"
                self.peer.out.arrived(bytes(cell.contents[:length]))
            else:
                cell.freeze()
        self._adopt_orphans()

    def _adopt_orphans(self) -> None:
        slots = endpoint_of(self.connection).work.sends.slots
        is_idle = (
            not has_ended(self.connection)
            and slots.free == slots.total
            and not self.operations
            and self.connection.cause is None
        )
        for orphan in list(self.orphans):
            cell, source = orphan
            owner = self if cell.arena is self.arena else self.peer
            if cell.future is not None and not is_idle and not has_ended(owner.connection):
                continue
            self.orphans.remove(orphan)
            if source is not None:
                source.readers -= 1
            if cell.future is None:
                continue
            if has_ended(owner.connection):
                cell.freeze()
            else:
                cell.settle()

    def check(self) -> None:
        """Compare memory, queues and requests with what they can be."""
        self.arena.check()
        self.inbox.check()
        for view, data in self.views:
            assert bytes(view) == data, "a held view has changed"
        for memory, cell in self.offers:
            assert memory.length == cell.size
        count = int.from_bytes(self.arena.buffer[64:72], "little")
        assert len(self.peer.added) <= count <= self.peer.adds, "a fetch-and-add too many or few"
        cause = self.connection.cause
        assert cause is None or self.pair.is_disturbed, f"{self.name} has ended: {cause!r}"
        self._check_queues()

    def _check_queues(self) -> None:
        endpoint = endpoint_of(self.connection)
        if has_ended(self.connection):
            late = [
                each
                for each in self.operations
                if isinstance(each.running, aiordma.WorkRequest) and not each.is_over
            ]
            assert not late, f"{self.name} has ended, but not {late}"
            assert all(request.done() for request, _ in self.receives)
            assert not list(endpoint.work.requests)
            return
        open_requests = list(endpoint.work.requests)
        for slots, is_receive in (
            (endpoint.work.sends.slots, False),
            (endpoint.work.receives.slots, True),
        ):
            count = sum(each.is_receive is is_receive for each in open_requests)
            used = slots.total - slots.free
            assert 0 <= slots.free <= slots.total, f"{slots.free} of {slots.total} slots are free"
            assert count <= used <= count + len(self.operations) + 1, (count, used)
        hub = hub_of(self.connection)
        queues = queues_of(hub)
        assert all(0 <= queue.reserved <= queue.queue.cqe for queue in queues)
        assert len(hub.in_flight) <= sum(queue.reserved for queue in queues)


class Pair:
    """Two connected ends."""

    def __init__(
        self, number: int, next_number: Callable[[], int], is_simulated: bool = False
    ) -> None:
        self.is_simulated = is_simulated
        self.is_disturbed = False
        """Whether the test did something that may end the connection."""
        self.next_number = next_number
        self.ends: list[End] = []
        self._number = number

    def add_end(self, side: int, connection: aiordma.Connection) -> None:
        """Add the client's end (side 0), then the server's."""
        name = f"{('client', 'server')[side]} {self._number}"
        self.ends.append(End(self, name, side, connection))
        self.ends[0].peer, self.ends[-1].peer = self.ends[-1], self.ends[0]
