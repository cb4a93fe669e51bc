"""Fault injection on the software device. The same seed and the same calls give the same faults.

A fault applies to one kind of operation. It skips the first `after` operations, then strikes the
next `times` of them (0: all). With `chance`, it strikes each of them with that probability. The
random numbers come from the seed, in the order of the device's calls.
"""

import errno
import weakref
from collections.abc import Collection
from types import TracebackType
from typing import Any

from aiordma._base.arguments import (
    instance,
    member,
    nearest,
    resource,
    seconds_within,
    shown,
    text,
    whole_number,
    wrong_type,
)
from aiordma._base.calls import check_negative_errno, check_positive_errno
from aiordma._base.enums import AsyncEventType
from aiordma._base.errors import NotSupportedError
from aiordma._base.origin import Place, origin, warn_unclosed, with_origin
from aiordma._base.provider import Provider, software
from aiordma._native import ffi, lib
from aiordma.verbs import CompletionQueue, QueuePair, RawSharedReceiveQueue

__all__ = ("Fault", "Faults", "end_left", "entered")

_MINUS_ONE = frozenset(
    {
        *("accept", "bind_addr", "cm_create_qp", "connect", "create_id", "destroy_id"),
        *("disconnect", "get_cm_event", "join_multicast_ex", "leave_multicast", "listen"),
        *("migrate_id", "reject", "resolve_addr", "resolve_route", "set_option"),
        *("establish", "init_qp_attr", "join_multicast", "notify", "get_cq_event"),
        *("cm_getaddrinfo", "get_remote_ece", "reject_ece", "set_local_ece"),
    }
)
"""Calls that return -1 and set errno if they fail. Calls with a pointer as result return NULL and
set errno; `query_gid_table` returns the negative errno, all other calls the errno."""

_FROM_C = frozenset(
    {
        *("ack_cm_event", "get_async_event", "get_cm_event", "init_ah_from_wc"),
        *("query_device", "query_port"),
    }
)
"""Calls that aiordma makes from C, where Python cannot replace them."""

_CANNOT_FAIL = frozenset({"get_device_guid", "get_device_name"})
"""Calls whose result cannot report an error, besides those without a result."""

_MOST = 0xFFFFFFFF
"""The largest count, and the longest time in milliseconds."""
_MOST_ERRNO = 4095
_MOST_BYTES = 0xFFFFFFFFFFFFFFFF

_OTHER_FAULTS = {
    "post_send": "refuse_post",
    "post_recv": "refuse_post",
    "post_srq_recv": "refuse_post",
}
"""Calls that are no slots of the provider, and the method that refuses them."""


class Fault:
    """A fault of `Faults`. `struck` counts how often it was carried out."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._struck = 0

    @property
    def struck(self) -> int:
        """How often the fault has struck."""
        found = lib.aiordma_software_fault_struck(self._number)
        if found >= 0:
            self._struck = found
        return self._struck

    def end(self) -> None:
        """Remove the fault. Completions and events that it delayed still arrive. Idempotent.

        Raises: nothing.
        """
        _ = self.struck
        lib.aiordma_software_remove_fault(self._number)


class _RefusedCall(Fault):
    """Replaces a call in the provider's table, until the call has failed `times` times. It can
    replace another one that refuses the same call: the later one comes first."""

    def __init__(self, slot: str, error: int, after: int, times: int) -> None:
        super().__init__(-1)
        self._provider = software()
        self._slot = text(slot, "slot", "the name of a call", "refuse_call")
        self._call = _refusable(self._provider, slot)
        self._error = whole_number(error, "error", 1, _MOST_ERRNO, "refuse_call")
        self._after = whole_number(after, "after", 0, _MOST, "refuse_call")
        self._times = whole_number(times, "times", 0, _MOST, "refuse_call")
        self._has_ended = False
        setattr(self._provider, slot, self)

    @property
    def struck(self) -> int:
        return self._struck

    def end(self) -> None:
        self._has_ended = True
        # What has ended below a fault that has not stays in the table, and passes its calls on.
        call = vars(self._provider).get(self._slot)
        while isinstance(call, _RefusedCall) and call._has_ended:
            call = call._call
            setattr(self._provider, self._slot, call)

    def __call__(self, *arguments: Any) -> Any:
        if self._has_ended:
            return self._call(*arguments)
        if self._after:
            self._after -= 1
            return self._call(*arguments)
        self._struck += 1
        if self._times and self._struck >= self._times:
            self.end()
        ffi.errno = self._error
        if ffi.typeof(_of_device(self._call)).result.kind == "pointer":
            return ffi.NULL
        if self._slot == "query_gid_table":
            return -self._error
        return -1 if self._slot in _MINUS_ONE else self._error


def _of_device(call: Any) -> Any:
    """Return the device's own call, below those that refuse it."""
    while isinstance(call, _RefusedCall):
        call = call._call
    return call


def _refusable(provider: Provider, slot: str) -> Any:
    """Return the call of a slot, if Python can replace it by one that fails.

    Raises:
        NotSupportedError: it cannot; the message says why.
    """
    slots = [name for name, _ in ffi.typeof("struct aiordma_provider").fields]
    refusable = [name for name in slots if name not in _FROM_C | _CANNOT_FAIL]
    plain = slot.removeprefix("ibv_").removeprefix("rdma_")
    if plain in _OTHER_FAULTS:
        raise NotSupportedError(f"refuse_call({slot!r}): use {_OTHER_FAULTS[plain]}() for posts")
    if slot not in slots:
        raise NotSupportedError(
            f"refuse_call({slot!r}): the device has no call of that name (names have no prefix): "
            f"{nearest(plain, refusable)}"
        )
    if slot in _FROM_C:
        raise NotSupportedError(
            f"refuse_call({slot!r}): aiordma makes this call from C, where it cannot be refused"
        )
    call = getattr(provider, slot)
    if slot in _CANNOT_FAIL or ffi.typeof(_of_device(call)).result.kind == "void":
        raise NotSupportedError(f"refuse_call({slot!r}): this call cannot report an error")
    return call


def _chance_of(chance: Any, call: str) -> int:
    """Return a probability in 65536ths; 0: always."""
    if isinstance(chance, bool) or not hasattr(type(chance), "__float__"):
        raise wrong_type(chance, "chance", "a number above 0, at most 1", call)
    if not 0 < chance <= 1:
        raise ValueError(f"{call}(): chance={shown(chance)} is not in (0, 1]")
    return 0 if chance == 1 else max(1, int(chance * 65536))


class Faults:
    """The faults of a `with` block. The end of the block removes all of them. Outside of the block,
    the methods that make a fault raise RuntimeError.

    Args:
        seed: the seed of the random numbers, for `chance` and `spread`.

    Raises:
        TypeError: the seed is not an int.
    """

    def __init__(self, seed: int = 0) -> None:
        self._faults: list[Fault] = []
        self._is_entered = False
        self._origin = Place("")
        instance(seed, "seed", int, "Faults", "a whole number")
        self._seed = seed

    def __enter__(self) -> "Faults":
        lib.aiordma_software_seed_faults(self._seed & (1 << 63) - 1)
        self._is_entered = True
        self._origin = origin()
        _entered.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._is_entered = False
        _entered.discard(self)
        while self._faults:
            self._faults.pop().end()

    def __del__(self) -> None:
        if self._faults:
            text = with_origin(self, self._origin)
            self._end()
            warn_unclosed(f"the `with` block of faults was never left: {text}", self, self._origin)

    def __repr__(self) -> str:
        return f"<Faults: {len(self._faults)} armed>"

    def _require_entered(self, call: str) -> None:
        if not self._is_entered:
            raise RuntimeError(
                f"{call}(): outside of the `with` block of these Faults, whose end removes the "
                f"fault: with aiordma.testing.Faults() as faults: faults.{call}(...)"
            )

    def _add(
        self,
        call: str,
        kind: int,
        *,
        after: int = 0,
        times: int = 1,
        seconds: float = 0.0,
        spread: float = 0.0,
        chance: float = 1.0,
        error: int = 0,
        size: int = 0,
        after_name: str = "after",
    ) -> Fault:
        self._require_entered(call)
        most = _MOST / 1000
        raw = ffi.new("struct aiordma_fault *")
        raw.kind, raw.error = kind, error
        raw.after = whole_number(after, after_name, 0, _MOST, call)
        raw.times = whole_number(times, "times", 0, _MOST, call)
        raw.bytes = whole_number(size, "after_bytes", 0, _MOST_BYTES, call)
        raw.milliseconds = round(seconds_within(seconds, "seconds", 0, most, call) * 1000)
        raw.spread = round(seconds_within(spread, "spread", 0, most, call) * 1000)
        raw.chance = _chance_of(chance, call)
        number = check_negative_errno(
            lib.aiordma_software_add_fault(raw), "aiordma_software_add_fault"
        )
        fault = Fault(number)
        self._faults.append(fault)
        return fault

    def refuse_connection(self, *, after: int = 0, times: int = 1) -> Fault:
        """Refuse a connect, as if the port had no listener: RejectedError.

        Args:
            after: how many connects to spare first.
            times: how many connects to refuse; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "refuse_connection", lib.AIORDMA_FAULT_CONNECT_REFUSED, after=after, times=times
        )

    def delay_connection(self, seconds: float, *, after: int = 0, times: int = 1) -> Fault:
        """Delay the reply to a connect by `seconds`.

        Args:
            seconds: the delay.
            after: how many connects to spare first.
            times: how many connects to delay; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "delay_connection",
            lib.AIORDMA_FAULT_CONNECT_DELAYED,
            seconds=seconds,
            after=after,
            times=times,
        )

    def drop_connection(
        self, *, after_bytes: int | None = None, after_requests: int | None = None, times: int = 1
    ) -> Fault:
        """Reset a connection: when it has carried `after_bytes`, or at a post that follows
        `after_requests` posts on all connections.

        Args:
            after_bytes: the bytes that the connection carries first; None: count posts.
            after_requests: the posts, on all connections, before the one that resets; None: count
                bytes.
            times: how many connections to reset; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range; or both of
                `after_bytes` and `after_requests` are given, or neither.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        if (after_bytes is None) == (after_requests is None):
            raise ValueError("one of after_bytes and after_requests is needed")
        if after_bytes is not None:
            return self._add(
                "drop_connection", lib.AIORDMA_FAULT_DROP_AFTER_BYTES, size=after_bytes, times=times
            )
        assert after_requests is not None
        return self._add(
            "drop_connection",
            lib.AIORDMA_FAULT_DROP_AFTER_REQUESTS,
            after=after_requests,
            times=times,
            after_name="after_requests",
        )

    def silence_peer(self, seconds: float, *, after: int = 0, times: int = 1) -> Fault:
        """Silence a peer: the connection that posts next transfers nothing more, and breaks after
        `seconds`, as TCP breaks it without acknowledgements. Its READs fail with
        RetryExceededError.

        Args:
            seconds: how long until the connection breaks.
            after: how many posts to spare first.
            times: how many connections to silence; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "silence_peer", lib.AIORDMA_FAULT_DEAD_PEER, seconds=seconds, after=after, times=times
        )

    def delay_completions(
        self,
        seconds: float,
        *,
        spread: float = 0.0,
        chance: float = 1.0,
        after: int = 0,
        times: int = 0,
    ) -> Fault:
        """Delay completions by `seconds` and a random time up to `spread`. The completions of one
        queue pair stay in order. Completions of different queue pairs can be reordered.

        Args:
            seconds: the delay of each completion.
            spread: the largest random time that is added, in seconds.
            chance: the probability of each completion to be delayed, above 0, at most 1.
            after: how many completions to spare first.
            times: how many completions to delay; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "delay_completions",
            lib.AIORDMA_FAULT_COMPLETION_DELAYED,
            seconds=seconds,
            spread=spread,
            chance=chance,
            after=after,
            times=times,
        )

    def spurious_events(self, *, chance: float = 1.0, times: int = 0) -> Fault:
        """Add events to a completion channel that wake the loop without a completion.

        Args:
            chance: the probability of an event each time that a queue is armed after a
                completion, above 0, at most 1.
            times: how many events to add; 0: without limit.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "spurious_events", lib.AIORDMA_FAULT_SPURIOUS_EVENT, chance=chance, times=times
        )

    def merge_events(self, seconds: float, *, chance: float = 1.0, times: int = 0) -> Fault:
        """Delay a completion channel's event. One event then announces every completion until it
        arrives.

        Args:
            seconds: the delay.
            chance: the probability of each event to be delayed, above 0, at most 1.
            times: how many events to delay; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "merge_events",
            lib.AIORDMA_FAULT_EVENT_DELAYED,
            seconds=seconds,
            chance=chance,
            times=times,
        )

    def refuse_post(
        self, error: int = errno.ENOMEM, *, chance: float = 1.0, after: int = 0, times: int = 1
    ) -> Fault:
        """Refuse a send or a receive when it is posted, with an errno.

        Args:
            error: the errno.
            chance: the probability of each post to be refused, above 0, at most 1.
            after: how many posts to spare first.
            times: how many posts to refuse; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "refuse_post",
            lib.AIORDMA_FAULT_POST_REFUSED,
            error=whole_number(error, "error", 1, _MOST_ERRNO, "refuse_post"),
            chance=chance,
            after=after,
            times=times,
        )

    def refuse_call(
        self, slot: str, error: int = errno.ENOMEM, *, after: int = 0, times: int = 1
    ) -> Fault:
        """Fail a call into the device, named as in provider.h: "reg_mr", "create_cq", "connect"...
        A call can be refused several times; the fault that was made last comes first.

        Args:
            slot: the name of the call.
            error: the errno.
            after: how many of these calls to spare first.
            times: how many of these calls to fail; 0: all.

        Raises:
            NotSupportedError: the device has no call of that name, the call cannot report an error,
                or aiordma makes it from C.
            TypeError, ValueError: an argument is not a number, or out of range.
            RuntimeError: outside of the `with` block.
        """
        self._require_entered("refuse_call")
        fault = _RefusedCall(slot, error, after, times)
        self._faults.append(fault)
        return fault

    def receiver_not_ready(self, seconds: float, *, after: int = 0, times: int = 1) -> Fault:
        """Hold back a message for `seconds`, as if no receive were posted.

        Args:
            seconds: how long.
            after: how many messages to spare first.
            times: how many messages to hold back; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add(
            "receiver_not_ready",
            lib.AIORDMA_FAULT_NOT_READY,
            seconds=seconds,
            after=after,
            times=times,
        )

    def want_crc(self) -> Fault:
        """Not a fault: request a CRC on every frame of connections made from now on. Without it,
        the device requests a CRC only from peers on other machines.

        Raises:
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add("want_crc", lib.AIORDMA_FAULT_CRC_WANTED, times=0)

    def corrupt_frame(self, *, after: int = 0, times: int = 1) -> Fault:
        """Corrupt a frame that has a CRC. Its receiver ends the connection.

        Args:
            after: how many frames to spare first.
            times: how many frames to corrupt; 0: all.

        Raises:
            TypeError, ValueError: an argument is not a number, or out of range.
            VerbsCallError: there are 64 faults already.
            RuntimeError: outside of the `with` block.
        """
        return self._add("corrupt_frame", lib.AIORDMA_FAULT_CORRUPTED, after=after, times=times)

    def raise_event(
        self,
        event: AsyncEventType,
        target: QueuePair | CompletionQueue | RawSharedReceiveQueue | None = None,
    ) -> None:
        """Raise an asynchronous event of the target, or, with None, of the device or its port (to
        every context).

        Args:
            event: the event.
            target: the object that the event belongs to; None: the device or its port.

        Raises:
            TypeError, ValueError: the event or the target is none.
            VerbsCallError: EINVAL: this event needs a target.
        """
        event = member(event, "event", AsyncEventType, "raise_event")
        if target is not None:
            resource(target, "target", "a queue pair, or one of the queues", "raise_event")
        pointer = ffi.NULL if target is None else ffi.cast("void *", target.pointer)
        check_positive_errno(lib.aiordma_software_raise(event, pointer), "aiordma_software_raise")


_entered: "weakref.WeakSet[Faults]" = weakref.WeakSet()
"""Those within their `with` blocks."""


def end_left(before: Collection[Faults]) -> list[str]:
    """End the faults that are armed now, and whose blocks were entered since.

    Args:
        before: `entered()` of that time.

    Returns:
        a text for each object, with the place where its block begins.
    """
    left = [each for each in entered() if each not in before and each._faults]
    texts = [with_origin(each, each._origin) for each in left]
    for each in left:
        each._end()
    return texts


def entered() -> list[Faults]:
    """Return the objects whose `with` blocks are entered."""
    return list(_entered)
