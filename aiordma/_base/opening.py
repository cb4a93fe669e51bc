"""Opening: the result of `connect`, `listen` and similar functions, awaited or entered (pure)."""

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import GenericAlias, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

Opened = TypeVar("Opened", bound=AbstractAsyncContextManager[Any])
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class WrappedCoroutine(Coroutine[Any, Any, Result]):
    """A coroutine, as a base of classes that have other methods, too. Task groups,
    `asyncio.create_task`, `asyncio.wait_for` and similar functions accept it. If it is never
    awaited, Python warns as for any coroutine."""

    __slots__ = ("__weakref__", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Result]:
        # Itself, which has the coroutine's frames: dumps of tasks follow them. The iterator of the
        # coroutine has none.
        return cast("Generator[Any, Any, Result]", self)

    def __next__(self) -> Any:
        return self._coroutine.send(None)

    def send(self, value: Any) -> Any:
        """Run the coroutine to its next wait, as event loops do.

        Args:
            value: the result of the current wait; None for the first step.

        Raises:
            StopIteration: it has returned; the exception's `value` is the result.
            Exception: the exception that it raised.
        """
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine at its current wait, as event loops do.

        Args:
            error: as of a coroutine's `throw`.

        Raises:
            StopIteration: it has returned; the exception's `value` is the result.
            Exception: the exception that it raised.
        """
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Drop it, if it was never awaited, without a warning.

        Raises: nothing.
        """
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        # The coroutine's name, frame and state, which event loops and debuggers read.
        return getattr(self._coroutine, name)


class Opening(WrappedCoroutine[Opened]):
    """An object that will be opened. Use it once, in one of two ways:

        async with aiordma.connect("192.0.2.1", 7471) as connection: ...
        connection = await aiordma.connect("192.0.2.1", 7471)

    The end of the block closes the object. Nothing happens until the Opening is awaited or entered.
    It is a coroutine.

    Cancellation: during the opening, as documented for the function that returned it. The end of
    the block closes the object, also after a cancellation.
    """

    __slots__ = ("_opened",)

    _opened: Opened

    def __repr__(self) -> str:
        return f"<Opening {self._coroutine!r}>"

    async def __aenter__(self) -> Opened:
        self._opened = await self._coroutine
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, trace)

    def send(self, value: Any) -> Any:
        """Run the coroutine to its next wait, as event loops do.

        Args:
            value: the result of the current wait; None for the first step.

        Raises:
            TypeError: a value for the first step: `connect(...)` was not awaited, and this is no
                connection, whose `send` was meant.
            StopIteration: the object is open; the exception's `value` is the object.
            Exception: the exception that the opening raised.
        """
        if value is not None and self._has_not_begun():
            raise TypeError(f"send(): {self._unopened_text()}")
        return self._coroutine.send(value)

    def __getattr__(self, name: str) -> Any:
        # The coroutine's name, frame and state, which event loops and debuggers read.
        try:
            return getattr(self._coroutine, name)
        except AttributeError:
            text = f"no attribute {name!r}: {self._unopened_text()}"
            raise AttributeError(text, name=name, obj=self) from None

    def _has_not_begun(self) -> bool:
        return inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED

    def _unopened_text(self) -> str:
        """Return why a call that is meant for the opened object fails."""
        call = cast(Any, self._coroutine).__name__
        missing = "was not awaited" if self._has_not_begun() else "returned this, not what it opens"
        return f"this {call}() {missing}: `await {call}(...)`, or `async with {call}(...) as ...:`"


def opens(
    function: Callable[Parameters, Coroutine[Any, Any, Opened]],
) -> Callable[Parameters, Opening[Opened]]:
    """Decorate a coroutine function that opens an object: it returns an Opening."""

    @functools.wraps(function)
    def opener(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Opening[Opened]:
        return Opening(function(*arguments, **keywords))

    signature = inspect.signature(function)
    opened = GenericAlias(Opening, (signature.return_annotation,))
    annotations = {**function.__annotations__, "return": opened}
    if sys.version_info >= (3, 14):  # from where another decorator's functools.wraps takes them
        opener.__annotate__ = lambda _format: annotations
    else:
        opener.__annotations__ = annotations
    opener.__dict__["__signature__"] = signature.replace(return_annotation=opened)
    return opener
