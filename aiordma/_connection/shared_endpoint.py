"""What a shared receive queue posts, what arrives in it, its limit and its depth.

The queue reserves its depth in one completion queue, where the receives of all its members
complete: no sequence of posts overruns it.
"""

import errno
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from aiordma._base.arguments import Buffer
from aiordma._base.enums import AsyncEventType
from aiordma._base.errors import (
    BusyError,
    NotSupportedError,
    PartialPostError,
    QueueFullError,
    RdmaError,
    VerbsCallError,
    WorkCompletionError,
    completion_error,
)
from aiordma._base.process import here
from aiordma._connection.connection import Connection
from aiordma._connection.messages import MessageQueue
from aiordma._connection.shared_life import SharedReceiveLife
from aiordma._connection.shared_settings import SharedReceiveSettings
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.staging import Staged, Staging
from aiordma._loop.event_loop import Waiter
from aiordma._loop.threads import outwait
from aiordma._requests.pool import Lease
from aiordma._requests.request import WorkRequest
from aiordma._runtime.hub import DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import Capacity, MemoryRegion, WorkCompletion
from aiordma.verbs.identifier import Identifier

__all__ = ("SharedReceiveEndpoint",)

logger: logging.Logger = logging.getLogger("aiordma")

_QP_NUM = WorkCompletion._fields.index("qp_num")

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP)


class _Member:
    """A connection that takes its receives from here."""

    def __init__(self, endpoint: Endpoint, messages: MessageQueue, connection: Connection) -> None:
        self.endpoint = endpoint
        self.messages = messages
        self.connection = weakref.ref(connection)  # one that is forgotten has to be found


class SharedReceiveEndpoint(SharedReceiveLife):
    """See the module. `SharedReceiveQueue` is what the program has of it; Connections and the
    engine use this."""

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        settings: SharedReceiveSettings,
        identifier: Identifier | None = None,
    ) -> None:
        super().__init__(reactor, hub, settings, identifier)
        self.buffers: int = settings.buffers
        """How many it posts by itself; 0: none."""
        self.buffer_size: int = settings.buffer_size
        """Bytes of each of these: the longest message that the peers may send."""
        self.capacity: Capacity = Capacity(max_recv_sge=self.max_sge)
        self._staging = Staging(self)
        self._leases: dict[int, Lease] = {}
        self._by_number: dict[int, _Member] = {}
        self._limit: tuple[int, Waiter] | None = None
        self._resizing = False

    async def open(self) -> None:
        """Make it, and post what it posts by itself; for `open_shared_receive` and listeners."""
        await super().open()
        if self.buffers:
            size = self.buffer_size
            self._post_leases([self.hub.pool.lease(size) for _ in range(self.buffers)])

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
            self.fail(VerbsCallError(error, "ibv_post_srq_recv", "the device could not be told"))
            return posted
        hint = f"receive {len(posted)} of {len(given)} on {self!r}"
        raise PartialPostError(error, "ibv_post_srq_recv", hint, posted)

    # -- completions (RequestOwner) -----------------------------------------------------------

    def connection_of(self, completion: WorkCompletion) -> Connection | None:
        """See `SharedReceiveQueue.connection_of`."""
        member = self._by_number.get(completion.qp_num)
        return None if member is None else member.connection()

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """A receive that fails ends the connection that took it, and no other."""
        member = self._by_number.get(raw[_QP_NUM])
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
        member = self._by_number.get(qpn)
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
            member = self._by_number.get(completion.qp_num)
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

    def serve(self, endpoint: Endpoint, messages: MessageQueue, connection: Connection) -> None:
        """Deliver what the endpoint's queue pair takes; before its handshake."""
        if endpoint.qpn in self._by_number:
            # The number of a queue pair that is gone: what that one took is in the queue.
            self.hub.drain()
        self._by_number[endpoint.qpn] = _Member(endpoint, messages, connection)
        self._hear_of_last(endpoint)
        endpoint.life.on_close.append(lambda: self._forget(endpoint))

    def _forget(self, endpoint: Endpoint) -> None:
        member = self._by_number.get(endpoint.qpn)
        if member is not None and member.endpoint is endpoint:
            del self._by_number[endpoint.qpn]

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
            await self._call(lambda: self.raw.modify(limit=count))
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
            await self._call(lambda: self.raw.modify(limit=0))
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
        super()._device_event(event)
        if event is AsyncEventType.SRQ_LIMIT_REACHED and self._limit is not None:
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
            await self._call(change)
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

    def _end(self, cause: Exception) -> None:
        super()._end(cause)
        self._look_at_limit()  # whoever waits for it hears of the end
