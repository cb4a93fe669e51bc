"""A connection request that a listener received, until the program accepts or rejects it."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Unpack

from aiordma._base.connection_parameters import (
    IN_ACCEPT,
    MAX_REJECT_PRIVATE_DATA,
    ConnectionParameters,
    Ece,
    check_private_data,
    parameters_to_c,
)
from aiordma._base.errors import (
    ClosedError,
    DisconnectedError,
    RdmaConnectionError,
    RdmaError,
    VerbsCallError,
)
from aiordma._base.opening import opens
from aiordma._base.options import (
    ConnectionKeywords,
    ConnectionOptions,
)
from aiordma._base.origin import Place
from aiordma._base.process import here, require_same_process
from aiordma._base.socket_address import SocketAddress, address_text
from aiordma._base.states import ENDS_A_REQUEST, ConnectionState
from aiordma._base.time_limit import TimeLimit
from aiordma._connection.announcement import announcement, read_announcement
from aiordma._connection.connection import Connection
from aiordma._connection.connector import failed_event, failed_handshake
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._connection.listener_receives import ListenerReceives
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.handshake import Handshake
from aiordma._loop.event_loop import require_here
from aiordma._loop.threads import ACCEPTS, Once, outwait
from aiordma._runtime.reactor import AtLoopEnd, Reactor
from aiordma._runtime.teardown import Phase
from aiordma.verbs.identifier import Event, Identifier

__all__ = ("ConnectionRequest", "RequestTally")

logger: logging.Logger = logging.getLogger("aiordma")

_warned: set[str] = set()
"""The warnings that this process has already logged; each is logged once."""


class RequestTally:
    """Counts the answers to a listener's connection requests."""

    __slots__ = ("established", "failed", "rejected")

    def __init__(self) -> None:
        self.established: int = 0
        self.failed: int = 0
        self.rejected: int = 0


class ConnectionRequest:
    """A peer that wants to connect: `accept`, `prepare` or `reject` it, once."""

    def __init__(
        self,
        reactor: Reactor,
        options: ConnectionOptions,
        accept_timeout: float,
        receives: ListenerReceives,
        identifier: Identifier,
        event: Event,
        tally: RequestTally,
        origin: Place,
    ) -> None:
        self._process = here.pid
        self._reactor = reactor
        self._options = options
        self._accept_timeout = accept_timeout
        self._receives = receives
        self._identifier = identifier
        self._event = event
        self._gone: Event | None = None
        self._answered = False
        self._abandoned = False
        self._endpoint: Endpoint | None = None
        self._accepting: Endpoint | None = None
        self._origin = origin
        self._was_handed_out = False  # by the program
        self._tally = tally
        self._at_end = AtLoopEnd(self._left_open, self._close, Once(reactor.loop))
        reactor.enter(self._at_end)
        private_data, self._max_sent = read_announcement(event.private_data)
        self.private_data: bytes = private_data
        """The private data that the peer sent with the request; RDMA pads it with zeros."""
        self.peer_address: SocketAddress | None = identifier.peer_address
        """The peer's (host, port)."""

    def __repr__(self) -> str:
        return f"<ConnectionRequest from {self.peer_address}>"

    @property
    def parameters(self) -> ConnectionParameters:
        """The parameters of the peer's request, from this side's viewpoint.

        - `responder_resources`: how many READs and atomics the peer wants to have outstanding here.
        - `initiator_depth`: how many the peer permits this side to have outstanding there.
        - `rnr_retry_count`: how often this side repeats a message that finds no receive posted.
        - `retry_count`: how often this side should retransmit. This side's option of the same name
          is used instead.

        iWARP carries neither the retry counts nor a queue pair number: they are 0."""
        event = self._event
        return ConnectionParameters(
            private_data=self.private_data,
            responder_resources=event.responder_resources,
            initiator_depth=event.initiator_depth,
            retry_count=event.retry_count,
            rnr_retry_count=event.rnr_retry_count,
            qp_num=event.qp_num,
            shared_receive=event.shared_receive,
            flow_control=event.flow_control,
        )

    @property
    def ece(self) -> Ece:
        """The options of enhanced connection establishment that the peer offers; zeros if it offers
        none. Available until the request is answered.

        Raises:
            NotSupportedError: the device's handshake (iWARP), or librdmacm, does not support them.
            ClosedError: the request has been answered already.
        """
        if self._answered:
            raise ClosedError("this connection request has been answered")
        return self._identifier.remote_ece

    @property
    def is_gone(self) -> bool:
        """Whether the peer has withdrawn the request. The kernel's iWARP devices do not report
        it."""
        return self._gone is not None

    @property
    def was_answered(self) -> bool:
        """Whether the request was accepted or rejected. True from the start of the answer."""
        return self._answered

    @property
    def _waits_for_peer(self) -> bool:
        """Whether the handshake waits for the peer, or has failed. Otherwise this side works on it:
        it makes the queue pair, or is about to return the established connection."""
        endpoint = self._endpoint
        if endpoint is None:
            return self.is_gone
        if endpoint.state is ConnectionState.ACCEPTING and endpoint.teardown.phase is Phase.OPEN:
            return self._accepting is not None
        return endpoint.state is not ConnectionState.ESTABLISHED

    def _handle_event(self, event: Event) -> None:
        """Handle a CM event of the identifier: the peer can withdraw before the answer."""
        if event.type in ENDS_A_REQUEST:
            self._gone = event

    def _answer(self) -> None:
        if self._was_handed_out:  # else a task of the listener calls this
            require_same_process(self._process, self)
            require_here(self._reactor.loop, self)
        if self._answered:
            raise ClosedError("this connection request has been answered")
        self._answered = True

    @opens
    async def accept(
        self,
        *,
        private_data: bytes = b"",
        domain: DomainArgument = None,
        options: ConnectionOptions | None = None,
        **keywords: Unpack[ConnectionKeywords],
    ) -> Connection:
        """Accept the peer, and return the established connection.

        Args:
            private_data: up to 196 bytes for the peer's program.
            domain: as of `connect`, for this peer; None: the listener's.
            options: in place of the listener's (except `tos`, which cannot change any more); None:
                the listener's.
            receive_buffers, receive_size, peer_timeout, keepalive: in place of those of `options`.

        Raises:
            RdmaConnectionError: the peer has withdrawn or reset its connection, or did not finish
                the handshake in time.
            ClosedError: the request has been answered already, the listener ended its handshake, or
                its shared receive queue was closed.
            NotSupportedError: the listener has `shared_receive`, and the device has no shared
                receive queues.
            TypeError, ValueError: an argument is invalid, or exceeds the device's limit; the
                message names it.
            VerbsCallError: no thread could be started, or no file descriptors are left.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the peer is rejected or disconnected, and nothing is left.

        See: man rdma_accept.
        """
        private_data = check_private_data(private_data, *IN_ACCEPT, "accept")
        accept = ConnectionRequest.accept
        chosen = ConnectionOptions._chosen(accept, options, keywords, self._options)
        return await self._open(private_data, chosen, self._choice(domain, "accept"))

    async def _open(
        self,
        private_data: bytes,
        options: ConnectionOptions | None = None,
        choice: DomainChoice | None = None,
    ) -> Connection:
        """Do the work of `accept`. None: the listener's options and domain."""
        connection = await self._prepare(options or self._options, choice or self._receives.domain)
        await connection._establish(private_data)
        return connection

    @opens
    async def prepare(
        self,
        *,
        domain: DomainArgument = None,
        options: ConnectionOptions | None = None,
        **keywords: Unpack[ConnectionKeywords],
    ) -> Connection:
        """Create the connection with its queue pair, and do not accept yet. Post receives on it,
        then accept with its `establish`.

        A program that posts its receives itself (receive_buffers=0) needs this if the peer sends as
        soon as it is connected. On devices without RNR (siw), a message that arrives before a
        receive is posted ends the connection.

            async with request.prepare(receive_buffers=0) as connection:
                receives = [connection.post_recv(buffer) for buffer in buffers]
                await connection.establish()

        Closing the connection before `establish` rejects the peer. Until the answer the peer waits,
        at most until its own connect times out.

        Args:
            domain, options, receive_buffers, receive_size, peer_timeout, keepalive: as of `accept`.

        Raises: as `ConnectionRequest.accept`.

        Cancellation: the peer is rejected, and nothing is left.
        """
        prepare = ConnectionRequest.prepare
        chosen = ConnectionOptions._chosen(prepare, options, keywords, self._options)
        return await self._prepare(chosen, self._choice(domain, "prepare"))

    def _choice(self, domain: DomainArgument, call: str) -> DomainChoice:
        receives = self._receives
        return receives.domain if domain is None else receives.choice(domain, call)

    async def _prepare(self, chosen: ConnectionOptions, choice: DomainChoice) -> Connection:
        self._answer()
        identifier, reactor = self._identifier, self._reactor
        try:
            self._require_wanted()
            hub = await reactor.hub(identifier)
            domain = await choice.on(reactor, hub, ACCEPTS)
        except BaseException:
            self._tally.failed += 1
            self._drop()
            await outwait(self._at_end.closed)
            raise
        # From here the endpoint owns the identifier.
        handshake = Handshake(reactor.loop, ConnectionState.ACCEPTING)
        endpoint = Endpoint(reactor, hub, identifier, chosen, handshake, domain)
        reactor.leave(self._at_end)
        self._at_end.closed.set()
        endpoint.calls.lane = ACCEPTS
        self._endpoint = endpoint
        endpoint.teardown.origin = endpoint.teardown.origin or self._origin
        reactor.subscribe(identifier, endpoint.handle_event)
        try:
            self._require_wanted()
            identifier.set_ack_timeout(chosen.ack_timeout)
            shared = await self._receives.on(endpoint, domain)
            await endpoint.open(shared_receive=shared)
            establish = partial(self._accept, endpoint)
            connection = Connection(endpoint, establish, IN_ACCEPT)
            connection._post_pooled_receives()
            return connection
        except BaseException as error:
            await self._undo(endpoint, error)
            raise

    async def _accept(self, endpoint: Endpoint, private_data: bytes) -> bytes:
        try:
            if self._was_handed_out:  # else the task is the listener's, which `_abandon` cancels
                await endpoint.loop.checkpoint()
            if endpoint.state is not ConnectionState.ACCEPTING:
                raise failed_handshake(self._operation, endpoint)
            self._require_wanted()
            self._accepting = endpoint
            if self._max_sent is not None:
                endpoint.work.port.max_sent = self._max_sent
                private_data = private_data or announcement(endpoint)
            if endpoint.hub.is_iwarp:
                # The devices negotiate the depths themselves (RFC 6581), and TCP retransmits.
                self._identifier._accept(parameters_to_c(endpoint.options, private_data))
            else:
                self._warn_of_no_retries(endpoint.options)
                offered = self._limited_to_request(endpoint.options, private_data)
                self._identifier._accept_with_own_retries(offered)
            self._reactor.poll_events(endpoint.handshake)  # its event may be there already
            if not await endpoint.connected(TimeLimit(self._accept_timeout)):
                raise failed_handshake(self._operation, endpoint)
            endpoint.established()
        except BaseException as error:
            await self._undo(endpoint, error)
            if isinstance(error, TimeoutError) and not isinstance(error, RdmaError):
                raise DisconnectedError(
                    f"{self._operation}: the peer did not finish within {self._accept_timeout:g} s"
                ) from None
            raise
        self._tally.established += 1
        if logger.isEnabledFor(logging.DEBUG):
            peer, device, fields = self.peer_address, endpoint.device_name, endpoint.log_fields
            logger.debug("accepted %s through the device %s", peer, device, extra=fields)
        return self.private_data

    async def _undo(self, endpoint: Endpoint, error: BaseException) -> None:
        """Close the endpoint of an accept that has failed. Before the answer, this rejects the
        peer."""
        self._tally.failed += 1
        await endpoint.aclose()
        if isinstance(error, VerbsCallError):
            # Calls on an identifier whose peer has withdrawn fail with various errors.
            raise RdmaConnectionError._of_call(self._operation, error) from error

    @property
    def _operation(self) -> str:
        return f"accept {self.peer_address}"

    def _require_wanted(self) -> None:
        if self._abandoned:
            raise ClosedError(f"{self._operation}: the listener gave it up")
        if self._gone is not None:
            raise failed_event(self._operation, self._gone)

    def _warn_of_no_retries(self, chosen: ConnectionOptions) -> None:
        if self._event.retry_count or _warned:
            return
        _warned.add("retry_count=0")
        logger.warning(
            "the peer %s connects with retry_count=0: its device ends the connection over the "
            "first packet that is lost or late. Ours retransmits (retry_count=%d)",
            self.peer_address,
            chosen.retry_count,
            extra={"peer": address_text(self.peer_address)},
        )

    def _limited_to_request(
        self, chosen: ConnectionOptions, private_data: bytes
    ) -> ConnectionParameters:
        # At most what the peer offers. Its numbers are from this side's viewpoint (man
        # rdma_accept).
        event = self._event
        return ConnectionParameters(
            private_data=private_data,
            responder_resources=min(chosen.responder_resources, event.responder_resources),
            initiator_depth=min(chosen.initiator_depth, event.initiator_depth),
            retry_count=chosen.retry_count,
            rnr_retry_count=chosen.rnr_retry_count,
        )

    async def reject(self, private_data: bytes = b"") -> None:
        """Reject the peer: its connect raises RejectedError.

        Args:
            private_data: up to 148 bytes for the peer's program.

        Raises:
            TypeError, ValueError: the private data is not bytes, or too long; the request can still
                be answered.
            ClosedError: the request has been answered already.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the peer is still rejected, and nothing is left.

        See: man rdma_reject.
        """
        private_data = check_private_data(
            private_data, MAX_REJECT_PRIVATE_DATA, "a reject", "reject"
        )
        self._answer()
        self._tally.rejected += 1
        self._refuse(private_data)
        self._drop()
        await outwait(self._at_end.closed)

    async def aclose(self) -> None:
        """Reject the peer, if the request has not been answered. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                request.
            ForkError: called in a forked child.

        Cancellation: as `ConnectionRequest.reject`.
        """
        if not self._answered:
            self._reactor.require_here(self, self._close)
            await self.reject()

    def _close(self) -> None:
        """Start `aclose` in the background, also outside of the event loop."""
        if self._process != here.pid:
            self._at_end.closed.set()  # the request belongs to the parent process
        elif not self._answered:
            self._start_rejecting(lambda: None)
            self._tally.rejected += 1

    def _left_open(self) -> str:
        """Return the name for the reactor's warning that the request was not answered; empty for no
        warning."""
        is_left = self._was_handed_out and not self._answered and self._process == here.pid
        return repr(self) if is_left else ""

    def _start_rejecting(self, then: Callable[[], object], private_data: bytes = b"") -> None:
        """Start `reject` in the background, also outside of the event loop. Then call `then`. The
        request must not have been answered."""
        self._answered = True
        self._refuse(private_data)
        self._drop(then)

    def _drop(self, then: Callable[[], object] = lambda: None) -> None:
        """Destroy the identifier in the background, and then call `then`."""

        def dropped() -> None:
            self._reactor.leave(self._at_end)
            self._at_end.closed.set()
            then()

        self._reactor.drop(self._identifier, dropped)

    def _abandon(self) -> None:
        """Let the `accept` that runs in another task raise ClosedError. If it has returned or is
        about to return, close its connection in the background."""
        self._abandoned = True
        if self._accepting is not None:
            self._accepting.close()

    def _refuse(self, private_data: bytes) -> None:
        try:
            self._identifier.reject(private_data)
        except VerbsCallError as error:
            logger.debug("rejecting %s: %s", self.peer_address, error)  # the peer has withdrawn

    def __del__(self) -> None:
        if not getattr(self, "_answered", True) and self._process == here.pid:
            warnings.warn(f"unanswered {self!r}", ResourceWarning, stacklevel=1, source=self)
