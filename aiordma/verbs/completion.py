"""Completion channels and queues, and what they deliver (man ibv_create_cq, ibv_poll_cq)."""

import errno
import os
import struct
from typing import Any, NamedTuple

from aiordma._native import ffi, given, in_c, lib
from aiordma.enums import (
    CompletionQueueFlag,
    WorkCompletionFlag,
    WorkCompletionOpcode,
    WorkCompletionStatus,
)
from aiordma.errors import (
    VerbsCallError,
    check_negative_errno,
    check_pointer,
    check_positive_errno,
    check_supported,
)
from aiordma.verbs.device import Context
from aiordma.verbs.resource import Resource

__all__ = ("COMPLETION", "CompletionChannel", "CompletionQueue", "WorkCompletion")

COMPLETION = struct.Struct("=QIIIIIIIIHHBBH")
"""struct aiordma_completion of data_path.h."""


@in_c("CompletionFields")
class CompletionFields(NamedTuple):
    """What the device says of the end of a work request."""

    wr_id: int
    status: int
    opcode: int
    vendor_err: int
    byte_len: int
    immediate: int
    qp_num: int
    src_qp: int
    wc_flags: int
    pkey_index: int
    slid: int
    sl: int
    dlid_path_bits: int
    reserved: int = 0


@given("completion")
class WorkCompletion(CompletionFields):
    """How one work request ended: a named tuple. Beyond wr_id, status, vendor_err and qp_num a
    field is valid on success only (man ibv_poll_cq). `immediate` is in host order."""

    __slots__ = ()

    def _asdict(self) -> dict[str, int]:
        return dict(zip(self._fields, self, strict=True))

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.status == 0

    @property
    def status_name(self) -> str:
        """The status in the man page's words."""
        try:
            return WorkCompletionStatus(self.status).name
        except ValueError:  # newer than we are
            return f"status {self.status}"

    @property
    def operation(self) -> WorkCompletionOpcode:
        """What completed."""
        return WorkCompletionOpcode(self.opcode)

    @property
    def flags(self) -> WorkCompletionFlag:
        """Which optional fields hold something."""
        return WorkCompletionFlag(self.wc_flags)


class CompletionChannel(Resource):
    """A file descriptor that becomes readable when an armed queue completes. Non-blocking.

    It can be readable without an event: ask `events`, which has none then.
    """

    closing_rank = 2

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.context = context
        self.provider = context.provider
        try:
            self.pointer = check_pointer(
                self.provider.create_comp_channel(context.pointer), "ibv_create_comp_channel"
            )
        except BaseException:
            self._abandon()
            raise
        self.fd: int = self.pointer.fd
        os.set_blocking(self.fd, False)

    def __repr__(self) -> str:
        return f"<CompletionChannel of {self.context.device_name}>"

    def events(self) -> "list[CompletionQueue]":
        """Take the waiting events, acknowledge them, and return whose they are, oldest first.

        A queue tells once for each `request_notification`: arm it again, then poll it until it is
        empty. None waiting is an empty list.
        """
        self.require_open()
        queues = {
            child.pointer: child
            for child in self._children.values()
            if isinstance(child, CompletionQueue)
        }
        queue, context = ffi.new("struct ibv_cq **"), ffi.new("void **")
        taken: list[CompletionQueue] = []
        while not self.provider.get_cq_event(self.pointer, queue, context):
            # At once: destroying a queue waits for every event of it that was taken.
            self.provider.ack_cq_events(queue[0], 1)
            taken.append(queues[queue[0]])
        if ffi.errno != errno.EAGAIN:
            raise VerbsCallError(ffi.errno, "ibv_get_cq_event")
        return taken

    def _destroy(self) -> None:
        check_positive_errno(
            self.provider.destroy_comp_channel(self.pointer), "ibv_destroy_comp_channel"
        )


class CompletionQueue(Resource):
    """A queue of work completions; `cqe` is the capacity that the device gave it.

    Args:
        context: the device.
        entries: how many completions it must hold.
        channel: where an armed queue tells of its next completion.
        comp_vector: which of the device's `num_comp_vectors` interrupts that uses.
        flags: needs a device with extended queues (man ibv_create_cq_ex).

    Raises:
        ValueError: more entries than the device's max_cqe, or no such vector.
        NotSupportedError: the device has no extended queues, or lacks the flag.
        VerbsCallError: the driver refused.
    """

    closing_rank = 1

    def __init__(
        self,
        context: Context,
        entries: int,
        channel: CompletionChannel | None = None,
        *,
        comp_vector: int = 0,
        flags: CompletionQueueFlag | None = None,
    ) -> None:
        _check_entries(context, entries)
        if not 0 <= comp_vector < max(1, context.num_comp_vectors):
            raise ValueError(
                f"comp_vector={comp_vector}: {context.device_name} has "
                f"0..{context.num_comp_vectors - 1}"
            )
        super().__init__(context, *([channel] if channel else []))
        self.context = context
        self.provider = context.provider
        to = channel.pointer if channel else ffi.NULL
        try:
            if flags:
                self.pointer = lib.aiordma_create_cq_ex(
                    context.pointer, entries, to, comp_vector, flags
                )
                if self.pointer == ffi.NULL:
                    check_supported(ffi.errno, f"a queue with {flags!r}", context.device_name)
                check_pointer(self.pointer, "ibv_create_cq_ex", repr(flags))
            else:
                self.pointer = check_pointer(
                    self.provider.create_cq(context.pointer, entries, ffi.NULL, to, comp_vector),
                    "ibv_create_cq",
                )
        except BaseException:
            self._abandon()
            raise
        self.cqe: int = self.pointer.cqe
        self.key = int(ffi.cast("uintptr_t", self.pointer))

    def __repr__(self) -> str:
        return f"<CompletionQueue of {self.cqe} on {self.context.device_name}>"

    def resize(self, entries: int) -> None:
        """Make it hold so many completions at least; `cqe` is then what the device gave (man
        ibv_resize_cq). What is in it stays.

        Raises:
            ValueError: more entries than the device's max_cqe.
            NotSupportedError: the device cannot resize (iWARP's cannot).
            VerbsCallError: the driver refused: it holds more completions than that.
        """
        self.require_open()
        _check_entries(self.context, entries)
        error = self.provider.resize_cq(self.pointer, entries)
        check_supported(error, "resizing a completion queue", self.context.device_name)
        check_positive_errno(
            error, "ibv_resize_cq", f"from {self.cqe} to {entries} entries: poll it empty first"
        )
        self.cqe = self.pointer.cqe

    def request_notification(self, *, solicited_only: bool = False) -> None:
        """Arm the queue for one event: of the next completion, or, `solicited_only`, of the next
        one that failed or whose sender set SendFlag.SOLICITED. Poll once more afterwards, or lose
        a completion."""
        self.require_open()
        check_positive_errno(
            lib.aiordma_request_notification(self.pointer, solicited_only), "ibv_req_notify_cq"
        )

    def poll(self, most: int = 32) -> list[WorkCompletion]:
        """Take up to `most` completions, in order; none is an empty list."""
        self.require_open()
        batch: Any = ffi.new("struct aiordma_completion[]", most)
        count = check_negative_errno(lib.aiordma_poll(self.pointer, batch, most), "ibv_poll_cq")
        packed = ffi.buffer(batch, count * COMPLETION.size)
        return [WorkCompletion._make(raw) for raw in COMPLETION.iter_unpack(packed)]

    def _destroy(self) -> None:
        check_positive_errno(self.provider.destroy_cq(self.pointer), "ibv_destroy_cq")


def _check_entries(context: Context, entries: int) -> None:
    limit = context.query().max_cqe
    if not 1 <= entries <= limit:
        raise ValueError(f"a completion queue of {context.device_name} has 1..{limit} entries")
