"""Messages in order of arrival: receives posted from the pool, taken out by one task.

A block goes back to the device only when its message has been received by the program. So a slow
reader leaves its peer without receives, and the peer's device waits (RNR): that is the flow
control, and no memory grows without bound.

Where a connection takes its receives from a shared receive queue, that posts them, and delivers
here what came for this connection.
"""

from collections import deque
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

from aiordma.endpoint import Endpoint
from aiordma.errors import RdmaError
from aiordma.event_loop import Waiter
from aiordma.pool import Lease
from aiordma.request import WorkRequest
from aiordma.states import ConnectionState

__all__ = ("Blocks", "MessageQueue")


class Blocks(Protocol):
    """Where the block of a message goes back to, other than the endpoint's own receives."""

    def give_back(self, lease: Lease) -> None:
        """Post it again, or release it."""


class MessageQueue:
    """What has come for one endpoint: in its own pooled receives, or, where `blocks` is given, in
    those of a shared receive queue."""

    def __init__(self, endpoint: Endpoint, blocks: Blocks | None = None) -> None:
        self._endpoint = endpoint
        self._give_back = self._post if blocks is None else blocks.give_back
        self._size = endpoint.options.receive_size
        self._ready: deque[tuple[Lease, int]] = deque()
        self._posted: dict[int, Lease] = {}
        self._waiter: Waiter | None = None
        self._busy = False
        endpoint.on_end = self._wake
        endpoint.on_close = self._discard

    def fill(self) -> None:
        """Post all receives; before the connection is made, so that no message finds none."""
        for _ in range(self._endpoint.options.receive_buffers):
            self._post(self._endpoint.hub.pool.lease(self._size))

    def _post(self, lease: Lease) -> None:
        try:
            request = self._endpoint.post_receive(lease.memory.sge, 1, self._size, ())
        except RdmaError as error:
            lease.release()
            if self._endpoint.cause is None:
                # On a living connection it would leave the peer without receives for ever.
                self._endpoint.fail(error)
            return
        self._posted[request.wr_id] = lease
        request.add_done_callback(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        lease = self._posted.pop(request.wr_id)
        if request.exception() is not None:
            lease.release()
            return
        self.deliver(lease, request.result().byte_len)

    def deliver(self, lease: Lease, length: int) -> None:
        """Take a message; its block is ours until it goes back."""
        self._ready.append((lease, length))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    async def receive(self) -> bytes:
        """Return the next message; a cancelled wait takes none.

        Raises:
            anyio.EndOfStream: the peer disconnected, and every message has been received.
            anyio.BusyResourceError: another task is receiving.
            ClosedError, WorkCompletionError: as the endpoint ended.
        """
        if self._busy:
            raise anyio.BusyResourceError("receiving from")
        self._busy = True
        try:
            if self._ready:
                await checkpoint()
            while not self._ready:
                self._raise_if_ended()
                self._waiter = self._endpoint.loop.waiter()
                await self._waiter.wait()
        finally:
            self._waiter = None
            self._busy = False
        lease, length = self._ready.popleft()
        data = bytes(lease.memory.view[:length])
        self._give_back(lease)
        return data

    def _raise_if_ended(self) -> None:
        endpoint = self._endpoint
        if endpoint.state is ConnectionState.CLOSED:
            endpoint.require_usable()
        # What came before the end may still be on its way here: only the end itself is final.
        if endpoint.ended:
            if endpoint.state is ConnectionState.DISCONNECTED:
                raise anyio.EndOfStream from endpoint.cause
            endpoint.require_usable()

    def _discard(self) -> None:
        # The endpoint has ended and is closed: nobody will receive these any more.
        while self._ready:
            lease, _ = self._ready.popleft()
            self._give_back(lease)
        self._wake()
