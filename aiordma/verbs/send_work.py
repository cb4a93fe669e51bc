"""Work requests of a send queue with every field that one can have (struct ibv_send_wr)."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiordma._base.enums import Access, SendFlag
from aiordma._base.ranges import RemoteMemory
from aiordma._native import ffi
from aiordma.verbs.address import AddressHandle
from aiordma.verbs.memory import MemorySlice
from aiordma.verbs.memory_window import MemoryWindow

__all__ = ("RECEIVE_REQUEST", "SendWork", "pack_chain", "pack_plain")

_SEND_REQUEST = struct.Struct("=QIIIIQII QQIIQQQQQ")
"""struct aiordma_send_request of posting.h."""
_NO_OPERANDS = (0,) * 10
RECEIVE_REQUEST = struct.Struct("=QII")
"""struct aiordma_receive_request: wr_id, number of parts, and nothing."""


@dataclass(slots=True)
class SendWork:
    """One request, as `QueuePair.post_send_chain` takes it.

    Attributes:
        operation: its name, for messages.
        opcode: a WorkRequestOpcode.
        sges: the local parts, packed by `gather`; `count` of them, `length` bytes together.
        held: what must stay as it is until the request ends.
        flags: SendFlag; SIGNALED is added where the request is to tell of its end.
        remote: what a one-sided operation aims at.
        immediate: immediate data, in host order; or the rkey to invalidate.
        compare_add, swap: an atomic's operands.
        address, remote_qpn, remote_qkey: whom a datagram goes to.
        window, bound, access, rkey: a window of type 2 to bind, to what, for what, and the rkey
            that it gets.
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
        """Write the numbers into a struct aiordma_send_request that is zero."""
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
        """Write the addresses of C's objects into it, once no code of the program's can run before
        the post (that of numbers can): what is closed has none any more.

        Raises:
            ClosedError: one of them is closed.
        """
        if self.address is not None:
            self.address.require_open()
            raw.address_handle = self.address.pointer
        if self.window is not None:
            self.window.require_open()
            raw.window = self.window.pointer
        if self.bound is not None:
            self.bound.region.require_open()
            raw.region = self.bound.region.pointer


def pack_chain(works: Sequence[SendWork], wr_ids: Sequence[int], flags: Sequence[int]) -> Any:
    """Return an array of struct aiordma_send_request.

    Raises:
        ClosedError: an address handle, a window or a region of one of them is closed.
    """
    raw = ffi.new("struct aiordma_send_request[]", len(works))
    for i, work in enumerate(works):
        work._fill(raw[i], wr_ids[i], flags[i])
    for i, work in enumerate(works):
        work._fill_objects(raw[i])
    return raw


def pack_plain(
    wr_id: int, opcode: int, flags: int, count: int, address: int, rkey: int, immediate: int
) -> bytes:
    """Return a struct aiordma_send_request without an atomic's, a datagram's or a window's
    fields."""
    return _SEND_REQUEST.pack(wr_id, opcode, flags, count, immediate, address, rkey, *_NO_OPERANDS)
