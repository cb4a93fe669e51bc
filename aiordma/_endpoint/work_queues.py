"""The two work queues of a queue pair: posting with credits, and what is in flight on them.

Every post takes a slot, enters the in-flight table, and only then reaches the device. The owner, an
endpoint, gives the slot back when the request ends.
"""

from collections.abc import Sequence
from typing import Protocol

from aiordma._base.enums import SendFlag, WorkCompletionOpcode, WorkRequestOpcode
from aiordma._base.errors import (
    PartialPostError,
    QueueFullError,
    RdmaError,
    VerbsCallError,
    detached,
)
from aiordma._endpoint.staging import Staged
from aiordma._native import ffi
from aiordma._requests.credits import Credits, Slot
from aiordma._requests.request import Holdable, OpenRequests, RequestOwner, WorkRequest, fail_all
from aiordma._requests.select import ChainPort
from aiordma._runtime.hub import DeviceHub
from aiordma.verbs import MemorySlice, MemoryWindow, QueuePair, SendWork
from aiordma.verbs.send_work import pack_chain

__all__ = ("Owner", "ReceiveQueue", "SendQueue", "WorkQueue")

_SIGNALED = int(SendFlag.SIGNALED)

_SHORT = frozenset(
    int(opcode)
    for opcode in (
        WorkRequestOpcode.SEND,
        WorkRequestOpcode.SEND_WITH_IMM,
        WorkRequestOpcode.SEND_WITH_INV,
        WorkRequestOpcode.RDMA_WRITE,
        WorkRequestOpcode.RDMA_WRITE_WITH_IMM,
        WorkRequestOpcode.RDMA_READ,
    )
)
"""What the call with few arguments can say, but for datagrams."""

_COMPLETES_AS: dict[int, WorkCompletionOpcode] = {
    WorkRequestOpcode.RDMA_WRITE: WorkCompletionOpcode.RDMA_WRITE,
    WorkRequestOpcode.RDMA_WRITE_WITH_IMM: WorkCompletionOpcode.RDMA_WRITE,
    WorkRequestOpcode.RDMA_READ: WorkCompletionOpcode.RDMA_READ,
    WorkRequestOpcode.ATOMIC_CMP_AND_SWP: WorkCompletionOpcode.COMP_SWAP,
    WorkRequestOpcode.ATOMIC_FETCH_AND_ADD: WorkCompletionOpcode.FETCH_ADD,
    WorkRequestOpcode.LOCAL_INV: WorkCompletionOpcode.LOCAL_INV,
    WorkRequestOpcode.BIND_MW: WorkCompletionOpcode.BIND_MW,
}


class Owner(RequestOwner, Protocol):
    """The endpoint that the two queues are part of."""

    hub: DeviceHub
    queue_pair: QueuePair | None
    requests: OpenRequests

    def require_usable(self) -> None:
        """Do nothing while requests may be posted."""

    def require_sendable(self) -> None:
        """`require_usable`, and connected."""

    def fail(self, error: Exception) -> None:
        """End, with this error as the cause."""


class WorkQueue:
    """One of a queue pair's two queues.

    Args:
        owner: the endpoint.
        depth: how many requests may be posted on it.
    """

    def __init__(self, owner: Owner, depth: int) -> None:
        self._owner = owner
        self.slots: Credits = Credits(owner.loop, depth)

    def _enter(self, request: WorkRequest) -> None:
        # Before the device can know of it, so that nothing (an interrupt, say) comes between; only
        # the device's own refusal takes it out again.
        request.wr_id = self._owner.hub.in_flight.add(request)
        self._owner.requests.add(request)

    def _take_back(self, request: WorkRequest) -> None:
        """The device has refused it: nothing of it is left."""
        self._owner.requests.discard(request)
        self._owner.hub.in_flight.take(request.wr_id)
        request._drop()
        self.slots.give()


class SendQueue(WorkQueue):
    """The send queue: messages, one-sided operations, windows; one by one, or as a chain."""

    def submit(
        self, work: SendWork, staged: Staged | None = None, slot: Slot | None = None
    ) -> WorkRequest:
        """Post a request on the send queue.

        Args:
            work: with its memory.
            staged: what that was made of, which the caller keeps until this returns.
            slot: of `send_credits.take()`; None: one is taken, if one is free.

        Raises:
            QueueFullError: no slot is free.
            VerbsCallError: the device refused it. Nothing was posted, nothing is held.
            ValueError: it is not connected yet.
            ClosedError, DisconnectedError, ...: as of `require_usable`.
        """
        is_short = work.opcode in _SHORT and work.address is None
        with self._slot(slot) as taken:
            request = self._request(work)
            if is_short:
                self._enter(request)
            taken.hand_over()
        if is_short:
            self._post_short(work, request)
        else:
            self.post_prepared([work], [request], signal_last_only=False)
        return request

    def _slot(self, slot: Slot | None = None) -> Slot:
        self._owner.require_sendable()
        if slot is not None:
            return slot
        if not self.slots.try_take():
            raise QueueFullError(
                f"{self.slots.total} requests are in flight: await one first, or use the "
                "coroutine of the same name, which waits"
            )
        return Slot(self.slots)

    def _request(self, work: SendWork) -> WorkRequest:
        request = WorkRequest(self._owner, work.operation, work.length, work.held, work.remote)
        request._completes_as = _COMPLETES_AS.get(work.opcode, WorkCompletionOpcode.SEND)
        return request

    def _post_short(self, work: SendWork, request: WorkRequest) -> None:
        """Post what has few fields, by the call that takes few arguments."""
        assert self._owner.queue_pair is not None
        remote = work.remote
        try:
            self._owner.queue_pair._post_send_raw(
                request.wr_id,
                work.opcode,
                int(work.flags) | _SIGNALED,
                work.sges,
                work.count,
                0 if remote is None else remote.address,
                0 if remote is None else remote.rkey,
                work.immediate,
            )
        except RdmaError as error:
            if isinstance(error, VerbsCallError) and error.was_taken:
                # The device may still execute it: only the end of the queue pair decides that.
                self._owner.fail(error)
                return
            self._take_back(request)
            raise
        self._owner.hub.watch_over()

    def prepare(self, work: SendWork) -> WorkRequest:
        """Make a request that takes its slot and holds its memory, to be posted by
        `post_prepared`, or ended by `fail` on it.

        Raises:
            QueueFullError: no slot is free.
        """
        with self._slot() as slot:
            request = self._request(work)
            # So that it ends with the queue pair, if it is never posted.
            self._owner.requests.add(request)
            slot.hand_over()
        return request

    def post_prepared(
        self, works: Sequence[SendWork], requests: list[WorkRequest], *, signal_last_only: bool
    ) -> None:
        """Post prepared requests as one chain; those that are refused end with the error, and give
        their slots back.

        Args:
            works: in order.
            requests: theirs.
            signal_last_only: only the last one is signaled: its completion ends those before it.
                Their slots are counted until then.

        Raises:
            PartialPostError: the device refused one of several; the error names it and has those
                before it, which are posted.
            VerbsCallError: it refused the first.
        """
        flags = [int(work.flags) | _SIGNALED for work in works]
        if signal_last_only:
            flags[:-1] = [value & ~_SIGNALED for value in flags[:-1]]
        for request in requests:
            self._enter(request)
            if signal_last_only:
                request._set_run(requests)
        assert self._owner.queue_pair is not None
        try:
            error, posted = self._owner.queue_pair.post_send_chain(
                works, [request.wr_id for request in requests], flags
            )
        except RdmaError as refused:  # something of them was closed: nothing was posted
            self._not_posted(requests, refused)
            raise
        self._owner.hub.watch_over()
        self._chain_posted(error, posted, requests, signal_last_only)

    def post_collected(
        self, port: ChainPort, works: Sequence[SendWork], *, signal_last_only: bool
    ) -> None:
        """`post_prepared`, of a chain some of whose requests its port has made. `works` are those
        of the others."""
        if not works:
            error = port.post(signal_last_only)
        else:
            try:
                raw = pack_chain(works, [0] * len(works), [int(work.flags) for work in works])
            except RdmaError as refused:  # something of them was closed: nothing was posted
                self._not_posted(port.requests(), refused)
                raise
            sges = b"".join([work.sges for work in works])
            error = port.post(signal_last_only, int(ffi.cast("uintptr_t", raw)), sges)
        if error:
            self._chain_posted(error, port.posted, port.requests(), signal_last_only)

    def _chain_posted(
        self, error: int, posted: int, requests: list[WorkRequest], signal_last_only: bool
    ) -> None:
        if error < 0:
            hint = "the device could not be told"
            self._owner.fail(VerbsCallError(-error, "ibv_post_send", hint))
            return
        if not error:
            return
        refused = requests[posted]
        hint = f"{refused.operation} of {refused.length} bytes"
        failure = VerbsCallError(error, "ibv_post_send", hint)
        if posted:
            failure = PartialPostError(error, "ibv_post_send", hint, requests[:posted])
        self._not_posted(requests[posted:], failure)
        if posted and signal_last_only:
            # The one that would have told of their end was not taken: nobody would hear of them
            # before the end of the queue pair.
            self._owner.fail(failure)
        raise failure

    def _not_posted(self, requests: Sequence[WorkRequest], cause: Exception) -> None:
        for request in requests:
            self._owner.hub.in_flight.take(request.wr_id)
        try:
            fail_all(requests, lambda _: detached(cause))
        finally:
            for request in requests:
                request.exception()  # retrieved: the cause is raised

    def bind(
        self,
        window: MemoryWindow,
        memory: MemorySlice,
        access: int,
        flags: int,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Bind a window of type 1; to no bytes unbinds it. Its rkey is another one at once. `slot`
        and errors are as of `submit`."""
        with self._slot(slot) as taken:
            request = WorkRequest(self._owner, "BIND_MW", memory.length, (memory,))
            self._enter(request)
            taken.hand_over()
        pair = self._owner.queue_pair
        assert pair is not None
        try:
            pair.bind_window(request.wr_id, window, memory, access, flags | _SIGNALED)
        except RdmaError:
            self._take_back(request)
            raise
        self._owner.hub.watch_over()
        return request


class ReceiveQueue(WorkQueue):
    """The receive queue; nothing is posted on it where receives are shared."""

    def submit(self, sges: bytes, count: int, length: int, held: Sequence[Holdable]) -> WorkRequest:
        """Post a receive; the queue pair need not be connected. Raises as `SendQueue.submit`."""
        self._owner.require_usable()
        if not self.slots.try_take():
            raise QueueFullError(f"{self.slots.total} receives are posted: await one first")
        with Slot(self.slots) as slot:
            request = WorkRequest(self._owner, "RECV", length, held, is_receive=True)
            self._enter(request)
            slot.hand_over()
        assert self._owner.queue_pair is not None
        try:
            self._owner.queue_pair._post_recv_raw(request.wr_id, sges, count)
        except RdmaError:
            self._take_back(request)
            raise
        self._owner.hub.watch_over()
        return request
