"""The contents of an endpoint's pooled receives, in order of arrival, for one task at a time. When
the program has received the contents of a block, the block is posted again."""

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiordma._base.errors import RdmaError
from aiordma._base.states import ConnectionState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._loop.event_loop import Waiter
from aiordma._requests.pool import Lease
from aiordma._requests.request import WorkRequest
from aiordma.verbs import WorkCompletion

__all__ = ("Arrivals",)

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
        self._give_back = give_back or self._post
        self._ready: deque[tuple[Lease, WorkCompletion]] = deque()
        self._posted: dict[int, Lease] = {}
        self._waiter: Waiter | None = None
        self._busy = False
        self._at_once = 0
        endpoint.life.on_end.append(self._wake)

    def fill(self) -> None:
        """Post all receives. Call this before messages can arrive, so that each finds a receive."""
        for _ in range(self._endpoint.options.receive_buffers):
            self._post(self._endpoint.hub.pool.lease(self._size))

    def _post(self, lease: Lease) -> None:
        memory = lease.memory
        try:
            request = self._endpoint.port.receive(memory) or self._endpoint.receives.submit(
                memory._sge, 1, self._size, ()
            )
        except RdmaError as error:
            lease.release()
            if self._endpoint.cause is None:
                # A live endpoint would lose its receives one by one without an error, and a task
                # that receives would at last wait for ever.
                self._endpoint.fail(error)
            return
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
            ClosedError, WorkCompletionError, DeviceRemovedError: the endpoint has ended.
            ForkError: this process is a forked child of the process that made the endpoint.
            EventLoopError: this is another thread, or another event loop.
        """
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
                await (checkpoint_if_cancelled() if self._at_once % self._pause else checkpoint())
            while not ready:
                self._raise_if_no_more_comes()
                self._waiter = self._endpoint.loop.waiter()
                await self._waiter.wait()
        finally:
            self._waiter = None
            self._busy = False
        lease, completion = ready.popleft()
        taken = self._read(lease, completion)
        self._give_back(lease)
        return taken

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
        self._wake()
