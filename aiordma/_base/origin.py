"""The line of the program that opened an object, for warnings about objects never closed."""

import sys
import tracemalloc
import warnings

__all__ = ("origin", "warn_unclosed", "with_origin")

_BETWEEN = ("aiordma", "contextlib")  # contextlib: the AsyncExitStack of a program
_LOOPS = ("anyio", "asyncio", "trio", "uvloop")


def origin() -> str:
    """Return the file and line of the program's call that led here. "" if the event loop is the
    caller, because the call runs as a task of its own."""
    frame = sys._getframe(1)
    while True:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN + _LOOPS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if package in _LOOPS or frame.f_back is None:
            return ""
        frame = frame.f_back


def with_origin(what: object, place: str) -> str:
    """Return the text by which a warning names an object that was opened at a place."""
    return f"{what!r}, opened at {place}" if place else repr(what)


def warn_unclosed(text: str, what: object) -> None:
    """Warn that an object was never closed. The warning refers to the object only while tracemalloc
    is on, for its allocation traceback; otherwise a recorded warning would keep it alive."""
    source = what if tracemalloc.is_tracing() else None
    warnings.warn(text, ResourceWarning, stacklevel=2, source=source)
