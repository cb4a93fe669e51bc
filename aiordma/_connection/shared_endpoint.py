"""A shared receive queue, behind its public class: its posts, arrivals, limit, depth and end.

The receives of all members complete in one completion queue, in which the shared receive queue
reserves its depth. So posts cannot overrun the completion queue.

A shared receive queue ends for one cause: you closed it, the device failed or was removed, or the
device refused a receive that the queue posted itself. It is destroyed after the queue pair of its
last member. Only then is the memory of the posted receives released.
"""

import errno
import logging
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from aiordma._base.arguments import Buffer
from aiordma._base.call_all import call_all
from aiordma._base.calls import UNSUPPORTED
from aiordma._base.enums import AsyncEventType, CmEventType, WorkCompletionStatus
from aiordma._base.errors import (
    BusyError,
    ClosedError,
    DeviceEventError,
    DeviceRemovedError,
    FlushedError,
    NotSupportedError,
    PartialPostError,
    QueueFullError,
    VerbsCallError,
    WorkCompletionError,
    completion_error,
    detached,
)
from aiordma._base.process import require_same_process
from aiordma._base.statistics import RequestCounters
from aiordma._connection.connection import Connection
from aiordma._connection.shared_members import SharedReceiveMembers
from aiordma._connection.shared_settings import SharedReceiveSettings
from aiordma._endpoint.arrivals import chain_length
from aiordma._endpoint.domain_state import DomainState
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.memory import Memory
from aiordma._endpoint.staging import Staged, Staging, register_memory
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._loop.threads import Calls, outwait
from aiordma._native import ArrivalQueue, OpenRequests, PooledReceives, SharedPort, Slots
from aiordma._requests.request import WorkRequest, fail_all
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.teardown import Phase, Teardown
from aiordma.verbs import Capacity, RawSharedReceiveQueue
from aiordma.verbs.completion import WorkCompletion
from aiordma.verbs.identifier import Event, Identifier
from aiordma.verbs.memory import MemoryRegion

logger: logging.Logger = logging.getLogger("aiordma")

_QP_NUM = WorkCompletion._fields.index("qp_num")


_FLUSH = int(WorkCompletionStatus.WR_FLUSH_ERR)


class SharedReceiveEndpoint:
    """See the module. `SharedReceiveQueue` is its public interface; connections and the engine use
    this class. Call `open` before using it, and `close` or `close_when_unused` in every case.

    It owns the identifier, and counts as one user of the reactor, until it is closed. Ending and
    closing run in callbacks, not in tasks, so that no cancellation interrupts them.
    """

    raw: RawSharedReceiveQueue
    queue: CompletionQueueShare
    depth: int
    """The maximum number of posted receives."""

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        settings: SharedReceiveSettings,
        identifier: Identifier | None = None,
        domain: DomainState | None = None,
    ) -> None:
        """`open_shared_receive` and listeners call this."""
        self.reactor = reactor
        self.hub = hub
        self.loop: EventLoop = hub.loop
        self.memory: Memory = Memory(
            hub, domain, self, "shared receive queue", lambda: self.is_closing
        )
        self.max_sge: int = settings.parts(hub)
        """The maximum number of parts of one receive."""
        self.max_message: int = 0
        self.unretrieved: Unretrieved = Unretrieved(self.loop)
        self._settings = settings
        self._identifier = identifier
        self._open = OpenRequests()
        self._slots = Slots()
        self.port: SharedPort | None = None
        self._pooled: PooledReceives | None = None
        self._set_depth(settings.depth)
        self._members = SharedReceiveMembers(hub)
        self._made = False
        self._reserved = 0
        self.calls: Calls = Calls(self.loop, blocks=reactor.blocks)
        self._retiring = False
        self.buffers: int = settings.buffers
        """The number of receives that the queue posts itself; 0: the program posts them."""
        self.buffer_size: int = settings.buffer_size
        """The size of each of these receives, in bytes: the longest message that peers may send."""
        self.capacity: Capacity = Capacity(max_recv_sge=self.max_sge)
        self._staging = Staging(self)
        self._limit: tuple[int, Waiter] | None = None
        self._resizing = False
        hub.counters.add(self)
        self.teardown: Teardown = Teardown(reactor, self, hub)
        if identifier is None:
            self.teardown.is_reported = True  # a listener's own, which the program does not close
        else:
            reactor.subscribe(identifier, self._handle)

    def __repr__(self) -> str:
        state = "ended" if self.cause is not None else f"{self.posted} of {self.depth} posted"
        return f"<SharedReceiveQueue on {self.device_name}: {state}>"

    @property
    def trace_labels(self) -> tuple[str, int, str | None]:
        """The device, and no queue pair or peer, for a trace. In any thread."""
        return self.device_name, 0, None

    def counters(self) -> RequestCounters:
        """Return the counters of its receives."""
        return self._open.counters(), 0

    is_sound = False  # its members' requests may have failed

    @property
    def cause(self) -> Exception | None:
        """Why the queue has ended; None while it works."""
        return self.teardown.cause

    @property
    def device_name(self) -> str:
        """The name of the RDMA device that the queue belongs to."""
        return self.hub.context.device_name

    @property
    def is_closing(self) -> bool:
        """Whether the queue was closed, or will be closed when its last member has ended."""
        return self.teardown.is_closing or self._retiring

    @property
    def name(self) -> str:
        """The queue's name in messages."""
        return f"a shared receive queue of {self.device_name}"

    @property
    def posted(self) -> int:
        """The number of posted receives that have not completed."""
        return len(self._open)

    @property
    def members(self) -> int:
        """The number of connections that use the queue and have not ended."""
        return len(self._members)

    def _set_depth(self, depth: int) -> None:
        self.depth = self._slots.total = depth
        self._slots.free = depth - self.posted

    def _open_port(self) -> None:
        loop = self.loop.asyncio_loop
        self.port = SharedPort(
            self, self.hub.poller, self._slots, self._open, loop, self.memory.domain
        )
        self._pooled = PooledReceives(
            self.port, self.memory.pool, self._refused, self._members.queues
        )
        self.port.open(self.raw.key, self.max_message, self.max_sge)
        self.port.can_receive = self.cause is None

    @property
    def pooled(self) -> PooledReceives:
        """Posts the queue's own receives."""
        assert self._pooled is not None  # it is open
        return self._pooled

    async def open(self) -> None:
        """Create the queue, and post the receives that it posts itself. `close` releases
        everything, also if this fails.

        Raises:
            NotSupportedError: the device has no shared receive queues.
            ValueError: an argument exceeds the device's limit; the message has both.
            VerbsCallError: the driver refused.
        """
        self._settings.check(self.hub)
        settings = self._settings
        needed = self.depth, settings.comp_vector, settings.cqe
        self.queue = self.hub.reserve_at_once(*needed) or await self.hub.reserve(*needed)
        self._reserved = self.depth
        self.hub.on_failure.add(self.fail)
        await self.calls.run(self._create)
        self._open_port()
        self.hub.on_object_event[self.raw.key] = self._device_event
        if self.buffers:
            if self.hub.lets_peers_wait:
                self.pooled.chain = chain_length(self.buffers, 8)
            self.pooled.fill(self.buffers, self.buffer_size)

    def _create(self) -> None:
        port = 1 if self._identifier is None else self._identifier.port
        self.max_message = self.hub.message_limit(port)
        self.raw = RawSharedReceiveQueue(self.memory.domain, self.depth, self.max_sge)
        self._made = True

    def require_usable(self) -> None:
        """Do nothing while receives may be posted and connections may join.

        Raises:
            ClosedError: the queue is closed, or not open yet.
            DeviceRemovedError, DeviceEventError, VerbsCallError: the queue has ended; the error is
                its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.
        """
        require_same_process(self.teardown.process, self)
        self.require_own_loop()
        if self.cause is not None:
            raise detached(self.cause)
        if not self._made:
            raise ClosedError("this shared receive queue is not open yet")

    def require_own_loop(self) -> None:
        """Check that this is the queue's event loop.

        Raises:
            EventLoopError: this is another thread, or another event loop.
        """
        self.hub.require_here(self)

    def _handle(self, event: Event) -> None:
        if event.type is CmEventType.DEVICE_REMOVAL:
            self.fail(DeviceRemovedError(f"{self.device_name} was removed"))

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        """Not used: every receive has a completion of its own (RequestOwner)."""
        raise NotImplementedError

    # -- posting ------------------------------------------------------------------------------

    def register(self, buffer: Buffer) -> MemoryRegion:
        """Register memory for receives, until the region or this queue is closed."""
        self.require_usable()
        region = register_memory(self, buffer)
        self.memory.adopt(region)
        return region

    def post(self, given: list[Any]) -> list[WorkRequest]:
        """Post receives of any kind as one chain. See `SharedReceiveQueue.post_srq_recv`."""
        self.require_usable()
        receives = [list(r) if isinstance(r, list | tuple) else [r] for r in given]
        free = self._slots.free
        if len(receives) > free:
            raise QueueFullError(
                f"{len(receives)} receives, and {free} of {self.depth} slots are free: await one"
            )
        staged: list[Staged] = []
        requests: list[WorkRequest] = []
        try:
            for parts in receives:
                where = f"post_srq_recv(): buffers[{len(staged)}]"
                if len(parts) > self.max_sge:
                    raise ValueError(
                        f"{where}: {len(parts)} parts: one receive takes at most {self.max_sge}; "
                        f"ask for more with max_sge= (the device has "
                        f"{self.hub.attributes.max_srq_sge})"
                    )
                one = self._staging.receive(parts, where)
                staged.append(one)
                requests.append(WorkRequest(self, "RECV", one.length, one.held, is_receive=True))
        except BaseException:
            for request in requests:
                request._drop()
            for one in staged:
                self._staging.abandon(one)
            raise
        for request in requests:
            # Enter each request before the device can complete it. It is removed again only if the
            # device refuses it.
            request.wr_id = self.hub.in_flight.add(request)
            self._open.add(request)
            self._slots.free -= 1
        error, taken = self.raw._post_packed(
            [
                (request.wr_id, one.count, one.sges)
                for request, one in zip(requests, staged, strict=True)
            ]
        )
        for request, one in zip(requests[taken:], staged[taken:], strict=True):
            self._open.discard(request)
            self._slots.free += 1
            self.hub.in_flight.take(request.wr_id)
            request._drop()
            self._staging.abandon(one)
        if taken:
            self.hub.watch_over()
        return self.posted_in_part(error, requests[:taken], staged) if error else requests

    def posted_in_part(
        self, error: int, posted: list[WorkRequest], given: Sequence[object]
    ) -> list[WorkRequest]:
        """Handle an error of a post: raise PartialPostError, or end the queue and return the
        requests if all were posted."""
        if len(posted) == len(given):
            # The driver queued all of them, but could not notify the device. Only the end of the
            # queue then completes them.
            hint = "the device was not notified (doorbell)"
            self.fail(VerbsCallError(error, "ibv_post_srq_recv", hint))
            return posted
        hint = f"receive {len(posted)} of {len(given)} on {self!r}"
        raise PartialPostError(error, "ibv_post_srq_recv", hint, posted)

    # -- completions (RequestOwner) -----------------------------------------------------------

    def connection_of(self, completion: WorkCompletion) -> Connection | None:
        """See `SharedReceiveQueue.connection_of`."""
        member = self._members.find(completion.qp_num)
        return None if member is None else member.connection()

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """Return the error of a failed receive, which ends only the connection that consumed it."""
        member = self._members.find(raw[_QP_NUM])
        if member is not None:
            return member.endpoint.request_failed(request, raw)
        return completion_error(raw[1], str(request), vendor_err=raw[3], qp_num=raw[_QP_NUM])

    def request_unretrieved(self, request: WorkRequest) -> None:
        """Report a failed receive whose error was never retrieved, together with the errors of the
        connection that consumed it."""
        if self.teardown.is_inherited:
            return
        error = request.exception()
        qp_num = error.qp_num if isinstance(error, WorkCompletionError) else 0
        member = self._members.find(qp_num)
        if member is None:
            self.unretrieved.add(request)
        else:
            member.endpoint.request_unretrieved(request)

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the slot of a receive that has completed. Idempotent."""
        if request in self._open:
            self._open.discard(request)
            self._slots.free += 1
        self._look_at_limit()

    # -- pooled receives ----------------------------------------------------------------------

    def _refused(self, error: int) -> None:
        """End the queue, because receives of its own could not be posted: without them, the peers
        would wait for ever."""
        if self.cause is None:
            hint = f"the receives that {self!r} posts itself"
            self.fail(VerbsCallError(error or errno.ENOTCONN, "ibv_post_srq_recv", hint))

    # -- members ------------------------------------------------------------------------------

    def join(self, member: Endpoint) -> None:
        """Add an endpoint before its queue pair is created on this queue.

        Raises:
            ValueError: the endpoint is on another device or event loop, or in another domain.
            ClosedError: this queue is closed.
        """
        self.require_usable()
        if member.hub is not self.hub:
            raise ValueError(
                f"this shared receive queue is on {self.device_name} of its own event loop, and "
                f"the connection on {member.hub.context.device_name}: open one there"
            )
        if member.memory.domain is not self.memory.domain:
            raise ValueError(
                "this shared receive queue belongs to another protection domain than the "
                "connection: open it with open_shared_receive(..., domain=domain)"
            )
        self._members.add(member)

    def leave(self, member: Endpoint) -> None:
        """Remove an endpoint after its queue pair was destroyed."""
        self._members.discard(member)
        if self._retiring and not len(self._members):
            self.teardown.close()
        elif self.teardown.phase is Phase.FLUSHING:
            self.teardown.step(self._flush)

    def keep_for(self, member: Endpoint, error: Exception) -> None:
        """Remove an endpoint that has leaked, for this error: the queue leaks at its end, too."""
        self.teardown.keep_for(error)
        self.leave(member)

    def delays(self, member: Endpoint, then: Callable[[], None]) -> bool:
        """See `SharedReceiveMembers.delays`."""
        return self._members.delays(member, then)

    def serve(self, endpoint: Endpoint, arrivals: ArrivalQueue, connection: Connection) -> None:
        """See `SharedReceiveMembers.serve`."""
        self._members.serve(endpoint, arrivals, connection)

    # -- the limit and the depth --------------------------------------------------------------

    async def limit(self, count: int) -> None:
        """See `SharedReceiveQueue.limit`, which checks the argument."""
        self.require_usable()
        if self._limit is not None:
            raise BusyError("another task waits for this queue's limit, and it has only one")
        self.hub.drain()  # so that `posted` is exact
        if self.posted < count:
            await checkpoint()
            return
        waiter = self.loop.waiter()
        self._limit = count, waiter
        port = self.port
        assert port is not None
        port.notifies_owner = True  # also of the receives that the engine posted
        try:
            await self._modify(limit=count)
            # A device need not report a limit that was reached before it was armed.
            self._look_at_limit()
            await waiter.wait()
            self.require_usable()
        finally:
            try:
                await self._disarm()
            finally:
                self._limit = None
                port.notifies_owner = False

    async def _modify(self, **attributes: int) -> None:
        """Change the queue, in a worker thread where that blocks."""
        await self.calls.run(lambda: self.raw.modify(**attributes))

    async def _disarm(self) -> None:
        if self.cause is not None:
            return
        try:
            await self._modify(limit=0)
        except VerbsCallError as error:
            logger.debug("disarming the limit: %s", error)
        # An event of this limit can be pending. It must not count as an event of the next limit.
        self.hub.poll_async_events()
        settled = anyio.Event()
        self.loop.call_from_thread(settled.set)
        await outwait(settled)

    def _look_at_limit(self) -> None:
        if self._limit is not None and (self.cause is not None or self.posted < self._limit[0]):
            self._limit[1].wake()

    def _device_event(self, event: AsyncEventType) -> None:
        if event is AsyncEventType.SRQ_ERR:
            self.fail(DeviceEventError(event, f"a shared receive queue of {self.device_name}"))
        elif event is AsyncEventType.SRQ_LIMIT_REACHED and self._limit is not None:
            self._limit[1].wake()

    async def resize(self, depth: int) -> None:
        """See `SharedReceiveQueue.resize`, which checks the argument."""
        self.require_usable()
        if self._resizing:
            raise BusyError("another task is resizing this queue")
        most, before = self.hub.attributes.max_srq_wr, self.depth
        least = max(1, self.posted, self.buffers)  # a message's block is posted again later
        if not least <= depth <= most:
            raise ValueError(
                f"resize(): depth={depth} is not in {least}..{most}: {self.posted} are posted, "
                f"buffers is {self.buffers}, and {self.device_name} has {most}"
            )
        if depth > before:
            self.hub.reserve_more(self.queue, depth - before)
            self._reserved = depth
        else:
            self._set_depth(depth)  # already now: no post may exceed it during the call
        done: list[int] = []

        def change() -> None:
            self.raw.modify(max_wr=depth)
            done.append(depth)

        self._resizing = True
        try:
            await self.calls.run(change)
        except VerbsCallError as error:
            if error.errno in UNSUPPORTED:
                raise NotSupportedError(
                    f"{self.device_name} cannot resize a shared receive queue"
                ) from error
            raise
        finally:
            # The device's depth may have changed even if the caller was cancelled.
            self._resizing = False
            self._set_depth(depth if done else before)
            self.hub.free(self.queue, self._reserved - self.depth)
            self._reserved = self.depth

    # -- the end (Owner) ------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the queue with this error as the cause, unless it has one. End its members, too,
        because their peers would wait for receives for ever."""
        self.teardown.end(error)
        for member in self._members:
            member.fail(error)

    def _closing(self) -> Exception:
        return ClosedError("this shared receive queue was closed")

    def _flush(self) -> None:
        """Wait until the members have ended, whose queue pairs use the queue."""
        if self.port is not None:
            self.port.can_receive = False
        self._look_at_limit()  # wakes the task that waits for the limit
        if len(self._members) or self.calls.delays(self._flush):
            return
        if self._made and not self.teardown.is_hurried:
            # Not immediately: this can run in the middle of a post.
            self.teardown.set_timer("destroy", 0, self._begin_destroying)
        else:
            self._begin_destroying()

    def _hurry(self) -> None:
        if self.teardown.has_timer("destroy"):
            self._begin_destroying()

    def _begin_destroying(self) -> None:
        if self._identifier is not None:
            self.reactor.unsubscribe(self._identifier)
        if self._made:
            self.hub.on_object_event.pop(self.raw.key, None)
        self.teardown.destroy()

    def _destroy(self) -> None:
        raw, identifier = self.raw if self._made else None, self._identifier
        call_all([each.close for each in (raw, identifier) if each is not None])

    def _destroyed(self) -> None:
        self.hub.drain_all()
        fail_all(self._open, self._flushed)
        if self._pooled is not None:
            self._pooled.post_unposted()  # releases them
        self.hub.on_failure.discard(self.fail)
        if self._reserved:
            self.hub.free(self.queue, self._reserved)
        self.hub.counters.remove(self)
        self.unretrieved.end(self.name, self.cause)

    def _flushed(self, request: WorkRequest, why: str = "") -> Exception:
        self.hub.in_flight.take(request.wr_id)
        error = FlushedError(_FLUSH, str(request), why=why)
        error.__cause__ = self.cause
        return error

    def _abandon(self, why: str) -> None:
        for request in self._open:
            request._keep_memory()
        fail_all(self._open, lambda request: self._flushed(request, why))
        self.memory.keep_for(self.teardown.refusal)

    def _release(self) -> Callable[[], object] | None:
        return self.memory.release(self.hub)

    def _released(self) -> None:
        self.memory.leave()

    def close_when_unused(self) -> None:
        """Close the queue once the last member has ended, in the background."""
        self._retiring = True
        if not len(self._members):
            self.teardown.close()

    async def aclose(self) -> None:
        """Destroy the queue, and wait for it. Idempotent. See `SharedReceiveQueue.aclose`."""
        if len(self._members) and not self.is_closing:
            raise BusyError(
                f"{len(self._members)} connections take their receives from {self!r}: close them "
                "first"
            )
        await self.teardown.aclose()
