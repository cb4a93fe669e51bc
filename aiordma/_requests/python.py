"""The backend in Python: the in-flight table, work requests, the drain. `python_ports` has its
ports.

It has the same interface as the backend in C (`_native/engine/`), for comparison with it. `select`
chooses one of them. Both post and drain with the same C functions (data_path.c). This backend is
slower: it does not poll in an await or in a post to a full queue, and a task that a completion
wakes runs in the event loop's next iteration.

wr_id = generation << 32 | slot. The entry in the table owns the memory that the device may access.
Only the completion removes the entry and frees the memory. If a slot was reused, a completion for
its old generation is dropped.

No verb cancels a single posted request. So cancelling a task that awaits a request only abandons
the result. The request stays in flight, and its memory stays held, until the completion arrives or
the queue pair is destroyed.
"""

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import takewhile
from time import monotonic_ns
from typing import Any, Generic, Protocol, TypeVar

from aiordma._base.errors import detached
from aiordma._base.ranges import RemoteMemory
from aiordma._loop.ending import ATTEMPTS
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._native import ffi, lib
from aiordma.verbs import MemoryRegion, MemorySlice, WorkCompletion
from aiordma.verbs.completion import COMPLETION

__all__ = (
    "BATCH",
    "Drain",
    "Entry",
    "Holdable",
    "InFlightTable",
    "OpenRequests",
    "RequestOwner",
    "WorkRequest",
    "begin_trace",
    "take_trace",
)

logger = logging.getLogger("aiordma")

_BYTE_LEN = WorkCompletion._fields.index("byte_len")

BATCH = 256
"""Completions of one poll, at most."""
SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATION_MASK = (1 << (64 - SLOT_BITS)) - 1
MOST_GENERATIONS_DROPPED = 1 << 31
"""`shrink` keeps a slot with a higher generation, because new slots would otherwise begin with a
generation that soon wraps around."""

InTable = TypeVar("InTable")


# -- the in-flight table --------------------------------------------------------------------------


class Entry(Protocol):
    """An entry of the in-flight table."""

    def _complete(self, raw: tuple[int, ...], /) -> None:
        """Take the completion, as a tuple in the order of WorkCompletion's fields."""


class InFlightTable(Generic[InTable]):
    """The entries of requests in flight, by slot. `add` and `take` take constant time."""

    __slots__ = ("_entries", "_first_generation", "_free", "_generations", "_live")

    def __init__(self) -> None:
        self._entries: list[InTable | None] = []
        self._generations: list[int] = []
        self._free: list[int] = []
        self._live = 0
        self._first_generation = 1

    def __len__(self) -> int:
        """Return the number of live entries."""
        return self._live

    @property
    def slots(self) -> int:
        """The size of the table: at least the most live entries since the last `shrink`."""
        return len(self._entries)

    def add(self, entry: InTable, /) -> int:
        """Add an entry, and return its wr_id."""
        if not self._free:
            slot = len(self._entries)
            self._generations[slot:] = [self._first_generation]  # also if there was no memory below
            self._entries.append(None)
            self._free.append(slot)
        slot = self._free[-1]
        wr_id = self._generations[slot] << SLOT_BITS | slot
        if _trace.limit and isinstance(entry, WorkRequest):
            entry._posted = monotonic_ns()
        live = self._live + 1
        # No memory is allocated from here on: without memory, nothing is added.
        self._free.pop()
        self._entries[slot] = entry
        self._live = live
        return wr_id

    def take(self, wr_id: int, /) -> InTable | None:
        """Remove and return the entry of a wr_id; None if it is not, or no longer, in flight."""
        slot = wr_id & SLOT_MASK
        if slot >= len(self._entries) or self._generations[slot] != wr_id >> SLOT_BITS:
            return None
        entry = self._entries[slot]
        if entry is None:
            return None
        # Generation 0 is never used, so that a zeroed wr_id finds no entry.
        generation = self._generations[slot] % GENERATION_MASK + 1
        live = self._live - 1
        self._free.append(slot)
        # No memory is allocated from here on: without memory, nothing is taken.
        self._entries[slot] = None
        self._generations[slot] = generation
        self._live = live
        return entry

    def shrink(self) -> None:
        """Remove the free slots after the last live one. New slots begin with a generation that the
        removed slots have not used, so that a late completion finds no entry."""
        count = len(self._entries)
        while count and self._entries[count - 1] is None:
            if self._generations[count - 1] > MOST_GENERATIONS_DROPPED:
                break
            count -= 1
        self._first_generation = max([self._first_generation, *self._generations[count:]])
        del self._entries[count:], self._generations[count:]
        # Low slots are used first, so that those at the end become free.
        self._free = [slot for slot in reversed(range(count)) if self._entries[slot] is None]

    def age(self, slot: int, generation: int, /) -> bool:
        """Set the generation of a free slot, and return whether the slot was free. For tests of a
        slot's reuse after 2**32 uses."""
        if slot >= len(self._entries) or self._entries[slot] is not None:
            return False
        self._generations[slot] = generation
        return True

    def entries(self) -> list[InTable]:
        """Return the live entries, oldest slot first."""
        return [entry for entry in self._entries if entry is not None]


# -- work requests --------------------------------------------------------------------------------


class Holdable(Protocol):
    """Memory that must not be freed or reused while a request uses it."""

    def _hold(self) -> None:
        """Hold the memory for a request that will be posted. If this raises, it is not posted."""

    def _release(self) -> None:
        """Release the memory, because the request has completed."""


class RequestOwner(Protocol):
    """The endpoint that posted a request."""

    loop: EventLoop

    def request_failed(self, request: "WorkRequest", raw: tuple[int, ...]) -> Exception:
        """Return the error for a failed completion."""

    def request_ended(self, request: "WorkRequest") -> None:
        """Take back the slot of a request that has completed."""

    def request_unretrieved(self, request: "WorkRequest") -> None:
        """Report a failed request whose error was never retrieved. Its finalizer calls this, in any
        thread."""

    def run_ended(self, earlier: "WorkRequest", last: "WorkRequest") -> None:
        """Complete an unsignaled request, because the last request of its run has completed."""


class WorkRequest:
    """A posted work request. Await it for its WorkCompletion; any number of tasks may,
    any number of times.

    `operation` is the name of the request (SEND, RECV, RDMA_READ, RDMA_WRITE, ...),
    `length` the number of its local bytes. If the program does not retrieve an error, by
    awaiting, `result` or `exception`, the error is reported (docs/guarantees.md).

    Raises:
        WorkCompletionError: the awaited request failed.
        NotPostedError, VerbsCallError: the awaited request's chain was not posted.
        RuntimeError: the awaited request is of a chain that is not posted yet.
        EventLoopError: the request was awaited outside of its event loop.

    Cancellation: the request stays in flight and holds its memory. Its completion is then
    discarded.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_completes_as",
        "_error",
        "_has_ended",
        "_held",
        "_inner",
        "_kept",
        "_open",
        "_owner",
        "_posted",
        "_result",
        "_retrieved",
        "_run",
        "_waiters",
        "is_receive",
        "length",
        "operation",
        "remote",
        "wr_id",
    )

    def __init__(
        self,
        owner: RequestOwner,
        operation: str,
        length: int,
        held: Sequence[Holdable],
        remote: RemoteMemory | None = None,
        *,
        is_receive: bool = False,
    ) -> None:
        self.operation: str = operation
        self.length: int = length
        self.remote: RemoteMemory | None = remote
        self.is_receive: bool = is_receive
        self.wr_id: int = 0
        self._completes_as: int = 0
        self._open: OpenRequests | None = None
        self._posted = 0
        self._owner = owner
        self._held = list(held)
        self._kept: list[Callable[[], object]] | None = None
        self._has_ended = False
        self._result: WorkCompletion | None = None
        self._error: Exception | None = None
        self._retrieved = False  # True also if another request reports the error
        self._waiters: list[Waiter] = []
        self._callbacks: list[Callable[[WorkRequest], object]] = []
        self._inner: Callable[[WorkRequest], object] | None = None
        self._run: Sequence[WorkRequest] = ()
        self._hold_all()

    def __repr__(self) -> str:
        state = "in flight"
        if self._error is not None:
            state = f"failed: {type(self._error).__name__}"
        elif self._result is not None:
            state = "done"
        return f"<WorkRequest {self}, wr_id {self.wr_id:#x}, {state}>"

    def __str__(self) -> str:
        text = f"{self.operation} of {self.length} bytes"
        if self.remote is not None:
            text += f" (remote: {self.remote})"
        return text

    def done(self) -> bool:
        """Return whether the request has ended.

        Raises: nothing.
        """
        return self._result is not None or self._error is not None

    def result(self) -> WorkCompletion:
        """Return the completion of an ended request.

        Raises:
            WorkCompletionError: the request failed.
            NotPostedError, VerbsCallError: the request's chain was not posted.
            RuntimeError: the request is still in flight.
        """
        if self._error is not None:
            self._retrieved = True
            raise detached(self._error)
        if self._result is None:
            raise RuntimeError(f"{self!r} has not ended: await it")
        return self._result

    def exception(self) -> Exception | None:
        """Return the error of an ended request, None if it succeeded or is in flight. Each
        call returns an exception of its own, as each await raises one.

        Raises: nothing.
        """
        if self._error is None:
            return None
        self._retrieved = True
        return detached(self._error)

    def _stored_error(self) -> Exception | None:
        """Return the error, or None. Unlike `exception`, it does not count as retrieved, and is no
        copy: do not raise it.
        """
        return self._error

    def add_done_callback(self, callback: Callable[["WorkRequest"], object], /) -> None:
        """Call a function with the request once it has ended: at once if it has ended, otherwise
        on the loop's thread when its completion is delivered. The function should be short.
        Its exceptions are logged.

        Args:
            callback: a function of the request.

        Raises: nothing.
        """
        if self.done():
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def _set_on_done(self, callback: Callable[["WorkRequest"], object], /) -> None:
        """Set the done callback that runs no code of the program's: it may be called inside
        another request's post. It replaces the one before, and is called before the others.
        """
        if self.done():
            self._call(callback)
        else:
            self._inner = callback

    def remove_done_callback(self, callback: Callable[["WorkRequest"], object], /) -> int:
        """Remove a callback, and return how often it had been added. For asyncio.wait.

        Args:
            callback: the function that was added.

        Raises: nothing.
        """
        kept = [known for known in self._callbacks if known != callback]
        removed = len(self._callbacks) - len(kept)
        self._callbacks = kept
        return removed

    def cancelled(self) -> bool:
        """Return False: no verb cancels a posted request. For asyncio.wait.

        Raises: nothing.
        """
        return False

    def __await__(self) -> Generator[Any, Any, WorkCompletion]:
        self._retrieved = True  # also if the await is cancelled
        if self._result is None and self._error is None:
            if not self.wr_id:
                raise RuntimeError(f"{self!r} is part of a chain that is not posted yet")
            waiter = self._owner.loop.waiter()
            self._waiters.append(waiter)
            try:
                yield from waiter.wait().__await__()
            finally:
                self._forget_waiter(waiter)
        return self.result()

    def _hold_all(self) -> None:
        held = 0
        try:
            for memory in self._held:
                memory._hold()
                held += 1
        except BaseException:
            # Without an ExitStack, which needs memory itself.
            while held:
                held -= 1
                self._release(self._held[held])
            raise

    # -- for the hub and the endpoint ---------------------------------------------------------

    def _set_run(self, run: Sequence["WorkRequest"], /) -> None:
        """Complete the unsignaled requests before this one in a run, when this one
        completes.
        """
        self._run = run

    def _complete(self, raw: tuple[int, ...], /) -> None:
        """Complete the request with a work completion. If it raises MemoryError, call it again."""
        if not self.done():
            error = self._owner.request_failed(self, raw) if raw[1] else None
            result = WorkCompletion._make(raw)
            if self._open is not None:
                self._open._count(self, raw)
            # No memory is allocated until the request is done: it is counted once.
            if error is None:
                self._result = result
            else:
                self._take_error(error)
        try:
            with ExitStack() as last_first:
                last_first.callback(self._end)
                for earlier in reversed(list(takewhile(lambda each: each is not self, self._run))):
                    last_first.callback(self._end_earlier, earlier)
        except MemoryError:
            raise
        except BaseException:
            self._run = ()
            raise
        self._run = ()

    def _fail(self, error: Exception, /) -> None:
        """Fail the request without a completion: the queue pair was destroyed, or the request
        was never posted. A request that has completed is not changed. The error is stored:
        raise only copies of it.
        """
        if self.done():
            return
        if self._open is not None:
            self._open._count(self, None)
        self._take_error(error)
        self._end()

    def _take_error(self, error: Exception) -> None:
        self._error = error
        if self._run and self._run[-1] is not self:
            self._retrieved = True  # the last request of its run reports the error

    def __del__(self) -> None:
        # getattr: a request whose constructor failed lacks the attributes.
        if not getattr(self, "_retrieved", True) and self._error is not None:
            self._owner.request_unretrieved(self)

    def _forget_waiter(self, waiter: Waiter, /) -> None:
        """Remove a waiter, so that it is not woken."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _end_earlier(self, earlier: "WorkRequest") -> None:
        if not earlier.done():
            earlier._retrieved = True  # if it fails, this request reports the error
            self._owner.run_ended(earlier, self)

    def _end(self) -> None:
        """Release the memory, give the slot back, wake who waits, and call the callbacks. All is
        done, also if one raises: what finds no memory is tried again. An interrupt is raised again
        after the last one, and so is a lack of memory that lasts."""
        attempts = ATTEMPTS
        raised: BaseException | None = None
        try:
            while True:
                try:
                    self._end_rest()
                    break
                except MemoryError:
                    attempts -= 1
                    if not attempts:
                        raise
                except BaseException as error:
                    raised = error
            if raised is not None:
                raise raised
        finally:
            del raised  # its traceback holds this frame

    def _end_rest(self) -> None:
        while self._held and not self._keeps:
            self._release(self._held.pop(0))
        if not self._has_ended:
            self._owner.request_ended(self)
            self._has_ended = True
        while self._waiters:
            self._waiters[0].wake()
            self._waiters.pop(0)  # last: if there was no memory, it is woken again
        inner = self._inner
        if inner is not None:
            self._inner = None
            self._call(inner)
        while self._callbacks:
            self._call(self._callbacks.pop(0))

    def _release(self, memory: Holdable) -> None:
        try:
            if isinstance(memory, MemorySlice):
                _release_region(memory.region)
            else:
                memory._release()
        except Exception:  # a region's last user closes it, which can fail
            with suppress(MemoryError):
                logger.exception("releasing the memory of %r failed", self)

    def _call_release(self, release: Callable[[], object]) -> None:
        try:
            release()
        except Exception:
            with suppress(MemoryError):
                logger.exception("releasing the memory of %r failed", self)

    def _call(self, callback: Callable[["WorkRequest"], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r failed", self)

    def _drop(self) -> None:
        """Release the memory of a request that the device did not accept, or that has kept it. All
        of it is released, also if one raises, which is logged. If this raises MemoryError, call it
        again."""
        while self._held:
            self._release(self._held.pop(0))
        while self._kept:
            self._call_release(self._kept.pop())

    def _keep_memory(self) -> None:
        """If the request fails, keep its memory until `_drop`: the device may still access it."""
        if self._kept is None and not self.done():
            self._kept = []

    @property
    def _keeps(self) -> bool:
        """Whether the request has failed, and the device may still use its memory."""
        return self._kept is not None and self._error is not None

    def _release_by(self, release: Callable[[], object]) -> None:
        """Call a function that releases memory besides `held`: now, or in `_drop`."""
        if self._kept is not None and self._keeps:
            if release not in self._kept:  # an interrupt may have repeated the call
                self._kept.append(release)
        else:
            release()


def _release_region(region: MemoryRegion) -> None:
    """Count one request less. The last one closes a retired region, again if there was no memory
    for that."""
    region._users -= 1
    if not region._retired or region._users:
        return
    attempts = ATTEMPTS
    while True:
        try:
            region.close()
        except MemoryError:
            attempts -= 1
            if not attempts:
                raise
        else:
            return


class OpenRequests(Collection[WorkRequest]):
    """The requests of one queue pair that have not completed, oldest first."""

    def __init__(self) -> None:
        self._requests: dict[WorkRequest, None] = {}
        self._ended = {False: 0, True: 0}  # by `is_receive`: all that the device had accepted
        self._discarded = self._bytes_sent = self._bytes_received = 0
        self._completed: dict[int, int] = {}
        self._failed: dict[int, int] = {}

    def __contains__(self, request: object) -> bool:
        return isinstance(request, WorkRequest) and request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[WorkRequest]:
        return iter(list(self._requests))  # a copy: ending a request may end others

    def add(self, request: WorkRequest, /) -> None:
        """Add a request."""
        self._requests[request] = None
        request._open = self

    def discard(self, request: WorkRequest, /) -> None:
        """Remove a request, if it is in the collection."""
        if request in self._requests:
            del self._requests[request]
            request._open = None

    def counters(self) -> tuple[int, int, int, int, int, int, dict[int, int], dict[int, int]]:
        """Return the counters of the posted requests: the sends and the receives, how many are in
        flight, how many ended without a completion, the bytes sent and received, the completed
        requests by opcode, the failed ones by status."""
        # Without a wr_id, a request is of a chain that is not posted yet.
        receives = [request.is_receive for request in self if request.wr_id]
        return (
            self._ended[False] + receives.count(False),
            self._ended[True] + receives.count(True),
            len(receives),
            self._discarded,
            self._bytes_sent,
            self._bytes_received,
            dict(self._completed),
            dict(self._failed),
        )

    def _count(self, request: WorkRequest, raw: tuple[int, ...] | None) -> None:
        """Count a request that ends. None: it ends without a completion."""
        if not request.wr_id:
            return  # it was not posted
        kind = bool(request.is_receive)
        ended, discarded = self._ended[kind] + 1, self._discarded
        sent, received = self._bytes_sent, self._bytes_received
        counts: dict[int, int] = {}
        number = count = 0
        if raw is None:
            discarded += 1
        else:
            _, status, opcode, *_ = raw
            counts, number = (self._failed, status) if status else (self._completed, opcode)
            count = counts.setdefault(number, 0) + 1
            if status:
                pass
            elif request.is_receive:
                received += raw[_BYTE_LEN]
            elif opcode == lib.IBV_WC_RDMA_READ:
                received += request.length
            elif opcode in (lib.IBV_WC_SEND, lib.IBV_WC_RDMA_WRITE):
                sent += request.length
        if _trace.limit and request._posted:
            _trace.record(request, raw)
        # No memory is allocated from here on: what raises counts nothing.
        self._ended[kind] = ended
        self._discarded = discarded
        if raw is not None:
            counts[number] = count
        self._bytes_sent, self._bytes_received = sent, received


# -- the trace ------------------------------------------------------------------------------------

Record = tuple[object, str, int, int, int, int, int]
"""Owner, operation, wr_id, bytes, status or -1, and when it was posted and ended."""


class _Trace:
    """The requests that have ended while a trace is on; see `begin_trace`."""

    def __init__(self) -> None:
        self.limit = self.lost = 0
        self.records: list[Record] = []

    def record(self, request: WorkRequest, raw: tuple[int, ...] | None) -> None:
        if len(self.records) >= self.limit:
            self.lost += 1
            return
        status = -1 if raw is None else raw[1]
        size = raw[_BYTE_LEN] if raw and not status and request.is_receive else request.length
        times = request._posted, monotonic_ns()
        self.records.append(
            (request._owner, request.operation, request.wr_id, size, status, *times)
        )


_trace = _Trace()


def begin_trace(limit: int, /) -> None:
    """Record the requests that are posted from now on, when they end. At most `limit` records wait
    for `take_trace`. 0: record no more."""
    _trace.limit = limit


def take_trace() -> tuple[list[Record], int]:
    """Return the records since the last call, and how many were lost because there was no room. The
    times are nanoseconds of time.monotonic_ns()."""
    records, _trace.records = _trace.records, []
    lost, _trace.lost = _trace.lost, 0
    return records, lost


# -- the drain ------------------------------------------------------------------------------------


class Drain:
    """Takes events of a completion channel, arms its queues, and delivers their completions.

    Addresses are those of C structs. A post calls `hub.watch_over` if the watchdog does not run
    (`watched`). `hub.drain_soon` is called if completions are found that cannot be delivered at
    once (`scheduled` is set until they are).
    """

    crossings: int
    delivered: int
    polls: int

    def __init__(
        self, hub: object, provider: int, channel: int, in_flight: InFlightTable[Any]
    ) -> None:
        self.hub: Any = hub
        self.in_flight = in_flight
        self._drain = ffi.new("struct aiordma_drain *")
        self._batch = ffi.new("struct aiordma_completion[]", BATCH)
        self._packed = ffi.buffer(self._batch)
        self._next = self._end = 0  # the completions of the batch that are not delivered yet
        self._drain.provider = ffi.cast("struct aiordma_provider *", provider)
        self._drain.channel = ffi.cast("struct ibv_comp_channel *", channel)
        self._drain.batch = self._batch
        self._drain.capacity = BATCH
        self._queues: Any = None
        self.enabled = True
        """Whether the queues are polled; False once the device has failed."""
        self.draining: bool = False
        """Whether completions are being delivered."""
        self.watched = self.scheduled = False
        self.polls = self.crossings = self.delivered = self.wakes = 0

    def set_queues(self, addresses: list[int], /) -> None:
        """Set the queues to drain. Queues that were drained before stay armed."""
        drain = self._drain
        armed = {drain.queues[i].queue: drain.queues[i].armed for i in range(drain.queue_count)}
        self._queues = ffi.new("struct aiordma_drained_queue[]", max(1, len(addresses)))
        for i, address in enumerate(addresses):
            queue = ffi.cast("struct ibv_cq *", address)
            self._queues[i].queue, self._queues[i].armed = queue, armed.get(queue, 0)
        drain.queues, drain.queue_count = self._queues, len(addresses)

    @property
    def more(self) -> bool:
        """Whether the batch was full, so that `step` must be called again."""
        return bool(self._drain.more)

    @property
    def events(self) -> int:
        """The number of events taken from the channel."""
        return int(self._drain.events)

    def step(self, arm: bool, direct: bool, /) -> int:
        """Take the channel's events, poll a batch and deliver it; then arm, and poll once more.

        Args:
            arm: whether to arm the queues; False: the loop does, before it sleeps.
            direct: whether no task is running, so that woken tasks can run at once.

        Returns:
            The number of completions, or -errno. 0 during another step.
        """
        if self.draining:
            return 0
        self.crossings += 1
        error = lib.aiordma_take_events(self._drain)
        count = error or self._poll_and_deliver()
        # Arm as late as possible, so that requests which complete in the meantime need no event.
        # Poll after arming for the requests that completed before it.
        if count >= 0 and arm and self.enabled and not self.more:
            error = lib.aiordma_arm_queues(self._drain) or self._poll_and_deliver()
            count = count + error if error >= 0 else count or error
        return int(count)

    def _poll_and_deliver(self) -> int:
        self.polls += 1
        self.draining = True
        try:
            if self._next < self._end:
                self._drain.more = 1  # the queues are not polled
            else:
                count = int(lib.aiordma_poll_queues(self._drain))
                if count <= 0:
                    return count
                self._next, self._end = 0, count
            return self._deliver()
        finally:
            self.draining = False

    def _deliver(self) -> int:
        """Deliver the batch. What finds no memory is tried again. If that lasts, the next call goes
        on with the same completion."""
        first, attempts = self._next, ATTEMPTS
        entry: Any = None
        interrupt: BaseException | None = None
        try:
            while self._next < self._end:
                try:
                    if entry is None:
                        raw = COMPLETION.unpack_from(self._packed, self._next * COMPLETION.size)
                        entry = self.in_flight.take(raw[0])
                    if entry is not None:  # else its queue pair was destroyed, which ended it
                        entry._complete(raw)
                except MemoryError as raised:
                    attempts -= 1
                    if attempts:
                        continue
                    if entry is None:
                        raise
                    interrupt = interrupt or raised
                except Exception:
                    with suppress(MemoryError):
                        logger.exception("a callback of a completed work request failed")
                except BaseException as raised:  # raised again after the batch
                    interrupt = interrupt or raised
                self._next += 1
                self.delivered += 1
                entry, attempts = None, ATTEMPTS
            if interrupt is not None:
                raise interrupt
            return self._end - first
        finally:
            del interrupt  # its traceback holds this frame

    def forget_arming(self) -> None:
        """Treat all queues as not armed, because an event may have been lost."""
        for i in range(self._drain.queue_count):
            self._queues[i].armed = 0
