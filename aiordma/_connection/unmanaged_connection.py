"""Queue pairs without the connection manager: the program exchanges the addresses itself.

As in ibv_rc_pingpong, each side sends its queue pair's number, first packet number and port address
to the peer, for example over a TCP connection.
"""

import os
from dataclasses import dataclass
from typing import Unpack

from aiordma._base.arguments import checked_gid, instance, member, whole_number, within_device
from aiordma._base.enums import (
    REMOTE_ACCESS,
    Access,
    AtomicCapability,
    LinkLayer,
    Mtu,
    QueuePairState,
    QueuePairType,
)
from aiordma._base.errors import NotSupportedError
from aiordma._base.opening import opens
from aiordma._base.options import (
    ConnectionKeywords,
    ConnectionOptions,
)
from aiordma._base.provider import checked_device
from aiordma._base.states import ConnectionState
from aiordma._connection.connection import Connection
from aiordma._connection.domain import DomainArgument, DomainChoice
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._endpoint.endpoint import Endpoint
from aiordma._endpoint.handshake import Handshake
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.reactor import reactor_of
from aiordma._runtime.unmanaged_identifier import Unmanaged
from aiordma.verbs.address import MOST_LID, AddressVector

_PSN_BYTES = 3
"""A packet number has 24 bits; a stranger must not guess it."""


@dataclass(frozen=True, slots=True)
class QueuePairAddress:
    """The address that a queue pair's peer needs.

    Attributes:
        qp_num: the queue pair number, 24 bits.
        psn: the number of the first packet that it sends, 24 bits.
        gid: the GID of its port, 16 bytes.
        lid: the LID of its port; 0: none, as on RoCE.

    Raises:
        TypeError, ValueError: a field is of the wrong type or out of range; the message names it.
    """

    qp_num: int
    psn: int
    gid: bytes
    lid: int = 0

    def __post_init__(self) -> None:
        for name, most in (("qp_num", 2**24 - 1), ("psn", 2**24 - 1), ("lid", MOST_LID)):
            object.__setattr__(self, name, whole_number(getattr(self, name), name, 0, most))
        object.__setattr__(self, "gid", checked_gid(self.gid))


@opens
async def open_queue_pair(
    device: str,
    *,
    service: QueuePairType = QueuePairType.RC,
    port: int = 1,
    gid_index: int = 0,
    pkey_index: int = 0,
    shared_receive: SharedReceiveQueue | None = None,
    domain: DomainArgument = None,
    options: ConnectionOptions | None = None,
    **keywords: Unpack[ConnectionKeywords],
) -> "UnmanagedConnection":
    """Create a queue pair on a device, to be connected by `UnmanagedConnection.connect_to`.

    Nothing negotiates the options with the peer:

    - rnr_retry_count is how often *this* side's device resends a message that finds no receive at
      the peer (`ibv_qp_attr.rnr_retry`). With the connection manager it is the opposite direction.
    - initiator_depth and responder_resources are used as they are, limited only by this side's
      device. initiator_depth must not exceed the responder_resources of the peer; with 255 on both
      sides, they are max_qp_init_rd_atom and max_qp_rd_atom of the two devices.

    UC has no acknowledgements. A request completes when the device has sent it, and lost packets
    are not resent. A message that finds no receive at the peer is dropped, without an error on
    either side. UC has no READs and atomics, and aiordma binds no memory windows there. These
    options have no effect: retry_count, rnr_retry_count, ack_timeout, min_rnr_timer, peer_timeout,
    keepalive, responder_resources and initiator_depth.

    Args:
        device: the device's name, such as "rxe0".
        service: RC or UC. (For datagrams, see `open_datagram`.)
        port: the device's port, from 1.
        gid_index: the index of the local GID; on RoCE this determines the address and the version.
        pkey_index: the index of the partition key. The peer's must be of the same partition.
        shared_receive: take receives from this queue; the receive_* options then have no effect.
            None: the queue pair has receives of its own.
        domain: the protection domain, as of `connect`.
        receive_buffers, receive_size, peer_timeout, keepalive, options: see ConnectionOptions, and
            the differences above.

    Raises:
        NoDeviceError: there is no such device.
        NotSupportedError: the device is an iWARP device, which needs the connection manager.
        TypeError, ValueError: an argument is invalid, or exceeds the device's limit; the message
            names it.
        VerbsCallError: the driver refused.
        ClosedError, EventLoopError: `shared_receive` or `domain` is closed, or belongs to another
            event loop.
        ForkError: this process is a forked child of a process that used real devices.

    Cancellation: nothing is left.

    See: man ibv_create_qp.
    """
    call = "open_queue_pair"
    device = checked_device(device, call)
    service = member(service, "service", QueuePairType, call)
    if service is QueuePairType.UD:
        raise ValueError(
            f"{call}(): service=UD: expected RC or UC; open_datagram() opens a UD queue pair"
        )
    port = whole_number(port, "port", 1, 255, call)
    gid_index = whole_number(gid_index, "gid_index", 0, 2**31 - 1, call)
    pkey_index = whole_number(pkey_index, "pkey_index", 0, 2**16 - 1, call)
    if shared_receive is not None:
        instance(shared_receive, "shared_receive", SharedReceiveQueue, call)
    shared = None if shared_receive is None else shared_receive._endpoint
    choice = DomainChoice(domain, call, shared)
    requirement = choice.requirement(device)
    chosen = ConnectionOptions._chosen(open_queue_pair, options, keywords)
    if chosen.tos is not None:
        raise ValueError(
            f"{call}(): options has tos={chosen.tos}: connect_to() takes it, as traffic_class"
        )
    reactor = await with_device(requirement, "", reactor_of)
    hub = await reactor.hub_of(device)
    if hub.is_iwarp:
        raise NotSupportedError(
            f"queue pairs without the connection manager: {device} is an iWARP device, whose "
            "queue pairs are connected by the connection manager only"
        )
    within_device(port, "port", 1, hub.attributes.phys_port_cnt, device)
    attributes = hub.context.query_port(port)
    within_device(gid_index, "gid_index", 0, attributes.gid_tbl_len - 1, device)
    within_device(pkey_index, "pkey_index", 0, attributes.pkey_tbl_len - 1, device)
    own = await choice.on(reactor, hub)
    handshake = Handshake(reactor.loop, ConnectionState.CONNECTING)
    unmanaged = Unmanaged(port)
    endpoint = Endpoint(reactor, hub, unmanaged, chosen, handshake, own)
    reactor.subscribe(unmanaged, endpoint.handle_event)
    try:
        await endpoint.open(service, shared)
        connection = UnmanagedConnection(endpoint, gid_index)
        await endpoint.calls.run(lambda: connection._initialize(pkey_index))
        connection._post_pooled_receives()
    except BaseException:
        await endpoint.teardown.aclose()
        raise
    return connection


class UnmanagedConnection(Connection):
    """A Connection whose queue pair you connect yourself.

    It detects that the peer has ended only when a request of its own fails with RetryExceededError.
    On UC it never does.
    """

    def __init__(self, endpoint: Endpoint, gid_index: int) -> None:
        super().__init__(endpoint)
        port = endpoint.identifier.port
        context = endpoint.hub.context
        self._gid_index = gid_index
        self._port_num = port
        self._connecting = False
        self.address: QueuePairAddress = QueuePairAddress(
            endpoint.pair.number,
            int.from_bytes(os.urandom(_PSN_BYTES)),
            context.query_gid(port, gid_index),
            context.query_port(port).lid,
        )
        """The address to send to the peer."""

    @property
    def service(self) -> QueuePairType:
        """RC or UC."""
        return self._endpoint.pair.service

    def _initialize(self, pkey_index: int) -> None:
        """Move the queue pair from RESET to INIT. `open_queue_pair` calls this."""
        access = REMOTE_ACCESS
        if self._endpoint.pair.service is QueuePairType.UC:
            access = Access.REMOTE_WRITE
        elif self._endpoint.hub.attributes.atomic_cap is AtomicCapability.NONE:
            access &= ~Access.REMOTE_ATOMIC
        pair = self._endpoint.pair.raw
        assert pair is not None
        pair.modify(QueuePairState.INIT, pkey_index=pkey_index, port=self._port_num, access=access)

    async def connect_to(
        self,
        peer: QueuePairAddress,
        *,
        path_mtu: Mtu | None = None,
        service_level: int = 0,
        hop_limit: int = 64,
        traffic_class: int = 0,
    ) -> None:
        """Connect to the peer's queue pair (INIT to RTR to RTS). Call this once, on both sides,
        before either side sends.

        Args:
            peer: the peer's `address`.
            path_mtu: must be the same on both sides; None: the port's active MTU.
            service_level, hop_limit, traffic_class: the attributes of the path to the peer.

        Raises:
            TypeError, ValueError: an argument is invalid, or the connection is connected already.
            VerbsCallError: the device refused; the message names the transition. The connection is
                closed.
            ClosedError, DisconnectedError, DeviceEventError, WorkCompletionError: the connection
                has ended; the error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the connection is closed.

        See: man ibv_modify_qp.
        """
        endpoint = self._endpoint
        instance(peer, "peer", QueuePairAddress, "connect_to", "the peer's QueuePairAddress")
        if path_mtu is not None:
            path_mtu = member(path_mtu, "path_mtu", Mtu, "connect_to")
        endpoint.require_usable()
        if self._connecting or endpoint.state is not ConnectionState.CONNECTING:
            raise ValueError(f"{self!r} has been connected, or is being")
        port = endpoint.hub.context.query_port(self._port_num)
        mtu = port.active_mtu if path_mtu is None else path_mtu
        roce = port.link_layer is LinkLayer.ETHERNET
        vector = AddressVector(
            port=self._port_num,
            gid=peer.gid if roce or any(peer.gid[8:]) else None,
            gid_index=self._gid_index,
            lid=peer.lid,
            hop_limit=hop_limit,
            traffic_class=traffic_class,
            service_level=service_level,
        )
        self._connecting = True
        try:
            await endpoint.calls.run(lambda: self._connect(peer, vector, mtu))
            endpoint.require_usable()
        except BaseException:
            await endpoint.teardown.aclose()
            raise
        if endpoint.state is ConnectionState.CONNECTING:
            endpoint.handshake.was_established = True
            endpoint.state = ConnectionState.ESTABLISHED
        endpoint.established()
        self._begun = True

    def _connect(self, peer: QueuePairAddress, vector: AddressVector, path_mtu: Mtu) -> None:
        pair, options = self._endpoint.pair.raw, self._endpoint.options
        device = self._endpoint.hub.attributes
        assert pair is not None
        common = {"path_mtu": path_mtu, "dest_qp_num": peer.qp_num, "rq_psn": peer.psn}
        if self.service is QueuePairType.UC:
            pair.modify(QueuePairState.RTR, address=vector, **common)
            pair.modify(QueuePairState.RTS, sq_psn=self.address.psn)
            return
        pair.modify(
            QueuePairState.RTR,
            address=vector,
            max_dest_rd_atomic=min(options.responder_resources, device.max_qp_rd_atom),
            min_rnr_timer=options.min_rnr_timer,
            **common,
        )
        pair.modify(
            QueuePairState.RTS,
            sq_psn=self.address.psn,
            timeout=options.ack_timeout,
            retry_cnt=options.retry_count,
            rnr_retry=options.rnr_retry_count,
            max_rd_atomic=min(options.initiator_depth, device.max_qp_init_rd_atom),
        )
