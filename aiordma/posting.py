"""Posting: post now, await later. What connections, chains and queue pairs without the connection
manager have in common.

A plain request (one part, registered or short enough to go inline) is posted by the endpoint's port
with one call; whatever else there is to say or to refuse goes the general way.

`post_*` keep the names of librdmacm and libibverbs. They post at once, never block, and return a
WorkRequest; nothing of a request that was refused is held.
"""

from collections.abc import Iterable

from aiordma._native import plain_calls
from aiordma.capabilities import require_atomics, require_reads
from aiordma.enums import WorkRequestOpcode
from aiordma.opcodes import (
    READ,
    check_atomic,
    send_flags,
    send_opcode,
    write_opcode,
)
from aiordma.ranges import RemoteMemory
from aiordma.request import WorkRequest
from aiordma.staging import Buffer
from aiordma.verbs import SendWork
from aiordma.window_posting import WindowPosting

__all__ = ("Posting",)

_Op = WorkRequestOpcode


class Posting(WindowPosting):
    """See the module. `fence` makes a request wait until earlier READs and atomics of ours are
    done; `solicited` makes its arrival an event for a peer that waits for solicited ones only.

    Raises (all post functions):
        QueueFullError: `send_depth` requests are in flight; nothing was posted.
        ValueError, TypeError: an argument will not do; nothing was posted.
        NotSupportedError: the device lacks the operation; the message names both.
        ClosedError, DisconnectedError, WorkCompletionError: as the connection ended.
    """

    # -- messages -----------------------------------------------------------------------------

    @plain_calls("send")
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
        if immediate is None and invalidate is None and not fence and not solicited:
            request = self._plain.send(data)
            if request is not None:
                return request
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

    @plain_calls("receive")
    def post_recv(self, buffer: Buffer) -> WorkRequest:
        """Post a receive (rdma_post_recv), on a connection made with receive_buffers=0.

        The completion's `byte_len` is the message's length.

        Raises:
            QueueFullError: `receive_depth` receives are posted.
            ValueError: the connection posts its own receives; or the buffer will not do.
            TypeError: the buffer is read-only.
        """
        if not self._endpoint.options.receive_buffers:
            request = self._plain.receive(buffer)
            if request is not None:
                return request
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

    @plain_calls("read")
    def post_read(self, remote: RemoteMemory, local: Buffer, *, fence: bool = False) -> WorkRequest:
        """Post an RDMA READ of the peer's memory into ours (rdma_post_read).

        Raises:
            ValueError: the two lengths differ; or the buffer will not do.
            TypeError: `local` is read-only.
            NotSupportedError: the two sides agreed on no outstanding READs (initiator_depth).
        """
        if not fence:
            request = self._plain.read(remote, local)
            if request is not None:
                return request
        return self.post_readv(remote, [local], fence=fence)

    def post_readv(
        self, remote: RemoteMemory, parts: Iterable[Buffer], *, fence: bool = False
    ) -> WorkRequest:
        """Post a READ scattered over several local buffers (rdma_post_readv)."""
        parts = list(parts)
        require_reads(self._endpoint, len(parts))
        return self._post(READ, self._staging.target(parts), remote, send_flags(fence, False))

    @plain_calls("write")
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
        if immediate is None and not fence and not solicited:
            request = self._plain.write(local, remote)
            if request is not None:
                return request
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
