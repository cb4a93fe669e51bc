"""Pooled receives, and the queues of what arrives in them, of the backend in Python.

A pool's block is posted, its request completes, it waits in the queue of its endpoint, the program
gets its contents, and it is posted again, in a chain with others. The engine in C
(`_native/engine/pooled.c`, `arrivals.c`, `view.c`) has the same classes.
"""

import errno
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from threading import get_ident
from types import TracebackType
from typing import Any
from weakref import finalize, ref

from aiordma._base.enums import WorkCompletionFlag, WorkCompletionOpcode
from aiordma._loop.ending import ATTEMPTS
from aiordma._loop.event_loop import Waiter
from aiordma._native import Lease, Pool
from aiordma._requests.python import WorkRequest
from aiordma._requests.python_ports import Port, SharedPort
from aiordma.verbs import WorkCompletion

__all__ = ("ArrivalQueue", "ArrivalView", "DatagramReceive", "PooledReceives")

logger = logging.getLogger("aiordma")

_WRITTEN = int(WorkCompletionOpcode.RECV_RDMA_WITH_IMM)


class PooledReceives:
    """Posts blocks of a pool, in chains, and passes those that a message arrives in to a queue.

    Args:
        port: the port that posts them.
        pool: the pool that `fill` leases them from.
        refused: called with the errno of a failed post, 0 if the port was not usable. The blocks
            that could not be posted are released.
        members: the queues by queue pair number; None: `set_queue` sets the queue of all arrivals.
    """

    def __init__(
        self,
        port: Port | SharedPort,
        pool: Pool,
        refused: Callable[[int], object],
        members: "dict[int, ArrivalQueue] | None" = None,
    ) -> None:
        self.chain: int = 1
        """The number of blocks that are posted together."""
        self._port, self._pool, self._refused, self._members = port, pool, refused, members
        self._queue: ArrivalQueue | None = None
        self._unposted: list[Lease] = []
        self._doubtful: list[Lease] = []
        self._posted: dict[int, Lease] = {}

    @property
    def posted(self) -> int:
        """The number of posted blocks."""
        return len(self._posted)

    @property
    def unposted(self) -> int:
        """The number of blocks in the next chain."""
        return len(self._unposted)

    def set_queue(self, queue: "ArrivalQueue", /) -> None:
        """Set the queue of all arrivals."""
        self._queue = queue

    def fill(self, count: int, size: int, /) -> None:
        """Lease `count` blocks of `size` bytes, and post them in one call."""
        self._unposted += [self._pool.lease(size) for _ in range(count)]
        self.post_unposted()

    def give_back(self, lease: Lease, /) -> None:
        """Post a block again, with the next chain. If it cannot be posted, it is released."""
        try:
            self._unposted.append(lease)
        except MemoryError:
            _return_block(lease)
            self._refused(errno.ENOMEM)
            return
        if len(self._unposted) >= self.chain or not self._posted:
            self.post_unposted()

    def post_unposted(self) -> None:
        """Post the chain of blocks that were given back."""
        leases = self._unposted
        if not leases:
            return
        error = 0
        try:
            # A shared queue's members can have moved on to another thread with their loop.
            self._port.thread = get_ident()
            requests: list[WorkRequest] = []
            self._unposted = []
            found = self._port.receive_all([lease.memory for lease in leases])
        except MemoryError:
            self._doubtful = leases  # not released: the device may have got some of them
            self._refused(errno.ENOMEM)
            return
        # No memory is allocated for what was posted, but where it is tried again.
        if isinstance(found, tuple):
            error, requests = found
        elif found is not None:
            requests = found
        elif self._port.can_receive and len(leases) > self._port._receives.free:
            error = errno.ENOMEM
        tracked, attempts = 0, ATTEMPTS
        while tracked < len(requests):
            try:
                self._posted[requests[tracked].wr_id] = leases[tracked]
                requests[tracked]._set_on_done(self._arrived)
                tracked += 1
            except MemoryError:
                attempts -= 1
                if not attempts:
                    raise
        while len(leases) > len(requests):
            _return_block(leases.pop())
        if error or found is None:
            self._refused(error)

    def _arrived(self, request: WorkRequest) -> None:
        # An interrupt (KeyboardInterrupt) can end this anywhere. It is then called again.
        lease = self._posted.get(request.wr_id)
        completion = None if request.exception() is not None else request.result()
        queue = self._queue
        if completion is not None and self._members is not None:
            queue = self._members.get(completion.qp_num)
        if lease is not None and request._keeps:
            request._release_by(lease.release)  # first: without memory, this is called again
            del self._posted[request.wr_id]
        elif lease is not None:
            # Python handles no signal between the next statements, only during or after a call.
            del self._posted[request.wr_id]
            if completion is not None and queue is not None:
                queue._arrived.append((lease, completion))
            elif self._members is None:
                _return_block(lease)
            else:
                self.give_back(lease)
        if queue is not None:
            queue.wake()
        if completion is not None and not self._posted:
            self.post_unposted()  # no block might be given back soon to complete a chain


def _return_block(lease: Lease) -> None:
    """Return a block to its pool. An error is logged: what follows must not be left out."""
    try:
        lease.release()
    except Exception:
        with suppress(MemoryError):
            logger.exception("returning the block %r failed", lease)


class ArrivalQueue:
    """The arrivals of one endpoint, for one task at a time.

    Args:
        owner: the Arrivals (`_endpoint/arrivals.py`), which wait for an arrival, and raise the
            errors. Views call `enter`, `end_elsewhere`, `release_later` and `replace`.
        receives: posts the blocks.
        port: the endpoint's port.
        pause: how many arrivals are handed out before other tasks run.
        most_views: with so many views, nothing more can arrive.
    """

    def __init__(
        self, owner: Any, receives: PooledReceives, port: Port, pause: int, most_views: int
    ) -> None:
        self.busy: bool = False
        """Whether a task is receiving."""
        self.fed: bool = False
        """Whether blocks are posted for it."""
        self.pause: int = pause
        """How many arrivals are handed out before other tasks run."""
        self.at_once: int = 0
        """How many arrivals were handed out since the task last paused."""
        self.views: int = 0
        """The number of blocks that the program holds by views."""
        self.most_views: int = most_views
        """With so many views, nothing more can arrive."""
        self._owner: Any = owner
        self._receives = receives
        self._arrived: deque[tuple[Lease, WorkCompletion]] = deque()
        self._waiter: Waiter | None = None

    @property
    def arrived(self) -> int:
        """The number of arrivals."""
        return len(self._arrived)

    def take_data_at_once(self) -> bytes | None:
        """Return None: this backend waits first."""
        return None

    def take_data(self) -> bytes:
        """Return a copy of the first arrival, which exists, and give back its block. If there is no
        memory for the copy, the arrival stays the first one."""
        data: bytes = self._take_as(_copy)
        return data

    def take_datagram_at_once(self, senders: Any, /) -> Any:
        """Return None: this backend waits first."""
        return None

    def take_datagram(self, senders: Any, /) -> Any:
        """Return the first arrival, which exists, as a datagram, and give back its block."""
        return self._take_as(
            lambda lease, completion: senders.message(lease.memory.view, completion)
        )

    def take_message_at_once(self, message: Callable[..., Any], /) -> Any:
        """Return None: this backend waits first."""
        return None

    def take_message(self, message: Callable[..., Any], /) -> Any:
        """Return the first arrival, which exists, as a message of this class, and give back its
        block."""
        return self._take_as(lambda lease, completion: _message(message, lease, completion))

    def _take_as(self, contents: Callable[[Lease, WorkCompletion], Any]) -> Any:
        arrival = self._take()
        try:
            made = contents(*arrival)
        except MemoryError:
            self._arrived.appendleft(arrival)
            raise
        except BaseException:
            self._receives.give_back(arrival[0])
            raise
        self._receives.give_back(arrival[0])
        return made

    def _take(self) -> tuple[Lease, WorkCompletion]:
        if not self._arrived:
            raise RuntimeError("there is no arrival: wait until there is one")
        return self._arrived.popleft()

    def begin_wait(self) -> Waiter | None:
        """Return None: in this backend, the caller checks whether the task may wait."""
        return None

    def end_wait(self) -> None:
        """Forget the waiter: the task waits no longer."""
        self.busy = False
        self.at_once = 0
        self._waiter = None

    def set_waiter(self, waiter: Waiter, /) -> None:
        """Wake this waiter at the next arrival."""
        self._waiter = waiter

    def wake(self) -> None:
        """Wake the task that waits."""
        if self._waiter is not None:
            self._waiter.wake()

    def discard(self) -> None:
        """Drop all arrivals: give back their blocks."""
        while self._arrived:
            lease, _ = self._arrived.popleft()
            self._receives.give_back(lease)
        self._receives.post_unposted()
        self.wake()

    def view(self) -> "ArrivalView":
        """Return a context manager for the next arrival, which hands out its block as a view."""
        return ArrivalView(self)


class ArrivalView:
    """One arrival as a view of its block, in an `async with` block. Made by `ArrivalQueue.view`."""

    __slots__ = ("_entered", "_exporter", "_lease", "_queue", "_view")

    def __init__(self, queue: ArrivalQueue) -> None:
        self._queue = queue
        self._entered = False
        self._lease: Lease | None = None

    async def __aenter__(self) -> memoryview:
        if self._entered:
            raise ValueError("a receive_view() is entered once: call it for each message")
        self._entered = True
        view: memoryview = await self._queue._owner.enter(self)
        return view

    def _open(self) -> memoryview:
        """Take the first arrival, which exists, and return the memoryview."""
        arrival = self._queue._take()
        lease, completion = arrival
        try:
            # The exporter lives as long as the view, and everything that the program made of it.
            exporter = lease.memory._export(_contents_length(completion))
            self._view, self._exporter = memoryview(exporter).toreadonly(), ref(exporter)
        except MemoryError:
            self._queue._arrived.appendleft(arrival)
            raise
        self._lease = lease
        self._queue.views += 1
        return self._view

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        # Not a coroutine, whose first step a SIGINT can prevent: the block would be lost.
        if self._lease is None:
            raise ValueError("this receive_view() was not entered")
        with suppress(BufferError):  # an array was made of the view, and uses it
            self._view.release()
        if self._queue._owner.thread == get_ident():
            self._end()
        else:
            self._queue._owner.end_elsewhere(self)
        return _Ended()

    def _end(self) -> None:
        """Give back the block of a view that is released, or another one while the program uses
        it."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._queue.views -= 1
        used, owner = self._exporter(), self._queue._owner
        if used is None:
            self._queue._receives.give_back(lease)
            return
        # First, so that the block is returned at last, whatever becomes of its replacement.
        finalize(used, owner.release_later(lease)).atexit = False
        del used  # a traceback that is logged must not keep it
        try:
            owner.replace(lease)
        except Exception:
            logger.exception("replacing a block of %r failed", self)


class _Ended:
    """What `async with` awaits, after the end of a view."""

    __slots__ = ()

    def __await__(self) -> Iterator[None]:
        return iter(())


def _copy(lease: Lease, completion: WorkCompletion) -> bytes:
    return lease.memory._copy(_contents_length(completion))


def _message(message: Callable[..., Any], lease: Lease, completion: WorkCompletion) -> Any:
    data = _copy(lease, completion)
    if completion.opcode == _WRITTEN:
        return message(data, completion.immediate, None, completion.byte_len)
    if completion.wc_flags & WorkCompletionFlag.WITH_IMM:
        return message(data, completion.immediate)
    if completion.wc_flags & WorkCompletionFlag.WITH_INV:
        return message(data, None, completion.immediate)
    return message(data)


def _contents_length(completion: WorkCompletion) -> int:
    """Return the number of bytes of an arrival in its block. The bytes of a WRITE are in the memory
    that it wrote to."""
    return 0 if completion.opcode == _WRITTEN else completion.byte_len


class DatagramReceive:
    """A receive that is posted into your own memory. Await it for its DatagramArrival. Any number
    of tasks may await it, any number of times.

    `request` is the WorkRequest. The byte_len of its completion includes the 40 bytes of the GRH,
    which are stored in separate memory.

    Raises:
        as `WorkRequest`.

    Cancellation: the receive stays posted, and its memory is held.
    """

    __slots__ = ("_arrival", "_header", "_senders", "request")

    def __init__(self, request: WorkRequest, header: Lease, senders: Any) -> None:
        self.request: WorkRequest = request
        self._header = header
        self._senders = senders
        self._arrival: Any = None
        request.add_done_callback(self._ended)

    def _ended(self, request: WorkRequest) -> None:
        if request.exception() is None:
            grh = bytes(self._header.memory.view)
            self._arrival = self._senders.arrival(grh, request.result())
        request._release_by(self._header.release)

    def __repr__(self) -> str:
        return f"<DatagramReceive {self.request!r}>"

    def done(self) -> bool:
        """Return whether the receive has completed.

        Raises: nothing.
        """
        return self.request.done()

    def result(self) -> Any:
        """Return the arrival of a completed receive.

        Raises:
            WorkCompletionError: the receive failed.
            RuntimeError: the receive is still in flight.
        """
        self.request.result()  # or raise
        return self._arrival

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from self.request.__await__()
        return self.result()
