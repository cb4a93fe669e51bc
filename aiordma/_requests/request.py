"""WorkRequest of the chosen backend, the Python functions that the engine calls for a request, and
`fail_all`.
"""

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from typing import Any

from aiordma._loop.event_loop import Waiter
from aiordma._native import given
from aiordma._requests.select import Holdable, OpenRequests, RequestOwner, WorkRequest
from aiordma.verbs import WorkCompletion

__all__ = ("Holdable", "OpenRequests", "RequestOwner", "WorkRequest", "fail_all")

logger: logging.Logger = logging.getLogger("aiordma")


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
    """Fail requests without completions. All of them fail, even if a callback raises: an interrupt
    (KeyboardInterrupt) is raised again after the last one."""
    with ExitStack() as last_first:
        for request in reversed(list(requests)):
            last_first.callback(lambda each: each._fail(explain(each)), request)
