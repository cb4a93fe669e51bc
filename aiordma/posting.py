"""Posting: post now, await later. What connections, chains and queue pairs without the connection
manager have in common.

`post_*` keep the names of librdmacm and libibverbs. They post at once, never block, and return a
WorkRequest; nothing of a request that was refused is held.
"""

from collections.abc import Iterable

from aiordma.capabilities import require_atomics, require_reads, require_windows
from aiordma.enums import Access, MemoryWindowType, WorkRequestOpcode
from aiordma.opcodes import (
    READ,
    Operation,
    check_atomic,
    send_flags,
    send_opcode,
    write_opcode,
)
from aiordma.ranges import RemoteMemory
from aiordma.registration import Registration
from aiordma.request import WorkRequest
from aiordma.staging import Buffer, Staged, Staging
from aiordma.verbs import MemorySlice, SendWork
from aiordma.windows import BoundWindow, check_bindable

__all__ = ("Posting", "fill")

_Op = WorkRequestOpcode


class Posting(Registration):
    """See the module. `fence` makes a request wait until earlier READs and atomics of ours are
    done; `solicited` makes its arrival an event for a peer that waits for solicited ones only.

    Raises (all post functions):
        QueueFullError: `send_depth` requests are in flight; nothing was posted.
        ValueError, TypeError: an argument will not do; nothing was posted.
        NotSupportedError: the device lacks the operation; the message names both.
        ClosedError, DisconnectedError, WorkCompletionError: as the connection ended.
    """

    _staging: Staging

    # -- messages -----------------------------------------------------------------------------

    def post_send(
        self,
        data: Buffer,
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
            data: registered memory, or anything with a buffer.
            immediate: 32 bits beside the message; the peer's `Message.immediate`.
            invalidate: an rkey of the peer's that ends with the message's arrival
                (IBV_WR_SEND_WITH_INV): of a memory window of type 2 that it bound for us.
            fence: see the class.
            solicited: see the class.
        """
        return self.post_sendv(
            [data], immediate=immediate, invalidate=invalidate, fence=fence, solicited=solicited
        )

    def post_sendv(
        self,
        parts: Iterable[Buffer],
        *,
        immediate: int | None = None,
        invalidate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post one message gathered from several buffers (rdma_post_sendv). See `post_send`."""
        self._endpoint.require_usable()
        operation, extra = send_opcode(self._endpoint, immediate, invalidate)
        staged = self._staging.source(parts)
        return self._post(operation, staged, None, send_flags(fence, solicited), extra)

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

    # -- one-sided ----------------------------------------------------------------------------

    def post_read(self, remote: RemoteMemory, local: Buffer, *, fence: bool = False) -> WorkRequest:
        """Post an RDMA READ of the peer's memory into ours (rdma_post_read).

        Raises:
            ValueError: the two lengths differ; or the buffer will not do.
            TypeError: `local` is read-only.
            NotSupportedError: the two sides agreed on no outstanding READs (initiator_depth).
        """
        return self.post_readv(remote, [local], fence=fence)

    def post_readv(
        self, remote: RemoteMemory, parts: Iterable[Buffer], *, fence: bool = False
    ) -> WorkRequest:
        """Post a READ scattered over several local buffers (rdma_post_readv)."""
        parts = list(parts)
        require_reads(self._endpoint, len(parts))
        return self._post(READ, self._staging.target(parts), remote, send_flags(fence, False))

    def post_write(
        self,
        local: Buffer,
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post an RDMA WRITE of our memory into the peer's (rdma_post_write).

        The request ends when the data has reached the peer's device. The peer's program is told
        nothing, except with `immediate`: that takes a receive of the peer's, whose Message has
        no data but the 32 bits, and `byte_len` is what was written.
        """
        return self.post_writev(
            [local], remote, immediate=immediate, fence=fence, solicited=solicited
        )

    def post_writev(
        self,
        parts: Iterable[Buffer],
        remote: RemoteMemory,
        *,
        immediate: int | None = None,
        fence: bool = False,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post a WRITE gathered from several local buffers (rdma_post_writev)."""
        self._endpoint.require_usable()
        operation, extra = write_opcode(self._endpoint, immediate)
        staged = self._staging.source(parts)
        return self._post(operation, staged, remote, send_flags(fence, solicited), extra)

    def post_compare_swap(
        self,
        local: Buffer,
        remote: RemoteMemory,
        compare: int,
        swap: int,
        *,
        fence: bool = False,
    ) -> WorkRequest:
        """Post: if the peer's 8 bytes are `compare`, make them `swap` (IBV_WR_ATOMIC_CMP_AND_SWP).

        Either way `local` gets what they were, as a number in this machine's byte order. Both
        memories are 8 bytes long, and the remote one aligned to 8.

        Raises:
            NotSupportedError: the device has no atomics, or none were agreed on.
        """
        return self._atomic("COMPARE_SWAP", local, remote, compare, swap, fence)

    def post_fetch_add(
        self, local: Buffer, remote: RemoteMemory, add: int, *, fence: bool = False
    ) -> WorkRequest:
        """Post: add to the peer's 8 bytes, modulo 2**64 (IBV_WR_ATOMIC_FETCH_AND_ADD); `local`
        gets what they were. See `post_compare_swap`."""
        return self._atomic("FETCH_ADD", local, remote, add, None, fence)

    def _atomic(
        self,
        name: str,
        local: Buffer,
        remote: RemoteMemory,
        operand: int,
        swap: int | None,
        fence: bool,
    ) -> WorkRequest:
        require_atomics(self._endpoint)
        operand = check_atomic(remote, operand)
        other = 0 if swap is None else check_atomic(remote, swap)
        opcode = _Op.ATOMIC_FETCH_AND_ADD if swap is None else _Op.ATOMIC_CMP_AND_SWP
        work = SendWork(
            name,
            opcode,
            flags=send_flags(fence, False),
            remote=remote,
            compare_add=operand,
            swap=other,
        )
        return self._post_work(work, self._staging.target([local]))

    # -- memory windows -----------------------------------------------------------------------

    def post_bind_window(
        self, window: BoundWindow, memory: MemorySlice, access: Access, *, fence: bool = False
    ) -> WorkRequest:
        """Post the binding of a window to registered memory, for `window.remote` to be given away
        (IBV_WR_BIND_MW; ibv_bind_mw for type 1).

        A peer may use the rkey once the request has succeeded. Until the window is revoked or
        closed, the memory stays registered.

        Args:
            window: from `open_window`, not bound.
            memory: of a region registered with Access.MW_BIND (and LOCAL_WRITE, if the window is
                to be written to).
            access: REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC.
            fence: see the class.

        Raises:
            ValueError: it is bound, or the region's access does not permit it.
        """
        return self._bind(window, memory, access, fence)

    def _bind(
        self,
        window: BoundWindow,
        memory: MemorySlice,
        access: Access,
        fence: bool = False,
        *,
        credited: bool = False,
    ) -> WorkRequest:
        try:
            require_windows(self._endpoint)
            check_bindable(self._endpoint, window, memory, access)
        except BaseException:
            if credited:
                self._endpoint.send_credits.give()
            raise
        flags = send_flags(fence, False)
        if window.window.kind is MemoryWindowType.TYPE_1:
            request = self._post_bind(window, memory, int(access), flags, credited)
            window.posted(request, memory, window.window.rkey)
            return request
        rkey = window.window.next_rkey()
        work = SendWork(
            "BIND_MW",
            _Op.BIND_MW,
            flags=flags,
            held=(memory,),
            window=window.window,
            bound=memory,
            access=access,
            rkey=rkey,
        )
        request = self._post_work(work, None, credited=credited)
        window.posted(request, memory, rkey)
        return request

    def post_invalidate(self, window: BoundWindow, *, fence: bool = False) -> WorkRequest:
        """Post the end of what a window permits: a local invalidate (IBV_WR_LOCAL_INV), or the
        binding of a window of type 1 to nothing.

        Raises:
            ValueError: it is not bound (any more).
        """
        return self._invalidate(window, fence)

    def _invalidate(
        self, window: BoundWindow, fence: bool = False, *, credited: bool = False
    ) -> WorkRequest:
        try:
            require_windows(self._endpoint)
            memory = window.require_bound()
        except BaseException:
            if credited:
                self._endpoint.send_credits.give()
            raise
        if window.window.kind is MemoryWindowType.TYPE_1:
            request = self._post_bind(window, memory[:0], 0, send_flags(fence, False), credited)
        else:
            work = SendWork(
                "LOCAL_INV", _Op.LOCAL_INV, flags=send_flags(fence, False), immediate=window.rkey
            )
            request = self._post_work(work, None, credited=credited)
        window.revoking(request)
        return request

    # -- how ----------------------------------------------------------------------------------

    def _post(
        self,
        operation: Operation,
        staged: Staged,
        remote: RemoteMemory | None,
        flags: int = 0,
        immediate: int = 0,
        *,
        credited: bool = False,
    ) -> WorkRequest:
        self._require_range(staged, remote, credited)
        name, opcode = operation
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
                immediate=immediate,
                credited=credited,
            )
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    def _post_work(
        self, work: SendWork, staged: Staged | None, *, credited: bool = False
    ) -> WorkRequest:
        if staged is not None:
            self._require_range(staged, work.remote, credited)
            fill(work, staged)
        try:
            (request,) = self._endpoint.post_sends([work], credited=credited)
        except BaseException:
            if staged is not None:
                self._staging.abandon(staged)
            raise
        if staged is not None:
            self._staging.posted(staged, request)
        return request

    def _post_bind(
        self, window: BoundWindow, memory: MemorySlice, access: int, flags: int, credited: bool
    ) -> WorkRequest:
        return self._endpoint.post_bind(window.window, memory, access, flags, credited=credited)

    def _require_range(
        self, staged: Staged, remote: RemoteMemory | None, credited: bool = False
    ) -> None:
        if remote is None:
            return
        try:
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


def fill(work: SendWork, staged: Staged) -> None:
    """Write the local side into a request."""
    work.sges, work.count, work.length = staged.sges, staged.count, staged.length
    work.held = staged.held
    work.flags = int(work.flags) | staged.flags
