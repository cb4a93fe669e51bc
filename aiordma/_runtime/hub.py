"""One device on one event loop: the completion channel, the shared queues, the in-flight table.

When the channel is readable, one call into C takes the events, acknowledges them, polls and
delivers the completions, arms the queues, and polls once more. The wr_id of a completion finds its
entry.

Queue pairs reserve their depth in a shared completion queue, so that no sequence of posts can
overrun it. If the queue is full, the hub creates another one on the same channel, as large as all
others together: each drain polls every queue. (Resizing is not an option, because siw cannot
resize.) A queue has one completion vector and one size, so queue pairs share it only if their
options `comp_vector` and `cqe` are equal. Queues without reservations are destroyed, except for one
of each vector, of the size that was reserved last. It is kept for the next connection.

The hub stays open until the event loop ends, or until the device has failed and nothing uses it.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import anyio

from aiordma._base.call_all import call_all
from aiordma._base.calls import check_negative_errno
from aiordma._base.enums import AsyncEventType, Transport
from aiordma._base.errors import DeviceEventError, VerbsCallError, detached
from aiordma._base.provider import BUILT_IN, SOFTWARE
from aiordma._base.system import system
from aiordma._loop.event_loop import EventLoop, Timer, require_here
from aiordma._loop.threads import ACCEPTS, in_thread
from aiordma._native import Drain, InFlightTable, ffi
from aiordma._requests.pool import BufferPool
from aiordma._runtime.async_events import Subscription, join_router
from aiordma._runtime.device_statistics import HubCounters
from aiordma._runtime.tracing import start_trace_of_environment
from aiordma.verbs import (
    AsyncEvent,
    CompletionChannel,
    CompletionQueue,
    Context,
    DeviceAttributes,
    ProtectionDomain,
)
from aiordma.verbs.async_event import QUEUE_PAIR_ERRORS

logger: logging.Logger = logging.getLogger("aiordma")

ROUNDS = 16
"""Batches per wake-up before other callbacks run."""
DRAIN_SECONDS = 0.01
"""Seconds after which a wake-up begins no other batch: the completions of a stream's control
messages take so long to handle that peers could delay the loop by sending many."""
QUEUE_ENTRIES = 4096
PRECISE_CAUSE_SECONDS = 0.1
"""Seconds after a queue pair's asynchronous error in which a completion can still give a more
precise cause."""
WATCHDOG_SECONDS = 1.0
WATCHDOG_MOST_SECONDS = 10.0


Failure = VerbsCallError | DeviceEventError
"""The error of a device that completes no more requests."""


class CompletionQueueShare:
    """A shared completion queue, the number of its reserved entries, and the options that it was
    created for: `comp_vector`, and `cqe` (None: the default size)."""

    def __init__(
        self, queue: CompletionQueue, comp_vector: int = 0, cqe: int | None = None
    ) -> None:
        self.queue = queue
        self.size: int = queue.cqe
        self.comp_vector = comp_vector
        self.cqe = cqe
        self.reserved = 0


class PairOwner(Protocol):
    """What has a queue pair on the device."""

    def fail(self, error: Exception) -> None:
        """The device has failed, and completes no more requests."""

    def queue_pair_failed(self, error: DeviceEventError) -> None:
        """The device has reported an error of the queue pair, and no completion is more precise."""

    def watch(self, now: float) -> None:
        """Look after what waits for long: called each 1 to 10 s while requests are in flight."""


class DeviceHub:
    """A device on an event loop. The reactor creates and closes it. `domain` is its protection
    domain.

    The hub owns the context, and closes it if construction fails. Construction and `close` may run
    in any thread, all other methods only on the loop's. `pairs` has the owner of each queue pair,
    by its number, from its creation until before its destruction. `on_failure` has a callback of
    each other user. They are called once, when the device fails and completes no more requests.

    The hub passes the device's asynchronous events on by the number of the queue pair, or by the
    object's address (`key`): a new queue pair can have the address of an event's. The owner hears
    of a queue pair's error with a short delay, unless it has ended for a more precise cause by
    then. The callbacks in `on_object_event` get the type of every other event of an object. Add a
    callback when the object is created, and remove it before the object is destroyed.
    """

    def __init__(self, context: Context, loop: EventLoop, *, blocks: bool = True) -> None:
        self.context = context
        self.blocks = blocks
        """Whether creating and destroying calls block, and so run in worker threads."""
        context._is_left_to_owner = lambda: not loop.is_running
        try:
            self.attributes: DeviceAttributes = context.query()
            self.domain: ProtectionDomain = ProtectionDomain(context)
            self.channel: CompletionChannel = CompletionChannel(context)
            queue = self._make_queue(QUEUE_ENTRIES, 0)
        except BaseException:
            context.close()  # closes its children, too
            raise
        self.is_iwarp: bool = context.transport is Transport.IWARP
        self.keeps_order: bool = not self.is_iwarp or context.device_name == SOFTWARE
        """Whether requests complete in order after a READ. siw does not ensure this."""
        self.lets_peers_wait: bool = self.keeps_order
        """Whether a message that finds no receive waits for one (RNR), on reliable connections. On
        siw, it ends the connection."""
        self.leaves_silence_to_tcp: bool = self.is_iwarp and context.device_name != SOFTWARE
        """Whether only TCP detects a dead peer."""
        self.loop = loop
        self.in_flight: InFlightTable = InFlightTable()
        self.pool: BufferPool = BufferPool(
            self.domain, is_pinned=context.device_name not in BUILT_IN
        )
        self.polled: float = 0.0
        """When an endpoint has polled this last (`Endpoint.poll`), by the monotonic clock."""
        self.max_message: dict[int, int] = {}
        """By port: the length of its longest message. `message_limit` fills it."""
        self.sizes: dict[tuple[int, bool], Any] = {}
        """What queue pairs with the default options need on the device: see `_endpoint.pair`."""
        self.failure: Failure | None = None
        self.on_failure: set[Callable[[Failure], None]] = set()
        self.on_failed: Callable[[DeviceHub], object] = lambda _: None
        """Called once, behind all users."""
        self.pairs: dict[int, PairOwner] = {}
        self.on_object_event: dict[int, Callable[[AsyncEventType], None]] = {}
        self._events: Subscription | None = None
        self._stopped = False
        self._making_queue = anyio.Lock(fast_acquire=True)
        self._queues: list[CompletionQueueShare] = []
        self._last_cqe: dict[int, int | None] = {0: None}
        """By vector: the option `cqe` of the last reservation."""
        self.poller: Drain = Drain(
            self,
            int(ffi.cast("uintptr_t", context.provider.table)),
            int(ffi.cast("uintptr_t", self.channel.pointer)),
            self.in_flight,
        )
        self.counters: HubCounters = HubCounters(context.device_name, self.poller)
        self.counters.add_cache(self.pool.registrations)
        self._watchdog: Timer | None = None
        self._watchdog_delay = WATCHDOG_SECONDS
        self._delivered = 0
        self._arms = True
        self._add(queue, 0, None)

    def start(self) -> None:
        """Watch the channel, and subscribe to the device's events."""
        start_trace_of_environment()
        self.loop.watch(self.channel.fd, self._readable)
        self._events = join_router(self.context, self.loop, self.handle_async_event)
        self.loop.watch(self.context.async_fd, self._async_readable)
        self._arms = not self.loop.poll(self.poller)
        self.drain()  # arms the queue, unless the loop does before it sleeps

    def require_here(self, what: object) -> None:
        """Check that the event loop runs here, and let the engine post for it.

        Raises:
            EventLoopError, ForkError: as `require_here` of the event loop.
        """
        require_here(self.loop, what)
        self.poller.settle()

    def message_limit(self, port: int) -> int:
        """Return the length of the longest message on a port. The driver is asked once."""
        known = self.max_message.get(port)
        if known is None:
            known = self.max_message[port] = self.context.query_port(port).max_msg_sz
        return known

    # -- completion queues --------------------------------------------------------------------

    async def reserve(
        self, entries: int, comp_vector: int = 0, cqe: int | None = None
    ) -> CompletionQueueShare:
        """Reserve entries in a completion queue. Give them back with `free`. Call `reserve_at_once`
        first: those that wait for the lock get it one after the other, in a turn of the loop each.

        Args:
            entries: the largest number of completions at a time.
            comp_vector: the queue's completion vector.
            cqe: the queue's size; None: the default size, or `entries` if that is more.

        Raises:
            ValueError: the device has no such vector, its largest completion queue is smaller, or
                `cqe` is less than `entries`.
            VerbsCallError: a new queue could not be created, or the device has failed.
            DeviceEventError: the device has reported its failure.
        """
        self.check_queue(entries, cqe)
        async with self._making_queue:
            shared = self.reserve_at_once(entries, comp_vector, cqe)
            if shared is None:
                shared = await self._grow(entries, comp_vector, cqe)
            return shared

    def check_queue(self, entries: int, cqe: int | None) -> None:
        """Check that a completion queue can hold so many entries. Arguments and errors as of
        `reserve`."""
        most = self.attributes.max_cqe
        if entries > most:
            raise ValueError(
                f"max_send_wr + max_recv_wr, or depth: {entries} requests can be in flight, and a "
                f"completion queue of {self.context.device_name} holds {most}"
            )
        if cqe is not None and not entries <= cqe <= most:
            raise ValueError(
                f"cqe={cqe} is not in {entries}..{most}: {entries} requests can be in flight, and "
                f"a completion queue of {self.context.device_name} holds {most}"
            )

    def reserve_at_once(
        self, entries: int, comp_vector: int = 0, cqe: int | None = None
    ) -> CompletionQueueShare | None:
        """Reserve entries as `reserve` does, in a completion queue that exists, or return None.

        Raises:
            VerbsCallError, DeviceEventError: the device has failed.
        """
        if self.failure is not None:
            raise detached(self.failure)
        for shared in self._queues:
            is_its_kind = shared.comp_vector == comp_vector and shared.cqe == cqe
            if is_its_kind and shared.reserved + entries <= shared.size:
                shared.reserved += entries
                self._last_cqe[comp_vector] = cqe
                return shared
        return None

    def reserve_more(self, shared: CompletionQueueShare, entries: int) -> None:
        """Reserve more entries in the same completion queue, for `SharedReceiveQueue.resize`.

        Raises:
            ValueError: the queue does not have so many free entries.
        """
        left = shared.size - shared.reserved
        if entries > left:
            raise ValueError(
                f"resize(): depth: {entries} more requests: their completion queue has "
                f"{shared.size} entries, of which {left} are free; connections share it"
            )
        shared.reserved += entries

    async def _grow(self, entries: int, comp_vector: int, cqe: int | None) -> CompletionQueueShare:
        """Create another queue, and reserve entries in it."""
        size = max(self._next_size(), entries) if cqe is None else cqe
        # If the caller is cancelled, the next reservation uses the queue.
        queue = await in_thread(
            self.loop,
            lambda: self._make_queue(size, comp_vector),
            ACCEPTS,  # an accept may wait for it
            blocks=self.blocks,
            on_cancelled=lambda queue: self._add(queue, comp_vector, cqe),
        )
        shared = self._add(queue, comp_vector, cqe)
        shared.reserved = entries  # before `take_unused` can run, in a callback
        self._last_cqe[comp_vector] = cqe
        self.drain()  # arms it
        return shared

    def _next_size(self) -> int:
        """Return the default size of another queue: that of all such queues together. Each drain
        polls every queue, so there must not be one for each few connections."""
        return max(QUEUE_ENTRIES, sum(known.size for known in self._queues if not known.cqe))

    def free(self, shared: CompletionQueueShare, entries: int) -> None:
        """Give reserved entries back. `take_unused` then removes unused queues."""
        shared.reserved -= entries

    def take_unused(self) -> Callable[[], None] | None:
        """Remove the completion queues without reservations, except for one of each vector, and
        shrink the in-flight table.

        Returns:
            A function that destroys these queues, for `Reactor.destroy`; None: there are none.
        """
        if len(self._queues) == 1:
            return None
        kept: set[int] = set()
        unused: list[CompletionQueueShare] = []
        for shared in self._queues:
            vector = shared.comp_vector
            if shared.reserved:
                continue
            if vector not in kept and shared.cqe == self._last_cqe.get(vector):
                kept.add(vector)
            else:
                unused.append(shared)
        if not unused:
            return None
        self._queues = [shared for shared in self._queues if shared not in unused]
        self.poller.set_queues([shared.queue.key for shared in self._queues])
        self.in_flight.shrink()
        return partial(call_all, [shared.queue.close for shared in reversed(unused)])

    def _make_queue(self, entries: int, comp_vector: int) -> CompletionQueue:
        entries = min(entries, self.attributes.max_cqe)
        return CompletionQueue(self.context, entries, self.channel, comp_vector=comp_vector)

    def _add(
        self, queue: CompletionQueue, comp_vector: int, cqe: int | None
    ) -> CompletionQueueShare:
        shared = CompletionQueueShare(queue, comp_vector, cqe)
        self._queues.append(shared)
        self.poller.set_queues([known.queue.key for known in self._queues])
        return shared

    # -- completions --------------------------------------------------------------------------

    def drain_all(self) -> None:
        """Drain as many completions as the queues can hold, before failing requests in flight."""
        self.drain()
        left = sum([shared.size for shared in self._queues]) if self.poller.more else 0
        while self.poller.more and left > 0:
            left -= self.drain() or 1

    def drain(self, *, direct: bool = False) -> int:
        """Deliver all completions, and return their number. Does nothing while a drain is under
        way, for example in a completion's callback.

        Args:
            direct: no task is running, so that woken tasks can run at once.
        """
        if self.poller.draining or self.failure is not None:
            return 0
        total, until = 0, system.now() + DRAIN_SECONDS
        try:
            for _ in range(ROUNDS):
                count = self.poller.step(self._arms, direct)
                if count < 0:
                    check_negative_errno(count, "ibv_poll_cq")
                total += count
                if not self.poller.more or system.now() > until:
                    break
            if self.poller.more:
                self.loop.call_later(0, self._readable)
        except VerbsCallError as error:
            self._fail(error)
        except BaseException:
            # Of a done callback (KeyboardInterrupt), raised after its batch: drain the rest later.
            self.loop.call_later(0, self._readable)
            raise
        return total

    def drain_failed(self, error: int) -> None:
        """Fail the device, because a queue could not be polled or armed, with this errno."""
        self._fail(VerbsCallError(error, "ibv_poll_cq"))

    def drain_soon(self) -> None:
        """Deliver in the loop's next iteration the completions that cannot be delivered now."""
        self.loop.call_later(0, self._deliver_late)

    def _deliver_late(self) -> None:
        self.poller.scheduled = False
        if not self._stopped:
            self.drain(direct=True)

    def _readable(self) -> None:
        if not self._stopped:
            self.poller.wakes += 1
            self.drain(direct=True)

    def _fail(self, error: Failure) -> None:
        """Report the device's failure to all users. The memory of requests in flight stays held
        until their queue pair is destroyed, because the failed device may still access it."""
        if self.failure is not None:
            return
        logger.error("%s: %s", self.context.device_name, error)
        self.failure = detached(error)
        self.poller.enabled = False
        self.loop.unpoll(self.poller)
        self.loop.unwatch(self.channel.fd)
        self.loop.unwatch(self.context.async_fd)
        for report in [*self.on_failure, *[owner.fail for owner in self.pairs.values()]]:
            report(error)
        self.on_failed(self)

    # -- asynchronous events ------------------------------------------------------------------

    def poll_async_events(self) -> None:
        """Take the pending asynchronous events. They are handled in the loop's next iteration."""
        if not self._stopped and self.failure is None:
            self._async_readable()

    def _async_readable(self) -> None:
        assert self._events is not None
        try:
            self._events.router.read()
        except VerbsCallError as error:
            self._fail(error)

    def handle_async_event(self, event: AsyncEvent) -> None:
        """Handle an event of the device, which any loop may have taken."""
        kind, name = event.type, self.context.device_name
        if self._stopped or self.failure is not None:
            return
        if kind is AsyncEventType.DEVICE_FATAL:
            self._fail(DeviceEventError(kind, name))
        elif kind is AsyncEventType.CQ_ERR:
            if any(shared.queue.key == event.key for shared in self._queues):
                self._fail(DeviceEventError(kind, f"a completion queue of {name}"))
        elif kind in QUEUE_PAIR_ERRORS:
            owner = self.pairs.get(event.qp_num)
            if owner is not None:
                error = DeviceEventError(kind, f"a queue pair of {name}")
                # siw raises the event just before the completion with the request's error. For
                # a refused access of the peer's, there is no completion.
                is_precise = kind is AsyncEventType.QP_ACCESS_ERR
                self.loop.call_later(
                    0 if is_precise else PRECISE_CAUSE_SECONDS,
                    lambda: self._report_queue_pair_error(event.qp_num, owner, error),
                )
        elif event.key:
            handle = self.on_object_event.get(event.qp_num or event.key)
            if handle is not None:
                handle(kind)
        else:
            logger.info("%s: %s on port %d", name, kind.name, event.port)

    def _report_queue_pair_error(
        self, qp_num: int, owner: PairOwner, error: DeviceEventError
    ) -> None:
        if self._stopped:
            return
        try:
            self.drain()
        finally:  # a done callback may raise an interrupt
            # Otherwise a more precise cause has ended it.
            if self.pairs.get(qp_num) is owner:
                owner.queue_pair_failed(error)

    def forget_queue_pair(self, qp_num: int) -> None:
        """Deliver no more events of a queue pair. Call this before destroying it."""
        self.pairs.pop(qp_num, None)
        self.on_object_event.pop(qp_num, None)

    # -- the watchdog -------------------------------------------------------------------------

    def watch_over(self) -> None:
        """Check for a lost event from time to time while requests are in flight, because a kernel
        drops an event if an allocation fails. The interval doubles while nothing completes."""
        if self._watchdog is None:
            self.poller.watched = True
            self._watchdog = self.loop.call_later(self._watchdog_delay, self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        self.poller.watched = False
        if self._stopped or self.failure is not None or not len(self.in_flight):
            self._watchdog_delay = WATCHDOG_SECONDS
            return
        if self.poller.delivered != self._delivered:
            self._watchdog_delay = WATCHDOG_SECONDS
        else:
            self._watchdog_delay = min(2 * self._watchdog_delay, WATCHDOG_MOST_SECONDS)
        self._delivered = self.poller.delivered
        now = system.now()
        for owner in list(self.pairs.values()):
            owner.watch(now)
        # A queue whose event was lost still counts as armed: arm it again, then poll.
        self.poller.forget_arming()
        try:
            self._readable()
        finally:  # a done callback may raise an interrupt
            self.watch_over()

    # -- the end ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop watching, before `close`. Every queue pair must have been destroyed."""
        self._stopped = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self.loop.unpoll(self.poller)
        self.loop.unwatch(self.channel.fd)
        self.loop.unwatch(self.context.async_fd)
        if self._events is not None:
            self._events.leave()
        # Destroying a queue blocks until all of its events are acknowledged.
        self.drain()
        self.counters.end()

    def close(self) -> None:
        """Destroy all objects, even if one fails. Every queue pair must have been destroyed."""
        self.poller.enabled = False
        self.poller.set_queues([])
        queues = [shared.queue.close for shared in reversed(self._queues)]
        call_all(
            [*queues, self.channel.close, self.pool.close, self.domain.close, self.context.close]
        )
        self._queues.clear()
