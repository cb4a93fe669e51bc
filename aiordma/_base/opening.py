"""Opening: what `connect`, `listen` and their kin return, to be awaited or entered (pure)."""

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import GenericAlias, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from aiordma._native import Steps

__all__ = ("Opening", "opens")

Opened = TypeVar("Opened", bound=AbstractAsyncContextManager[Any])
Parameters = ParamSpec("Parameters")


class Opening(Coroutine[Any, Any, Opened]):
    """An object that is about to be opened. Use it once, in one of two ways:

        async with aiordma.connect("192.0.2.1", 7471) as connection: ...
        connection = await aiordma.connect("192.0.2.1", 7471)

    The block closes what was opened. Until it is awaited or entered, nothing happens; if it never
    is, Python warns as for any coroutine. It is a coroutine: task groups, `asyncio.create_task`,
    `asyncio.wait_for` and their kin take it.

    Cancellation: while it opens, as of the function that returned it. The block closes what was
    opened, also when it is cancelled.
    """

    __slots__ = ("__weakref__", "_coroutine", "_opened", "_steps")

    def __init__(self, coroutine: Coroutine[Any, Any, Opened]) -> None:
        self._coroutine = coroutine
        self._steps = Steps(coroutine)
        self._opened: Opened

    def __repr__(self) -> str:
        return f"<Opening {self._coroutine!r}>"

    def __await__(self) -> Generator[Any, Any, Opened]:
        return cast("Generator[Any, Any, Opened]", self._steps)

    async def __aenter__(self) -> Opened:
        self._opened = await self._steps
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
        """Run to the next wait, as event loops do with coroutines.

        Args:
            value: None, or what the wait returns.

        Raises:
            StopIteration: it has been opened; `value` is the object.
            Exception: what the opening raised.
        """
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception where it waits, as event loops do with coroutines.

        Args:
            error: as of `coroutine.throw`.

        Raises: as `Opening.send`.
        """
        return self._steps.throw(*error)

    def close(self) -> None:
        """Give up an opening that was never awaited, without a warning.

        Raises: nothing.
        """
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        # Its name, frame and state, which event loops and debuggers look at.
        return getattr(self._coroutine, name)


def opens(
    function: Callable[Parameters, Coroutine[Any, Any, Opened]],
) -> Callable[Parameters, Opening[Opened]]:
    """Decorate a coroutine function that opens something, so that it returns an Opening."""

    @functools.wraps(function)
    def opener(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Opening[Opened]:
        return Opening(function(*arguments, **keywords))

    signature = inspect.signature(function)
    opened = GenericAlias(Opening, (signature.return_annotation,))
    opener.__annotations__ = {**function.__annotations__, "return": opened}
    opener.__dict__["__signature__"] = signature.replace(return_annotation=opened)
    return opener
