"""The connection manager, synchronous and never blocking: channel, identifiers, events.

Waiting for events, and timeouts, are the reactor's business.
"""

from typing import Any

from aiordma._native import ffi, lib
from aiordma.connection_parameters import (
    DEVICE_MAXIMUM,
    MAX_ACCEPT_PRIVATE_DATA,
    MAX_CONNECT_PRIVATE_DATA,
    MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
    MAX_REJECT_PRIVATE_DATA,
    ConnectionParameters,
    check_private_data,
)
from aiordma.enums import PortSpace, QueuePairType
from aiordma.errors import check_minus_one
from aiordma.event_channel import Event, EventChannel
from aiordma.socket_address import SocketAddress, pack_address, unpack_address
from aiordma.verbs import (
    Capacity,
    CompletionQueue,
    Context,
    ProtectionDomain,
    QueuePair,
    RawSharedReceiveQueue,
    Resource,
)

__all__ = (
    "DEVICE_MAXIMUM",
    "MAX_ACCEPT_PRIVATE_DATA",
    "MAX_CONNECT_PRIVATE_DATA",
    "MAX_DATAGRAM_ACCEPT_PRIVATE_DATA",
    "MAX_DATAGRAM_CONNECT_PRIVATE_DATA",
    "MAX_REJECT_PRIVATE_DATA",
    "ConnectionParameters",
    "Event",
    "EventChannel",
    "Identifier",
)


# (of connections, of the UDP port space)
_CONNECT = (MAX_CONNECT_PRIVATE_DATA, MAX_DATAGRAM_CONNECT_PRIVATE_DATA)
_ACCEPT = (MAX_ACCEPT_PRIVATE_DATA, MAX_DATAGRAM_ACCEPT_PRIVATE_DATA)
_REJECT = (MAX_REJECT_PRIVATE_DATA, MAX_DATAGRAM_ACCEPT_PRIVATE_DATA)


class Identifier(Resource):
    """A CM identifier (`rdma_cm_id`): RDMA's socket. Every call here returns at once.

    Args:
        channel: where its events arrive, under `key`.
        port_space: which service it belongs to.
        key: adopt the identifier that a CONNECT_REQUEST event made, instead of creating one.
    """

    closing_rank = 1

    def __init__(
        self, channel: EventChannel, port_space: PortSpace = PortSpace.TCP, *, key: int = 0
    ) -> None:
        super().__init__(channel)
        self.provider = channel.provider
        self.channel = channel
        self.queue_pair: QueuePair | None = None
        if key:
            self.pointer = ffi.cast("struct rdma_cm_id *", key)
        else:
            out = ffi.new("struct rdma_cm_id **")
            try:
                check_minus_one(
                    self.provider.create_id(channel.pointer, out, ffi.NULL, port_space),
                    "rdma_create_id",
                )
            except BaseException:
                self._abandon()
                raise
            self.pointer = out[0]
        self.key = int(ffi.cast("uintptr_t", self.pointer))
        self.port_space = PortSpace(self.pointer.ps)

    def __repr__(self) -> str:
        return f"<Identifier {self.key:#x}>"

    def set_option(self, name: int, value: bytes) -> None:
        """Set an option of level RDMA_OPTION_ID (man rdma_set_option)."""
        self.require_open()
        check_minus_one(
            self.provider.set_option(
                self.pointer, lib.RDMA_OPTION_ID, name, ffi.from_buffer(value), len(value)
            ),
            "rdma_set_option",
        )

    def set_ack_timeout(self, exponent: int) -> None:
        """Wait 4.096 us x 2^exponent for an acknowledgement; before connect or accept."""
        if not 0 <= exponent <= 31:
            raise ValueError(f"ack_timeout={exponent} is not in 0..31")
        self.set_option(lib.RDMA_OPTION_ID_ACK_TIMEOUT, bytes([exponent]))

    def bind(self, host: str, port: int) -> None:
        """Take a local address; port 0 takes a free one (man rdma_bind_addr)."""
        self.require_open()
        address = ffi.from_buffer(pack_address(host, port))
        check_minus_one(
            self.provider.bind_addr(self.pointer, ffi.cast("struct sockaddr *", address)),
            "rdma_bind_addr",
        )

    def listen(self, backlog: int) -> None:
        """Report connection requests to the bound address (man rdma_listen)."""
        self.require_open()
        check_minus_one(self.provider.listen(self.pointer, backlog), "rdma_listen")

    def resolve_address(
        self, host: str, port: int, source: tuple[str, int] | None, timeout_ms: int
    ) -> None:
        """Find the device that reaches an address; ADDR_RESOLVED or ADDR_ERROR follows."""
        self.require_open()
        target = ffi.from_buffer(pack_address(host, port))
        origin = ffi.from_buffer(pack_address(*source)) if source else ffi.NULL
        check_minus_one(
            self.provider.resolve_addr(
                self.pointer,
                ffi.cast("struct sockaddr *", origin),
                ffi.cast("struct sockaddr *", target),
                timeout_ms,
            ),
            "rdma_resolve_addr",
        )

    def resolve_route(self, timeout_ms: int) -> None:
        """Find the path; ROUTE_RESOLVED or ROUTE_ERROR follows."""
        self.require_open()
        check_minus_one(self.provider.resolve_route(self.pointer, timeout_ms), "rdma_resolve_route")

    @property
    def device_key(self) -> int:
        """Tells devices apart: the address of the opened device; 0 before one is known."""
        self.require_open()
        return int(ffi.cast("uintptr_t", self.pointer.verbs))

    @property
    def port(self) -> int:
        """The device's port that it is bound to."""
        self.require_open()
        return int(self.pointer.port_num)

    def context(self) -> Context:
        """Return the device of a resolved, or requesting, identifier. librdmacm owns it."""
        self.require_open()
        return Context(self.provider, self.pointer.verbs, owned=False)

    def create_queue_pair(
        self,
        domain: ProtectionDomain,
        send_queue: CompletionQueue,
        receive_queue: CompletionQueue,
        capacity: Capacity,
        service: QueuePairType = QueuePairType.RC,
        shared_receive: RawSharedReceiveQueue | None = None,
    ) -> QueuePair:
        """Create the queue pair that librdmacm will move through its states.

        Raises:
            ValueError: the capacity is beyond the device; the message names the attribute.
            VerbsCallError: the driver refused.
        """
        self.require_open()

        def make(request: Any) -> Any:
            check_minus_one(
                self.provider.cm_create_qp(self.pointer, domain.pointer, request),
                "rdma_create_qp",
                f"Asked for {capacity} (of these, devices do not announce their most for "
                "max_inline_data: try less)",
            )
            return self.pointer.qp

        def unmake(_pointer: Any) -> None:
            self.provider.cm_destroy_qp(self.pointer)

        pair = QueuePair(
            domain,
            send_queue,
            receive_queue,
            service,
            capacity,
            make=make,
            unmake=unmake,
            shared_receive=shared_receive,
        )
        self.queue_pair = pair
        return pair

    def connect(self, parameters: ConnectionParameters) -> None:
        """Ask the peer to connect; ESTABLISHED, or an error event, follows. CONNECT_RESPONSE if
        librdmacm has not made the queue pair: then it is for us to move it on, and to `establish`.
        In the UDP port space: ask for the peer's queue pair and qkey."""
        self.require_open()
        parameters.check(self._most(*_CONNECT), "a connection request")
        raw, _data = parameters.to_c()
        check_minus_one(self.provider.connect(self.pointer, raw), "rdma_connect")

    def accept(self, parameters: ConnectionParameters) -> None:
        """Accept a connection request; ESTABLISHED, or an error event, follows (in the UDP port
        space nothing: the answer is sent, and that is all)."""
        self.require_open()
        parameters.check(self._most(*_ACCEPT), "an accept")
        raw, _data = parameters.to_c()
        check_minus_one(self.provider.accept(self.pointer, raw), "rdma_accept")

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse a connection request, with data for the peer's program."""
        self.require_open()
        check_private_data(private_data, self._most(*_REJECT), "a reject")
        data = ffi.new("uint8_t[]", private_data or b"\0")
        check_minus_one(self.provider.reject(self.pointer, data, len(private_data)), "rdma_reject")

    def _most(self, connected: int, datagram: int) -> int:
        return datagram if self.port_space is PortSpace.UDP else connected

    def disconnect(self) -> None:
        """Move the queue pair to its error state and tell the peer (man rdma_disconnect)."""
        self.require_open()
        check_minus_one(self.provider.disconnect(self.pointer), "rdma_disconnect")

    # -- multicast ----------------------------------------------------------------------------

    def join_multicast(self, host: str, *, send_only: bool = False) -> None:
        """Join a group of the bound device's network; MULTICAST_JOIN, which says how to send to
        it, or MULTICAST_ERROR follows (man rdma_join_multicast_ex). librdmacm attaches its queue
        pair to the group when that event is taken, unless only to send.

        Raises:
            ValueError: the host is not a numeric address.
            NotSupportedError: librdmacm is older than such joins.
            VerbsCallError: no device is bound, or it has no multicast.
        """
        self.require_open()
        address = ffi.from_buffer(pack_address(host, 0))
        request = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        request.comp_mask = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS | lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
        request.join_flags = (
            lib.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
            if send_only
            else lib.RDMA_MC_JOIN_FLAG_FULLMEMBER
        )
        request.addr = ffi.cast("struct sockaddr *", address)
        check_minus_one(
            self.provider.join_multicast_ex(self.pointer, request, ffi.NULL),
            "rdma_join_multicast_ex",
        )

    def leave_multicast(self, host: str) -> None:
        """Leave a group that was joined with this host, joined by now or not (man
        rdma_leave_multicast). Destroying the identifier leaves all of them."""
        self.require_open()
        address = ffi.from_buffer(pack_address(host, 0))
        check_minus_one(
            self.provider.leave_multicast(self.pointer, ffi.cast("struct sockaddr *", address)),
            "rdma_leave_multicast",
        )

    # -- the two ends -------------------------------------------------------------------------

    @property
    def local_address(self) -> SocketAddress | None:
        """Our end's (host, port), once bound or resolved."""
        self.require_open()
        return unpack_address(bytes(ffi.buffer(lib.aiordma_local_address(self.pointer), 28)))

    @property
    def peer_address(self) -> SocketAddress | None:
        """The other end's (host, port), once known."""
        self.require_open()
        return unpack_address(bytes(ffi.buffer(lib.aiordma_peer_address(self.pointer), 28)))

    def _destroy(self) -> None:
        if self.queue_pair is not None:
            self.queue_pair.close()
        check_minus_one(self.provider.destroy_id(self.pointer), "rdma_destroy_id")
