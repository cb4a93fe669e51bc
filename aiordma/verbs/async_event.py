"""What a device reports beside completions (man ibv_get_async_event).

Every event is copied out of libibverbs and acknowledged in the C call that took it: destroying an
object waits for the acknowledgement of each of its events.
"""

from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol, Self

import anyio
import anyio.lowlevel

from aiordma._base.enums import AsyncEventType
from aiordma._base.errors import BusyError, check_negative_errno
from aiordma._base.provider import Provider
from aiordma._native import ffi, lib
from aiordma.verbs.resource import Resource

__all__ = ("QUEUE_PAIR_ERRORS", "AsyncEvent", "AsyncEvents", "take_async_event")

QUEUE_PAIR_ERRORS = frozenset(
    {AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR}
)
"""After these a queue pair is in its error state."""

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

    `port` is the port's number, 0 where it is about no port. `key` is the address of the object
    that it is about (a queue pair's, completion queue's or shared receive queue's `key`), else 0.
    `resource` is that object, None where it is closed by now or not of the context.
    """

    type: AsyncEventType
    port: int = 0
    key: int = 0
    resource: Resource | None = None


def take_async_event(provider: Provider, pointer: Any) -> AsyncEvent | None:
    """Take the next event of a context whose descriptor is non-blocking; None if none waits.

    Any thread may; each event goes to one taker. `resource` is left open.

    Raises:
        VerbsCallError: the device is gone, or this context of it.
    """
    raw = ffi.new("struct aiordma_async_event *")
    result = lib.aiordma_next_async_event(provider.table, pointer, raw)
    if not check_negative_errno(result, "ibv_get_async_event"):
        return None
    kind = AsyncEventType(raw.event)
    if kind in _OF_AN_OBJECT:
        return AsyncEvent(kind, key=raw.element)
    if kind is AsyncEventType.DEVICE_FATAL:
        return AsyncEvent(kind)
    return AsyncEvent(kind, port=raw.element)


class _Source(Protocol):
    """What AsyncEvents needs of a Context."""

    @property
    def closed(self) -> bool:
        """Whether it is."""

    @property
    def async_fd(self) -> int:
        """Readable when an event waits."""

    def take_async_event(self) -> AsyncEvent | None:
        """Take one."""


class AsyncEvents:
    """The events of an opened device, as they come: `async for event in context.async_events()`.

    The iteration ends when the context is closed. One task at a time may wait on a context.

    Raises:
        BusyError: another task waits already, or the context is librdmacm's.
        VerbsCallError: the device is gone.

    Cancellation: no event is lost; the next wait returns it.

    See: man ibv_get_async_event.
    """

    def __init__(self, context: _Source) -> None:
        self._context = context
        self._waits_in = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncEvent:
        if self._waits_in:
            raise BusyError("another task waits for this context's asynchronous events")
        self._waits_in = get_ident()
        try:
            # A wake-up can be another taker's: the event may be gone. What is taken is returned
            # without another await, so that no cancellation loses it.
            await anyio.lowlevel.checkpoint()
            while not self._context.closed:
                event = self._context.take_async_event()
                if event is not None:
                    return event
                await anyio.wait_readable(self._context.async_fd)
        except anyio.ClosedResourceError:
            pass  # `stop` woke us
        finally:
            self._waits_in = 0
        raise StopAsyncIteration

    def _require_here(self) -> None:
        """Do nothing where `stop` may be called.

        Raises:
            BusyError: a task of another thread waits.
        """
        if self._waits_in not in (0, get_ident()):
            raise BusyError(
                "a task of another thread waits for this context's asynchronous events: close the "
                "context there, or cancel that task first"
            )

    def _stop(self) -> None:
        """Wake a waiting task, before the descriptor is closed."""
        if self._waits_in:
            anyio.notify_closing(self._context.async_fd)
