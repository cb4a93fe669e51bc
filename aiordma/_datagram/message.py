"""Datagrams that arrived, into our memory or yours, and who sent them."""

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from aiordma._base.enums import WorkCompletionFlag
from aiordma._datagram.grh import is_multicast, source_and_destination
from aiordma._datagram.peer import DatagramPeer
from aiordma._requests.pool import Lease
from aiordma._requests.request import WorkRequest
from aiordma.verbs import GRH_BYTES, AddressVector, Context, WorkCompletion

__all__ = ("DatagramArrival", "DatagramMessage", "DatagramReceive", "Senders")

_GRH = int(WorkCompletionFlag.GRH)
_WITH_IMM = int(WorkCompletionFlag.WITH_IMM)


class Senders:
    """Whom received datagrams came from, worked out once per sender: it costs system calls. The
    ones heard least recently are forgotten first.

    Args:
        context: the device.
        port: where datagrams arrive.
        gid_index: of our own address there.
        qkey: our own, which is taken to be the senders' as well: no datagram tells it.
        most: senders to remember.
        service_level: of datagrams to them; None: that of the one that they sent.
    """

    def __init__(
        self,
        context: Context,
        port: int,
        gid_index: int,
        qkey: int,
        most: int,
        service_level: int | None = None,
    ) -> None:
        self._context = context
        self._port = port
        self._gid_index = gid_index
        self._qkey = qkey
        self._most = most
        self._service_level = service_level
        self._known: OrderedDict[tuple[int, int, bytes, bytes], DatagramPeer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def sender(self, completion: WorkCompletion, grh: bytes) -> DatagramPeer:
        """Return the sender of the datagram that completed here.

        Args:
            completion: of the receive.
            grh: the receive's first 40 bytes.

        Raises:
            VerbsCallError: the datagram was not sent to an address of ours (any more).
            ClosedError: the device is closed.
        """
        ends = source_and_destination(grh) if completion.wc_flags & _GRH else (b"", b"")
        key = completion.src_qp, completion.slid, *ends
        peer = self._known.get(key)
        if peer is not None:
            self._known.move_to_end(key)
            return peer
        way = self._way(completion, grh, *ends)
        if self._service_level is not None:
            way = replace(way, service_level=self._service_level)
        peer = DatagramPeer(way, completion.src_qp, self._qkey)
        self._known[key] = peer
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return peer

    def _way(
        self, completion: WorkCompletion, grh: bytes, source: bytes, destination: bytes
    ) -> AddressVector:
        if not (destination and is_multicast(destination)):
            return AddressVector.of_sender(self._context, self._port, completion, grh)
        # Sent to a group, which is no address of ours: C finds no GID index for the way back.
        return AddressVector(
            port=self._port,
            gid=source,
            gid_index=self._gid_index,
            lid=completion.slid,
            service_level=completion.sl,
        )


class DatagramArrival:
    """That a datagram arrived: `length` bytes of payload, and `immediate` (32 bits that the sender
    put beside them, as an int), None without."""

    __slots__ = ("_completion", "_grh", "_senders", "immediate", "length")

    def __init__(self, grh: bytes, completion: WorkCompletion, senders: Senders) -> None:
        self._grh = grh
        self._completion = completion
        self._senders = senders
        self.length: int = completion.byte_len - GRH_BYTES
        self.immediate: int | None = (
            completion.immediate if completion.wc_flags & _WITH_IMM else None
        )

    def __repr__(self) -> str:
        beside = "" if self.immediate is None else f", immediate {self.immediate:#x}"
        return f"<{type(self).__name__} of {self.length} bytes from {self.sender_qpn:#x}{beside}>"

    @property
    def sender_qpn(self) -> int:
        """The number of the queue pair that sent it."""
        return self._completion.src_qp

    @property
    def source(self) -> DatagramPeer:
        """The peer to reply to: `socket.send(data, message.source)`. Determined at each access.

        A datagram does not carry its sender's qkey: this peer has our own, which is the same for
        all endpoints of the UDP port space.

        Raises:
            VerbsCallError: the datagram was sent to an address that is not ours any more.
            ClosedError: the socket was closed, and the device with it.
        """
        return self._senders.sender(self._completion, self._grh)


class DatagramMessage(DatagramArrival):
    """A datagram that arrived, with its payload: `data`."""

    __slots__ = ("data",)

    def __init__(self, received: memoryview, completion: WorkCompletion, senders: Senders) -> None:
        super().__init__(bytes(received[:GRH_BYTES]), completion, senders)
        self.data: bytes = bytes(received[GRH_BYTES : completion.byte_len])


class DatagramReceive:
    """A receive that is posted into your own memory. Await it for its DatagramArrival; any number
    of tasks may, any number of times.

    `request` is the WorkRequest; the byte_len of its completion counts the 40 bytes of the GRH,
    which went elsewhere.

    Raises:
        as `WorkRequest`.

    Cancellation: the receive stays posted, and its memory held.
    """

    __slots__ = ("_arrival", "_lease", "_senders", "request")

    def __init__(self, request: WorkRequest, lease: Lease, senders: Senders) -> None:
        self.request: WorkRequest = request
        self._lease = lease
        self._senders = senders
        self._arrival: DatagramArrival | None = None
        request.add_done_callback(self._ended)

    def _ended(self, request: WorkRequest) -> None:
        if request.exception() is None:
            grh = bytes(self._lease.memory.view)
            self._arrival = DatagramArrival(grh, request.result(), self._senders)
        self._lease.release()

    def __repr__(self) -> str:
        return f"<DatagramReceive {self.request!r}>"

    def done(self) -> bool:
        """Return whether the receive has ended.

        Raises: nothing.
        """
        return self.request.done()

    def __await__(self) -> Generator[Any, Any, DatagramArrival]:
        yield from self.request.__await__()
        assert self._arrival is not None
        return self._arrival
