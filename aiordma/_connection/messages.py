"""The messages that arrive on a connection.

A block is posted again only when the program has received its message. So if the program receives
slowly, no receives are left for the peer's messages, and the peer's device waits (RNR). This is the
flow control: no memory grows without bound.

If a connection takes its receives from a shared receive queue, that queue posts them, and delivers
the connection's messages here.
"""

from typing import NamedTuple

import anyio

from aiordma._base.states import ConnectionState
from aiordma._endpoint.arrivals import Arrivals
from aiordma._endpoint.endpoint import Endpoint


class Message(NamedTuple):
    """A message that arrived: its data, and the other fields of its completion."""

    data: bytes
    """The bytes that the peer sent; empty for a WRITE with immediate, whose bytes are in the memory
    that it wrote to."""
    immediate: int | None = None
    """The peer's 32 bits of immediate data, as a number."""
    invalidated: int | None = None
    """The rkey that the message invalidated (SEND with invalidate)."""
    written: int | None = None
    """The number of bytes that a WRITE with immediate wrote."""


class MessageQueue(Arrivals):
    """The messages of one connection: from its own pooled receives, or from those of its shared
    receive queue.

    In addition to its errors, `wait` raises:
        ValueError: the program posts the receives itself.
        anyio.EndOfStream: the peer's program, or the kernel of a killed one, disconnected, and
            every message has been received.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        shared = endpoint.shared_receive
        receives = None if shared is None else shared.pooled
        super().__init__(endpoint, endpoint.options.receive_size, receives)
        self.queue.fed = bool(shared.buffers if shared else endpoint.options.receive_buffers)
        endpoint.teardown.on_closed.append(self.queue.discard)

    async def receive(self) -> Message:
        """Return the next message. A cancelled wait takes none.

        Raises: as `wait`.
        """
        await self.wait()
        message: Message = self.queue.take_message(Message)
        return message

    def _raise_if_no_more_comes(self) -> None:
        endpoint = self._endpoint
        if not self.queue.fed:
            if endpoint.shared_receive is not None:
                raise ValueError(
                    "this connection takes its receives from a shared receive queue made with "
                    "buffers=0: post them there, with post_srq_recv()"
                )
            raise ValueError(
                "this connection was made with receive_buffers=0: post receives with post_recv()"
            )
        cause, state = endpoint.teardown.cause, endpoint.handshake.state
        if endpoint.teardown.has_ended and state is ConnectionState.DISCONNECTED:
            raise anyio.EndOfStream(str(cause)) from cause
        super()._raise_if_no_more_comes()
