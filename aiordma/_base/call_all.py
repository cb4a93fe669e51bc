"""Calls several functions, also if one of them raises (pure)."""

from collections.abc import Callable, Iterable


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call functions in their order, also if one of them raises.

    Raises:
        BaseException: the last one that was raised; its context has those before it.
    """
    rest = iter(steps)
    for step in rest:
        try:
            step()
        except BaseException:
            call_all(rest)
            raise
