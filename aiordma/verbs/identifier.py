"""Identifiers of the connection manager. No call waits for the peer, except on siw: `connect`, and
after it `disconnect` and the close.

The reactor waits for events and handles timeouts.
"""

import errno
import sys
from contextlib import suppress
from typing import Any

from aiordma._base.arguments import (
    data,
    instance,
    member,
    whole_number,
    wrong_type,
    wrong_value,
)
from aiordma._base.calls import check_minus_one, check_positive_errno
from aiordma._base.connection_parameters import (
    MAX_ACCEPT_PRIVATE_DATA,
    MAX_CONNECT_PRIVATE_DATA,
    MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
    MAX_REJECT_PRIVATE_DATA,
    ConnectionParameters,
    Ece,
    check_private_data,
)
from aiordma._base.enums import (
    AsyncEventType,
    PortSpace,
    QueuePairAttribute,
    QueuePairState,
    QueuePairType,
    Transport,
)
from aiordma._base.errors import NotSupportedError, VerbsCallError
from aiordma._base.hints import cannot_bind
from aiordma._base.process import here
from aiordma._base.provider import BUILT_IN, Provider
from aiordma._base.socket_address import SocketAddress, pack_address, unpack_address
from aiordma._native import ffi, lib
from aiordma.verbs.completion import CompletionQueue
from aiordma.verbs.device import Context, ProtectionDomain, name_of
from aiordma.verbs.event_channel import Event, EventChannel
from aiordma.verbs.queue_pair import Capacity, QueuePair, checked_service, modify_arguments
from aiordma.verbs.resource import Resource
from aiordma.verbs.shared_receive import RawSharedReceiveQueue

__all__ = ("Event", "EventChannel", "Identifier")


# (limit for connections, limit for the UDP port space)
_CONNECT = (MAX_CONNECT_PRIVATE_DATA, MAX_DATAGRAM_CONNECT_PRIVATE_DATA)
_ACCEPT = (MAX_ACCEPT_PRIVATE_DATA, MAX_DATAGRAM_ACCEPT_PRIVATE_DATA)
_REJECT = (MAX_REJECT_PRIVATE_DATA, MAX_DATAGRAM_ACCEPT_PRIVATE_DATA)


_PORT_SPACES = {int(each): each for each in PortSpace}


def _explained(error: VerbsCallError, host: str, port: int | None = None) -> VerbsCallError:
    """Add a hint to the error of a bind to an address that no interface, or no device, has, or to a
    port that is taken. Return other errors as they are."""
    if error.errno == errno.EADDRINUSE and port is not None:
        return VerbsCallError(error.errno, error.call, f"The address was {host} port {port}")
    if error.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return error
    return VerbsCallError(error.errno, error.call, cannot_bind(host, error.errno))


_MOST_INT = 2**31 - 1


def _c_int(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)


class Identifier(Resource):
    """A CM identifier (`rdma_cm_id`), RDMA's counterpart of a socket.

    Every call returns at once, with exceptions on the kernel's iWARP devices: siw connects its TCP
    stream within `connect`, which takes up to two minutes if nothing answers. Closing the
    identifier waits for that call. Before the peer has answered the request, `disconnect` and
    closing wait for the answer, on siw up to 10 s.

    Args:
        channel: the channel that gets its events, which have its `key`.
        port_space: the port space, such as TCP for connections and UDP for datagrams.
        key: adopt the identifier that a CONNECT_REQUEST event of the channel made (`new_key`),
            instead of creating one. Each can be adopted once.

    Raises:
        TypeError, ValueError: an argument has the wrong type; or no event of the channel has this
            `new_key`, or its identifier was adopted.
        VerbsCallError: librdmacm refused.
        ClosedError, ForkError: the channel is closed, or was opened by the parent of this process.

    See: man rdma_create_id.
    """

    _closing_rank = 1

    def __init__(
        self, channel: EventChannel, port_space: PortSpace = PortSpace.TCP, *, key: int = 0
    ) -> None:
        if not hasattr(channel, "pointer"):
            raise wrong_type(channel, "channel", "an EventChannel", "Identifier")
        if type(port_space) is not PortSpace:
            port_space = member(port_space, "port_space", PortSpace, "Identifier")
        if type(key) is not int or not 0 <= key < 2**64:
            key = whole_number(key, "key", 0, 2**64 - 1, "Identifier")
        super().__init__(channel)
        self.provider: Provider = channel.provider
        self.channel: EventChannel = channel
        self.queue_pair: QueuePair | None = None
        self._groups: list[bytes] = []
        """The addresses of the groups to which librdmacm attaches its queue pair."""
        try:
            self.pointer: Any = self._adopt(key) if key else self._make(port_space)
            self.key: int = key or int(ffi.cast("uintptr_t", self.pointer))
            self.port_space: PortSpace = _PORT_SPACES[self.pointer.ps]
        except BaseException:
            self._give_up()
            raise

    def _adopt(self, key: int) -> Any:
        """Take over the identifier of a connection request."""
        try:
            self.channel._requests.remove(key)
        except KeyError:
            expected = "the new_key of a CONNECT_REQUEST of this channel, not adopted before"
            raise wrong_value(key, "key", expected, "Identifier") from None
        return ffi.cast("struct rdma_cm_id *", key)

    def _make(self, port_space: PortSpace) -> Any:
        made = ffi.new("struct rdma_cm_id **")
        if self.provider.create_id(self.channel.pointer, made, ffi.NULL, port_space):
            check_minus_one(-1, "rdma_create_id")
        return made[0]

    def __repr__(self) -> str:
        return f"<Identifier {self.key:#x}>"

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the function rdma_`name` of librdmacm on this identifier."""
        if self._closed or self._process != here.pid:
            self._require_open()
        if getattr(self.provider, name)(self.pointer, *arguments):
            check_minus_one(-1, f"rdma_{name}")

    def _require_device(
        self, call: str, first: str = "call resolve_address, and take ADDR_RESOLVED, first"
    ) -> None:
        """Check that a device is bound. Some functions of librdmacm use the device without this
        check, and would follow a null pointer.

        Raises:
            VerbsCallError: no device is bound; the message has what to do `first`.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.
        """
        if self._closed or self._process != here.pid:
            self._require_open()
        if not self.pointer.verbs:
            hint = f"No device is bound to this identifier: {first}"
            raise VerbsCallError(errno.EINVAL, call, hint)

    def set_option(self, name: int, value: bytes) -> None:
        """Set an option of level RDMA_OPTION_ID.

        Args:
            name: RDMA_OPTION_ID_...
            value: the bytes of the C value.

        Raises:
            TypeError, ValueError: an argument is invalid; the message names it.
            VerbsCallError: librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_set_option.
        """
        name = whole_number(name, "name", -(2**31), 2**31 - 1, "set_option")
        value = data(value, "value", "set_option")
        self._call("set_option", lib.RDMA_OPTION_ID, name, ffi.from_buffer(value), len(value))

    def set_ack_timeout(self, exponent: int) -> None:
        """Set the time after which the device retransmits to 4.096 us x 2^exponent. Call this
        before `connect` or `accept`.

        Args:
            exponent: 0 to 31; 0: the device does not retransmit.

        Raises:
            as `Identifier.set_option`.
            TypeError, ValueError: the exponent is not in 0..31.

        See: man rdma_set_option.
        """
        if type(exponent) is not int or not 0 <= exponent <= 31:
            exponent = whole_number(exponent, "ack_timeout", 0, 31)
        value = ffi.new("uint8_t *", exponent)
        self._call("set_option", lib.RDMA_OPTION_ID, lib.RDMA_OPTION_ID_ACK_TIMEOUT, value, 1)

    def set_tos(self, tos: int) -> None:
        """Set the type of service of sent packets: the IPv4 field, or IPv6's traffic class. Call
        this before resolving the route; on iWARP, before `connect` or `listen`.

        Args:
            tos: the whole byte, 0 to 255: DSCP, then ECN.

        Raises:
            as `Identifier.set_option`.
            TypeError, ValueError: `tos` is not in 0..255.

        See: man rdma_set_option.
        """
        value = ffi.new("uint8_t *", whole_number(tos, "tos", 0, 255))
        self._call("set_option", lib.RDMA_OPTION_ID, lib.RDMA_OPTION_ID_TOS, value, 1)

    def set_reuse_address(self, reuse: bool) -> None:
        """Share the address and port with other identifiers that set this option. Call this before
        `bind`. A listening identifier cannot share its port.

        Args:
            reuse: whether to share.

        Raises: as `Identifier.set_option`.

        See: man rdma_set_option.
        """
        self.set_option(lib.RDMA_OPTION_ID_REUSEADDR, _c_int(bool(reuse)))

    def set_ipv6_only(self, only: bool) -> None:
        """Let a `bind` to the IPv6 wildcard leave the port of IPv4 free. Call this before `bind`.

        Args:
            only: whether to take IPv6 only.

        Raises: as `Identifier.set_option`.

        See: man rdma_set_option.
        """
        self.set_option(lib.RDMA_OPTION_ID_AFONLY, _c_int(bool(only)))

    def migrate(self, channel: EventChannel) -> None:
        """Move the identifier to another channel, together with its pending events. `key` does not
        change. No other thread may take events of either channel during the call.

        Args:
            channel: the new channel.

        Raises:
            TypeError, ValueError: this is not an EventChannel; or one of them is of the software
                device, and the other of real devices.
            VerbsCallError: librdmacm refused.
            ClosedError, ForkError: it or the channel is closed, or was opened by the parent of this
                process.

        See: man rdma_migrate_id.
        """
        instance(channel, "channel", EventChannel, "migrate")
        channel._require_open()
        if channel.provider is not self.provider:
            expected = f"a channel of {self.provider.name}, as the identifier's is"
            raise wrong_value(channel, "channel", expected, "migrate")
        self._require_open()
        before = self.channel
        self._move(before, channel)  # it closes before both, whatever librdmacm answers
        try:
            self._call("migrate_id", channel.pointer)
        except VerbsCallError:
            self._move(before)
            raise
        self.channel = channel
        self._move(channel)

    def bind(self, host: str, port: int) -> None:
        """Bind to a local address; port 0 takes a free port.

        Args:
            host: a numeric address of this machine; 0.0.0.0 or ::, all of them.
            port: 0 to 65,535.

        Raises:
            TypeError, ValueError: the host is not a numeric address, or the port is out of range.
            VerbsCallError: the address or port cannot be bound to; the message says why.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_bind_addr.
        """
        address = ffi.from_buffer(pack_address(host, port))
        try:
            self._call("bind_addr", ffi.cast("struct sockaddr *", address))
        except VerbsCallError as error:
            raise _explained(error, host, port) from None

    def listen(self, backlog: int) -> None:
        """Listen for connection requests to the bound address.

        Args:
            backlog: how many connection requests can wait to be accepted; 0: the system's default.

        Raises:
            TypeError, ValueError: the backlog is not a number, or out of range.
            VerbsCallError: the port is taken, or librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_listen.
        """
        backlog = whole_number(backlog, "backlog", 0, _MOST_INT, "listen")
        bound = self.local_address
        try:
            self._call("listen", backlog)
        except VerbsCallError as error:  # some ports are found taken here
            raise _explained(error, *bound[:2]) if bound else error from None

    def resolve_address(
        self, host: str, port: int, source: tuple[str, int] | None, timeout_ms: int
    ) -> None:
        """Resolve an address: find the device that reaches it. ADDR_RESOLVED or ADDR_ERROR follows.

        Args:
            host, port: the peer's numeric address.
            source: bind to this (host, port) first; None: to any.
            timeout_ms: the timeout in milliseconds.

        Raises:
            TypeError, ValueError: an address is not numeric, or the timeout is out of range.
            VerbsCallError: the source cannot be bound to, or librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_resolve_addr.
        """
        if type(timeout_ms) is not int or not 0 <= timeout_ms <= _MOST_INT:
            timeout_ms = whole_number(timeout_ms, "timeout_ms", 0, _MOST_INT, "resolve_address")
        target = ffi.from_buffer(pack_address(host, port))
        origin = ffi.from_buffer(pack_address(*source)) if source else ffi.NULL
        try:
            self._call(
                "resolve_addr",
                ffi.cast("struct sockaddr *", origin),
                ffi.cast("struct sockaddr *", target),
                timeout_ms,
            )
        except VerbsCallError as error:
            raise _explained(error, source[0]) if source else error from None

    def resolve_route(self, timeout_ms: int) -> None:
        """Resolve the route to the resolved address. ROUTE_RESOLVED or ROUTE_ERROR follows.

        Args:
            timeout_ms: the timeout in milliseconds.

        Raises:
            TypeError, ValueError: the timeout is out of range.
            VerbsCallError: no address is resolved, or librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_resolve_route.
        """
        if type(timeout_ms) is not int or not 0 <= timeout_ms <= _MOST_INT:
            timeout_ms = whole_number(timeout_ms, "timeout_ms", 0, _MOST_INT, "resolve_route")
        self._require_device("rdma_resolve_route")
        self._call("resolve_route", timeout_ms)

    @property
    def device_key(self) -> int:
        """The address of the opened device, which identifies it; 0 if no device is bound."""
        if self._closed or self._process != here.pid:
            self._require_open()
        return int(ffi.cast("uintptr_t", self.pointer.verbs))

    @property
    def port(self) -> int:
        """The number of the device's port to which the identifier is bound."""
        if self._closed or self._process != here.pid:
            self._require_open()
        return int(self.pointer.port_num)

    @property
    def _device_name(self) -> str:
        """The name of the device to which the identifier is bound.

        Raises: as `context`.
        """
        self._require_device("rdma_cm_id")
        return name_of(self.provider, self.pointer.verbs.device)

    def context(self) -> Context:
        """Return the device of a resolved or requesting identifier. librdmacm owns the context.

        Raises:
            VerbsCallError: no device is bound.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.
        """
        self._require_device("rdma_cm_id")
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

        Args:
            domain, send_queue, receive_queue, service, shared_receive: as of `QueuePair.create`.
            capacity: its depths.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: the capacity exceeds the device's limits; the message names the attribute.
            VerbsCallError: no device is bound, or the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_create_qp.
        """
        service = checked_service(
            *(domain, send_queue, receive_queue, service, capacity, shared_receive),
            call="create_queue_pair",
        )
        self._require_device("rdma_create_qp")
        return QueuePair(
            *(domain, send_queue, receive_queue, service, capacity, shared_receive), manager=self
        )

    def _leave_groups(self) -> None:
        groups, self._groups = self._groups, []
        for address in groups:
            with suppress(VerbsCallError):
                self._leave(address)

    def connect(self, parameters: ConnectionParameters) -> None:
        """Send a connection request; ESTABLISHED, or an error event, follows. If librdmacm did not
        create the queue pair, CONNECT_RESPONSE follows: the program then moves the queue pair to
        RTS, and calls `establish`. In the UDP port space: request the peer's queue pair number and
        qkey.

        On siw the call waits until TCP has connected, or has given up: call it in a thread.

        Args:
            parameters: what the peer is sent.

        Raises:
            TypeError, ValueError: a parameter is invalid; the message names it.
            VerbsCallError: no route is resolved, or librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_connect.
        """
        instance(parameters, "parameters", ConnectionParameters, "connect")
        parameters._check(self._private_data_limit(*_CONNECT), "a connection request")
        self._connect(parameters._to_c())

    def _connect(self, parameters: tuple[Any, Any]) -> None:
        """Connect as `connect` does, with what `parameters_to_c` returns."""
        self._require_device("rdma_connect")
        self._call("connect", parameters[0])

    def accept(self, parameters: ConnectionParameters) -> None:
        """Accept a connection request; ESTABLISHED, or an error event, follows (in the UDP port
        space, no event follows). The retry_count is ignored: on InfiniBand and RoCE, both sides use
        the retry_count of the request.

        Args:
            parameters: what the peer is sent.

        Raises:
            TypeError, ValueError: a parameter is invalid; the message names it.
            VerbsCallError: it is not of a request, the peer has disconnected, or librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_accept.
        """
        instance(parameters, "parameters", ConnectionParameters, "accept")
        parameters._check(self._private_data_limit(*_ACCEPT), "an accept")
        self._accept(parameters._to_c())

    def _accept(self, parameters: tuple[Any, Any]) -> None:
        """Accept as `accept` does, with what `parameters_to_c` returns."""
        self._require_device("rdma_accept", "only the identifier of a CONNECT_REQUEST can accept")
        self._call("accept", parameters[0])

    def _accept_with_own_retries(
        self, parameters: ConnectionParameters, min_rnr_timer: int
    ) -> None:
        """Accept a connection request with this side's retry_count, and min_rnr_timer, on the queue
        pair, whose number the parameters have. They are checked. Not on iWARP.

        librdmacm moves the queue pair to RTS with the retry_count of the peer's request. Some peers
        request 0 (the kernel's 9P client), and the first lost or late packet then ends the
        connection. The retry_count cannot be changed in RTS. So this method moves the queue pair to
        RTS itself. During the accept it hides the queue pair from librdmacm, by removing it from
        the identifier.
        """
        pair, served = self.queue_pair, parameters.responder_resources
        assert pair is not None
        self._advance(pair, QueuePairState.INIT)
        own = {"max_dest_rd_atomic": served, "min_rnr_timer": min_rnr_timer}
        self._advance(pair, QueuePairState.RTR, **own)
        own = {"max_rd_atomic": parameters.initiator_depth, "retry_cnt": parameters.retry_count}
        self._advance(pair, QueuePairState.RTS, **own)
        self.pointer.qp = ffi.NULL
        try:
            self._accept(parameters._to_c())
        finally:
            self.pointer.qp = pair.pointer

    def _advance(self, pair: QueuePair, state: QueuePairState, **own: int) -> None:
        """Move a queue pair to a state, with the attributes that librdmacm would set, and with
        others in place of some."""
        raw, mask = self._attributes(state)
        for field, value in own.items():
            setattr(raw, field, value)
        error = self.provider.modify_qp(pair.pointer, raw, mask)
        if error:
            hint = f"to {state.name} with {QueuePairAttribute(mask)!r}"
            check_positive_errno(error, "ibv_modify_qp", hint)

    def reject(self, private_data: bytes = b"") -> None:
        """Reject a connection request.

        Args:
            private_data: data for the peer's program: up to 148 bytes, 136 in the UDP port space.

        Raises:
            TypeError, ValueError: the private data is not bytes, or too long.
            VerbsCallError: the peer has disconnected, or librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_reject.
        """
        self._require_open()
        self._reject("reject", private_data)

    def _reject(self, call: str, private_data: bytes) -> None:
        private_data = check_private_data(
            private_data, self._private_data_limit(*_REJECT), "a reject", call
        )
        data = ffi.new("uint8_t[]", private_data or b"\0")
        self._call(call, data, len(private_data))

    def _private_data_limit(self, connected: int, datagram: int) -> int:
        return datagram if self.port_space is PortSpace.UDP else connected

    def disconnect(self) -> None:
        """Move the queue pair to its error state, and disconnect from the peer.

        Raises:
            VerbsCallError: librdmacm refused; for example, the identifier is not connected.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_disconnect.
        """
        self._call("disconnect")

    # -- for queue pairs that librdmacm did not create ----------------------------------------

    def init_qp_attr(self, state: QueuePairState) -> dict[str, Any]:
        """Return the arguments of `QueuePair.modify` that move a queue pair of this connection to a
        state: INIT once the device is known, RTR and RTS once the peer is known. Before, they are
        incomplete, and the error of `modify` names the missing ones.

        Args:
            state: the state to which the queue pair is to be moved.

        Raises:
            TypeError, ValueError: this is not a QueuePairState.
            VerbsCallError: no device is bound.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_init_qp_attr.
        """
        state = member(state, "state", QueuePairState, "init_qp_attr")
        return modify_arguments(*self._attributes(state))

    def _attributes(self, state: QueuePairState) -> tuple[Any, int]:
        """Return the same as a struct ibv_qp_attr, and its mask."""
        raw, mask = ffi.new("struct ibv_qp_attr *"), ffi.new("int *")
        raw.qp_state = state
        self._call("init_qp_attr", raw, mask)
        return raw, mask[0]

    def establish(self) -> None:
        """Complete a connect after CONNECT_RESPONSE, with the queue pair in RTS. The peer gets
        ESTABLISHED.

        Raises:
            ValueError: librdmacm created the queue pair, and does this itself.
            VerbsCallError: there is no handshake to complete.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_establish.
        """
        self._require_own_queue_pair("establish")
        self._call("establish")

    def notify(self, event: AsyncEventType = AsyncEventType.COMM_EST) -> None:
        """Report to librdmacm that a message has arrived, although the last packet of the handshake
        has not (it may be lost). ESTABLISHED follows, unless it has been reported.

        Args:
            event: COMM_EST.

        Raises:
            TypeError, ValueError: this is not an AsyncEventType.
            VerbsCallError: there is no handshake to complete.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_notify.
        """
        event = member(event, "event", AsyncEventType, "notify")
        try:
            self._call("notify", event)
        except VerbsCallError as error:
            if error.errno != errno.EISCONN:  # the packet has arrived in the meantime
                raise

    def set_local_ece(self, ece: Ece) -> None:
        """Set the options to offer with the next connect, or to accept with the next accept.

        Args:
            ece: the options to offer.

        Raises:
            TypeError: this is not an Ece.
            ValueError: librdmacm created the queue pair, and does this itself.
            NotSupportedError: the device's handshake, or librdmacm, does not support ECE.
            VerbsCallError: librdmacm refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_set_local_ece.
        """
        instance(ece, "ece", Ece, "set_local_ece")
        raw = self._ece("set_local_ece")
        raw.vendor_id, raw.options = ece.vendor_id, ece.options
        self._call("set_local_ece", raw)

    @property
    def remote_ece(self) -> Ece:
        """The options that the peer offered with its request, or accepted; zeros if none.

        Raises: as `Identifier.set_local_ece`.

        See: man rdma_get_remote_ece.
        """
        raw = self._ece("remote_ece")
        self._call("get_remote_ece", raw)
        return Ece(raw.vendor_id, raw.options)

    def reject_ece(self, private_data: bytes = b"") -> None:
        """Reject a connection request because of its options. The peer may try again without them.

        Args:
            private_data: as in `reject`.

        Raises:
            as `Identifier.set_local_ece`.
            as `Identifier.reject`.

        See: man rdma_reject_ece.
        """
        self._ece("reject_ece")
        self._reject("reject_ece", private_data)

    def _ece(self, call: str) -> Any:
        self._require_own_queue_pair(call)
        if self.device_key:
            device = self.context()
            device.close()
            if device.transport is Transport.IWARP or device.device_name in BUILT_IN:
                raise NotSupportedError(
                    f"{call}: the handshake of {device.device_name} has no ECE (enhanced "
                    "connection establishment), as on every iWARP device"
                )
        return ffi.new("struct ibv_ece *")

    def _require_own_queue_pair(self, call: str) -> None:
        self._require_open()
        if self.pointer.qp:
            raise ValueError(f"{call}: librdmacm created the queue pair, and does this itself")

    # -- multicast ----------------------------------------------------------------------------

    def join_multicast(self, host: str, *, send_only: bool = False) -> None:
        """Join a multicast group on the bound device's network. MULTICAST_JOIN, with the group's
        address vector, or MULTICAST_ERROR follows. When MULTICAST_JOIN is taken, librdmacm attaches
        its queue pair to the group, unless `send_only` is set.

        Args:
            host: the group's numeric address.
            send_only: do not receive from the group.

        Raises:
            TypeError, ValueError: the host is not a numeric address.
            NotSupportedError: librdmacm is too old for this call.
            VerbsCallError: no device is bound, or the device does not support multicast.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_join_multicast_ex.
        """
        address = pack_address(host, 0)
        group = ffi.from_buffer(address)
        request = ffi.new("struct rdma_cm_join_mc_attr_ex *")
        request.comp_mask = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS | lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
        request.join_flags = (
            lib.RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
            if send_only
            else lib.RDMA_MC_JOIN_FLAG_FULLMEMBER
        )
        request.addr = ffi.cast("struct sockaddr *", group)
        self._call("join_multicast_ex", request, ffi.NULL)
        if not send_only:
            self._groups.append(address)

    def leave_multicast(self, host: str) -> None:
        """Leave a group that was joined with this host, or whose join is still pending. Closing the
        identifier leaves all of its groups. So does closing its queue pair, except those that were
        joined with `send_only`.

        Args:
            host: the address of the group.

        Raises:
            TypeError, ValueError: the host is not a numeric address.
            VerbsCallError: the group was not joined.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man rdma_leave_multicast.
        """
        address = pack_address(host, 0)
        self._require_open()
        with suppress(ValueError):  # joined with send_only, or not at all
            self._groups.remove(address)
        self._leave(address)

    def _leave(self, address: bytes) -> None:
        group = ffi.from_buffer(address)
        check_minus_one(
            self.provider.leave_multicast(self.pointer, ffi.cast("struct sockaddr *", group)),
            "rdma_leave_multicast",
        )

    # -- addresses ----------------------------------------------------------------------------

    @property
    def local_address(self) -> SocketAddress | None:
        """The local (host, port), once bound or resolved."""
        self._require_open()
        return unpack_address(self._local())

    def _local(self) -> bytes:
        """The local address as C has it, for `unpack_address`. The identifier is open."""
        return bytes(ffi.buffer(lib.aiordma_local_address(self.pointer), 28))

    @property
    def peer_address(self) -> SocketAddress | None:
        """The peer's (host, port), once known."""
        if self._closed or self._process != here.pid:
            self._require_open()
        return unpack_address(bytes(ffi.buffer(lib.aiordma_peer_address(self.pointer), 28)))

    def _destroy(self) -> None:
        if self.provider.destroy_id(self.pointer):
            check_minus_one(-1, "rdma_destroy_id")
