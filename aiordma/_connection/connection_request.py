"""A connection request that a listener received, until the program accepts or rejects it."""

from typing import Unpack

from aiordma._base.connection_parameters import (
    IN_ACCEPT,
    MAX_REJECT_PRIVATE_DATA,
    ConnectionParameters,
    Ece,
    check_private_data,
)
from aiordma._base.errors import ClosedError
from aiordma._base.opening import opens
from aiordma._base.options import ConnectionKeywords, ConnectionOptions
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import Connection
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._connection.incoming import IncomingRequest


class ConnectionRequest:
    """A peer that wants to connect: `accept`, `prepare` or `reject` it, once."""

    def __init__(self, incoming: IncomingRequest) -> None:
        self._incoming = incoming
        self.private_data: bytes = incoming.private_data
        """The private data that the peer sent with the request; RDMA pads it with zeros."""
        self.peer_address: SocketAddress | None = incoming.peer_address
        """The peer's (host, port)."""

    def __repr__(self) -> str:
        return repr(self._incoming)

    @property
    def parameters(self) -> ConnectionParameters:
        """The parameters of the peer's request, from this side's viewpoint.

        - `responder_resources`: how many READs and atomics the peer wants to have outstanding here.
        - `initiator_depth`: how many the peer permits this side to have outstanding there.
        - `rnr_retry_count`: how often this side repeats a message that finds no receive posted.
        - `retry_count`: how often this side should retransmit. This side's option of the same name
          is used instead.

        iWARP carries neither the retry counts nor a queue pair number: they are 0."""
        event = self._incoming.event
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
        if self._incoming.was_answered:
            raise ClosedError("this connection request has been answered")
        return self._incoming.identifier.remote_ece

    @property
    def is_gone(self) -> bool:
        """Whether the peer has withdrawn the request. The kernel's iWARP devices do not report
        it."""
        return self._incoming.withdrawal is not None

    @property
    def was_answered(self) -> bool:
        """Whether the request was accepted or rejected. True from the start of the answer."""
        return self._incoming.was_answered

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
        chosen = ConnectionOptions._chosen(accept, options, keywords, self._incoming.options)
        return await self._incoming.accept(private_data, chosen, self._choice(domain, "accept"))

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
        chosen = ConnectionOptions._chosen(prepare, options, keywords, self._incoming.options)
        return await self._incoming.prepare(chosen, self._choice(domain, "prepare"))

    def _choice(self, domain: DomainArgument, call: str) -> DomainChoice:
        receives = self._incoming.receives
        return receives.domain if domain is None else receives.choice(domain, call)

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
        await self._incoming.reject(private_data)

    async def aclose(self) -> None:
        """Reject the peer, if the request has not been answered. Idempotent.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                request.
            ForkError: called in a forked child.

        Cancellation: as `ConnectionRequest.reject`.
        """
        await self._incoming.aclose()
