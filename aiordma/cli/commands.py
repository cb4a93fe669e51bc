"""The commands of `aiordma`."""

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from aiordma import RdmaError
from aiordma.bench.mistakes import one_line
from aiordma.cli.bench import bench
from aiordma.cli.cp import cp
from aiordma.cli.doctor import doctor
from aiordma.cli.exec import execute
from aiordma.cli.info import info
from aiordma.cli.ping import ping


def main() -> None:
    """Run the command `aiordma`."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (doctor, info, ping, cp):
        app.command()(command)
    # What follows the program's name is the program's.
    as_it_is = {"allow_interspersed_args": False}
    app.command("exec", context_settings=as_it_is)(execute)
    app.add_typer(bench, name="bench")
    try:
        try:
            app(prog_name="aiordma")
        finally:
            if sys.stdout is not None:  # it is None if it was closed before the start
                sys.stdout.flush()
    except OSError as error:
        if isinstance(error, RdmaError):
            raise
        print(f"aiordma: {one_line(error)}", file=sys.stderr)
        if sys.stdout is not None:
            # The interpreter flushes once more at its end, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aiordma {version('aiordma')}")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """RDMA for asyncio and trio.

    Start with `aiordma doctor`: it says whether RDMA works here, and what to do if it does not.
    Everything also works without RDMA, on the built-in software device.

    Exit status: 0: done; 1: failed, with the reason on standard error (doctor: RDMA does not work
    here, with the reason in its findings); 2: wrong arguments or environment variables, or missing
    packages; 130: interrupted.
    """
