"""Connection: messages and one-sided operations with one peer.

Two layers over one endpoint. `post_*` keep the man pages' names, post at once, never block, and
return a WorkRequest to await later. The coroutines wait for a free slot, post, and return when the
request is done.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import anyio
from anyio.abc import ObjectStream

from aiordma.endpoint import Endpoint
from aiordma.errors import NotSupportedError
from aiordma.messages import Blocks, MessageQueue
from aiordma.operations import Operations
from aiordma.options import ConnectionOptions
from aiordma.socket_address import SocketAddress
from aiordma.staging import Staging
from aiordma.states import ConnectionState
from aiordma.work_queues import SharedReceives

__all__ = ("Connection", "ConnectionInfo")


class ConnectionInfo(anyio.TypedAttributeSet):
    """Typed attributes of a connection, for `connection.extra(...)`."""

    local_address: SocketAddress = anyio.typed_attribute()
    peer_address: SocketAddress = anyio.typed_attribute()
    device_name: str = anyio.typed_attribute()
    private_data: bytes = anyio.typed_attribute()


class SharedMessages(SharedReceives, Blocks, Protocol):
    """A shared receive queue, as a connection sees it."""

    def serve(self, endpoint: Endpoint, messages: MessageQueue, connection: "Connection") -> None:
        """Deliver what comes for it, until it is closed; before its handshake."""


class Connection(Operations, ObjectStream[bytes]):
    """A reliable connection: an anyio ObjectStream of messages, and RDMA READ and WRITE.

    Made by `aiordma.connect` and by listeners. A message is what one `send` sent: one SEND on the
    wire, which any verbs program understands. `async for message in connection` ends when the peer
    disconnects.

    Buffers: everything takes registered memory (`register`, and slices of it) or anything with a
    buffer. The device owns what was posted until the request ends; cancelling changes nothing
    about that (docs/guarantees.md).

    Args of all send-like methods: raise ClosedError on a closed connection, DisconnectedError
    after the peer has gone, and the first WorkCompletionError after a request has failed.
    """

    def __init__(self, endpoint: Endpoint, shared: SharedMessages | None = None) -> None:
        self._endpoint = endpoint
        self._shared = shared
        self._staging = Staging(endpoint)
        self._plain = endpoint.port
        self._messages = MessageQueue(endpoint, shared)
        self._local = endpoint.identifier.local_address
        self._peer = endpoint.identifier.peer_address
        self._begun = False
        self.private_data = b""
        """What the peer's program sent along as it connected or accepted; may be zero-padded."""

    def prepare(self) -> None:
        """Post the pooled receives; for the connector and the listener, before connecting."""
        if self._shared is None:
            self._messages.fill()
        else:
            self._shared.serve(self._endpoint, self._messages, self)

    def begin(self, private_data: bytes) -> None:
        """Take note that it is established; for the connector and the listener."""
        self._endpoint.established()
        self._local = self._endpoint.identifier.local_address  # TCP may have chosen the port by now
        self._begun = True
        self.private_data = private_data

    def __repr__(self) -> str:
        state = self._endpoint.state.value
        return f"<Connection to {self._peer} on {self.device_name}: {state}>"

    # -- what it is ---------------------------------------------------------------------------

    @property
    def local_address(self) -> SocketAddress | None:
        """Our (host, port)."""
        return self._local

    @property
    def peer_address(self) -> SocketAddress | None:
        """The peer's (host, port)."""
        return self._peer

    @property
    def device_name(self) -> str:
        """The RDMA device it runs on."""
        return self._endpoint.hub.context.device_name

    @property
    def options(self) -> ConnectionOptions:
        """What it was made with."""
        return self._endpoint.options

    @property
    def is_connected(self) -> bool:
        """Whether neither side has closed or broken it, as far as is known here."""
        return self._endpoint.state is ConnectionState.ESTABLISHED

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {
            ConnectionInfo.local_address: lambda: self._local,
            ConnectionInfo.peer_address: lambda: self._peer,
            ConnectionInfo.device_name: lambda: self.device_name,
            ConnectionInfo.private_data: lambda: self.private_data,
        }

    # -- the end ------------------------------------------------------------------------------

    async def send_eof(self) -> None:
        """Not something RDMA has: a connection closes both ways at once.

        Raises:
            NotSupportedError: always. Send a message that says so, or `aclose`.
        """
        raise NotSupportedError(
            "RDMA connections do not close one way: send a last message, or aclose()"
        )

    async def aclose(self) -> None:
        """Disconnect, and give back everything. Idempotent; not cancelled by a cancellation.

        Requests still in flight end with FlushedError; await those that matter first. Messages
        that were not received are dropped. Registered regions are closed.
        """
        await self._endpoint.aclose()

    def __del__(self) -> None:
        if (
            getattr(self, "_begun", False)
            and self._endpoint.state is not ConnectionState.CLOSED
            and not self._endpoint.is_inherited
        ):
            try:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
            finally:
                # The collector may run in any thread; the loop may have ended.
                self._endpoint.loop.call_from_thread(self._endpoint.close)
