"""Messages in order of arrival: receives posted from the pool, taken out by one task.

A block goes back to the device only when its message has been received by the program. So a slow
reader leaves its peer without receives, and the peer's device waits (RNR): that is the flow
control, and no memory grows without bound.

Where a connection takes its receives from a shared receive queue, that posts them, and delivers
here what came for this connection.
"""

from collections import deque
from typing import NamedTuple, Protocol

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiordma.endpoint import Endpoint
from aiordma.enums import WorkCompletionFlag, WorkCompletionOpcode
from aiordma.errors import RdmaError
from aiordma.event_loop import Waiter
from aiordma.pool import Lease
from aiordma.request import WorkRequest
from aiordma.states import ConnectionState
from aiordma.verbs import WorkCompletion

__all__ = ("Blocks", "Message", "MessageQueue")

PAUSE = 16
"""Messages that are there already, until others have their turn."""

_WRITTEN = int(WorkCompletionOpcode.RECV_RDMA_WITH_IMM)
_IMMEDIATE = int(WorkCompletionFlag.WITH_IMM)
_INVALIDATED = int(WorkCompletionFlag.WITH_INV)


class Message(NamedTuple):
    """A message, and what came beside its data."""

    data: bytes
    """What the peer sent; empty for a WRITE with immediate, which is told of and not received."""
    immediate: int | None = None
    """The peer's 32 bits of immediate data, as a number."""
    invalidated: int | None = None
    """The rkey that its arrival invalidated (SEND with invalidate)."""
    written: int | None = None
    """How many bytes a WRITE with immediate wrote."""


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
        self._ready: deque[tuple[Lease, WorkCompletion]] = deque()
        self._posted: dict[int, Lease] = {}
        self._waiter: Waiter | None = None
        self._busy = False
        self._at_once = 0
        shared = endpoint.shared_receive
        self._is_fed = bool(shared.buffers if shared else endpoint.options.receive_buffers)
        endpoint.on_end = self._wake
        endpoint.on_close = self._discard

    def fill(self) -> None:
        """Post all receives; before the connection is made, so that no message finds none."""
        for _ in range(self._endpoint.options.receive_buffers):
            self._post(self._endpoint.hub.pool.lease(self._size))

    def _post(self, lease: Lease) -> None:
        memory = lease.memory
        try:
            request = self._endpoint.port.receive(memory) or self._endpoint.post_receive(
                memory.sge, 1, self._size, ()
            )
        except RdmaError as error:
            lease.release()
            if self._endpoint.cause is None:
                # On a living connection it would leave the peer without receives for ever.
                self._endpoint.fail(error)
            return
        self._posted[request.wr_id] = lease
        request.tell(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        lease = self._posted.pop(request.wr_id)
        if request.exception() is not None:
            lease.release()
            return
        self.deliver(lease, request.result())

    def deliver(self, lease: Lease, completion: WorkCompletion) -> None:
        """Take a message; its block is ours until it goes back."""
        self._ready.append((lease, completion))
        if self._waiter is not None:
            self._waiter.wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()

    async def receive(self) -> Message:
        """Return the next message; a cancelled wait takes none.

        Raises:
            ValueError: the receives are posted by the program.
            anyio.EndOfStream: the peer disconnected, and every message has been received.
            anyio.BusyResourceError: another task is receiving.
            ClosedError, WorkCompletionError: as the endpoint ended.
        """
        if self._busy or not self._is_fed:
            self._refuse()
        self._endpoint.require_same_process()
        self._busy = True
        try:
            if self._ready:
                self._at_once += 1
                # A pause each time would cost as much as the message.
                await (checkpoint_if_cancelled() if self._at_once % PAUSE else checkpoint())
            while not self._ready:
                self._raise_if_ended()
                self._waiter = self._endpoint.loop.waiter()
                await self._waiter.wait()
        finally:
            self._waiter = None
            self._busy = False
        lease, completion = self._ready.popleft()
        message = _message(lease, completion)
        self._give_back(lease)
        return message

    def _refuse(self) -> None:
        if self._is_fed:
            raise anyio.BusyResourceError("receiving from")
        if self._endpoint.shared_receive is not None:
            raise ValueError(
                "this connection takes its receives from a shared receive queue made with "
                "buffers=0: post them there, with post_srq_recv()"
            )
        raise ValueError(
            "this connection was made with receive_buffers=0: post receives with post_recv()"
        )

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


def _message(lease: Lease, completion: WorkCompletion) -> Message:
    length = completion.byte_len
    if completion.opcode == _WRITTEN:
        return Message(b"", completion.immediate, None, length)
    data = lease.memory.copy(length)
    if not completion.wc_flags & (_IMMEDIATE | _INVALIDATED):
        return Message(data)
    if completion.wc_flags & _IMMEDIATE:
        return Message(data, completion.immediate)
    return Message(data, None, completion.immediate)
