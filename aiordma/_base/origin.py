"""The line of the program that opened an object, for warnings about objects never closed."""

import itertools
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOOPS = ("anyio", "asyncio", "trio", "uvloop")
_BETWEEN = ("aiordma", "contextlib", *_LOOPS)  # contextlib: the AsyncExitStack of a program
_packages: dict[str, str] = {}
"""By a module's name: its package, if that is one of these, else ""."""

_numbers = itertools.count()
_watches: list[tuple[int, list[str]]] = []


class Place(str):
    """The file and line at which an object was opened, and its number in the order of opening."""

    number: int = 0


def origin() -> Place:
    """Return the file and line of the program's call that led here. "" if the event loop is the
    caller, because the call runs as a task of its own."""
    frame = sys._getframe(1)
    while True:
        module = str(frame.f_globals.get("__name__", ""))
        package = _packages.get(module)
        if package is None:
            package = module.partition(".")[0]
            package = _packages[module] = package if package in _BETWEEN else ""
        if not package:
            place = Place(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            break
        if package in _LOOPS or frame.f_back is None:
            place = Place("")
            break
        frame = frame.f_back
    place.number = next(_numbers)
    return place


def with_origin(what: object, place: str) -> str:
    """Return the text by which a warning names an object that was opened at a place."""
    return f"{what!r}, opened at {place}" if place else repr(what)


@contextmanager
def unclosed_since() -> Iterator[list[str]]:
    """Within the block, add to a list the texts of the warnings of `warn_unclosed` for objects that
    were opened since its begin."""
    watch: tuple[int, list[str]] = next(_numbers), []
    _watches.append(watch)
    try:
        yield watch[1]
    finally:
        _watches[:] = [each for each in _watches if each is not watch]


def warn_unclosed(text: str, what: object, place: Place) -> None:
    """Warn that an object, opened at the place, was never closed. The warning refers to the object
    only while tracemalloc is on, for its allocation traceback; otherwise a recorded warning would
    keep it alive."""
    for since, texts in list(_watches):
        if place.number > since:
            texts.append(text)
    source = what if tracemalloc.is_tracing() else None
    warnings.warn(text, ResourceWarning, stacklevel=2, source=source)
