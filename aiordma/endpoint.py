"""One queue pair on its way through life: posting with credits, the cause of its end, its end.

An endpoint ends once, for one cause: you closed it, the peer disconnected, a request failed, or the
device went. Ending moves the queue pair to its error state, gives the device a moment to flush,
destroys the queue pair, and then ends every request that is still open with that cause. Only after
that is memory given back, which is how no buffer is freed under the device, and nothing hangs.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import anyio

from aiordma.enums import (
    CmEventType,
    QueuePairAttribute,
    QueuePairState,
    QueuePairType,
    WorkCompletionStatus,
)
from aiordma.errors import (
    ClosedError,
    DeviceRemovedError,
    DisconnectedError,
    FlushedError,
    VerbsCallError,
    completion_error,
)
from aiordma.event_loop import Timer, Waiter
from aiordma.hub import DeviceHub, SharedQueue
from aiordma.options import ConnectionOptions
from aiordma.rdmacm import Event, Identifier
from aiordma.reactor import Reactor
from aiordma.request import WorkRequest
from aiordma.states import ConnectionState, next_state
from aiordma.threads import Calls, outwait
from aiordma.unmanaged import Unmanaged
from aiordma.verbs import Capacity
from aiordma.work_queues import SharedReceives, WorkQueues

__all__ = ("Endpoint",)

logger = logging.getLogger("aiordma")

FLUSH_SECONDS = 0.5
"""How long the device may take to flush before its queue pair is destroyed (rxe can lag)."""

LINGER_SECONDS = 0.2
"""How long the acknowledgement of a send may come after the peer's disconnect."""

NEWS_SECONDS = 1.0
"""How long after an unexplained flush the peer's disconnect may take to explain it."""

_FLUSH = int(WorkCompletionStatus.WR_FLUSH_ERR)
_CONNECTING = (ConnectionState.CONNECTING, ConnectionState.ACCEPTING)
_ENDED = (ConnectionState.DISCONNECTED, ConnectionState.BROKEN, ConnectionState.CLOSED)


class Endpoint(WorkQueues):
    """See the module. Made by `aiordma.connector` and `aiordma.listener` around an identifier that
    is bound to a device; `open` before use, `aclose` always.

    It takes over the identifier, and one use of the reactor, and gives both back when it is closed.
    Ending and closing are callbacks, not tasks: no cancellation stops them half way.
    """

    header_parts = 0  # of a receive, beside the parts that users count

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        identifier: Identifier | Unmanaged,
        options: ConnectionOptions,
        state: ConnectionState,
    ) -> None:
        super().__init__(hub, options, state)
        self.reactor = reactor
        self.identifier = identifier
        self._guesses = self._asks = False
        self.last_event: Event | None = None
        self.was_established = False
        self.on_end: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self.ended = False
        self._state_waiters: list[Waiter] = []
        self._ending = False
        self._linger_timer: Timer | None = None
        self._news_timer: Timer | None = None
        self._flush_timer: Timer | None = None
        self.calls = Calls(self.loop)
        """With the queue pair or the identifier, neither of which is destroyed meanwhile."""
        self._destroying = False
        self._closing = False
        self._gave_back = False
        self._closed = anyio.Event()
        self._queue: SharedQueue | None = None
        self._entries = options.send_depth + options.receive_queue
        self.windows_go = False  # in a thread, right now
        self.max_read_depth = 0
        self.qpn = 0

    def __repr__(self) -> str:
        return f"<Endpoint {self.qpn:#x} on {self.hub.context.device_name}: {self.state.value}>"

    async def open(
        self,
        service: QueuePairType = QueuePairType.RC,
        shared_receive: SharedReceives | None = None,
    ) -> None:
        """Make the queue pair, with room reserved in a shared completion queue.

        Args:
            service: what kind it is.
            shared_receive: take receives from there, instead of a receive queue of its own.

        Raises:
            ValueError: an option is beyond the device; the message names it and the limit.
            VerbsCallError: the driver refused.
        """
        self.service = service
        if shared_receive is not None:
            shared_receive.join(self)
            self.shared_receive, self._entries = shared_receive, self.options.send_depth
            self._takes_own_receives = False
        self.check_depths()
        self._queue = await self.hub.reserve(self._entries)
        self.hub.on_failure.add(self.fail)
        await self.calls.run(self._create_queue_pair)
        self.open_port(self.send_credits, self.receive_credits)
        self.port.feeds = bool(self.options.receive_buffers)

    def _create_queue_pair(self) -> None:
        options = self.options
        sges = min(options.max_sge, self.hub.attributes.max_sge)
        receives = 0 if self.shared_receive else options.receive_queue
        parts = min(sges + self.header_parts, self.hub.attributes.max_sge)
        capacity = Capacity(options.send_depth, receives, sges, parts, options.max_inline)
        assert self._queue is not None
        shared, queue = self.shared_receive, self._queue.queue
        self.max_message = self.hub.context.query_port(self.identifier.port).max_msg_sz
        self.queue_pair = self.identifier.create_queue_pair(
            self.hub.domain,
            queue,
            queue if shared is None else shared.queue.queue,
            capacity,
            self.service,
            None if shared is None else shared.raw,
        )
        self.capacity = self.queue_pair.capacity
        self.qpn = self.queue_pair.qpn
        self.hub.on_queue_pair_error[self.queue_pair.key] = self.fail

    # -- completions (RequestOwner) -----------------------------------------------------------

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """The first failure that is no flush is the cause of the end; flushes carry it."""
        status, vendor_err = raw[1], raw[3]
        error = completion_error(status, str(request), vendor_err=vendor_err, qp_num=self.qpn)
        if status != _FLUSH:
            if self._guesses:
                self.cause, self.state, self._guesses = error, ConnectionState.BROKEN, False
            self.fail(error)
            return error
        if self.cause is None:
            # An iWARP device flushes by itself when the peer closes: the news may be waiting.
            self._asks = True
            self.reactor.poll_events()
            self._asks = False
        if self.cause is None and self.state is ConnectionState.ESTABLISHED:
            later = self._news_timer or self.loop.call_later(NEWS_SECONDS, lambda: self.fail(error))
            self._news_timer = later
        error.__cause__ = self.cause
        return error

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the slot; the last one flushed ends the waiting for the flush."""
        super().request_ended(request)
        if self._linger_timer is not None and not self._sends_open:
            self._linger_timer.cancel()
            self._linger_timer = self.loop.call_later(0, self._end)
        if self._flush_timer is not None and not self._open:
            self._flush_timer.cancel()
            self._flush_timer = self.loop.call_later(0, self._destroy)

    # -- connection events --------------------------------------------------------------------

    def handle_event(self, event: Event) -> None:
        """Take a CM event of our identifier."""
        if self.hub.draining and self.state is ConnectionState.ESTABLISHED and not self._asks:
            # Another one asked for news. What is being delivered may say more, and comes first.
            self.loop.call_later(0, lambda: self.handle_event(event))
            return
        before, self.state = self.state, next_state(self.state, event.type)
        if self.state is before:
            return
        if not self.was_established:
            self.last_event = event  # the one that ended the handshake
        while self._state_waiters:
            self._state_waiters.pop().wake()
        if self.state is ConnectionState.ESTABLISHED:
            self.was_established = True
        if before is ConnectionState.ACCEPTING and self.state is ConnectionState.DISCONNECTED:
            # It was connected, or it could not have disconnected: its last word of the handshake
            # was lost, but not what it sent us meanwhile.
            self.was_established = True
        elif before is not ConnectionState.ESTABLISHED:
            return  # whoever is connecting or accepting looks at the state
        if event.type is CmEventType.DEVICE_REMOVAL:
            cause: Exception = DeviceRemovedError(f"{self.hub.context.device_name} was removed")
        else:
            cause = DisconnectedError("the peer disconnected")
        if self.cause is None:
            # Also of the flushes that are found next, unless a failure before them says more.
            self.cause, self._guesses = cause, True
        # What arrived before the disconnect is in the completion queue: deliver it first. (Where a
        # drain is under way, whose flushes made us ask, a failure can still be behind those.)
        self.hub.drain()
        self.loop.call_later(0, lambda: setattr(self, "_guesses", False))
        if self._sends_open:
            # A send's acknowledgement can come behind the CM's message: do not flush it now.
            self.port.tells = True
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self._end)
        else:
            self._end()

    async def connected(self) -> bool:
        """Wait until the handshake has ended, and return whether it succeeded. The connection can
        be over again by then, with messages waiting."""
        while self.state in _CONNECTING:
            waiter = self.loop.waiter()
            self._state_waiters.append(waiter)
            try:
                await waiter.wait()
            finally:
                if waiter in self._state_waiters:
                    self._state_waiters.remove(waiter)
        return self.was_established

    def established(self) -> None:
        """Finish what can only be set once the queue pair works."""
        if self._ending or self.queue_pair is None or self.service is not QueuePairType.RC:
            return  # established and disconnected in one go: there may be messages to receive
        wanted = QueuePairAttribute.MAX_QP_RD_ATOMIC | QueuePairAttribute.STATE
        self.max_read_depth = self.queue_pair.query(wanted).max_rd_atomic
        self.shorten_rnr_timer()

    # -- the end ------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End as broken, with this error as the cause unless there is one already."""
        if self.cause is None and self.state not in _ENDED:
            self.state = ConnectionState.BROKEN
            while self._state_waiters:
                self._state_waiters.pop().wake()
        self._end_with(error)

    @property
    def _sends_open(self) -> bool:
        return self.send_credits.free < self.send_credits.total

    def _end_with(self, cause: Exception) -> None:
        if self.cause is None:
            self.cause = cause
        self._end()

    def _end(self) -> None:
        if self._ending:
            return
        self._ending = True
        assert self.cause is not None
        if self._news_timer is not None:
            self._news_timer.cancel()  # or a loop that ends would wait for it
        try:
            self.identifier.disconnect()
        except VerbsCallError as error:
            logger.debug("disconnecting: %s", error)  # it never was connected, or no longer is
        if self.queue_pair is not None and (
            self.service is not QueuePairType.RC or isinstance(self.identifier, Unmanaged)
        ):
            # Nobody else moves these; without it they flush only as they are destroyed.
            try:
                self.queue_pair.modify(QueuePairState.ERR)
            except (VerbsCallError, ValueError) as error:
                logger.debug("moving to ERR: %s", error)
        self.send_credits.fail(self.cause)
        if self._open and self.was_established:  # else there are receives only, which none flushes
            self.port.tells = True
            self._flush_timer = self.loop.call_later(FLUSH_SECONDS, self._destroy)
        else:
            self._destroy()

    def _destroy(self) -> None:
        shared = self.shared_receive
        if self._destroying or self.calls.delays(self._destroy):
            return
        if shared is not None and self.was_established and shared.delays(self, self._destroy):
            return
        self._destroying = True
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self.queue_pair is None:
            self._finish()
        else:
            self.hub.forget_queue_pair(self.queue_pair.key)
            self.windows_go = True
            self.reactor.destroy(self._destroy_queue_pair, self._finish)

    def _destroy_queue_pair(self) -> None:
        assert self.queue_pair is not None
        # Windows first: in rxe a bound one holds its queue pair, whose destruction waits for it.
        for window in list(self.windows.values()):
            window.free()
        self.queue_pair.close()

    def _finish(self) -> None:
        """The queue pair is gone: nothing touches memory any more, and nothing more completes."""
        self.windows_go = False
        try:
            self.hub.drain_all()
            for request in list(self._open):
                self.hub.in_flight.take(request.wr_id)
                error = FlushedError(_FLUSH, str(request), qp_num=self.qpn)
                error.__cause__ = self.cause
                request.fail(error)
            for window in list(self.windows.values()):
                window.close()
            self.hub.on_failure.discard(self.fail)
            if self._queue is not None:
                self.hub.free(self._queue, self._entries)
            if self.shared_receive is not None:
                self.shared_receive.leave(self)
        finally:
            self.ended = True
            self.on_end()
            if self._closing:
                self._give_back()

    def close(self) -> None:
        """End, and then give back everything, in the background. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self.is_inherited:
            self._closed.set()  # all of it is the parent's
            return
        self.state = ConnectionState.CLOSED
        self._end_with(ClosedError("this connection was closed"))
        if self.ended and not self._gave_back:
            self._give_back()

    def _give_back(self) -> None:
        self._gave_back = True
        self.on_close()
        self.reactor.unsubscribe(self.identifier)
        regions, self.regions = list(self.regions.values()), {}

        def close() -> None:
            with ExitStack() as last_first:
                last_first.callback(self.identifier.close)
                for region in regions:
                    # Another connection's request may still own it: then it goes with that.
                    last_first.callback(region.retire)

        self.reactor.destroy(close, lambda: self.reactor.release(self._closed.set))

    async def aclose(self) -> None:
        """`close`, and wait for it, whatever cancels the task: it is short."""
        self.close()
        await outwait(self._closed)
