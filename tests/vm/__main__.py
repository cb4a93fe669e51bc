"""The test bed's command line. `make vm CMD='...'` is the usual way in."""

import argparse
import os
import sys
from pathlib import Path

from . import machine
from .report import TestBedError, status_of

PROJECT = Path(__file__).resolve().parents[2]

SETTINGS = """settings, by environment:
  PROVIDER=rxe|siw|none   the RDMA device; rxe unless set
  BED=qemu|uml            Debian's stock kernel in QEMU (the default), or a user-mode kernel
  VM_TIMEOUT=seconds      after which the command is ended; 600
  VM_VETH=1               two more devices, joined by a veth pair
  VM_SMP=processors       2; siw: 1, because it has faults with more (docs/devices.md). `make test`
                          on fewer than four processors: 1 (a second would spin while it waits)
  VM_MEM=megabytes        2048
  VM_KERNEL=              kept from the first use; "apt" asks apt again. A release of Debian's
                          kernel for QEMU (6.1.0-50-amd64), a series for BED=uml (6.1)
  VM_ACCEL=kvm|tcg        QEMU: KVM if it works here, else emulation
  VM_QEMU=, VM_UML=       more arguments for QEMU, or for the user-mode kernel

BED=uml builds its kernel at the first use, from Debian's sources: 5 to 15 minutes on two idle
processors. The sources are the newest of apt's and of Debian's backports; from 7.x on they give a
kernel that catches system calls by seccomp and has several processors. VM_KERNEL=6.1 takes Debian
12's own: its kernel has one processor, and catches system calls by ptrace, which makes them slow.
VM_BACKPORTS=0 does not ask for backports. What is built is kept in ~/.cache/aiordma."""


def main() -> int:
    """Parse the command line and run one of the subcommands; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.vm", description=__doc__)
    commands = parser.add_subparsers(dest="task", required=True)
    run = commands.add_parser(
        "run",
        help="run a command in the VM",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=SETTINGS,
    )
    run.add_argument("command", help="for bash, run as root in the project's folder")
    commands.add_parser(
        "prepare", help="fetch or build what `run` boots (BED, PROVIDER, VM_KERNEL)"
    )
    options = parser.parse_args()
    if options.task == "prepare":
        machine.prepare(request("true"))
        return 0
    return machine.run(request(options.command))


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
        bed=os.environ.get("BED") or "qemu",
    )


if __name__ == "__main__":
    sys.exit(status_of(main))
