"""The connection manager, synchronous and never blocking: channel, identifiers, events.

Every event is copied out of librdmacm and acknowledged in the same C call that took it, so that
no identifier's destruction waits for one of ours (man rdma_ack_cm_event, rdma_destroy_id). Waiting
for events, and timeouts, are the reactor's business.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiordma._native import ffi, lib
from aiordma.enums import CmEventType, PortSpace, QueuePairType
from aiordma.errors import (
    NoDeviceError,
    VerbsCallError,
    check_minus_one,
    check_negative_errno,
    check_pointer,
)
from aiordma.provider import Provider
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
    "MAX_REJECT_PRIVATE_DATA",
    "ConnectionParameters",
    "Event",
    "EventChannel",
    "Identifier",
)

# What fits beside the CM's own header in an InfiniBand REQ, REP and REJ (man rdma_connect,
# rdma_accept, rdma_reject). The TCP port space puts 36 bytes of its own into the REQ.
MAX_CONNECT_PRIVATE_DATA = 56
MAX_ACCEPT_PRIVATE_DATA = 196
MAX_REJECT_PRIVATE_DATA = 148

DEVICE_MAXIMUM = 0xFF
"""In the two depth fields: as many outstanding READs and atomics as the device can."""


@dataclass(frozen=True, slots=True)
class ConnectionParameters:
    """`rdma_conn_param`: what a connect or an accept tells the peer (man rdma_connect).

    The retry counts are 3-bit numbers; rnr_retry_count 7 means for ever.
    """

    private_data: bytes = b""
    responder_resources: int = DEVICE_MAXIMUM
    initiator_depth: int = DEVICE_MAXIMUM
    retry_count: int = 7
    rnr_retry_count: int = 7

    def check(self, most_private_data: int, call: str) -> None:
        """Refuse values that C would cut off or misread.

        Raises:
            ValueError: names the field and its range.
        """
        if len(self.private_data) > most_private_data:
            raise ValueError(
                f"private_data of {len(self.private_data)} bytes: {call} carries at most "
                f"{most_private_data}"
            )
        for name, most in (
            ("responder_resources", 255),
            ("initiator_depth", 255),
            ("retry_count", 7),
            ("rnr_retry_count", 7),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} is not in 0..{most}")

    def to_c(self) -> tuple[Any, Any]:
        """Return struct rdma_conn_param and the memory that it points to; keep both alive."""
        raw = ffi.new("struct rdma_conn_param *")
        data = ffi.new("uint8_t[]", self.private_data or b"\0")
        raw.private_data = data if self.private_data else ffi.NULL
        raw.private_data_len = len(self.private_data)
        raw.responder_resources = self.responder_resources
        raw.initiator_depth = self.initiator_depth
        raw.flow_control = 1
        raw.retry_count = self.retry_count
        raw.rnr_retry_count = self.rnr_retry_count
        return raw, data


@dataclass(frozen=True, slots=True)
class Event:
    """A copied and acknowledged CM event. `key` finds its identifier, `new_key` the one that a
    connection request made. Depths are from the receiver's viewpoint."""

    type: CmEventType
    status: int
    key: int
    new_key: int
    private_data: bytes
    responder_resources: int
    initiator_depth: int
    retry_count: int
    rnr_retry_count: int
    qpn: int


class EventChannel(Resource):
    """Where the events of many identifiers arrive; `fd` becomes readable. Non-blocking."""

    def __init__(self, provider: Provider) -> None:
        super().__init__()
        self.provider = provider
        try:
            self.pointer = check_pointer(
                provider.create_event_channel(), "rdma_create_event_channel"
            )
        except VerbsCallError as error:
            self._abandon()
            raise NoDeviceError(str(error)) from error
        except BaseException:
            self._abandon()
            raise
        self.fd: int = self.pointer.fd
        os.set_blocking(self.fd, False)
        self._raw = ffi.new("struct aiordma_cm_event *")

    def events(self) -> Iterator[Event]:
        """Take the waiting events one by one, each acknowledged before it is handed out.

        Taking an event is where librdmacm works on the connection (it moves the queue pair), and
        that can fail: the call's error is raised, and the next call goes on behind it.
        """
        raw = self._raw
        while not self._closed and check_negative_errno(
            lib.aiordma_next_cm_event(self.provider.table, self.pointer, raw), "rdma_get_cm_event"
        ):
            try:
                kind = CmEventType(raw.event)
            except ValueError:  # newer than we are, and acknowledged: it has no effect here
                continue
            request = kind is CmEventType.CONNECT_REQUEST
            yield Event(
                type=kind,
                status=raw.status,
                key=raw.listen_id if request else raw.id,
                new_key=raw.id if request else 0,
                private_data=bytes(ffi.buffer(raw.private_data, raw.private_data_length)),
                responder_resources=raw.responder_resources,
                initiator_depth=raw.initiator_depth,
                retry_count=raw.retry_count,
                rnr_retry_count=raw.rnr_retry_count,
                qpn=raw.qp_num,
            )

    def _destroy(self) -> None:
        self.provider.destroy_event_channel(self.pointer)


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
        """Ask the peer to connect; ESTABLISHED, or an error event, follows."""
        self.require_open()
        parameters.check(MAX_CONNECT_PRIVATE_DATA, "a connection request")
        raw, _data = parameters.to_c()
        check_minus_one(self.provider.connect(self.pointer, raw), "rdma_connect")

    def accept(self, parameters: ConnectionParameters) -> None:
        """Accept a connection request; ESTABLISHED, or an error event, follows."""
        self.require_open()
        parameters.check(MAX_ACCEPT_PRIVATE_DATA, "an accept")
        raw, _data = parameters.to_c()
        check_minus_one(self.provider.accept(self.pointer, raw), "rdma_accept")

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse a connection request, with data for the peer's program."""
        self.require_open()
        if len(private_data) > MAX_REJECT_PRIVATE_DATA:
            raise ValueError(
                f"private_data of {len(private_data)} bytes: a reject carries at most "
                f"{MAX_REJECT_PRIVATE_DATA}"
            )
        data = ffi.new("uint8_t[]", private_data or b"\0")
        check_minus_one(self.provider.reject(self.pointer, data, len(private_data)), "rdma_reject")

    def disconnect(self) -> None:
        """Move the queue pair to its error state and tell the peer (man rdma_disconnect)."""
        self.require_open()
        check_minus_one(self.provider.disconnect(self.pointer), "rdma_disconnect")

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
