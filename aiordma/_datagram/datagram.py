"""Datagram: unreliable messages to and from anyone, and multicast."""

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from anyio.abc import UnreliableObjectReceiveStream

from aiordma._base.arguments import Buffer, data, optional_seconds, shown, text, whole_number
from aiordma._base.enums import Access, PortSpace
from aiordma._base.errors import AddressError, NotSupportedError
from aiordma._base.opening import opens
from aiordma._base.options import (
    DECIDED_FOR_DATAGRAMS,
    ConnectionKeywords,
    ConnectionOptions,
    refuses,
)
from aiordma._base.provider import Provider, checked_device, wanted_device
from aiordma._base.socket_address import SocketAddress
from aiordma._base.states import ConnectionState
from aiordma._connection.connection import ConnectionInfo
from aiordma._connection.posts import Posts
from aiordma._connection.works import message_work, send_flags
from aiordma._datagram.address_handles import PeerHandle
from aiordma._datagram.endpoint import DatagramEndpoint
from aiordma._datagram.message import DatagramMessage, DatagramReceive
from aiordma._datagram.multicast import MulticastGroup, check_group, join_group
from aiordma._datagram.peer import MOST_QKEY, MOST_QPN, UDP_QKEY, DatagramPeer
from aiordma._datagram.resolution import resolve_peer
from aiordma._endpoint.registration import register, register_in_thread
from aiordma._endpoint.staging import PARTS, Staging, call_of, several
from aiordma._requests.credits import Slot
from aiordma._requests.request import WorkRequest
from aiordma._runtime.address_lookup import checked_host, checked_port, numeric_address
from aiordma._runtime.device_choice import with_device
from aiordma._runtime.identifiers import new_identifier
from aiordma._runtime.reactor import acquire_reactor
from aiordma.verbs import (
    GRH_BYTES,
    MOST_LID,
    AddressVector,
    Context,
    LocalMemory,
    MemoryRegion,
    MemorySlice,
    ProtectionDomain,
    SendWork,
)
from aiordma.verbs.address import MOST_GID_INDEX, MOST_SERVICE_LEVEL
from aiordma.verbs.identifier import (
    MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
    ConnectionParameters,
    check_private_data,
)
from aiordma.verbs.memory import flat_view

__all__ = ("Datagram", "open_datagram")


@refuses(DECIDED_FOR_DATAGRAMS)
@opens
async def open_datagram(
    host: str,
    port: int = 0,
    *,
    device: str = "auto",
    receive_buffers: int = 64,
    max_recv_wr: int = 64,
    max_send_wr: int = 64,
    max_send_sge: int = 4,
    max_recv_sge: int = 4,
    max_inline_data: int = 64,
    comp_vector: int = 0,
    cqe: int | None = None,
    gid_index: int | None = None,
    service_level: int | None = None,
    most_handles: int = 256,
    qkey: int = UDP_QKEY,
    private_data: bytes = b"",
) -> "Datagram":
    """Open a datagram socket: one UD queue pair at a port of a local address.

    Peers that resolve that port (`Datagram.resolve`, or rdma_resolve_addr and rdma_connect in the
    UDP port space) get the queue pair's number.

    Args:
        host: a local address, which decides the device. Not "0.0.0.0": a queue pair belongs to one
            device.
        port: in RDMA's UDP port space; 0 takes a free one (`socket.port`).
        device: "auto" takes the real RDMA device that has the address, else the built-in "software"
            one; a name insists on one.
        receive_buffers: receives that are posted for you. A datagram that arrives while each of
            them holds one that you have not received is dropped, which is not reported. 0: you post
            receives yourself with `post_recv`.
        max_recv_wr: how many of those may be posted.
        max_send_wr: sends in flight; `post_ud_send` raises QueueFullError beyond it, `send` waits.
        max_send_sge: parts that one datagram may be gathered from.
        max_recv_sge: parts that one may be scattered to, beside its header.
        max_inline_data: datagrams up to this length, in bytes, are copied at the post.
        comp_vector: which of the device's completion vectors (interrupts) its completion queue
            uses, as of ConnectionOptions.
        cqe: entries of its completion queue, as of ConnectionOptions.
        gid_index: which of the port's GIDs is the source of datagrams to peers of `resolve` and
            `peer`, and `Datagram.gid`; None: the GID of the address `host` (on RoCE, of version 2).
            A reply to `message.source` has the GID that the message was sent to.
        service_level: of datagrams to all peers but groups, 0..15 (InfiniBand's SL; on RoCE the
            priority of a VLAN); None: for peers of `resolve`, that of the resolved path, for
            `message.source`, that of the message, for peers of `peer`, 0. The software device
            does not send it.
        most_handles: peers that an address handle is kept for, and senders that are remembered.
        qkey: the queue pair's key: datagrams with another are dropped. With any but the port
            space's own, no peer can resolve this socket, since the connection manager hands out
            that one: peers have to learn address, number and key some other way.
        private_data: up to 136 bytes for peers that resolve this socket
            (`DatagramPeer.private_data`).

    Raises:
        NotSupportedError: the device has no datagrams.
        AddressError: the host's name does not resolve, or the address is that of another device
            than the one insisted on.
        NoDeviceError: a real device is insisted on, and there is none here.
        TypeError, ValueError: an argument is invalid; the message names it, and what is expected.
        VerbsCallError: the address or port cannot be had; the message says why.
        ForkError: this process is a child of one that used real devices.

    Cancellation: nothing is left.

    See: man rdma_bind_addr, rdma_listen.
    """
    call = "open_datagram"
    host, port = checked_host(host, "host", call), checked_port(port, "port", call)
    sizes = ConnectionKeywords(
        receive_buffers=receive_buffers,
        max_recv_wr=max_recv_wr,
        max_send_wr=max_send_wr,
        max_send_sge=max_send_sge,
        max_recv_sge=max_recv_sge,
        max_inline_data=max_inline_data,
        comp_vector=comp_vector,
        cqe=cqe,
    )
    options = ConnectionOptions._of(open_datagram, sizes)
    private_data = check_private_data(
        private_data,
        MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
        "the answer to those who resolve a datagram port",
        call,
    )
    qkey = whole_number(qkey, "qkey", 0, MOST_QKEY, call)
    most_handles = whole_number(most_handles, "most_handles", 1, 1 << 16, call)
    if gid_index is not None:
        gid_index = whole_number(gid_index, "gid_index", 0, MOST_GID_INDEX, call)
    if service_level is not None:
        service_level = whole_number(service_level, "service_level", 0, MOST_SERVICE_LEVEL, call)
    device = checked_device(device, call)
    wanted = wanted_device(device)
    numeric = await numeric_address(host)
    if ipaddress.ip_address(numeric).is_unspecified:
        raise ValueError(
            f"host={host!r}: a datagram socket belongs to one device; give the address of its "
            "interface (`rdma link` lists devices and their interfaces)"
        )

    async def attempt(provider: Provider) -> Datagram:
        endpoint = await _bound(
            provider, numeric, port, wanted, options, private_data, most_handles
        )
        try:
            await endpoint.start(numeric, qkey, gid_index, service_level)
            return Datagram(endpoint, numeric)
        except BaseException:
            await endpoint.aclose()
            raise

    return await with_device(device, numeric, attempt)


async def _bound(
    provider: Provider,
    numeric: str,
    port: int,
    wanted: str | None,
    options: ConnectionOptions,
    private_data: bytes,
    most_handles: int,
) -> DatagramEndpoint:
    """Return an endpoint without a queue pair, on the device that has the address."""
    reactor = await acquire_reactor(provider)
    async with new_identifier(reactor, PortSpace.UDP) as identifier:
        identifier.bind(numeric, port)
        if not identifier.device_key:
            error = AddressError(f"{numeric} is not the address of an RDMA device")
            error.is_unreached = True
            raise error
        hub = await reactor.hub(identifier)
        name = hub.context.device_name
        if wanted is not None and name != wanted:
            raise AddressError(f"{numeric} is {name}'s, not {wanted}'s, which was asked for")
        if not hub.attributes.max_ah:
            # Devices without address handles have no UD queue pairs either: iWARP's.
            raise NotSupportedError(f"datagrams: {name} has none (max_ah 0)")
    # From here the endpoint owns the identifier, and the use of the reactor.
    endpoint = DatagramEndpoint(reactor, hub, identifier, options, private_data, most_handles)
    reactor.subscribe(identifier, endpoint.handle_event, endpoint)
    return endpoint


class Datagram(UnreliableObjectReceiveStream[DatagramMessage]):
    """A datagram socket: messages of up to the path MTU, to any peer; a lost one is not reported.
    Made by `open_datagram`. An anyio UnreliableObjectReceiveStream.

        peer = await socket.resolve("192.0.2.1", 7174)
        await socket.send(b"hello", peer)
        message = await socket.receive()
        await socket.send(b"you said " + message.data, message.source)

    The device drops a datagram for which its receiver has no receive posted, or which carries
    another qkey, and reports it to neither side. A send completes when it is on its way, not when
    it arrives.

    Buffers are the device's until their request ends, as a connection's are, and so are the address
    handles, which are kept per peer (docs/guarantees.md).
    """

    def __init__(self, endpoint: DatagramEndpoint, host: str) -> None:
        self._endpoint = endpoint
        self._staging = Staging(endpoint)
        self._posts = Posts(endpoint, self._staging, endpoint.sends)
        self._host = host
        self._local = endpoint.identifier.local_address
        assert endpoint.received is not None
        self._received = endpoint.received

    def __repr__(self) -> str:
        return repr(self._endpoint)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def local_address(self) -> SocketAddress | None:
        """Our (host, port)."""
        return self._local

    @property
    def port(self) -> int:
        """The port at which peers resolve it."""
        return self._local[1] if self._local else 0

    @property
    def device_name(self) -> str:
        """The RDMA device it runs on."""
        return self._endpoint.hub.context.device_name

    @property
    def mtu(self) -> int:
        """The longest payload, in bytes: the active MTU of our port."""
        return self._endpoint.mtu

    @property
    def qp_num(self) -> int:
        """The number of our queue pair; after the socket has closed, too."""
        return self._endpoint.qpn

    @property
    def context(self) -> Context:
        """The opened device, as `Connection.context`: shared, and not to be closed."""
        return self._endpoint.hub.context

    @property
    def domain(self) -> ProtectionDomain:
        """The protection domain, as `Connection.domain`: shared, and not to be closed."""
        return self._endpoint.hub.domain

    @property
    def qkey(self) -> int:
        """What a datagram must carry to be taken."""
        return self._endpoint.qkey

    @property
    def gid(self) -> bytes:
        """Our address as a GID, 16 bytes. A peer that does not resolve us needs it, `lid`, `qp_num`
        and `qkey`."""
        return self._endpoint.gid

    @property
    def lid(self) -> int:
        """Our port's InfiniBand address; 0 on RoCE, which has none."""
        return self._endpoint.lid

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The typed attributes of anyio."""
        return {
            ConnectionInfo.local_address: lambda: self._local,
            ConnectionInfo.device_name: lambda: self.device_name,
        }

    # -- peers --------------------------------------------------------------------------------

    async def resolve(
        self,
        host: str,
        port: int,
        *,
        private_data: bytes = b"",
        timeout: float | None = 30.0,
    ) -> DatagramPeer:
        """Ask the peer's connection manager for the queue pair at a port.

        Args:
            host: a name or a numeric address of the peer's RDMA interface, of our own address's IP
                version.
            port: its port, in RDMA's UDP port space.
            private_data: up to 180 bytes for the peer's program.
            timeout: seconds for all steps together; None for as long as it takes.

        Raises:
            UnreachableError: no queue pair takes datagrams at that port, or the peer does not
                answer.
            AddressError, RouteError, ConnectTimeoutError: the step that failed and why.
            RdmaConnectionError: the driver refused a call; `errno` is the call's.
            TypeError, ValueError: an argument is invalid; the message names it.
            ClosedError: the socket is closed, or was while the peer was asked.
            DeviceRemovedError, DeviceEventError, WorkCompletionError: what ended the socket
                meanwhile.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the peer may have been asked; nothing is left.

        See: man rdma_connect.
        """
        call = "resolve"
        host, port = checked_host(host, "host", call), checked_port(port, "port", call)
        private_data = check_private_data(
            private_data, MAX_DATAGRAM_CONNECT_PRIVATE_DATA, "resolving a datagram port", call
        )
        parameters = ConnectionParameters(private_data=private_data)
        timeout = optional_seconds(timeout, "timeout", call)
        self._endpoint.require_usable()
        endpoint = self._endpoint
        peer = await endpoint.resolve(
            resolve_peer(endpoint.reactor, self._host, host, port, parameters, timeout)
        )
        return replace(peer, address=endpoint.path(peer.address))

    def peer(self, gid: bytes, qpn: int, qkey: int | None = None, *, lid: int = 0) -> DatagramPeer:
        """Return a peer from numbers that were learned some other way than by `resolve`.

        Args:
            gid: of its port, 16 bytes; on RoCE its IP address, IPv4-mapped where it is IPv4.
            qpn: its queue pair's number.
            qkey: the key it demands; None: the same as ours.
            lid: its port's InfiniBand address.

        Raises:
            TypeError, ValueError: a number is out of range, or the gid has not 16 bytes.
        """
        gid = data(gid, "gid", "peer")
        if len(gid) != 16:
            raise ValueError(f"peer(): a gid has 16 bytes, and this has {len(gid)}")
        qpn = whole_number(qpn, "qpn", 0, MOST_QPN, "peer")
        if qkey is not None:
            qkey = whole_number(qkey, "qkey", 0, MOST_QKEY, "peer")
        lid = whole_number(lid, "lid", 0, MOST_LID, "peer")
        way = AddressVector(
            port=self._endpoint.identifier.port,
            gid=gid,
            gid_index=self._endpoint.gid_index,
            lid=lid,
            service_level=self._endpoint.service_level or 0,
        )
        return DatagramPeer(way, qpn, self.qkey if qkey is None else qkey)

    async def join(
        self, group: str, *, send_only: bool = False, timeout: float | None = 30.0
    ) -> MulticastGroup:
        """Join a multicast group.

        Args:
            group: a numeric multicast address, of our address's IP version.
            send_only: only send to it; datagrams to the group are not received here.
            timeout: seconds; None for as long as it takes.

        Raises:
            MulticastError: the network or the device refused.
            NotSupportedError: the kernel joins no such group with this device: on RoCE v2, Linux
                joins none of IPv6.
            ConnectTimeoutError: it was not confirmed in time.
            TypeError, ValueError: this is not a multicast address, or it is joined already.
            ClosedError: the socket is closed.
            DeviceRemovedError, DeviceEventError, WorkCompletionError: what ended the socket.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the group is not joined, or joined and left again.

        See: man rdma_join_multicast.
        """
        group = text(group, "group", "a numeric multicast address such as '239.1.2.3'", "join")
        timeout = optional_seconds(timeout, "timeout", "join")
        address = check_group(group, self._host)
        self._endpoint.require_usable()
        return await join_group(
            self._endpoint,
            address,
            self._host,
            send_only=send_only,
            timeout=timeout,
            groups=self._endpoint.groups,
        )

    # -- memory ---------------------------------------------------------------------------------

    def register(self, buffer: Buffer, access: Access | None = None) -> MemoryRegion:
        """Register a buffer for this socket's requests. It stays registered until `region.close()`
        or until the socket closes.

        Args:
            buffer, access: as of `Connection.register`.

        Raises: as `Connection.register`.

        See: man ibv_reg_mr.
        """
        return register(self._endpoint, buffer, access)

    async def register_in_thread(
        self, buffer: Buffer, access: Access | None = None
    ) -> MemoryRegion:
        """Register a buffer as `register` does, in a worker thread.

        Args:
            buffer, access: as of `Connection.register`.

        Raises: as `Connection.register`.

        Cancellation: as `Connection.register_in_thread`.
        """
        return await register_in_thread(self._endpoint, buffer, access)

    # -- sending --------------------------------------------------------------------------------

    def post_ud_send(
        self,
        data: LocalMemory,
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post a datagram (rdma_post_ud_send). The request ends when the datagram is on its way.

        The first one to a peer makes an address handle in this call, which can take as long as the
        network needs to answer; `send` does that in a thread.

        Args:
            data: registered memory, or any object with a buffer: up to `mtu` bytes.
            peer: of `resolve`, `message.source` or `peer`; or a joined group.
            immediate: 32 bits beside the data, as an int.
            solicited: make its arrival an event for a peer that waits for solicited ones only.

        Raises:
            QueueFullError: `max_send_wr` sends are in flight; nothing was posted.
            TypeError, ValueError: longer than the path MTU, or an argument is invalid; nothing was
                posted.
            NotSupportedError: the device has no immediate data.
            MulticastError: the network ended the membership of the group.
            VerbsCallError: there is no path to the peer, or the device refused.
            ClosedError, DeviceRemovedError, DeviceEventError, WorkCompletionError: the socket has
                ended, or the group was left.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man rdma_post_ud_send, ibv_post_send.
        """
        where = "post_ud_send(): data"
        return self._post_at_once(where, [data], peer, immediate, solicited)

    def post_ud_sendv(
        self,
        parts: Iterable[LocalMemory],
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post one datagram gathered from several buffers, as `post_ud_send` does.

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            peer, immediate, solicited: as of `post_ud_send`.

        Raises: as `Datagram.post_ud_send`.
        """
        given = several(parts, "post_ud_sendv")
        where = f"post_ud_sendv(): {PARTS}"
        return self._post_at_once(where, given, peer, immediate, solicited)

    def _post_at_once(
        self,
        where: str,
        parts: list[LocalMemory],
        peer: DatagramPeer | MulticastGroup,
        immediate: int | None,
        solicited: bool,
    ) -> WorkRequest:
        work, way = self._describe(parts, where, peer, immediate, solicited)
        handle = self._endpoint.handles.get(way)
        try:
            return self._post(work, handle, parts, where)
        finally:
            handle.release()  # the request holds it by now

    async def send(
        self,
        data: LocalMemory,
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> None:
        """Send a datagram, and wait until it is on its way. Waits for a free slot.

        Whether the datagram arrives is not reported.

        Args:
            data, peer, immediate, solicited: as of `post_ud_send`.

        Raises:
            TypeError, ValueError: longer than the path MTU, or an argument is invalid; nothing was
                posted.
            NotSupportedError: the device has no immediate data.
            MulticastError: the network ended the membership of the group.
            VerbsCallError: there is no path to the peer, or the device refused.
            WorkCompletionError: the request failed; FlushedError if the socket ended before.
            ClosedError, DeviceRemovedError, DeviceEventError: the socket has ended, or the group
                was left.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the datagram may or may not be sent; its buffer and address handle are held
        until that is decided.

        See: man rdma_post_ud_send.
        """
        await self._send("send(): data", [data], peer, immediate, solicited)

    async def sendv(
        self,
        parts: Iterable[LocalMemory],
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> None:
        """Send one datagram gathered from several buffers, as `send` does.

        Args:
            parts: registered memory, or objects with a buffer; at most `max_send_sge`.
            peer, immediate, solicited: as of `post_ud_send`.

        Raises: as `Datagram.send`.

        Cancellation: as `Datagram.send`.
        """
        given = several(parts, "sendv")
        await self._send(f"sendv(): {PARTS}", given, peer, immediate, solicited)

    async def _send(
        self,
        where: str,
        parts: list[LocalMemory],
        peer: DatagramPeer | MulticastGroup,
        immediate: int | None,
        solicited: bool,
    ) -> None:
        work, way = self._describe(parts, where, peer, immediate, solicited)
        with await self._endpoint.sends.slots.take() as slot:
            handle = await self._endpoint.handles.obtain(way)
            try:
                request = self._post(work, handle, parts, where, slot)
            finally:
                handle.release()
        await request

    def _describe(
        self,
        parts: list[LocalMemory],
        where: str,
        peer: DatagramPeer | MulticastGroup,
        immediate: int | None,
        solicited: bool,
    ) -> tuple[SendWork, AddressVector]:
        """Return what is asked for, but for its memory, and the way to the peer."""
        call = call_of(where)
        work = message_work(self._endpoint, call, immediate, flags=send_flags(False, solicited))
        length = _length(parts, where)
        if length > self._endpoint.mtu:
            raise ValueError(
                f"{call}(): {length} bytes in one datagram: the path MTU of {self.device_name} is "
                f"{self._endpoint.mtu}"
            )
        to = peer.peer if isinstance(peer, MulticastGroup) else peer
        if not isinstance(to, DatagramPeer):
            raise TypeError(
                f"{call}(): peer={shown(peer)}: {type(peer).__name__} is no DatagramPeer: "
                "resolve() finds one, and a message's source is one"
            )
        work.remote_qpn, work.remote_qkey = to.qpn, to.qkey
        return work, to.address

    def _post(
        self,
        work: SendWork,
        handle: PeerHandle,
        parts: list[LocalMemory],
        where: str,
        slot: Slot | None = None,
    ) -> WorkRequest:
        work.address, work.held = handle.handle, [handle]
        return self._posts.post(work, self._staging.source, parts, where, slot)

    # -- receiving into your own memory -------------------------------------------------------

    def post_recv(self, buffer: LocalMemory) -> DatagramReceive:
        """Post a receive of one datagram, on a socket made with receive_buffers=0.

        Args:
            buffer: registered memory, or any writable buffer, with room for `mtu` bytes: a datagram
                longer than the receive that it meets would end the socket, and any peer can send
                one. The header is stored elsewhere; the payload is at the buffer's start.

        Raises:
            QueueFullError: `max_recv_wr` receives are posted.
            ValueError: the socket posts its own receives; or the buffer is too short, or not
                contiguous.
            TypeError: the buffer is read-only, or the object has none.
            VerbsCallError: the device refused the receive; nothing was posted.
            ClosedError, DeviceRemovedError, DeviceEventError, WorkCompletionError: the socket has
                ended.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man rdma_post_recv.
        """
        return self._receive("post_recv(): buffer", [buffer])

    def post_recvv(self, parts: Iterable[LocalMemory]) -> DatagramReceive:
        """Post a receive scattered over several buffers, as `post_recv` does.

        Args:
            parts: registered memory, or writable buffers, filled in this order, with room for `mtu`
                bytes; at most `max_recv_sge`.

        Raises: as `Datagram.post_recv`.
        """
        return self._receive(f"post_recvv(): {PARTS}", several(parts, "post_recvv"))

    def _receive(self, where: str, given: list[LocalMemory]) -> DatagramReceive:
        endpoint = self._endpoint
        if endpoint.options.receive_buffers:
            raise ValueError(
                "this socket posts its own receives, and datagrams go to the oldest one: use "
                "receive(), or open it with receive_buffers=0"
            )
        endpoint.require_usable()
        most = endpoint.capacity.max_recv_sge - 1
        if len(given) > most:
            raise ValueError(
                f"{len(given)} parts: beside the header's there is room for {most}; ask for more "
                "with max_recv_sge="
            )
        length = _length(given, where)
        if length < endpoint.mtu:
            raise ValueError(
                f"room for {length} bytes: a datagram can have {endpoint.mtu} (the path MTU), and "
                "one that does not fit would end the socket"
            )
        staged = self._staging.receive(given, where)
        header = endpoint.hub.pool.lease(GRH_BYTES)
        try:
            request = endpoint.receives.submit(
                header.memory._sge + staged.sges,
                1 + staged.count,
                GRH_BYTES + staged.length,
                staged.held,
            )
        except BaseException:
            header.release()
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        assert endpoint.senders is not None
        return DatagramReceive(request, header, endpoint.senders)

    # -- receiving ----------------------------------------------------------------------------

    async def receive(self) -> DatagramMessage:
        """Return the next datagram.

        Raises:
            anyio.BusyResourceError: another task is receiving.
            ClosedError: you closed the socket.
            DeviceRemovedError, DeviceEventError, WorkCompletionError: what ended it.
            ValueError: it was opened with receive_buffers=0.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no datagram that arrived is lost; the next call returns it.
        """
        if not self._endpoint.options.receive_buffers:
            raise ValueError(
                "this socket was opened with receive_buffers=0: post receives with post_recv()"
            )
        return await self._received.receive()

    # -- the end ------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Leave all groups, and give back everything. Idempotent.

        Requests still in flight end with FlushedError; await those that matter first. Tasks that
        resolve a peer, join or receive get ClosedError. Datagrams that were not received are
        dropped. Registered regions are closed.

        Raises:
            EventLoopError: called outside of its event loop; the message says what became of the
                socket.

        Cancellation: the socket closes all the same, and the call returns once it is closed.
        """
        await self._endpoint.aclose()

    def __del__(self) -> None:
        endpoint = getattr(self, "_endpoint", None)
        if (
            endpoint is not None
            and endpoint.state is not ConnectionState.CLOSED
            and not endpoint.is_inherited
        ):
            endpoint.forget()


def _length(parts: list[LocalMemory], where: str) -> int:
    return sum(
        part.length
        if isinstance(part, MemoryRegion | MemorySlice)
        else flat_view(part, where, i).nbytes
        for i, part in enumerate(parts)
    )
