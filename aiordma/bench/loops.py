"""Creates the benchmark's event loop; no other module of the benchmark does."""

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

import anyio

from aiordma import new_event_loop

__all__ = ("LOOPS", "SPIN", "check_loop", "run")

LOOPS = ("auto", "asyncio", "uvloop", "trio")
"""auto: the event loop of `aiordma.new_event_loop`."""

SPIN = 50e-6
"""Default number of seconds for which `new_event_loop` polls before it sleeps."""

Result = TypeVar("Result")


def check_loop(loop: str) -> None:
    """Check that there is such an event loop.

    Raises:
        ValueError: `loop` is not in LOOPS, or is not installed.
    """
    if loop not in LOOPS:
        raise ValueError(f"loop={loop!r} is none of {', '.join(LOOPS)}")
    if loop in ("uvloop", "trio") and find_spec(loop) is None:
        raise ValueError(f"loop={loop!r}: {loop} is not installed: pip install 'aiordma[{loop}]'")


def run(main: Callable[[], Awaitable[Result]], *, loop: str = "auto", spin: float = SPIN) -> Result:
    """Run an async function on an event loop of its own.

    Args:
        main: the function.
        loop: one of LOOPS.
        spin: with "auto": the number of seconds, at most, for which the loop polls for completions
            before it sleeps; 0: it does not poll.

    Raises:
        ValueError: as `check_loop`.
    """
    check_loop(loop)
    if loop == "trio":
        return anyio.run(main, backend="trio")
    options: dict[str, Any] = {"use_uvloop": loop == "uvloop"}
    if loop == "auto":
        options["loop_factory"] = partial(new_event_loop, spin=spin)
    return anyio.run(main, backend_options=options)
