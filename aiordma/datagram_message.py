"""A datagram that arrived, and who sent it."""

from collections import OrderedDict

from aiordma.datagram_peer import DatagramPeer
from aiordma.enums import WorkCompletionFlag
from aiordma.grh import is_multicast, source_and_destination
from aiordma.verbs import GRH_BYTES, AddressVector, Context, WorkCompletion

__all__ = ("DatagramMessage", "Senders")

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
    """

    def __init__(self, context: Context, port: int, gid_index: int, qkey: int, most: int) -> None:
        self._context = context
        self._port = port
        self._gid_index = gid_index
        self._qkey = qkey
        self._most = most
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
        peer = DatagramPeer(self._way(completion, grh, *ends), completion.src_qp, self._qkey)
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


class DatagramMessage:
    """A datagram that arrived: `data`, and `immediate` (32 bits that the sender put beside the
    data, as an int), None without."""

    __slots__ = ("_completion", "_grh", "_senders", "data", "immediate")

    def __init__(self, received: memoryview, completion: WorkCompletion, senders: Senders) -> None:
        self._grh = bytes(received[:GRH_BYTES])
        self._completion = completion
        self._senders = senders
        self.data = bytes(received[GRH_BYTES : completion.byte_len])
        self.immediate: int | None = (
            completion.immediate if completion.wc_flags & _WITH_IMM else None
        )

    def __repr__(self) -> str:
        beside = "" if self.immediate is None else f", immediate {self.immediate:#x}"
        return f"<DatagramMessage of {len(self.data)} bytes from {self.sender_qpn:#x}{beside}>"

    @property
    def sender_qpn(self) -> int:
        """The number of the queue pair that sent it."""
        return self._completion.src_qp

    @property
    def source(self) -> DatagramPeer:
        """Whom to reply to: `socket.send(data, message.source)`. Worked out when it is asked for.

        No datagram tells its sender's qkey: this has our own, which is the same for all endpoints
        of the UDP port space.

        Raises:
            VerbsCallError: the datagram was sent to an address that is not ours any more.
            ClosedError: the socket was closed, and the device with it.
        """
        return self._senders.sender(self._completion, self._grh)
