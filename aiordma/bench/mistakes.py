"""What is not a fault of this program: a wrong argument, a missing device, a peer that is gone."""

import anyio

from aiordma import RdmaError

__all__ = ("FAILED", "MISUSED", "ServerEndedError", "first_error", "one_line", "status_of")

FAILED = 1
MISUSED = 2
"""Exit statuses of commands."""


class ServerEndedError(RuntimeError):
    """A server in a process of its own ended before it was ready. The text says why.

    Args:
        status: the exit status for the command that started it.
    """

    def __init__(self, reason: str, status: int = FAILED) -> None:
        super().__init__(reason)
        self.status = status


def one_line(error: BaseException) -> str:
    """Return an error's text in one line; its class's name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def status_of(error: BaseException) -> int | None:
    """Return the exit status of a command that ends with an error.

    Returns:
        MISUSED for a value that the user gave and that cannot be right, FAILED for an error of
        RDMA or of the system, None for a fault of this program. A group has the status of its
        first error, if all of its errors have one.
    """
    if isinstance(error, BaseExceptionGroup):
        statuses = [status_of(each) for each in error.exceptions]
        return None if None in statuses else statuses[0]
    if isinstance(error, ServerEndedError):
        return error.status
    if isinstance(error, RdmaError | anyio.BrokenResourceError | OSError):
        return FAILED
    return MISUSED if isinstance(error, ValueError) else None
