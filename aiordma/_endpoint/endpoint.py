"""The life of a queue pair: its creation, its completions and CM events, the cause of its end, and
its end.

An endpoint ends once, for one cause: you closed it, the peer disconnected, a request failed, or the
device was removed (`causes`). At its end (`_runtime/teardown.py`) it moves the queue pair to the
error state, waits for the device to flush, destroys the queue pair, and then fails every remaining
request with the cause. Only then is memory released. So no buffer is freed while the device can
access it, and no request hangs.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from aiordma._base.call_all import call_all
from aiordma._base.calls import check_positive_errno
from aiordma._base.enums import AsyncEventType, CmEventType, QueuePairType
from aiordma._base.enums import WorkCompletionStatus as Status
from aiordma._base.errors import (
    ClosedError,
    DeviceEventError,
    FlushedError,
    PeerGoneError,
    VerbsCallError,
    completion_error,
    detached,
)
from aiordma._base.options import ConnectionOptions
from aiordma._base.origin import Place
from aiordma._base.process import forked, here
from aiordma._base.socket_address import SocketAddress, address_text, unpack_address
from aiordma._base.states import ENDS_A_REQUEST, ConnectionState
from aiordma._base.system import system
from aiordma._endpoint.causes import (
    Evidence,
    Follows,
    What,
    device_error,
    event_cause,
    ruling,
    silence_error,
)
from aiordma._endpoint.domain_state import DomainState
from aiordma._endpoint.handshake import IN_PROGRESS, Handshake
from aiordma._endpoint.memory import Memory
from aiordma._endpoint.pair import Pair
from aiordma._endpoint.peer_watch import KEEPALIVE, PeerWatch
from aiordma._endpoint.work_queues import Work
from aiordma._loop.event_loop import EventLoop
from aiordma._loop.threads import Calls
from aiordma._native import ArrivalQueue, PooledReceives, call_at_end
from aiordma._requests.request import WorkRequest, fail_all
from aiordma._requests.unretrieved import Unretrieved
from aiordma._runtime.hub import CompletionQueueShare, DeviceHub
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.teardown import Phase, Teardown
from aiordma._runtime.unmanaged_identifier import Unmanaged
from aiordma.verbs import Capacity, RawSharedReceiveQueue
from aiordma.verbs.async_event import QUEUE_PAIR_ERRORS
from aiordma.verbs.identifier import Event, Identifier

logger: logging.Logger = logging.getLogger("aiordma")

FLUSH_CAUSE_SECONDS = 1.0
"""Seconds that an endpoint waits for the peer's disconnect after a flush without a known cause."""

POLL_SECONDS = 0.0001
"""How old the state may be that `Endpoint.poll` leaves. A pool of connections asks all that are
idle at each request."""

_LINGER, _CAUSE, _FLUSHED, _WATCH = "linger", "cause", "flushed", "watch"
"""The names of an endpoint's timers."""

_FLUSH = int(Status.WR_FLUSH_ERR)
_ENDS_OF_HANDSHAKE = frozenset({CmEventType.ESTABLISHED, *ENDS_A_REQUEST})
_ENDED = (ConnectionState.DISCONNECTED, ConnectionState.BROKEN, ConnectionState.CLOSED)


class SharedReceives(Protocol):
    """A shared receive queue, as its endpoints and their connections use it."""

    raw: RawSharedReceiveQueue
    queue: CompletionQueueShare
    """The completion queue of its receives."""
    memory: Memory
    buffers: int
    """The number of pooled receives that it posts."""
    buffer_size: int
    """Bytes of each of these."""

    @property
    def cause(self) -> Exception | None:
        """The cause of its end; None while it works."""

    @property
    def pooled(self) -> PooledReceives:
        """Posts its pooled receives."""

    def fail(self, error: Exception) -> None:
        """End it, and its endpoints, with this error as the cause, unless it has one."""

    def join(self, member: "Endpoint") -> None:
        """Add an endpoint before its queue pair is created, or raise an error."""

    def serve(self, endpoint: "Endpoint", arrivals: ArrivalQueue, connection: Any) -> None:
        """Deliver the connection's messages until the endpoint is closed. Call this before its
        handshake."""

    def delays(self, member: "Endpoint", then: Callable[[], None]) -> bool:
        """Return whether the queue pair, in its error state, must not be destroyed before `then` is
        called, because the device may still complete receives that it consumed."""

    def leave(self, member: "Endpoint") -> None:
        """Remove an endpoint after its queue pair was destroyed and its completions delivered."""

    def keep_for(self, member: "Endpoint", error: Exception) -> None:
        """Remove an endpoint that has leaked, for this error: the queue leaks at its end, too."""


class Endpoint:
    """See the module. A connect or an accept creates it with an identifier that is bound to a
    device. Call `open` before using it, and `aclose` in every case. It owns the identifier."""

    header_parts = 0  # parts of a receive in addition to those of the caller

    def __init__(
        self,
        reactor: Reactor,
        hub: DeviceHub,
        identifier: Identifier | Unmanaged,
        options: ConnectionOptions,
        handshake: Handshake,
        domain: DomainState | None = None,
        peer: SocketAddress | None = None,
        opened_at: Place | None = None,
    ) -> None:
        self.reactor = reactor
        self.hub = hub
        self.loop: EventLoop = hub.loop
        self.identifier = identifier
        self.options = options
        self.handshake = handshake
        self.memory: Memory = Memory(
            hub, domain, self, "connection", lambda: self.teardown.is_closing
        )
        self.peer_address: SocketAddress | None = peer or identifier.peer_address
        """None if there is no single peer, or it is not known."""
        self._local: bytes | None = None
        """This side's address as C has it, once the identifier is being destroyed."""
        self.pair: Pair = Pair(hub, options)
        self.work: Work = Work(self, options, self.memory.domain)
        self.shared_receive: SharedReceives | None = None
        self.calls: Calls = Calls(self.loop, blocks=reactor.blocks)
        """Calls that use the queue pair or the identifier, and delay their destruction."""
        self.evidence: Evidence = Evidence()
        self.teardown: Teardown = Teardown(reactor, self, hub, opened_at)
        hub.counters.add(self.work)

    def __repr__(self) -> str:
        return f"<Connection to {self.peer_address} on {self.device_name}: {self.state.value}>"

    @property
    def local_address(self) -> SocketAddress | None:
        """This side's address, if it has one."""
        return unpack_address(self._local or self.identifier._local())

    @property
    def peer_text(self) -> str | None:
        """The peer's address for messages; None as of `peer_address`."""
        peer = self.peer_address
        return None if peer is None else address_text(peer)

    @property
    def capacity(self) -> Capacity:
        """The sizes of the queue pair."""
        return self.pair.capacity

    @property
    def max_message(self) -> int:
        """Bytes of the longest message."""
        return self.pair.max_message

    @property
    def receive_size(self) -> int:
        """Bytes of each pooled receive for the peer's messages; 0: the program posts its own."""
        shared = self.shared_receive
        if shared is not None:
            return shared.buffer_size if shared.buffers else 0
        return self.options.receive_size if self.options.receive_buffers else 0

    @property
    def device_name(self) -> str:
        """The device's name."""
        return self.hub.context.device_name

    @property
    def trace_labels(self) -> tuple[str, int, str | None]:
        """The device, the queue pair's number and the peer, for a trace. In any thread."""
        return self.device_name, self.pair.number, self.peer_text

    @property
    def log_fields(self) -> dict[str, object]:
        """The same, as fields of log records (`extra=`)."""
        return dict(zip(("device", "qp_num", "peer"), self.trace_labels, strict=True))

    @property
    def name(self) -> str:
        """The endpoint's name in messages."""
        if self.peer_address is None:
            return f"queue pair {self.pair.number:#x} of {self.device_name}"
        return f"the connection to {self.peer_text}"

    # -- creation -------------------------------------------------------------------------------

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
        shared = None
        if shared_receive is not None:
            shared_receive.join(self)
            self.shared_receive = shared_receive
            shared = shared_receive.raw, shared_receive.queue.queue
        await self.pair.reserve(service, self.header_parts, shared)
        await self.calls.run(partial(self.pair.create, self.identifier, self.memory.domain))
        self._open_port()

    def _open_port(self) -> None:
        """Open the port for requests, once there is a queue pair."""
        pair, port = self.pair.raw, self.work.port
        assert pair is not None
        self.hub.pairs[self.pair.number] = self
        sizes = pair._made.cap
        port.open(
            pair.key,
            self.pair.max_message,
            sizes.max_inline_data,
            sizes.max_send_sge,
            sizes.max_recv_sge,
            self.hub.attributes.max_sge_rd,
            self.memory.pool,
        )
        port.has_pooled_receives = bool(self.options.receive_buffers)
        if self.hub.failure is not None:  # meanwhile
            self.fail(self.hub.failure)
        self._update_port()

    # -- the state ------------------------------------------------------------------------------

    @property
    def state(self) -> ConnectionState:
        """The connection's state."""
        return self.handshake.state

    @state.setter
    def state(self, state: ConnectionState) -> None:
        self.handshake.state = state
        self._update_port()

    @property
    def cause(self) -> Exception | None:
        """The cause of its end, once it is ending. It is stored: raise only `detached` copies."""
        return self.teardown.cause

    @property
    def is_sound(self) -> bool:
        """Whether no request has failed."""
        return self.teardown.cause is None and self.evidence.flush is None

    def _update_port(self) -> None:
        port, service, state = self.work.port, self.pair.service, self.handshake.state
        usable = self.pair.raw is not None and self.teardown.cause is None
        port.can_receive = usable and self.shared_receive is None
        port.can_send_datagrams = usable and service is QueuePairType.UD
        port.ready = usable and state not in IN_PROGRESS and service is not QueuePairType.UD

    # -- checks before use ----------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the process that made the endpoint."""
        return self.teardown.process != here.pid

    def require_same_process(self) -> None:
        """Check that the endpoint is not inherited.

        Raises:
            ForkError: this process is a forked child of the process that made the endpoint.
        """
        if self.teardown.process != here.pid:
            raise forked(self.teardown.process, repr(self))

    def require_own_loop(self) -> None:
        """Check that the endpoint's own event loop runs here.

        Raises:
            EventLoopError: this is another thread, or another event loop.
        """
        self.hub.require_here(self)

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
        if self.handshake.state is ConnectionState.CLOSED:
            raise ClosedError(f"{self.name} is closed")
        if self.teardown.cause is not None:
            raise detached(self.teardown.cause)
        self.require_own_loop()
        if self.pair.raw is None:
            raise ClosedError("this connection has no queue pair yet")

    def require_sendable(self) -> None:
        """Check that requests may be posted on the send queue: usable, and connected. Before the
        connection, a device refuses a request, but keeps it in its ring and sends it later."""
        self.require_usable()
        if self.handshake.state in IN_PROGRESS:
            raise ValueError(f"{self!r} is not connected yet: connect it before you send")

    # -- completions (RequestOwner) -------------------------------------------------------------

    def poll(self) -> bool:
        """Deliver the completions and the CM events that there are now, as the event loop does in
        its next turn: for a caller that asks for the state before that. Return False, and do
        nothing, if the loop does not run here. Of several calls within `POLL_SECONDS`, for any
        endpoints of the device, the first one does it for all."""
        if self.is_inherited or not self.loop.is_running_here():
            return False
        now = system.now()
        if now - self.hub.polled > POLL_SECONDS and not self.teardown.has_ended:
            self.hub.polled = now
            self.hub.drain()
            self.reactor.poll_events()
        return True

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """Return the error of a failed completion. The first failure that is not a flush becomes
        the cause of the end, and the `__cause__` of flushes."""
        if self.work.failed_sends is not None:
            self._remember_failed(request)
        status, vendor_err = raw[1], raw[3]
        error: Exception
        if status != _FLUSH:
            error = completion_error(
                status,
                str(request),
                vendor_err=vendor_err,
                qp_num=self.pair.number,
                retries=self.pair.retries,
                peer=self.peer_text,
            )
            self._saw(What.FAILED, error)
            return error
        if self.teardown.cause is None and self.hub.is_iwarp and not self.loop.has_ended:
            # An iWARP device flushes when the peer closes, and the CM event may be pending. (On
            # RoCE the order says who has failed: see _handle_event.)
            self.evidence.polls_events = True
            try:
                self.reactor.poll_events()
            finally:
                self.evidence.polls_events = False
        cause = self.teardown.cause
        is_pooled = self.shared_receive is None and self.work.port.has_pooled_receives
        known = cause or self.evidence.flush
        if known is not None and request.is_receive and is_pooled:
            return known  # no program sees the request
        error = self._flush_error(request, vendor_err)
        if cause is None:
            self._saw(What.FLUSHED, error)
        return error

    def _remember_failed(self, request: WorkRequest) -> None:
        # Without a wr_id it was never posted.
        is_send = not request.is_receive and request.wr_id and request.operation != KEEPALIVE
        if self.work.failed_sends is not None and is_send:
            self.work.failed_sends.append(request)

    def _flush_error(self, request: WorkRequest, vendor_err: int = 0, why: str = "") -> Exception:
        cause = self.cause
        # On iWARP, a local failure completes its request before the flush. So if no cause is known
        # yet, the peer has closed the stream.
        unexplained = cause is None and self.handshake.was_established and self.hub.is_iwarp
        error = completion_error(
            _FLUSH,
            str(request),
            vendor_err=vendor_err,
            qp_num=self.pair.number,
            peer_gone=unexplained or isinstance(cause, PeerGoneError),
            peer=self.peer_text if cause is None else None,  # the cause has it
            why=why,
        )
        error.__cause__ = cause
        return error

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the request's slot. The last flushed request ends the wait for flushes."""
        self.work.ended(request)
        teardown = self.teardown
        if teardown.has_timer(_LINGER) and not request.is_receive:
            self._linger(self.options.linger if self.work.sends.is_in_use else 0)
        if teardown.has_timer(_FLUSHED) and not self.work.requests:
            teardown.set_timer(_FLUSHED, 0, self._destroy_if_due)

    def request_unretrieved(self, request: WorkRequest) -> None:
        """Report a failed request whose error was never retrieved (RequestOwner)."""
        if self.is_inherited:
            return
        reports = self.work.unretrieved
        if not reports:
            reports.append(Unretrieved(self.loop))
        reports[0].add(request)  # the first one: finalizers of two threads may have made one each
        if self.work.has_ended:
            reports[0].end(self.name, self.teardown.cause)

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
            opcode = earlier._completes_as
            earlier._complete((earlier.wr_id, 0, opcode, 0, 0, 0, self.pair.number, *(0,) * 7))

    def post_refused(self, error: int, is_receive: bool) -> None:
        """Raise the error of a post that the device refused. Nothing was posted, nothing is held.

        Raises:
            VerbsCallError: always.
        """
        name = "ibv_post_recv" if is_receive else "ibv_post_send"
        check_positive_errno(error, name, self._explain_post(1))

    def doorbell_failed(self, error: int) -> None:
        """End with an error, because the device could not be notified of a request in its queue,
        and may still execute it."""
        failure = VerbsCallError(error, "ibv_post_send", self._explain_post(1))
        failure.was_taken = True
        self.fail(failure)

    def _explain_post(self, count: int) -> str:
        """Return the sizes and the name of the queue pair, for the error of a refused post."""
        assert self.pair.raw is not None
        return f"{self.pair.raw._explain(count)}, {self.name}"

    # -- for the hub (PairOwner) ----------------------------------------------------------------

    def queue_pair_failed(self, error: DeviceEventError) -> None:
        """End with the device's event for the queue pair."""
        self.fail(device_error(self, error.event))

    def watch(self, now: float) -> None:
        """Look after messages that wait for long."""
        if self.handshake.was_established and self.pair.service is QueuePairType.RC:
            self.work.sends.watch(now)

    # -- CM events, and causes ------------------------------------------------------------------

    def driver_waits(self) -> None:
        """Do not disconnect or destroy the identifier before `driver_returned`: the driver's calls
        wait for the peer's answer (Linux's iw_cm, up to 10 s on siw)."""
        self.handshake.awaits_answer = True
        self.calls.begin()

    def driver_returned(self) -> None:
        """End what `driver_waits` began: the peer has answered, or will not. Idempotent."""
        if self.handshake.awaits_answer:
            self.handshake.awaits_answer = False
            if self.teardown.phase is Phase.FLUSHING:
                self._disconnect()
            self.calls.end()

    @property
    def handle_event(self) -> Callable[[Event], None]:
        """What handles the CM events of the identifier."""
        return partial(self.teardown.step, self._handle_event)

    def _handle_event(self, event: Event) -> None:
        handshake, draining, evidence = self.handshake, self.hub.poller.draining, self.evidence
        before = handshake.state
        if before is ConnectionState.ESTABLISHED and draining and not evidence.polls_events:
            # Another endpoint took the event during a drain. Handle it after the completions of
            # this drain, because one of them may have a more precise cause.
            self.loop.call_later(0, lambda: self.handle_event(event))
            return
        if handshake.awaits_answer and event.type in _ENDS_OF_HANDSHAKE:
            self.driver_returned()
        if event.type is CmEventType.DISCONNECTED and not self.hub.is_iwarp:
            self.hub.drain()  # see below: what was flushed before
        handshake.feed(event)
        if handshake.state is before:
            return
        if handshake.state is ConnectionState.ESTABLISHED:
            self._update_port()
        elif handshake.state in _ENDED:
            what, error = event_cause(self, event)
            if what is What.DISCONNECTED and evidence.flush is not None and not self.hub.is_iwarp:
                # On RoCE, a queue pair that is flushed before the peer disconnects has failed
                # itself: it has refused a request of the peer's.
                what, error = What.REPORTED, evidence.flush
            self._saw(what, error, before=before)

    def _saw(
        self, what: What, error: Exception | None, before: ConnectionState | None = None
    ) -> None:
        """Record what was seen: it may be the cause of the end. `causes` has the table.

        Args:
            what: what was seen.
            error: its error.
            before: the state before it; None: the current one.
        """
        state = self.handshake.state if before is None else before
        follows, is_assumed = ruling(what, state)
        if follows is Follows.NOTHING or error is None:
            return
        if follows is Follows.EXPLAINING:
            self._await_explanation(error)
            return
        replaces = self.evidence.is_assumed and what is What.FAILED
        if self.teardown.cause is None or replaces:
            if what is not What.DISCONNECTED and (replaces or state not in _ENDED):
                self.handshake.state = ConnectionState.BROKEN
            if isinstance(error, DeviceEventError) and error.event in QUEUE_PAIR_ERRORS:
                self.hub.counters.refused_accesses += error.event is AsyncEventType.QP_ACCESS_ERR
                logger.warning("%s", error, extra=self.log_fields)
            # That of an event is of nobody else; another one may be raised.
            self.teardown.cause = error if is_assumed else detached(error)
            self.evidence.is_assumed = is_assumed
            self._update_port()
        self.handshake.wake()
        if not is_assumed:
            self.teardown.end(error)
            return
        self.handshake.was_established = True
        # Deliver the completions from before the event first. (If this runs during a drain, after a
        # flush, the failure can still follow in that drain.)
        self.hub.drain()
        if not (self.hub.poller.draining or self.hub.poller.more):
            self.evidence.is_assumed = False
        lingers = follows is Follows.LINGERING and not self.hub.is_iwarp
        if lingers and self.work.sends.is_in_use:
            # The acknowledgement of a send can arrive after the CM's message: do not flush it now.
            # (Not on iWARP, where both arrive in one TCP stream.)
            self.work.port.notifies_owner = True
            self._linger(self.options.linger)
        else:
            self.teardown.end(error)

    def _await_explanation(self, error: Exception) -> None:
        """Fail with a flush, unless an event explains it within FLUSH_CAUSE_SECONDS."""

        def fail() -> None:
            if self.teardown.cause is None:  # no CM event has explained the flush
                self.fail(error)

        if not self.teardown.has_timer(_CAUSE):
            self.evidence.flush = error
            events = self.reactor.after_events
            self.teardown.set_timer(_CAUSE, FLUSH_CAUSE_SECONDS, lambda: events(fail))

    def _linger(self, seconds: float) -> None:
        """End after so many seconds from now."""
        cause = self.cause
        assert cause is not None
        self.teardown.set_timer(_LINGER, seconds, partial(self.teardown.end, cause))

    def fail(self, error: Exception) -> None:
        """End as broken, with this error as the cause, unless there is a cause already."""
        self._saw(What.REPORTED, error)

    def established(self) -> None:
        """Begin to watch the peer, once the queue pair is connected."""
        is_live = self.teardown.phase is Phase.OPEN and self.pair.raw is not None
        if not is_live or self.pair.service is not QueuePairType.RC:
            return  # if it has disconnected already, there may be messages to receive
        keepalive, silence = self.options.keepalive, None
        if self.hub.leaves_silence_to_tcp:
            ours, peer = self.local_address, self.peer_address
            if ours and peer:
                silence = (ours, peer), self.pair.peer_timeout
        if keepalive is not None or silence is not None:
            watch = PeerWatch(
                self.loop,
                self.work.sends,
                self.work.requests,
                is_reserved=self.pair.has_probe_entry,
                keepalive=keepalive,
                silence=silence,
                on_silence=lambda: self.fail(silence_error(self)),
            )
            self.teardown.hold_timer(_WATCH, watch)

    # -- the end (Owner) ------------------------------------------------------------------------

    def _closing(self) -> Exception:
        self.handshake.state = ConnectionState.CLOSED
        self.handshake.wake()
        return self.teardown.cause or ClosedError(f"this side closed {self.name}")

    def _flush(self) -> None:
        """Move the queue pair to the error state, and fail the tasks that wait for a slot."""
        cause, teardown = self.teardown.cause, self.teardown
        assert cause is not None
        self._update_port()
        self.work.port.flushed = cause
        if not self.handshake.awaits_answer:
            self._disconnect()
        if self.pair.raw is not None and (
            self.pair.service is not QueuePairType.RC or isinstance(self.identifier, Unmanaged)
        ):
            # The disconnect does not move these. Otherwise they would flush only when destroyed.
            self.pair.fail()
        self.work.sends.slots.fail(cause)
        if self.pair.raw is None:
            self._destroy_if_due()
            return
        # Later, because this can run during a post, in the program's code (a finalizer, an
        # __index__), and the post still uses the queue pair: after the drain that has seen the
        # cause, or in the loop's next turn.
        if teardown.is_hurried:
            self._hurry()
        elif not call_at_end(partial(teardown.step, self._hurry)):
            teardown.set_timer(_FLUSHED, 0, self._hurry)

    def _hurry(self) -> None:
        if self.teardown.phase is not Phase.FLUSHING:
            return  # it was closed in the meantime
        self.hub.drain()  # what the device has flushed by now
        # If it was not established, there are only receives, which are not flushed.
        waits = self.work.requests and self.handshake.was_established and not self.loop.has_ended
        if waits or self.hub.poller.draining:
            self.work.port.notifies_owner = True
            timeout = self.options.flush_timeout if waits else 0
            self.teardown.set_timer(_FLUSHED, timeout, self._destroy_if_due)
        else:
            self._destroy_if_due()

    def _disconnect(self) -> None:
        try:
            self.identifier.disconnect()
        except VerbsCallError as error:
            # Not connected yet, or not any more.
            logger.debug("disconnecting: %s", error, extra=self.log_fields)

    def _destroy_if_due(self) -> None:
        shared = self.shared_receive
        if self.calls.delays(self._destroy_if_due):
            return
        waits = shared is not None and self.handshake.was_established and not self.loop.has_ended
        if waits and shared is not None and shared.delays(self, self._destroy_if_due):
            return
        if self.pair.raw is not None:
            self.hub.forget_queue_pair(self.pair.number)
        self.reactor.unsubscribe(self.identifier)
        self._local = self._local or self.identifier._local()
        self.teardown.destroy()

    def _destroy(self) -> None:
        try:
            windows = self.pair.windows
            if windows:  # first: in rxe, destroying a queue pair waits for its bound windows
                call_all([window._free for window in list(windows.values())])
            if self.pair.raw is not None:
                self.pair.raw.close()
        finally:
            self.identifier.close()  # and with it the queue pair

    def _destroyed(self) -> None:
        # Without open requests, no completion is left, except of a shared receive queue's.
        if self.work.requests or self.shared_receive is not None:
            self.hub.drain_all()
            fail_all(self.work.requests, self._fail_with_flush)
        while self.pair.windows:
            self.pair.windows.popitem()[1]._freed()
        self.pair.free()
        if self.shared_receive is not None:
            self.shared_receive.leave(self)
        self.hub.counters.remove(self.work)
        self.work.has_ended = True  # before the look at its reports
        if self.work.unretrieved:
            self.work.unretrieved[0].end(self.name, self.teardown.cause)

    def _fail_with_flush(self, request: WorkRequest, why: str = "") -> Exception:
        self.hub.in_flight.take(request.wr_id)
        self._remember_failed(request)
        return self._flush_error(request, why=why)

    def _abandon(self, why: str) -> None:
        self._update_port()
        if self.handshake.state not in _ENDED:
            self.handshake.state = ConnectionState.BROKEN
        self.handshake.wake()
        refusal = self.teardown.refusal
        assert refusal is not None
        if self.shared_receive is not None:
            self.shared_receive.keep_for(self, refusal)
        self.memory.keep_for(refusal)
        self.work.sends.slots.fail(self.cause or ClosedError(why))
        for request in self.work.requests:
            request._keep_memory()
        fail_all(self.work.requests, lambda request: self._fail_with_flush(request, why))

    def _release(self) -> Callable[[], object] | None:
        return self.memory.release(self.hub)

    def _released(self) -> None:
        self.memory.leave()

    async def until_ended(self) -> Exception:
        """Wait until the queue pair is destroyed and every request has completed. Return a copy of
        the cause.

        Raises:
            ForkError: this process is a forked child of the process that made the endpoint.
            EventLoopError: this is another thread, or another event loop.
        """
        self.require_same_process()
        if not self.teardown.has_ended:
            self.require_own_loop()
        await self.teardown.ended.wait()
        cause = self.cause
        assert cause is not None
        return detached(cause)
