"""One device on one event loop: the completion channel, the shared queues, the in-flight table.

A readable channel leads to one call into C, which takes the events, acknowledges them, arms, polls
until empty, and hands back a packed batch; every completion finds its entry through its wr_id.

Queue pairs reserve their depth in a shared completion queue, so that no sequence of posts can
overrun it; when one is full, another is made on the same channel. (Resizing would do on rxe, but
iWARP devices cannot.) A queue has one completion vector and one size, so queue pairs share it only
if their options `comp_vector` and `cqe` are equal. Queues in which nothing is reserved are given
back, except for one of each vector, of the size that was reserved last: it is kept for the next
connection.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import anyio

from aiordma._base.enums import AsyncEventType, Transport
from aiordma._base.errors import DeviceEventError, VerbsCallError, check_negative_errno, detached
from aiordma._base.provider import SOFTWARE
from aiordma._loop.event_loop import EventLoop, Timer
from aiordma._loop.threads import in_thread
from aiordma._native import ffi
from aiordma._requests.pool import BufferPool
from aiordma._requests.select import BATCH, Drain, Entry, InFlightTable
from aiordma._runtime.async_events import Subscription, join_router
from aiordma.verbs import (
    AsyncEvent,
    CompletionChannel,
    CompletionQueue,
    Context,
    DeviceAttributes,
    ProtectionDomain,
)
from aiordma.verbs.async_event import QUEUE_PAIR_ERRORS

__all__ = ("CompletionQueueShare", "DeviceHub", "Entry")

logger: logging.Logger = logging.getLogger("aiordma")

ROUNDS = 16
"""Batches per wake before other callbacks get their turn."""
QUEUE_ENTRIES = 4096
NEWS_SECONDS = 0.1
"""How long after a queue pair's asynchronous failure a completion may still say more of it."""
WATCHDOG_SECONDS = 1.0
WATCHDOG_MOST_SECONDS = 60.0


Failure = VerbsCallError | DeviceEventError
"""Why nothing completes any more."""


class CompletionQueueShare:
    """A completion queue, how many of its entries are reserved, and the options that it was made
    for: `comp_vector`, and `cqe` (None: the usual size)."""

    def __init__(
        self, queue: CompletionQueue, comp_vector: int = 0, cqe: int | None = None
    ) -> None:
        self.queue = queue
        self.comp_vector = comp_vector
        self.cqe = cqe
        self.reserved = 0


class DeviceHub:
    """See the module. Made and closed by the reactor; `domain` is its protection domain.

    Takes over the context, and closes it where construction fails. Construction and `close` may run
    in any thread, everything else on the loop's. `on_failure` has a callback of each user, for the
    one time when the device fails: nothing completes any more.

    The device's asynchronous events come here too, and go on by the object's address (`key`):
    `on_queue_pair_error` is told that a queue pair failed (a moment later, unless it has ended for
    a better reason by then), `on_object_event` the type of any other event of an object. Enter an
    object when it is made, take it out before it is destroyed.
    """

    def __init__(self, context: Context, loop: EventLoop) -> None:
        self.context = context
        context._is_left_to_owner = lambda: not loop.is_running
        try:
            self.attributes: DeviceAttributes = context.query()
            self.domain: ProtectionDomain = ProtectionDomain(context)
            self.channel: CompletionChannel = CompletionChannel(context)
            queue = self._make_queue(QUEUE_ENTRIES, 0)
        except BaseException:
            context.close()  # and with it what was made from it
            raise
        self.is_iwarp: bool = context.transport is Transport.IWARP
        self.keeps_order: bool = not self.is_iwarp or context.device_name == SOFTWARE
        """Whether what is behind a READ ends behind it: siw does not see to that."""
        self.leaves_silence_to_tcp: bool = self.is_iwarp and context.device_name != SOFTWARE
        """Whether it is TCP's business to notice a dead peer."""
        self.loop = loop
        self.in_flight: InFlightTable[Entry] = InFlightTable()
        self.pool: BufferPool = BufferPool(self.domain, is_pinned=context.device_name != SOFTWARE)
        self.failure: Failure | None = None
        self.on_failure: set[Callable[[Failure], None]] = set()
        self.on_queue_pair_error: dict[int, Callable[[DeviceEventError], None]] = {}
        self.on_object_event: dict[int, Callable[[AsyncEventType], None]] = {}
        self._events: Subscription | None = None
        self._stopped = False
        self._making_queue = anyio.Lock()
        self._queues: list[CompletionQueueShare] = []
        self._last_cqe: dict[int, int | None] = {0: None}
        """By vector: the size that was reserved last."""
        self.steps: Drain = Drain(
            self,
            int(ffi.cast("uintptr_t", context.provider.table)),
            int(ffi.cast("uintptr_t", self.channel.pointer)),
            self.in_flight,
        )
        self._watchdog: Timer | None = None
        self._watchdog_delay = WATCHDOG_SECONDS
        self._delivered = 0
        self._arms = True
        self._add(queue, 0, None)

    def start(self) -> None:
        """Watch the channel, and hear the device's events."""
        self.loop.watch(self.channel.fd, self._readable, hot=True)
        self._events = join_router(self.context, self.loop, self.handle_async_event)
        self.loop.watch(self.context.async_fd, self._async_readable)
        self._arms = not self.loop.poll(self.steps)
        self.drain()  # arms the queue, unless the loop does before it sleeps

    # -- completion queues --------------------------------------------------------------------

    async def reserve(
        self, entries: int, comp_vector: int = 0, cqe: int | None = None
    ) -> CompletionQueueShare:
        """Reserve entries in a completion queue; give them back with `free`.

        Args:
            entries: how many completions there can be at a time.
            comp_vector: the queue's completion vector.
            cqe: the queue's size; None: the usual one, or `entries` if that is more.

        Raises:
            ValueError: the device has no such vector, or its largest completion queue is smaller;
                or `cqe` is less than `entries`.
            VerbsCallError: a new queue could not be made, or the device has failed.
            DeviceEventError: the device has failed, and said so.
        """
        most = self.attributes.max_cqe
        if entries > most:
            raise ValueError(
                f"{entries} requests in flight: a completion queue of "
                f"{self.context.device_name} holds {most}"
            )
        if cqe is not None and not entries <= cqe <= most:
            raise ValueError(
                f"cqe={cqe} is not in {entries}..{most}: {entries} requests can be in flight, and "
                f"a completion queue of {self.context.device_name} holds {most}"
            )
        async with self._making_queue:
            if self.failure is not None:
                raise detached(self.failure)
            for shared in self._queues:
                is_its_kind = shared.comp_vector == comp_vector and shared.cqe == cqe
                if is_its_kind and shared.reserved + entries <= shared.queue.cqe:
                    shared.reserved += entries
                    break
            else:
                shared = await self._grow(entries, comp_vector, cqe)
            self._last_cqe[comp_vector] = cqe
            return shared

    def reserve_more(self, shared: CompletionQueueShare, entries: int) -> None:
        """Speak for more room in the same completion queue.

        Raises:
            ValueError: it has not as much left.
        """
        left = shared.queue.cqe - shared.reserved
        if entries > left:
            raise ValueError(
                f"{entries} requests more: the completion queue, of {shared.queue.cqe}, has room "
                f"for {left}; others share it"
            )
        shared.reserved += entries

    async def _grow(self, entries: int, comp_vector: int, cqe: int | None) -> CompletionQueueShare:
        """Make another queue, and reserve entries in it."""
        size = max(QUEUE_ENTRIES, entries) if cqe is None else cqe
        # If the caller is cancelled, the next one finds it.
        queue = await in_thread(
            self.loop,
            lambda: self._make_queue(size, comp_vector),
            on_cancelled=lambda queue: self._add(queue, comp_vector, cqe),
        )
        shared = self._add(queue, comp_vector, cqe)
        shared.reserved = entries  # before anybody's callback can find it unused
        self.drain()  # arms it
        return shared

    def free(self, shared: CompletionQueueShare, entries: int) -> None:
        """Give reserved room back. What is unused by then goes with `take_unused`."""
        shared.reserved -= entries

    def take_unused(self) -> Callable[[], None]:
        """Take out the completion queues in which nothing is reserved, except for one of each
        vector, and the free end of the in-flight table.

        Returns:
            A function that destroys these queues. Call it in a worker thread, since that can block,
            and before the hub is closed.
        """
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
        if unused:
            self._queues = [shared for shared in self._queues if shared not in unused]
            self.steps.set_queues([shared.queue.key for shared in self._queues])
            self.in_flight.shrink()

        def destroy() -> None:
            with ExitStack() as stack:
                for shared in unused:
                    stack.callback(shared.queue.close)

        return destroy

    def _make_queue(self, entries: int, comp_vector: int) -> CompletionQueue:
        entries = min(entries, self.attributes.max_cqe)
        return CompletionQueue(self.context, entries, self.channel, comp_vector=comp_vector)

    def _add(
        self, queue: CompletionQueue, comp_vector: int, cqe: int | None
    ) -> CompletionQueueShare:
        shared = CompletionQueueShare(queue, comp_vector, cqe)
        self._queues.append(shared)
        self.steps.set_queues([known.queue.key for known in self._queues])
        return shared

    # -- completions --------------------------------------------------------------------------

    def drain_all(self) -> None:
        """Drain all that the queues can hold: before what is left in flight is given up."""
        for shared in self._queues:
            for _ in range(0, shared.queue.cqe, BATCH * ROUNDS):
                self.drain()

    @property
    def wakes(self) -> int:
        """How often the channel woke the loop."""
        return self.steps.wakes

    @property
    def draining(self) -> bool:
        """Whether completions are being delivered."""
        return self.steps.draining

    def drain(self, *, direct: bool = False) -> int:
        """Deliver every completion that is there, and return how many. Not re-entrant: called
        from a completion's own callback it does nothing, since a drain is under way.

        Args:
            direct: no task is running, so that those who are woken can run at once.
        """
        if self.steps.draining or self.failure is not None:
            return 0
        total = 0
        try:
            for _ in range(ROUNDS):
                count = check_negative_errno(self.steps.step(self._arms, direct), "ibv_poll_cq")
                total += count
                if not self.steps.more:
                    break
            else:
                self.loop.call_later(0, self._readable)
        except VerbsCallError as error:
            self._fail(error)
        except BaseException:
            # An interrupt out of a callback, behind its batch: the rest is for the next round.
            self.loop.call_later(0, self._readable)
            raise
        return total

    def drain_failed(self, error: int) -> None:
        """End everything: a queue could not be polled or armed, for this errno."""
        self._fail(VerbsCallError(error, "ibv_poll_cq"))

    def drain_soon(self) -> None:
        """Deliver in the loop's next round what was found and cannot be delivered here."""
        self.loop.call_later(0, self._deliver_late)

    def _deliver_late(self) -> None:
        self.steps.scheduled = False
        if not self._stopped:
            self.drain(direct=True)

    def _readable(self) -> None:
        if not self._stopped:
            self.steps.wakes += 1
            self.drain(direct=True)

    def _fail(self, error: Failure) -> None:
        """Tell everyone. What is in flight stays held until its queue pair is destroyed: that the
        device says no more does not mean that it touches no memory."""
        if self.failure is not None:
            return
        logger.error("%s: %s", self.context.device_name, error)
        self.failure = detached(error)
        self.steps.enabled = False
        self.loop.unpoll(self.steps)
        self.loop.unwatch(self.channel.fd)
        self.loop.unwatch(self.context.async_fd)
        for tell in list(self.on_failure):
            tell(error)

    # -- asynchronous events ------------------------------------------------------------------

    def poll_async_events(self) -> None:
        """Take the asynchronous events that wait; they are told in the loop's next round."""
        if not self._stopped and self.failure is None:
            self._async_readable()

    def _async_readable(self) -> None:
        assert self._events is not None
        try:
            self._events.router.read()
        except VerbsCallError as error:
            self._fail(error)

    def handle_async_event(self, event: AsyncEvent) -> None:
        """Take an event of the device, whichever loop has read it."""
        kind, name = event.type, self.context.device_name
        if self._stopped or self.failure is not None:
            return
        if kind is AsyncEventType.DEVICE_FATAL:
            self._fail(DeviceEventError(kind, name))
        elif kind is AsyncEventType.CQ_ERR:
            if any(shared.queue.key == event.key for shared in self._queues):
                self._fail(DeviceEventError(kind, f"a completion queue of {name}"))
        elif kind in QUEUE_PAIR_ERRORS:
            tell = self.on_queue_pair_error.get(event.key)
            if tell is not None:
                error = DeviceEventError(kind, f"a queue pair of {name}")
                # siw raises it just before the completion that names the request and its error.
                self.loop.call_later(NEWS_SECONDS, lambda: self._tell(event.key, tell, error))
        elif event.key:
            handle = self.on_object_event.get(event.key)
            if handle is not None:
                handle(kind)
        else:
            logger.info("%s: %s on port %d", name, kind.name, event.port)

    def _tell(
        self, key: int, tell: Callable[[DeviceEventError], None], error: DeviceEventError
    ) -> None:
        if self._stopped:
            return
        self.drain()
        if self.on_queue_pair_error.get(key) == tell:  # else it has ended, for a better reason
            tell(error)

    def forget_queue_pair(self, key: int) -> None:
        """Deliver no more events of a queue pair; before it is destroyed, since its address can
        then be another one's."""
        self.on_queue_pair_error.pop(key, None)
        self.on_object_event.pop(key, None)

    # -- the watchdog -------------------------------------------------------------------------

    def watch_over(self) -> None:
        """Look for a lost event now and then while anything is in flight: a kernel drops one
        when an allocation fails. Rarer and rarer while nothing happens."""
        if self._watchdog is None:
            self.steps.watched = True
            self._watchdog = self.loop.call_later(self._watchdog_delay, self._watch)

    def _watch(self) -> None:
        self._watchdog = None
        self.steps.watched = False
        if self._stopped or self.failure is not None or not len(self.in_flight):
            self._watchdog_delay = WATCHDOG_SECONDS
            return
        if self.steps.delivered != self._delivered:
            self._watchdog_delay = WATCHDOG_SECONDS
        else:
            self._watchdog_delay = min(2 * self._watchdog_delay, WATCHDOG_MOST_SECONDS)
        self._delivered = self.steps.delivered
        # A queue whose event was lost is still thought to be armed: arm it again, then look.
        self.steps.forget_arming()
        self._readable()
        self.watch_over()

    # -- the end ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop watching, before `close`. Once every queue pair is gone."""
        self._stopped = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        self.loop.unpoll(self.steps)
        self.loop.unwatch(self.channel.fd)
        self.loop.unwatch(self.context.async_fd)
        if self._events is not None:
            self._events.leave()
        # A queue blocks its destruction while an event of it is not acknowledged.
        self.drain()

    def close(self) -> None:
        """Destroy everything, whatever of it fails. Every queue pair must be gone."""
        self.steps.enabled = False
        self.steps.set_queues([])
        with ExitStack() as last_first:
            last_first.callback(self.context.close)
            last_first.callback(self.domain.close)
            last_first.callback(self.pool.close)
            last_first.callback(self.channel.close)
            for shared in self._queues:
                last_first.callback(shared.queue.close)
        self._queues.clear()
