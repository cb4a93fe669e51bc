"""Datagram: unreliable messages to and from anyone, and multicast."""

import ipaddress
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from anyio.abc import UnreliableObjectReceiveStream

from aiordma.address_lookup import numeric_address
from aiordma.connection import ConnectionInfo
from aiordma.datagram_endpoint import DatagramEndpoint
from aiordma.datagram_message import DatagramMessage
from aiordma.datagram_peer import MOST_QKEY, UDP_QKEY, DatagramPeer
from aiordma.datagram_posting import DatagramPosting
from aiordma.device_choice import with_device
from aiordma.enums import PortSpace
from aiordma.errors import AddressError, NotSupportedError
from aiordma.event_waiter import give_back
from aiordma.multicast import MulticastGroup, check_group, join_group
from aiordma.options import ConnectionOptions
from aiordma.provider import Provider, wanted_device
from aiordma.rdmacm import (
    MAX_DATAGRAM_ACCEPT_PRIVATE_DATA,
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
    ConnectionParameters,
    Identifier,
)
from aiordma.reactor import acquire_reactor
from aiordma.resolution import resolve_peer
from aiordma.socket_address import SocketAddress
from aiordma.staging import Staging
from aiordma.states import ConnectionState
from aiordma.verbs import AddressVector

__all__ = ("Datagram", "open_datagram")


async def open_datagram(
    host: str,
    port: int = 0,
    *,
    device: str = "auto",
    receive_buffers: int = 64,
    receive_depth: int = 64,
    send_depth: int = 64,
    max_sge: int = 4,
    max_inline: int = 64,
    most_handles: int = 256,
    qkey: int = UDP_QKEY,
    private_data: bytes = b"",
) -> "Datagram":
    """Open a datagram socket: one UD queue pair at a port of a local address.

    Peers that resolve that port (`Datagram.resolve`, or rdma_resolve_addr and rdma_connect in the
    UDP port space) are told the queue pair's number.

    Args:
        host: a local address, which decides the device. Not "0.0.0.0": a queue pair belongs to one
            device.
        port: in RDMA's UDP port space; 0 takes a free one (`socket.port`).
        device: "auto" takes the real RDMA device that has the address, else the built-in
            "software" one; a name insists on one.
        receive_buffers: receives that are posted for you. A datagram that arrives while each of
            them holds one that you have not received is dropped, and nobody is told. 0: you post
            receives yourself with `post_recv`.
        receive_depth: how many of those may be posted.
        send_depth: sends in flight; `post_ud_send` raises QueueFullError beyond it, `send` waits.
        max_sge: parts that one datagram may be gathered from, or scattered to.
        max_inline: datagrams up to this length are copied at the post.
        most_handles: peers that an address handle is kept for, and senders that are remembered.
        qkey: the queue pair's key: datagrams with another are dropped. With any but the port
            space's own, nobody can resolve this socket, since the connection manager tells peers
            that one: they have to learn address, number and key some other way.
        private_data: up to 136 bytes for those who resolve us (`DatagramPeer.private_data`).

    Raises:
        NotSupportedError: the device has no datagrams.
        AddressError: the address is that of another device than the one insisted on.
        NoDeviceError: a real device is insisted on, and there is none here.
        ValueError: an argument is out of range; the message names it.
        VerbsCallError: the address or port cannot be had; the message says why.
    """
    options = ConnectionOptions(
        receive_buffers=receive_buffers,
        receive_depth=receive_depth,
        send_depth=send_depth,
        max_sge=max_sge,
        max_inline=max_inline,
    )
    ConnectionParameters(private_data=private_data).check(
        MAX_DATAGRAM_ACCEPT_PRIVATE_DATA, "the answer to who resolves a datagram port"
    )
    if not 0 <= qkey <= MOST_QKEY:
        raise ValueError(f"qkey={qkey:#x} is not in 0..{MOST_QKEY:#x}")
    if not 1 <= most_handles <= 1 << 16:
        raise ValueError(f"most_handles={most_handles} is not in 1..{1 << 16}")
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
            await endpoint.start(numeric, qkey)
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
    try:
        identifier = Identifier(reactor.channel, PortSpace.UDP)
    except BaseException:
        reactor.release()
        raise
    try:
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
    except BaseException:
        await give_back(reactor, identifier)
        raise
    # From here the endpoint owns the identifier, and the use of the reactor.
    endpoint = DatagramEndpoint(reactor, hub, identifier, options, private_data, most_handles)
    reactor.subscribe(identifier, endpoint.handle_event, endpoint)
    return endpoint


class Datagram(DatagramPosting, UnreliableObjectReceiveStream[DatagramMessage]):
    """A datagram socket: messages of up to the path MTU, to anyone, that may be lost, and then
    nobody is told. Made by `open_datagram`. An anyio UnreliableObjectReceiveStream.

        peer = await socket.resolve("192.0.2.1", 7174)
        await socket.send(b"hello", peer)
        message = await socket.receive()
        await socket.send(b"you said " + message.data, message.source)

    A datagram that its receiver has no receive posted for, or another qkey, is dropped by the
    device without a word to either side. A send ends when it is on its way, not when it arrives.

    Buffers are the device's until their request ends, as a connection's are, and so are the
    address handles, which are kept per peer (docs/guarantees.md).
    """

    def __init__(self, endpoint: DatagramEndpoint, host: str) -> None:
        self._endpoint = endpoint
        self._staging = Staging(endpoint)
        self._host = host
        self._local = endpoint.identifier.local_address
        assert endpoint.received is not None
        self._received = endpoint.received

    def __repr__(self) -> str:
        state = "" if self._endpoint.cause is None else f": {self._endpoint.state.value}"
        return f"<Datagram {self.qpn:#x} at {self._local} on {self.device_name}{state}>"

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
    def qpn(self) -> int:
        """Our queue pair's number."""
        return self._endpoint.qpn

    @property
    def qkey(self) -> int:
        """What a datagram must carry to be taken."""
        return self._endpoint.qkey

    @property
    def gid(self) -> bytes:
        """Our address as a GID, 16 bytes: with `lid`, `qpn` and `qkey` what a peer needs to know
        that does not resolve us."""
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
        """Ask who takes datagrams at a port of a host. Cancelled, it leaves nothing behind.

        Args:
            host: a name or a numeric address of the peer's RDMA interface, of our own address's
                IP version.
            port: its port, in RDMA's UDP port space.
            private_data: up to 180 bytes for the peer's program.
            timeout: seconds for all steps together; None for as long as it takes.

        Raises:
            UnreachableError: nobody takes datagrams at that port, or nobody answers.
            AddressError, RouteError, ConnectTimeoutError: the step that failed and why.
            ClosedError: the socket is closed, or was while the peer was asked.
            DeviceRemovedError, WorkCompletionError: what ended the socket meanwhile.
        """
        parameters = ConnectionParameters(private_data=private_data)
        parameters.check(MAX_DATAGRAM_CONNECT_PRIVATE_DATA, "resolving a datagram port")
        self._endpoint.require_usable()
        return await self._endpoint.resolve(
            resolve_peer(self._endpoint.reactor, self._host, host, port, parameters, timeout)
        )

    def peer(self, gid: bytes, qpn: int, qkey: int | None = None, *, lid: int = 0) -> DatagramPeer:
        """Return a peer from numbers that were learned some other way than `resolve`.

        Args:
            gid: of its port, 16 bytes; on RoCE its IP address, IPv4-mapped where it is IPv4.
            qpn: its queue pair's number.
            qkey: the key it demands; None: the same as ours.
            lid: its port's InfiniBand address.

        Raises:
            ValueError: a number is out of range, or the gid has not 16 bytes.
        """
        if len(gid) != 16:
            raise ValueError(f"a gid has 16 bytes, and this has {len(gid)}")
        way = AddressVector(
            port=self._endpoint.identifier.port,
            gid=bytes(gid),
            gid_index=self._endpoint.gid_index,
            lid=lid,
        )
        return DatagramPeer(way, qpn, self.qkey if qkey is None else qkey)

    async def join(
        self, group: str, *, send_only: bool = False, timeout: float | None = 30.0
    ) -> MulticastGroup:
        """Join a multicast group. Cancelled, it is not joined.

        Args:
            group: a numeric multicast address, of our address's IP version.
            send_only: only to send to it; what others send does not come here.
            timeout: seconds; None for as long as it takes.

        Raises:
            MulticastError: the network or the device refused.
            NotSupportedError: the kernel joins no such group with this device: on RoCE v2, Linux
                joins none of IPv6.
            ConnectTimeoutError: it was not confirmed in time.
            ValueError: it is no multicast address, or joined already.
            ClosedError: the socket is closed.
        """
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

    # -- receiving ----------------------------------------------------------------------------

    async def receive(self) -> DatagramMessage:
        """Return the next datagram. Cancelled, it loses none.

        Raises:
            anyio.BusyResourceError: another task is receiving.
            ClosedError: you closed the socket.
            DeviceRemovedError, WorkCompletionError: what ended it.
            ValueError: it was opened with receive_buffers=0.
        """
        if not self._endpoint.options.receive_buffers:
            raise ValueError(
                "this socket was opened with receive_buffers=0: post receives with post_recv()"
            )
        return await self._received.receive()

    # -- the end ------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Leave all groups, and give back everything. Idempotent; not cancelled by a cancellation.

        Requests still in flight end with FlushedError; await those that matter first. Who still
        resolves a peer, joins or receives gets ClosedError. Datagrams that were not received are
        dropped. Registered regions are closed.
        """
        await self._endpoint.aclose()

    def __del__(self) -> None:
        endpoint = getattr(self, "_endpoint", None)
        if (
            endpoint is not None
            and endpoint.state is not ConnectionState.CLOSED
            and not endpoint.is_inherited
        ):
            try:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)
            finally:
                # The collector may run in any thread; the loop may have ended.
                endpoint.loop.call_from_thread(endpoint.close)
