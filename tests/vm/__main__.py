"""The test bed's command line. `make vm CMD='...'` is the usual way in; the Makefile lists more."""

import argparse
import os
import sys
from pathlib import Path

from . import machine, packages, parts, summary
from .report import TestBedError, say

PROJECT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Parse the command line and run one of the subcommands; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.vm", description=__doc__)
    commands = parser.add_subparsers(dest="task", required=True)
    run = commands.add_parser(
        "run",
        help="run a command in the VM",
        epilog="environment: PROVIDER=rxe|siw|none VM_TIMEOUT=seconds VM_VETH=1 VM_SMP=processors"
        " VM_MEM=megabytes VM_KERNEL=apt|release VM_ACCEL=kvm|tcg VM_QEMU='more QEMU arguments'",
    )
    run.add_argument("command", help="for bash, run as root in the project's folder")
    commands.add_parser("build-packages", help="install what compiling the extension needs")
    several = commands.add_parser("parts", help="run targets of the Makefile at the same time")
    several.add_argument("--make", default="make", help="the program")
    several.add_argument("targets", nargs="+")
    table = commands.add_parser("summary", help="print the results as one table")
    table.add_argument("devices", nargs="+", help="the devices whose results must be there")
    options = parser.parse_args()
    try:
        if options.task == "run":
            return machine.run(request(options.command))
        if options.task == "summary":
            return summary.report(PROJECT / "build" / "vm", options.devices)
        if options.task == "parts":
            return parts.run(options.make, options.targets, PROJECT / "build")
        packages.ensure((*packages.BUILD, *packages.python_packages()))
    except TestBedError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def request(command: str) -> machine.Request:
    """The run that the environment describes."""
    limit = os.environ.get("VM_TIMEOUT") or "600"
    try:
        time_limit = float(limit)
    except ValueError:
        raise TestBedError(f"VM_TIMEOUT={limit}: it is a number of seconds") from None
    if not command.strip():
        raise TestBedError("nothing to run: make vm CMD='rdma link; ibv_devinfo'")
    return machine.Request(
        command=command,
        project=PROJECT,
        provider=os.environ.get("PROVIDER") or "rxe",
        veth=os.environ.get("VM_VETH", "0") not in ("", "0"),
        time_limit=time_limit,
    )


if __name__ == "__main__":
    sys.exit(main())
