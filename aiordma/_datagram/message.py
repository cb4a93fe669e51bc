"""Datagrams that arrived, in pooled receives or in the program's memory, and their senders."""

from collections import OrderedDict
from dataclasses import replace
from ipaddress import IPv6Address

from aiordma._base.enums import WorkCompletionFlag
from aiordma._datagram.peer import DatagramPeer
from aiordma._native import DatagramFields, SendersBase, given, grh_ends
from aiordma._native import DatagramReceive as DatagramReceive
from aiordma.verbs import AddressVector, Context
from aiordma.verbs.completion import WorkCompletion

_GRH = int(WorkCompletionFlag.GRH)


def is_multicast(gid: bytes) -> bool:
    """Return whether a GID is a multicast address."""
    address = IPv6Address(gid)
    return (address.ipv4_mapped or address).is_multicast


class Senders(SendersBase):
    """The senders of received datagrams. Each is computed once and then remembered, because this
    takes system calls. The sender whose last datagram is oldest is forgotten first.

    The engine looks up the senders that are known (engine/datagrams.c).

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
        self._known: OrderedDict[bytes, DatagramPeer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def _find(self, key: bytes, completion: WorkCompletion, grh: bytes) -> DatagramPeer:
        """Compute the sender of a received datagram, and remember it.

        Args:
            key: identifies the sender.
            completion: the completion of the receive.
            grh: the receive's first 40 bytes.

        Raises:
            VerbsCallError: the datagram's destination is not a local address (any more).
            ClosedError: the device is closed.
        """
        ends = grh_ends(grh) if completion.wc_flags & _GRH else (b"", b"")
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


@given("datagram")
class DatagramMessage(DatagramFields):
    """A datagram that arrived, with its payload: `data`."""

    __slots__ = ("data",)

    data: bytes
