"""The backend in Python: the in-flight table, work requests, the drain, the ports.

It has the interface of the one in C (`_native/engine/`), by the same names, and is what that one is
compared with: `select` chooses. Both post and drain by the same functions of C (data_path.c). What
this one leaves out is speed: it does not poll in an await or in a post to a full queue, and a task
that a completion wakes runs in the event loop's next round.

wr_id = generation << 32 | slot. The entry in the table owns whatever the device may access until
the completion takes it out, and nothing else frees that. A completion whose slot was reused has an
old generation and is dropped.

The rule of cancellation: no verb takes one posted request back, so cancelling a task that awaits a
request abandons the result and nothing else. The request stays in flight, and what the device may
access stays held, until the completion arrives or the queue pair is destroyed.
"""

import errno
import logging
import struct
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from itertools import takewhile
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar

from aiordma._base.errors import detached
from aiordma._base.interrupts import deferring
from aiordma._base.process import here
from aiordma._base.ranges import RemoteMemory
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._native import Part, Slots, ffi, lib
from aiordma.verbs import MemorySlice, WorkCompletion
from aiordma.verbs.completion import COMPLETION
from aiordma.verbs.memory import address_of, flat_view
from aiordma.verbs.send_work import RECEIVE_REQUEST, pack_plain

__all__ = (
    "BATCH",
    "ChainPort",
    "ClosedPort",
    "Drain",
    "Entry",
    "Holdable",
    "InFlightTable",
    "OpenRequests",
    "Port",
    "RequestOwner",
    "SharedPort",
    "WorkRequest",
)

logger = logging.getLogger("aiordma")

BATCH = 256
"""Completions of one poll, at most."""
SGE = struct.Struct("=QII")
"""struct ibv_sge: address, length, lkey."""
SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATION_MASK = (1 << (64 - SLOT_BITS)) - 1
MOST_GENERATIONS_DROPPED = 1 << 31
"""A slot that has had more generations is kept, so that those that follow do not go round soon."""

_SEND, _WRITE, _READ = lib.IBV_WR_SEND, lib.IBV_WR_RDMA_WRITE, lib.IBV_WR_RDMA_READ
_COMPLETES_AS = {_SEND: lib.IBV_WC_SEND, _WRITE: lib.IBV_WC_RDMA_WRITE, _READ: lib.IBV_WC_RDMA_READ}
_SIGNALED, _INLINE = int(lib.IBV_SEND_SIGNALED), int(lib.IBV_SEND_INLINE)

InTable = TypeVar("InTable")


# -- the in-flight table --------------------------------------------------------------------------


class Entry(Protocol):
    """What the in-flight table keeps."""

    def complete(self, raw: tuple[int, ...], /) -> None:
        """Take the completion, in the fields' order of WorkCompletion."""


class InFlightTable(Generic[InTable]):
    """Slots of live entries. `add` and `take` take constant time; it grows by need."""

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
        """How many there are: as many as were needed at once since the last `shrink`, or more."""
        return len(self._entries)

    def add(self, entry: InTable, /) -> int:
        """Keep the entry, and return the wr_id that finds it."""
        if self._free:
            slot = self._free.pop()
            self._entries[slot] = entry
        else:
            slot = len(self._entries)
            self._entries.append(entry)
            self._generations.append(self._first_generation)
        self._live += 1
        return self._generations[slot] << SLOT_BITS | slot

    def take(self, wr_id: int, /) -> InTable | None:
        """Remove and return the entry of a wr_id; None if it is not, or no longer, in flight."""
        slot = wr_id & SLOT_MASK
        if slot >= len(self._entries) or self._generations[slot] != wr_id >> SLOT_BITS:
            return None
        entry = self._entries[slot]
        if entry is None:
            return None
        self._entries[slot] = None
        # Generation 0 is never handed out, so that a zeroed wr_id finds nothing.
        self._generations[slot] = self._generations[slot] % GENERATION_MASK + 1
        self._free.append(slot)
        self._live -= 1
        return entry

    def shrink(self) -> None:
        """Give back the free slots behind the last live one. New slots begin with a generation that
        none of these has had, so that a late completion of theirs finds nothing."""
        count = len(self._entries)
        while count and self._entries[count - 1] is None:
            if self._generations[count - 1] > MOST_GENERATIONS_DROPPED:
                break
            count -= 1
        self._first_generation = max([self._first_generation, *self._generations[count:]])
        del self._entries[count:], self._generations[count:]
        # The lowest are used first, so that the end becomes free again.
        self._free = [slot for slot in reversed(range(count)) if self._entries[slot] is None]

    def age(self, slot: int, generation: int, /) -> bool:
        """Move a free slot on to a generation, as if it had been used so often, and return whether
        it was free. For tests of what comes after 2**32 uses."""
        if slot >= len(self._entries) or self._entries[slot] is not None:
            return False
        self._generations[slot] = generation
        return True

    def entries(self) -> list[InTable]:
        """Return the live entries, oldest slot first."""
        return [entry for entry in self._entries if entry is not None]


# -- work requests --------------------------------------------------------------------------------


class Holdable(Protocol):
    """Memory that a request keeps from being freed or reused."""

    def hold(self) -> None:
        """The request is about to be posted. What it raises keeps it from that."""

    def release(self) -> None:
        """The request has ended."""


class RequestOwner(Protocol):
    """The endpoint that posted a request."""

    loop: EventLoop

    def request_failed(self, request: "WorkRequest", raw: tuple[int, ...]) -> Exception:
        """Turn a failed completion into its error."""

    def request_ended(self, request: "WorkRequest") -> None:
        """Take back the request's slot."""

    def request_unretrieved(self, request: "WorkRequest") -> None:
        """Report a failed request that is about to go, and whose error nobody retrieved; called
        by its finalizer, in any thread."""

    def run_ended(self, earlier: "WorkRequest", last: "WorkRequest") -> None:
        """End a request that tells nothing of its end by the one behind it, which has ended."""


class WorkRequest:
    """A posted work request. Await it for its WorkCompletion; any number of tasks may,
    any number of times.

    `operation` names the request (SEND, RECV, RDMA_READ, RDMA_WRITE, ...), `length` is
    its local bytes. An error that nobody retrieves, by awaiting, `result` or
    `exception`, is reported (docs/guarantees.md).

    Raises:
        WorkCompletionError: awaiting it: it failed.
        RdmaError: awaiting it: the chain that it was part of was not posted.
        RuntimeError: awaiting it: the chain that it is part of is not posted yet.
        EventLoopError: awaited outside of its event loop.

    Cancellation: the request stays in flight, and its memory held; its completion is
    then discarded.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_error",
        "_held",
        "_owner",
        "_result",
        "_retrieved",
        "_run",
        "_waiters",
        "completes_as",
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
        self.completes_as: int = 0
        self._owner = owner
        self._held = tuple(held)
        self._result: WorkCompletion | None = None
        self._error: Exception | None = None
        self._retrieved = False  # or another request tells of its error
        self._waiters: list[Waiter] = []
        self._callbacks: list[Callable[[WorkRequest], object]] = []
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
            WorkCompletionError: it failed.
            RdmaError: the chain that it was part of was not posted.
            RuntimeError: it is still in flight.
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

    def add_done_callback(self, callback: Callable[["WorkRequest"], object], /) -> None:
        """Call a function with the request once it has ended: at once if it has, else on
        the loop's thread as the completion is delivered. Keep it short. What it raises is
        logged.

        Raises: nothing.
        """
        if self.done():
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def tell(self, callback: Callable[["WorkRequest"], object], /) -> None:
        """Add a done callback that runs no code of the program's: it may be called inside
        another request's post.
        """
        self.add_done_callback(callback)

    def remove_done_callback(self, callback: Callable[["WorkRequest"], object], /) -> int:
        """Remove a callback, and return how often it had been added. asyncio.wait calls
        this.

        Raises: nothing.
        """
        kept = [known for known in self._callbacks if known != callback]
        removed = len(self._callbacks) - len(kept)
        self._callbacks = kept
        return removed

    def cancelled(self) -> bool:
        """Return False: no verb takes one posted request back. asyncio.wait calls this.

        Raises: nothing.
        """
        return False

    def __await__(self) -> Generator[Any, Any, WorkCompletion]:
        self._retrieved = True  # also if the await is cancelled, which abandons the result
        if self._result is None and self._error is None:
            if not self.wr_id:
                raise RuntimeError(f"{self!r} is part of a chain that is not posted yet")
            waiter = self._owner.loop.waiter()
            self._waiters.append(waiter)
            try:
                yield from waiter.wait().__await__()
            finally:
                self.forget_waiter(waiter)
        return self.result()

    def _hold_all(self) -> None:
        with ExitStack() as undo:
            for memory in self._held:
                memory.hold()
                undo.callback(memory.release)
            undo.pop_all()

    # -- for the hub and the endpoint ---------------------------------------------------------

    def tells_for(self, run: Sequence["WorkRequest"], /) -> None:
        """Complete the unsignaled requests before this one in a run, when this one
        completes.
        """
        self._run = run

    @deferring
    def complete(self, raw: tuple[int, ...], /) -> None:
        """End with a completion."""
        if raw[1]:
            self._fail(self._owner.request_failed(self, raw))
        else:
            self._result = WorkCompletion._make(raw)
        run, self._run = self._run, ()
        with ExitStack() as last_first:
            last_first.callback(self._end)
            for earlier in reversed(list(takewhile(lambda each: each is not self, run))):
                last_first.callback(self._end_earlier, earlier)

    @deferring
    def fail(self, error: Exception, /) -> None:
        """End without a completion: the queue pair is gone, or the request was never
        posted. A request that has ended stays as it is. The error is stored: raise only
        copies of it.
        """
        if self.done():
            return
        self._fail(error)
        self._end()

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._run and self._run[-1] is not self:
            self._retrieved = True  # the last one of its run tells of it

    def __del__(self) -> None:
        # getattr: a request that could not be made has neither.
        if not getattr(self, "_retrieved", True) and self._error is not None:
            self._owner.request_unretrieved(self)

    def forget_waiter(self, waiter: Waiter, /) -> None:
        """Do not wake a waiter any more."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _end_earlier(self, earlier: "WorkRequest") -> None:
        if not earlier.done():
            earlier._retrieved = True  # if it fails, this one tells of it
            self._owner.run_ended(earlier, self)

    def _end(self) -> None:
        held, self._held = self._held, ()
        waiters, self._waiters = self._waiters, []
        callbacks, self._callbacks = self._callbacks, []
        # Each is called, whatever the others raise: an interrupt goes on behind the last one.
        with ExitStack() as last_first:
            for callback in reversed(callbacks):
                last_first.callback(self._call, callback)
            for waiter in reversed(waiters):
                last_first.callback(waiter.wake)
            last_first.callback(self._owner.request_ended, self)
            for memory in reversed(held):
                last_first.callback(self._release, memory)

    def _release(self, memory: Holdable) -> None:
        try:
            memory.release()
        except Exception:  # a region's last user closes it, which can fail
            logger.exception("releasing the memory of %r failed", self)

    def _call(self, callback: Callable[["WorkRequest"], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r failed", self)

    @deferring
    def drop(self) -> None:
        """Undo the construction of a request that the device did not take."""
        held, self._held = self._held, ()
        for memory in held:
            memory.release()


class OpenRequests(Collection[WorkRequest]):
    """The requests of one queue pair that have not ended, oldest first."""

    def __init__(self) -> None:
        self._requests: dict[WorkRequest, None] = {}

    def __contains__(self, request: object) -> bool:
        return isinstance(request, WorkRequest) and request in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[WorkRequest]:
        return iter(list(self._requests))  # as they are now: ending one may end others

    def add(self, request: WorkRequest, /) -> None:
        """Count one in."""
        self._requests[request] = None

    def discard(self, request: WorkRequest, /) -> None:
        """Count it no more; nothing if it was not."""
        self._requests.pop(request, None)


# -- the drain ------------------------------------------------------------------------------------


class Drain:
    """One channel's queues: their events, their arming, and what completed in them.

    Addresses are those of C's structures. `hub` has `watch_over`, called as something is posted
    while the watchdog does not run (`watched`), and `drain_soon`, called where completions were
    found that cannot be delivered on the spot (`scheduled` until that is reset).
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
        self._drain.provider = ffi.cast("struct aiordma_provider *", provider)
        self._drain.channel = ffi.cast("struct ibv_comp_channel *", channel)
        self._drain.batch = self._batch
        self._drain.capacity = BATCH
        self._queues: Any = None
        self.enabled = True
        """Whether polls find anything; not once the device has failed."""
        self.draining: bool = False
        """Whether completions are being delivered."""
        self.watched = self.scheduled = False
        self.polls = self.crossings = self.delivered = self.wakes = 0

    def set_queues(self, addresses: list[int], /) -> None:
        """Drain these; those known stay armed."""
        drain = self._drain
        armed = {drain.queues[i].queue: drain.queues[i].armed for i in range(drain.queue_count)}
        self._queues = ffi.new("struct aiordma_drained_queue[]", max(1, len(addresses)))
        for i, address in enumerate(addresses):
            queue = ffi.cast("struct ibv_cq *", address)
            self._queues[i].queue, self._queues[i].armed = queue, armed.get(queue, 0)
        drain.queues, drain.queue_count = self._queues, len(addresses)

    @property
    def more(self) -> bool:
        """Whether the batch was full: step again."""
        return bool(self._drain.more)

    @property
    def events(self) -> int:
        """How many were taken from the channel."""
        return int(self._drain.events)

    @deferring
    def step(self, arm: bool, direct: bool, /) -> int:
        """Take the channel's events, poll a batch, deliver it; then arm, and poll once more.

        Args:
            arm: False: the loop arms, before it sleeps.
            direct: whether no task is running, so that those who are woken can run at once.

        Returns:
            How many completed, or -errno. Nothing while a step is under way.
        """
        if self.draining:
            return 0
        self.crossings += 1
        error = lib.aiordma_take_events(self._drain)
        count = error or self._poll_and_deliver()
        # As late as possible: what the tasks that were woken have posted and what completed
        # meanwhile needs no event. What completed before the arming is polled for after it.
        if count >= 0 and arm and self.enabled and not self.more:
            error = lib.aiordma_arm_queues(self._drain) or self._poll_and_deliver()
            count = count + error if error >= 0 else count or error
        return int(count)

    def _poll_and_deliver(self) -> int:
        self.polls += 1
        count = int(lib.aiordma_poll_queues(self._drain))
        if count > 0:
            self.draining = True
            self.delivered += count
            try:
                self._deliver(count)
            finally:
                self.draining = False
        return count

    def _deliver(self, count: int) -> None:
        take = self.in_flight.take
        packed = ffi.buffer(self._batch, count * COMPLETION.size)[:]
        interrupt: BaseException | None = None
        for raw in COMPLETION.iter_unpack(packed):
            entry = take(raw[0])
            if entry is None:
                continue  # its queue pair is gone, and the request was ended then
            try:
                entry.complete(raw)
            except Exception:
                logger.exception("a callback of a completed work request failed")
            except BaseException as raised:  # once all of the batch are delivered
                interrupt = interrupt or raised
        if interrupt is not None:
            raise interrupt

    def forget_arming(self) -> None:
        """Take no queue to be armed: its event may have been lost."""
        for i in range(self._drain.queue_count):
            self._queues[i].armed = 0


# -- ports ----------------------------------------------------------------------------------------


class ClosedPort:
    """A port that posts nothing. None for an answer means: post it the general way."""

    def __init__(self) -> None:
        self.ready = False
        """Whether sends may be posted."""
        self.can_receive = False
        self.can_read = False
        """Whether READs were agreed on."""
        self.tells = False
        """Whether the owner wants to hear of each end."""
        self.feeds = False
        """Whether its receives are those of a queue of messages, and not the user's."""
        self.thread: int = get_ident()
        """The only thread that may post: the event loop's."""

    def send(self, data: Any, /) -> WorkRequest | None:
        """Post a message."""
        return None

    def receive(self, memory: Any, /) -> WorkRequest | None:
        """Post a receive."""
        return None

    def write(self, data: Any, remote: Any, /) -> WorkRequest | None:
        """Post a WRITE."""
        return None

    def read(self, remote: Any, memory: Any, /) -> WorkRequest | None:
        """Post a READ."""
        return None


class _Plain:
    """What is to be posted: one part, registered, or short enough to be sent inline."""

    __slots__ = ("flags", "held", "length", "opcode", "operation", "remote", "sge", "source")

    def __init__(
        self, operation: str, opcode: int, memory: Part | memoryview, remote: RemoteMemory | None
    ) -> None:
        self.operation = operation
        self.opcode = opcode
        self.remote = remote
        self.flags = 0
        self.held: tuple[Any, ...] = ()
        self.source: memoryview | None = None
        if isinstance(memory, Part):
            self.sge, self.length, self.held = memory.sge, memory.length, (memory,)
        else:
            self.source, self.length, self.flags = memory, memory.nbytes, _INLINE
            self.sge = SGE.pack(address_of(memory), memory.nbytes, 0)

    def pack(self, wr_id: int, flags: int) -> bytes:
        """Return the struct aiordma_send_request."""
        address, rkey = (0, 0) if self.remote is None else (self.remote.address, self.remote.rkey)
        return pack_plain(wr_id, self.opcode, self.flags | flags, 1, address, rkey, 0)

    def is_still_open(self) -> bool:
        """Whether its region was not closed since it was read."""
        return all(part.region.usable for part in self.held)


class Port(ClosedPort):
    """A queue pair, to post plain requests on: one part, registered, or short enough to be sent
    inline. The answer to what is not plain is None.

    Args:
        owner: whose queue pair it is; it raises what the device refuses (`post_refused`), and is
            notified of a failed doorbell (`doorbell_failed`).
        drain: where its requests complete.
        sends: the send queue's slots.
        receives: the receive queue's.
        posted: the owner's requests in flight.
        loop: asyncio's, or None.
        domain: where memory has to be registered.
    """

    def __init__(
        self,
        owner: Any,
        drain: Drain,
        sends: Slots,
        receives: Slots,
        posted: OpenRequests,
        loop: object,
        domain: object,
    ) -> None:
        super().__init__()
        self._owner, self._drain, self._open, self._domain = owner, drain, posted, domain
        self._sends, self._receives = sends, receives
        self._process = here.pid
        self._queue_pair = self._shared = ffi.NULL
        self._max_message = self._max_inline = 0

    def open(self, queue_pair: int, max_message: int, max_inline: int, /) -> None:
        """There is a queue pair, at that address."""
        self._queue_pair = ffi.cast("struct ibv_qp *", queue_pair)
        self._max_message, self._max_inline = max_message, max_inline

    @deferring
    def send(self, data: Any, /) -> WorkRequest | None:
        """Post a message; None: it is not a plain one."""
        return self._post_send(self._read_send(data))

    @deferring
    def write(self, data: Any, remote: Any, /) -> WorkRequest | None:
        """Post a WRITE; None: it is not a plain one."""
        return self._post_send(self._read_write(data, remote))

    @deferring
    def read(self, remote: Any, memory: Any, /) -> WorkRequest | None:
        """Post a READ; None: it is not a plain one."""
        return self._post_send(self._read_read(remote, memory))

    @deferring
    def receive(self, memory: Any, /) -> WorkRequest | None:
        """Post a receive; None: it is not a plain one."""
        plain = self._read_receive(memory) if self._queue_pair else None
        if plain is None or not _take_slot(self._receives):
            return None
        request = self._make(plain)
        if not (self._is_usable(self.can_receive) and plain.is_still_open()):
            self._take_back(request)
            return None
        self._enter(request)
        error, _ = self._give_receives([request], plain.sge)
        if error:
            self._take_back(request)
            self._owner.post_refused(error, True)
        _watch_over(self._drain)
        return request

    # -- reading what is given ---------------------------------------------------------------------

    def _is_usable(self, may: bool) -> bool:
        return (
            may
            and bool(self._queue_pair or self._shared)
            and self._process == here.pid
            and self.thread == get_ident()
        )

    def _read_send(self, data: Any) -> _Plain | None:
        memory = self._source(data) if self._is_usable(self.ready) else None
        return None if memory is None else _Plain("SEND", _SEND, memory, None)

    def _read_write(self, data: Any, remote: Any) -> _Plain | None:
        memory = self._source(data) if self._is_usable(self.ready) else None
        return self._one_sided("RDMA_WRITE", _WRITE, memory, remote)

    def _read_read(self, remote: Any, memory: Any) -> _Plain | None:
        target = self._target(memory) if self._is_usable(self.ready and self.can_read) else None
        return self._one_sided("RDMA_READ", _READ, target, remote)

    def _read_receive(self, memory: Any) -> _Plain | None:
        target = self._target(memory) if self._is_usable(self.can_receive) else None
        return None if target is None else _Plain("RECV", 0, target, None)

    def _one_sided(
        self, operation: str, opcode: int, memory: Part | memoryview | None, remote: Any
    ) -> _Plain | None:
        if memory is None or type(remote) is not RemoteMemory:
            return None
        plain = _Plain(operation, opcode, memory, remote)
        return plain if remote.length == plain.length else None

    def _source(self, memory: Any) -> Part | memoryview | None:
        if isinstance(memory, MemorySlice):
            return self._registered(memory)
        try:
            view = flat_view(memory)
        except (TypeError, ValueError):
            return None  # the general path says what is wrong with it
        return view if 0 < view.nbytes <= self._max_inline else None

    def _target(self, memory: Any) -> Part | None:
        if not isinstance(memory, MemorySlice) or not memory.region.writable:
            return None
        return self._registered(memory)

    def _registered(self, part: MemorySlice) -> Part | None:
        is_plain = (
            part.region.usable
            and part.region.domain is self._domain
            and 0 < part.length <= min(self._max_message, 2**32 - 1)
        )
        return part if is_plain else None

    # -- posting -----------------------------------------------------------------------------------

    def _post_send(self, plain: _Plain | None) -> WorkRequest | None:
        if plain is None or not _take_slot(self._sends):
            return None  # the general path raises, or waits
        request = self._make(plain)
        if not (self._is_usable(self.ready) and plain.is_still_open()):
            self._take_back(request)
            return None
        self._enter(request)
        error, _ = self._give_sends(plain.pack(request.wr_id, _SIGNALED), 1, plain.sge)
        if error > 0:
            self._take_back(request)
            self._owner.post_refused(error, False)
        if error < 0:
            self._owner.doorbell_failed(-error)
        _watch_over(self._drain)
        return request

    def _make(self, plain: _Plain) -> WorkRequest:
        """Make a request that has its slot; it holds its memory."""
        is_receive = plain.operation == "RECV"
        try:
            return WorkRequest(
                self._owner,
                plain.operation,
                plain.length,
                plain.held,
                plain.remote,
                is_receive=is_receive,
            )
        except BaseException:
            _give_slot(self._receives if is_receive else self._sends)
            raise

    def _enter(self, request: WorkRequest) -> None:
        # Before the device has it; only the device's refusal takes it out again.
        request.wr_id = self._drain.in_flight.add(request)
        self._open.add(request)

    def _take_back(self, request: WorkRequest) -> None:
        """Undo all of a request that the device does not have."""
        self._drain.in_flight.take(request.wr_id)
        self._open.discard(request)
        request.drop()
        _give_slot(self._receives if request.is_receive else self._sends)

    def _give_sends(self, requests: bytes, count: int, sges: bytes) -> tuple[int, int]:
        """Return C's errno (negative: the doorbell failed), and how many the device took."""
        posted = ffi.new("uint32_t *")
        self._drain.crossings += 1
        error = lib.aiordma_post_send_chain(
            self._queue_pair, requests, count, sges, len(sges), posted
        )
        return error, posted[0]

    def _give_receives(self, requests: list[WorkRequest], sges: bytes) -> tuple[int, int]:
        packed = b"".join([RECEIVE_REQUEST.pack(request.wr_id, 1, 0) for request in requests])
        posted = ffi.new("uint32_t *")
        self._drain.crossings += 1
        error = lib.aiordma_post_recv_chain(
            self._queue_pair, self._shared, packed, len(requests), sges, len(sges), posted
        )
        return abs(error), posted[0]


def _watch_over(drain: Drain) -> None:
    """Let the hub look for a lost event, now that something is in flight."""
    if not drain.watched:
        drain.hub.watch_over()


def _take_slot(slots: Slots) -> bool:
    if not slots.free or slots.waiting:
        return False
    slots.free -= 1
    return True


def _give_slot(slots: Any) -> None:
    slots.free += 1
    if slots.waiting:
        slots.grant()


class SharedPort(Port):
    """A shared receive queue, to post plain receives on. Of a Port's arguments, the send queue's
    slots are nobody's."""

    def open_shared(self, queue: int, max_message: int, /) -> None:
        """There is a queue, at that address."""
        self._shared, self._max_message = ffi.cast("struct ibv_srq *", queue), max_message

    @deferring
    def post(self, parts: list[Any], /) -> list[WorkRequest] | tuple[int, list[WorkRequest]] | None:
        """Post a receive for each part as one chain, with one call.

        Returns:
            The requests; or the errno with which the device refused one, and the requests before
            it, which are posted; None: they are not plain, or too many, and nothing was posted.
        """
        if not self._shared or not isinstance(parts, list):
            return None
        all_plain: list[_Plain] = []
        for part in list(parts):
            plain = self._read_receive(part)
            if plain is None:
                return None
            all_plain.append(plain)
        if not all_plain or len(all_plain) > self._receives.free:
            return None
        requests: list[WorkRequest] = []
        try:
            for plain in all_plain:
                self._receives.free -= 1
                requests.append(self._make(plain))
        except BaseException:
            for request in requests:
                self._take_back(request)
            raise
        are_plain = all(plain.is_still_open() for plain in all_plain)
        if not (are_plain and self._is_usable(self.can_receive)):
            for request in requests:
                self._take_back(request)
            return None
        for request in requests:
            self._enter(request)
        error, taken = self._give_receives(requests, b"".join([p.sge for p in all_plain]))
        for request in requests[taken:]:
            self._take_back(request)
        _watch_over(self._drain)
        return (error, requests[:taken]) if error else requests


class ChainPort(ClosedPort):
    """The requests of one chain. It makes the plain ones: each takes its slot, and holds its
    memory; bytes that are sent inline are copied. Nothing is posted before `post`.

    Args:
        port: the queue pair's.
    """

    def __init__(self, port: ClosedPort) -> None:
        super().__init__()
        if not isinstance(port, Port):
            raise TypeError(f"ChainPort(): port={port!r} is no Port: there is no queue pair yet")
        self._port = port
        self.over: bool = False
        """Whether nothing is collected any more: None is then all that it answers."""
        self.posted: int = 0
        """How many requests the device took."""
        self._collected: list[tuple[WorkRequest, _Plain | None]] = []
        self._is_posted = False

    @property
    def usable(self) -> bool:
        """Whether the queue pair may be posted on; if not, the owner says why."""
        return self._port._is_usable(self._port.ready)

    @property
    def count(self) -> int:
        """How many requests there are."""
        return len(self._collected)

    @deferring
    def send(self, data: Any, /) -> WorkRequest | None:
        """Collect a message; None: it is not a plain one."""
        return self._collect(None if self.over else self._port._read_send(data))

    @deferring
    def write(self, data: Any, remote: Any, /) -> WorkRequest | None:
        """Collect a WRITE; None: it is not a plain one."""
        return self._collect(None if self.over else self._port._read_write(data, remote))

    @deferring
    def read(self, remote: Any, memory: Any, /) -> WorkRequest | None:
        """Collect a READ; None: it is not a plain one."""
        return self._collect(None if self.over else self._port._read_read(remote, memory))

    def _collect(self, plain: _Plain | None) -> WorkRequest | None:
        port = self._port
        if plain is None or not _take_slot(port._sends):
            return None
        request = port._make(plain)
        if self.over or not self.usable or not plain.is_still_open():
            port._take_back(request)
            return None
        request.completes_as = _COMPLETES_AS[plain.opcode]
        if plain.source is not None:
            plain.source = memoryview(plain.source.tobytes())
            plain.sge = SGE.pack(address_of(plain.source), plain.length, 0)
        port._open.add(request)  # so that it ends with the queue pair, if it is never posted
        self._collected.append((request, plain))
        return request

    def add(self, request: WorkRequest, /) -> None:
        """One that is not plain, and was made elsewhere, is the next."""
        if not isinstance(request, WorkRequest) or self.over:
            raise ValueError("only a request is added, to a chain that is not over")
        self._collected.append((request, None))

    def requests(self) -> list[WorkRequest]:
        """List all, in order."""
        return [request for request, _ in self._collected]

    @deferring
    def post(self, signal_last_only: bool, works: int = 0, sges: bytes = b"", /) -> int:
        """Post all requests in their order, with one call.

        Args:
            signal_last_only: only the last one is signaled.
            works: the address of an array of struct aiordma_send_request: those that were added.
            sges: their parts.

        Returns:
            C's errno, 0 if all were taken; a negative one: all were, and the device could not be
            told.
        """
        port, requests = self._port, self.requests()
        is_general = any(plain is None for _, plain in self._collected)
        if not requests or self._is_posted or (is_general and not works):
            raise ValueError("a chain is posted once, if there is anything in it")
        self.over = self._is_posted = True
        if signal_last_only:
            for request in requests:
                request.tells_for(requests)
        if not self.usable:
            return errno.ENOTCONN
        packed, parts = self._pack(
            signal_last_only, ffi.cast("struct aiordma_send_request *", works), sges
        )
        error, self.posted = port._give_sends(packed, len(requests), parts)
        _watch_over(port._drain)
        return error

    def _pack(self, signal_last_only: bool, works: Any, sges: bytes) -> tuple[bytes, bytes]:
        """Enter all into the in-flight table; return what the device is to get, and the parts."""
        packed, parts, at = [], [], 0
        for place, (request, plain) in enumerate(self._collected, start=1):
            request.wr_id = self._port._drain.in_flight.add(request)
            flags = 0 if signal_last_only and place < len(self._collected) else _SIGNALED
            if plain is not None:
                packed.append(plain.pack(request.wr_id, flags))
                parts.append(plain.sge)
                continue
            works[0].wr_id = request.wr_id
            works[0].send_flags |= flags
            packed.append(ffi.buffer(works, ffi.sizeof(works[0]))[:])
            end = at + SGE.size * works[0].sge_count
            parts.append(sges[at:end])
            works, at = works + 1, end
        return b"".join(packed), b"".join(parts)
