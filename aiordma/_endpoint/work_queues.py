"""The work of a queue pair: its two queues, the requests that have not completed, and the port that
posts in C.

A request first takes a slot of its queue, is entered into the in-flight table, and is then posted.
When it completes, `Work.ended` gives the slot back.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from aiordma._base.enums import SendFlag
from aiordma._base.errors import (
    NotPostedError,
    PartialPostError,
    QueueFullError,
    RdmaError,
    VerbsCallError,
    detached,
)
from aiordma._base.options import ConnectionOptions
from aiordma._base.statistics import RequestCounters
from aiordma._endpoint.pair import Pair
from aiordma._endpoint.staging import Staged
from aiordma._native import ChainPort, OpenRequests, Port, ffi
from aiordma._requests.credits import Credits, Slot
from aiordma._requests.request import Holdable, RequestOwner, WorkRequest, fail_all
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import DeviceHub
from aiordma.verbs import MemoryWindow, ProtectionDomain, QueuePair, SendWork
from aiordma.verbs.memory import MemorySlice
from aiordma.verbs.send_work import pack_chain

logger: logging.Logger = logging.getLogger("aiordma")

LONG_WAIT = 5.0
"""Seconds after which a message that waits is worth a warning."""
_SIGNALED = int(SendFlag.SIGNALED)


class QueueOwner(RequestOwner, Protocol):
    """The endpoint that has the two queues."""

    hub: DeviceHub
    pair: Pair

    @property
    def name(self) -> str:
        """Its name in messages, with the peer's address."""

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields of log records."""

    def require_usable(self) -> None:
        """Check that requests may be posted."""

    def require_sendable(self) -> None:
        """Check that requests may be posted on the send queue: usable, and connected."""

    def fail(self, error: Exception) -> None:
        """End the endpoint with this error as the cause."""


class WorkQueue:
    """One of a queue pair's two queues.

    Args:
        owner: the endpoint.
        requests: those of the endpoint that have not completed.
        depth: the largest number of requests in flight.
    """

    def __init__(self, owner: QueueOwner, requests: OpenRequests, depth: int) -> None:
        self._owner = owner
        self._requests = requests
        self.slots: Credits = Credits(owner.loop, depth)

    @property
    def is_in_use(self) -> bool:
        """Whether a request has a slot, or a coroutine that is about to post one."""
        return self.slots.free < self.slots.total

    def _enter(self, request: WorkRequest) -> None:
        # Before the post. Only a refusal by the device removes the entry.
        request.wr_id = self._owner.hub.in_flight.add(request)
        self._requests.add(request)

    @contextmanager
    def _entered(self, request: WorkRequest) -> Iterator[QueuePair]:
        """Enter a request, which the block posts. If the device refuses it, undo it."""
        pair = self._owner.pair.raw
        assert pair is not None
        try:
            self._enter(request)
            self._owner.hub.watch_over()  # now: nothing may fail behind the post
            yield pair
        except BaseException:
            self._requests.discard(request)
            self._owner.hub.in_flight.take(request.wr_id)
            request._drop()
            self.slots.give()
            raise


class SendQueue(WorkQueue):
    """The send queue: messages, one-sided operations and windows, in single posts or chains."""

    _watched: tuple[int, float] = 0, 0.0
    """The oldest message, and since when it is known to be."""
    _has_warned = False

    def watch(self, now: float) -> None:
        """Warn, once, of a message that waits for long. The hub calls this from time to time."""
        oldest, (known, since) = self._requests.oldest_message, self._watched
        if oldest != known:
            self._watched = oldest, now
        elif oldest and not self._has_warned and now - since >= LONG_WAIT:
            self._has_warned = True
            logger.warning(
                "%s: a message waits for more than %d s: the peer posts no receive for it, because "
                "its program does not receive (docs/back-pressure.md), or its device does not "
                "answer",
                self._owner.name,
                now - since,
                extra=self._owner.log_fields,
            )

    def submit(
        self, work: SendWork, staged: Staged | None = None, slot: Slot | None = None
    ) -> WorkRequest:
        """Post a request on the send queue.

        Args:
            work: the request, with its memory.
            staged: the prepared buffers, which must exist until this returns.
            slot: a slot of `Credits.take`; None: take one, if one is free.

        Raises:
            QueueFullError: no slot is free.
            VerbsCallError: the device refused the request. Nothing was posted, nothing is held.
            ValueError: the endpoint is not connected yet.
            ClosedError, DisconnectedError, ...: as in `require_usable`.
        """
        with Slot() if slot is None else slot as taken:
            self._take(taken)
            request = self._request(work)
            taken.hand_over()
        pair = self._owner.pair.raw
        assert pair is not None
        try:
            self._enter(request)
            self._owner.hub.watch_over()  # now: nothing may fail behind the post
            flags = int(work.flags) | _SIGNALED
            error, posted = pair.post_send_chain([work], [request.wr_id], [flags])
        except BaseException as refused:
            self._not_posted([request], refused)
            raise
        self.chain_posted(error, posted, [request], False)
        return request

    def _take(self, slot: Slot, chain: ChainPort | None = None) -> None:
        """Check that requests may be posted, and take a slot, unless this one is taken."""
        self._owner.require_sendable()
        if slot.is_taken or self.slots.take_into(slot):
            return
        if chain is None:
            raise QueueFullError(
                f"{self.slots.total} requests are in flight: await one first, or use the "
                "coroutine of the same name, which waits"
            )
        raise QueueFullError(
            f"the send queue's {self.slots.total} slots (max_send_wr) are taken, {chain.count} of "
            "them by this chain, whose requests are not posted before its block ends: move many "
            "WRITEs or READs with write_blocks or read_blocks; or end the block, await its last "
            "request, and go on in another chain; or connect with a larger max_send_wr"
        )

    def _request(self, work: SendWork) -> WorkRequest:
        # From now on it holds its memory: what fails has to drop it.
        request = WorkRequest(self._owner, work.operation, work.length, work.held, work.remote)
        request._opcode = work.opcode
        return request

    def prepare(self, work: SendWork, chain: ChainPort) -> WorkRequest:
        """Create a request of a chain, which has a slot and holds its memory. Post it with
        `post_collected`, or fail it.

        Raises:
            QueueFullError: no slot is free.
        """
        with Slot() as slot:
            self._take(slot, chain)
            request = self._request(work)
            # If the request is never posted, the end of the queue pair ends it.
            self._requests.add(request)
            slot.hand_over()
        return request

    def post_collected(
        self,
        port: ChainPort,
        works: Sequence[SendWork],
        requests: list[WorkRequest],
        *,
        signal_last_only: bool,
    ) -> None:
        """Post a chain, whose port has created its plain requests. Refused requests fail with the
        error, and give their slots back.

        Args:
            port: the chain's.
            works: the operations of the requests that are not plain.
            requests: all of the chain's.
            signal_last_only: only the last request is signaled. Its completion completes the
                earlier ones, which keep their slots until then.

        Raises:
            PartialPostError: the device refused a request after the first. The error names it, and
                has the earlier requests, which are posted.
            VerbsCallError: the device refused the first request.
        """
        try:
            if not works:
                error = port.post()
            else:
                raw = pack_chain(works, [0] * len(works), [int(work.flags) for work in works])
                sges = b"".join([work.sges for work in works])
                error = port.post(int(ffi.cast("uintptr_t", raw)), sges)
        except BaseException as refused:
            if not port.posted:  # else a callback of an earlier request has raised
                self._not_posted(requests, refused)
            raise
        if error:
            self.chain_posted(error, port.posted, requests, signal_last_only)

    def chain_posted(
        self, error: int, posted: int, requests: list[WorkRequest], signal_last_only: bool
    ) -> None:
        """Handle the result of a chain's post. Arguments as of `post_collected` and `ChainPort`; 0
        is no error. Raises the errors of `post_collected`."""
        if not error:
            return
        if error < 0:
            hint = f"the device was not notified (doorbell), {self._owner.name}"
            self._owner.fail(VerbsCallError(-error, "ibv_post_send", hint))
            return
        refused = requests[posted]
        hint = f"{refused.operation} of {refused.length} bytes, {self._owner.name}"
        failure = VerbsCallError(error, "ibv_post_send", hint)
        if posted:
            failure = PartialPostError(error, "ibv_post_send", hint, requests[:posted])
        try:
            self._not_posted(requests[posted:], failure)
            if posted and signal_last_only:
                # The device did not accept the signaled request, so the posted ones would complete
                # only at the end of the queue pair.
                self._owner.fail(failure)
            raise failure
        finally:
            del failure  # its traceback holds this frame, and so the callers' buffers

    def _not_posted(self, requests: Sequence[WorkRequest], cause: BaseException) -> None:
        reason = _reason(cause)
        for request in requests:
            self._owner.hub.in_flight.take(request.wr_id)
            request.wr_id = 0
        fail_all(requests, lambda _: detached(reason))
        for request in requests:
            request.exception()  # counts as retrieved, because the cause is raised

    def bind(
        self,
        window: MemoryWindow,
        memory: MemorySlice,
        access: int,
        flags: int,
        slot: Slot | None = None,
    ) -> WorkRequest:
        """Bind a window of type 1, or unbind it by binding zero bytes. Its rkey changes at once.
        `slot` and errors are as in `submit`."""
        with Slot() if slot is None else slot as taken:
            self._take(taken)
            request = WorkRequest(self._owner, "BIND_MW", memory.length, (memory,))
            taken.hand_over()
        with self._entered(request) as pair:
            pair.bind_window(request.wr_id, window, memory, access, flags | _SIGNALED)
        return request


class ReceiveQueue(WorkQueue):
    """The receive queue. With a shared receive queue, nothing is posted on it."""

    def submit(self, sges: bytes, count: int, length: int, held: Sequence[Holdable]) -> WorkRequest:
        """Post a receive. The queue pair need not be connected. Raises the errors of
        `SendQueue.submit`."""
        self._owner.require_usable()
        with Slot() as slot:
            if not self.slots.take_into(slot):
                raise QueueFullError(f"{self.slots.total} receives are posted: await one first")
            request = WorkRequest(self._owner, "RECV", length, held, is_receive=True)
            slot.hand_over()
        with self._entered(request) as pair:
            pair._post_recv_raw(request.wr_id, sges, count)
        return request


class Work:
    """See the module.

    Args:
        owner: the endpoint.
        options: the depths of the queues.
        domain: the protection domain of the queue pair.
    """

    __slots__ = (
        "failed_sends",
        "has_ended",
        "port",
        "receives",
        "requests",
        "sends",
        "unretrieved",
    )

    def __init__(
        self, owner: QueueOwner, options: ConnectionOptions, domain: ProtectionDomain
    ) -> None:
        self.requests: OpenRequests = OpenRequests()
        """The requests that have not completed."""
        self.sends: SendQueue = SendQueue(owner, self.requests, options.max_send_wr)
        self.receives: ReceiveQueue = ReceiveQueue(owner, self.requests, options.receive_queue)
        self.port: Port = Port(
            owner,
            owner.hub.poller,
            self.sends.slots,
            self.receives.slots,
            self.requests,
            owner.loop.asyncio_loop,
            domain,
        )
        self.failed_sends: list[WorkRequest] | None = None
        """If not None: the requests of the send queue that were posted and have failed."""
        self.has_ended: bool = False
        """Whether every request has completed, and none follows."""
        self.unretrieved: list[Unretrieved] = []
        """The report of failed requests whose error was never retrieved, once there is one."""

    def counters(self) -> RequestCounters:
        """Return the counters of the requests."""
        return self.requests.counters(), self.sends.slots.waits + self.receives.slots.waits

    def ended(self, request: WorkRequest) -> None:
        """Take back the slot of a request that has completed."""
        if request in self.requests:
            self.requests.discard(request)
            (self.receives if request.is_receive else self.sends).slots.give()


def _reason(cause: BaseException) -> Exception:
    """Return the error of a request that was not posted for this cause."""
    if isinstance(cause, RdmaError):
        return cause
    reason = NotPostedError(
        f"its chain was not posted, because the post raised {type(cause).__name__}"
    )
    reason.__cause__ = detached(cause)
    return reason
