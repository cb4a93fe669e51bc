"""The contents of an endpoint's pooled receives, in order of arrival, for one task at a time. When
the program has received the contents of a block, the block is posted again.

Blocks are posted again in chains, if the device lets a message wait that finds no receive (RNR).
The chain is posted when it is long enough, and before a task waits for the next arrival.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import finalize, ref

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiordma._base.enums import QueuePairType
from aiordma._base.errors import BusyError, RdmaError
from aiordma._base.states import ConnectionState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._requests.pool import Lease
from aiordma._requests.request import WorkRequest
from aiordma.verbs import WorkCompletion

__all__ = ("ArrivalView", "Arrivals")

LONGEST_CHAIN = 16

Taken = TypeVar("Taken")


class Arrivals(Generic[Taken]):
    """See the module. A subclass defines `_read`, which returns the program's copy of the contents.

    The end of the endpoint wakes the receiving task. The creator must call `discard` once the
    endpoint is closed.

    Args:
        endpoint: the endpoint whose receives these are.
        size: the size of each receive, in bytes.
        pause: how many available arrivals are returned before other tasks run.
        give_back: called to return blocks that another object posts; None: the endpoint posts them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        size: int,
        pause: int,
        give_back: Callable[[Lease], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._size = size
        self._pause = pause
        self._posts_itself = give_back is None
        self._give_back = give_back or self._post_later
        self._chain = 1
        """The number of blocks that are posted together."""
        self._unposted: list[Lease] = []
        self._views = 0
        """The number of blocks that the program holds by `view_next`."""
        self._ready: deque[tuple[Lease, WorkCompletion]] = deque()
        self._posted: dict[int, Lease] = {}
        self._waiter: Waiter | None = None
        self._busy = False
        self._at_once = 0
        endpoint.life.on_end.append(self._wake)

    def fill(self) -> None:
        """Post all receives. Call this before messages can arrive, so that each finds a receive."""
        endpoint = self._endpoint
        count = endpoint.options.receive_buffers
        if endpoint.service is QueuePairType.RC and endpoint.hub.lets_peers_wait and count >= 4:
            self._chain = min(LONGEST_CHAIN, max(2, count // 4))
        if count:
            self._post([endpoint.hub.pool.lease(self._size) for _ in range(count)])

    def _post_later(self, lease: Lease) -> None:
        self._unposted.append(lease)
        if len(self._unposted) >= self._chain or not self._posted:
            self._post_unposted()

    def _post_unposted(self) -> None:
        leases, self._unposted = self._unposted, []
        self._post(leases)

    def _post(self, leases: list[Lease]) -> None:
        # `deferring` would cost more than the posts. After an interrupt in here, receives are lost.
        endpoint, posted = self._endpoint, 0
        try:
            error, requests = self._give_to_port(leases)
            for request in requests:
                self._track(leases[posted], request)
                posted += 1
            if error:
                endpoint.post_refused(error, True)
            for lease in leases[posted:]:  # the port posts none if it cannot post all
                memory = lease.memory
                self._track(lease, endpoint.receives.submit(memory._sge, 1, memory.length, ()))
                posted += 1
        except RdmaError as refused:
            for lease in leases[posted:]:
                lease.release()
            if endpoint.cause is None:
                # A live endpoint would lose its receives one by one without an error, and a task
                # that receives would at last wait for ever.
                endpoint.fail(refused)

    def _give_to_port(self, leases: list[Lease]) -> tuple[int, Sequence[WorkRequest]]:
        """Return C's errno, and the requests that were posted."""
        port = self._endpoint.port
        if len(leases) == 1:
            request = port.receive(leases[0].memory)
            return 0, (() if request is None else (request,))
        found = port.receive_all([lease.memory for lease in leases])
        return found if isinstance(found, tuple) else (0, found or ())

    def _track(self, lease: Lease, request: WorkRequest) -> None:
        self._posted[request.wr_id] = lease
        request._on_done(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        # An interrupt (KeyboardInterrupt) can end this anywhere. It is then called again.
        lease = self._posted.get(request.wr_id)
        if lease is not None and request.exception() is not None:
            lease.release()
            del self._posted[request.wr_id]
        elif lease is not None:
            arrived = lease, request.result()
            # Python handles no signal between these two statements, only during or after a call.
            del self._posted[request.wr_id]
            self._ready.append(arrived)
        self._wake()

    def deliver(self, lease: Lease, completion: WorkCompletion) -> None:
        """Add an arrival in a block that another object posted. The block is held until it is
        given back."""
        self._ready.append((lease, completion))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    async def receive(self) -> Taken:
        """Return the next arrival. A cancelled wait takes none.

        Raises:
            anyio.BusyResourceError: another task is receiving.
            BusyError: the program holds all blocks by `view_next`.
            ClosedError, WorkCompletionError, DeviceRemovedError: the endpoint has ended.
            ForkError: this process is a forked child of the process that made the endpoint.
            EventLoopError: this is another thread, or another event loop.
        """
        lease, completion = await self._next()
        taken = self._read(lease, completion)
        self._give_back(lease)
        return taken

    def view_next(self) -> "ArrivalView":
        """Return a context manager that hands out the next arrival as a view of its block. Entering
        it raises the errors of `receive`."""
        return ArrivalView(self)

    async def _next(self) -> tuple[Lease, WorkCompletion]:
        self._endpoint.require_same_process()
        if self._endpoint.loop.thread != get_ident():
            self._endpoint.require_own_loop()
        if self._busy:
            raise anyio.BusyResourceError("receiving from")
        self._busy, ready = True, self._ready
        try:
            if ready:
                self._at_once += 1
                # A checkpoint for each message would cost as much as the message.
                if not self._at_once % self._pause:
                    await checkpoint()
                elif self._endpoint.loop.asyncio_loop is None:
                    await checkpoint_if_cancelled()  # trio requires it of each call
            while not ready:
                if self._unposted:
                    self._post_unposted()
                self._raise_if_no_more_comes()
                self._raise_if_all_are_held()
                self._waiter = self._endpoint.loop.waiter()
                await self._waiter.wait()
        finally:
            self._waiter = None
            self._busy = False
        return ready.popleft()

    def _raise_if_all_are_held(self) -> None:
        count = self._endpoint.options.receive_buffers
        if self._posts_itself and self._views >= count:
            raise BusyError(
                f"the program holds all receive_buffers={count} of {self._endpoint.name} by "
                "receive_view(), so no message can arrive: leave one of the blocks first, or use "
                "more receive_buffers"
            )

    def _read(self, lease: Lease, completion: WorkCompletion) -> Taken:
        """Return the program's copy of the contents; the block is given back afterwards."""
        raise NotImplementedError

    def _raise_if_no_more_comes(self) -> None:
        # After a failure, earlier arrivals may still be delivered, until the endpoint has ended.
        if self._endpoint.life.has_ended or self._endpoint.state is ConnectionState.CLOSED:
            self._endpoint.require_usable()

    def discard(self) -> None:
        """Drop all remaining arrivals. The endpoint is closed, so its own blocks are released, not
        posted again."""
        while self._ready:
            lease, _ = self._ready.popleft()
            self._give_back(lease)
        if self._unposted:
            self._post_unposted()
        self._wake()

    def _view_of(
        self, lease: Lease, completion: WorkCompletion
    ) -> tuple[memoryview, "ref[object]"]:
        """Return a view of the contents, and a reference to its exporter, which lives as long as
        the view and all that the program made of it."""
        exporter = lease.memory._export(self._contents_length(completion))
        self._views += 1
        return memoryview(exporter).toreadonly(), ref(exporter)

    def _contents_length(self, completion: WorkCompletion) -> int:
        """Return the number of bytes of an arrival in its block."""
        return completion.byte_len

    def _end_view(self, lease: Lease, view: memoryview, exporter: "ref[object]") -> None:
        """Release the view, and give back its block, or another one while the program uses it."""
        with suppress(BufferError):  # an array was made of the view, and uses it
            view.release()
        endpoint = self._endpoint
        if endpoint.is_inherited:
            return
        if endpoint.loop.thread != get_ident():  # the coroutine was closed by another thread
            endpoint.loop.call_from_thread(lambda: self._give_back_viewed(lease, exporter))
            return
        self._give_back_viewed(lease, exporter)

    def _give_back_viewed(self, lease: Lease, exporter: "ref[object]") -> None:
        self._views -= 1
        used = exporter()
        if used is None:
            self._give_back(lease)
            self._wake()
            return
        endpoint = self._endpoint
        finalize(used, _release_later, endpoint.loop, lease).atexit = False
        if endpoint.cause is not None:
            return
        try:
            another = endpoint.hub.pool.lease(lease.memory.length)
        except RdmaError as error:
            endpoint.fail(error)
            return
        self._give_back(another)
        self._wake()


def _release_later(loop: EventLoop, lease: Lease) -> None:
    # The last reference can be dropped in any thread.
    loop.call_from_thread(lease.release)


class ArrivalView:
    """See `Arrivals.view_next`. It is entered once."""

    __slots__ = ("_arrivals", "_entered", "_exporter", "_lease", "_view")

    def __init__(self, arrivals: Arrivals[Any]) -> None:
        self._arrivals = arrivals
        self._entered = False

    async def __aenter__(self) -> memoryview:
        if self._entered:
            raise ValueError("a receive_view() is entered once: call it for each message")
        self._entered = True
        self._lease, completion = await self._arrivals._next()
        self._view, self._exporter = self._arrivals._view_of(self._lease, completion)
        return self._view

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._arrivals._end_view(self._lease, self._view, self._exporter)
