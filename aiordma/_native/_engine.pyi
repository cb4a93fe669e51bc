# The engine. Its methods have docstrings in C (`help(Port)`). Those of public classes are repeated
# here, for editors and the API reference: tests/unit/test_docstrings.py compares them. `make lint`
# compares the rest of this file with the module (mypy's stubtest).

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Sequence,
    Sized,
)
from typing import Any, ClassVar, Protocol, Self, TypeVar, final

from aiordma._base.arguments import Buffer
from aiordma._base.ranges import RemoteMemory
from aiordma._loop.event_loop import Waiter as AnyWaiter
from aiordma._requests.request import Holdable, RequestOwner
from aiordma.verbs.completion import WorkCompletion
from aiordma.verbs.memory import MemorySlice

_Function = TypeVar("_Function")
_Result = TypeVar("_Result")

BATCH: int
"""Completions of one poll, at most."""
COPY_LIMIT: int
"""Bytes up to which buffers are copied."""

def method(name: str, function: _Function, /) -> _Function: ...
def give(
    *,
    completion: type[CompletionFields] = ...,
    remote: type[RemoteMemory] = ...,
    memory_slice: type[MemorySlice] = ...,
    wait_elsewhere: Callable[..., Generator[Any, Any, WorkCompletion]] = ...,
    log: Callable[[str, object, BaseException], None] = ...,
    detached: Callable[[Exception], Exception] = ...,
    datagram: type[DatagramFields] = ...,
) -> None: ...
def end_chain(chain: object, kind: object, error: object, trace: object, /) -> bool: ...
def grh_ends(grh: bytes, /) -> tuple[bytes, bytes]: ...
def call_at_end(function: Callable[[], object], /) -> bool: ...
def call_then_run(function: Callable[[], _Result], /) -> _Result: ...
def leak(kept: object, /) -> None: ...
def begin_trace(limit: int, /) -> None: ...
def set_engine_process(number: int, /) -> int: ...
def take_trace() -> tuple[list[tuple[object, str, int, int, int, int, int]], int]: ...
def use_data_path(address: int, /) -> int: ...

@final
class PooledReceives:
    """Posts blocks of a pool, in chains, and passes those that a message arrives in to a queue.

    Args:
        port: the port that posts them.
        pool: the pool that `fill` leases them from.
        refused: called with the errno of a failed post, 0 if the port was not usable. The blocks
            that could not be posted are released.
        members: the queues by queue pair number; None: `set_queue` sets the queue of all arrivals.
    """

    chain: int
    """The number of blocks that are posted together."""
    @property
    def posted(self) -> int:
        """The number of posted blocks."""

    @property
    def unposted(self) -> int:
        """The number of blocks in the next chain."""

    def __new__(
        cls,
        port: Port | SharedPort,
        pool: Pool,
        refused: Callable[[int], object],
        members: dict[int, ArrivalQueue] | None = None,
    ) -> Self: ...
    def set_queue(self, queue: ArrivalQueue, /) -> None: ...
    def fill(self, count: int, size: int, /) -> None: ...
    def give_back(self, lease: Lease, /) -> None: ...
    def post_unposted(self) -> None: ...

class _Wakeable(Protocol):
    def wake(self) -> object: ...

@final
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

    at_once: int
    """How many arrivals were handed out since the task last paused."""
    counters: dict[int, Callable[[], object]] | None
    """What is called for notifications, by their number: messages without bytes, and WRITEs, with
    this immediate data. They are no arrivals."""
    busy: bool
    """Whether a task is receiving."""
    fed: bool
    """Whether blocks are posted for it."""
    @property
    def arrived(self) -> int:
        """The number of arrivals."""

    @property
    def pause(self) -> int: ...
    @property
    def views(self) -> int:
        """The number of blocks that the program holds by views."""

    @property
    def most_views(self) -> int: ...
    def __new__(
        cls, owner: Any, receives: PooledReceives, port: Port, pause: int, most_views: int
    ) -> Self: ...
    def take_data_at_once(self) -> bytes | None: ...
    def take_data(self) -> bytes: ...
    def take_datagram_at_once(self, senders: SendersBase, /) -> Any: ...
    def take_datagram(self, senders: SendersBase, /) -> Any: ...
    def take_message_at_once(self, message: Any, /) -> Any: ...
    def take_message(self, message: Any, /) -> Any: ...
    def begin_wait(self) -> Waiter | None: ...
    def end_wait(self) -> None: ...
    def set_waiter(self, waiter: _Wakeable, /) -> None: ...
    def wake(self) -> None: ...
    def discard(self) -> None: ...

@final
class ArrivalView:
    """The next arrival of a queue as a view of its block, in an `async with` block."""

    def __new__(cls, queue: ArrivalQueue) -> Self: ...
    def __aenter__(self) -> Coroutine[Any, Any, memoryview]: ...
    def __aexit__(self, *error: object) -> Coroutine[Any, Any, None]: ...
    def __await__(self) -> Generator[Any, Any, Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def send(self, value: Any, /) -> Any: ...
    def throw(self, *error: Any) -> Any: ...
    def close(self) -> None: ...
    def _open(self) -> memoryview: ...
    def _end(self) -> None: ...

@final
class StreamPath:
    """The data path of a stream. `streams/path.py` has the interface of its owner.

    Attributes:
        owner: errors are reported to it.
        on_readable: called when data has arrived, and at the end; None: nobody waits for it.
        on_writable: called when there may be room to send again, and at the end; or None.
        on_drained: called when `is_drained`, and at the end; or None. Each of the three may be
            called twice in place of once.
        is_cancelled: returns whether the running task is cancelled.
        at_once: how many calls did not wait since the last one that paused.
        receiving, sending, closed: of the stream: whether a task receives, or sends; whether it was
            closed.
        lacks_send: of the stream: whether a send was cancelled, and none has posted its data since.
        failed: whether an error has ended the stream; what arrives is ignored.
        lost_data: whether a message with data has failed: the peer may not have it.
        at_eof: whether the peer sends no more data; there may still be data to read.
        peer_disconnected: whether the peer has ended both directions.
        uses_words: whether messages carry words.
        readable: how many bytes can be read now.
        writable: how many bytes the next message may have now, if it is not copied.
        can_write: whether `write` and `write_registered` can post anything now.
        is_drained: whether the device of the peer has everything that was written.
        in_flight: the number of messages with data that the device may still read.
        free_bytes, data_slots, control_slots: what is free for sending.
    """

    owner: Any
    on_readable: Callable[[], object] | None
    on_writable: Callable[[], object] | None
    on_drained: Callable[[], object] | None
    is_cancelled: Callable[[], bool] | None
    at_once: int
    receiving: bool
    sending: bool
    closed: bool
    lacks_send: bool
    failed: bool
    @property
    def lost_data(self) -> bool: ...
    @property
    def at_eof(self) -> bool: ...
    @property
    def peer_disconnected(self) -> bool: ...
    @property
    def uses_words(self) -> bool: ...
    @property
    def readable(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def data_slots(self) -> int: ...
    @property
    def control_slots(self) -> int: ...
    @property
    def writable(self) -> int: ...
    @property
    def can_write(self) -> bool: ...
    @property
    def is_drained(self) -> bool: ...
    def __new__(
        cls,
        port: Port,
        lent: RegionBase,
        lent_memory: Buffer,
        lent_rkey: int,
        ours: RegionBase,
        our_memory: Buffer,
        ring: int,
        receives: int,
        depth: int,
        transfer: int,
        uses_words: bool,
        grows: bool = False,
    ) -> Self: ...
    def post_receives(self) -> None: ...
    def start(
        self,
        permitted: int,
        table_address: int,
        table_rkey: int,
        table_entries: int,
        buffer_address: int,
        buffer_rkey: int,
        buffer_length: int,
        is_big_endian: bool,
        uses_words: bool,
        /,
    ) -> None: ...
    def begin(self, may_send: bool, /) -> None: ...
    def read(self, limit: int, /) -> bytes: ...
    def read_into(self, buffer: Buffer, /) -> int: ...
    def feed(self, receive: Callable[[memoryview], object], limit: int, /) -> int: ...
    def write(self, data: Buffer, /) -> int: ...
    def write_registered(self, memory: Part, /) -> int | None: ...
    def grow(self, outwards: bool, region: RegionBase, memory: bytearray, key: int, /) -> None: ...
    def close_write(self, both: bool, /) -> None: ...
    def receive(
        self,
        general: Callable[..., Coroutine[Any, Any, bytes]],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        /,
    ) -> StreamTransfer: ...
    def receive_into(
        self,
        general: Callable[..., Coroutine[Any, Any, int]],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        /,
    ) -> StreamTransfer: ...
    def send(
        self,
        general: Callable[..., Coroutine[Any, Any, None]],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        /,
    ) -> StreamTransfer: ...
    def wake(self) -> None: ...
    def end(self) -> None: ...

@final
class StreamTransfer:
    def send(self, value: Any, /) -> Any: ...
    def throw(self, *args: Any) -> Any: ...
    def close(self) -> None: ...
    def __await__(self) -> Generator[Any, Any, Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...

@final
class InFlightTable:
    """The requests in flight, by slot. `add` and `take` take constant time."""

    def __new__(cls) -> Self: ...
    def __len__(self) -> int: ...
    @property
    def slots(self) -> int:
        """The size of the table: at least the most requests since the last `shrink`."""

    def add(self, request: WorkRequest, /) -> int: ...
    def take(self, wr_id: int, /) -> WorkRequest | None: ...
    def shrink(self) -> None: ...

class RegionBase:
    domain: Any
    address: int
    length: int
    lkey: int
    _start: int
    _mr: int
    _access: int
    _users: int
    _retired: bool
    _usable: bool
    _writable: bool
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...

class Part:
    def __init__(self, region: RegionBase, address: int, length: int, lkey: int) -> None: ...
    @property
    def region(self) -> Any: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def _sge(self) -> bytes: ...

class WindowBase:
    _endpoint: Any
    _invalidating: bool
    _last: Any
    _pointer: int
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...
    @property
    def _memory(self) -> Any: ...
    @property
    def rkey(self) -> int: ...
    def _bind_to(self, memory: Part, rkey: int, /) -> None: ...
    def _let_go(self) -> None: ...

class HandleBase:
    _holders: int
    _retired: bool
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...

@final
class Slab:
    def __new__(cls, region: RegionBase, size: int) -> Self: ...
    @property
    def region(self) -> Any: ...
    @property
    def size(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def free(self) -> int: ...

@final
class Lease:
    @property
    def memory(self) -> MemorySlice: ...
    def release(self) -> None: ...
    def _hold(self) -> None: ...
    def _release(self) -> None: ...

class Pool:
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...
    @property
    def leased(self) -> int: ...
    def lease(self, length: int, /) -> Lease: ...
    def _get_current(self, size: int, /) -> Slab | None: ...
    def _set_current(self, slab: Slab, /) -> None: ...
    def _forget_current(self) -> None: ...

class Slots:
    total: int
    free: int
    waiting: int
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...

@final
class OpenRequests:
    """The requests of one queue pair that have not completed, oldest first, and the counters of
    those that have."""

    def __new__(cls) -> Self: ...
    @property
    def oldest_message(self) -> int: ...
    def counters(
        self,
    ) -> tuple[int, int, int, int, int, int, dict[int, int], dict[int, int]]: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[WorkRequest]: ...
    def __contains__(self, request: object, /) -> bool: ...
    def add(self, request: WorkRequest, /) -> None: ...
    def discard(self, request: WorkRequest, /) -> None: ...

@final
class Drain:
    """Takes events of a completion channel, arms its queues, and delivers their completions.

    Args:
        hub: its `watch_over` is called by a post if the watchdog does not run (`watched`), its
            `drain_soon` if completions are found that cannot be delivered at once (`scheduled` is
            set until they are).
        provider, channel: addresses of the C structs.
        in_flight: the requests by wr_id.
    """

    enabled: bool
    """Whether the queues are polled; False once the device has failed."""
    watched: bool
    scheduled: bool
    wakes: int
    """How often the channel was readable."""
    def __new__(
        cls, hub: object, provider: int, channel: int, in_flight: InFlightTable
    ) -> Self: ...
    @property
    def draining(self) -> bool: ...
    @property
    def more(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def polls(self) -> int: ...
    @property
    def crossings(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    def settle(self) -> None: ...
    def set_queues(self, addresses: list[int], /) -> None: ...
    def step(self, arm: bool, direct: bool, /) -> int: ...
    def forget_arming(self) -> None: ...

@final
class Spinner:
    dirty: bool
    confidence: int
    most: int
    def __new__(cls) -> Self: ...
    def takes(self, drain: object, /) -> bool: ...
    def select(
        self, epoll: int, drains: tuple[object, ...], timeout: float | None, ready: Sized, /
    ) -> bool: ...

@final
class Port:
    """Posts requests on a queue pair. A method returns None if the port cannot handle the request;
    the caller then takes the general path.

    Args:
        owner: the owner of the queue pair. Its `post_refused` raises the error of a refused post;
            `doorbell_failed` is called if the device could not be notified of a post. It is also
            the owner of the requests.
        drain: the drain that delivers the completions.
        sends: the send queue's slots.
        receives: the receive queue's slots.
        posted: the owner's requests in flight.
        loop: asyncio's loop, or None.
        domain: the protection domain of registered memory.
    """

    ready: bool
    """Whether sends may be posted."""
    flushed: BaseException
    """The error of flushed receives that no program sees: the cause of the end."""
    can_send_datagrams: bool
    max_sent: int
    max_datagram: int
    """The length of the longest datagram."""
    can_receive: bool
    can_read: bool
    """Whether READs may be posted."""
    can_atomics: bool
    can_immediate: bool
    """Whether requests may carry immediate data."""
    can_invalidate: bool
    """Whether messages may invalidate an rkey."""
    can_bind: bool
    """Whether windows may be bound."""
    has_pooled_receives: bool
    """Whether its receives are pooled receives for messages, not the program's own."""
    notifies_owner: bool
    """Whether the owner is notified of each completion."""
    def __new__(
        cls,
        owner: object,
        drain: Drain,
        sends: Slots,
        receives: Slots,
        posted: OpenRequests,
        loop: object,
        domain: object,
    ) -> Self: ...
    def open(
        self,
        queue_pair: int,
        max_message: int,
        max_inline: int,
        max_send_sge: int,
        max_recv_sge: int,
        max_read_sge: int,
        pool: Pool,
        /,
    ) -> None: ...
    def send(
        self,
        data: object,
        *,
        immediate: object = None,
        invalidate: object = None,
        fence: object = False,
        solicited: object = False,
    ) -> WorkRequest | None: ...
    def sendv(
        self,
        parts: object,
        *,
        immediate: object = None,
        invalidate: object = None,
        fence: object = False,
        solicited: object = False,
    ) -> WorkRequest | None: ...
    def write(
        self,
        local: object,
        remote: object,
        *,
        immediate: object = None,
        fence: object = False,
        solicited: object = False,
    ) -> WorkRequest | None: ...
    def writev(
        self,
        parts: object,
        remote: object,
        *,
        immediate: object = None,
        fence: object = False,
        solicited: object = False,
    ) -> WorkRequest | None: ...
    def read(
        self, local: object, remote: object, *, fence: object = False
    ) -> WorkRequest | None: ...
    def readv(
        self, parts: object, remote: object, *, fence: object = False
    ) -> WorkRequest | None: ...
    def compare_swap(
        self, local: object, remote: object, compare: object, swap: object, *, fence: object = False
    ) -> WorkRequest | None: ...
    def fetch_add(
        self, local: object, remote: object, add: object, *, fence: object = False
    ) -> WorkRequest | None: ...
    def compare_swap_value(
        self, remote: object, compare: object, swap: object
    ) -> Awaitable[int] | None: ...
    def fetch_add_value(self, remote: object, add: object) -> Awaitable[int] | None: ...
    def bind(
        self, window: object, memory: object, access: object, *, fence: object = False
    ) -> WorkRequest | None: ...
    def local_invalidate(self, window: object, *, fence: object = False) -> WorkRequest | None: ...
    def ud_send(
        self, data: object, peer: object, *, immediate: object = None, solicited: object = False
    ) -> WorkRequest | None: ...
    def ud_sendv(
        self, parts: object, peer: object, *, immediate: object = None, solicited: object = False
    ) -> WorkRequest | None: ...
    def set_peer(
        self, peer: object, handle: HandleBase, address_handle: int, qpn: int, qkey: int, /
    ) -> None: ...
    def ud_receive(self, buffer: object) -> DatagramReceive | None: ...
    def ud_receivev(self, parts: object) -> DatagramReceive | None: ...
    def set_senders(self, senders: SendersBase, /) -> None: ...
    def receive(self, buffer: object) -> WorkRequest | None: ...
    def receivev(self, parts: object) -> WorkRequest | None: ...
    def receive_all(
        self, parts: list[Any], /
    ) -> list[WorkRequest] | tuple[int, list[WorkRequest]] | None: ...

@final
class SharedPort:
    """Posts receives on a shared receive queue. The arguments are those of Port."""

    can_receive: bool
    notifies_owner: bool
    def __new__(
        cls,
        owner: object,
        drain: Drain,
        receives: Slots,
        posted: OpenRequests,
        loop: object,
        domain: object,
    ) -> Self: ...
    def open(self, queue: int, max_message: int, max_recv_sge: int, /) -> None: ...
    def receive_all(
        self, parts: list[Any], /
    ) -> list[WorkRequest] | tuple[int, list[WorkRequest]] | None: ...

@final
class ChainPort:
    """Collects the requests of one chain: the calls of each `method` whose `_port` it is. Each
    request takes a slot and holds its memory, and bytes that are not registered are copied. `post`
    posts all of them. If the general path has to make a request, `add` then appends it.

    Args:
        port: the port of the queue pair.
    """

    over: bool
    """Whether the chain collects no more requests."""
    signal_last_only: bool
    """Whether only the last request is signaled."""
    error: int
    """The errno of a post by `end_chain`; 0: none."""
    def __new__(cls, port: Port) -> Self: ...
    @property
    def usable(self) -> bool:
        """Whether requests may be posted on the queue pair; if not, the owner raises the reason."""

    @property
    def count(self) -> int: ...
    @property
    def posted(self) -> int:
        """The number of requests that the device accepted."""

    def add(self, request: WorkRequest, /) -> None: ...
    def requests(self) -> list[WorkRequest]: ...
    def post(self, works: int = 0, sges: bytes = b"", /) -> int: ...

class BlockPort:
    """Moves blocks of registered memory (`_connection/blocks.py`): posts as many as there are slots
    for, and the next ones whenever requests of its own have ended.

    Args:
        port: the port of the queue pair.
        operation: the name of its requests.
        is_read: READs, not WRITEs.
        signals_all: each request is signaled, because the device does not keep their order.
    """

    changed: Callable[[], object] | None
    """Called when no request is in flight: all have ended, or no slot is free. With `reports`, also
    after each chain."""
    reports: bool
    immediate: int
    """The immediate data of the last WRITE; -1: none."""
    def __new__(cls, port: Port, operation: str, is_read: bool, signals_all: bool) -> Self: ...
    @property
    def error(self) -> Exception | None:
        """The error of the first request that failed."""

    @property
    def in_flight(self) -> int: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def is_over(self) -> bool:
        """Whether no request is in flight, and none will be."""

    @property
    def total_bytes(self) -> int: ...
    @property
    def completed_bytes(self) -> int: ...
    def add_pairs(self, pairs: list[Any], /) -> int: ...
    def add_offsets(
        self,
        local: object,
        remote: object,
        ours: Buffer,
        theirs: Buffer,
        lengths: Buffer,
        /,
    ) -> int: ...
    def add_empty(self) -> None: ...
    def post(self, has_slot: bool, /) -> None: ...
    def stop(self) -> None: ...

@final
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

    wr_id: int
    """The number of the request in its completion; 0: it is not posted."""
    _opcode: int
    @property
    def _completes_as(self) -> int: ...
    def __new__(
        cls,
        owner: RequestOwner,
        operation: str,
        length: int,
        held: Sequence[Holdable],
        remote: RemoteMemory | None = None,
        *,
        is_receive: bool = False,
    ) -> Self: ...
    @property
    def operation(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def remote(self) -> RemoteMemory | None: ...
    @property
    def is_receive(self) -> bool: ...
    def done(self) -> bool:
        """Return whether the request has ended.

        Raises: nothing.
        """

    def result(self) -> WorkCompletion:
        """Return the completion of an ended request.

        Raises:
            WorkCompletionError: the request failed.
            NotPostedError, VerbsCallError: the request's chain was not posted.
            RuntimeError: the request is still in flight.
        """

    def exception(self) -> Exception | None:
        """Return the error of an ended request, None if it succeeded or is in flight. Each
        call returns an exception of its own, as each await raises one.

        Raises: nothing.
        """

    def add_done_callback(self, callback: Callable[[WorkRequest], object], /) -> None:
        """Call a function with the request once it has ended: at once if it has ended, otherwise
        on the loop's thread when its completion is delivered. The function should be short.
        Its exceptions are logged.

        Args:
            callback: a function of the request.

        Raises: nothing.
        """

    def _set_on_done(self, callback: Callable[[WorkRequest], object], /) -> None: ...
    def remove_done_callback(self, callback: Callable[[WorkRequest], object], /) -> int:
        """Remove a callback, and return how often it had been added. For asyncio.wait.

        Args:
            callback: the function that was added.

        Raises: nothing.
        """

    def cancelled(self) -> bool:
        """Return False: no verb cancels a posted request. For asyncio.wait.

        Raises: nothing.
        """

    def __await__(self) -> Generator[Any, Any, WorkCompletion]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def __del__(self) -> None: ...
    @property
    def _waiters(self) -> list[Any]: ...
    @property
    def _callbacks(self) -> list[Any]: ...
    def _stored_error(self) -> Exception | None: ...
    def _set_run(self, run: Sequence[WorkRequest], /) -> None: ...
    def _complete(self, raw: tuple[int, ...], /) -> None: ...
    def _fail(self, error: Exception, /) -> None: ...
    def _drop(self) -> None: ...
    def _keep_memory(self) -> None: ...
    def _forget_waiter(self, waiter: AnyWaiter, /) -> None: ...

@final
class Waiter:
    _asyncio_future_blocking: bool
    def __new__(cls, loop: asyncio.AbstractEventLoop) -> Self: ...
    def wake(self) -> None: ...
    def wait(self) -> Awaitable[Any]: ...
    def __call__(self, *args: object, **kwargs: object) -> None: ...
    def __await__(self) -> Generator[Any, Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def throw(self, *error: Any) -> Any: ...
    def close(self) -> None: ...
    def add_done_callback(
        self, callback: Callable[[Any], object], *, context: Any = ...
    ) -> None: ...
    def remove_done_callback(self, callback: Callable[[Any], object], /) -> int: ...
    def cancel(self, msg: object = None) -> bool: ...
    def result(self) -> None: ...
    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def get_loop(self) -> asyncio.AbstractEventLoop: ...

@final
class Method:
    __wrapped__: Callable[..., Any]
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Any: ...

class SendersBase:
    _known: Any
    def __new__(cls, *args: object, **kwargs: object) -> Self: ...

class DatagramFields:
    @property
    def length(self) -> int: ...
    @property
    def immediate(self) -> int | None: ...
    @property
    def sender_qp_num(self) -> int: ...
    @property
    def source(self) -> Any: ...

@final
class DatagramReceive:
    """A receive that is posted into your own memory. Await it for its DatagramArrival. Any
    number of tasks may await it, any number of times.

    `request` is the WorkRequest. The byte_len of its completion includes the 40 bytes of
    the GRH, which are stored in separate memory.

    Raises:
        as `WorkRequest`.

    Cancellation: the receive stays posted, and its memory is held.
    """

    def __new__(cls, request: WorkRequest, header: Lease, senders: SendersBase) -> Self: ...
    @property
    def request(self) -> WorkRequest: ...
    def done(self) -> bool:
        """Return whether the receive has completed.

        Raises: nothing.
        """

    def result(self) -> Any:
        """Return the arrival of a completed receive.

        Raises:
            WorkCompletionError: the receive failed.
            RuntimeError: the receive is still in flight.
        """

    def _forget_waiter(self, waiter: AnyWaiter, /) -> None: ...
    def __await__(self) -> Generator[Any, Any, Any]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...

class CompletionFields:
    _fields: ClassVar[tuple[str, ...]]
    def __new__(
        cls,
        wr_id: int,
        status: int,
        opcode: int,
        vendor_err: int,
        byte_len: int,
        immediate: int,
        qp_num: int,
        src_qp: int,
        wc_flags: int,
        pkey_index: int,
        slid: int,
        sl: int,
        dlid_path_bits: int,
        reserved: int = 0,
    ) -> Self: ...
    @classmethod
    def _make(cls, numbers: Iterable[int], /) -> Self: ...
    @property
    def wr_id(self) -> int: ...
    @property
    def status(self) -> int: ...
    @property
    def opcode(self) -> int: ...
    @property
    def vendor_err(self) -> int: ...
    @property
    def byte_len(self) -> int: ...
    @property
    def immediate(self) -> int: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def src_qp(self) -> int: ...
    @property
    def wc_flags(self) -> int: ...
    @property
    def pkey_index(self) -> int: ...
    @property
    def slid(self) -> int: ...
    @property
    def sl(self) -> int: ...
    @property
    def dlid_path_bits(self) -> int: ...
    @property
    def reserved(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __getitem__(self, place: Any, /) -> Any: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __lt__(self, other: Any, /) -> bool: ...
    def __le__(self, other: Any, /) -> bool: ...
    def __gt__(self, other: Any, /) -> bool: ...
    def __ge__(self, other: Any, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
