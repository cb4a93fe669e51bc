"""A shared receive queue's life: who takes from it, and its end.

It ends for one cause: you closed it, the device went, or the device refused what it posts by
itself. Only once its last member's queue pair is gone is it destroyed, and only then does the
memory of what is still posted come back.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack

from aiordma._base.enums import AsyncEventType, CmEventType, WorkCompletionStatus
from aiordma._base.errors import (
    BusyError,
    ClosedError,
    DeviceEventError,
    DeviceRemovedError,
    FlushedError,
    detached,
)
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._base.origin import with_origin
from aiordma._base.process import here, require_same_process
from aiordma._connection.shared_settings import SharedReceiveSettings
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.lifecycle import Lifecycle, Phase
from aiordma._loop.event_loop import EventLoop, Timer, require_here
from aiordma._loop.threads import in_thread, outwait
from aiordma._native import Slots
from aiordma._requests.request import OpenRequests, WorkRequest, fail_all
from aiordma._requests.select import SharedPort
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma.verbs import MemoryRegion, RawSharedReceiveQueue
from aiordma.verbs.identifier import Event, Identifier

__all__ = ("SharedReceiveLife",)

logger: logging.Logger = logging.getLogger("aiordma")

LAST_SECONDS = 0.2
"""How long a device may take to tell that a queue pair has completed the last receive it took.
Some never do: the first that does not is the last that is waited for."""

_FLUSH = int(WorkCompletionStatus.WR_FLUSH_ERR)


class _AtLoopEnd:
    """What the reactor closes where the loop ends before the queue is closed."""

    def __init__(self, shared: "SharedReceiveLife") -> None:
        self._shared = shared

    def __repr__(self) -> str:
        return repr(self._shared)

    def left_open(self) -> str:
        shared = self._shared
        return "" if shared.is_closing else with_origin(shared, shared.life.origin)

    @deferring
    def close(self) -> None:
        self._shared.close_when_unused()  # its members are being closed as well

    @deferring_steps
    async def aclose(self) -> None:
        self.close()


class _Stay:
    """A member's queue pair, until it is gone."""

    def __init__(self) -> None:
        self.last_told = False
        self.timer: Timer | None = None
        self.then: Callable[[], None] = lambda: None


class SharedReceiveLife:
    """See the module. `open` before use, `close` or `close_when_unused` always.

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
        self._members: dict[Endpoint, _Stay] = {}
        self._tells_last: bool | None = None
        self._made = False
        self._reserved = 0
        self._calls = 0
        self._retiring = False
        if identifier is not None:
            reactor.subscribe(identifier, self._handle, _AtLoopEnd(self))

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
        if self.cause is not None or self._settings.buffers:
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
        """Make it. Whether it fails or not, `close` gives everything back.

        Raises:
            ValueError: beyond the device; the message names the argument and the limit.
            VerbsCallError: the driver refused.
        """
        self._settings.check(self.hub)
        settings = self._settings
        self.queue = await self.hub.reserve(self.depth, settings.comp_vector, settings.cqe)
        self._reserved = self.depth
        self.hub.on_failure.add(self.fail)
        await self._call(self._create)
        self._open_port()
        self.hub.on_object_event[self.raw.key] = self._device_event

    def _create(self) -> None:
        port = 1 if self._identifier is None else self._identifier.port
        self.max_message = self.hub.context.query_port(port).max_msg_sz
        self.raw = RawSharedReceiveQueue(self.hub.domain, self.depth, self.max_sge)
        self._made = True

    async def _call(self, function: Callable[[], None]) -> None:
        """Run a call into the driver in a thread, to its end; nothing is destroyed under it."""
        self._calls += 1
        try:
            await in_thread(self.loop, function)
        finally:
            self._calls -= 1
            self._destroy_if_due()

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
        self._members[member] = _Stay()

    @deferring
    def leave(self, member: Endpoint) -> None:
        """Count no more a queue pair that is gone."""
        self._members.pop(member, None)
        if self._retiring and not self._members:
            self.close()
        self._destroy_if_due()

    def _hear_of_last(self, member: Endpoint) -> None:
        """Be told as its queue pair, failed, completes the last receive that it took."""

        def told(event: AsyncEventType) -> None:
            if event is AsyncEventType.QP_LAST_WQE_REACHED:
                self._tells_last = True
                self._last_is_over(member)

        assert member.queue_pair is not None
        self.hub.on_object_event[member.queue_pair.key] = told

    def delays(self, member: Endpoint, then: Callable[[], None]) -> bool:
        """Wait for the device to say that the queue pair has completed the last receive that it
        took (IBV_EVENT_QP_LAST_WQE_REACHED). A driver forgets what completes between the last
        drain and the destruction, and its receive would never be heard of (man ibv_create_srq).
        """
        self.hub.drain()
        stay = self._members.get(member)
        if stay is None or stay.last_told or self._tells_last is False:
            return False
        if stay.timer is None:
            stay.then = then
            stay.timer = self.loop.call_later(LAST_SECONDS, lambda: self._not_told(member))
        return True

    def _not_told(self, member: Endpoint) -> None:
        if self._tells_last is None:
            self._tells_last = False
        self._last_is_over(member)

    def _last_is_over(self, member: Endpoint) -> None:
        stay = self._members.get(member)
        if stay is None or stay.last_told:
            return
        stay.last_told = True
        self.hub.drain()  # it completed before it was told
        if stay.timer is not None:
            stay.timer.cancel()
            stay.then()

    def _device_event(self, event: AsyncEventType) -> None:
        if event is AsyncEventType.SRQ_ERR:
            self.fail(DeviceEventError(event, f"a shared receive queue of {self.device_name}"))

    # -- the end ------------------------------------------------------------------------------

    @deferring
    def fail(self, error: Exception) -> None:
        """End, with this error as the cause unless there is one already: members too, since their
        peers would wait for receives for ever."""
        self._end(error)
        for member in list(self._members):
            member.fail(error)

    def _end(self, cause: Exception) -> None:
        if self.cause is None:
            self.life.cause = cause
            if self.port is not None:
                self.port.can_receive = False
        self._destroy_if_due()

    def _destroy_if_due(self) -> None:
        if self.cause is None or self._members or self._calls:
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

    @deferring
    def close_when_unused(self) -> None:
        """`close`, once the last member has ended."""
        self._retiring = True
        if not self._members:
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
        if self._members and not self.life.is_closing:
            raise BusyError(
                f"{len(self._members)} connections take their receives from {self!r}: close them "
                "first"
            )
        if not self.life.closed.is_set() and self._process == here.pid:
            self.reactor.require_here(self, self.close)
        self.close()
        await outwait(self.life.closed)
