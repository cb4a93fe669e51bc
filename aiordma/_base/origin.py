"""Where in the program something was opened, for warnings about what was never closed."""

import sys
import tracemalloc
import warnings

__all__ = ("origin", "warn_unclosed", "with_origin")

_LOOPS = ("aiordma", "anyio", "asyncio", "trio", "uvloop")


def origin() -> str:
    """Return the file and line of the program's call that led here, "" if the event loop called:
    the call was made a task of its own."""
    frame = sys._getframe(1)
    while True:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LOOPS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if package != "aiordma" or frame.f_back is None:
            return ""
        frame = frame.f_back


def with_origin(what: object, place: str) -> str:
    """Return how a warning names an object that was opened at a place."""
    return f"{what!r}, opened at {place}" if place else repr(what)


def warn_unclosed(text: str, what: object) -> None:
    """Warn that an object was never closed. Whoever records the warning keeps the object only
    where tracemalloc is on, which then says where it was allocated."""
    source = what if tracemalloc.is_tracing() else None
    warnings.warn(text, ResourceWarning, stacklevel=2, source=source)
