"""Reports what is not a fault of this program in one line: a wrong address, a missing device."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from aiordma import RdmaError

__all__ = ("ServerEndedError", "first_error", "reporting")


class ServerEndedError(RuntimeError):
    """A server in a process of its own ended before it was ready. It has said why."""


@contextmanager
def reporting() -> Iterator[None]:
    """Print an error of RDMA or of the system in the block, and exit with status 1.

    Raises:
        SystemExit: after such an error, also in an exception group that has no other errors.
    """
    try:
        yield
    except (RdmaError, OSError, ServerEndedError) as error:
        _exit(error)
    except BaseExceptionGroup as group:
        matching, others = group.split((RdmaError, OSError))
        if matching is None or others is not None:
            raise
        _exit(first_error(matching))


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _exit(error: BaseException) -> None:
    print(f"aiordma bench: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    raise SystemExit(1) from None
