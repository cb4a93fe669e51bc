"""Asynchronous events of a device (man ibv_get_async_event).

The C call that takes an event copies it and acknowledges it, because destroying an object waits
until each of its events is acknowledged.
"""

from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol, Self

import anyio
import anyio.lowlevel

from aiordma._base.calls import check_negative_errno
from aiordma._base.enums import AsyncEventType
from aiordma._base.errors import BusyError
from aiordma._base.provider import Provider
from aiordma._loop.event_loop import EventLoop, current_event_loop
from aiordma._native import ffi, lib
from aiordma.verbs.resource import Resource

__all__ = ("QUEUE_PAIR_ERRORS", "AsyncEvent", "AsyncEvents", "take_async_event")

QUEUE_PAIR_ERRORS = frozenset(
    {AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR}
)
"""Events after which the queue pair is in the error state."""

_OF_AN_OBJECT = QUEUE_PAIR_ERRORS | {
    AsyncEventType.CQ_ERR,
    AsyncEventType.COMM_EST,
    AsyncEventType.SQ_DRAINED,
    AsyncEventType.PATH_MIG,
    AsyncEventType.PATH_MIG_ERR,
    AsyncEventType.SRQ_ERR,
    AsyncEventType.SRQ_LIMIT_REACHED,
    AsyncEventType.QP_LAST_WQE_REACHED,
    AsyncEventType.WQ_FATAL,
}


@dataclass(frozen=True, slots=True)
class AsyncEvent:
    """One asynchronous event, copied and acknowledged.

    `port` is the number of the port that the event concerns, or 0. `key` is the `key` of the queue
    pair, completion queue or shared receive queue that it concerns, or 0. `resource` is this
    object, None if it has been closed or belongs to another context. `qp_num` is the number of the
    queue pair that it concerns, or 0: an address can be that of another queue pair soon.
    """

    type: AsyncEventType
    port: int = 0
    key: int = 0
    resource: Resource | None = None
    qp_num: int = 0


def take_async_event(provider: Provider, pointer: Any) -> AsyncEvent | None:
    """Take the next event of a context whose descriptor is non-blocking; None if there is none.

    Every thread may call this; one of them gets each event. `resource` is not set.

    Raises:
        VerbsCallError: the device was removed, or the context failed.
    """
    raw = ffi.new("struct aiordma_async_event *")
    result = lib.aiordma_next_async_event(provider.table, pointer, raw)
    if not check_negative_errno(result, "ibv_get_async_event"):
        return None
    kind = AsyncEventType(raw.event)
    if kind in _OF_AN_OBJECT:
        return AsyncEvent(kind, key=raw.element, qp_num=raw.qp_num)
    if kind is AsyncEventType.DEVICE_FATAL:
        return AsyncEvent(kind)
    return AsyncEvent(kind, port=raw.element)


class _Source(Protocol):
    """The part of Context that AsyncEvents uses."""

    @property
    def closed(self) -> bool:
        """Whether the context is closed."""

    @property
    def async_fd(self) -> int:
        """The descriptor that is readable while an event is pending."""

    def take_async_event(self) -> AsyncEvent | None:
        """Take the next event; None if there is none."""


class AsyncEvents:
    """The asynchronous events of an opened device: `async for event in context.async_events()`.

    The iteration ends when the context is closed. Only one task at a time may wait for the events
    of a context.

    Raises:
        BusyError: another task is waiting, or librdmacm opened the context.
        VerbsCallError: the device was removed.

    Cancellation: no event is lost; the next wait returns it.

    See: man ibv_get_async_event.
    """

    def __init__(self, context: _Source) -> None:
        self._context = context
        self._waits_in = 0
        self._loop: EventLoop | None = None
        """The event loop of the waiting task."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncEvent:
        if self._waits_in:
            raise BusyError("another task waits for this context's asynchronous events")
        self._loop, self._waits_in = current_event_loop(), get_ident()
        try:
            # Another caller may have taken the event that woke this task. An event that was taken
            # is returned without another await, so that no cancellation loses it.
            await anyio.lowlevel.checkpoint()
            while not self._context.closed:
                event = self._context.take_async_event()
                if event is not None:
                    return event
                await anyio.wait_readable(self._context.async_fd)
        except anyio.ClosedResourceError:
            pass  # woken by the close of the context
        finally:
            self._waits_in, self._loop = 0, None
        raise StopAsyncIteration

    def _require_here(self) -> None:
        """Check that no task of another thread waits, because the context is about to be closed.

        Raises:
            BusyError: a task of another thread waits.
        """
        if self._waits_in not in (0, get_ident()):
            raise BusyError(
                "a task of another thread waits for this context's asynchronous events: close the "
                "context there, or cancel that task first"
            )

    def _stop(self) -> None:
        """Wake a waiting task. Call this before closing the descriptor. Raises nothing."""
        loop, fd = self._loop, self._context.async_fd
        if loop is None or loop.has_ended:
            return
        if loop.is_running_here():
            with suppress(RuntimeError):  # within a callback, anyio may not recognize the loop
                anyio.notify_closing(fd)
                return

        async def notify() -> None:
            anyio.notify_closing(fd)

        # A suspended loop does this first when it runs again.
        with suppress(RuntimeError):  # trio does not run here
            loop.spawn(notify, "aiordma: end of asynchronous events")
