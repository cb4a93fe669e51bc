"""Runs a command: a user's mistake is one line on standard error and an exit status."""

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import typer

import aiordma
from aiordma.bench.mistakes import FAILED, first_error, one_line, status_of

Result = TypeVar("Result")

INTERRUPTED = 130


def fail(command: str, reason: str, status: int = FAILED) -> NoReturn:
    """Print why a command failed, and exit.

    Args:
        command: the command's name.
        reason: what failed, why, and what to do.
        status: the exit status: 1, or 2 for wrong arguments.

    Raises:
        typer.Exit: always.
    """
    print(f"aiordma {command}: {reason}", file=sys.stderr, flush=True)
    raise typer.Exit(status) from None


@contextmanager
def reporting(command: str) -> Iterator[None]:
    """End the command after an error in the block that is not a fault of the program.

    Args:
        command: the command's name, for the message.

    Raises:
        typer.Exit: with status 1 after an error of RDMA or of the system, with 2 after a
            ValueError, and with 130 after an interrupt. The reason is on standard error; of a
            group of such errors it is the first one's.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        status = status_of(error)
        if status is None:
            raise
        fail(command, one_line(first_error(error)), status)


def run_command(command: str, function: Callable[[], Awaitable[Result]]) -> Result:
    """Run an async function to its end, on asyncio.

    Args:
        command: the command's name, for the message.
        function: the command; it has no arguments.

    Returns:
        what the function returned.

    Raises: as `reporting`.
    """

    async def main() -> Result:
        return await function()

    with reporting(command):
        return aiordma.run(main())
