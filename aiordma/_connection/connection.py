"""Connection: messages and one-sided operations with one peer.

Two layers over one endpoint. `post_*` keep the man pages' names, post at once, never block, and
return a WorkRequest to await later. The coroutines wait for a free slot, post, and return when the
request is done.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import anyio
from anyio.abc import ObjectStream

from aiordma._base.arguments import Buffer, instance, member, whole_number
from aiordma._base.enums import Access, MemoryWindowType
from aiordma._base.errors import ClosedError, NotSupportedError, detached
from aiordma._base.interrupts import deferring_steps
from aiordma._base.options import ConnectionOptions
from aiordma._base.ranges import RemoteMemory
from aiordma._base.socket_address import SocketAddress
from aiordma._base.states import ConnectionState
from aiordma._connection.chain import Chain
from aiordma._connection.messages import Blocks, Message, MessageQueue
from aiordma._connection.posts import Posts
from aiordma._connection.works import (
    check_remote,
    compare_swap_work,
    fetch_add_work,
    message_work,
    read_work,
    send_flags,
    write_work,
)
from aiordma._endpoint.capabilities import require_windows
from aiordma._endpoint.endpoint import Endpoint, SharedReceives
from aiordma._endpoint.registration import register, register_in_thread
from aiordma._endpoint.staging import PARTS, THREAD_LIMIT, Staging, several
from aiordma._endpoint.windows import BoundWindow
from aiordma._requests.request import WorkRequest
from aiordma._requests.select import plain_calls
from aiordma.verbs import (
    Context,
    LocalMemory,
    MemoryRegion,
    MemorySlice,
    MemoryWindow,
    ProtectionDomain,
    QueuePairAttributes,
    WorkCompletion,
)
from aiordma.verbs.memory import blank_bytes

__all__ = ("Connection", "ConnectionInfo")


MOST_BYTES = 1 << 26
"""The longest range that `read_bytes` reads unless it is told another limit."""


class ConnectionInfo(anyio.TypedAttributeSet):
    """Typed attributes of a connection, for `connection.extra(...)`."""

    local_address: SocketAddress = anyio.typed_attribute()
    peer_address: SocketAddress = anyio.typed_attribute()
    device_name: str = anyio.typed_attribute()
    private_data: bytes = anyio.typed_attribute()


Handshake = Callable[[bytes], Awaitable[bytes]]
"""Connects or accepts with our private data, and returns the peer's. Checks ours when called, and
closes the endpoint if the rest, which is awaited, fails."""


class SharedMessages(SharedReceives, Blocks, Protocol):
    """A shared receive queue, as a connection sees it."""

    def serve(self, endpoint: Endpoint, messages: MessageQueue, connection: "Connection") -> None:
        """Deliver what comes for it, until it is closed; before its handshake."""


class Connection(ObjectStream[bytes]):
    """A reliable connection: an anyio ObjectStream of messages, and RDMA READ and WRITE.

    Made by `aiordma.connect` and by listeners; or by `aiordma.prepare_connection` and
    `ConnectionRequest.prepare`, where you post receives first and then `establish` it.

    A message is what one `send` sent: one SEND on the wire, which any verbs program understands.
    `async for message in connection` ends when the peer disconnects.

    Buffers: every method takes registered memory (`register`, and slices of it) or any object with
    a buffer. The device owns a posted buffer until its request ends; a cancellation does not change
    that (docs/guarantees.md).

    `fence` makes a request wait until earlier READs and atomics of ours are done; `solicited` makes
    its arrival an event for a peer that waits for solicited ones only.

    `post_send` documents the errors of everything that posts, `send` those of everything that posts
    and waits.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        shared: SharedMessages | None = None,
        handshake: Handshake | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._handshake = handshake
        self._shared = shared
        self._staging = Staging(endpoint)
        self._plain = endpoint.port
        self._posts = Posts(endpoint, self._staging, endpoint.sends)
        self._messages = MessageQueue(endpoint, shared)
        self._local = endpoint.identifier.local_address
        self._peer = endpoint.identifier.peer_address
        self._begun = False
        self.private_data: bytes = b""
        """What the peer's program sent along as it connected or accepted; may be zero-padded."""

    def _post_pooled_receives(self) -> None:
        """Post the pooled receives; for the connector and the listener, before connecting."""
        self._begun = True  # from here on it is a fault to forget it
        if self._shared is None:
            self._messages.fill()
        else:
            self._shared.serve(self._endpoint, self._messages, self)

    def _set_established(self, private_data: bytes) -> None:
        """Take note that it is established; for the connector and the listener."""
        self._begun = True
        self._local = self._endpoint.identifier.local_address  # TCP may have chosen the port by now
        self.private_data = private_data

    @deferring_steps
    async def establish(self, *, private_data: bytes = b"") -> None:
        """Accept the peer, or connect to it, and wait until the connection is established. For
        connections of `ConnectionRequest.prepare` and `aiordma.prepare_connection`, once.

        Receives that were posted before are there for the peer's first message.

        Args:
            private_data: for the peer's program: up to 196 bytes to accept, 56 to connect.

        Raises:
            TypeError, ValueError: the private data is not bytes, or too much (call again); or the
                connection was not prepared, or its `establish` was called before.
            RdmaConnectionError: as of `ConnectionRequest.accept` and `aiordma.connect`; the
                connection is closed.
            ClosedError: the connection was closed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the peer is rejected or disconnected, and the connection closed; its receives
        end with FlushedError.

        See: man rdma_accept, rdma_connect.
        """
        self._endpoint.require_same_process()
        self._endpoint.require_own_loop()
        if self._endpoint.state is ConnectionState.CLOSED:
            raise ClosedError("this connection is closed")
        if self._handshake is None:
            raise ValueError(
                f"establish: {self!r} was not prepared, or was established before; only "
                "ConnectionRequest.prepare() and aiordma.prepare_connection() leave that to you"
            )
        pending, self._handshake = self._handshake(private_data), None
        self._begun = False  # if it fails, it closes the endpoint, on siw in the background
        self._set_established(await pending)

    def __repr__(self) -> str:
        state = self._endpoint.state.value
        return f"<Connection to {self._peer} on {self.device_name}: {state}>"

    # -- what it is -------------------------------------------------------------------------------

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
    def qp_num(self) -> int:
        """The number of our queue pair (`ibv_qp.qp_num`), by which the device, traces and the
        peer's `query().dest_qp_num` name it. It stays the same after the connection has closed,
        when the device can give the number to another queue pair."""
        return self._endpoint.qpn

    @property
    def context(self) -> Context:
        """The opened device (`ibv_context`), for queries and asynchronous events. All users of
        the device in this event loop share it: do not close it.

        It is the same object after the connection has closed. The last user that closes on this
        event loop closes it; its calls then raise ClosedError."""
        return self._endpoint.hub.context

    @property
    def domain(self) -> ProtectionDomain:
        """The protection domain (`ibv_pd`) of the queue pair and of the regions that `register`
        returns. All users of the device in this event loop share it: do not close it. Close what
        you make with it (a MemoryRegion, for instance) before you close the last of them.

        After the connection has closed: as `context`."""
        return self._endpoint.hub.domain

    @property
    def options(self) -> ConnectionOptions:
        """What it was made with."""
        return self._endpoint.options

    @property
    def is_connected(self) -> bool:
        """Whether neither side has closed or broken it, as far as is known here."""
        return self._endpoint.state is ConnectionState.ESTABLISHED

    def query(self) -> QueuePairAttributes:
        """Ask the device what is in force: what the handshake settled of what you and the peer
        asked for (`options`). A system call.

        Raises:
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            VerbsCallError: the driver refused.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_query_qp.
        """
        self._endpoint.require_usable()
        assert self._endpoint.queue_pair is not None
        return self._endpoint.queue_pair.attributes()

    @property
    def cause(self) -> Exception | None:
        """Why the connection has ended, or is about to: ClosedError if you closed it,
        DisconnectedError if the peer disconnected, else the error that broke it. None while the
        connection works. An exception of its own each time.

        Final once `ended` returns it: until then a failed request, found among the last
        completions, can take the place of the disconnect that it led to."""
        cause = self._endpoint.cause
        return None if cause is None else detached(cause)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {
            ConnectionInfo.local_address: lambda: self._local,
            ConnectionInfo.peer_address: lambda: self._peer,
            ConnectionInfo.device_name: lambda: self.device_name,
            ConnectionInfo.private_data: lambda: self.private_data,
        }

    # -- memory -----------------------------------------------------------------------------------

    def register(self, buffer: Buffer, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for this connection's requests, and with remote access for its peer.

        It stays registered until `region.close()` or until the connection closes. Pinning takes
        time by the page: `register_in_thread` does not hold up the loop over large buffers.

        Every connection of this event loop on the same device shares one protection domain, so
        whoever knows the rkey and has one of these connections can use it.

        Args:
            buffer: bytearray, memoryview, mmap, array, numpy array, bytes: contiguous, not empty.
            access: what is permitted; None is LOCAL_WRITE for a writable buffer. Remote access is
                given only if named.

        Raises:
            TypeError: the object has no buffer, or a read-only one where the access means writing.
            ValueError: the buffer is empty or not contiguous.
            NotSupportedError: the device does not support an access that was asked for (ON_DEMAND,
                MW_BIND).
            VerbsCallError: the driver refused; the message names the limit.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_reg_mr.
        """
        return register(self._endpoint, buffer, access)

    async def register_in_thread(
        self, buffer: Buffer, access: Access | None = None
    ) -> MemoryRegion:
        """Register a buffer as `register` does, in a worker thread.

        Args:
            buffer, access: as of `register`.

        Raises: as `Connection.register`.

        Cancellation: the call waits for the driver, and then deregisters; nothing stays registered.
        """
        return await register_in_thread(self._endpoint, buffer, access)

    # -- posting messages -------------------------------------------------------------------------

    @plain_calls("send")
    def post_send(
        self,
        data: LocalMemory,
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post a message (rdma_post_send).

        The request ends when the peer's device has the message in a receive. Plain bytes are
        copied, or kept exported, until then.

        Args:
            data: registered memory, or any object with a buffer.
            immediate: 32 bits beside the message; the peer's `Message.immediate`.
            invalidate: an rkey of the peer's that ends with the message's arrival
                (IBV_WR_SEND_WITH_INV): of a memory window of type 2 that it bound for us.
            fence: see the class.
            solicited: see the class.

        Raises:
            QueueFullError: `max_send_wr` requests are in flight; nothing was posted.
            TypeError, ValueError: an argument is invalid, or the connection is not established yet;
                nothing was posted.
            NotSupportedError: the device does not support the operation; the message names both.
            VerbsCallError: the device refused the request; nothing was posted.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man rdma_post_send, ibv_post_send.
        """
        if immediate is None and invalidate is None and not fence and not solicited:
            request = self._plain.send(data)
            if request is not None:
                return request
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_send", immediate, invalidate, flags)
        return self._posts.post(work, self._staging.source, [data], "post_send(): data")

    def post_sendv(
        self,
        parts: Iterable[LocalMemory],
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post one message gathered from several buffers (rdma_post_sendv). The request ends as
        that of `post_send`.

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            immediate, invalidate, fence, solicited: as of `post_send`.

        Raises: as `Connection.post_send`.

        See: man rdma_post_sendv.
        """
        given = several(parts, "post_sendv")
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_sendv", immediate, invalidate, flags)
        return self._posts.post(work, self._staging.source, given, f"post_sendv(): {PARTS}")

    @plain_calls("receive")
    def post_recv(self, buffer: LocalMemory) -> WorkRequest:
        """Post a receive (rdma_post_recv), on a connection made with receive_buffers=0.

        The completion's `byte_len` is the message's length in bytes.

        Args:
            buffer: registered memory, or any writable buffer: for a message of at most its length.

        Raises:
            QueueFullError: `max_recv_wr` receives are posted; nothing was posted.
            TypeError: the buffer is read-only, or the object has none.
            ValueError: the connection posts its own receives, or takes them from a shared receive
                queue; or the buffer is not contiguous.
            VerbsCallError: the device refused the receive; nothing was posted.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man rdma_post_recv, ibv_post_recv.
        """
        if not self._endpoint.options.receive_buffers:
            request = self._plain.receive(buffer)
            if request is not None:
                return request
        return self._post_receive("post_recv(): buffer", [buffer])

    def post_recvv(self, parts: Iterable[LocalMemory]) -> WorkRequest:
        """Post a receive scattered over several buffers (rdma_post_recvv).

        Args:
            parts: registered memory, or writable buffers, filled in this order; at most
                `max_recv_sge`.

        Raises: as `Connection.post_recv`.

        See: man rdma_post_recvv.
        """
        return self._post_receive(f"post_recvv(): {PARTS}", several(parts, "post_recvv"))

    def _post_receive(self, where: str, parts: list[LocalMemory]) -> WorkRequest:
        if self._endpoint.shared_receive is not None:
            raise ValueError(
                "this connection takes its receives from a shared receive queue: post them there, "
                "with post_srq_recv()"
            )
        if self._endpoint.options.receive_buffers:
            raise ValueError(
                "this connection posts its own receives, and messages go to the oldest one: use "
                "receive(), or make it with receive_buffers=0"
            )
        self._endpoint.require_usable()
        staged = self._staging.receive(parts, where)
        try:
            request = self._endpoint.receives.submit(
                staged.sges, staged.count, staged.length, staged.held
            )
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    # -- posting one-sided operations -------------------------------------------------------------

    @plain_calls("read")
    def post_read(
        self, remote: RemoteMemory, local: LocalMemory, *, fence: bool = False
    ) -> WorkRequest:
        """Post an RDMA READ of the peer's memory into ours (rdma_post_read).

        The request ends when the data has arrived.

        Args:
            remote: the peer's memory.
            local: registered memory, or a writable buffer, of the same length.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            NotSupportedError: the two sides agreed on no outstanding READs (initiator_depth).

        See: man rdma_post_read.
        """
        if not fence:
            request = self._plain.read(remote, local)
            if request is not None:
                return request
        work = read_work(self._endpoint, "post_read", remote, 1, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], "post_read(): local")

    def post_readv(
        self, remote: RemoteMemory, parts: Iterable[LocalMemory], *, fence: bool = False
    ) -> WorkRequest:
        """Post a READ scattered over several local buffers (rdma_post_readv).

        Args:
            remote: the peer's memory.
            parts: registered memory, or writable buffers, filled in this order; at most
                `max_send_sge`.
            fence: see the class.

        Raises: as `Connection.post_read`.

        See: man rdma_post_readv.
        """
        given = several(parts, "post_readv")
        work = read_work(self._endpoint, "post_readv", remote, len(given), send_flags(fence))
        return self._posts.post(work, self._staging.target, given, f"post_readv(): {PARTS}")

    @plain_calls("write")
    def post_write(
        self,
        local: LocalMemory,
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post an RDMA WRITE of our memory into the peer's (rdma_post_write).

        The request ends when the data has reached the peer's device. The peer's program is not
        notified, except with `immediate`: that takes a receive of the peer's, whose Message has no
        data but the 32 bits, and `byte_len` is what was written.

        Args:
            local: registered memory, or any object with a buffer: the data.
            remote: the peer's memory, of the same length.
            immediate: 32 bits for the peer's program.
            fence: see the class.
            solicited: see the class.

        Raises: as `Connection.post_send`.

        See: man rdma_post_write.
        """
        if immediate is None and not fence and not solicited:
            request = self._plain.write(local, remote)
            if request is not None:
                return request
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_write", remote, immediate, flags)
        return self._posts.post(work, self._staging.source, [local], "post_write(): local")

    def post_writev(
        self,
        parts: Iterable[LocalMemory],
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post a WRITE gathered from several local buffers (rdma_post_writev).

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            remote, immediate, fence, solicited: as of `post_write`.

        Raises: as `Connection.post_write`.

        See: man rdma_post_writev.
        """
        given = several(parts, "post_writev")
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_writev", remote, immediate, flags)
        return self._posts.post(work, self._staging.source, given, f"post_writev(): {PARTS}")

    def post_compare_swap(
        self,
        local: LocalMemory,
        remote: RemoteMemory,
        compare: int,
        swap: int,
        *,
        fence: bool = False,
    ) -> WorkRequest:
        """Post: if the peer's 8 bytes are `compare`, make them `swap` (IBV_WR_ATOMIC_CMP_AND_SWP).

        Either way `local` gets what they were, as a number in this machine's byte order. Both
        memories are 8 bytes long, and the remote one aligned to 8.

        Args:
            local: registered memory, or a writable buffer, of 8 bytes.
            remote: the peer's 8 bytes.
            compare, swap: unsigned numbers of 64 bits.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            NotSupportedError: the device has no atomics, or none were agreed on.

        See: man ibv_post_send.
        """
        call = "post_compare_swap"
        work = compare_swap_work(self._endpoint, call, remote, compare, swap, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], f"{call}(): local")

    def post_fetch_add(
        self, local: LocalMemory, remote: RemoteMemory, add: int, *, fence: bool = False
    ) -> WorkRequest:
        """Post: add to the peer's 8 bytes, modulo 2**64 (IBV_WR_ATOMIC_FETCH_AND_ADD); `local` gets
        what they were.

        Args:
            local, remote, fence: as of `post_compare_swap`.
            add: an unsigned number of 64 bits.

        Raises: as `Connection.post_compare_swap`.

        See: man ibv_post_send.
        """
        call = "post_fetch_add"
        work = fetch_add_work(self._endpoint, call, remote, add, send_flags(fence))
        return self._posts.post(work, self._staging.target, [local], f"{call}(): local")

    def post_bind_window(
        self, window: BoundWindow, memory: MemorySlice, access: Access, *, fence: bool = False
    ) -> WorkRequest:
        """Post the binding of a window to registered memory, for `window.remote` to be given away
        (IBV_WR_BIND_MW; ibv_bind_mw for type 1).

        A peer may use the rkey once the request has succeeded. Until the window is revoked or
        closed, the memory stays registered.

        Args:
            window: from `open_window`, not bound.
            memory: of a region registered with Access.MW_BIND (and LOCAL_WRITE, if the window is to
                be written to).
            access: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            ValueError: it is bound, or the region's access does not permit it.
            ClosedError: the window or the region is closed.

        See: man ibv_post_send, ibv_bind_mw.
        """
        return self._posts.bind(window, memory, access, "post_bind_window", fence)

    def post_invalidate(self, window: BoundWindow, *, fence: bool = False) -> WorkRequest:
        """Post the end of what a window permits: a local invalidate (IBV_WR_LOCAL_INV), or the
        binding of a window of type 1 to nothing.

        Args:
            window: a bound window of this connection.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            ValueError: it is not bound (any more).

        See: man ibv_post_send, ibv_bind_mw.
        """
        return self._posts.invalidate(window, "post_invalidate", fence)

    # -- messages ---------------------------------------------------------------------------------

    def chain(self, *, signal_last_only: bool = False) -> Chain:
        """Collect requests in a `with` block, and post them with one call at its end.

        Args:
            signal_last_only: signal the last request only: its completion completes those before it
                as well. Saves the device and this machine the other completions.

        Raises:
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_post_send.
        """
        return Chain(self._endpoint, self._staging, signal_last_only)

    async def send(
        self, item: LocalMemory, *, immediate: int | None = None, invalidate: int | None = None
    ) -> None:
        """Send a message, and wait until the peer's device has it.

        Waits for a free slot, and, where the peer has no receive posted, for one.

        Args:
            item: registered memory, or any object with a buffer.
            immediate, invalidate: as of `post_send`.

        Raises:
            TypeError, ValueError: an argument is invalid, or the connection is not established yet;
                nothing was posted.
            NotSupportedError: the device does not support the operation; the message names both.
            WorkCompletionError: the request failed; FlushedError if the connection ended before it
                was carried out.
            ClosedError, DisconnectedError, DeviceEventError: the connection has ended; nothing was
                posted.
            VerbsCallError: the device refused the request; nothing was posted.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: while it waits for a slot, nothing was posted. Afterwards the message may or
        may not arrive, and the device owns the buffer until that is decided.

        See: man rdma_post_send.
        """
        if immediate is None and invalidate is None:
            request = self._plain.send(item)
            if request is not None:
                await request
                return
        work = message_work(self._endpoint, "send", immediate, invalidate)
        await self._posts.run(work, self._staging.source, [item], "send(): item")

    async def sendv(
        self,
        parts: Iterable[LocalMemory],
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
    ) -> None:
        """Send one message gathered from several buffers, as `send` does.

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            immediate, invalidate: as of `post_send`.

        Raises: as `Connection.send`.

        Cancellation: as `Connection.send`.
        """
        given = several(parts, "sendv")
        work = message_work(self._endpoint, "sendv", immediate, invalidate)
        await self._posts.run(work, self._staging.source, given, f"sendv(): {PARTS}")

    async def receive(self) -> bytes:
        """Return the next message.

        Raises:
            anyio.EndOfStream: the peer disconnected and all its messages have been received.
            anyio.BusyResourceError: another task is receiving.
            ValueError: the connection was made with receive_buffers=0, or takes its receives from a
                shared receive queue that posts none.
            ClosedError: you closed the connection.
            WorkCompletionError, DeviceRemovedError, DeviceEventError: what broke the connection.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no message is lost; the next call returns it.
        """
        return (await self._messages.receive()).data

    async def receive_message(self) -> Message:
        """Return the next message with what came beside its data: immediate data, or the rkey that
        it invalidated.

        Raises: as `Connection.receive`.

        Cancellation: as `Connection.receive`.
        """
        return await self._messages.receive()

    # -- one-sided operations ---------------------------------------------------------------------

    async def read(self, remote: RemoteMemory, local: LocalMemory) -> WorkCompletion:
        """READ the peer's memory into ours. Waits for a free slot.

        Args:
            remote: the peer's memory.
            local: registered memory, or a writable buffer, of the same length.

        Returns:
            The completion.

        Raises: as `Connection.send`.

        Cancellation: a READ that was posted goes on: `local` may still be written to, and the
        device owns it until the READ ends.

        See: man rdma_post_read.
        """
        request = self._plain.read(remote, local)
        if request is not None:
            return await request
        work = read_work(self._endpoint, "read", remote, 1)
        return await self._posts.run(work, self._staging.target, [local], "read(): local")

    async def readv(self, remote: RemoteMemory, parts: Iterable[LocalMemory]) -> WorkCompletion:
        """READ the peer's memory, scattered over several local buffers, as `read` does.

        Args:
            remote: the peer's memory.
            parts: registered memory, or writable buffers, filled in this order.

        Raises: as `Connection.read`.

        Cancellation: as `Connection.read`.
        """
        given = several(parts, "readv")
        work = read_work(self._endpoint, "readv", remote, len(given))
        return await self._posts.run(work, self._staging.target, given, f"readv(): {PARTS}")

    async def read_bytes(self, remote: RemoteMemory, *, max_bytes: int = MOST_BYTES) -> bytes:
        """READ the peer's memory and return it as bytes.

        The peer's descriptor decides how much memory that takes, so it has a limit, which is
        checked before memory is allocated.

        Args:
            remote: what to read.
            max_bytes: the longest range that is read; 64 MiB by default. The device's longest
                message is a limit as well.

        Raises:
            as `Connection.read`.
            ValueError: the range is longer than a limit; the message names it.

        Cancellation: a READ that was posted goes on, and its memory is held until it ends.
        """
        check_remote(remote, "read_bytes")
        limit = whole_number(max_bytes, "max_bytes", 0, 2**64 - 1, "read_bytes")
        length = remote.length
        if length > limit:
            raise ValueError(
                f"read_bytes(): the peer's descriptor says {length} bytes, and max_bytes={limit}: "
                "read it in parts, remote[start:stop], or raise the limit if you trust the peer"
            )
        self._endpoint.require_usable()
        self._staging.check_length(length, "read_bytes()")
        if not length:
            return b""
        if length <= THREAD_LIMIT:
            buffer = bytearray(length)
            await self.read(remote, buffer)
            return bytes(buffer)
        # Filled by the device itself: no memory is touched on the loop's thread.
        result, target = blank_bytes(length)
        await self.read(remote, target)
        return result

    async def write(
        self, local: LocalMemory, remote: RemoteMemory, *, immediate: int | None = None
    ) -> WorkCompletion:
        """WRITE our memory into the peer's. Waits for a free slot.

        Args:
            local: registered memory, or any object with a buffer: the data.
            remote: the peer's memory, of the same length.
            immediate: 32 bits for the peer's program; as of `post_write`.

        Returns:
            The completion.

        Raises: as `Connection.send`.

        Cancellation: a WRITE that was posted may still happen; the device owns the buffer until it
        has ended.

        See: man rdma_post_write.
        """
        if immediate is None:
            request = self._plain.write(local, remote)
            if request is not None:
                return await request
        work = write_work(self._endpoint, "write", remote, immediate)
        return await self._posts.run(work, self._staging.source, [local], "write(): local")

    async def writev(
        self, parts: Iterable[LocalMemory], remote: RemoteMemory, *, immediate: int | None = None
    ) -> WorkCompletion:
        """WRITE, gathered from several local buffers, as `write` does.

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            remote, immediate: as of `write`.

        Raises: as `Connection.write`.

        Cancellation: as `Connection.write`.
        """
        given = several(parts, "writev")
        work = write_work(self._endpoint, "writev", remote, immediate)
        return await self._posts.run(work, self._staging.source, given, f"writev(): {PARTS}")

    async def compare_swap(self, remote: RemoteMemory, compare: int, swap: int) -> int:
        """If the peer's 8 bytes are `compare`, make them `swap`; return what they were.

        Numbers are unsigned, in the byte order of the peer, which is taken to be ours.

        Args:
            remote: the peer's 8 bytes, aligned to 8.
            compare, swap: numbers of 64 bits.

        Raises:
            as `Connection.send`.
            NotSupportedError: the device has no atomics, or none were agreed on.

        Cancellation: a request that was posted may still happen; its memory is held until it has
        ended.
        """
        work = compare_swap_work(self._endpoint, "compare_swap", remote, compare, swap)
        return await self._posts.run_atomic(work)

    async def fetch_add(self, remote: RemoteMemory, add: int) -> int:
        """Add to the peer's 8 bytes, modulo 2**64; return what they were. Numbers are those of
        `compare_swap`.

        Args:
            remote: the peer's 8 bytes, aligned to 8.
            add: a number of 64 bits.

        Raises: as `Connection.compare_swap`.

        Cancellation: as `Connection.compare_swap`.
        """
        work = fetch_add_work(self._endpoint, "fetch_add", remote, add)
        return await self._posts.run_atomic(work)

    # -- memory windows ---------------------------------------------------------------------------

    @deferring_steps
    async def open_window(self, kind: MemoryWindowType = MemoryWindowType.TYPE_2) -> BoundWindow:
        """Allocate a memory window, bound to nothing: for `post_bind_window`, any number of times.
        It is closed with the connection.

        Args:
            kind: TYPE_2, or TYPE_1.

        Raises:
            NotSupportedError: the device has no memory windows.
            TypeError, ValueError: `kind` is not a MemoryWindowType.
            VerbsCallError: the driver refused.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the call waits for the driver, and then frees the window; nothing is left.

        See: man ibv_alloc_mw.
        """
        endpoint = self._endpoint
        kind = member(kind, "kind", MemoryWindowType, "open_window")
        require_windows(endpoint)
        window = await endpoint.make_in_thread(
            lambda: MemoryWindow(endpoint.hub.domain, kind), MemoryWindow.close
        )
        return BoundWindow(endpoint, window)

    async def bind(
        self,
        memory: MemorySlice,
        access: Access,
        kind: MemoryWindowType = MemoryWindowType.TYPE_2,
    ) -> BoundWindow:
        """Open a window and bind it: its `remote` is access for this connection's peer only (type
        2), and until `revoke`.

        Args:
            memory, access: as of `post_bind_window`.
            kind: TYPE_2, or TYPE_1.

        Raises:
            as `Connection.send`.
            as `Connection.open_window`.
            ValueError: the region's access does not permit it.

        Cancellation: the window may still be bound; it is closed when that is decided.
        """
        window = await self.open_window(kind)
        try:
            with await self._endpoint.sends.slots.take() as slot:
                request = self._posts.bind(window, memory, access, "bind", slot=slot)
            await request
        except BaseException:
            window.close()
            raise
        return window

    async def revoke(self, window: BoundWindow) -> None:
        """End what a window permits. Once this returns, no access through it can happen any more.

        Args:
            window: a bound window of this connection.

        Raises:
            as `Connection.send`.
            ValueError: it is not bound (any more).

        Cancellation: before it is posted, the window stays bound. Afterwards it ends all the same,
        or with the connection.
        """
        instance(window, "window", BoundWindow, "revoke")
        with await self._endpoint.sends.slots.take() as slot:
            request = self._posts.invalidate(window, "revoke", slot=slot)
        await request

    # -- the end ----------------------------------------------------------------------------------

    async def ended(self) -> Exception:
        """Wait until the connection has ended, whichever side ended it, and return the cause.

        Every request has ended by then. Messages that arrived before can still be received, until
        you close the connection, which you still have to. Any number of tasks may wait.

        Returns:
            What `cause` is from then on. It is returned, not raised.

        Raises:
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: has no effect on the connection.
        """
        return await self._endpoint.until_ended()

    async def send_eof(self) -> None:
        """Raise an error: RDMA connections close both ways at once.

        Raises:
            NotSupportedError: always. Send a message that marks the end, or `aclose`.

        Cancellation: has no effect, since the call does not wait.
        """
        raise NotSupportedError(
            "RDMA connections do not close one way: send a last message, or aclose()"
        )

    async def aclose(self) -> None:
        """Disconnect, and give back everything. Idempotent.

        Requests still in flight end with FlushedError; await those that matter first. Messages that
        were not received are dropped. Registered regions are closed.

        Raises:
            EventLoopError: called outside of its event loop; the message says what became of the
                connection (docs/guarantees.md).

        Cancellation: the connection closes all the same, and the call returns once it is closed.

        See: man rdma_disconnect.
        """
        await self._endpoint.aclose()

    def __del__(self) -> None:
        if (
            getattr(self, "_begun", False)
            and self._endpoint.state is not ConnectionState.CLOSED
            and not self._endpoint.is_inherited
        ):
            self._endpoint.forget()
