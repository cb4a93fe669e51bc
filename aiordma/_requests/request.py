"""The interfaces of a work request's owner and memory, the Python functions that the engine calls
for a request, and `fail_all`.

wr_id = generation << 32 | slot. The entry in the in-flight table owns the memory that the device
may access. Only the completion removes the entry and frees the memory. If a slot was reused, a
completion for its old generation is dropped.

No verb cancels a single posted request. So cancelling a task that awaits a request only abandons
the result. The request stays in flight, and its memory stays held, until the completion arrives or
the queue pair is destroyed.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any, Protocol

from aiordma._base.call_all import call_all
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._native import WorkRequest as WorkRequest
from aiordma._native import given
from aiordma.verbs.completion import WorkCompletion

logger: logging.Logger = logging.getLogger("aiordma")


class Holdable(Protocol):
    """Memory that must not be freed or reused while a request uses it."""

    def _hold(self) -> None:
        """Hold the memory for a request that will be posted. If this raises, it is not posted."""

    def _release(self) -> None:
        """Release the memory, because the request has completed."""


class RequestOwner(Protocol):
    """The endpoint that posted a request."""

    loop: EventLoop

    def request_failed(self, request: WorkRequest, raw: tuple[int, ...]) -> Exception:
        """Return the error for a failed completion."""

    def request_ended(self, request: WorkRequest) -> None:
        """Take back the slot of a request that has completed."""

    def request_unretrieved(self, request: WorkRequest) -> None:
        """Report a failed request whose error was never retrieved. Its finalizer calls this, in any
        thread."""

    def run_ended(self, earlier: WorkRequest, last: WorkRequest) -> None:
        """Complete an unsignaled request, because the last request of its run has completed."""


@given("wait_elsewhere")
def _wait_elsewhere(request: WorkRequest, waiter: Waiter) -> Generator[Any, Any, WorkCompletion]:
    """Await a request of the engine on a loop that the engine does not support."""
    try:
        yield from waiter.wait().__await__()
    finally:
        request._forget_waiter(waiter)
    return request.result()


@given("log")
def _log(text: str, about: object, error: BaseException) -> None:
    logger.error(text, *([about] if "%r" in text else []), exc_info=error)


def fail_all(requests: Iterable[WorkRequest], explain: Callable[[WorkRequest], Exception]) -> None:
    """Fail requests without completions. All of them fail, even if a callback raises."""
    call_all([partial(lambda each: each._fail(explain(each)), request) for request in requests])
