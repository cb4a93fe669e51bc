"""Datagram: unreliable messages to and from any number of peers, and multicast."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from anyio.abc import UnreliableObjectReceiveStream

from aiordma._base.arguments import checked_gid, optional_seconds, shown, text, whole_number
from aiordma._base.connection_parameters import (
    MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
    ConnectionParameters,
    check_private_data,
)
from aiordma._base.socket_address import SocketAddress
from aiordma._connection.connection import ConnectionInfo
from aiordma._connection.general_path import GeneralPath
from aiordma._connection.on_device import OnDevice
from aiordma._connection.operations import message_work, send_flags
from aiordma._datagram.address_handles import PeerHandle
from aiordma._datagram.endpoint import DatagramEndpoint
from aiordma._datagram.message import DatagramMessage, DatagramReceive
from aiordma._datagram.multicast import MulticastGroup, check_group, join_group
from aiordma._datagram.peer import MOST_QKEY, MOST_QP_NUM, DatagramPeer
from aiordma._datagram.resolution import resolve_peer
from aiordma._endpoint.staging import PARTS, Staging, call_of, several
from aiordma._native import calls_port, ffi
from aiordma._requests.credits import Slot
from aiordma._requests.request import WorkRequest
from aiordma._runtime.address_lookup import checked_host, checked_port
from aiordma.verbs import (
    GRH_BYTES,
    AddressVector,
    LocalMemory,
    SendWork,
)
from aiordma.verbs.address import MOST_LID
from aiordma.verbs.buffers import flat_view
from aiordma.verbs.memory import MemoryRegion, MemorySlice


class Datagram(OnDevice, UnreliableObjectReceiveStream[DatagramMessage]):
    """A datagram socket: messages of up to the port's MTU, to any peer. A lost message is not
    reported. Made by `open_datagram`. An anyio UnreliableObjectReceiveStream.

        peer = await socket.resolve("192.0.2.1", 7174)
        await socket.send(b"hello", peer)
        message = await socket.receive()
        await socket.send(b"you said " + message.data, message.source)

    The receiver's device drops a datagram if no receive is posted, or if its qkey is wrong. Neither
    side is notified. A send completes when the device has sent the datagram, not when it arrives.

    As with connections, the device owns a buffer until its request completes. The same holds for
    address handles, which are cached per peer (docs/guarantees.md).
    """

    def __init__(self, endpoint: DatagramEndpoint, host: str) -> None:
        self._endpoint: DatagramEndpoint = endpoint
        self._staging = Staging(endpoint)
        self._port = endpoint.work.port
        self._general = GeneralPath(endpoint, self._staging, endpoint.work.sends)
        self._host = host
        self._local = endpoint.local_address
        self._received = endpoint.received
        self._queue = endpoint.received.queue
        self._senders = endpoint.senders
        self._begun = True

    def __repr__(self) -> str:
        return repr(self._endpoint)

    # -- attributes ---------------------------------------------------------------------------

    @property
    def local_address(self) -> SocketAddress | None:
        """The local (host, port)."""
        return self._local

    @property
    def port(self) -> int:
        """The port at which peers resolve the socket."""
        return self._local[1] if self._local else 0

    @property
    def mtu(self) -> int:
        """The longest payload, in bytes: the active MTU of the local port."""
        return self._endpoint.mtu

    @property
    def qkey(self) -> int:
        """The key that a datagram to this socket must contain."""
        return self._endpoint.qkey

    @property
    def gid(self) -> bytes:
        """The local address as a GID, 16 bytes. A peer that does not resolve this socket needs it,
        `lid`, `qp_num` and `qkey`."""
        return self._endpoint.gid

    @property
    def lid(self) -> int:
        """The local port's InfiniBand address; 0 on RoCE, which has none."""
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
        """Query the peer's connection manager for the queue pair at a port.

        Args:
            host: a name or a numeric address of the peer's RDMA interface, of the same IP version
                as the local address.
            port: the peer's port in RDMA's UDP port space.
            private_data: up to 180 bytes for the peer's program.
            timeout: seconds for all steps together; None: no limit.

        Raises:
            UnreachableError: no queue pair takes datagrams at that port, or the peer does not
                answer.
            AddressError, RouteError, ConnectTimeoutError: a step failed; the message says which,
                and why.
            RdmaConnectionError: the driver refused a call; `errno` is the call's.
            TypeError, ValueError: an argument is invalid; the message names it.
            ClosedError: the socket is closed, or was closed during the call.
            DeviceRemovedError, DeviceEventError, WorkCompletionError: the socket has ended; the
                error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the peer may have been queried; nothing is left.

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

    def peer(
        self, gid: bytes, qp_num: int, qkey: int | None = None, *, lid: int = 0
    ) -> DatagramPeer:
        """Return a peer for numbers from another source than `resolve`.

        Args:
            gid: the GID of the peer's port, 16 bytes; on RoCE its IP address (IPv4-mapped for
                IPv4).
            qp_num: the peer's queue pair number.
            qkey: the peer's key; None: the same as the local one.
            lid: the InfiniBand address of the peer's port.

        Raises:
            TypeError, ValueError: a number is out of range, or the gid does not have 16 bytes.
        """
        gid = checked_gid(gid, "peer")
        qp_num = whole_number(qp_num, "qp_num", 0, MOST_QP_NUM, "peer")
        if qkey is not None:
            qkey = whole_number(qkey, "qkey", 0, MOST_QKEY, "peer")
        lid = whole_number(lid, "lid", 0, MOST_LID, "peer")
        vector = AddressVector(
            port=self._endpoint.identifier.port,
            gid=gid,
            gid_index=self._endpoint.gid_index,
            lid=lid,
            service_level=self._endpoint.service_level or 0,
        )
        return DatagramPeer(vector, qp_num, self.qkey if qkey is None else qkey)

    async def join(
        self, group: str, *, send_only: bool = False, timeout: float | None = 30.0
    ) -> MulticastGroup:
        """Join a multicast group.

        Args:
            group: a numeric multicast address of the same IP version as the local address.
            send_only: only send to the group; its datagrams are not received here.
            timeout: seconds; None: no limit.

        Raises:
            MulticastError: the network or the device refused.
            NotSupportedError: the kernel does not support the group on this device: on RoCE v2,
                Linux joins no IPv6 groups.
            ConnectTimeoutError: the network did not confirm the membership in time.
            TypeError, ValueError: `group` is not a multicast address, or is joined already.
            ClosedError: the socket is closed.
            DeviceRemovedError, DeviceEventError, WorkCompletionError: the socket has ended; the
                error is its cause.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the group is not joined, or it is left again.

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

    # -- sending --------------------------------------------------------------------------------

    @calls_port("ud_send")
    def post_ud_send(
        self,
        data: LocalMemory,
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post a datagram (rdma_post_ud_send). The request completes when the device has sent the
        datagram.

        The first datagram to a peer creates an address handle in this call, which blocks until the
        network answers. `send` creates it in a worker thread.

        Args:
            data: registered memory, or any object with a buffer: up to `mtu` bytes.
            peer: a peer from `resolve`, `message.source` or `peer`; or a joined group.
            immediate: 32 bits to send with the data, as an int; None: none.
            solicited: make the datagram's arrival a solicited event, for a peer that waits for
                solicited events only.

        Raises:
            QueueFullError: `max_send_wr` sends are in flight; nothing was posted.
            TypeError, ValueError: the data is longer than the MTU, or an argument is invalid;
                nothing was posted.
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

    @calls_port("ud_sendv")
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
        work, vector = self._describe(parts, where, peer, immediate, solicited)
        handle = self._endpoint.handles.get(vector)
        try:
            return self._post(work, peer, handle, parts, where)
        finally:
            handle.release()  # a posted request holds it itself

    async def send(
        self,
        data: LocalMemory,
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> None:
        """Send a datagram, and wait until the device has sent it. The call waits for a free slot.

        Whether the datagram arrives is not reported.

        Args:
            data, peer, immediate, solicited: as of `post_ud_send`.

        Raises:
            TypeError, ValueError: the data is longer than the MTU, or an argument is invalid;
                nothing was posted.
            NotSupportedError: the device has no immediate data.
            MulticastError: the network ended the membership of the group.
            VerbsCallError: there is no path to the peer, or the device refused.
            WorkCompletionError: the request failed; FlushedError if the socket ended before it was
                carried out.
            ClosedError, DeviceRemovedError, DeviceEventError: the socket has ended, or the group
                was left.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: the datagram may or may not be sent; its buffer and address handle are held
        until the request completes.

        See: man rdma_post_ud_send.
        """
        request = self._port.ud_send(data, peer, immediate=immediate, solicited=solicited)
        if request is not None:
            await request
            return
        where = "send(): data"
        await (await self._post_when_free(where, [data], peer, immediate, solicited))

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
        request = self._port.ud_sendv(parts, peer, immediate=immediate, solicited=solicited)
        if request is not None:
            await request
            return
        given = several(parts, "sendv")
        where = f"sendv(): {PARTS}"
        await (await self._post_when_free(where, given, peer, immediate, solicited))

    async def _post_when_free(
        self,
        where: str,
        parts: list[LocalMemory],
        peer: DatagramPeer | MulticastGroup,
        immediate: int | None,
        solicited: bool,
    ) -> WorkRequest:
        work, vector = self._describe(parts, where, peer, immediate, solicited)
        # First the handle: the lookup of a peer that does not answer takes long, and with a slot it
        # would hold up what is sent to others.
        handle = await self._endpoint.handles.obtain(vector)
        try:
            with await self._endpoint.work.sends.slots.take() as slot:
                return self._post(work, peer, handle, parts, where, slot)
        finally:
            handle.release()  # a posted request holds it itself

    def _describe(
        self,
        parts: list[LocalMemory],
        where: str,
        peer: DatagramPeer | MulticastGroup,
        immediate: int | None,
        solicited: bool,
    ) -> tuple[SendWork, AddressVector]:
        """Return the operation, without its local memory, and the address vector of the peer."""
        call = call_of(where)
        work = message_work(self._endpoint, call, immediate, flags=send_flags(False, solicited))
        length = _length(parts, where)
        if length > self._endpoint.mtu:
            raise ValueError(
                f"{call}(): {length} bytes in one datagram: the MTU of {self.device_name}'s port "
                f"is {self._endpoint.mtu}"
            )
        to = peer.peer if isinstance(peer, MulticastGroup) else peer
        if not isinstance(to, DatagramPeer):
            raise TypeError(
                f"{call}(): peer={shown(peer)}: {type(peer).__name__} is no DatagramPeer: "
                "resolve() finds one, and a message's source is one"
            )
        work.remote_qpn, work.remote_qkey = to.qp_num, to.qkey
        return work, to.address

    def _post(
        self,
        work: SendWork,
        peer: DatagramPeer | MulticastGroup,
        handle: PeerHandle,
        parts: list[LocalMemory],
        where: str,
        slot: Slot | None = None,
    ) -> WorkRequest:
        work.address, work.held = handle.handle, [handle]
        request = self._general.post(work, self._staging.source, parts, where, slot)
        if isinstance(peer, DatagramPeer) and not handle.handle.closed:
            # The port posts the next datagrams to this peer. (A group can be left.)
            address = int(ffi.cast("uintptr_t", handle.handle.pointer))
            self._port.set_peer(peer, handle, address, work.remote_qpn, work.remote_qkey)
        return request

    # -- receiving into your own memory -------------------------------------------------------

    @calls_port("ud_receive")
    def post_recv(self, buffer: LocalMemory) -> DatagramReceive:
        """Post a receive of one datagram, on a socket with receive_buffers=0.

        Args:
            buffer: registered memory, or any writable buffer, of at least `mtu` bytes. On rxe, a
                datagram that is longer than its receive would end the socket, and any peer can send
                one. The payload is at the buffer's start; the header is stored in separate memory.

        Raises:
            QueueFullError: `max_recv_wr` receives are posted.
            ValueError: the socket posts its own receives; or the buffer is too short, or not
                contiguous.
            TypeError: the buffer is read-only, or the object has no buffer.
            VerbsCallError: the device refused the receive; nothing was posted.
            ClosedError, DeviceRemovedError, DeviceEventError, WorkCompletionError: the socket has
                ended.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        See: man rdma_post_recv.
        """
        return self._receive("post_recv(): buffer", [buffer])

    @calls_port("ud_receivev")
    def post_recvv(self, parts: Iterable[LocalMemory]) -> DatagramReceive:
        """Post a receive scattered over several buffers, as `post_recv` does.

        Args:
            parts: registered memory, or writable buffers, filled in this order; at least `mtu`
                bytes together, and at most `max_recv_sge` parts.

        Raises: as `Datagram.post_recv`.
        """
        return self._receive(f"post_recvv(): {PARTS}", several(parts, "post_recvv"))

    def _receive(self, where: str, given: list[LocalMemory]) -> DatagramReceive:
        endpoint, call = self._endpoint, call_of(where)
        if endpoint.options.receive_buffers:
            raise ValueError(
                f"{call}(): this socket posts its own receives, and datagrams go to the oldest "
                "one: use receive(), or open it with receive_buffers=0"
            )
        endpoint.require_usable()
        most = endpoint.pair.capacity.max_recv_sge - 1
        if len(given) > most:
            raise ValueError(
                f"{call}(): {len(given)} parts: expected at most {most}, because the header takes "
                "one more; ask for more with max_recv_sge="
            )
        length = _length(given, where)
        if length < endpoint.mtu:
            raise ValueError(
                f"{where.partition('[')[0]} has {length} bytes: expected at least {endpoint.mtu} "
                "(the port's MTU), the longest datagram that can arrive"
            )
        header = endpoint.memory.pool.lease(GRH_BYTES)
        try:
            request = self._general.receive(given, where, header)
        except BaseException:
            header.release()
            raise
        return DatagramReceive(request, header, self._senders)

    # -- receiving ----------------------------------------------------------------------------

    async def receive(self) -> DatagramMessage:
        """Return the next datagram.

        Raises:
            BusyError: another task is receiving.
            ClosedError: you closed the socket.
            DeviceRemovedError, DeviceEventError, WorkCompletionError: the socket has ended; the
                error is its cause.
            ValueError: the socket was opened with receive_buffers=0.
            EventLoopError, ForkError: called outside of its event loop, or in a forked child.

        Cancellation: no datagram that arrived is lost; the next call returns it.
        """
        message: DatagramMessage | None = self._queue.take_datagram_at_once(self._senders)
        if message is not None:
            return message
        if not self._endpoint.options.receive_buffers:
            raise ValueError(
                "receive(): this socket was opened with receive_buffers=0: post receives with "
                "post_recv()"
            )
        return await self._received.receive()

    # -- the end ------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Leave all groups, and release everything. Idempotent.

        Requests in flight fail with FlushedError: await the important ones first. Tasks that
        resolve a peer, join or receive raise ClosedError. Datagrams that were not received are
        dropped. Registered regions are closed.

        Raises:
            EventLoopError: called outside of its event loop; the message says what happens to the
                socket.
            VerbsCallError: the driver refused to destroy the queue pair, a region, an address
                handle or the identifier of a group. All requests have failed, and the socket stays
                in memory for the life of the process. A second call raises the same error.

        Cancellation: the socket still closes, and the call returns once it is closed.
        """
        await self._endpoint.aclose()


def _length(parts: list[LocalMemory], where: str) -> int:
    return sum(
        part.length
        if isinstance(part, MemoryRegion | MemorySlice)
        else flat_view(part, where, i).nbytes
        for i, part in enumerate(parts)
    )
