"""Datagrams that arrived, in pooled receives or in the program's memory, and their senders."""

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
    """The senders of received datagrams. Each is computed once and then remembered, because this
    takes system calls. The sender whose last datagram is oldest is forgotten first.

    Args:
        context: the device.
        port: the port where datagrams arrive.
        gid_index: the index of the local address there.
        qkey: the local qkey. The senders are assumed to have the same, because datagrams do not
            contain the sender's.
        most: the maximum number of senders to remember.
        service_level: the service level of replies; None: as in the received datagram.
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
        """Return the sender of a received datagram.

        Args:
            completion: the completion of the receive.
            grh: the receive's first 40 bytes.

        Raises:
            VerbsCallError: the datagram's destination is not a local address (any more).
            ClosedError: the device is closed.
        """
        ends = source_and_destination(grh) if completion.wc_flags & _GRH else (b"", b"")
        key = completion.src_qp, completion.slid, *ends
        peer = self._known.get(key)
        if peer is not None:
            self._known.move_to_end(key)
            return peer
        vector = self._address_vector(completion, grh, *ends)
        if self._service_level is not None:
            vector = replace(vector, service_level=self._service_level)
        peer = DatagramPeer(vector, completion.src_qp, self._qkey)
        self._known[key] = peer
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return peer

    def _address_vector(
        self, completion: WorkCompletion, grh: bytes, source: bytes, destination: bytes
    ) -> AddressVector:
        if not (destination and is_multicast(destination)):
            return AddressVector.of_sender(self._context, self._port, completion, grh)
        # The destination is a group, not a local address: ibv_init_ah_from_wc finds no GID index.
        return AddressVector(
            port=self._port,
            gid=source,
            gid_index=self._gid_index,
            lid=completion.slid,
            service_level=completion.sl,
        )


class DatagramArrival:
    """The arrival of a datagram: the `length` of its payload in bytes, and `immediate`, the
    sender's 32 bits of immediate data as an int, or None."""

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
        return (
            f"<{type(self).__name__} of {self.length} bytes from {self.sender_qp_num:#x}{beside}>"
        )

    @property
    def sender_qp_num(self) -> int:
        """The number of the sender's queue pair."""
        return self._completion.src_qp

    @property
    def source(self) -> DatagramPeer:
        """The peer to reply to: `socket.send(data, message.source)`. Determined at each access.

        A datagram does not contain its sender's qkey. This peer has the local qkey, which is the
        same for all endpoints of the UDP port space.

        Raises:
            VerbsCallError: the datagram's destination is not a local address any more.
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
    """A receive that is posted into your own memory. Await it for its DatagramArrival. Any number
    of tasks may await it, any number of times.

    `request` is the WorkRequest. The byte_len of its completion includes the 40 bytes of the GRH,
    which are stored in separate memory.

    Raises:
        as `WorkRequest`.

    Cancellation: the receive stays posted, and its memory is held.
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
        """Return whether the receive has completed.

        Raises: nothing.
        """
        return self.request.done()

    def __await__(self) -> Generator[Any, Any, DatagramArrival]:
        yield from self.request.__await__()
        assert self._arrival is not None
        return self._arrival
