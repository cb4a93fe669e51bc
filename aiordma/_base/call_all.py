"""Calls several functions, also if one of them raises (pure)."""

from collections.abc import Callable, Iterable


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call functions in their order, also if one of them raises.

    Raises:
        BaseException: the last one that was raised; its context has those before it.
    """
    last: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            if error.__context__ is None and error is not last:
                error.__context__ = last
            last = error
    try:
        if last is not None:
            raise last
    finally:
        del last  # its traceback holds this frame
