"""Posting datagrams: to whom, how long, and with which address handle."""

from collections.abc import Iterable

from aiordma.address_handles import PeerHandle
from aiordma.datagram_endpoint import DatagramEndpoint
from aiordma.datagram_message import DatagramReceive
from aiordma.datagram_peer import DatagramPeer
from aiordma.multicast import MulticastGroup
from aiordma.opcodes import Operation, send_flags, send_opcode
from aiordma.registration import Registration
from aiordma.request import WorkRequest
from aiordma.staging import Buffer, Staging
from aiordma.verbs import GRH_BYTES, MemoryRegion, MemorySlice, SendWork
from aiordma.verbs.memory import flat_view

__all__ = ("DatagramPosting",)


class DatagramPosting(Registration):
    """What a datagram socket posts with."""

    _endpoint: DatagramEndpoint
    _staging: Staging

    def post_ud_send(
        self,
        data: Buffer,
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post a datagram (rdma_post_ud_send). The request ends when it is on its way.

        The first one to a peer makes an address handle on the spot, which can take the time of a
        question to the network; `send` does that in a thread.

        Args:
            data: registered memory, or anything with a buffer: up to `mtu` bytes.
            peer: whom to send to: of `resolve`, `message.source`, `peer`, or a joined group.
            immediate: 32 bits that go beside the data, as an int.
            solicited: mark it so that a peer that waits for such ones only is woken.

        Raises:
            QueueFullError: `send_depth` sends are in flight; nothing was posted.
            ValueError: longer than the path MTU, or the buffer will not do; nothing was posted.
            VerbsCallError: there is no way to the peer, or the device refused.
        """
        return self.post_ud_sendv([data], peer, immediate=immediate, solicited=solicited)

    def post_ud_sendv(
        self,
        parts: Iterable[Buffer],
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> WorkRequest:
        """Post one datagram gathered from several buffers. See `post_ud_send`."""
        given, target = self._check(parts, peer)
        extra = self._extra(immediate, solicited)
        handle = self._endpoint.handles.get(target.address)
        try:
            return self._post(given, target, handle, extra, credited=False)
        finally:
            handle.release()  # the request holds it by now

    async def send(
        self,
        data: Buffer,
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> None:
        """Send a datagram, and wait until it is on its way. Waits for a free slot.

        Nobody is told whether it arrives. Cancelled, it may or may not be sent. Arguments and
        errors are those of `post_ud_send`, without QueueFullError.
        """
        await self.sendv([data], peer, immediate=immediate, solicited=solicited)

    async def sendv(
        self,
        parts: Iterable[Buffer],
        peer: DatagramPeer | MulticastGroup,
        *,
        immediate: int | None = None,
        solicited: bool = False,
    ) -> None:
        """Send one datagram gathered from several buffers. See `send`."""
        given, target = self._check(parts, peer)
        extra = self._extra(immediate, solicited)
        await self._endpoint.send_credits.take()
        try:
            handle = await self._endpoint.handles.obtain(target.address)
        except BaseException:
            self._endpoint.send_credits.give()
            raise
        try:
            request = self._post(given, target, handle, extra, credited=True)
        finally:
            handle.release()
        await request

    def _check(
        self, parts: Iterable[Buffer], peer: DatagramPeer | MulticastGroup
    ) -> tuple[list[Buffer], DatagramPeer]:
        self._endpoint.require_usable()
        given = list(parts)
        length = _length(given)
        if length > self._endpoint.mtu:
            device = self._endpoint.hub.context.device_name
            raise ValueError(
                f"{length} bytes in one datagram: the path MTU of {device} is {self._endpoint.mtu}"
            )
        if isinstance(peer, MulticastGroup):
            return given, peer.peer
        if not isinstance(peer, DatagramPeer):
            raise TypeError(
                f"{type(peer).__name__} is no DatagramPeer: resolve() finds one, and a message's "
                "source is one"
            )
        return given, peer

    def _extra(self, immediate: int | None, solicited: bool) -> tuple[Operation, int, int]:
        operation, beside = send_opcode(self._endpoint, immediate, None)
        return operation, beside, send_flags(False, solicited)

    def _post(
        self,
        parts: list[Buffer],
        peer: DatagramPeer,
        handle: PeerHandle,
        extra: tuple[Operation, int, int],
        *,
        credited: bool,
    ) -> WorkRequest:
        (name, opcode), immediate, flags = extra
        try:
            staged = self._staging.source(parts)
        except BaseException:
            if credited:
                self._endpoint.send_credits.give()
            raise
        work = SendWork(
            name,
            opcode,
            staged.sges,
            staged.count,
            staged.length,
            [*staged.held, handle],
            flags | staged.flags,
            immediate=immediate,
            address=handle.handle,
            remote_qpn=peer.qpn,
            remote_qkey=peer.qkey,
        )
        try:
            (request,) = self._endpoint.post_sends([work], credited=credited)
        except BaseException:
            self._staging.abandon(staged)
            raise
        self._staging.posted(staged, request)
        return request

    # -- receiving into your own memory -------------------------------------------------------

    def post_recv(self, buffer: Buffer) -> DatagramReceive:
        """Post a receive of one datagram, on a socket made with receive_buffers=0.

        Args:
            buffer: registered memory, or any writable buffer, with room for `mtu` bytes: a
                datagram longer than the receive that it meets would end the socket, and anybody
                can send one. Its header goes elsewhere, the payload is at the buffer's start.

        Raises:
            QueueFullError: `receive_depth` receives are posted.
            ValueError: the socket posts its own receives; or the buffer will not do.
            TypeError: the buffer is read-only.
        """
        return self.post_recvv([buffer])

    def post_recvv(self, parts: Iterable[Buffer]) -> DatagramReceive:
        """Post a receive scattered over several buffers. See `post_recv`."""
        endpoint = self._endpoint
        if endpoint.options.receive_buffers:
            raise ValueError(
                "this socket posts its own receives, and datagrams go to the oldest one: use "
                "receive(), or open it with receive_buffers=0"
            )
        endpoint.require_usable()
        given = list(parts)
        most = endpoint.capacity.max_recv_sge - 1
        if len(given) > most:
            raise ValueError(
                f"{len(given)} parts: beside the header's there is room for {most}; ask for more "
                "with max_sge="
            )
        length = _length(given)
        if length < endpoint.mtu:
            raise ValueError(
                f"room for {length} bytes: a datagram can have {endpoint.mtu} (the path MTU), and "
                "one that does not fit would end the socket"
            )
        staged = self._staging.target(given)
        header = endpoint.hub.pool.lease(GRH_BYTES)
        try:
            request = endpoint.post_receive(
                header.memory.sge + staged.sges,
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


def _length(parts: list[Buffer]) -> int:
    return sum(
        part.length if isinstance(part, MemoryRegion | MemorySlice) else flat_view(part).nbytes
        for part in parts
    )
