"""A peer's request to connect, until a task of the listener or the program accepts or rejects it.
The program answers by the public ConnectionRequest.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial

from aiordma._base.connection_parameters import IN_ACCEPT, ConnectionParameters, parameters_to_c
from aiordma._base.errors import (
    ClosedError,
    DisconnectedError,
    RdmaConnectionError,
    RdmaError,
    VerbsCallError,
)
from aiordma._base.options import ConnectionOptions
from aiordma._base.origin import Place, origin
from aiordma._base.process import here, require_same_process
from aiordma._base.socket_address import SocketAddress, address_text
from aiordma._base.states import ENDS_A_REQUEST, ConnectionState
from aiordma._base.time_limit import TimeLimit
from aiordma._connection.announcement import announcement, read_announcement
from aiordma._connection.connection import Connection
from aiordma._connection.domain import DomainChoice
from aiordma._connection.handshake_errors import failed_event, failed_handshake
from aiordma._connection.listener_receives import ListenerReceives
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.handshake import IN_PROGRESS, Handshake
from aiordma._loop.event_loop import require_here
from aiordma._loop.threads import ACCEPTS, Once, outwait
from aiordma._runtime.reactor import Reactor
from aiordma._runtime.teardown import Phase
from aiordma.verbs.identifier import Event, Identifier

logger: logging.Logger = logging.getLogger("aiordma")

_warned: set[str] = set()
"""The warnings that this process has already logged; each is logged once."""


class IncomingRequest:
    """See the module."""

    def __init__(
        self,
        reactor: Reactor,
        options: ConnectionOptions,
        accept_timeout: float,
        receives: ListenerReceives,
        identifier: Identifier,
        event: Event,
        tally: Counter[str],
        origin: Place,
    ) -> None:
        self._process = here.pid
        self._reactor = reactor
        self.options: ConnectionOptions = options
        self._accept_timeout = accept_timeout
        self.receives: ListenerReceives = receives
        self.identifier: Identifier = identifier
        self.event: Event = event
        """The event that brought the request."""
        self.withdrawal: Event | None = None
        self.was_answered: bool = False
        self.is_of_program: bool = False
        """Whether the program answers it, and not a task of the listener."""
        self.origin: Place = origin
        self._abandoned = False
        self._endpoint: Endpoint | None = None
        self._accepting: Endpoint | None = None
        self._tally = tally
        self._closed: Once | None = None
        self._has_left = False
        reactor.enter(self)
        self.private_data: bytes
        self.private_data, self._max_sent = read_announcement(event.private_data)
        self.peer_address: SocketAddress | None = identifier.peer_address

    def __repr__(self) -> str:
        return f"<ConnectionRequest from {self.peer_address}>"

    @property
    def operation(self) -> str:
        """What is under way, for messages."""
        return f"accept {self.peer_address}"

    @property
    def waits_for_peer(self) -> bool:
        """Whether the handshake waits for the peer, or has failed. Otherwise this side works on it:
        it makes the queue pair, or is about to return the established connection."""
        endpoint = self._endpoint
        if endpoint is None:
            return self.withdrawal is not None
        if endpoint.state is ConnectionState.ACCEPTING and endpoint.teardown.phase is Phase.OPEN:
            return self._accepting is not None
        return endpoint.state is not ConnectionState.ESTABLISHED

    def handle_event(self, event: Event) -> None:
        """Handle a CM event of the identifier: the peer can withdraw before the answer."""
        if event.type in ENDS_A_REQUEST:
            self.withdrawal = event

    def _answer(self) -> None:
        if self.is_of_program:
            require_same_process(self._process, self)
            require_here(self._reactor.loop, self)
        if self.was_answered:
            raise ClosedError("this connection request has been answered")
        self.was_answered = True

    # -- accepting --------------------------------------------------------------------------------

    async def accept(
        self,
        private_data: bytes,
        options: ConnectionOptions | None = None,
        choice: DomainChoice | None = None,
    ) -> Connection:
        """Accept the peer. See `ConnectionRequest.accept`.

        Args:
            private_data: checked.
            options, choice: None: the listener's.
        """
        connection = await self.prepare(options, choice)
        await connection._establish(private_data)
        return connection

    async def prepare(
        self, options: ConnectionOptions | None = None, choice: DomainChoice | None = None
    ) -> Connection:
        """Create the connection. See `ConnectionRequest.prepare`."""
        chosen, choice = options or self.options, choice or self.receives.domain
        self._answer()
        identifier, reactor = self.identifier, self._reactor
        try:
            self._require_wanted()
            hub = await reactor.hub(identifier)
            domain = await choice.on(reactor, hub, ACCEPTS)
        except BaseException:
            self._tally["failed"] += 1
            self._drop()
            await outwait(self.closed)
            raise
        # From here the endpoint owns the identifier.
        handshake = Handshake(reactor.loop, ConnectionState.ACCEPTING)
        opened_at = (origin() if self.is_of_program else None) or self.origin
        endpoint = Endpoint(
            *(reactor, hub, identifier, chosen, handshake, domain, self.peer_address, opened_at)
        )
        self._leave()
        endpoint.calls.lane = ACCEPTS
        self._endpoint = endpoint
        reactor.subscribe(identifier, endpoint.handle_event)
        try:
            self._require_wanted()
            if not hub.leaves_silence_to_tcp:
                identifier.set_ack_timeout(chosen.ack_timeout)
            shared = await self.receives.on(endpoint, domain)
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
            if self.is_of_program:  # else the task is the listener's, which `abandon` cancels
                await endpoint.loop.checkpoint()
            if endpoint.handshake.state is not ConnectionState.ACCEPTING:
                raise failed_handshake(self.operation, endpoint)
            self._require_wanted()
            self._accepting = endpoint
            if self._max_sent is not None:
                endpoint.work.port.max_sent = self._max_sent
                private_data = private_data or announcement(endpoint)
            if endpoint.hub.is_iwarp:
                # The devices negotiate the depths themselves (RFC 6581).
                self.identifier._accept(parameters_to_c(endpoint.options, private_data))
            else:
                self._warn_of_no_retries(endpoint.options)
                offered = self._limited_to_request(endpoint, private_data)
                self.identifier._accept_with_own_retries(offered, endpoint.options.min_rnr_timer)
            self._reactor.poll_events(endpoint.handshake)  # its event may be there already
            handshake, limit = endpoint.handshake, TimeLimit(self._accept_timeout)
            while handshake.state in IN_PROGRESS:
                await handshake.change(limit)
            # It may have ended again by then, with messages to receive.
            if not handshake.was_established:
                raise failed_handshake(self.operation, endpoint)
            endpoint.established()
        except BaseException as error:
            await self._undo(endpoint, error)
            if isinstance(error, TimeoutError) and not isinstance(error, RdmaError):
                raise DisconnectedError(
                    f"{self.operation}: the peer did not finish within {self._accept_timeout:g} s"
                ) from None
            raise
        self._tally["established"] += 1
        if logger.isEnabledFor(logging.DEBUG):
            peer, device, fields = self.peer_address, endpoint.device_name, endpoint.log_fields
            logger.debug("accepted %s through the device %s", peer, device, extra=fields)
        return self.private_data

    async def _undo(self, endpoint: Endpoint, error: BaseException) -> None:
        """Close the endpoint of an accept that has failed. Before the answer, this rejects the
        peer."""
        self._tally["failed"] += 1
        await endpoint.teardown.aclose()
        if isinstance(error, VerbsCallError):
            # Calls on an identifier whose peer has withdrawn fail with various errors.
            raise RdmaConnectionError._of_call(self.operation, error) from error

    def _require_wanted(self) -> None:
        if self._abandoned:
            raise ClosedError(f"{self.operation}: the listener gave it up")
        if self.withdrawal is not None:
            raise failed_event(self.operation, self.withdrawal)

    def _warn_of_no_retries(self, chosen: ConnectionOptions) -> None:
        if self.event.retry_count or _warned:
            return
        _warned.add("retry_count=0")
        logger.warning(
            "the peer %s connects with retry_count=0: its device ends the connection over the "
            "first packet that is lost or late. Ours retransmits (retry_count=%d)",
            self.peer_address,
            chosen.retry_count,
            extra={"peer": address_text(self.peer_address)},
        )

    def _limited_to_request(self, endpoint: Endpoint, private_data: bytes) -> ConnectionParameters:
        # At most what the peer offers, and the device has. The peer's numbers are from this side's
        # viewpoint (man rdma_accept).
        event, chosen, device = self.event, endpoint.options, endpoint.hub.attributes
        return ConnectionParameters(
            private_data,
            min(chosen.responder_resources, event.responder_resources, device.max_qp_rd_atom),
            min(chosen.initiator_depth, event.initiator_depth, device.max_qp_init_rd_atom),
            chosen.retry_count,
            chosen.rnr_retry_count,
            endpoint.pair.number,
            endpoint.shared_receive is not None,
        )

    # -- rejecting --------------------------------------------------------------------------------

    async def reject(self, private_data: bytes = b"") -> None:
        """Reject the peer. See `ConnectionRequest.reject`."""
        self._answer()
        self._tally["rejected"] += 1
        self._refuse(private_data)
        self._drop()
        await outwait(self.closed)

    async def aclose(self) -> None:
        """Reject the peer, if it was not answered. See `ConnectionRequest.aclose`."""
        if not self.was_answered:
            self._reactor.require_here(self, self.close)
            await self.reject()

    # -- at the loop's end (Closable) -------------------------------------------------------------

    hub = None  # until its endpoint has one

    @property
    def closed(self) -> Once:
        """Set once it is answered."""
        if self._closed is None:
            self._closed = Once(self._reactor.loop, is_set=self._has_left)
        return self._closed

    def close(self) -> None:
        """Start `aclose` in the background, also outside of the event loop."""
        if self._process != here.pid:
            self.closed.set()  # the request belongs to the parent process
        elif not self.was_answered:
            self.start_rejecting(lambda: None)
            self._tally["rejected"] += 1

    def end_with_loop(self) -> None:
        """Close it."""
        self.close()

    def left_open(self) -> str:
        """Return its name for the warning that it was not answered; "" for no warning."""
        is_left = self.is_of_program and not self.was_answered and self._process == here.pid
        return repr(self) if is_left else ""

    def _leave(self) -> None:
        """Leave the end to an endpoint, or to nobody."""
        self._reactor.leave(self)
        self._has_left = True
        if self._closed is not None:
            self._closed.set()

    def start_rejecting(self, then: Callable[[], object], private_data: bytes = b"") -> None:
        """Start `reject` in the background, also outside of the event loop. Then call `then`. The
        request must not have been answered."""
        self.was_answered = True
        self._refuse(private_data)
        self._drop(then)

    def _drop(self, then: Callable[[], object] = lambda: None) -> None:
        """Destroy the identifier in the background, and then call `then`."""

        def dropped() -> None:
            self._leave()
            then()

        self._reactor.drop(self.identifier, dropped)

    def abandon(self) -> None:
        """Let the `accept` that runs in another task raise ClosedError. If it has returned or is
        about to return, close its connection in the background."""
        self._abandoned = True
        if self._accepting is not None:
            self._accepting.teardown.close()

    def _refuse(self, private_data: bytes) -> None:
        try:
            self.identifier.reject(private_data)
        except VerbsCallError as error:
            logger.debug("rejecting %s: %s", self.peer_address, error)  # the peer has withdrawn

    def __del__(self) -> None:
        if not getattr(self, "was_answered", True) and self._process == here.pid:
            warnings.warn(f"unanswered {self!r}", ResourceWarning, stacklevel=1, source=self)
