"""The contents of an endpoint's pooled receives, in order of arrival, for one task at a time. When
the program has received the contents of a block, the block is posted again.

Blocks are posted again in chains, if the device lets a message wait that finds no receive (RNR).
The chain is posted when it is long enough, and before a task waits for the next arrival.

The engine (engine/arrivals.c) keeps the queue, and hands out what is there. Here are the waiting,
and the errors.
"""

import errno
from collections.abc import Callable
from functools import partial

from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiordma._base.enums import QueuePairType
from aiordma._base.errors import BusyError, RdmaError, VerbsCallError, detached
from aiordma._base.states import ConnectionState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._native import ArrivalQueue, ArrivalView, Lease, PooledReceives

LONGEST_CHAIN = 16

PAUSE = 64
"""How many available arrivals are handed out before other tasks run. A pause is one turn of the
event loop, and costs as much as ten messages."""

NO_LIMIT = 2**62


def chain_length(count: int, part: int) -> int:
    """Return how many of `count` blocks are posted together: at most one in `part`, but at least
    one."""
    return min(LONGEST_CHAIN, max(1, count // part))


class Arrivals:
    """See the module. A subclass takes the arrivals, after `wait`, each in its own form.

    The end of the endpoint wakes the receiving task. The creator must call `discard` once the
    endpoint is closed.

    Args:
        endpoint: the endpoint whose receives these are.
        size: the size of each receive, in bytes.
        receives: posts the blocks of this and other endpoints; None: blocks of its own are posted.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        size: int,
        receives: PooledReceives | None = None,
    ) -> None:
        posts_itself = receives is None
        if receives is None:
            receives = PooledReceives(endpoint.work.port, endpoint.memory.pool, self._refused)
        count = endpoint.options.receive_buffers
        self.queue: ArrivalQueue = ArrivalQueue(
            self, receives, endpoint.work.port, PAUSE, count if posts_itself and count else NO_LIMIT
        )
        if posts_itself:
            receives.set_queue(self.queue)
        self.receives: PooledReceives = receives
        self._endpoint = endpoint
        self._size = size
        endpoint.teardown.on_ended.append(self.queue.wake)

    def fill(self) -> None:
        """Post all receives. Call this before messages can arrive, so that each finds a receive."""
        endpoint = self._endpoint
        count = endpoint.options.receive_buffers
        if (
            endpoint.pair.service is QueuePairType.RC
            and endpoint.hub.lets_peers_wait
            and count >= 4
        ):
            self.receives.chain = max(2, chain_length(count, 4))
        if count:
            self.receives.fill(count, self._size)

    def _refused(self, error: int) -> None:
        """Handle C's errno of a failed post; 0: the port was not usable."""
        endpoint = self._endpoint
        if endpoint.teardown.cause is not None:
            return
        # A live endpoint would lose its receives one by one without an error, and a task that
        # receives would at last wait for ever.
        try:
            if error:
                endpoint.post_refused(error, True)
            endpoint.require_usable()
        except RdmaError as refused:
            endpoint.fail(refused)

    async def wait(self) -> None:
        """Wait until there is an arrival, for this task to take it at once.

        Raises:
            BusyError: another task is receiving, or the program holds all blocks by `view`.
            ClosedError, WorkCompletionError, DeviceRemovedError: the endpoint has ended.
            ForkError: this process is a forked child of the process that made the endpoint.
            EventLoopError: this is another thread, or another event loop.

        Cancellation: nothing is taken.
        """
        queue = self.queue
        waiter = queue.begin_wait()
        if waiter is not None:
            try:
                await waiter.wait()
            finally:
                queue.end_wait()
            if queue.arrived:
                return
        await self._wait_with_checks()

    async def _wait_with_checks(self) -> None:
        endpoint, queue = self._endpoint, self.queue
        endpoint.require_own_loop()
        if queue.busy:
            raise BusyError(
                f"another task is already receiving from {endpoint.name}: one task receives at a "
                "time, and can pass the messages to others"
            )
        at_once = 0
        try:
            queue.busy = True
            if queue.arrived:
                # A checkpoint for each message would cost as much as the message.
                if queue.at_once + 1 >= queue.pause:
                    await checkpoint()
                else:
                    at_once = queue.at_once + 1
                    if endpoint.loop.asyncio_loop is None:
                        await checkpoint_if_cancelled()  # trio requires it of each call
            while not queue.arrived:
                at_once = 0
                self.receives.post_unposted()
                self._raise_if_no_more_comes()
                self._raise_if_all_are_held()
                waiter = endpoint.loop.waiter()
                queue.set_waiter(waiter)
                await waiter.wait()
        finally:
            queue.end_wait()
            queue.at_once = at_once

    def _raise_if_all_are_held(self) -> None:
        count = self.queue.most_views
        if self.queue.views >= count:
            raise BusyError(
                f"the program holds all receive_buffers={count} of {self._endpoint.name} by "
                "receive_view(), so no message can arrive: leave one of the blocks first, or use "
                "more receive_buffers"
            )

    def _raise_if_no_more_comes(self) -> None:
        # After a failure, earlier arrivals may still be delivered, until the endpoint has ended.
        if self._endpoint.teardown.has_ended or self._endpoint.state is ConnectionState.CLOSED:
            self._endpoint.require_usable()

    # -- for the engine's views -----------------------------------------------------------------

    async def enter(self, view: ArrivalView) -> memoryview:
        """Wait for an arrival, and take it as a view."""
        await self.wait()
        return view._open()

    def end_elsewhere(self, view: ArrivalView) -> None:
        """Give back a view's block: the coroutine was closed in another thread, or process."""
        if not self._endpoint.is_inherited:
            self._endpoint.loop.call_from_thread(view._end)

    def release_later(self, lease: Lease) -> Callable[[], None]:
        """Return a function that returns a block to the pool: in any thread."""
        return partial(self._endpoint.loop.call_from_thread, lease.release)

    def replace(self, lease: Lease) -> None:
        """Post another block in place of one that the program still uses."""
        # A shared receive queue outlives the endpoint, and posts for others, too.
        poster = self._endpoint.shared_receive or self._endpoint
        if poster.cause is not None:
            return
        try:
            another = poster.memory.pool.lease(lease.memory.length)
        except RdmaError as error:
            poster.fail(error)
        except (OSError, MemoryError) as error:  # OSError: no memory could be mapped
            hint = "The connection had no memory for another receive buffer"
            lacking = VerbsCallError(errno.ENOMEM, "mmap", hint)
            lacking.__cause__ = detached(error)
            poster.fail(lacking)
        else:
            self.receives.give_back(another)
