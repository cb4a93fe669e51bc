"""Shared receive queues, synchronous (man ibv_create_srq)."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiordma._base.arguments import resource, whole_number, within_device
from aiordma._base.calls import UNSUPPORTED, check_pointer, check_positive_errno
from aiordma._base.enums import SharedReceiveAttribute
from aiordma._base.errors import NotSupportedError, PartialPostError, VerbsCallError
from aiordma._base.provider import Provider
from aiordma._native import ffi, lib
from aiordma.verbs.device import ProtectionDomain
from aiordma.verbs.raw_parts import RawPart, packed_parts
from aiordma.verbs.resource import Resource
from aiordma.verbs.send_work import RECEIVE_REQUEST

__all__ = ("RawSharedReceiveQueue",)


class RawSharedReceiveQueue(Resource):
    """A shared receive queue, for programs that poll; programs with an event loop use
    `aiordma.SharedReceiveQueue`. `max_wr` and `max_sge` are the actual sizes, which are at least
    those requested.

    Args:
        domain: the protection domain.
        max_wr: the largest number of posted receives.
        max_sge: the largest number of parts of one receive.

    Raises:
        TypeError, ValueError: a size exceeds the device's limit; the message has both.
        VerbsCallError: the driver refused.
        ClosedError, ForkError: the domain is closed, or was opened by the parent of this process.

    See: man ibv_create_srq.
    """

    _closing_rank = 1

    def __init__(self, domain: ProtectionDomain, max_wr: int, max_sge: int = 1) -> None:
        resource(domain, "domain", "a ProtectionDomain", "RawSharedReceiveQueue")
        device = domain.context.query()
        for name, value, limit in (
            ("max_wr", max_wr, device.max_srq_wr),
            ("max_sge", max_sge, device.max_srq_sge),
        ):
            whole_number(value, name, -(2**63), 2**63, "RawSharedReceiveQueue")
            within_device(value, name, 1, limit, domain.context.device_name)
        super().__init__(domain)
        try:
            self.domain = domain
            self.provider: Provider = domain.provider
            request = ffi.new("struct ibv_srq_init_attr *")
            request.attr.max_wr = max_wr
            request.attr.max_sge = max_sge
            pointer = self.provider.create_srq(domain.pointer, request)
            self.pointer: Any = check_pointer(pointer, "ibv_create_srq")
            self.max_wr: int = request.attr.max_wr
            self.max_sge: int = request.attr.max_sge
            self.key: int = int(ffi.cast("uintptr_t", self.pointer))
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<RawSharedReceiveQueue of {self.max_wr} on {self.domain.context.device_name}>"

    def query(self) -> Any:
        """Return a struct ibv_srq_attr: max_wr, max_sge, srq_limit.

        Raises:
            NotSupportedError: the device's driver lacks this call.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_query_srq.
        """
        self._require_open()
        raw = ffi.new("struct ibv_srq_attr *")
        try:
            check_positive_errno(self.provider.query_srq(self.pointer, raw), "ibv_query_srq")
        except VerbsCallError as error:
            if error.errno in UNSUPPORTED:
                raise NotSupportedError(
                    f"{self.domain.context.device_name} cannot query a shared receive queue"
                ) from error
            raise
        return raw

    def modify(self, *, max_wr: int | None = None, limit: int | None = None) -> None:
        """Resize the queue, or arm its limit.

        Args:
            max_wr: the new depth; None: no change.
            limit: one SRQ_LIMIT_REACHED event follows once fewer receives are posted; 0 disarms,
                None: no change.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            NotSupportedError: the queue was resized, but the device cannot report its new depth.
            VerbsCallError: the driver refused; not every device can resize.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_modify_srq.
        """
        self._require_open()
        raw = ffi.new("struct ibv_srq_attr *")
        mask = SharedReceiveAttribute(0)
        if max_wr is not None:
            mask |= SharedReceiveAttribute.MAX_WR
            raw.max_wr = whole_number(max_wr, "max_wr", 0, 2**32 - 1, "modify")
        if limit is not None:
            mask |= SharedReceiveAttribute.LIMIT
            raw.srq_limit = whole_number(limit, "limit", 0, 2**32 - 1, "modify")
        check_positive_errno(
            self.provider.modify_srq(self.pointer, raw, mask), "ibv_modify_srq", repr(mask)
        )
        if max_wr is not None:
            self.max_wr = max_wr  # at least: the queue is resized, even if the query fails
            with suppress(VerbsCallError):
                self.max_wr = self.query().max_wr

    def post_srq_recv(self, receives: Sequence[tuple[int, Sequence[RawPart]]]) -> None:
        """Post a list of receives, each as (wr_id, parts), in one call. The parts are those of
        `QueuePair.post_recv`.

        Args:
            receives: each as (wr_id, parts).

        Raises:
            TypeError, ValueError: a wr_id or a part is invalid; nothing was posted.
            PartialPostError: the device refused a receive; `posted` are the wr_ids before it.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_post_srq_recv.
        """
        call = "post_srq_recv"
        error, posted = self._post_packed(
            [
                (
                    whole_number(wr_id, "wr_id", 0, 2**64 - 1, call),
                    len(parts),
                    packed_parts(parts, call)[0],
                )
                for wr_id, parts in receives
            ]
        )
        if error:
            taken = [wr_id for wr_id, _ in receives[:posted]]
            raise PartialPostError(error, "ibv_post_srq_recv", repr(self), taken)

    def _post_packed(self, receives: Sequence[tuple[int, int, bytes]]) -> tuple[int, int]:
        """Post a list of receives, each as (wr_id, number of parts, packed sges), in one call.

        Returns:
            C's errno, or 0 if the device accepted all; and the number of accepted receives.
        """
        requests = b"".join([RECEIVE_REQUEST.pack(wr_id, count, 0) for wr_id, count, _ in receives])
        sges = b"".join([sges for _, _, sges in receives])
        posted = ffi.new("uint32_t *")
        self._require_open()
        error = lib.aiordma_post_recv_chain(
            ffi.NULL, self.pointer, requests, len(receives), sges, len(sges), posted
        )
        return abs(error), posted[0]  # siw's driver returns -ENOMEM

    def _destroy(self) -> None:
        check_positive_errno(self.provider.destroy_srq(self.pointer), "ibv_destroy_srq")
