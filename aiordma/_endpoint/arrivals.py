"""What has come for one endpoint, in order of arrival: receives posted from the pool, taken out by
one task at a time. A block goes back to the device once the program has what came in it."""

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
    """See the module. What the program gets of an arrival is for `_read` to say.

    It wakes its receiver when the endpoint ends. Whoever makes it sees to it that it discards what
    is left once the endpoint is closed.

    Args:
        endpoint: whose receives they are.
        size: of each receive, in bytes.
        pause: how many that are there already are taken before others have their turn.
        give_back: where blocks go that somebody else posts; None: to the endpoint's receives.
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
        """Post all receives; before anything can arrive, so that nothing finds none."""
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
                # A living endpoint would hear less and less, without a word, and whoever waits
                # for its receives would wait for ever.
                self._endpoint.fail(error)
            return
        self._posted[request.wr_id] = lease
        request._on_done(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        # An interrupt (KeyboardInterrupt) may end this anywhere, and then it is called once more.
        lease = self._posted.get(request.wr_id)
        if lease is not None and request.exception() is not None:
            lease.release()
            del self._posted[request.wr_id]
        elif lease is not None:
            arrived = lease, request.result()
            # With no signal handled between the two, which happens in calls and behind them.
            del self._posted[request.wr_id]
            self._ready.append(arrived)
        self._wake()

    def deliver(self, lease: Lease, completion: WorkCompletion) -> None:
        """Take what has arrived in a block that somebody else posted; it is ours until it goes
        back."""
        self._ready.append((lease, completion))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    async def receive(self) -> Taken:
        """Return the next one; a cancelled wait takes none.

        Raises:
            anyio.BusyResourceError: another task is receiving.
            ClosedError, WorkCompletionError, DeviceRemovedError: as the endpoint ended.
            ForkError: this is a child of the process that made the endpoint.
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
                # A pause each time would cost as much as the message.
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
        """Return what the program gets: a copy, since the block goes back."""
        raise NotImplementedError

    def _raise_if_no_more_comes(self) -> None:
        # What came before a failure may still be on its way here: only the end itself is final.
        if self._endpoint.life.has_ended or self._endpoint.state is ConnectionState.CLOSED:
            self._endpoint.require_usable()

    def discard(self) -> None:
        """Drop what was not received: the endpoint has ended and is closed, so that its own blocks
        are not posted again but released."""
        while self._ready:
            lease, _ = self._ready.popleft()
            self._give_back(lease)
        self._wake()
