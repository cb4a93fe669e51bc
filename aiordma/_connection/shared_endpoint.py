"""A shared receive queue, behind its public class: its posts, arrivals, limit, depth and end.

The queue reserves its depth in one completion queue, where the receives of all its members
complete: no sequence of posts overruns it.

It ends for one cause: you closed it, the device went, or the device refused what it posts by
itself. Only once its last member's queue pair is gone is it destroyed, and only then does the
memory of what is still posted come back.
"""

import errno
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from aiordma._base.arguments import Buffer
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
    RdmaError,
    VerbsCallError,
    WorkCompletionError,
    completion_error,
    detached,
)
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._base.origin import with_origin
from aiordma._base.process import here, require_same_process
from aiordma._connection.connection import Connection
from aiordma._connection.messages import MessageQueue
from aiordma._connection.shared_members import SharedReceiveMembers
from aiordma._connection.shared_settings import SharedReceiveSettings
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.lifecycle import Lifecycle, Phase
from aiordma._endpoint.staging import Staged, Staging
from aiordma._loop.event_loop import EventLoop, Waiter, require_here
from aiordma._loop.threads import Calls, outwait
from aiordma._native import Slots
from aiordma._requests.pool import Lease
from aiordma._requests.request import OpenRequests, WorkRequest, fail_all
from aiordma._requests.select import SharedPort
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import AtLoopEnd, Reactor
from aiordma.verbs import Capacity, MemoryRegion, RawSharedReceiveQueue, WorkCompletion
from aiordma.verbs.identifier import Event, Identifier

__all__ = ("SharedReceiveEndpoint",)

logger: logging.Logger = logging.getLogger("aiordma")

_QP_NUM = WorkCompletion._fields.index("qp_num")

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP)

_FLUSH = int(WorkCompletionStatus.WR_FLUSH_ERR)


class SharedReceiveEndpoint:
    """See the module. `SharedReceiveQueue` is what the program has of it; Connections and the
    engine use this. `open` before use, `close` or `close_when_unused` always.

    Takes over one use of the reactor, and the identifier, and gives both back when it is closed.
    Ending and closing are callbacks, not tasks: no cancellation stops them half way.
    """

    raw: RawSharedReceiveQueue
    queue: CompletionQueueShare
    depth: int
    """Receives that may be posted."""

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        settings: SharedReceiveSettings,
        identifier: Identifier | None = None,
    ) -> None:
        """For `open_shared_receive` and listeners."""
        self.reactor = reactor
        self.hub = hub
        self.loop: EventLoop = hub.loop
        self._process = here.pid
        self.max_sge: int = settings.parts(hub)
        """Parts that one receive may have."""
        self.max_message: int = 0
        self.life: Lifecycle = Lifecycle(self.loop)
        self.unretrieved: Unretrieved = Unretrieved(self.loop)
        self.regions: dict[int, MemoryRegion] = {}
        self._settings = settings
        self._identifier = identifier
        self._open = OpenRequests()
        self._slots = Slots()
        self.port: SharedPort | None = None
        self._set_depth(settings.depth)
        self._members = SharedReceiveMembers(hub)
        self._made = False
        self._reserved = 0
        self._calls = Calls(self.loop)
        self._retiring = False
        self.buffers: int = settings.buffers
        """How many it posts by itself; 0: none."""
        self.buffer_size: int = settings.buffer_size
        """Bytes of each of these: the longest message that the peers may send."""
        self.capacity: Capacity = Capacity(max_recv_sge=self.max_sge)
        self._staging = Staging(self)
        self._leases: dict[int, Lease] = {}
        self._limit: tuple[int, Waiter] | None = None
        self._resizing = False
        if identifier is not None:
            at_end = AtLoopEnd(self._left_open, self.close_when_unused, self._aclose_when_unused)
            reactor.subscribe(identifier, self._handle, at_end)

    def __repr__(self) -> str:
        state = "ended" if self.cause is not None else f"{self.posted} of {self.depth} posted"
        return f"<SharedReceiveQueue on {self.device_name}: {state}>"

    @property
    def cause(self) -> Exception | None:
        """Why it has ended; None while it works."""
        return self.life.cause

    @property
    def device_name(self) -> str:
        """The RDMA device it belongs to."""
        return self.hub.context.device_name

    @property
    def is_closing(self) -> bool:
        """Whether it was closed, or closes with its last member."""
        return self.life.is_closing or self._retiring

    @property
    def posted(self) -> int:
        """Receives that are posted and have not completed."""
        return len(self._open)

    @property
    def members(self) -> int:
        """Connections that take their receives from here and have not ended."""
        return len(self._members)

    def _set_depth(self, depth: int) -> None:
        self.depth = self._slots.total = depth
        self._slots.free = depth - self.posted

    def _open_port(self) -> None:
        if self.cause is not None or self.buffers:
            return
        loop = self.loop.asyncio_loop
        self.port = SharedPort(
            self, self.hub.steps, Slots(), self._slots, self._open, loop, self.hub.domain
        )
        self.port.open_shared(self.raw.key, self.max_message)
        self.port.can_receive = True

    def _hear_of_each_end(self, wanted: bool) -> None:
        # Those that were posted without Python's help end without it, too, unless it asks.
        if self.port is not None:
            self.port.tells = wanted

    async def open(self) -> None:
        """Make it, and post what it posts by itself. Whether this fails or not, `close` gives
        everything back.

        Raises:
            ValueError: beyond the device; the message names the argument and the limit.
            VerbsCallError: the driver refused.
        """
        self._settings.check(self.hub)
        settings = self._settings
        self.queue = await self.hub.reserve(self.depth, settings.comp_vector, settings.cqe)
        self._reserved = self.depth
        self.hub.on_failure.add(self.fail)
        await self._calls.run(self._create)
        self._open_port()
        self.hub.on_object_event[self.raw.key] = self._device_event
        if self.buffers:
            size = self.buffer_size
            self._post_leases([self.hub.pool.lease(size) for _ in range(self.buffers)])

    def _create(self) -> None:
        port = 1 if self._identifier is None else self._identifier.port
        self.max_message = self.hub.context.query_port(port).max_msg_sz
        self.raw = RawSharedReceiveQueue(self.hub.domain, self.depth, self.max_sge)
        self._made = True

    def require_usable(self) -> None:
        """Do nothing while receives may be posted, and connections join.

        Raises:
            ClosedError: it is closed.
            DeviceRemovedError, VerbsCallError: what ended it.
        """
        require_same_process(self._process, repr(self))
        self.require_own_loop()
        if self.cause is not None:
            raise detached(self.cause)
        if not self._made:
            raise ClosedError("this shared receive queue is not open yet")

    def require_own_loop(self) -> None:
        """Do nothing in our own event loop.

        Raises:
            EventLoopError: this is another thread, or another event loop.
        """
        require_here(self.loop, self)
        if self.port is not None:
            self.port.thread = self.loop.thread  # a loop may go on in another thread

    def adopt(self, region: MemoryRegion) -> None:
        """Close the region with this queue, if it is not closed before."""
        self.regions[id(region)] = region
        region._on_close = lambda: self.regions.pop(id(region), None)

    def _handle(self, event: Event) -> None:
        if event.type is CmEventType.DEVICE_REMOVAL:
            self.fail(DeviceRemovedError(f"{self.device_name} was removed"))

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        """Every receive tells of its own end (RequestOwner)."""
        raise NotImplementedError

    # -- posting ------------------------------------------------------------------------------

    def register(self, buffer: Buffer) -> MemoryRegion:
        """Register memory for receives, until it is closed or this queue is."""
        self.require_usable()
        region = MemoryRegion(self.hub.domain, buffer)
        self.adopt(region)
        return region

    def post(self, given: list[Any]) -> list[WorkRequest]:
        """Post receives as one chain, plain or not. See `SharedReceiveQueue.post_srq_recv`."""
        self.require_usable()
        receives = [list(r) if isinstance(r, list | tuple) else [r] for r in given]
        free = self._slots.free
        if len(receives) > free:
            raise QueueFullError(
                f"{len(receives)} receives, and {free} of {self.depth} slots are free: await one"
            )
        staged: list[Staged] = []
        try:
            for parts in receives:
                if len(parts) > self.max_sge:
                    raise ValueError(
                        f"{len(parts)} parts: one receive takes at most {self.max_sge}; ask for "
                        f"more with max_sge= (the device has {self.hub.attributes.max_srq_sge})"
                    )
                where = f"post_srq_recv(): buffers[{len(staged)}]"
                staged.append(self._staging.receive(parts, where))
        except BaseException:
            for prepared in staged:
                self._staging.abandon(prepared)
            raise
        return self._post(staged)

    def _post(self, staged: list[Staged]) -> list[WorkRequest]:
        requests: list[WorkRequest] = []
        try:
            for one in staged:
                requests.append(WorkRequest(self, "RECV", one.length, one.held, is_receive=True))
        except BaseException:
            for request in requests:
                request._drop()
            for one in staged:
                self._staging.abandon(one)
            raise
        for request in requests:
            # Before the device can know of it; only its own refusal takes it out again.
            request.wr_id = self.hub.in_flight.add(request)
            self._open.add(request)
            self._slots.free -= 1
        error, taken = self.raw._post_packed(
            [
                (request.wr_id, one.count, one.sges)
                for request, one in zip(requests, staged, strict=True)
            ]
        )
        for request, one in zip(requests[:taken], staged, strict=False):
            self._staging.posted(one, request)
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
        """Return what was posted, or raise what the device refused."""
        if len(posted) == len(given):
            # The device has all of them, and could not be told: only the queue's end decides it.
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
        """A receive that fails ends the connection that took it, and no other."""
        member = self._members.find(raw[_QP_NUM])
        if member is not None:
            return member.endpoint.request_failed(request, raw)
        return completion_error(raw[1], str(request), vendor_err=raw[3], qp_num=raw[_QP_NUM])

    def request_unretrieved(self, request: WorkRequest) -> None:
        """Report a failed receive whose error nobody retrieved: with those of the connection that
        took it."""
        if self._process != here.pid:
            return
        error = request.exception()
        qpn = error.qp_num if isinstance(error, WorkCompletionError) else 0
        member = self._members.find(qpn)
        (self if member is None else member.endpoint).unretrieved.add(request)

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the slot."""
        self._open.discard(request)
        self._slots.free += 1
        self._look_at_limit()

    # -- pooled receives ----------------------------------------------------------------------

    def _post_leases(self, leases: list[Lease]) -> None:
        staged = [Staged(lease.memory._sge, 1, lease.memory.length) for lease in leases]
        try:
            requests = self._post(staged)
        except RdmaError as error:
            requests = error.posted if isinstance(error, PartialPostError) else []
            for lease in leases[len(requests) :]:
                lease.release()
            # Without them the peers would wait for ever.
            self.fail(error)
        for request, lease in zip(requests, leases, strict=False):
            self._leases[request.wr_id] = lease
            request.add_done_callback(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        lease = self._leases.pop(request.wr_id)
        if request.exception() is None:
            completion = request.result()
            member = self._members.find(completion.qp_num)
            if member is not None:
                member.messages.deliver(lease, completion)
                return
        self.give_back(lease)  # its connection has been closed, or failed with it

    def give_back(self, lease: Lease) -> None:
        """Post a block again whose message has been received, or is nobody's."""
        if self.cause is None:
            self._post_leases([lease])
        else:
            lease.release()

    # -- members ------------------------------------------------------------------------------

    @deferring
    def join(self, member: Endpoint) -> None:
        """Count a queue pair that is about to be made on this queue.

        Raises:
            ValueError: it is on another device, or another event loop.
            ClosedError: this queue is closed.
        """
        self.require_usable()
        if member.hub is not self.hub:
            raise ValueError(
                f"this shared receive queue is on {self.device_name} of its own event loop, and "
                f"the connection on {member.hub.context.device_name}: open one there"
            )
        self._members.add(member)

    @deferring
    def leave(self, member: Endpoint) -> None:
        """Count no more a queue pair that is gone."""
        self._members.discard(member)
        if self._retiring and not len(self._members):
            self.close()
        self._destroy_if_due()

    def delays(self, member: Endpoint, then: Callable[[], None]) -> bool:
        """See `SharedReceiveMembers.delays`."""
        return self._members.delays(member, then)

    def serve(self, endpoint: Endpoint, messages: MessageQueue, connection: Connection) -> None:
        """See `SharedReceiveMembers.serve`."""
        self._members.serve(endpoint, messages, connection)

    # -- the limit and the depth --------------------------------------------------------------

    async def limit(self, count: int) -> None:
        """See `SharedReceiveQueue.limit`, which checks the argument and defers interrupts."""
        self.require_usable()
        if self._limit is not None:
            raise BusyError("another task waits for this queue's limit, and it has only one")
        self.hub.drain()  # what has completed is not left
        if self.posted < count:
            await checkpoint()
            return
        waiter = self.loop.waiter()
        self._limit = count, waiter
        self._hear_of_each_end(True)
        try:
            await self._calls.run(lambda: self.raw.modify(limit=count))
            self._look_at_limit()  # a device need not notice what it took before it was armed
            await waiter.wait()
            self.require_usable()
        finally:
            try:
                await self._disarm()
            finally:
                self._limit = None
                self._hear_of_each_end(False)

    async def _disarm(self) -> None:
        if self.cause is not None:
            return
        try:
            await self._calls.run(lambda: self.raw.modify(limit=0))
        except VerbsCallError as error:
            logger.debug("disarming the limit: %s", error)
        # An event that it had caused is on its way here, and must not be taken for the next one's.
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
        """See `SharedReceiveQueue.resize`, which checks the argument and defers interrupts."""
        self.require_usable()
        if self._resizing:
            raise BusyError("another task is resizing this queue")
        most, before = self.hub.attributes.max_srq_wr, self.depth
        if not max(1, self.posted) <= depth <= most:
            raise ValueError(
                f"depth={depth} is not in {max(1, self.posted)}..{most}: {self.posted} are "
                f"posted, and {self.device_name} has {most}"
            )
        if depth > before:
            self.hub.reserve_more(self.queue, depth - before)
            self._reserved = depth
        else:
            self._set_depth(depth)  # from now on: nothing may be posted beyond it meanwhile
        done: list[int] = []

        def change() -> None:
            self.raw.modify(max_wr=depth)
            done.append(depth)

        self._resizing = True
        try:
            await self._calls.run(change)
        except VerbsCallError as error:
            if error.errno in _CANNOT:
                raise NotSupportedError(
                    f"{self.device_name} cannot resize a shared receive queue"
                ) from error
            raise
        finally:
            # Also if the caller was cancelled meanwhile.
            self._resizing = False
            self._set_depth(depth if done else before)
            self.hub.free(self.queue, self._reserved - self.depth)
            self._reserved = self.depth

    # -- the end ------------------------------------------------------------------------------

    @deferring
    def fail(self, error: Exception) -> None:
        """End, with this error as the cause unless there is one already: members too, since their
        peers would wait for receives for ever."""
        self._end(error)
        for member in self._members:
            member.fail(error)

    def _end(self, cause: Exception) -> None:
        if self.cause is None:
            self.life.cause = cause
            if self.port is not None:
                self.port.can_receive = False
        self._destroy_if_due()
        self._look_at_limit()  # whoever waits for it hears of the end

    def _destroy_if_due(self) -> None:
        if self.cause is None or len(self._members) or self._calls.delays(self._destroy_if_due):
            return
        if not self.life.advance(Phase.FLUSHING):
            return
        if self._made:
            # Not now: this can be the program's code in the middle of a post.
            self.loop.call_later(0, self._destroy)
        else:
            self._finish()

    def _destroy(self) -> None:
        if self.life.advance(Phase.DESTROYING):
            self.reactor.destroy(self.raw.close, self._finish)

    def _finish(self) -> None:
        """The queue is gone: nothing touches memory any more, and nothing more completes."""
        # All of it, whatever a callback of the program's raises.
        with ExitStack() as last_first:
            last_first.callback(self._is_over)
            if self._reserved:
                last_first.callback(self.hub.free, self.queue, self._reserved)
            if self._made:
                last_first.callback(self.hub.on_object_event.pop, self.raw.key, None)
            last_first.callback(self.hub.on_failure.discard, self.fail)
            last_first.callback(lambda: fail_all(self._open, self._flushed))
            last_first.callback(self.hub.drain_all)

    def _flushed(self, request: WorkRequest) -> Exception:
        self.hub.in_flight.take(request.wr_id)
        error = FlushedError(_FLUSH, str(request))
        error.__cause__ = self.cause
        return error

    def _is_over(self) -> None:
        self.life.advance(Phase.ENDED)
        self.life.ended.set()
        self.unretrieved.end(f"a shared receive queue of {self.device_name}", self.cause)
        if self.life.is_closing:
            self._give_back()

    def _left_open(self) -> str:
        return "" if self.is_closing else with_origin(self, self.life.origin)

    async def _aclose_when_unused(self) -> None:
        self.close_when_unused()  # at the loop's end, its members are being closed as well

    @deferring
    def close_when_unused(self) -> None:
        """`close`, once the last member has ended."""
        self._retiring = True
        if not len(self._members):
            self.close()

    @deferring
    def close(self) -> None:
        """End, and then give back everything, in the background. Idempotent."""
        if self.life.is_closing:
            return
        self.life.is_closing = True
        if self._process != here.pid:
            self.life.closed.set()  # all of it is the parent's
            return
        self._end(ClosedError("this shared receive queue was closed"))
        if self.loop.has_ended and self.life.phase >= Phase.FLUSHING and self._made:
            self._destroy()  # no round of the loop comes any more
        if self.life.has_ended:
            self._give_back()

    def _give_back(self) -> None:
        if not self.life.advance(Phase.CLOSED):
            return
        identifier, regions = self._identifier, list(self.regions.values())
        if identifier is not None:
            self.reactor.unsubscribe(identifier)
        self.regions = {}
        destroy_unused = self.hub.take_unused()

        def close() -> None:
            with ExitStack() as last_first:
                last_first.callback(destroy_unused)
                if identifier is not None:
                    last_first.callback(identifier.close)
                for region in regions:
                    last_first.callback(region._retire)

        self.reactor.destroy(close, lambda: self.reactor.release(self.life.closed.set))

    @deferring_steps
    async def aclose(self) -> None:
        """Destroy the queue, and wait for that. Idempotent. See `SharedReceiveQueue.aclose`."""
        if len(self._members) and not self.life.is_closing:
            raise BusyError(
                f"{len(self._members)} connections take their receives from {self!r}: close them "
                "first"
            )
        if not self.life.closed.is_set() and self._process == here.pid:
            self.reactor.require_here(self, self.close)
        self.close()
        await outwait(self.life.closed)
