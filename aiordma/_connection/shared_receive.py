"""One queue of receives for many connections (man ibv_create_srq).

What is posted here is taken by whichever member's message comes first, so that memory is sized by
what arrives altogether and not by the number of peers.
"""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from aiordma._base.arguments import Buffer, whole_number, wrong_type
from aiordma._base.arguments import buffers as as_list
from aiordma._base.interrupts import deferring_steps
from aiordma._connection.connection import Connection
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_settings import MOST_WORK_REQUESTS
from aiordma._requests.request import WorkRequest
from aiordma.verbs import LocalMemory, MemoryRegion, MemorySlice, WorkCompletion

__all__ = ("SharedReceiveQueue",)


class SharedReceiveQueue:
    """Receives that all connections made with `shared_receive=` take theirs from.

    Made by `open_shared_receive`, for one device and event loop. Two ways to use it:

    - you post: `post_srq_recv(buffers)`; `connection_of(completion)` says whose message it was;
    - it posts, made with `buffers=`: each connection's `receive()` returns what its peer sent. A
      buffer goes back when its message has been received by the program, so a connection that is
      not read can come to hold all of them; then the peers of all wait (RNR), on devices that
      have that, until it is read or closed. Size `buffers` for the sum.

    Every receive ends: with its completion, or with FlushedError when the queue is closed. That a
    connection ends does not flush receives: they are for the others. Only one that its peer's
    message was filling ends with it, or, where the device does not tell, with the queue.
    """

    def __init__(self, endpoint: SharedReceiveEndpoint) -> None:
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return repr(self._endpoint)

    @property
    def buffers(self) -> int:
        """How many receives it posts by itself; 0: none."""
        return self._endpoint.buffers

    @property
    def buffer_size(self) -> int:
        """Bytes of each of these: the longest message that the peers may send."""
        return self._endpoint.buffer_size

    @property
    def depth(self) -> int:
        """Receives that may be posted."""
        return self._endpoint.depth

    @property
    def max_sge(self) -> int:
        """Parts that one receive may have."""
        return self._endpoint.max_sge

    @property
    def cause(self) -> Exception | None:
        """Why it has ended; None while it works."""
        return self._endpoint.cause

    @property
    def device_name(self) -> str:
        """The RDMA device it belongs to."""
        return self._endpoint.device_name

    @property
    def is_closing(self) -> bool:
        """Whether it was closed, or closes with its last member."""
        return self._endpoint.is_closing

    @property
    def posted(self) -> int:
        """Receives that are posted and have not completed."""
        return self._endpoint.posted

    @property
    def members(self) -> int:
        """Connections that take their receives from here and have not ended."""
        return self._endpoint.members

    def register(self, buffer: Buffer) -> MemoryRegion:
        """Register a writable buffer for receives. It stays registered until `region.close()` or
        until this queue closes.

        Args:
            buffer: as of `Connection.register`.

        Raises: as `Connection.register`.

        See: man ibv_reg_mr.
        """
        return self._endpoint.register(buffer)

    def post_srq_recv(
        self, buffers: Iterable[LocalMemory | Sequence[LocalMemory]]
    ) -> list[WorkRequest]:
        """Post receives as one chain (ibv_post_srq_recv), with one call.

        Args:
            buffers: for each receive a writable buffer, or a list of its parts.

        Returns:
            A request for each, in order. Which of them a message takes is the device's to choose;
                its completion has `byte_len`, and `qp_num` for `connection_of`.

        Raises:
            QueueFullError: fewer slots are free than receives given; nothing was posted.
            PartialPostError: the device refused one: `refused` is its index, and `posted` are the
                requests before it, which are live. That one and those behind it hold nothing.
            ValueError, TypeError: a buffer is invalid, or the queue posts its own; nothing was
                posted.
            ClosedError, DeviceEventError, VerbsCallError: the queue was closed, or has failed.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man ibv_post_srq_recv.
        """
        endpoint = self._endpoint
        if endpoint.buffers:
            raise ValueError(
                "this queue posts its own receives: use connection.receive(), or make it with "
                "buffers=0"
            )
        given = as_list(buffers, "buffers", "post_srq_recv", MemoryRegion, MemorySlice)
        posted = None if endpoint.port is None else endpoint.port.post(given)
        if posted is None:
            return endpoint.post(given)
        return posted if isinstance(posted, list) else endpoint.posted_in_part(*posted, given)

    def connection_of(self, completion: WorkCompletion) -> Connection | None:
        """Return the connection whose message a receive took; None once that is closed.

        A message may arrive before its connection's handshake has ended; send nothing before
        `accept` has returned it.

        Args:
            completion: of a receive of this queue.

        Raises:
            TypeError: this is not a WorkCompletion.
        """
        if not isinstance(completion, WorkCompletion):
            raise wrong_type(completion, "completion", "a WorkCompletion", "connection_of")
        return self._endpoint.connection_of(completion)

    @deferring_steps
    async def limit(self, count: int) -> None:
        """Wait until fewer than `count` receives are left, at once if that is so already. Time to
        post more.

        Arms the device's limit (ibv_modify_srq) and waits for SRQ_LIMIT_REACHED, or for completions
        that show the same.

        Args:
            count: receives, 1 to `depth`.

        Raises:
            TypeError, ValueError: not in 1..depth.
            BusyError: another task waits for a limit; a queue has one.
            ClosedError, DeviceEventError: the queue was closed, or has failed.
            VerbsCallError: the driver refused.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the limit is disarmed; nothing is left.

        See: man ibv_modify_srq.
        """
        whole_number(count, "count", 0, MOST_WORK_REQUESTS, "limit")
        if not 1 <= count <= self.depth:
            raise ValueError(f"count={count} is not in 1..{self.depth} (the depth)")
        await self._endpoint.limit(count)

    @deferring_steps
    async def resize(self, depth: int) -> None:
        """Change how many receives may be posted, while it is used (ibv_modify_srq).

        Args:
            depth: receives.

        Raises:
            TypeError, ValueError: beyond the device, more than its completion queue has room for,
                or fewer than are posted.
            BusyError: another task is resizing it.
            NotSupportedError: the device cannot resize a shared receive queue.
            ClosedError, DeviceEventError: the queue was closed, or has failed.
            VerbsCallError: the driver refused.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the call waits for the driver; the queue has the new depth, or the old one if
        the device refused.

        See: man ibv_modify_srq.
        """
        depth = whole_number(depth, "depth", 0, MOST_WORK_REQUESTS, "resize")
        await self._endpoint.resize(depth)

    @deferring_steps
    async def aclose(self) -> None:
        """Destroy the queue, and wait for that. Idempotent.

        Receives that are still posted end with FlushedError.

        Raises:
            BusyError: connections still take from it: close them first. Nothing has changed.
            EventLoopError: called outside of its event loop; the message says what became of the
                queue.

        Cancellation: the queue closes all the same, and the call returns once it is closed.

        See: man ibv_destroy_srq.
        """
        await self._endpoint.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
