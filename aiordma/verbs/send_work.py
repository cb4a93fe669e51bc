"""Work requests of a send queue, with all fields of struct ibv_send_wr."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from aiordma._base.arguments import data, instance, whole_number, wrong_value
from aiordma._base.enums import Access, QueuePairType, SendFlag, WorkRequestOpcode
from aiordma._base.ranges import RemoteMemory
from aiordma._native import ffi
from aiordma.verbs.address import AddressHandle
from aiordma.verbs.memory import MemorySlice
from aiordma.verbs.memory_window import MemoryWindow

__all__ = ("RECEIVE_REQUEST", "UNFIT", "SendWork", "pack_chain", "raise_named")

RECEIVE_REQUEST = struct.Struct("=QII")
"""The layout of struct aiordma_receive_request: wr_id, number of parts, reserved."""
_BIND = int(WorkRequestOpcode.BIND_MW)
_LAST_OPCODE = int(max(WorkRequestOpcode))
_BITS = {
    **dict.fromkeys(("opcode", "count", "immediate", "remote_qpn", "remote_qkey"), 32),
    **dict.fromkeys(("rkey", "access"), 32),
    **dict.fromkeys(("compare_add", "swap"), 64),
}
UNFIT = (OverflowError, TypeError, AttributeError, IndexError)
"""The errors of a value that does not fit in its field of a request, from Python and cffi, which do
not name the field."""
_DATAGRAM_OPCODES = (int(WorkRequestOpcode.SEND), int(WorkRequestOpcode.SEND_WITH_IMM))


@dataclass(slots=True)
class SendWork:
    """A request for `QueuePair.post_send_chain`.

    Attributes:
        operation: its name, for messages.
        opcode: a WorkRequestOpcode.
        sges: `count` local parts, packed by `gather`, of together `length` bytes.
        held: objects that must stay unchanged until the request completes.
        flags: SendFlag; SIGNALED is added if the request is signaled.
        remote: the peer's memory, for a one-sided operation.
        immediate: immediate data, in host order; or the rkey to invalidate.
        compare_add, swap: the operands of an atomic operation.
        address, remote_qpn, remote_qkey: the destination of a datagram.
        window, bound, access, rkey: a window of type 2 to bind, its memory, its access, and its new
            rkey.
    """

    operation: str
    opcode: int
    sges: bytes = b""
    count: int = 0
    length: int = 0
    held: Sequence[Any] = ()
    flags: SendFlag | int = 0
    remote: RemoteMemory | None = None
    immediate: int = 0
    compare_add: int = 0
    swap: int = 0
    address: AddressHandle | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    window: MemoryWindow | None = None
    bound: MemorySlice | None = None
    access: Access | int = 0
    rkey: int = 0

    def _fill(self, raw: Any, wr_id: int, flags: int) -> None:
        """Write the numbers to a zeroed struct aiordma_send_request."""
        raw.wr_id = wr_id
        raw.opcode = self.opcode
        raw.send_flags = flags
        raw.sge_count = self.count
        raw.immediate = self.immediate
        raw.compare_add = self.compare_add
        raw.swap = self.swap
        if self.remote is not None:
            raw.remote_address = self.remote.address
            raw.rkey = self.remote.rkey
        if self.address is not None:
            raw.remote_qpn = self.remote_qpn
            raw.remote_qkey = self.remote_qkey
        if self.window is not None:
            raw.rkey = self.rkey
            raw.bind_access = self.access
        if self.bound is not None:
            raw.bind_address = self.bound.address
            raw.bind_length = self.bound.length

    def _fill_objects(self, raw: Any) -> None:
        """Write the addresses of C objects to the struct. Converting numbers can run the program's
        code, which can close these objects. So no number may be converted between this call and the
        post.

        Raises:
            ClosedError: one of the objects is closed.
        """
        if self.address is not None:
            self.address._require_open()
            raw.address_handle = self.address.pointer
        if self.window is not None:
            self.window._require_open()
            raw.window = self.window.pointer
        if self.bound is not None:
            self.bound.region._require_open()
            raw.region = self.bound.region.pointer


def pack_chain(
    works: Sequence[SendWork],
    wr_ids: Sequence[int],
    flags: Sequence[int],
    service: int = QueuePairType.RC,
) -> Any:
    """Return an array of struct aiordma_send_request.

    Args:
        works, wr_ids, flags: as of `QueuePair.post_send_chain`.
        service: the type of the queue pair.

    Raises:
        ClosedError: an address handle, a window or a region of a request is closed.
        ValueError: a request has no object that its operation needs, or an unknown opcode. Not
            every driver checks this: rxe's follows a null pointer, siw's reads beyond a table.
    """
    raw = ffi.new("struct aiordma_send_request[]", len(works))
    is_datagram = service == QueuePairType.UD
    for i, work in enumerate(works):
        work._fill(raw[i], wr_ids[i], flags[i])
    for i, work in enumerate(works):
        filled = raw[i]
        work._fill_objects(filled)
        opcode = filled.opcode
        if opcode > _LAST_OPCODE:
            raise wrong_value(work.opcode, "opcode", "a WorkRequestOpcode", work.operation)
        if opcode == _BIND and not (filled.window and filled.region):
            raise ValueError(f"{work.operation}: a bind needs window= and bound=")
        if is_datagram:
            _check_datagram(work.operation, filled)
    return raw


def raise_named(
    works: Sequence[SendWork], wr_ids: Sequence[int], flags: Sequence[int], error: Exception
) -> NoReturn:
    """Raise a TypeError or ValueError that names the field that does not fit. Only a post that has
    failed checks the fields, so that the others do not take time for it.

    Args:
        works, wr_ids, flags: as of `QueuePair.post_send_chain`.
        error: one of `UNFIT`; raised if all fields fit.
    """
    try:
        _check_fields(works, wr_ids, flags)
    except (TypeError, ValueError) as named:
        raise named from None
    try:
        raise error
    finally:
        del error  # its traceback holds this frame


def _check_fields(works: Sequence[SendWork], wr_ids: Sequence[int], flags: Sequence[int]) -> None:
    call = "post_send_chain"
    for name, numbers in (("works", works), ("wr_ids", wr_ids), ("flags", flags)):
        instance(numbers, name, Sequence, call)
        if len(numbers) < len(works):
            raise ValueError(f"{call}(): {len(numbers)} {name} for {len(works)} works")
    for work, wr_id, given in zip(works, wr_ids, flags, strict=False):
        instance(work, "works", SendWork, call, "a list of SendWork")
        whole_number(wr_id, "wr_id", 0, 2**64 - 1, work.operation)
        whole_number(given, "flags", 0, 2**32 - 1, work.operation)
        data(work.sges, "sges", work.operation)
        for name, bits in _BITS.items():
            whole_number(getattr(work, name), name, 0, 2**bits - 1, work.operation)
        for name, kind in (
            ("remote", RemoteMemory),
            ("address", AddressHandle),
            ("window", MemoryWindow),
            ("bound", MemorySlice),
        ):
            if getattr(work, name) is not None:
                instance(getattr(work, name), name, kind, work.operation)


def _check_datagram(operation: str, raw: Any) -> None:
    if raw.opcode not in _DATAGRAM_OPCODES:
        raise ValueError(
            f"{operation}: a UD queue pair sends datagrams only: opcode SEND or SEND_WITH_IMM"
        )
    if not raw.address_handle:
        raise ValueError(f"{operation}: a datagram needs address=AddressHandle(...)")
