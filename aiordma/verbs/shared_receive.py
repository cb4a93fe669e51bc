"""A receive queue that many queue pairs take from, synchronous (man ibv_create_srq)."""

import errno
from collections.abc import Sequence
from typing import Any

from aiordma._native import ffi, lib
from aiordma.enums import SharedReceiveAttribute
from aiordma.errors import (
    NotSupportedError,
    PartialPostError,
    VerbsCallError,
    check_pointer,
    check_positive_errno,
)
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.memory import MemorySlice, gather
from aiordma.verbs.resource import Resource

__all__ = ("RawSharedReceiveQueue",)


class RawSharedReceiveQueue(Resource):
    """The device's object, for those who poll by themselves; `aiordma.SharedReceiveQueue` is what
    a loop uses. `max_wr` and `max_sge` are what the device gave, at least what was asked for.

    Raises:
        ValueError: beyond the device; the message names the attribute and the limit.
        VerbsCallError: the driver refused.
    """

    closing_rank = 1

    def __init__(self, domain: ProtectionDomain, max_wr: int, max_sge: int = 1) -> None:
        device = domain.context.query()
        for name, value, limit in (
            ("max_wr", max_wr, device.max_srq_wr),
            ("max_sge", max_sge, device.max_srq_sge),
        ):
            if not 1 <= value <= limit:
                raise ValueError(f"{name}={value}: {domain.context.device_name} has 1..{limit}")
        super().__init__(domain)
        self.domain = domain
        self.provider = domain.provider
        request = ffi.new("struct ibv_srq_init_attr *")
        request.attr.max_wr = max_wr
        request.attr.max_sge = max_sge
        try:
            self.pointer = check_pointer(
                self.provider.create_srq(domain.pointer, request), "ibv_create_srq"
            )
        except BaseException:
            self._abandon()
            raise
        self.max_wr: int = request.attr.max_wr
        self.max_sge: int = request.attr.max_sge
        self.key = int(ffi.cast("uintptr_t", self.pointer))

    def __repr__(self) -> str:
        return f"<RawSharedReceiveQueue of {self.max_wr} on {self.domain.context.device_name}>"

    def query(self) -> Any:
        """Return struct ibv_srq_attr: max_wr, max_sge, srq_limit (man ibv_query_srq).

        Raises:
            NotSupportedError: the device's driver has no such call.
            VerbsCallError: the driver refused.
        """
        self.require_open()
        raw = ffi.new("struct ibv_srq_attr *")
        try:
            check_positive_errno(self.provider.query_srq(self.pointer, raw), "ibv_query_srq")
        except VerbsCallError as error:
            if error.errno == errno.EOPNOTSUPP:
                raise NotSupportedError(
                    f"{self.domain.context.device_name} cannot query a shared receive queue"
                ) from error
            raise
        return raw

    def modify(self, *, max_wr: int | None = None, limit: int | None = None) -> None:
        """Resize, or arm the limit: one SRQ_LIMIT_REACHED event once fewer receives are left
        (man ibv_modify_srq).

        Raises:
            VerbsCallError: the driver refused; not every device can resize.
        """
        self.require_open()
        raw = ffi.new("struct ibv_srq_attr *")
        mask = SharedReceiveAttribute(0)
        if max_wr is not None:
            mask |= SharedReceiveAttribute.MAX_WR
            raw.max_wr = max_wr
        if limit is not None:
            mask |= SharedReceiveAttribute.LIMIT
            raw.srq_limit = limit
        check_positive_errno(
            self.provider.modify_srq(self.pointer, raw, mask), "ibv_modify_srq", repr(mask)
        )
        if max_wr is not None:
            self.max_wr = self.query().max_wr

    def post_srq_recv(self, receives: Sequence[tuple[int, Sequence[MemorySlice]]]) -> None:
        """Post a list of (wr_id, parts) as one chain (ibv_post_srq_recv).

        Raises:
            PartialPostError: the device refused one; `posted` are the wr_ids before it.
        """
        error, posted = self.post_packed(
            [(wr_id, len(parts), gather(parts)) for wr_id, parts in receives]
        )
        if error:
            taken = [wr_id for wr_id, _ in receives[:posted]]
            raise PartialPostError(error, "ibv_post_srq_recv", repr(self), taken)

    def post_packed(self, receives: Sequence[tuple[int, int, bytes]]) -> tuple[int, int]:
        """Post a list of (wr_id, number of parts, their packed sges) as one chain.

        Returns:
            C's errno, 0 if all were taken, and how many were.
        """
        requests = ffi.new("struct aiordma_receive_request[]", len(receives))
        for request, (wr_id, count, _) in zip(requests, receives, strict=True):
            request.wr_id = wr_id
            request.sge_count = count
        return self.post_chain_raw(requests, len(receives), b"".join([s for _, _, s in receives]))

    def post_chain_raw(self, requests: Any, count: int, sges: bytes) -> tuple[int, int]:
        """Post an array of struct aiordma_receive_request with one call.

        Returns:
            C's errno, 0 if all were taken, and how many were.
        """
        self.require_open()
        posted = ffi.new("uint32_t *")
        error = lib.aiordma_post_srq_recv_chain(
            self.pointer, requests, count, sges, len(sges), posted
        )
        return abs(error), posted[0]  # siw's driver answers -ENOMEM

    def _destroy(self) -> None:
        check_positive_errno(self.provider.destroy_srq(self.pointer), "ibv_destroy_srq")
