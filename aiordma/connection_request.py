"""A peer that wants to connect, until it is answered."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import anyio

from aiordma.connection import Connection
from aiordma.connection_parameters import (
    MAX_ACCEPT_PRIVATE_DATA,
    MAX_REJECT_PRIVATE_DATA,
    check_private_data,
)
from aiordma.connector import failed_event, parameters
from aiordma.endpoint import Endpoint
from aiordma.errors import ClosedError, DisconnectedError, RdmaConnectionError, VerbsCallError
from aiordma.hub import DeviceHub
from aiordma.options import ConnectionKeywords, ConnectionOptions
from aiordma.process import here, require_same_process
from aiordma.rdmacm import Event, Identifier
from aiordma.reactor import Reactor
from aiordma.shared_source import ListenerReceives
from aiordma.socket_address import SocketAddress
from aiordma.states import ENDS_A_REQUEST, ConnectionState
from aiordma.threads import outwait

__all__ = ("ConnectionRequest",)

logger = logging.getLogger("aiordma")


class ConnectionRequest:
    """A peer that wants to connect: `accept` it or `reject` it, once."""

    def __init__(
        self,
        reactor: Reactor,
        options: ConnectionOptions,
        accept_timeout: float,
        receives: ListenerReceives,
        identifier: Identifier,
        event: Event,
    ) -> None:
        reactor.retain()  # until it is answered; then whoever has the identifier has it
        self._process = here.pid
        self._reactor = reactor
        self._options = options
        self._accept_timeout = accept_timeout
        self._receives = receives
        self._identifier = identifier
        self._event = event
        self._gone: Event | None = None
        self._answered = False
        self.private_data = event.private_data
        """What the peer sent along; RDMA pads it with zeros."""
        self.peer_address: SocketAddress | None = identifier.peer_address
        """The peer's (host, port)."""

    def __repr__(self) -> str:
        return f"<ConnectionRequest from {self.peer_address}>"

    def handle_event(self, event: Event) -> None:
        """Take a CM event of our identifier: the peer can go while it waits for the answer."""
        if event.type in ENDS_A_REQUEST:
            self._gone = event

    def _answer(self) -> None:
        require_same_process(self._process, repr(self))
        if self._answered:
            raise ClosedError("this connection request has been answered")
        self._answered = True

    async def accept(
        self, *, private_data: bytes = b"", **options: Unpack[ConnectionKeywords]
    ) -> Connection:
        """Accept, and return the established connection. Cancelled or failed, the peer is refused
        or disconnected, and nothing is left.

        Args:
            private_data: up to 196 bytes for the peer's program.
            options: in place of the listener's (but for tos, which is settled by now).

        Raises:
            RdmaConnectionError: the peer has gone, or did not finish in time.
            ClosedError: the request has been answered already.
        """
        chosen = ConnectionOptions(**options) if options else self._options
        parameters(chosen, private_data).check(MAX_ACCEPT_PRIVATE_DATA, "an accept")
        self._answer()
        what = f"accept {self.peer_address}"
        identifier = self._identifier
        try:
            if self._gone is not None:
                raise failed_event(what, self._gone)
            hub = await self._reactor.hub(identifier)
        except BaseException:
            await self._give_back()
            raise
        # From here the endpoint owns the identifier, and the use of the reactor.
        endpoint = Endpoint(self._reactor, hub, identifier, chosen, ConnectionState.ACCEPTING)
        self._reactor.subscribe(identifier, endpoint.handle_event, endpoint)
        try:
            identifier.set_ack_timeout(chosen.ack_timeout)
            shared = await self._receives.on(endpoint)
            await endpoint.open(shared_receive=shared)
            connection = Connection(endpoint, shared)
            connection.prepare()
            if self._gone is not None:
                raise failed_event(what, self._gone)
            identifier.accept(parameters(self._offered(hub, chosen), private_data))
            with anyio.move_on_after(self._accept_timeout):
                if not await endpoint.connected():
                    raise endpoint.cause or failed_event(what, endpoint.last_event)
                connection.begin(private_data=self.private_data)
                return connection
            raise DisconnectedError(
                f"{what}: the peer did not finish within {self._accept_timeout:g} s"
            )
        except BaseException as error:
            await endpoint.aclose()
            if isinstance(error, VerbsCallError):
                # Calls on an identifier whose peer has gone fail in many ways.
                raise RdmaConnectionError(f"{what}: {error}") from error
            raise

    def _offered(self, hub: DeviceHub, chosen: ConnectionOptions) -> ConnectionOptions:
        if hub.is_iwarp:
            return chosen  # the two sides settle it by themselves (RFC 6581)
        # No more than the peer offers; its numbers come from our viewpoint (man rdma_accept).
        event = self._event
        return replace(
            chosen,
            responder_resources=min(chosen.responder_resources, event.responder_resources),
            initiator_depth=min(chosen.initiator_depth, event.initiator_depth),
        )

    async def reject(self, private_data: bytes = b"") -> None:
        """Refuse; the peer's connect raises RejectedError with up to 148 bytes from here.

        Raises:
            ClosedError: the request has been answered already.
        """
        check_private_data(private_data, MAX_REJECT_PRIVATE_DATA, "a reject")
        self._answer()
        self._refuse(private_data)
        await self._give_back()

    async def aclose(self) -> None:
        """`reject`, if it has not been answered: what the end of the loop does with it."""
        if not self._answered:
            await self.reject()

    def reject_later(self, then: Callable[[], None]) -> None:
        """`reject` in the background, and then `then`, on the loop's thread."""
        self._answer()
        self._refuse(b"")
        self._give_back_later(then)

    def _refuse(self, private_data: bytes) -> None:
        try:
            self._identifier.reject(private_data)
        except VerbsCallError as error:
            logger.debug("rejecting %s: %s", self.peer_address, error)  # it has gone already

    async def _give_back(self) -> None:
        given = anyio.Event()
        self._give_back_later(given.set)
        await outwait(given)

    def _give_back_later(self, then: Callable[[], None]) -> None:
        self._reactor.unsubscribe(self._identifier)
        self._reactor.destroy(self._identifier.close, lambda: self._reactor.release(then))

    def __del__(self) -> None:
        if not getattr(self, "_answered", True) and self._process == here.pid:
            warnings.warn(f"unanswered {self!r}", ResourceWarning, stacklevel=1, source=self)
