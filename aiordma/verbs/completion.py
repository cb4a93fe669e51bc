"""Completion channels, completion queues and completions (man ibv_create_cq, ibv_poll_cq)."""

import errno
import struct
from typing import Any

from aiordma._base.arguments import resource, whole_number
from aiordma._base.calls import (
    check_negative_errno,
    check_pointer,
    check_positive_errno,
    check_supported,
)
from aiordma._base.enums import (
    CompletionQueueFlag,
    WorkCompletionFlag,
    WorkCompletionOpcode,
    WorkCompletionStatus,
)
from aiordma._base.errors import NotSupportedError, VerbsCallError
from aiordma._base.provider import Provider
from aiordma._base.system import set_nonblocking
from aiordma._native import CompletionFields, ffi, given, lib
from aiordma.verbs.device import Context
from aiordma.verbs.resource import Resource

__all__ = ("COMPLETION", "CompletionChannel", "CompletionQueue", "WorkCompletion")

COMPLETION = struct.Struct("=QIIIIIIIIHHBBH")
"""The layout of struct aiordma_completion in data_path.h."""

MOST_POLLED = 1 << 20
"""Most completions of one poll, which allocates memory for as many as it is asked for."""


@given("completion")
class WorkCompletion(CompletionFields):
    """The completion of a work request, as a named tuple. After a failure, only wr_id, status,
    vendor_err and qp_num are valid (man ibv_poll_cq). `immediate` is in host order."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = f"wr_id={self.wr_id:#x}, status={self.status_name}"
        if self.ok:
            shown += f", opcode={self.operation.name}, byte_len={self.byte_len}"
            if self.wc_flags & WorkCompletionFlag.WITH_IMM:
                shown += f", immediate={self.immediate:#x}"
        else:
            shown += f", vendor_err={self.vendor_err:#x}"
        return f"WorkCompletion({shown}, qp_num={self.qp_num:#x})"

    def _asdict(self) -> dict[str, int]:
        return dict(zip(self._fields, self, strict=True))

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status == 0

    @property
    def status_name(self) -> str:
        """The name of the status, as in the man page."""
        try:
            return WorkCompletionStatus(self.status).name
        except ValueError:  # a status of a newer device
            return f"status {self.status}"

    @property
    def operation(self) -> WorkCompletionOpcode:
        """The operation that completed."""
        return WorkCompletionOpcode(self.opcode)

    @property
    def flags(self) -> WorkCompletionFlag:
        """The optional fields that the completion has."""
        return WorkCompletionFlag(self.wc_flags)


class CompletionChannel(Resource):
    """A channel whose descriptor `fd` becomes readable when an armed queue gets a completion.
    Non-blocking.

    The descriptor can be readable without an event. `events` then returns an empty list.

    Args:
        context: the device.

    Raises:
        TypeError: the context has the wrong type.
        VerbsCallError: the driver refused, or no file descriptors are left.
        ClosedError, ForkError: the context is closed, or was opened by the parent of this process.

    See: man ibv_create_comp_channel.
    """

    _closing_rank = 2

    def __init__(self, context: Context) -> None:
        resource(context, "context", "a Context", "CompletionChannel")
        super().__init__(context)
        try:
            self.context = context
            self.provider: Provider = context.provider
            self.pointer: Any = check_pointer(
                self.provider.create_comp_channel(context.pointer), "ibv_create_comp_channel"
            )
            self.fd: int = self.pointer.fd
            set_nonblocking(self.fd)
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<CompletionChannel of {self.context.device_name}>"

    def events(self) -> "list[CompletionQueue]":
        """Take the pending events, acknowledge them, and return their queues, oldest first.

        A queue makes one event for each `request_notification`: arm it again, then poll it until it
        is empty. Without a pending event, the list is empty.

        Raises:
            VerbsCallError: the events could not be read.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_get_cq_event, ibv_ack_cq_events.
        """
        self._require_open()
        queues = self._queues()
        queue, context = ffi.new("struct ibv_cq **"), ffi.new("void **")
        taken: list[CompletionQueue] = []
        while not self.provider.get_cq_event(self.pointer, queue, context):
            # At once, because destroying a queue waits until its events are acknowledged.
            self.provider.ack_cq_events(queue[0], 1)
            key = int(ffi.cast("uintptr_t", queue[0]))
            if key not in queues or queues[key].closed:  # another thread created one since
                queues = self._queues()
            if key in queues:  # else another thread closed it
                taken.append(queues[key])
        if ffi.errno != errno.EAGAIN:
            raise VerbsCallError(ffi.errno, "ibv_get_cq_event")
        return taken

    def _queues(self) -> "dict[int, CompletionQueue]":
        """The channel's queues by their keys. One that is being created has the key 0."""
        children = list(self._children.values())
        return {child.key: child for child in children if isinstance(child, CompletionQueue)}

    def _destroy(self) -> None:
        check_positive_errno(
            self.provider.destroy_comp_channel(self.pointer), "ibv_destroy_comp_channel"
        )


class CompletionQueue(Resource):
    """A queue of work completions. `cqe` is its actual capacity, `comp_vector` its vector.

    Args:
        context: the device.
        entries: the smallest capacity, in completions.
        channel: the channel that gets the events of the armed queue; None: it has no events.
        comp_vector: the completion vector, which selects an interrupt; below `num_comp_vectors`.
        flags: options, for devices with extended queues (man ibv_create_cq_ex); None: none.
        timestamps: the device records the time of each completion, for `poll_timestamped`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `entries` exceeds the device's max_cqe, or there is no such vector.
        NotSupportedError: the device does not support extended queues, the flag, or timestamps.
        VerbsCallError: the driver refused.
        ClosedError, ForkError: the context or channel is closed, or was opened by the parent of
            this process.

    See: man ibv_create_cq.
    """

    _closing_rank = 1

    def __init__(
        self,
        context: Context,
        entries: int,
        channel: CompletionChannel | None = None,
        *,
        comp_vector: int = 0,
        flags: CompletionQueueFlag | None = None,
        timestamps: bool = False,
    ) -> None:
        call = "CompletionQueue"
        resource(context, "context", "a Context", call)
        entries = _checked_entries(context, entries, call)
        if channel is not None:
            resource(channel, "channel", "a CompletionChannel", call)
        comp_vector = whole_number(comp_vector, "comp_vector", -(2**31), 2**31 - 1, call)
        if flags is not None:
            flags = CompletionQueueFlag(whole_number(flags, "flags", 0, 2**32 - 1, call))
        if not 0 <= comp_vector < max(1, context.num_comp_vectors):
            raise ValueError(
                f"comp_vector={comp_vector}: {context.device_name} has "
                f"0..{context.num_comp_vectors - 1}"
            )
        super().__init__(context, *([channel] if channel else []))
        try:
            self.context = context
            self.provider: Provider = context.provider
            to = channel.pointer if channel else ffi.NULL
            if flags or timestamps:
                with_times = lib.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP if timestamps else 0
                extras = [repr(flags)] if flags else []
                extras += ["timestamps"] if timestamps else []
                what = " and ".join(extras)
                pointer = lib.aiordma_create_cq_ex(
                    context.pointer, entries, to, comp_vector, flags or 0, with_times
                )
                if pointer == ffi.NULL:
                    check_supported(ffi.errno, f"a queue with {what}", context.device_name)
                self.pointer: Any = check_pointer(pointer, "ibv_create_cq_ex", what)
            else:
                pointer = self.provider.create_cq(
                    context.pointer, entries, ffi.NULL, to, comp_vector
                )
                self.pointer = check_pointer(pointer, "ibv_create_cq")
            self.cqe: int = self.pointer.cqe
            self.comp_vector: int = comp_vector
            self.timestamps: bool = bool(timestamps)
            self.key: int = int(ffi.cast("uintptr_t", self.pointer))
        except BaseException:
            self._give_up()
            raise

    def __repr__(self) -> str:
        return f"<CompletionQueue of {self.cqe} on {self.context.device_name}>"

    def resize(self, entries: int) -> None:
        """Change the capacity, and update `cqe`. Completions in the queue are kept.

        Args:
            entries: the smallest capacity, in completions.

        Raises:
            TypeError, ValueError: `entries` is not a number, or exceeds the device's max_cqe.
            NotSupportedError: the device cannot resize (siw cannot).
            VerbsCallError: the driver refused; for example, the queue holds more completions.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_resize_cq.
        """
        self._require_open()
        entries = _checked_entries(self.context, entries, "resize")
        error = self.provider.resize_cq(self.pointer, entries)
        check_supported(error, "resizing a completion queue", self.context.device_name)
        check_positive_errno(
            error, "ibv_resize_cq", f"from {self.cqe} to {entries} entries: poll it empty first"
        )
        self.cqe = self.pointer.cqe

    def request_notification(self, *, solicited_only: bool = False) -> None:
        """Arm the queue for one event, at its next completion.

        Poll once more after arming: a completion that arrived before makes no event.

        Args:
            solicited_only: the event is at the next completion that is a failure, or whose sender
                set SendFlag.SOLICITED.

        Raises:
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_req_notify_cq.
        """
        self._require_open()
        check_positive_errno(
            lib.aiordma_request_notification(self.pointer, bool(solicited_only)),
            "ibv_req_notify_cq",
        )

    def poll(self, most: int = 32) -> list[WorkCompletion]:
        """Take up to `most` completions, in order. Without a completion, the list is empty.

        Args:
            most: the largest number of completions to take.

        Raises:
            TypeError, ValueError: `most` is not a number, or out of range.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_poll_cq.
        """
        self._require_open()
        most = whole_number(most, "most", 0, MOST_POLLED, "poll")
        batch: Any = ffi.new("struct aiordma_completion[]", most)
        count = check_negative_errno(lib.aiordma_poll(self.pointer, batch, most), "ibv_poll_cq")
        packed = ffi.buffer(batch, count * COMPLETION.size)
        return [WorkCompletion._make(raw) for raw in COMPLETION.iter_unpack(packed)]

    def poll_timestamped(self, most: int = 32) -> list[tuple[WorkCompletion, int]]:
        """Take up to `most` completions as `poll` does, each with the time at which the device
        completed it.

        The unit is a tick of the device's clock, which has `hca_core_clock` kHz, and the bits of
        `completion_timestamp_mask` (`Context.query()`). `Context.read_clock` reads the same clock.
        On the software device a tick is a nanosecond of CLOCK_MONOTONIC.

        Args:
            most: the largest number of completions to take.

        Raises:
            NotSupportedError: the queue was created without `timestamps=True`.
            TypeError, ValueError, VerbsCallError, ClosedError, ForkError: as `poll`.

        See: man ibv_create_cq_ex, ibv_wc_read_completion_ts.
        """
        self._require_open()
        most = whole_number(most, "most", 0, MOST_POLLED, "poll_timestamped")
        if not self.timestamps:
            raise NotSupportedError(
                "poll_timestamped(): the queue has no timestamps: create it with "
                "CompletionQueue(context, entries, timestamps=True)"
            )
        batch, times = ffi.new("struct aiordma_completion[]", most), ffi.new("uint64_t[]", most)
        count = lib.aiordma_poll_timestamped(self.pointer, batch, times, most)
        check_negative_errno(count, "ibv_start_poll")
        found = COMPLETION.iter_unpack(ffi.buffer(batch, count * COMPLETION.size))
        return [(WorkCompletion._make(raw), times[i]) for i, raw in enumerate(found)]

    def moderate(self, count: int, period: int) -> None:
        """Let the device make one event for several completions (interrupt moderation).

        The event of an armed queue is made after `count` completions, or `period` after the first
        of them. It costs latency, and saves wake-ups. The software device makes each event at once
        nevertheless.

        Args:
            count: completions; 0 or 1: do not wait for more.
            period: microseconds. `Context.query().cq_mod_caps` has the largest values.

        Raises:
            TypeError, ValueError: an argument is not a number, or exceeds the device's maximum.
            NotSupportedError: the device cannot moderate.
            VerbsCallError: the driver refused.
            ClosedError, ForkError: it is closed, or was opened by the parent of this process.

        See: man ibv_modify_cq.
        """
        self._require_open()
        limits = self.context.query().cq_mod_caps
        if not limits.max_cq_count or not limits.max_cq_period:
            name = self.context.device_name
            raise NotSupportedError(f"moderating completion events: {name} cannot (cq_mod_caps)")
        count = whole_number(count, "count", 0, limits.max_cq_count, "moderate")
        period = whole_number(period, "period", 0, limits.max_cq_period, "moderate")
        error = lib.aiordma_moderate_cq(self.pointer, count, period)
        check_supported(error, "moderating completion events", self.context.device_name)
        check_positive_errno(error, "ibv_modify_cq", f"count={count}, period={period}")

    def _destroy(self) -> None:
        check_positive_errno(self.provider.destroy_cq(self.pointer), "ibv_destroy_cq")


def _checked_entries(context: Context, entries: int, call: str) -> int:
    limit = context.query().max_cqe
    number = whole_number(entries, "entries", -(2**63), 2**63, call)
    if not 1 <= number <= limit:
        raise ValueError(
            f"{call}(): entries={number}: a completion queue of {context.device_name} has "
            f"1..{limit} entries"
        )
    return number
