"""The `post_*` methods of a connection and of a chain, which differ in where the requests go."""

from collections.abc import Iterable

from aiordma._base.enums import Access
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.general_path import GeneralPath
from aiordma._connection.operations import (
    compare_swap_work,
    fetch_add_work,
    message_work,
    read_work,
    send_flags,
    write_work,
)
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import PARTS, Staging, several
from aiordma._endpoint.windows import BoundWindow
from aiordma._native import calls_port
from aiordma._requests.request import WorkRequest
from aiordma.verbs import LocalMemory
from aiordma.verbs.memory import MemorySlice


class Posting:
    """Posts to the send queue (Connection), or collects what is posted together (Chain). A call
    goes to the C code of `_port` first; the bodies here are the general path."""

    _endpoint: Endpoint
    _staging: Staging
    _general: GeneralPath

    @calls_port("send")
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

        The request completes when the peer's device has placed the message in a receive. A buffer
        that is not registered is copied, or kept exported until then.

        Args:
            data: registered memory, or any object with a buffer.
            immediate: 32 bits to send with the message; the peer's `Message.immediate`. None: none.
            invalidate: the rkey of a memory window of type 2 that the peer bound for this
                connection; the message's arrival invalidates it (IBV_WR_SEND_WITH_INV).
                None: none.
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
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_send", immediate, invalidate, flags)
        return self._general.post(work, self._staging.source, [data], "post_send(): data")

    @calls_port("sendv")
    def post_sendv(
        self,
        parts: Iterable[LocalMemory],
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post one message gathered from several buffers (rdma_post_sendv). The request completes
        as that of `post_send` does.

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            immediate, invalidate, fence, solicited: as of `post_send`.

        Raises: as `Connection.post_send`.

        See: man rdma_post_sendv.
        """
        given = several(parts, "post_sendv")
        flags = send_flags(fence, solicited)
        work = message_work(self._endpoint, "post_sendv", immediate, invalidate, flags)
        return self._general.post(work, self._staging.source, given, f"post_sendv(): {PARTS}")

    @calls_port("read")
    def post_read(
        self, local: LocalMemory, remote: RemoteMemory, *, fence: bool = False
    ) -> WorkRequest:
        """Post an RDMA READ of the peer's memory into local memory (rdma_post_read).

        The request completes when the data has arrived.

        Args:
            local: registered memory, or a writable buffer.
            remote: the peer's memory, of the same length.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            NotSupportedError: the handshake allowed no outstanding READs (initiator_depth).

        See: man rdma_post_read.
        """
        work = read_work(self._endpoint, "post_read", remote, 1, send_flags(fence))
        return self._general.post(work, self._staging.target, [local], "post_read(): local")

    @calls_port("readv")
    def post_readv(
        self, parts: Iterable[LocalMemory], remote: RemoteMemory, *, fence: bool = False
    ) -> WorkRequest:
        """Post a READ scattered over several local buffers (rdma_post_readv).

        Args:
            parts: registered memory, or writable buffers, filled in this order; at most
                `max_send_sge`.
            remote: the peer's memory.
            fence: see the class.

        Raises: as `Connection.post_read`.

        See: man rdma_post_readv.
        """
        given = several(parts, "post_readv")
        work = read_work(self._endpoint, "post_readv", remote, len(given), send_flags(fence))
        return self._general.post(work, self._staging.target, given, f"post_readv(): {PARTS}")

    @calls_port("write")
    def post_write(
        self,
        local: LocalMemory,
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post an RDMA WRITE of local memory into the peer's (rdma_post_write).

        The request completes when the data has reached the peer's device. The peer's program is not
        notified, except with `immediate`. A WRITE with immediate consumes one of the peer's
        receives: `Message.immediate` is the 32 bits, and `Message.written` (the `byte_len` of the
        completion) is the number of bytes written.

        Args:
            local: registered memory, or any object with a buffer: the data.
            remote: the peer's memory, of the same length.
            immediate: 32 bits for the peer's program; None: none.
            fence: see the class.
            solicited: see the class. Without `immediate` it has no effect, because nothing
                completes at the peer.

        Raises: as `Connection.post_send`.

        See: man rdma_post_write.
        """
        flags = send_flags(fence, solicited)
        work = write_work(self._endpoint, "post_write", remote, immediate, flags)
        return self._general.post(work, self._staging.source, [local], "post_write(): local")

    @calls_port("writev")
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
        return self._general.post(work, self._staging.source, given, f"post_writev(): {PARTS}")

    @calls_port("compare_swap")
    def post_compare_swap(
        self,
        local: LocalMemory,
        remote: RemoteMemory,
        compare: int,
        swap: int,
        *,
        fence: bool = False,
    ) -> WorkRequest:
        """Post an atomic compare and swap: if the peer's 8 bytes equal `compare`, set them to
        `swap` (IBV_WR_ATOMIC_CMP_AND_SWP).

        In both cases `local` receives the previous value, as a number in this machine's byte order.
        Both memories are 8 bytes long, and the remote one is aligned to 8.

        It is atomic with respect to other atomics of the peer's device only
        (`DeviceAttributes.atomic_cap`): meanwhile the peer's program must not change the bytes
        itself, and nothing may WRITE to them.

        Args:
            local: registered memory, or a writable buffer, of 8 bytes.
            remote: the peer's 8 bytes.
            compare, swap: unsigned numbers of 64 bits.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            NotSupportedError: the device has no atomics, or the handshake allowed none.

        See: man ibv_post_send.
        """
        call = "post_compare_swap"
        work = compare_swap_work(self._endpoint, call, remote, compare, swap, send_flags(fence))
        return self._general.post(work, self._staging.target, [local], f"{call}(): local")

    @calls_port("fetch_add")
    def post_fetch_add(
        self, local: LocalMemory, remote: RemoteMemory, add: int, *, fence: bool = False
    ) -> WorkRequest:
        """Post an atomic add to the peer's 8 bytes, modulo 2**64 (IBV_WR_ATOMIC_FETCH_AND_ADD).
        `local` receives the previous value. It is atomic as `post_compare_swap` is.

        Args:
            local, remote, fence: as of `post_compare_swap`.
            add: an unsigned number of 64 bits.

        Raises: as `Connection.post_compare_swap`.

        See: man ibv_post_send.
        """
        call = "post_fetch_add"
        work = fetch_add_work(self._endpoint, call, remote, add, send_flags(fence))
        return self._general.post(work, self._staging.target, [local], f"{call}(): local")

    @calls_port("bind")
    def post_bind_window(
        self, window: BoundWindow, memory: MemorySlice, access: Access, *, fence: bool = False
    ) -> WorkRequest:
        """Post the binding of a window to registered memory (IBV_WR_BIND_MW; ibv_bind_mw for type
        1). `window.remote` is then the descriptor to send to the peer.

        The peer may use the rkey once the request has succeeded. The memory stays registered until
        the window is revoked or closed.

        Args:
            window: a window from `open_window` that is not bound.
            memory: a slice of a region registered with Access.MW_BIND (and LOCAL_WRITE, if the
                window permits writing).
            access: any of REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            ValueError: the window is bound, or the region's access does not permit `access`.
            ClosedError: the window or the region is closed.

        See: man ibv_post_send, ibv_bind_mw.
        """
        return self._general.bind(window, memory, access, "post_bind_window", fence)

    @calls_port("local_invalidate")
    def post_invalidate(self, window: BoundWindow, *, fence: bool = False) -> WorkRequest:
        """Post the invalidation of a window: a local invalidate (IBV_WR_LOCAL_INV), or, for a
        window of type 1, a bind of zero bytes.

        Args:
            window: a bound window of this connection.
            fence: see the class.

        Raises:
            as `Connection.post_send`.
            ValueError: the window belongs to another connection, or is not bound (any more), or its
                invalidation is posted already.

        See: man ibv_post_send, ibv_bind_mw.
        """
        return self._general.invalidate(window, "post_invalidate", fence)
