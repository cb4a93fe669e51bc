"""The life of a queue pair: its creation, its handshake, the cause of its end, and its end.

An endpoint ends once, for one cause: you closed it, the peer disconnected, a request failed, or the
device was removed. At its end it moves the queue pair to the error state, waits for the device to
flush, destroys the queue pair, and then fails every remaining request with the cause. Only then is
memory released. So no buffer is freed while the device can access it, and no request hangs.
"""

import errno
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeVar

from anyio.lowlevel import checkpoint_if_cancelled

from aiordma._base.enums import (
    CmEventType,
    QueuePairAttribute,
    QueuePairState,
    QueuePairType,
    WorkCompletionStatus,
)
from aiordma._base.errors import (
    TCP_SECONDS,
    ClosedError,
    DeviceEventError,
    DeviceRemovedError,
    DisconnectedError,
    FlushedError,
    NoMemoryError,
    PeerGoneError,
    VerbsCallError,
    check_positive_errno,
    completion_error,
    detached,
    retry_seconds,
)
from aiordma._base.options import ConnectionOptions
from aiordma._base.origin import warn_unclosed, with_origin
from aiordma._base.process import forked, here
from aiordma._base.socket_address import address_text
from aiordma._base.states import ConnectionState, next_state
from aiordma._base.statistics import RequestStatistics
from aiordma._endpoint.domain_state import DomainState, kept_open
from aiordma._endpoint.keepalive import KEEPALIVE
from aiordma._endpoint.lifecycle import Lifecycle, Phase
from aiordma._endpoint.outliving import Outliving
from aiordma._endpoint.peer_watch import PeerWatch
from aiordma._endpoint.remains import Remains
from aiordma._endpoint.sizes import capacity_for, check_depths, probe_entries
from aiordma._endpoint.work_queues import ReceiveQueue, SendQueue
from aiordma._loop.ending import Ending, end
from aiordma._loop.event_loop import EventLoop, Waiter, require_here
from aiordma._loop.threads import Calls, close_unwanted, in_thread, outwait
from aiordma._native import OpenRequests, Port
from aiordma._requests.pool import BufferPool
from aiordma._requests.request import WorkRequest
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.unmanaged_identifier import Unmanaged
from aiordma.verbs import (
    Capacity,
    MemoryRegion,
    MemoryWindow,
    ProtectionDomain,
    QueuePair,
    RawSharedReceiveQueue,
)
from aiordma.verbs.identifier import Event, Identifier

__all__ = ("Endpoint", "SharedReceives", "Window")

logger: logging.Logger = logging.getLogger("aiordma")

FLUSH_CAUSE_SECONDS = 1.0
"""Seconds that an endpoint waits for the peer's disconnect after a flush without a known cause."""

POLL_SECONDS = 0.0001
"""How old the state may be that `Endpoint.poll` leaves. A pool of connections asks all that are
idle at each request."""

_IN_FORCE = (
    QueuePairAttribute.STATE
    | QueuePairAttribute.MAX_QP_RD_ATOMIC
    | QueuePairAttribute.RETRY_CNT
    | QueuePairAttribute.TIMEOUT
)
"""The attributes that the handshake has determined."""

Made = TypeVar("Made")

_LINGER, _CAUSE, _FLUSHED = "linger", "cause", "flushed"
"""The names of an endpoint's timers."""

_TCP_LEAST = 1.0
"""Seconds of a peer's silence that an iWARP device bears at least: TCP's clock is coarse."""

_FLUSH = int(WorkCompletionStatus.WR_FLUSH_ERR)
_SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})
"""Errors of a CM event which say that the peer acknowledges nothing (the software device's)."""
_CONNECTING = (ConnectionState.CONNECTING, ConnectionState.ACCEPTING)
_ENDS_OF_HANDSHAKE = frozenset(
    {
        CmEventType.ESTABLISHED,
        CmEventType.REJECTED,
        CmEventType.CONNECT_ERROR,
        CmEventType.UNREACHABLE,
        CmEventType.DISCONNECTED,
        CmEventType.DEVICE_REMOVAL,
    }
)
_ENDED = (ConnectionState.DISCONNECTED, ConnectionState.BROKEN, ConnectionState.CLOSED)


class Window(Protocol):
    """A memory window of the queue pair."""

    _window: MemoryWindow

    def _free(self) -> None:
        """Free the device's object, in any thread."""

    def close(self) -> None:
        """Free the device's object and release the bound memory, on the loop's thread."""


class SharedReceives(Protocol):
    """A shared receive queue, and the completion queue of its receives."""

    raw: RawSharedReceiveQueue
    queue: CompletionQueueShare
    pool: BufferPool
    buffers: int
    """The number of pooled receives that it posts."""

    @property
    def cause(self) -> Exception | None:
        """The cause of its end; None while it works."""

    def fail(self, error: Exception) -> None:
        """End it, and its endpoints, with this error as the cause, unless it has one."""

    def join(self, member: "Endpoint") -> None:
        """Add an endpoint before its queue pair is created, or raise an error."""

    def delays(self, member: "Endpoint", then: Callable[[], None]) -> bool:
        """Return whether the queue pair, in its error state, must not be destroyed before `then` is
        called, because the device may still complete receives that it consumed."""

    def leave(self, member: "Endpoint") -> None:
        """Remove an endpoint after its queue pair was destroyed and its completions delivered."""


class _Answer:
    """Takes the place of a Waiter: a wake-up calls a callback from the loop."""

    def __init__(self, loop: EventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback

    def wake(self) -> None:
        """Call the callback in the loop's next turn."""
        self._loop.call_later(0, self._callback)


class Endpoint:
    """See the module. A connect or an accept creates it with an identifier that is bound to a
    device. Call `open` before using it, and `aclose` in every case.

    It owns the identifier, and counts as one user of the reactor, until it is closed. Ending and
    closing run in callbacks, not in tasks, so that no cancellation interrupts them.
    """

    header_parts = 0  # parts of a receive in addition to those of the caller

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        identifier: Identifier | Unmanaged,
        options: ConnectionOptions,
        state: ConnectionState,
        domain: DomainState | None = None,
    ) -> None:
        self.hub = hub
        self.domain: ProtectionDomain = hub.domain if domain is None else domain.raw
        """The protection domain of the queue pair and of its memory."""
        self.domain_state: DomainState | None = domain
        self.pool: BufferPool = hub.pool if domain is None else domain.pool
        """The registered blocks of that domain."""
        self.loop: EventLoop = hub.loop
        self.reactor = reactor
        self.identifier = identifier
        self.options = options
        self.life: Lifecycle = Lifecycle(self.loop)
        self._process = here.pid
        self._state = state
        self.queue_pair: QueuePair | None = None
        self.qp_num: int = 0
        self.service: QueuePairType = QueuePairType.RC
        self.capacity: Capacity = Capacity()
        self.max_message: int = 0
        self.max_read_depth: int = 0
        self.retries: tuple[int, int] = options.retry_count, options.ack_timeout
        """The actual retry_count and ack_timeout."""
        self.requests: OpenRequests = OpenRequests()
        """The requests that have not completed."""
        self.sends: SendQueue = SendQueue(self, options.max_send_wr)
        self.receives: ReceiveQueue = ReceiveQueue(self, options.receive_queue)
        self.port: Port = Port(
            self,
            hub.steps,
            self.sends.slots,
            self.receives.slots,
            self.requests,
            self.loop.asyncio_loop,
            self.domain,
        )
        self.shared_receive: SharedReceives | None = None
        self.unretrieved: Unretrieved = Unretrieved(self.loop)
        self.regions: dict[int, MemoryRegion] = {}
        self.windows: dict[int, Window] = {}
        self.windows_go: bool = False  # whether a thread is freeing the windows
        self.last_event: Event | None = None
        self.was_established: bool = False
        self.calls: Calls = Calls(self.loop)
        """Calls that use the queue pair or the identifier, and delay their destruction."""
        self.in_handshake: bool = False
        """Between `handshake_begins` and `handshake_ends`."""
        self._peer = identifier.peer_address
        self._cause_is_assumed = self._polls_events = False
        self._state_waiters: list[Waiter | _Answer] = []
        self._watch: PeerWatch | None = None
        self._spare = 0
        self.failed_sends: list[WorkRequest] | None = None
        """If not None: the requests of the send queue that were posted and have failed."""
        self._is_accounted_for = False
        """Its end needs no warning: one was given, or the program has closed what is on top."""
        self.is_ending_above: Callable[[], bool] | None = None
        """Whether the program has closed what is built on this connection, which has not said so by
        `expect_close` yet."""
        self.on_loop_end: Callable[[], None] | None = None
        """Ends what is built on this connection, because the event loop ends. It may set
        `closes_soon`."""
        self.closes_soon: bool = False
        """What is built on this connection waits for the peer's device, for a limited time, and
        calls `close` then. The end of the event loop waits for that."""
        self.on_withdrawal: Callable[[], None] | None = None
        """Ends what is being built on this connection, because its connect was cancelled or timed
        out: once the peer has answered, and in place of a `close`."""
        self._queue: CompletionQueueShare | None = None
        self._destroy_unused: Callable[[], None] | None = None
        self.outliving: Outliving = Outliving(self.loop, reactor, domain, self.pool)
        """What the device may still use, if the driver refuses to destroy the queue pair."""
        self.remains: Remains = Remains()
        """Windows and regions from the phase CLOSED on, until the driver has freed them."""
        self._entries = options.max_send_wr + options.receive_queue
        if domain is not None:
            domain.join(self, "connection", lambda: self.life.is_closing)
        hub.counters.add(self)

    def __repr__(self) -> str:
        return f"<Connection to {self._peer} on {self.hub.context.device_name}: {self.state.value}>"

    @property
    def trace_labels(self) -> tuple[str, int, str | None]:
        """The device, the queue pair's number and the peer, for a trace. In any thread."""
        return self.hub.context.device_name, self.qp_num, self._peer_text

    @property
    def _peer_text(self) -> str | None:
        """The peer's address for messages; None if there is no single peer, or it is not known."""
        return None if self._peer is None else address_text(self._peer)

    def statistics(self) -> RequestStatistics:
        """Return the counters of its requests."""
        waits = self.sends.slots.waits + self.receives.slots.waits
        return RequestStatistics._of(self.requests.counters(), waits)

    @property
    def name(self) -> str:
        """The endpoint's name in messages."""
        if self._peer is None:
            return f"queue pair {self.qp_num:#x} of {self.hub.context.device_name}"
        return f"the connection to {self._peer_text}"

    async def open(
        self,
        service: QueuePairType = QueuePairType.RC,
        shared_receive: SharedReceives | None = None,
    ) -> None:
        """Create the queue pair, and reserve its depth in a shared completion queue.

        Args:
            service: the queue pair's service.
            shared_receive: the shared receive queue to use; None: its own receive queue.

        Raises:
            ValueError: an option exceeds the device's limit; the message has both.
            VerbsCallError: the driver refused.
        """
        self.service = service
        if shared_receive is not None:
            shared_receive.join(self)
            self.shared_receive, self._entries = shared_receive, self.options.max_send_wr
        options, limits = self.options, self.hub.attributes
        check_depths(options, limits, self.hub.context.device_name)
        if options.keepalive is not None or self.hub.leaves_silence_to_tcp:
            self._spare = probe_entries(options, limits, self._entries)
        self._entries += self._spare
        cqe = None if options.cqe is None else options.cqe + self._spare
        self._queue = await self.hub.reserve(self._entries, options.comp_vector, cqe)
        self.hub.on_failure.add(self.fail)
        await self.calls.run(self._create_queue_pair)
        self._open_port()
        self.port.has_pooled_receives = bool(self.options.receive_buffers)

    def _create_queue_pair(self) -> None:
        assert self._queue is not None
        shared, queue = self.shared_receive, self._queue.queue
        self.max_message = self.hub.context.query_port(self.identifier.port).max_msg_sz
        self.queue_pair = self.identifier.create_queue_pair(
            self.domain,
            queue,
            queue if shared is None else shared.queue.queue,
            capacity=capacity_for(
                self.options,
                self.hub.attributes.max_sge,
                probes=self._spare,
                header_parts=self.header_parts,
                is_shared=shared is not None,
            ),
            service=self.service,
            shared_receive=None if shared is None else shared.raw,
        )
        self.outliving.watch(self.queue_pair)
        self.capacity = self.queue_pair.capacity
        self.qp_num = self.queue_pair.qp_num
        self.hub.on_queue_pair_error[self.queue_pair.key] = self._queue_pair_failed

    def _open_port(self) -> None:
        """Open the port for requests, once there is a queue pair."""
        assert self.queue_pair is not None
        self.port.open(
            self.queue_pair.key,
            self.max_message,
            self.capacity.max_inline_data,
            self.capacity.max_send_sge,
            self.capacity.max_recv_sge,
            self.hub.attributes.max_sge_rd,
            self.pool,
        )
        self._update_port()

    async def make_in_thread(
        self,
        make: Callable[[], Made],
        close: Callable[[Made], object],
        on_lost: Callable[[], object] = lambda: None,
    ) -> Made:
        """Create an object of the endpoint's protection domain in a worker thread. The domain stays
        open during the call. If the caller is cancelled, or the endpoint or the loop ends during
        the call, the object is closed. At the loop's end, `on_lost` is then called, because the
        caller does not continue.

        Raises: as `require_usable`, and the errors of `make`.
        """
        # In another event loop, neither the call's end nor a cancellation would end the wait.
        self.require_usable()
        with kept_open(self.reactor, self.domain_state) as leave:

            def lost() -> None:
                try:
                    on_lost()
                finally:
                    leave()

            made = await in_thread(self.loop, make, on_cancelled=close, on_lost=lost)
            try:
                # The call outwaits a cancellation, which then does not return the object to anyone.
                await checkpoint_if_cancelled()
                self.require_usable()
            except BaseException:
                close_unwanted(close, made)
                raise
        return made

    def adopt(self, region: MemoryRegion) -> None:
        """Close the region with this endpoint, if it is not closed before."""
        # In this order: without memory for the second, nothing may keep the region.
        region._on_close = lambda: self.regions.pop(id(region), None)
        if self.life.phase < Phase.CLOSED:
            self.regions[id(region)] = region
        else:
            self.remains.add([region])  # the end of a grant was refused meanwhile

    @property
    def state(self) -> ConnectionState:
        """The connection's state."""
        return self._state

    @state.setter
    def state(self, state: ConnectionState) -> None:
        self._state = state
        self._update_port()

    @property
    def cause(self) -> Exception | None:
        """The cause of its end, once it is ending. It is stored: raise only `detached` copies."""
        return self.life.cause

    @cause.setter
    def cause(self, cause: Exception | None) -> None:
        self.life.cause = cause
        self._update_port()

    def _update_port(self) -> None:
        usable = (
            self.queue_pair is not None
            and self.life.cause is None
            and self._state is not ConnectionState.CLOSED
        )
        self.port.can_receive = usable and self.shared_receive is None
        self.port.can_send_datagrams = usable and self.service is QueuePairType.UD
        self.port.ready = (
            usable
            and self._state not in _CONNECTING
            and self.service in (QueuePairType.RC, QueuePairType.UC)
        )

    # -- checks before use ----------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the process that made the endpoint."""
        return self._process != here.pid

    def require_same_process(self) -> None:
        """Check that the endpoint is not inherited.

        Raises:
            ForkError: this process is a forked child of the process that made the endpoint.
        """
        if self._process != here.pid:
            raise forked(self._process, repr(self))

    def require_own_loop(self) -> None:
        """Check that the endpoint's own event loop runs here.

        Raises:
            EventLoopError: this is another thread, or another event loop.
        """
        require_here(self.loop, self)
        self.port.thread = self.loop.thread  # a loop can continue in another thread

    def require_usable(self) -> None:
        """Check that requests may be posted.

        Raises:
            ClosedError: the endpoint was closed, or has no queue pair yet.
            DisconnectedError: the peer disconnected.
            WorkCompletionError: an earlier request failed.
            ForkError: this process is a forked child of the process that made the endpoint.
            EventLoopError: this is another thread, or another event loop.
        """
        self.require_same_process()
        if self._state is ConnectionState.CLOSED:
            raise ClosedError(f"{self.name} is closed")
        if self.life.cause is not None:
            raise detached(self.life.cause)
        self.require_own_loop()
        if self.queue_pair is None:
            raise ClosedError("this connection has no queue pair yet")

    def require_sendable(self) -> None:
        """Check that requests may be posted on the send queue: usable, and connected. Before the
        connection, a device refuses a request, but keeps it in its ring and sends it later."""
        self.require_usable()
        if self._state in _CONNECTING:
            raise ValueError(f"{self!r} is not connected yet: connect it before you send")

    # -- completions (RequestOwner) -----------------------------------------------------------

    def poll(self) -> bool:
        """Deliver the completions and the CM events that there are now, as the event loop does in
        its next turn: for a caller that asks for the state before that. Return False, and do
        nothing, if the loop does not run here. Of several calls within `POLL_SECONDS`, for any
        endpoints of the device, the first one does it for all."""
        if self.is_inherited or not self.loop.is_running_here():
            return False
        now = time.monotonic()
        if now - self.hub.polled > POLL_SECONDS and not self.life.has_ended:
            self.hub.polled = now
            self._poll()
        return True

    def _poll(self) -> None:
        self.hub.drain()
        self.reactor.poll_events()

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """Return the error of a failed completion. The first failure that is not a flush becomes
        the cause of the end, and the `__cause__` of flushes."""
        self._remember_failed(request)
        status, vendor_err = raw[1], raw[3]
        error: Exception
        if status != _FLUSH:
            error = completion_error(
                status,
                str(request),
                vendor_err=vendor_err,
                qp_num=self.qp_num,
                retries=self.retries,
                peer=self._peer_text,
            )
            if self._cause_is_assumed:
                self.cause, self.state, self._cause_is_assumed = (
                    error,
                    ConnectionState.BROKEN,
                    False,
                )
            self.fail(error)
            return error
        if self.cause is None:
            # An iWARP device flushes when the peer closes, and the CM event may be pending.
            self._polls_events = True
            try:
                self.reactor.poll_events()
            finally:
                self._polls_events = False
        error = self._flush_error(request, vendor_err)
        is_open = self.cause is None and self.state is ConnectionState.ESTABLISHED
        if is_open and not self.life.has_timer(_CAUSE):
            self.life.set_timer(
                _CAUSE,
                FLUSH_CAUSE_SECONDS,
                lambda: self.reactor.after_events(lambda: self._fail_unless_explained(error)),
            )
        return error

    def _remember_failed(self, request: WorkRequest) -> None:
        # Without a wr_id it was never posted.
        is_send = not request.is_receive and request.wr_id and request.operation != KEEPALIVE
        if self.failed_sends is None or not is_send:
            return
        if not self.failed_sends or self.failed_sends[-1] is not request:  # a repeated call
            self.failed_sends.append(request)

    def _flush_error(self, request: WorkRequest, vendor_err: int = 0, why: str = "") -> Exception:
        cause = self.cause
        # On iWARP, a local failure completes its request before the flush. So if no cause is known
        # yet, the peer has closed the stream.
        unexplained = cause is None and self.was_established and self.hub.is_iwarp
        error = completion_error(
            _FLUSH,
            str(request),
            vendor_err=vendor_err,
            qp_num=self.qp_num,
            peer_gone=unexplained or isinstance(cause, PeerGoneError),
            peer=self._peer_text if cause is None else None,  # the cause has it
            why=why,
        )
        error.__cause__ = cause
        return error

    def _fail_unless_explained(self, error: Exception) -> None:
        if self.cause is None:  # no CM event has explained the flush
            self.fail(error)

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the request's slot. The last flushed request ends the wait for flushes."""
        slots = (self.receives if request.is_receive else self.sends).slots
        if request in self.requests:
            # Python handles no signal between these two statements, only during or after a call.
            slots.free += 1
            self.requests.discard(request)
        slots.grant()  # also if an interrupt prevented it before
        if self.life.has_timer(_LINGER) or self.life.has_timer(_FLUSHED):
            self._shorten_waits(request)

    def _shorten_waits(self, request: WorkRequest) -> None:
        if self.life.has_timer(_LINGER) and not request.is_receive:
            self._linger(self.options.linger if self.sends.is_in_use else 0)
        if self.life.has_timer(_FLUSHED) and not self.requests:
            self.life.set_timer(_FLUSHED, 0, self._destroy)

    def request_unretrieved(self, request: WorkRequest) -> None:
        """Report a failed request whose error was never retrieved (RequestOwner)."""
        if not self.is_inherited:
            self.unretrieved.add(request)

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        """Complete an unsignaled request (RequestOwner). A queue executes requests in order, so it
        has succeeded. If the last request of its run was flushed, its result is not known, and it
        fails with the same flush."""
        self.hub.in_flight.take(earlier.wr_id)
        earlier._set_run(())  # otherwise each request would iterate over its run
        cause = last._stored_error()  # the last one still has to report it
        if isinstance(cause, FlushedError):
            self._remember_failed(earlier)
            earlier._fail(cause)
        else:
            qp_num = 0 if self.queue_pair is None else self.queue_pair.qp_num
            opcode = int(earlier._completes_as)
            earlier._complete((earlier.wr_id, 0, opcode, 0, 0, 0, qp_num, 0, 0, 0, 0, 0, 0, 0))

    def post_refused(self, error: int, is_receive: bool) -> None:
        """Raise the error of a post that the device refused. Nothing was posted, nothing is held.

        Raises:
            VerbsCallError: always.
        """
        assert self.queue_pair is not None
        name = "ibv_post_recv" if is_receive else "ibv_post_send"
        check_positive_errno(error, name, self._explain_post(1))

    def doorbell_failed(self, error: int) -> None:
        """End with an error, because the device could not be notified of a request in its queue,
        and may still execute it."""
        assert self.queue_pair is not None
        failure = VerbsCallError(error, "ibv_post_send", self._explain_post(1))
        failure.was_taken = True
        self.fail(failure)

    def _explain_post(self, count: int) -> str:
        """Return the sizes and the name of the queue pair, for the error of a refused post."""
        assert self.queue_pair is not None
        return f"{self.queue_pair._explain(count)}, {self.name}"

    def _queue_pair_failed(self, error: DeviceEventError) -> None:
        """End with the device's event for the queue pair."""
        device = self.hub.context.device_name
        self.fail(DeviceEventError(error.event, f"{self.name} on {device}"))

    # -- connection events --------------------------------------------------------------------

    def handshake_begins(self) -> None:
        """Do not disconnect or destroy the identifier before `handshake_ends`: the driver's calls
        wait for the peer's answer (Linux's iw_cm, up to 10 s on siw)."""
        self.in_handshake = True
        self.calls.begin()

    def handshake_ends(self) -> None:
        """End what `handshake_begins` began: the peer has answered, or will not. Idempotent."""
        if not self.in_handshake:
            return
        self.in_handshake = False
        if self.life.phase >= Phase.FLUSHING:
            self._disconnect()
        self.calls.end()

    def handle_event(self, event: Event) -> None:
        """Handle a CM event of the identifier."""
        try:
            self._handle_event(event)
        except MemoryError:
            # There is no second event, for which its requests would wait.
            self.fail(NoMemoryError("there was no memory to handle an event of the connection"))

    def _handle_event(self, event: Event) -> None:
        if event.type in _ENDS_OF_HANDSHAKE:
            self.handshake_ends()
        if (
            self.hub.draining
            and self.state is ConnectionState.ESTABLISHED
            and not self._polls_events
        ):
            # Another endpoint took the event during a drain. Handle it after the completions of
            # this drain, because one of them may have a more precise cause.
            self.loop.call_later(0, lambda: self.handle_event(event))
            return
        before, self.state = self.state, next_state(self.state, event.type)
        if self.state is before:
            return
        if not self.was_established:
            self.last_event = event  # the event that ended the handshake
        self._wake_state_waiters()
        if self.state is ConnectionState.ESTABLISHED:
            self.was_established = True
        if before is ConnectionState.ACCEPTING and self.state is ConnectionState.DISCONNECTED:
            # The peer was connected, because it could disconnect. The last packet of its handshake
            # was lost, but its messages may have arrived.
            self.was_established = True
        elif before is not ConnectionState.ESTABLISHED:
            return  # the task that connects or accepts checks the state
        if event.type is CmEventType.DEVICE_REMOVAL:
            device = self.hub.context.device_name
            cause: Exception = DeviceRemovedError(f"{self.name}: {device} was removed")
        else:
            cause = DisconnectedError(f"peer {self._peer_text} disconnected")
            if -event.status in _SILENCE:
                cause = self._silence_error()
        if self.cause is None:
            # The cause of the flushes in the next drain, unless a failure before them replaces it.
            self.cause, self._cause_is_assumed = cause, True
        # Deliver the completions from before the disconnect first. (If this runs during a drain,
        # after a flush, the failure can still follow in that drain.)
        try:
            self.hub.drain()
        finally:  # a done callback may raise an interrupt
            self.loop.call_later(0, lambda: setattr(self, "_cause_is_assumed", False))
            self._disconnected(event.type is CmEventType.DEVICE_REMOVAL)

    def _disconnected(self, is_removed: bool) -> None:
        if self.sends.is_in_use and not is_removed and not self.hub.is_iwarp:
            # The acknowledgement of a send can arrive after the CM's message: do not flush it now.
            # (Not on iWARP, where both arrive in one TCP stream.)
            self.port.notifies_owner = True
            self._linger(self.options.linger)
        else:
            self._end()

    def _linger(self, seconds: float) -> None:
        """End after so many seconds from now."""
        self.life.set_timer(_LINGER, seconds, self._end)

    async def connected(self) -> bool:
        """Wait for the end of the handshake, and return whether it succeeded. The connection may
        have ended again by then, with messages to receive."""
        while self.state in _CONNECTING:
            waiter = self.loop.waiter()
            self._state_waiters.append(waiter)
            try:
                await waiter.wait()
            finally:
                if waiter in self._state_waiters:
                    self._state_waiters.remove(waiter)
        return self.was_established

    def call_once_answered(self, callback: Callable[[], None]) -> None:
        """Call the callback from the loop once the handshake has ended, or the endpoint."""
        self._state_waiters.append(_Answer(self.loop, callback))

    def established(self) -> None:
        """Query and set the attributes that are available only once the queue pair is connected."""
        is_live = self.life.phase is Phase.LIVE and self.queue_pair is not None
        if not is_live or self.service is not QueuePairType.RC:
            return  # if it has disconnected already, there may be messages to receive
        assert self.queue_pair is not None
        in_force = self.queue_pair.query(_IN_FORCE)
        self.max_read_depth = in_force.max_rd_atomic
        if not self.hub.is_iwarp:
            self.retries = in_force.retry_cnt, in_force.timeout
        self._shorten_rnr_timer()
        keepalive, silence = self.options.keepalive, None
        if self.hub.leaves_silence_to_tcp:
            ours, peer = self.identifier.local_address, self.identifier.peer_address
            if ours and peer:
                silence = (ours, peer), self.peer_timeout
        if keepalive is not None or silence is not None:
            self._watch = PeerWatch(
                self.loop,
                self.sends,
                self.requests,
                is_reserved=bool(self._spare),
                keepalive=keepalive,
                silence=silence,
                on_silence=lambda: self.fail(self._silence_error()),
            )

    def _shorten_rnr_timer(self) -> None:
        """Set the delay before the peer resends a message that finds no receive. Not on iWARP."""
        if self.hub.is_iwarp or self.queue_pair is None:
            return
        try:
            self.queue_pair.modify(min_rnr_timer=self.options.min_rnr_timer)
        except (VerbsCallError, ValueError) as error:
            # The peer may have disconnected already, and the queue pair with it.
            logger.debug("min_rnr_timer was not set: %s", error)

    @property
    def peer_timeout(self) -> float:
        """Seconds after which a peer that acknowledges nothing ends the connection."""
        if self.service is not QueuePairType.RC:
            return math.inf  # no acknowledgements
        seconds = retry_seconds(*self.retries)
        if not self.hub.is_iwarp:
            return seconds
        return min(max(seconds, _TCP_LEAST), TCP_SECONDS)

    def _silence_error(self) -> Exception:
        status = int(WorkCompletionStatus.RETRY_EXC_ERR)
        return completion_error(status, self.name, qp_num=self.qp_num, retries=self.retries)

    # -- the end ------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End as broken, with this error as the cause, unless there is a cause already."""
        try:
            self._fail(error)
        except MemoryError:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.cause is None and self.state not in _ENDED:
            self.state = ConnectionState.BROKEN
        self._wake_state_waiters()
        self._end_with(error)

    def _wake_state_waiters(self) -> None:
        while self._state_waiters:
            self._state_waiters[-1].wake()
            self._state_waiters.pop()  # last: if there was no memory, it is woken later

    def _end_with(self, cause: Exception) -> None:
        if self.cause is None:
            self.cause = cause
        self._end()

    def _end(self) -> None:
        if self.life.phase >= Phase.FLUSHING:
            return
        # First, because from here on nothing but this timer may be left to continue the end.
        self.life.set_timer(_FLUSHED, self.options.flush_timeout, self._destroy)
        self.life.advance(Phase.FLUSHING)
        try:
            self._begin_flush()
        except MemoryError:
            self._begin_flush()

    def _begin_flush(self) -> None:
        """Move the queue pair to the error state, and fail the tasks that wait for a slot.
        Idempotent, because it is done again if there was no memory."""
        assert self.cause is not None
        if self._watch is not None:
            self._watch.stop()
        self.life.cancel_timers(_CAUSE, _LINGER)
        if not self.in_handshake:
            self._disconnect()
        if self.queue_pair is not None and (
            self.service is not QueuePairType.RC or isinstance(self.identifier, Unmanaged)
        ):
            # The disconnect does not move these. Otherwise they would flush only when destroyed.
            try:
                self.queue_pair.modify(QueuePairState.ERR)
            except (VerbsCallError, ValueError) as error:
                logger.debug("moving to ERR: %s", error)
        self.sends.slots.fail(self.cause)
        if self.requests and self.was_established:  # else only receives, which are not flushed
            self.port.notifies_owner = True
        elif self.queue_pair is not None:
            # Later, because this can run during a post, in the program's code (a finalizer, an
            # __index__), and the post still uses the queue pair.
            self.life.set_timer(_FLUSHED, 0, self._destroy)
        else:
            self._destroy()

    def _disconnect(self) -> None:
        try:
            self.identifier.disconnect()
        except VerbsCallError as error:
            logger.debug("disconnecting: %s", error)  # not connected yet, or not any more

    def _destroy(self) -> None:
        try:
            self._destroy_if_due()
        except MemoryError:
            end(self.loop, self._destroy_if_due)

    def _destroy_if_due(self) -> None:
        shared = self.shared_receive
        if self.life.phase >= Phase.DESTROYING or self.calls.delays(self._destroy):
            return
        waits = self.was_established and not self.loop.has_ended
        if shared is not None and waits and shared.delays(self, self._destroy):
            return
        self.life.cancel_timers(_FLUSHED)
        if self.queue_pair is None:
            finish = Ending(self.loop, *self._last_steps())
            self.life.advance(Phase.DESTROYING)
            finish.run()
            return
        self.hub.forget_queue_pair(self.queue_pair.key)
        self.windows_go = True
        try:
            self.life.enter(
                Phase.DESTROYING,
                partial(self.reactor.destroy, self._destroy_queue_pair, *self._last_steps()),
            )
        except MemoryError:
            self.windows_go = False
            raise

    def _destroy_queue_pair(self) -> None:
        assert self.queue_pair is not None
        with ExitStack() as last_first:
            last_first.callback(self.outliving.attempt)
            # Windows first: in rxe, destroying a queue pair waits for its bound windows.
            for window in list(self.windows.values()):
                last_first.callback(window._free)

    def _last_steps(self) -> list[Callable[[], object]]:
        """Return the steps that fail all requests and release everything, after the queue pair was
        destroyed: the device accesses no memory and completes no requests. If the driver has
        refused, `outliving` keeps what the device may still use."""
        shared, queue = self.shared_receive, self._queue

        def free() -> None:
            if queue is not None:
                self.hub.free(queue, self._entries)

        return [
            self.hub.drain_all,
            lambda: self.outliving.fail(self.requests, self._flushed),
            self._close_windows,
            lambda: self.hub.on_failure.discard(self.fail),
            lambda: self.outliving.once_destroyed(free),
            lambda: None if shared is None else shared.leave(self),
            self._is_over,
        ]

    def _close_windows(self) -> None:
        self.windows_go = False
        with ExitStack() as last_first:
            for window in list(self.windows.values()):
                last_first.callback(window.close)

    def _flushed(self, request: WorkRequest) -> Exception:
        self.hub.in_flight.take(request.wr_id)
        self._remember_failed(request)
        return self._flush_error(request, why=self.outliving.why)

    def _is_over(self) -> None:
        ending = Ending(
            self.loop,
            lambda: self.hub.counters.remove(self),
            self.life.ended.set,
            lambda: self.unretrieved.end(self.name, self.cause),
            *self.life.on_end,
            self._give_back_if_closing,
        )
        self.life.advance(Phase.ENDED)
        self.life.on_end.clear()  # they hold what uses the endpoint
        ending.run()

    async def until_ended(self) -> Exception:
        """Wait until the queue pair is destroyed and every request has completed. Return a copy of
        the cause.

        Raises:
            ForkError: this process is a forked child of the process that made the endpoint.
            EventLoopError: this is another thread, or another event loop.
        """
        self.require_same_process()
        if not self.life.ended.is_set():
            self.require_own_loop()
        await self.life.ended.wait()
        assert self.cause is not None
        return detached(self.cause)

    def close(self) -> None:
        """End the endpoint, and release its resources, in the background. Idempotent."""
        try:
            self._close()
        except MemoryError:
            end(self.loop, self._close)

    def _close(self) -> None:
        # All of it, also if it was called before: that call may have found no memory, and the loop
        # may have ended before it could close this.
        self.life.is_closing = True
        if self.is_inherited:
            self.life.closed.set()  # its resources belong to the parent process
            return
        self.state = ConnectionState.CLOSED
        self._wake_state_waiters()
        self._end_with(ClosedError(f"this side closed {self.name}"))
        if self.loop.has_ended:
            self._destroy()  # the loop runs no more callbacks, such as those of timers
        if self.life.has_ended:
            self._give_back()

    def _give_back_if_closing(self) -> None:
        if self.life.is_closing:
            self._give_back()

    def _give_back(self) -> None:
        if self.life.phase >= Phase.CLOSED:
            return
        ending = Ending(self.loop, *self.life.on_close, self._release)
        self.life.advance(Phase.CLOSED)
        self.life.on_close.clear()
        ending.run()

    def _release(self) -> None:
        self.reactor.unsubscribe(self.identifier)
        regions = list(self.regions.values())
        self.remains.add(regions, [window._window for window in self.windows.values()])
        self._destroy_unused = self._destroy_unused or self.hub.take_unused()
        destroy_unused = self._destroy_unused

        def close() -> None:
            with ExitStack() as last_first:
                last_first.callback(destroy_unused)
                last_first.callback(self._destroy_rest)

        def forget() -> None:
            for region in regions:  # no others: a worker thread can register one in the meantime
                self.regions.pop(id(region), None)

        def leave() -> None:
            if self.domain_state is not None:
                self.domain_state.leave(self)

        forgetting = Ending(self.loop, forget)
        settle = self.outliving.settle
        self.reactor.destroy(close, settle, leave, closed=self.life.closed.set)
        forgetting.run()

    def _destroy_rest(self) -> None:
        """Destroy the identifier, in a worker thread, and before it the regions, and what the
        driver has refused to destroy: windows and the queue pair. Idempotent."""
        with ExitStack() as last_first:
            if self.domain_state is not None:
                last_first.callback(self.domain_state.destroy_private_rest)
            last_first.callback(self.identifier.close)
            if self.outliving.exists:
                last_first.callback(self.outliving.attempt)
            last_first.callback(self.remains.attempt)

    @property
    def _is_left(self) -> bool:
        """Whether the driver has refused something at its end, which `aclose` tries again."""
        domain = self.domain_state
        return not self.is_inherited and (
            self.outliving.is_left
            or self.remains.is_left
            or not self.identifier.closed
            or self.reactor.is_left
            or (domain is not None and domain.is_private and domain.is_left)
        )

    async def aclose(self) -> None:
        """Close the endpoint and wait for it, which is short, also if the task is cancelled.

        Raises:
            EventLoopError: as in `Reactor.require_here`.
            VerbsCallError: the driver refuses to destroy the queue pair, or to free memory of the
                connection. Call this again later.
            BusyError: as of `Remains.check`.
        """
        is_repeated = False
        if not (self.life.closed.is_set() or self.is_inherited):
            self.reactor.require_here(self, self.close)
        elif self._is_left or self._private_domain_closes:
            await self.reactor.destroy_again(self, self._destroy_rest, self.outliving.settle)
            await self._destroy_private_domain()
            is_repeated = True
        if not self.closes_soon or self.is_inherited:
            self.close()
        await outwait(self.life.closed)
        if not self.is_inherited:
            self.outliving.check()
            await self._check_remains()
            domain = self.domain_state
            if is_repeated and domain is not None and domain.is_private and domain.is_left:
                domain.check()

    async def _check_remains(self) -> None:
        """Raise the driver's refusal if it has refused to free something of the endpoint."""
        if self.remains.is_due:
            await self.reactor.destroy_again(self, self.remains.attempt)
        self.remains.check()

    @property
    def _private_domain_closes(self) -> bool:
        """Whether the end of its private domain, which follows its own, still runs."""
        domain = self.domain_state
        if domain is None or not domain.is_private or self.is_inherited:
            return False
        return not domain.life.closed.is_set()

    async def _destroy_private_domain(self) -> None:
        """Wait for the end of its private domain, and repeat it if something was left there: it may
        have come before the queue pair was destroyed."""
        domain = self.domain_state
        if domain is None or not domain.is_private:
            return
        if not self.loop.has_ended:
            await outwait(domain.life.closed)
        if domain.is_left:
            await self.reactor.destroy_again(self, domain.destroy_private_rest)

    def expect_close(self) -> None:
        """The program has closed what is built on this connection, which closes it in turn once the
        peer has everything: until then it is not one that the program left open."""
        self._is_accounted_for = True

    def end_above(self) -> None:
        """End what is built on this connection, because the event loop ends."""
        if self.on_loop_end is not None:
            self.on_loop_end()

    def left_open(self) -> str:
        """Return its name for the warning that the program did not close it; "" once it has been
        reported, or is being closed, or is expected to be."""
        if self._is_accounted_for or self.life.is_closing:
            return ""
        if self.is_ending_above is not None and self.is_ending_above():
            return ""
        return with_origin(self, self.life.origin)

    def forget(self) -> None:
        """Close an endpoint that the program did not close, with a warning. Works in every thread,
        and after the loop's end."""
        text, self._is_accounted_for = self.left_open(), True
        try:
            if text:
                warn_unclosed(f"unclosed {text}", self, self.life.origin)
        finally:
            if self.loop.has_ended:
                self.reactor.close_elsewhere(self.close)
            else:
                self.loop.call_from_thread(self.close)
