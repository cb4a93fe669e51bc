"""Runs a command: a user's mistake is one line on standard error and an exit status."""

import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import anyio
import typer

import aiordma

__all__ = ("fail", "one_line", "run_command")

Result = TypeVar("Result")

FAILED = 1
MISUSED = 2
INTERRUPTED = 130


def one_line(error: BaseException) -> str:
    """Return an error's text in one line; its class's name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


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


def run_command(command: str, function: Callable[[], Awaitable[Result]]) -> Result:
    """Run an async function to its end, on asyncio.

    Args:
        command: the command's name, for the message.
        function: the command; it has no arguments.

    Returns:
        what the function returned.

    Raises:
        typer.Exit: with status 1 after an error of RDMA or of the system, with 2 after a ValueError
            or TypeError, and with 130 after an interrupt. The reason is on standard error.
    """

    async def main() -> Result:
        return await function()

    try:
        return aiordma.run(main())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (aiordma.RdmaError, anyio.BrokenResourceError, OSError) as error:
        fail(command, one_line(error))
    except (ValueError, TypeError) as error:
        fail(command, one_line(error), MISUSED)
