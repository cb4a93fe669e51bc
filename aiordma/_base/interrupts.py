"""Interrupts (SIGINT) are deferred while aiordma changes its state: no KeyboardInterrupt ends a
function half way that has to run to its end.

The work is done in C (`_native/engine/interrupts.c`): while a deferring call runs on the main
thread, SIGINT has a handler that takes note of it, and the program's handler is called behind the
call, by the event loop. A coroutine is deferring in each of its steps, so that an interrupt meets
it where it waits, as a cancellation does.
"""

from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from aiordma import _native

__all__ = ("deferring", "deferring_steps", "uninterrupted")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uninterrupted(callback: Callable[[], object]) -> Callable[[], None]:
    """Return the callback as one that no SIGINT interrupts, and none can precede it either once it
    is called: no Python lies between."""
    return partial(_native.uninterrupted, callback)


def deferring(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function that changes state: it runs to its end before a SIGINT is handled."""

    @wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        result: Result = _native.uninterrupted(function, *arguments, **keywords)
        return result

    return call


def deferring_steps(
    function: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    """Decorate a coroutine function that changes state: it runs to its next wait before a SIGINT is
    handled. The handler is called by the event loop, not in the coroutine."""

    @wraps(function)
    async def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        result: Result = await _native.Steps(function(*arguments, **keywords))
        return result

    return run
