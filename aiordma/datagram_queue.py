"""Datagrams in order of arrival: receives posted from the pool, taken out by one task.

Nobody waits for us: what meets no posted receive is dropped by the device. A block goes back to
the device as soon as its datagram has been received by the program.
"""

from collections import deque

import anyio
from anyio.lowlevel import checkpoint

from aiordma.datagram_message import DatagramMessage, Senders
from aiordma.endpoint import Endpoint
from aiordma.errors import RdmaError
from aiordma.event_loop import Waiter
from aiordma.pool import Lease
from aiordma.request import WorkRequest
from aiordma.states import ConnectionState
from aiordma.verbs import WorkCompletion

__all__ = ("DatagramQueue",)


class DatagramQueue:
    """The pooled receives of one endpoint, each of `size` bytes, the GRH's among them."""

    def __init__(self, endpoint: Endpoint, size: int, senders: Senders) -> None:
        self._endpoint = endpoint
        self._size = size
        self._senders = senders
        self._ready: deque[tuple[Lease, WorkCompletion]] = deque()
        self._posted: dict[int, Lease] = {}
        self._waiter: Waiter | None = None
        self._busy = False

    def fill(self) -> None:
        """Post all receives."""
        for _ in range(self._endpoint.options.receive_buffers):
            self._post(self._endpoint.hub.pool.lease(self._size))

    def _post(self, lease: Lease) -> None:
        try:
            request = self._endpoint.port.receive(lease.memory) or self._endpoint.post_receive(
                lease.memory.sge, 1, self._size, ()
            )
        except RdmaError as error:
            lease.release()
            if self._endpoint.cause is None:
                # A living endpoint would hear less and less, without a word.
                self._endpoint.fail(error)
            return
        self._posted[request.wr_id] = lease
        request.tell(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        lease = self._posted.pop(request.wr_id)
        if request.exception() is not None:
            lease.release()
            return
        self._ready.append((lease, request.result()))
        self.wake()

    def wake(self) -> None:
        """Let the waiting task look again."""
        if self._waiter is not None:
            self._waiter.wake()

    async def receive(self) -> DatagramMessage:
        """Return the next datagram; a cancelled wait takes none.

        Raises:
            anyio.BusyResourceError: another task is receiving.
            ClosedError, WorkCompletionError, DeviceRemovedError: as the endpoint ended.
        """
        self._endpoint.require_same_process()
        if self._busy:
            raise anyio.BusyResourceError("receiving from")
        self._busy = True
        try:
            if self._ready:
                await checkpoint()
            while not self._ready:
                # What came before a failure may still be on its way here: only the end is final.
                if self._endpoint.ended or self._endpoint.state is ConnectionState.CLOSED:
                    self._endpoint.require_usable()
                self._waiter = self._endpoint.loop.waiter()
                await self._waiter.wait()
        finally:
            self._waiter = None
            self._busy = False
        lease, completion = self._ready.popleft()
        message = DatagramMessage(lease.memory.view, completion, self._senders)
        self._post(lease)
        return message

    def discard(self) -> None:
        """Drop what was not received: the endpoint has ended, and is closed."""
        while self._ready:
            lease, _ = self._ready.popleft()
            lease.release()
        self.wake()
