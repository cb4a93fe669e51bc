"""One queue of receives for many connections (man ibv_create_srq).

The next message of any member consumes a receive of the queue. So the memory for receives depends
on the messages of all members together, not on the number of members.
"""

from collections.abc import Iterable, Sequence

from anyio.abc import AsyncResource

from aiordma._base.arguments import Buffer, whole_number, wrong_type
from aiordma._base.arguments import buffers as as_list
from aiordma._base.errors import detached
from aiordma._base.process import never_pickled
from aiordma._base.statistics import RequestStatistics
from aiordma._connection.connection import Connection
from aiordma._connection.shared_endpoint import SharedReceiveEndpoint
from aiordma._connection.shared_settings import MOST_WORK_REQUESTS
from aiordma._requests.request import WorkRequest
from aiordma.verbs import LocalMemory
from aiordma.verbs.completion import WorkCompletion
from aiordma.verbs.memory import MemoryRegion, MemorySlice


class SharedReceiveQueue(AsyncResource):
    """A queue of receives for all connections that are created with `shared_receive=`.

    Made by `open_shared_receive`, for one device and event loop. There are two modes:

    - Without `buffers=`, you post receives with `post_srq_recv(buffers)`, and
      `connection_of(completion)` returns the connection of a message.
    - With `buffers=`, the queue posts its own receives, and each connection's `receive()` returns
      its peer's messages. A buffer is posted again when the program has received its message. So
      one connection whose messages are not received can hold all buffers. All peers then wait
      (RNR), on devices that support RNR, until these messages are received or the connection is
      closed. Choose `buffers` for all connections together.

    Every receive completes, or fails with FlushedError when the queue is closed. The end of a
    connection does not flush receives, because other connections can use them. Only a receive that
    its peer's message was filling fails with the connection, or, if the device does not report it,
    with the queue.
    """

    def __init__(self, endpoint: SharedReceiveEndpoint) -> None:
        self._endpoint = endpoint

    __reduce__ = never_pickled

    def __repr__(self) -> str:
        return repr(self._endpoint)

    @property
    def buffers(self) -> int:
        """The number of receives that the queue posts itself; 0: you post them."""
        return self._endpoint.buffers

    @property
    def buffer_size(self) -> int:
        """The size of each of these receives, in bytes: the longest message that peers may send."""
        return self._endpoint.buffer_size

    @property
    def depth(self) -> int:
        """The maximum number of posted receives."""
        return self._endpoint.depth

    @property
    def max_sge(self) -> int:
        """The maximum number of parts of one receive."""
        return self._endpoint.max_sge

    @property
    def cause(self) -> Exception | None:
        """Why the queue has ended; None while it works. Each access returns a new exception."""
        cause = self._endpoint.cause
        return None if cause is None else detached(cause)

    @property
    def device_name(self) -> str:
        """The name of the RDMA device that the queue belongs to."""
        return self._endpoint.device_name

    @property
    def is_closing(self) -> bool:
        """Whether the queue was closed, or will be closed when its last member has ended."""
        return self._endpoint.is_closing

    @property
    def posted(self) -> int:
        """The number of posted receives that have not completed."""
        return self._endpoint.posted

    @property
    def members(self) -> int:
        """The number of connections that use the queue and have not ended."""
        return self._endpoint.members

    def statistics(self) -> RequestStatistics:
        """Return the counters of the queue's receives. They remain after its end.

        Raises: nothing.
        """
        return RequestStatistics._of(self._endpoint.counters())

    def register(self, buffer: Buffer) -> MemoryRegion:
        """Register a writable buffer for receives. It stays registered until `region.close()` or
        until the queue closes.

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
            A request for each receive, in order. The device chooses the receive that a message
                consumes. The completion has `byte_len`, and `qp_num` for `connection_of`.

        Raises:
            QueueFullError: fewer slots are free than receives given; nothing was posted.
            PartialPostError: the device refused a receive: `refused` is its index, and `posted` are
                the requests before it, which are posted. The later ones are not posted either.
            ValueError, TypeError: a buffer is invalid, or the queue posts its own receives; nothing
                was posted.
            ClosedError, DeviceRemovedError, DeviceEventError, VerbsCallError: the queue was closed,
                or has failed.
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
        posted = None if endpoint.port is None else endpoint.port.receive_all(given)
        if posted is None:
            return endpoint.post(given)
        return posted if isinstance(posted, list) else endpoint.posted_in_part(*posted, given)

    def connection_of(self, completion: WorkCompletion) -> Connection | None:
        """Return the connection whose message a receive contains; None if it is closed.

        A message may arrive before its connection's handshake has completed. Send nothing on the
        connection before `accept` has returned it.

        Args:
            completion: the completion of a receive of this queue.

        Raises:
            TypeError: `completion` is not a WorkCompletion.
        """
        if not isinstance(completion, WorkCompletion):
            raise wrong_type(completion, "completion", "a WorkCompletion", "connection_of")
        return self._endpoint.connection_of(completion)

    async def limit(self, count: int) -> None:
        """Wait until fewer than `count` receives are posted. Return at once if this is the case.

        The call arms the device's limit (ibv_modify_srq), and waits for the event SRQ_LIMIT_REACHED
        or for enough completions.

        Args:
            count: a number of receives, 1..`depth`.

        Raises:
            TypeError, ValueError: `count` is not in 1..`depth`.
            BusyError: another task waits for a limit; a queue has only one.
            ClosedError, DeviceRemovedError, DeviceEventError: the queue was closed, or has failed.
            VerbsCallError: the driver refused.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the limit is disarmed, and nothing is left.

        See: man ibv_modify_srq.
        """
        whole_number(count, "count", 0, MOST_WORK_REQUESTS, "limit")
        if not 1 <= count <= self.depth:
            raise ValueError(f"limit(): count={count} is not in 1..{self.depth} (the depth)")
        await self._endpoint.limit(count)

    async def resize(self, depth: int) -> None:
        """Change the maximum number of posted receives while the queue is in use (ibv_modify_srq).

        Args:
            depth: the new maximum.

        Raises:
            TypeError, ValueError: `depth` exceeds the device's limit or the free entries of the
                completion queue, or is less than the number of posted receives, or of `buffers`.
            BusyError: another task is resizing the queue.
            NotSupportedError: the device cannot resize a shared receive queue.
            ClosedError, DeviceRemovedError, DeviceEventError: the queue was closed, or has failed.
            VerbsCallError: the driver refused.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the call waits for the driver. The queue then has the new depth, or the old
        one if the device refused.

        See: man ibv_modify_srq.
        """
        depth = whole_number(depth, "depth", 0, MOST_WORK_REQUESTS, "resize")
        await self._endpoint.resize(depth)

    async def aclose(self) -> None:
        """Destroy the queue, and wait for it. Idempotent.

        Receives that are still posted fail with FlushedError.

        Raises:
            BusyError: connections still use the queue: close them first. Nothing has changed.
            EventLoopError: called outside of its event loop; the message says what happens to the
                queue.
            VerbsCallError: the driver refused to destroy the queue or a region. All requests have
                failed, and the queue stays in memory for the life of the process. A second call
                raises the same error.

        Cancellation: the queue still closes, and the call returns once it is closed.

        See: man ibv_destroy_srq.
        """
        await self._endpoint.aclose()
