"""Address vectors, and the address handles with which datagrams are posted (man ibv_create_ah)."""

from dataclasses import dataclass
from typing import Any

from aiordma._base.arguments import checked_gid, data, instance, whole_number
from aiordma._base.calls import check_pointer, check_positive_errno
from aiordma._base.errors import BusyError
from aiordma._native import ffi, lib
from aiordma.verbs.completion import COMPLETION, WorkCompletion
from aiordma.verbs.device import Context, ProtectionDomain
from aiordma.verbs.resource import Resource

__all__ = (
    "GRH_BYTES",
    "MOST_GID_INDEX",
    "MOST_LID",
    "MOST_SERVICE_LEVEL",
    "AddressHandle",
    "AddressVector",
)

GRH_BYTES = 40
"""Bytes for the GRH at the start of a datagram's receive. The device may leave them unwritten."""


MOST_LID = 2**16 - 1
MOST_GID_INDEX = 255
MOST_SERVICE_LEVEL = 15

_RANGES = {
    "port": 255,
    "gid_index": MOST_GID_INDEX,
    "lid": MOST_LID,
    "hop_limit": 255,
    "flow_label": 2**20 - 1,
    "traffic_class": 255,
    "service_level": MOST_SERVICE_LEVEL,
    "src_path_bits": 255,
    "static_rate": 255,
}


@dataclass(frozen=True, slots=True)
class AddressVector:
    """The path to a peer's port (`ibv_ah_attr`). On RoCE, the peer's `gid`, and the `gid_index` of
    the local port's GID table, determine it.

    Attributes:
        port: the local port of the device, from 1.
        gid: the peer's GID, 16 bytes; None: no GRH (InfiniBand, within a subnet).
        gid_index: the index of the local GID, from 0.
        lid: the peer's LID (InfiniBand).
        hop_limit: the largest number of routers, 0 to 255: the TTL of IP.
        flow_label: 20 bits, the flow label of IPv6; on RoCE it can choose the UDP source port.
        traffic_class: 0 to 255: the type of service of IP.
        service_level: 0 to 15.
        src_path_bits: the low bits of the local LID (InfiniBand, if a port has several LIDs).
        static_rate: the largest rate to the peer, a value of enum ibv_rate; 0: no limit.

    Raises:
        TypeError, ValueError: a field has the wrong type or is out of range; the message names it.

    See: man ibv_create_ah.
    """

    port: int = 1
    gid: bytes | None = None
    gid_index: int = 0
    lid: int = 0
    hop_limit: int = 64
    flow_label: int = 0
    traffic_class: int = 0
    service_level: int = 0
    src_path_bits: int = 0
    static_rate: int = 0

    def __post_init__(self) -> None:
        for name, most in _RANGES.items():
            object.__setattr__(self, name, whole_number(getattr(self, name), name, 0, most))
        if self.gid is not None:
            object.__setattr__(self, "gid", checked_gid(self.gid))

    @classmethod
    def _read(cls, raw: Any) -> "AddressVector":
        """Read a struct ibv_ah_attr."""
        return cls(
            port=raw.port_num,
            gid=bytes(raw.grh.dgid.raw) if raw.is_global else None,
            gid_index=raw.grh.sgid_index,
            lid=raw.dlid,
            hop_limit=raw.grh.hop_limit,
            flow_label=raw.grh.flow_label,
            traffic_class=raw.grh.traffic_class,
            service_level=raw.sl,
            src_path_bits=raw.src_path_bits,
            static_rate=raw.static_rate,
        )

    def _fill(self, raw: Any) -> None:
        """Write the fields to a struct ibv_ah_attr."""
        raw.port_num = self.port
        raw.dlid = self.lid
        raw.sl = self.service_level
        raw.src_path_bits = self.src_path_bits
        raw.static_rate = self.static_rate
        raw.is_global = self.gid is not None
        if self.gid is not None:
            raw.grh.dgid.raw = self.gid
            raw.grh.sgid_index = self.gid_index
            raw.grh.hop_limit = self.hop_limit
            raw.grh.flow_label = self.flow_label
            raw.grh.traffic_class = self.traffic_class

    @classmethod
    def of_sender(
        cls, context: Context, port: int, completion: WorkCompletion, grh: bytes
    ) -> "AddressVector":
        """Return the path to the sender of a received datagram.

        Args:
            context: the device.
            port: the local port at which the datagram arrived.
            completion: the receive's completion.
            grh: the receive's first 40 bytes.

        Raises:
            TypeError, ValueError: an argument has the wrong type, or `grh` is not 40 bytes long.
            VerbsCallError: the header has no local address.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_init_ah_from_wc.
        """
        instance(context, "context", Context, "of_sender")
        instance(completion, "completion", WorkCompletion, "of_sender")
        port = whole_number(port, "port", 1, 255, "of_sender")
        grh = data(grh, "grh", "of_sender")
        if len(grh) != GRH_BYTES:
            raise ValueError(f"of_sender(): grh has {len(grh)} bytes: expected {GRH_BYTES}")
        context._require_open()
        packed = ffi.new("struct aiordma_completion *")
        ffi.buffer(packed)[:] = COMPLETION.pack(*completion)
        raw = ffi.new("struct ibv_ah_attr *")
        check_positive_errno(
            lib.aiordma_address_of_sender(
                context.provider.table, context.pointer, port, packed, grh, raw
            ),
            "ibv_init_ah_from_wc",
        )
        return cls._read(raw)


class AddressHandle(Resource):
    """The destination of posted datagrams: an address vector, prepared by the device.

    Args:
        domain: the protection domain.
        vector: the path to the peer.

    Raises:
        TypeError: an argument has the wrong type.
        VerbsCallError: there is no such path, or the device cannot create more handles.
        ClosedError, ForkError: the domain is closed, or was opened by the parent of this process.

    See: man ibv_create_ah.
    """

    _closing_rank = 1

    _in_use: bool = False
    """Whether requests of a datagram socket use it that nobody can wait for."""

    def __init__(self, domain: ProtectionDomain, vector: AddressVector) -> None:
        instance(domain, "domain", ProtectionDomain, "AddressHandle")
        instance(vector, "vector", AddressVector, "AddressHandle")
        super().__init__(domain)
        try:
            self.domain = domain
            self.vector = vector
            raw = ffi.new("struct ibv_ah_attr *")
            vector._fill(raw)
            pointer = domain.provider.create_ah(domain.pointer, raw)
            self.pointer: Any = check_pointer(pointer, "ibv_create_ah", str(vector))
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<AddressHandle to {self.vector}>"

    def close(self) -> None:
        """Destroy the handle. Idempotent.

        Raises:
            BusyError: it is a datagram socket's, and requests use it whose queue pair the driver
                refuses to destroy. It stays open, and so does its domain.
            VerbsCallError: the driver refused.

        See: man ibv_create_ah.
        """
        super().close()

    _can_be_in_use = True

    def _require_closable(self) -> None:
        if self._in_use:
            raise BusyError(f"{self!r} is in use by posted work requests, whose queue pair exists")

    def _disown(self) -> None:
        self._in_use = False  # the garbage collector has found it together with the requests
        super()._disown()

    def _destroy(self) -> None:
        check_positive_errno(self.domain.provider.destroy_ah(self.pointer), "ibv_destroy_ah")
