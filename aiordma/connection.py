"""Connection: messages and one-sided operations with one peer.

Two layers over one endpoint. `post_*` keep the man pages' names, post at once, never block, and
return a WorkRequest to await later. The coroutines wait for a free slot, post, and return when the
request is done.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import anyio
from anyio.abc import ObjectStream

from aiordma.endpoint import Endpoint, SharedReceives
from aiordma.enums import Access, SendFlag, WorkRequestOpcode
from aiordma.errors import NotSupportedError
from aiordma.messages import Blocks, MessageQueue
from aiordma.options import ConnectionOptions
from aiordma.ranges import RemoteMemory
from aiordma.request import WorkRequest
from aiordma.socket_address import SocketAddress
from aiordma.staging import Buffer, Staged, Staging
from aiordma.states import ConnectionState
from aiordma.threads import in_thread
from aiordma.verbs import MemoryRegion, WorkCompletion

__all__ = ("Connection", "ConnectionInfo")

_SEND = ("SEND", int(WorkRequestOpcode.SEND))
_READ = ("RDMA_READ", int(WorkRequestOpcode.RDMA_READ))
_WRITE = ("RDMA_WRITE", int(WorkRequestOpcode.RDMA_WRITE))


class ConnectionInfo(anyio.TypedAttributeSet):
    """Typed attributes of a connection, for `connection.extra(...)`."""

    local_address: SocketAddress = anyio.typed_attribute()
    peer_address: SocketAddress = anyio.typed_attribute()
    device_name: str = anyio.typed_attribute()
    private_data: bytes = anyio.typed_attribute()


class SharedMessages(SharedReceives, Blocks, Protocol):
    """A shared receive queue, as a connection sees it."""

    buffers: int

    def serve(self, endpoint: Endpoint, messages: MessageQueue, connection: "Connection") -> None:
        """Deliver what comes for it, until it is closed; before its handshake."""


class Connection(ObjectStream[bytes]):
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

    # -- memory -------------------------------------------------------------------------------

    def register(self, buffer: Buffer, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for this connection's requests, and with remote access for its peer.

        It stays registered until `region.close()` or until the connection closes. Pinning takes
        time by the page: `register_in_thread` does not hold up the loop over large ones.

        Every connection of this event loop on the same device shares one protection domain, so
        whoever knows the rkey and has one of these connections can use it.

        Args:
            buffer: bytearray, memoryview, mmap, array, numpy array, bytes: contiguous, not empty.
            access: what is permitted; None is LOCAL_WRITE for a writable buffer. Remote access is
                given only if named.

        Raises:
            TypeError: no buffer, or a read-only one where the access means writing.
            ValueError: empty or not contiguous.
            VerbsCallError: the driver refused; the message names the limit.
        """
        self._endpoint.require_usable()
        region = MemoryRegion(self._endpoint.hub.domain, buffer, access)
        self._endpoint.adopt(region)
        return region

    async def register_in_thread(
        self, buffer: Buffer, access: Access | None = None
    ) -> MemoryRegion:
        """`register`, in a worker thread. Cancelled, nothing stays registered."""
        endpoint = self._endpoint
        endpoint.require_usable()
        made: list[MemoryRegion] = []
        endpoint.reactor.retain()  # what the thread registers with must not be closed under it
        try:
            await in_thread(
                endpoint.loop,
                lambda: made.append(MemoryRegion(endpoint.hub.domain, buffer, access)),
            )
            endpoint.require_usable()
        except BaseException:
            for region in made:
                region.close()
            raise
        finally:
            endpoint.reactor.release()
        endpoint.adopt(made[0])
        return made[0]

    # -- post now, await later ----------------------------------------------------------------

    def post_send(self, data: Buffer) -> WorkRequest:
        """Post a message (rdma_post_send).

        The request ends when the peer's device has the message in a receive. Plain bytes are
        copied, or kept exported, until then.

        Raises:
            QueueFullError: `send_depth` requests are in flight; nothing was posted.
            ValueError, TypeError: the buffer will not do; nothing was posted.
        """
        return self.post_sendv([data])

    def post_sendv(self, parts: Iterable[Buffer], *, solicited: bool = False) -> WorkRequest:
        """Post one message gathered from several buffers (rdma_post_sendv)."""
        self._endpoint.require_usable()
        flags = int(SendFlag.SOLICITED) if solicited else 0
        return self._post(_SEND, self._staging.source(parts), None, flags=flags)

    def post_recv(self, buffer: Buffer) -> WorkRequest:
        """Post a receive (rdma_post_recv), on a connection made with receive_buffers=0.

        The completion's `byte_len` is the message's length.

        Raises:
            QueueFullError: `receive_depth` receives are posted.
            ValueError: the connection posts its own receives; or the buffer will not do.
            TypeError: the buffer is read-only.
        """
        return self.post_recvv([buffer])

    def post_recvv(self, parts: Iterable[Buffer]) -> WorkRequest:
        """Post a receive scattered over several buffers (rdma_post_recvv)."""
        if self._shared is not None:
            raise ValueError(
                "this connection takes its receives from a shared receive queue: post them there, "
                "with post_srq_recv()"
            )
        if self.options.receive_buffers:
            raise ValueError(
                "this connection posts its own receives, and messages go to the oldest one: use "
                "receive(), or make it with receive_buffers=0"
            )
        self._endpoint.require_usable()
        staged = self._staging.target(parts)
        try:
            request = self._endpoint.post_receive(
                staged.sges, staged.count, staged.length, staged.held
            )
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    def post_read(self, remote: RemoteMemory, local: Buffer) -> WorkRequest:
        """Post an RDMA READ of the peer's memory into ours (rdma_post_read).

        Raises:
            ValueError: the two lengths differ; or the buffer will not do.
            TypeError: `local` is read-only.
            NotSupportedError: the two sides agreed on no outstanding READs (initiator_depth).
            QueueFullError: `send_depth` requests are in flight.
        """
        return self.post_readv(remote, [local])

    def post_readv(self, remote: RemoteMemory, parts: Iterable[Buffer]) -> WorkRequest:
        """Post a READ scattered over several local buffers (rdma_post_readv)."""
        parts = list(parts)
        self._endpoint.require_reads(len(parts))
        return self._post(_READ, self._staging.target(parts), remote)

    def post_write(self, local: Buffer, remote: RemoteMemory) -> WorkRequest:
        """Post an RDMA WRITE of our memory into the peer's (rdma_post_write).

        The request ends when the data has reached the peer's device; its program is told nothing.

        Raises:
            ValueError: the two lengths differ; or the buffer will not do.
            QueueFullError: `send_depth` requests are in flight.
        """
        return self.post_writev([local], remote)

    def post_writev(self, parts: Iterable[Buffer], remote: RemoteMemory) -> WorkRequest:
        """Post a WRITE gathered from several local buffers (rdma_post_writev)."""
        self._endpoint.require_usable()
        return self._post(_WRITE, self._staging.source(parts), remote)

    def _post(
        self,
        operation: tuple[str, int],
        staged: Staged,
        remote: RemoteMemory | None,
        *,
        flags: int = 0,
        credited: bool = False,
    ) -> WorkRequest:
        name, opcode = operation
        try:
            if remote is not None:
                if not isinstance(remote, RemoteMemory):
                    raise TypeError(
                        f"{type(remote).__name__} is no RemoteMemory: a peer makes one with "
                        "region.remote(), and sends it packed"
                    )
                if remote.length != staged.length:
                    raise ValueError(
                        f"{staged.length} local bytes and {remote.length} remote ones: slice both "
                        "to the same length"
                    )
        except BaseException:
            self._staging.abandon(staged)
            if credited:
                self._endpoint.send_credits.give()
            raise
        try:
            request = self._endpoint.post_send(
                name,
                opcode,
                staged.sges,
                staged.count,
                staged.length,
                staged.held,
                flags=flags | staged.flags,
                remote=remote,
                credited=credited,
            )
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    # -- coroutines ---------------------------------------------------------------------------

    async def send(self, item: Buffer) -> None:
        """Send a message and wait until the peer's device has it.

        Waits for a free slot, and, where the peer has no receive posted, for one. Cancelled, the
        message may or may not arrive; the buffer stays the device's until it is decided.
        """
        await self.sendv([item])

    async def sendv(self, parts: Iterable[Buffer]) -> None:
        """Send one message gathered from several buffers. See `send`."""
        await self._run(_SEND, self._staging.source, parts, None)

    async def receive(self) -> bytes:
        """Return the next message. Cancelled, it loses none.

        Raises:
            anyio.EndOfStream: the peer disconnected and all its messages have been received.
            anyio.BusyResourceError: another task is receiving.
            ClosedError: you closed the connection.
            WorkCompletionError: what broke it.
        """
        if self._shared is not None:
            if not self._shared.buffers:
                raise ValueError(
                    "this connection takes its receives from a shared receive queue made with "
                    "buffers=0: post them there, with post_srq_recv()"
                )
        elif not self.options.receive_buffers:
            raise ValueError(
                "this connection was made with receive_buffers=0: post receives with post_recv()"
            )
        return await self._messages.receive()

    async def read(self, remote: RemoteMemory, local: Buffer) -> WorkCompletion:
        """READ the peer's memory into ours. Cancelled, `local` may still be written to."""
        return await self.readv(remote, [local])

    async def readv(self, remote: RemoteMemory, parts: Iterable[Buffer]) -> WorkCompletion:
        """READ, scattered over several local buffers. See `read`."""
        parts = list(parts)
        self._endpoint.require_reads(len(parts))
        return await self._run(_READ, self._staging.target, parts, remote)

    async def read_bytes(self, remote: RemoteMemory) -> bytes:
        """READ the peer's memory and return it as bytes."""
        if not remote.length:
            return b""
        buffer = bytearray(remote.length)
        await self.read(remote, buffer)
        return bytes(buffer)

    async def write(self, local: Buffer, remote: RemoteMemory) -> WorkCompletion:
        """WRITE our memory into the peer's. Cancelled, the write may still happen."""
        return await self.writev([local], remote)

    async def writev(self, parts: Iterable[Buffer], remote: RemoteMemory) -> WorkCompletion:
        """WRITE, gathered from several local buffers. See `write`."""
        return await self._run(_WRITE, self._staging.source, parts, remote)

    async def _run(
        self,
        operation: tuple[str, int],
        stage: Callable[[Iterable[Buffer]], Staged],
        parts: Iterable[Buffer],
        remote: RemoteMemory | None,
    ) -> WorkCompletion:
        self._endpoint.require_usable()
        given = list(parts)
        # The slot first: who waits for one holds no memory, and what is checked now is posted now.
        await self._endpoint.send_credits.take()
        try:
            staged = await self._staging.prepare(stage, given)
        except BaseException:
            self._endpoint.send_credits.give()
            raise
        return await self._post(operation, staged, remote, credited=True)

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
        if getattr(self, "_begun", False) and self._endpoint.state is not ConnectionState.CLOSED:
            try:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
            finally:
                # The collector may run in any thread; the loop may have ended.
                self._endpoint.loop.call_from_thread(self._endpoint.close)
