"""`aiordma exec`: a program in C on the software device."""

import os
import shutil
import stat
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import aiordma
from aiordma._base.provider import check_software_variables
from aiordma.bench.mistakes import one_line
from aiordma.cli.running import fail, reporting

FOLDER = Path(aiordma.__file__).parent / "_native" / "exported"
"""The folder of the software device's libibverbs.so.1 and librdmacm.so.1."""

LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def execute(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The program, then its arguments."),
    ],
) -> None:
    """Run an RDMA program on the software device: unmodified, without RDMA hardware or root.

    The program finds the software device's libibverbs and librdmacm in place of the system's.
    The page "RDMA programs without RDMA" says what works.

    Exit status: the program's; 2: wrong environment variables; 126: the program cannot be
    executed; 127: there is no such program.

    Example: aiordma exec rping -c -a 127.0.0.1 -C 3 -v
    """
    for each in LIBRARIES:
        if not (FOLDER / each).exists():
            fail("exec", f"{FOLDER / each} is missing: install aiordma again")
    with reporting("exec"):
        check_software_variables()
    program = find(command[0])
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{FOLDER}:{before}" if before else str(FOLDER)
    try:
        os.execv(program, command)
    except OSError as error:
        fail("exec", f"{program} cannot be executed: {one_line(error)}", NOT_EXECUTABLE)


def find(name: str) -> str:
    """Return the path of a program.

    Args:
        name: a path, if it contains a slash; else a name that PATH is searched for.

    Raises:
        typer.Exit: there is no such program, or the dynamic loader ignores LD_LIBRARY_PATH for it.
    """
    found = shutil.which(name)
    if found is None:
        _refuse(name)
    if os.stat(found).st_mode & (stat.S_ISUID | stat.S_ISGID):
        reason = "is setuid or setgid, and so the system ignores LD_LIBRARY_PATH"
        fail("exec", f"{found} {reason}: run a copy without that bit", NOT_EXECUTABLE)
    return found


def _refuse(name: str) -> NoReturn:
    if "/" not in name:
        fail("exec", f"no program {name!r} in PATH. Is it installed?", NOT_FOUND)
    if os.path.exists(name):
        fail("exec", f"{name} is not an executable file", NOT_EXECUTABLE)
    fail("exec", f"there is no file {name}", NOT_FOUND)
