"""Defers interrupts (SIGINT) while aiordma changes its state, so that no KeyboardInterrupt ends a
function before its end.

C does the work (`_native/engine/interrupts.c`). While a deferring call runs on the main thread, the
handler of SIGINT only records the signal. After the call, the event loop calls the program's
handler. A coroutine defers interrupts in each of its steps. So an interrupt reaches it only at a
wait, as a cancellation does.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from aiordma import _native

__all__ = ("deferring", "deferring_method", "deferring_steps", "uninterrupted")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Method = TypeVar("Method")


def uninterrupted(callback: Callable[Parameters, object]) -> Callable[Parameters, None]:
    """Return a callback that defers SIGINT, and has the name of `callback`, for the messages of
    asyncio's debug mode. It calls from C, so no SIGINT is handled between its call and the first
    step of `callback` either."""
    return cast("Callable[Parameters, None]", _native.DeferringMethod(callback))


def deferring(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function that changes state: a SIGINT is handled after it has returned."""

    @wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        result: Result = _native.uninterrupted(function, *arguments, **keywords)
        return result

    return call


def deferring_method(method: Method, first: Callable[..., Any] | None = None) -> Method:
    """Decorate a method as `deferring` does, if nothing would undo what a SIGINT directly before it
    leaves behind. Such a method is called from C, so that none is handled between its call and its
    first step.

    Args:
        method: the method, which returns None if there is a `first`.
        first: a function in C, which takes the same arguments. If it returns True, it has done the
            work, and the method is not called.
    """
    return cast(Method, _native.DeferringMethod(method, first))


def deferring_steps(
    function: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    """Decorate a coroutine function that changes state: a SIGINT is handled after it has reached
    its next wait. The event loop calls the handler, not the coroutine."""

    @wraps(function)
    async def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        result: Result = await _native.Steps(function(*arguments, **keywords))
        return result

    return run
