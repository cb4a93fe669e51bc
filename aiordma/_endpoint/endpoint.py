"""One queue pair on its way through life: posting with credits, the cause of its end, its end.

An endpoint ends once, for one cause: you closed it, the peer disconnected, a request failed, or the
device went. Ending moves the queue pair to its error state, gives the device a moment to flush,
destroys the queue pair, and then ends every request that is still open with that cause. Only after
that is memory given back, which is how no buffer is freed under the device, and nothing hangs.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Protocol, TypeVar

from aiordma._base.connection_parameters import DEVICE_MAXIMUM
from aiordma._base.enums import (
    CmEventType,
    QueuePairAttribute,
    QueuePairState,
    QueuePairType,
    WorkCompletionStatus,
    WorkRequestOpcode,
)
from aiordma._base.errors import (
    ClosedError,
    DeviceRemovedError,
    DisconnectedError,
    FlushedError,
    RdmaError,
    VerbsCallError,
    check_positive_errno,
    completion_error,
    detached,
    retry_seconds,
)
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._base.options import ConnectionOptions
from aiordma._base.origin import warn_unclosed, with_origin
from aiordma._base.process import forked, here
from aiordma._base.ranges import RemoteMemory
from aiordma._base.socket_address import address_text
from aiordma._base.states import ConnectionState, next_state
from aiordma._endpoint.lifecycle import Lifecycle, Phase
from aiordma._endpoint.work_queues import ReceiveQueue, SendQueue
from aiordma._loop.event_loop import EventLoop, Waiter, require_here
from aiordma._loop.threads import Calls, in_thread, outwait
from aiordma._requests.request import OpenRequests, WorkRequest, fail_all
from aiordma._requests.select import Port
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.tcp_silence import TcpSilence
from aiordma._runtime.unmanaged_identifier import Unmanaged
from aiordma.verbs import Capacity, MemoryRegion, QueuePair, RawSharedReceiveQueue, SendWork
from aiordma.verbs.identifier import Event, Identifier

__all__ = ("Endpoint", "SharedReceives", "Window")

logger: logging.Logger = logging.getLogger("aiordma")

FLUSH_SECONDS = 0.5
"""How long the device may take to flush before its queue pair is destroyed (rxe can lag)."""

NEWS_SECONDS = 1.0
"""How long after an unexplained flush the peer's disconnect may take to explain it."""

_IN_FORCE = (
    QueuePairAttribute.STATE
    | QueuePairAttribute.MAX_QP_RD_ATOMIC
    | QueuePairAttribute.RETRY_CNT
    | QueuePairAttribute.TIMEOUT
)
"""What the handshake settled, and we need to know."""

Made = TypeVar("Made")

_LINGER, _NEWS, _FLUSHED = "linger", "news", "flushed"
"""The timers of an endpoint's life."""

_FLUSH = int(WorkCompletionStatus.WR_FLUSH_ERR)
_WRITE = int(WorkRequestOpcode.RDMA_WRITE)
_CONNECTING = (ConnectionState.CONNECTING, ConnectionState.ACCEPTING)
_ENDED = (ConnectionState.DISCONNECTED, ConnectionState.BROKEN, ConnectionState.CLOSED)


class Window(Protocol):
    """A memory window of the queue pair."""

    def _free(self) -> None:
        """Free the device's object, in any thread."""

    def close(self) -> None:
        """Let go of the memory that it was bound to, too; on the loop's thread."""


class SharedReceives(Protocol):
    """A shared receive queue, and the completion queue where its receives complete."""

    raw: RawSharedReceiveQueue
    queue: CompletionQueueShare
    buffers: int
    """Receives that it posts by itself."""

    def join(self, member: "Endpoint") -> None:
        """Count a queue pair that is about to be made on it, or refuse."""

    def delays(self, member: "Endpoint", then: Callable[[], None]) -> bool:
        """Return whether the queue pair, in its error state, must not be destroyed before `then` is
        called: the device may still tell of receives that it took."""

    def leave(self, member: "Endpoint") -> None:
        """Count no more a queue pair that is gone, and whose completions have been delivered."""


class Endpoint:
    """See the module. Made around an identifier that is bound to a device, by whoever connects or
    accepts; `open` before use, `aclose` always.

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
        self.hub = hub
        self.loop: EventLoop = hub.loop
        self.reactor = reactor
        self.identifier = identifier
        self.options = options
        self.life: Lifecycle = Lifecycle(self.loop)
        self._process = here.pid
        self._state = state
        self.queue_pair: QueuePair | None = None
        self.qpn: int = 0
        self.service: QueuePairType = QueuePairType.RC
        self.capacity: Capacity = Capacity()
        self.max_message: int = 0
        self.max_read_depth: int = 0
        self.retries: tuple[int, int] = options.retry_count, options.ack_timeout
        """The retry_count and the ack_timeout in force."""
        self.requests: OpenRequests = OpenRequests()
        """Those that have not ended."""
        self.sends: SendQueue = SendQueue(self, options.max_send_wr)
        self.receives: ReceiveQueue = ReceiveQueue(self, options.receive_queue)
        self.port: Port = Port(
            self,
            hub.steps,
            self.sends.slots,
            self.receives.slots,
            self.requests,
            self.loop.asyncio_loop,
            hub.domain,
        )
        self.shared_receive: SharedReceives | None = None
        self.unretrieved: Unretrieved = Unretrieved(self.loop)
        self.regions: dict[int, MemoryRegion] = {}
        self.windows: dict[int, Window] = {}
        self.windows_go: bool = False  # in a thread, right now
        self.last_event: Event | None = None
        self.was_established: bool = False
        self.calls: Calls = Calls(self.loop)
        """With the queue pair or the identifier, neither of which is destroyed meanwhile."""
        self._peer = identifier.peer_address
        self._guesses = self._asks = False
        self._state_waiters: list[Waiter] = []
        self._silence: TcpSilence | None = None
        self._reported = False
        self._queue: CompletionQueueShare | None = None
        self._entries = options.max_send_wr + options.receive_queue

    def __repr__(self) -> str:
        return f"<Connection to {self._peer} on {self.hub.context.device_name}: {self.state.value}>"

    @property
    def name(self) -> str:
        """What users know it as, for messages."""
        peer = self.identifier.peer_address
        if peer is None:
            return f"queue pair {self.qpn:#x} of {self.hub.context.device_name}"
        return f"the connection to {address_text(peer)}"

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
            self.shared_receive, self._entries = shared_receive, self.options.max_send_wr
        self._check_depths()
        options = self.options
        self._queue = await self.hub.reserve(self._entries, options.comp_vector, options.cqe)
        self.hub.on_failure.add(self.fail)
        await self.calls.run(self._create_queue_pair)
        self._open_port()
        self.port.feeds = bool(self.options.receive_buffers)

    def _create_queue_pair(self) -> None:
        options = self.options
        most = self.hub.attributes.max_sge
        sends = min(options.max_send_sge, most)
        receives = 0 if self.shared_receive else options.receive_queue
        parts = min(options.max_recv_sge + self.header_parts, most)
        capacity = Capacity(options.max_send_wr, receives, sends, parts, options.max_inline_data)
        assert self._queue is not None
        shared, queue = self.shared_receive, self._queue.queue
        self.max_message = self.hub.context.query_port(self.identifier.port).max_msg_sz
        self.queue_pair = self.identifier.create_queue_pair(
            self.hub.domain,
            queue,
            queue if shared is None else shared.queue.queue,
            capacity=capacity,
            service=self.service,
            shared_receive=None if shared is None else shared.raw,
        )
        self.capacity = self.queue_pair.capacity
        self.qpn = self.queue_pair.qpn
        self.hub.on_queue_pair_error[self.queue_pair.key] = self.fail

    def _check_depths(self) -> None:
        """Do nothing if the device can have as many READs outstanding as the options say.

        Raises:
            ValueError: it cannot; the message names the option and the limit.
        """
        for name, limit in (
            ("initiator_depth", self.hub.attributes.max_qp_init_rd_atom),
            ("responder_resources", self.hub.attributes.max_qp_rd_atom),
        ):
            value = getattr(self.options, name)
            if value != DEVICE_MAXIMUM and value > limit:
                raise ValueError(f"{name}={value}: {self.hub.context.device_name} has 0..{limit}")

    def _open_port(self) -> None:
        """Let plain requests go the short way; once there is a queue pair."""
        assert self.queue_pair is not None
        self.port.open(self.queue_pair.key, self.max_message, self.capacity.max_inline_data)
        self._tell_port()

    @deferring_steps
    async def make_in_thread(
        self, make: Callable[[], Made], close: Callable[[Made], object]
    ) -> Made:
        """Make an object of our protection domain in a worker thread; the domain stays open for it.
        If the caller is cancelled, or the endpoint has ended by then, the object is closed.

        Raises: as `require_usable`, and what `make` raises.
        """
        with self.reactor.retained():
            made = await in_thread(self.loop, make, on_cancelled=close)
            try:
                self.require_usable()
            except BaseException:
                close(made)
                raise
        return made

    def adopt(self, region: MemoryRegion) -> None:
        """Close the region with this endpoint, if it is not closed before."""
        self.regions[id(region)] = region
        region._on_close = lambda: self.regions.pop(id(region), None)

    @property
    def state(self) -> ConnectionState:
        """Where it is in a connection's life."""
        return self._state

    @state.setter
    def state(self, state: ConnectionState) -> None:
        self._state = state
        self._tell_port()

    @property
    def cause(self) -> Exception | None:
        """Why it has ended, or is about to; stored, so raise only what `detached` makes of it."""
        return self.life.cause

    @cause.setter
    def cause(self, cause: Exception | None) -> None:
        self.life.cause = cause
        self._tell_port()

    def _tell_port(self) -> None:
        usable = (
            self.queue_pair is not None
            and self.life.cause is None
            and self._state is not ConnectionState.CLOSED
        )
        self.port.can_receive = usable and self.shared_receive is None
        self.port.ready = (
            usable
            and self._state not in _CONNECTING
            and self.service in (QueuePairType.RC, QueuePairType.UC)
        )

    # -- whose it is, and whether it may be used ------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child of the process that made it: then it is not ours."""
        return self._process != here.pid

    def require_same_process(self) -> None:
        """Do nothing unless it is inherited.

        Raises:
            ForkError: it is.
        """
        if self._process != here.pid:
            raise forked(self._process, repr(self))

    def require_own_loop(self) -> None:
        """Do nothing in our own event loop.

        Raises:
            EventLoopError: this is another thread, or another event loop.
        """
        require_here(self.loop, self)
        self.port.thread = self.loop.thread  # a loop may go on in another thread

    def require_usable(self) -> None:
        """Do nothing while requests may be posted.

        Raises:
            ClosedError: you closed it.
            DisconnectedError: the peer did.
            WorkCompletionError: an earlier request broke it.
            ForkError: this is a child of the process that made it.
            EventLoopError: this is another thread, or another event loop.
        """
        self.require_same_process()
        if self._state is ConnectionState.CLOSED:
            raise ClosedError("this connection is closed")
        if self.life.cause is not None:
            raise detached(self.life.cause)
        self.require_own_loop()
        if self.queue_pair is None:
            raise ClosedError("this connection has no queue pair yet")

    def require_sendable(self) -> None:
        """`require_usable`, and connected: before that a device keeps in its ring what it refuses,
        and sends it later."""
        self.require_usable()
        if self._state in _CONNECTING:
            raise ValueError(f"{self!r} is not connected yet: connect it before you send")

    # -- completions (RequestOwner) -----------------------------------------------------------

    @deferring
    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """The first failure that is no flush is the cause of the end; flushes carry it."""
        status, vendor_err = raw[1], raw[3]
        error = completion_error(
            status, str(request), vendor_err=vendor_err, qp_num=self.qpn, retries=self.retries
        )
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
        is_open = self.cause is None and self.state is ConnectionState.ESTABLISHED
        if is_open and not self.life.has_timer(_NEWS):
            self.life.set_timer(
                _NEWS,
                NEWS_SECONDS,
                lambda: self.reactor.after_events(lambda: self._fail_unless_told(error)),
            )
        error.__cause__ = self.cause
        return error

    def _fail_unless_told(self, error: Exception) -> None:
        if self.cause is None:  # no CM event has explained the flush
            self.fail(error)

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the slot; the last one flushed ends the waiting for the flush."""
        slots = (self.receives if request.is_receive else self.sends).slots
        if request in self.requests:
            # With no signal handled between the two, which happens in calls and behind them.
            slots.free += 1
            self.requests.discard(request)
        slots.grant()  # also where an interrupt kept it from being done
        if self.life.has_timer(_LINGER) or self.life.has_timer(_FLUSHED):
            self._wait_less(request)

    @deferring
    def _wait_less(self, request: WorkRequest) -> None:
        if self.life.has_timer(_LINGER) and not request.is_receive:
            self._linger(self.options.linger if self._sends_open else 0)
        if self.life.has_timer(_FLUSHED) and not self.requests:
            self.life.set_timer(_FLUSHED, 0, self._destroy)

    def request_unretrieved(self, request: WorkRequest) -> None:
        """Report a failed request whose error nobody retrieved (RequestOwner)."""
        if not self.is_inherited:
            self.unretrieved.add(request)

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        """End one that tells nothing (RequestOwner). A queue works in order: it succeeded, unless
        all that is known of the last one is that it was flushed."""
        self.hub.in_flight.take(earlier.wr_id)
        earlier._set_run(())  # or each would look through all those before it
        cause = last.exception()
        if isinstance(cause, FlushedError):
            earlier._fail(cause)
        else:
            qpn = 0 if self.queue_pair is None else self.queue_pair.qpn
            opcode = int(earlier._completes_as)
            earlier._complete((earlier.wr_id, 0, opcode, 0, 0, 0, qpn, 0, 0, 0, 0, 0, 0, 0))

    def post_refused(self, error: int, is_receive: bool) -> None:
        """Raise what the device refused a post with; nothing was posted, nothing is held.

        Raises:
            VerbsCallError: always.
        """
        assert self.queue_pair is not None
        name = "ibv_post_recv" if is_receive else "ibv_post_send"
        check_positive_errno(error, name, self.queue_pair._explain(1))

    def doorbell_failed(self, error: int) -> None:
        """End: the device has a request and could not be told, so that it may be executed yet."""
        assert self.queue_pair is not None
        failure = VerbsCallError(error, "ibv_post_send", self.queue_pair._explain(1))
        failure.was_taken = True
        self.fail(failure)

    # -- connection events --------------------------------------------------------------------

    @deferring
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
        self._wake_state_waiters()
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
            peer = address_text(self.identifier.peer_address)
            cause = DisconnectedError(f"peer {peer} disconnected")
        if self.cause is None:
            # Also of the flushes that are found next, unless a failure before them says more.
            self.cause, self._guesses = cause, True
        # What arrived before the disconnect is in the completion queue: deliver it first. (Where a
        # drain is under way, whose flushes made us ask, a failure can still be behind those.)
        self.hub.drain()
        self.loop.call_later(0, lambda: setattr(self, "_guesses", False))
        disconnected = event.type is not CmEventType.DEVICE_REMOVAL
        if self._sends_open and disconnected and not self.hub.is_iwarp:
            # A send's acknowledgement can come behind the CM's message: do not flush it now. (Not
            # on iWARP, where both come in one TCP stream.)
            self.port.tells = True
            self._linger(self.options.linger)
        else:
            self._end()

    def _linger(self, seconds: float) -> None:
        """End after so many seconds, counted from now."""
        self.life.set_timer(_LINGER, seconds, self._end)

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
        is_live = self.life.phase is Phase.LIVE and self.queue_pair is not None
        if not is_live or self.service is not QueuePairType.RC:
            return  # established and disconnected in one go: there may be messages to receive
        assert self.queue_pair is not None
        in_force = self.queue_pair.query(_IN_FORCE)
        self.max_read_depth = in_force.max_rd_atomic
        if not self.hub.is_iwarp:
            self.retries = in_force.retry_cnt, in_force.timeout
        self._shorten_rnr_timer()
        ours, peer = self.identifier.local_address, self.identifier.peer_address
        if self.hub.leaves_silence_to_tcp and self.options.ack_timeout and ours and peer:
            seconds = retry_seconds(*self.retries)
            self._silence = TcpSilence(
                self.loop, (ours, peer), seconds, self._probe, self._peer_is_silent
            )

    def _shorten_rnr_timer(self) -> None:
        """Shorten the pause of a peer that finds no receive posted; not a thing on iWARP."""
        if self.hub.is_iwarp or self.queue_pair is None:
            return
        try:
            self.queue_pair.modify(min_rnr_timer=self.options.min_rnr_timer)
        except (VerbsCallError, ValueError) as error:
            # The peer may have disconnected already, and the queue pair with it.
            logger.debug("min_rnr_timer was not set: %s", error)

    def _probe(self) -> None:
        """Post a WRITE of no bytes, which the peer's TCP has to acknowledge, while a request waits
        for the peer."""
        if self._sends_open and self.sends.slots.free:
            with suppress(RdmaError):
                self.sends.submit(SendWork("WRITE", _WRITE, remote=RemoteMemory(0, 0, 0)))

    def _peer_is_silent(self) -> None:
        status, peer = int(WorkCompletionStatus.RETRY_EXC_ERR), self.identifier.peer_address
        what = f"the connection to {address_text(peer)}"
        self.fail(completion_error(status, what, qp_num=self.qpn, retries=self.retries))

    # -- the end ------------------------------------------------------------------------------

    @deferring
    def fail(self, error: Exception) -> None:
        """End as broken, with this error as the cause unless there is one already."""
        if self.cause is None and self.state not in _ENDED:
            self.state = ConnectionState.BROKEN
            self._wake_state_waiters()
        self._end_with(error)

    def _wake_state_waiters(self) -> None:
        while self._state_waiters:
            self._state_waiters.pop().wake()

    @property
    def _sends_open(self) -> bool:
        return self.sends.slots.free < self.sends.slots.total

    def _end_with(self, cause: Exception) -> None:
        if self.cause is None:
            self.cause = cause
        self._end()

    def _end(self) -> None:
        if not self.life.advance(Phase.FLUSHING):
            return
        assert self.cause is not None
        if self._silence is not None:
            self._silence.stop()
        self.life.cancel_timers(_NEWS, _LINGER)
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
        self.sends.slots.fail(self.cause)
        if self.requests and self.was_established:  # else only receives, which nothing flushes
            self.port.tells = True
            self.life.set_timer(_FLUSHED, FLUSH_SECONDS, self._destroy)
        elif self.queue_pair is not None:
            # Not now: this can be the program's code in the middle of a post (a finalizer, an
            # __index__), and the queue pair has to outlive that.
            self.loop.call_later(0, self._destroy)
        else:
            self._destroy()

    def _destroy(self) -> None:
        shared = self.shared_receive
        if self.life.phase >= Phase.DESTROYING or self.calls.delays(self._destroy):
            return
        waits = self.was_established and not self.loop.has_ended
        if shared is not None and waits and shared.delays(self, self._destroy):
            return
        self.life.advance(Phase.DESTROYING)
        self.life.cancel_timers(_FLUSHED)
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
            window._free()
        self.queue_pair.close()

    def _finish(self) -> None:
        """The queue pair is gone: nothing touches memory any more, and nothing more completes."""
        self.windows_go = False
        # All of it, whatever a callback of the program's raises.
        with ExitStack() as last_first:
            last_first.callback(self._is_over)
            if self.shared_receive is not None:
                last_first.callback(self.shared_receive.leave, self)
            if self._queue is not None:
                last_first.callback(self.hub.free, self._queue, self._entries)
            last_first.callback(self.hub.on_failure.discard, self.fail)
            for window in list(self.windows.values()):
                last_first.callback(window.close)
            last_first.callback(lambda: fail_all(self.requests, self._flushed))
            last_first.callback(self.hub.drain_all)

    def _flushed(self, request: WorkRequest) -> Exception:
        self.hub.in_flight.take(request.wr_id)
        error = FlushedError(_FLUSH, str(request), qp_num=self.qpn)
        error.__cause__ = self.cause
        return error

    def _is_over(self) -> None:
        self.life.advance(Phase.ENDED)
        self.life.ended.set()
        self.unretrieved.end(self.name, self.cause)
        for callback in self.life.on_end:
            callback()
        if self.life.is_closing:
            self._give_back()

    async def until_ended(self) -> Exception:
        """Wait until the queue pair is gone and every request has ended; return a copy of the
        cause.

        Raises:
            ForkError: this is a child of the process that made the endpoint.
        """
        self.require_same_process()
        if not self.life.ended.is_set():
            self.require_own_loop()
        await self.life.ended.wait()
        assert self.cause is not None
        return detached(self.cause)

    @deferring
    def close(self) -> None:
        """End, and then give back everything, in the background. Idempotent."""
        if self.life.is_closing:
            return
        self.life.is_closing = True
        if self.is_inherited:
            self.life.closed.set()  # all of it is the parent's
            return
        self.state = ConnectionState.CLOSED
        self._wake_state_waiters()
        self._end_with(ClosedError("this connection was closed"))
        if self.loop.has_ended:
            self._destroy()  # what it had begun to wait for will not be heard of
        if self.life.has_ended:
            self._give_back()

    def _give_back(self) -> None:
        if not self.life.advance(Phase.CLOSED):
            return
        for callback in self.life.on_close:
            callback()
        self.reactor.unsubscribe(self.identifier)
        regions, self.regions = list(self.regions.values()), {}
        destroy_unused = self.hub.take_unused()

        def close() -> None:
            with ExitStack() as last_first:
                last_first.callback(destroy_unused)
                last_first.callback(self.identifier.close)
                for region in regions:
                    # Another connection's request may still own it: then it goes with that.
                    last_first.callback(region._retire)

        self.reactor.destroy(close, lambda: self.reactor.release(self.life.closed.set))

    @deferring_steps
    async def aclose(self) -> None:
        """`close`, and wait for it, whatever cancels the task: it is short.

        Raises:
            EventLoopError: as of `Reactor.require_here`.
        """
        if not (self.life.closed.is_set() or self.is_inherited):
            self.reactor.require_here(self, self.close)
        self.close()
        await outwait(self.life.closed)

    def left_open(self) -> str:
        """Return how to name it in the warning that the program did not close it; "" once it has
        been reported, or is being closed."""
        return "" if self._reported or self.life.is_closing else with_origin(self, self.life.origin)

    @deferring
    def forget(self) -> None:
        """Close it where it was forgotten, with a warning: in any thread, also after the loop's
        end."""
        text, self._reported = self.left_open(), True
        try:
            if text:
                warn_unclosed(f"unclosed {text}", self)
        finally:
            if self.loop.has_ended:
                self.reactor.close_elsewhere(self.close)
            else:
                self.loop.call_from_thread(self.close)
