"""Connection: messages and one-sided operations with one peer.

A connection has two layers over one endpoint. The `post_*` methods have the names of the man pages,
post at once, never block, and return a WorkRequest to await later. The coroutines wait for a free
slot, post, and return when the request has completed.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import ObjectStream

from aiordma._base.arguments import instance, member, whole_number
from aiordma._base.connection_parameters import IN_ACCEPT, check_private_data
from aiordma._base.enums import Access, MemoryWindowType
from aiordma._base.errors import ClosedError, NotSupportedError, RdmaError, detached
from aiordma._base.opening import opens
from aiordma._base.options import ConnectionOptions
from aiordma._base.ranges import RemoteMemory
from aiordma._base.socket_address import SocketAddress
from aiordma._base.states import ConnectionState
from aiordma._connection.blocks import BlockPairs, Blocks, BlockTransfer
from aiordma._connection.chain import Chain
from aiordma._connection.counter import Counter, open_counter
from aiordma._connection.general_path import GeneralPath
from aiordma._connection.grant import Grant, open_grant
from aiordma._connection.messages import Message, MessageQueue
from aiordma._connection.on_device import OnDevice
from aiordma._connection.operations import (
    check_remote,
    compare_swap_work,
    fetch_add_work,
    message_work,
    read_work,
    write_work,
)
from aiordma._connection.posting import Posting
from aiordma._connection.sends_ahead import SendsAhead
from aiordma._endpoint.capabilities import require_windows
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.registration import (
    make_in_thread,
    register_dmabuf,
)
from aiordma._endpoint.staging import PARTS, THREAD_LIMIT, Staging, several
from aiordma._endpoint.windows import BoundWindow, check_window_memory
from aiordma._loop.event_loop import protected
from aiordma._native import ArrivalView, calls_port
from aiordma._requests.registrations import RegistrationCache
from aiordma._requests.request import WorkRequest
from aiordma.verbs import (
    DmabufRegion,
    LocalMemory,
    MemoryWindow,
    QueuePairAttributes,
)
from aiordma.verbs.buffers import blank_bytes
from aiordma.verbs.completion import WorkCompletion
from aiordma.verbs.memory import MemorySlice

MOST_BYTES = 1 << 26
"""The longest range that `read_bytes` reads by default."""


class ConnectionInfo(anyio.TypedAttributeSet):
    """Typed attributes of a connection, for `connection.extra(...)`."""

    local_address: SocketAddress = anyio.typed_attribute()
    peer_address: SocketAddress = anyio.typed_attribute()
    device_name: str = anyio.typed_attribute()
    private_data: bytes = anyio.typed_attribute()


Establish = Callable[[bytes], Awaitable[bytes]]
"""Connects or accepts with this side's private data, and returns the peer's. If it fails, it closes
the endpoint."""


class Connection(OnDevice, Posting, ObjectStream[bytes]):
    """A reliable connection: an anyio ObjectStream of messages, and RDMA READ and WRITE.

    `aiordma.connect` and listeners return established connections. `aiordma.prepare_connection` and
    `ConnectionRequest.prepare` return connections on which you first post receives, and then call
    `establish`.

    A message is the data of one `send`: one SEND on the wire, which any verbs program can receive.
    `async for message in connection` ends when the peer disconnects.

    Buffers: every method takes registered memory (`register`, and slices of it) or any object with
    a buffer. The device owns a posted buffer until its request completes. Cancellation does not
    change that (docs/guarantees.md).

    `fence` delays a request until this side's earlier READs and atomics have completed. `solicited`
    makes the message's arrival a solicited event, for a peer that waits for solicited events only.

    `post_send` documents the errors of all methods that post, and `send` the errors of all methods
    that post and wait.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        establish: Establish | None = None,
        carrier: tuple[int, str] = IN_ACCEPT,
    ) -> None:
        self._endpoint = endpoint
        self._establishes = establish
        self._carrier = carrier
        self._port = endpoint.work.port
        self._messages = MessageQueue(endpoint)
        self.private_data: bytes = b""
        """The private data of the peer's connection request or accept; may be zero-padded."""

    @cached_property
    def _ahead(self) -> SendsAhead:
        return SendsAhead(self._endpoint.options.send_ahead)

    # For the general path, which most connections never take. A chain has attributes.

    @cached_property
    def _staging(self) -> Staging:  # type: ignore[override]
        return Staging(self._endpoint)

    @cached_property
    def _general(self) -> GeneralPath:  # type: ignore[override]
        return GeneralPath(self._endpoint, self._staging, self._endpoint.work.sends)

    def _post_pooled_receives(self) -> None:
        """Post the pooled receives. The connector and the listener call this before they connect or
        accept."""
        self._begun = True  # from here on, `__del__` warns if the program did not close it
        shared = self._endpoint.shared_receive
        if shared is None:
            self._messages.fill()
        else:
            shared.serve(self._endpoint, self._messages.queue, self)

    async def establish(self, *, private_data: bytes = b"") -> None:
        """Accept the peer, or connect to it, and wait until the connection is established. Call
        this once, on a connection of `ConnectionRequest.prepare` or `aiordma.prepare_connection`.

        The receives that you posted before are available for the peer's first message.

        Args:
            private_data: for the peer's program: up to 196 bytes to accept, 56 to connect.

        Raises:
            TypeError, ValueError: the private data is not bytes, or too long (you can call again);
                or the connection was not prepared, or its `establish` was called before.
            RdmaConnectionError: as of `ConnectionRequest.accept` and `aiordma.connect`; the
                connection is closed.
            ClosedError: the connection was closed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the peer is rejected or disconnected, and the connection is closed; its
        receives fail with FlushedError.

        See: man rdma_accept, rdma_connect.
        """
        self._endpoint.require_same_process()
        self._endpoint.require_own_loop()
        if self._endpoint.state is ConnectionState.CLOSED:
            raise ClosedError(f"{self._endpoint.name} is closed")
        if self._establishes is None:
            raise ValueError(
                f"establish: {self!r} was not prepared, or was established before; only "
                "ConnectionRequest.prepare() and aiordma.prepare_connection() leave that to you"
            )
        await self._establish(check_private_data(private_data, *self._carrier, "establish"))

    async def _establish(self, private_data: bytes) -> None:
        assert self._establishes is not None
        pending, self._establishes = self._establishes(private_data), None
        self._begun = False  # a handshake that fails closes the endpoint, on siw in the background
        self.private_data = await pending
        self._begun = True

    def __repr__(self) -> str:
        state = self._endpoint.state.value
        return f"<Connection to {self.peer_address} on {self.device_name}: {state}>"

    # -- attributes -------------------------------------------------------------------------------

    @property
    def local_address(self) -> SocketAddress | None:
        """The local (host, port)."""
        return self._endpoint.local_address

    @property
    def peer_address(self) -> SocketAddress | None:
        """The peer's (host, port)."""
        return self._endpoint.peer_address

    @property
    def options(self) -> ConnectionOptions:
        """The options that the connection was created with."""
        return self._endpoint.options

    @property
    def is_connected(self) -> bool:
        """Whether the connection is established and, as far as this side knows, has not ended."""
        return self._endpoint.state is ConnectionState.ESTABLISHED

    @property
    def peer_timeout(self) -> float:
        """Seconds after which a peer that acknowledges nothing ends the connection, from the
        retry_count and ack_timeout in force; `math.inf` without a limit, and on UC, which has no
        acknowledgements; on iWARP 1 to 900. Hardware may take up to four times as long. With
        retry_count=7, rxe retransmits without limit, and this number does not hold. See
        `ConnectionOptions.peer_timeout`."""
        return self._endpoint.pair.peer_timeout

    def query(self) -> QueuePairAttributes:
        """Query the queue pair's attributes that are in force: the values that the handshake
        determined from both sides' `options`. This is a system call.

        Raises:
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            VerbsCallError: the driver refused.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_query_qp.
        """
        self._endpoint.require_usable()
        assert self._endpoint.pair.raw is not None
        return self._endpoint.pair.raw.attributes()

    @property
    def cause(self) -> Exception | None:
        """Why the connection has ended, or is about to end: ClosedError if you closed it,
        DisconnectedError if the peer disconnected, otherwise the error that broke it. None while
        the connection works. Each access returns a new exception.

        The cause is final once `ended` has returned it. Until then, a failed request among the last
        completions can replace the disconnect that it led to."""
        cause = self._endpoint.cause
        return None if cause is None else detached(cause)

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {
            ConnectionInfo.local_address: lambda: self.local_address,
            ConnectionInfo.peer_address: lambda: self.peer_address,
            ConnectionInfo.device_name: lambda: self.device_name,
            ConnectionInfo.private_data: lambda: self.private_data,
        }

    # -- memory -----------------------------------------------------------------------------------

    @property
    def registrations(self) -> RegistrationCache:
        """The registration cache of the protection domain: registrations of large numpy arrays that
        were passed to requests unregistered. All connections of the domain share it."""
        return self._endpoint.memory.pool.registrations

    def register_dmabuf(
        self,
        fd: int,
        length: int,
        *,
        offset: int = 0,
        access: Access = Access.LOCAL_WRITE,
        iova: int | None = None,
    ) -> DmabufRegion:
        """Register memory of another device by the descriptor of its dma-buf.

        The region is used as other regions are, and its `DmabufRegion` says how it differs. It
        stays registered until `region.close()` or until the connection closes.

        Args:
            fd, length, offset, access, iova: as of `DmabufRegion`.

        Raises:
            as `Connection.register`.
            TypeError, ValueError: an argument has the wrong type, or is out of range; or the iova
                does not fit.
            NotSupportedError: the device or the installed rdma-core cannot register dma-bufs, or
                the device cannot reach this one.
            VerbsCallError: the driver refused; for example, the descriptor is no dma-buf.

        See: man ibv_reg_dmabuf_mr.
        """
        return register_dmabuf(self._endpoint, fd, length, offset, access, iova)

    # -- posting messages -------------------------------------------------------------------------

    @calls_port("receive")
    def post_recv(self, buffer: LocalMemory) -> WorkRequest:
        """Post a receive (rdma_post_recv), on a connection with receive_buffers=0.

        The completion's `byte_len` is the message's length in bytes.

        Args:
            buffer: registered memory, or any writable buffer, at least as long as the message.

        Raises:
            QueueFullError: `max_recv_wr` receives are posted; nothing was posted.
            TypeError: the buffer is read-only, or the object has no buffer.
            ValueError: the connection posts its own receives, or takes them from a shared receive
                queue; or the buffer is not contiguous.
            VerbsCallError: the device refused the receive; nothing was posted.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man rdma_post_recv, ibv_post_recv.
        """
        return self._post_receive("post_recv(): buffer", [buffer])

    @calls_port("receivev")
    def post_recvv(self, parts: Iterable[LocalMemory]) -> WorkRequest:
        """Post a receive scattered over several buffers (rdma_post_recvv).

        Args:
            parts: registered memory, or writable buffers, filled in this order; at most
                `max_recv_sge`.

        Raises: as `Connection.post_recv`.

        See: man rdma_post_recvv.
        """
        return self._post_receive(f"post_recvv(): {PARTS}", several(parts, "post_recvv"))

    @protected
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
        return self._general.receive(parts, where)

    # -- messages ---------------------------------------------------------------------------------

    def counter(self) -> Counter:
        """Make a counter of the peer's notifications, which say that what it wrote is there.

            counter = connection.counter()
            await connection.send(region.remote().pack() + counter.number.to_bytes(4))
            await counter.wait(2)  # the peer: write_blocks(..., immediate=number), twice

        Raises:
            ValueError: the program posts this connection's receives itself.
            NotSupportedError: the device has no immediate data (siw).
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.
        """
        return open_counter(self._endpoint, self._messages.queue)

    def chain(self, *, signal_last_only: bool = False) -> Chain:
        """Collect requests in a `with` block, and post them with one call at its end.

        Args:
            signal_last_only: signal only the last request. Its completion also completes the
                requests before it. This saves the device and the CPU the other completions.

        Raises:
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            VerbsCallError: it has ended, because the device refused a receive.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_post_send.
        """
        return Chain(self._endpoint, self._staging, signal_last_only)

    async def send(
        self, item: LocalMemory, *, immediate: int | None = None, invalidate: int | None = None
    ) -> None:
        """Send a message, and wait until the peer's device has it.

        The call waits for a free slot and, if the peer has no receive posted, until it posts one.

        With the option `send_ahead`, the call returns when the message is posted, if it was copied:
        that are buffers of at most 64 KiB, and bytes of any length, which cannot change. It then
        waits only if more than `send_ahead` messages are under way. A message that fails ends the
        connection, which the next `send` raises, or `drain`, or the end of the `async with` block.

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

        Cancellation: before the post, nothing is sent. Afterwards the message may or may not
        arrive, and the device owns the buffer until the request completes.

        See: man rdma_post_send.
        """
        try:
            request = self._port.send(item, immediate=immediate, invalidate=invalidate)
            if request is None:
                work = message_work(self._endpoint, "send", immediate, invalidate)
                source = self._staging.source
                request = await self._general.post_when_free(work, source, [item], "send(): item")
        except RdmaError as error:
            if self._endpoint.cause is not None:
                self._ahead.fail(error)
            raise
        if self._endpoint.options.send_ahead and self._staging.copies(item):
            await self._ahead.add(request)
        else:
            await request

    async def drain(self) -> None:
        """Wait until the peer's device has every message of `send`. Without the option `send_ahead`
        there is nothing to wait for.

        Raises:
            WorkCompletionError: a message failed; FlushedError if the connection ended before it
                was carried out.
            RdmaError: a `send` has raised that the connection had ended, and this was the error.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the messages stay under way.
        """
        self._endpoint.require_same_process()
        self._endpoint.require_own_loop()
        await self._ahead.drain()

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
        request = self._port.sendv(parts, immediate=immediate, invalidate=invalidate)
        if request is not None:
            await request
            return
        given = several(parts, "sendv")
        work = message_work(self._endpoint, "sendv", immediate, invalidate)
        await self._general.run(work, self._staging.source, given, f"sendv(): {PARTS}")

    @protected
    async def receive(self) -> bytes:
        """Return the next message.

        Raises:
            anyio.EndOfStream: the peer disconnected and all its messages have been received. If
                its process was killed, its kernel disconnected. Only a message of your protocol (an
                explicit goodbye) tells that the peer had finished.
            PeerGoneError: the peer vanished, or its connection was reset.
            BusyError: another task is receiving, or the program holds all `receive_buffers` by
                `receive_view`.
            ValueError: the connection has receive_buffers=0, or takes its receives from a shared
                receive queue with buffers=0.
            ClosedError: you closed the connection.
            WorkCompletionError, DeviceRemovedError, DeviceEventError, VerbsCallError: the
                connection broke; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no message is lost; the next call returns it.
        """
        queue = self._messages.queue
        data = queue.take_data_at_once()
        if data is not None:
            return data
        await self._messages.wait()
        return queue.take_data()

    @protected
    async def receive_message(self) -> Message:
        """Return the next message with its immediate data, or with the rkey that it invalidated.

        Raises: as `Connection.receive`.

        Cancellation: as `Connection.receive`.
        """
        message: Message | None = self._messages.queue.take_message_at_once(Message)
        return await self._messages.receive() if message is None else message

    def receive_view(self) -> AbstractAsyncContextManager[memoryview]:
        """Receive the next message without a copy: `async with connection.receive_view() as view`.

        The view is read-only. It is the receive buffer that the device has written the message to.
        The buffer is posted again when the block ends, and the view is released: any use of it
        then raises ValueError. If the program still uses a part of it (a slice, an array), that
        part stays as it is, and the connection posts another buffer in place of this one. So copy
        what you keep for long (`bytes(view[4:8])`): a kept part costs a buffer of `receive_size`
        bytes.

        Several views can be held at the same time. While a view is held, its buffer receives no
        message: with all `receive_buffers` held, entering another block raises BusyError, because
        no message could arrive. (With a shared receive queue it waits, because other connections
        can give back buffers.) A view stays readable after the connection has ended.

        The errors are raised on entering.

        Raises:
            as `Connection.receive`.
            BusyError: the program holds all `receive_buffers` by views.
            ValueError: this context manager was entered before.

        Cancellation: as `Connection.receive`. The end of the block does not wait.
        """
        return ArrivalView(self._messages.queue)

    # -- one-sided operations ---------------------------------------------------------------------

    async def read(self, local: LocalMemory, remote: RemoteMemory) -> WorkCompletion:
        """READ the peer's memory into local memory. The call waits for a free slot.

        Args:
            local: registered memory, or a writable buffer.
            remote: the peer's memory, of the same length.

        Returns:
            The completion.

        Raises: as `Connection.send`.

        Cancellation: a posted READ stays in flight: the device may still write to `local`, and owns
        it until the READ completes.

        See: man rdma_post_read.
        """
        request = self._port.read(local, remote)
        if request is not None:
            return await request
        work = read_work(self._endpoint, "read", remote, 1)
        return await self._general.run(work, self._staging.target, [local], "read(): local")

    async def readv(self, parts: Iterable[LocalMemory], remote: RemoteMemory) -> WorkCompletion:
        """READ the peer's memory, scattered over several local buffers, as `read` does.

        Args:
            parts: registered memory, or writable buffers, filled in this order.
            remote: the peer's memory.

        Raises: as `Connection.read`.

        Cancellation: as `Connection.read`.
        """
        request = self._port.readv(parts, remote)
        if request is not None:
            return await request
        given = several(parts, "readv")
        work = read_work(self._endpoint, "readv", remote, len(given))
        return await self._general.run(work, self._staging.target, given, f"readv(): {PARTS}")

    async def read_bytes(self, remote: RemoteMemory, *, max_bytes: int = MOST_BYTES) -> bytes:
        """READ the peer's memory and return it as bytes.

        The peer's descriptor determines how much memory this allocates. So the length has a limit,
        which is checked before the allocation.

        Args:
            remote: the peer's memory.
            max_bytes: the longest range to read; 64 MiB by default. The device's longest message is
                also a limit.

        Raises:
            as `Connection.read`.
            ValueError: the range is longer than a limit; the message names the limit.

        Cancellation: a posted READ stays in flight, and its memory is held until it completes.
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
            await self.read(buffer, remote)
            return bytes(buffer)
        # The device writes into the result itself: the loop's thread touches none of its memory.
        result, target = blank_bytes(length)
        await self.read(target, remote)
        return result

    async def write(
        self, local: LocalMemory, remote: RemoteMemory, *, immediate: int | None = None
    ) -> WorkCompletion:
        """WRITE local memory into the peer's. The call waits for a free slot.

        Args:
            local: registered memory, or any object with a buffer: the data.
            remote: the peer's memory, of the same length.
            immediate: 32 bits for the peer's program; as of `post_write`.

        Returns:
            The completion.

        Raises: as `Connection.send`.

        Cancellation: a posted WRITE may still be carried out; the device owns the buffer until it
        completes.

        See: man rdma_post_write.
        """
        request = self._port.write(local, remote, immediate=immediate)
        if request is not None:
            return await request
        work = write_work(self._endpoint, "write", remote, immediate)
        return await self._general.run(work, self._staging.source, [local], "write(): local")

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
        request = self._port.writev(parts, remote, immediate=immediate)
        if request is not None:
            return await request
        given = several(parts, "writev")
        work = write_work(self._endpoint, "writev", remote, immediate)
        return await self._general.run(work, self._staging.source, given, f"writev(): {PARTS}")

    def write_blocks(
        self,
        blocks: BlockPairs | Blocks,
        *,
        immediate: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> BlockTransfer:
        """WRITE any number of pieces of registered memory into the peer's, by one await.

            await connection.write_blocks([(region[0:4096], theirs[8192:12288]), ...])

        Args:
            blocks: pairs of local and remote memory of the same length; or `Blocks`, which names
                them by offsets. They are moved in this order; overlapping ones of the peer's memory
                are not checked.
            immediate: 32 bits for the peer's program, with the last block: when they arrive there,
                all blocks have. They take a receive of the peer's, as those of `write` do. None:
                none.
            progress: called with the completed bytes, now and then and at the end, on the event
                loop. It must return soon; what it raises is logged. None: nothing is called.

        Returns:
            The transfer, which begins when it is awaited. `BlockTransfer` says what that raises,
            and what a cancellation leaves.

        Raises: nothing.

        See: man ibv_post_send.
        """
        return BlockTransfer(self._endpoint, "write_blocks", blocks, immediate, progress)

    def read_blocks(
        self,
        blocks: BlockPairs | Blocks,
        *,
        progress: Callable[[int], object] | None = None,
    ) -> BlockTransfer:
        """READ any number of pieces of the peer's memory into registered memory, by one await.

        Args:
            blocks, progress: as of `write_blocks`.

        Returns:
            The transfer, as of `write_blocks`.

        Raises: nothing.

        See: man ibv_post_send.
        """
        return BlockTransfer(self._endpoint, "read_blocks", blocks, None, progress)

    async def compare_swap(self, remote: RemoteMemory, compare: int, swap: int) -> int:
        """Compare and swap: if the peer's 8 bytes equal `compare`, set them to `swap`. Return the
        previous value.

        Values are unsigned. The peer's byte order is assumed to be this machine's.

        It is atomic with respect to other atomics of the peer's device only
        (`DeviceAttributes.atomic_cap`): meanwhile the peer's program must not change the bytes
        itself, and nothing may WRITE to them.

        Args:
            remote: the peer's 8 bytes, aligned to 8.
            compare, swap: numbers of 64 bits.

        Raises:
            as `Connection.send`.
            NotSupportedError: the device has no atomics, or the handshake allowed none.

        Cancellation: a posted request may still be carried out; its memory is held until it
        completes.
        """
        request = self._port.compare_swap_value(remote, compare, swap)
        if request is not None:
            return await request
        work = compare_swap_work(self._endpoint, "compare_swap", remote, compare, swap)
        return await self._general.run_atomic(work)

    async def fetch_add(self, remote: RemoteMemory, add: int) -> int:
        """Add to the peer's 8 bytes, modulo 2**64, and return the previous value. Values are as for
        `compare_swap`, and it is atomic as `compare_swap` is.

        Args:
            remote: the peer's 8 bytes, aligned to 8.
            add: a number of 64 bits.

        Raises: as `Connection.compare_swap`.

        Cancellation: as `Connection.compare_swap`.
        """
        request = self._port.fetch_add_value(remote, add)
        if request is not None:
            return await request
        work = fetch_add_work(self._endpoint, "fetch_add", remote, add)
        return await self._general.run_atomic(work)

    # -- memory windows ---------------------------------------------------------------------------

    async def open_window(self, kind: MemoryWindowType = MemoryWindowType.TYPE_2) -> BoundWindow:
        """Allocate a memory window that is not bound. `post_bind_window` binds it, any number of
        times. The window is closed with the connection.

        Args:
            kind: TYPE_2, or TYPE_1.

        Raises:
            NotSupportedError: the device has no memory windows.
            TypeError, ValueError: `kind` is not a MemoryWindowType.
            VerbsCallError: the driver refused.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the call waits for the driver, and then frees the window.

        See: man ibv_alloc_mw.
        """
        endpoint = self._endpoint
        kind = member(kind, "kind", MemoryWindowType, "open_window")
        require_windows(endpoint)
        window = await make_in_thread(
            endpoint, lambda: MemoryWindow(endpoint.memory.domain, kind), MemoryWindow.close
        )
        return BoundWindow(endpoint, window)

    async def bind(
        self,
        memory: MemorySlice,
        access: Access,
        kind: MemoryWindowType = MemoryWindowType.TYPE_2,
    ) -> BoundWindow:
        """Open a window and bind it. Its `remote` permits access until `revoke`; with type 2, to
        this connection's peer only.

        Args:
            memory, access: as of `post_bind_window`.
            kind: TYPE_2, or TYPE_1.

        Raises:
            as `Connection.send`.
            as `Connection.open_window`.
            ValueError: the region's access does not permit `access`.

        Cancellation: a posted bind may still be carried out; the window is closed once the bind has
        completed.
        """
        # Check everything before a window is made.
        kind = member(kind, "kind", MemoryWindowType, "bind")
        check_window_memory(self._endpoint, memory, access, "bind")
        window = await self.open_window(kind)
        return await self._general.bind_or_close(window, memory, access, "bind")

    async def revoke(self, window: BoundWindow) -> None:
        """Invalidate a window, and wait for it. After that, no access through the window is
        possible.

        Args:
            window: a bound window of this connection.

        Raises:
            as `Connection.send`.
            ValueError: the window belongs to another connection, or is not bound (any more), or its
                invalidation is posted already.

        Cancellation: before the post, the window stays bound. A posted invalidation is carried out,
        unless the connection ends first, which also ends the access.
        """
        request = self._port.local_invalidate(window)
        if request is not None:
            await request
            return
        instance(window, "window", BoundWindow, "revoke")
        await (await self._general.invalidate_when_free(window, "revoke"))

    # -- grants -----------------------------------------------------------------------------------

    @opens
    async def grant(
        self, memory: LocalMemory, access: Access, *, expires: float | None = None
    ) -> Grant:
        """Give the peer access to a part of memory until the end of the block.

            async with connection.grant(region[0:4096], Access.REMOTE_WRITE) as grant:
                await connection.send(grant.remote.pack())
                await connection.receive()
            # From here on, no byte of the peer's arrives in this memory.

        This holds however the block was left: at its end, by an exception, by a cancellation or a
        timeout, and after the loss of the connection. The end of the block waits for the driver,
        not for the peer. Except on siw, the peer's READs return no later contents either.

        If the peer accesses the memory after the end, its request fails (RemoteAccessError), and
        the connection ends. So let it report that it is done, as here.

        Where the device has memory windows, only this connection's peer has access, and the rkey
        is of no use to others. Where it has none (siw), and for a DmabufRegion, the memory is
        registered for the grant, and other peers of the connection's domain can use the rkey while
        the grant lasts.

        Registering memory and binding a window take some time. If the region was registered with
        Access.MW_BIND, a grant need not register the memory again, on devices that check the bounds
        of a window (not on rxe).

        Args:
            memory: registered memory, or any object with a buffer; at least one byte. It cannot be
                closed or resized before the grant has ended.
            access: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC. What the region itself permits does
                not matter.
            expires: seconds after which the access ends although the block continues
                (`Grant.expired`, `Grant.ended`); None: no limit.

        Raises:
            as `Connection.send`.
            TypeError, ValueError: an argument is invalid; the memory is of another domain, or
                read-only and the access permits writing.
            VerbsCallError: the driver refused, also to end the access; the message has the reason.

        Cancellation: while the access is being opened, nothing is left, and the peer does not know
            the rkey. The end of the block ends the access also if it is cancelled.

        See: man ibv_alloc_mw, ibv_reg_mr.
        """
        return await open_grant(self._endpoint, self._general, memory, access, expires)

    # -- the end ----------------------------------------------------------------------------------

    async def ended(self) -> Exception:
        """Wait until the connection has ended, whichever side ended it, and return the cause.

        All requests have completed by then. Messages that arrived before can still be received
        until you close the connection. You still have to close it. Any number of tasks may wait.

        Returns:
            The final `cause`. It is returned, not raised.

        Raises:
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: has no effect on the connection.
        """
        return await self._endpoint.until_ended()

    async def send_eof(self) -> None:
        """Raise NotSupportedError: an RDMA connection closes in both directions at once.

        Raises:
            NotSupportedError: always. Send a message that marks the end, or call `aclose`.

        Cancellation: has no effect, because the call does not wait.
        """
        raise NotSupportedError(
            "RDMA connections do not close one way: send a last message, or aclose()"
        )

    async def aclose(self) -> None:
        """Disconnect, and release everything. Idempotent.

        Requests in flight fail with FlushedError: await the important ones first. Messages that
        were not received are dropped. Registered regions are closed.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                connection (docs/guarantees.md).
            VerbsCallError: the driver refused to destroy the queue pair, a memory window or a
                region. All requests have failed, and the connection stays in memory for the life of
                the process. A second call raises the same error.

        Cancellation: the connection still closes, and the call returns once it is closed.

        See: man rdma_disconnect.
        """
        await self._endpoint.teardown.aclose()

    def _close_soon(self) -> None:
        """Close in the background."""
        self._endpoint.teardown.close()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._endpoint.options.send_ahead:
            await self.aclose()
            return
        try:
            if kind is None and self._ahead.requests and not self._ahead.has_failed:
                await self._ahead.drain()
        finally:
            self._ahead.give_up()
            await self.aclose()
