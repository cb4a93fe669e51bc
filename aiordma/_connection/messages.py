"""Messages: what arrives on a connection.

A block goes back to the device only when its message has been received by the program. So a slow
reader leaves its peer without receives, and the peer's device waits (RNR): that is the flow
control, and no memory grows without bound.

Where a connection takes its receives from a shared receive queue, that posts them, and delivers
here what came for this connection.
"""

from typing import NamedTuple, Protocol

import anyio

from aiordma._base.enums import WorkCompletionFlag, WorkCompletionOpcode
from aiordma._base.errors import detached
from aiordma._base.states import ConnectionState
from aiordma._endpoint.arrivals import Arrivals
from aiordma._endpoint.endpoint import Endpoint
from aiordma._requests.pool import Lease
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


class MessageQueue(Arrivals[Message]):
    """What has come for one connection: in its own pooled receives, or, where `blocks` is given,
    in those of a shared receive queue.

    Beside what every receiver is told, `receive` raises:
        ValueError: the receives are posted by the program.
        anyio.EndOfStream: the peer disconnected, and every message has been received.
    """

    def __init__(self, endpoint: Endpoint, blocks: Blocks | None = None) -> None:
        give_back = None if blocks is None else blocks.give_back
        super().__init__(endpoint, endpoint.options.receive_size, PAUSE, give_back)
        shared = endpoint.shared_receive
        self._is_fed = bool(shared.buffers if shared else endpoint.options.receive_buffers)
        endpoint.life.on_close.append(self.discard)

    def _read(self, lease: Lease, completion: WorkCompletion) -> Message:
        length = completion.byte_len
        if completion.opcode == _WRITTEN:
            return Message(b"", completion.immediate, None, length)
        data = lease.memory._copy(length)
        if not completion.wc_flags & (_IMMEDIATE | _INVALIDATED):
            return Message(data)
        if completion.wc_flags & _IMMEDIATE:
            return Message(data, completion.immediate)
        return Message(data, None, completion.immediate)

    def _raise_if_no_more_comes(self) -> None:
        endpoint = self._endpoint
        if not self._is_fed:
            if endpoint.shared_receive is not None:
                raise ValueError(
                    "this connection takes its receives from a shared receive queue made with "
                    "buffers=0: post them there, with post_srq_recv()"
                )
            raise ValueError(
                "this connection was made with receive_buffers=0: post receives with post_recv()"
            )
        if endpoint.life.has_ended and endpoint.state is ConnectionState.DISCONNECTED:
            assert endpoint.cause is not None
            raise anyio.EndOfStream(str(endpoint.cause)) from detached(endpoint.cause)
        super()._raise_if_no_more_comes()
