"""One run of one guest: the control folder, the output as it comes, the time limit, the status."""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from . import initramfs, kernel, packages, qemu, siw, uml
from .report import TestBedError, say

PROVIDERS = ("rxe", "siw", "none")
BEDS = ("qemu", "uml")
TIMED_OUT = 124
DIED = 125
BOOT_SECONDS = 180  # normally 5; emulated, beside other guests, on a busy machine
GRACE_SECONDS = 30  # how long past its limit a guest may take to end the command itself
FRESH_IN_GUEST = ("/tmp", "/run", "/dev/shm")  # where guest/init.sh mounts an empty tmpfs
INHERITED = re.compile(
    r"(AIORDMA|COVERAGE|HYPOTHESIS|PYTEST)_|PYTHON(ASYNCIODEBUG|DEVMODE|FAULTHANDLER|MALLOC"
    r"|TRACEMALLOC|WARNINGS)$|(HOME|TERM)$"
)


@dataclass(frozen=True)
class Request:
    """What to run, and where."""

    command: str
    project: Path
    provider: str = "rxe"
    veth: bool = False
    time_limit: float = 600
    bed: str = "qemu"

    @property
    def results(self) -> Path:
        """The folder that the guest may write and the host keeps."""
        return self.project / "build" / "vm"


@dataclass(frozen=True)
class Bed:
    """What is ready to start: a kernel, and how.

    `start` is called with the control folder and the descriptor that receives the output. Without
    `modules`, all is built into the kernel. `description` is for tables.
    """

    name: str
    description: str
    start: Callable[[Path, int], subprocess.Popen[bytes]]
    modules: Path | None = None
    siw_module: Path | None = None


def run(request: Request) -> int:
    """Boot, run, power off; what the command prints goes to standard output as it comes.

    Returns the command's exit status (128 + n for signal n), 124 after the time limit, 125 if the
    guest died or its device did not come up. Raises TestBedError where nothing can be booted.
    """
    signal.signal(signal.SIGTERM, interrupt)
    bed = prepare(request)
    request.results.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    with qemu.scratch_folder() as folder:
        control = Path(folder)
        fill(control, request, bed)
        process = bed.start(control, writer)
        os.close(writer)
        try:
            in_time = relay(reader, control, request.time_limit)
        finally:
            stop(process)
            os.close(reader)
        return judge(control, request, in_time)


def prepare(request: Request) -> Bed:
    """Fetch or build what the request's guest is started from. Raises TestBedError."""
    if request.provider not in PROVIDERS:
        raise TestBedError(f"PROVIDER={request.provider}: it is one of {', '.join(PROVIDERS)}")
    if request.bed not in BEDS:
        raise TestBedError(f"BED={request.bed}: it is one of {', '.join(BEDS)}")
    return in_qemu(request) if request.bed == "qemu" else in_user_mode(request)


def processors_of(request: Request) -> str:
    """How many processors the guest gets.

    One for siw, which has two faults that take a second one. Its threads read a short message
    from the program's memory as if they were the program. And while it accepts a connection, it
    does not hear what the peer sends. docs/devices.md has both.
    """
    return os.environ.get("VM_SMP", "1" if request.provider == "siw" else "2")


def in_qemu(request: Request) -> Bed:
    """Debian's stock kernel, in QEMU."""
    packages.ensure(packages.VM + (packages.WIRE if request.provider == "siw" else ()))
    chosen = kernel.prepare(os.environ.get("VM_KERNEL", ""))
    module = siw.prepare(chosen) if request.provider == "siw" else None
    first = initramfs.prepare(chosen)
    accelerator = qemu.accelerator(chosen.image, first)
    processors = processors_of(request)

    def start(control: Path, output: int) -> subprocess.Popen[bytes]:
        guest = qemu.Guest(
            chosen.image,
            first,
            control,
            processors=processors,
            memory=os.environ.get("VM_MEM", "2048"),
            results=request.results,
            output=output,
            extra=shlex.split(os.environ.get("VM_QEMU", "")),
        )
        command = guest.command_line(accelerator)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[output])

    description = qemu.describe(accelerator, chosen.release, processors)
    return Bed("qemu", description, start, chosen.modules, module)


def in_user_mode(request: Request) -> Bed:
    """A user-mode kernel, built from Debian's sources."""
    packages.ensure(packages.IN_GUEST + (packages.WIRE if request.provider == "siw" else ()))
    chosen = uml.prepare(os.environ.get("VM_KERNEL", ""))
    first = initramfs.prepare(chosen, modules=())
    processors = processors_of(request)

    def start(control: Path, output: int) -> subprocess.Popen[bytes]:
        memory = os.environ.get("VM_MEM", "2048")
        guest = uml.Guest(chosen, first, control, output, processors, memory)
        (control / "frequency").write_text(uml.frequency(Path("/proc/cpuinfo").read_text()))
        with (control / "console").open("wb") as console:
            return subprocess.Popen(
                guest.command_line(),
                env=guest.environment(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                pass_fds=[output],
            )

    return Bed("uml", uml.describe(chosen, processors), start)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Let SIGTERM unwind like Ctrl-C, so that the guest is stopped and the folder removed."""
    raise KeyboardInterrupt


def fill(control: Path, request: Request, bed: Bed) -> None:
    """Write what the guest reads: see guest/init.sh and guest/start.sh."""
    guest = Path(__file__).resolve().with_name("guest")
    path = (
        f"{request.project}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    settings = {
        "bed": bed.name,
        "guest": guest,
        "modules": bed.modules or "",
        "path": path,
        "project": request.project,
        "provider": request.provider,
        "siw_module": bed.siw_module or "",
        "time_limit": f"{request.time_limit:g}",
        "veth": int(request.veth),
    }
    environment = {name: value for name, value in os.environ.items() if INHERITED.match(name)}
    environment |= {
        "AIORDMA_RESULTS": str(request.results),
        "AIORDMA_VM": bed.description,
        "LANG": "C.UTF-8",
        "PATH": path,
        "PYTHONUNBUFFERED": "1",  # output is a pipe in there; it should still come as it is made
        "VIRTUAL_ENV": f"{request.project}/.venv",
    }
    visible = [request.project, guest, Path(sys.base_prefix)]
    visible += [bed.modules] if bed.modules else []
    visible += [bed.siw_module.parent] if bed.siw_module else []
    keep = [path for path in map(str, visible) if path.startswith(FRESH_IN_GUEST)]
    (control / "start").write_text(f". {shlex.quote(str(guest / 'start.sh'))}\n")
    (control / "settings").write_text(assignments(settings))
    (control / "environment").write_text(assignments(environment, "export "))
    (control / "keep").write_text("".join(path + "\n" for path in keep))
    (control / "results").write_text(f"{request.results}\n")
    (control / "command").write_text(request.command + "\n")


def assignments(values: dict[str, object] | dict[str, str], prefix: str = "") -> str:
    """Shell assignments, one a line."""
    return "".join(f"{prefix}{key}={shlex.quote(str(value))}\n" for key, value in values.items())


def relay(reader: int, control: Path, time_limit: float) -> bool:
    """Copy the guest's output until it ends. False if the guest overran its time and must be shot.

    The limit counts from the command's start; the guest keeps it, this is for when it cannot.
    """
    deadline = time.monotonic() + BOOT_SECONDS
    started = False
    while True:
        if not started and (control / "started").exists():
            started = True
            deadline = time.monotonic() + time_limit + GRACE_SECONDS
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if select.select([reader], [], [], min(left, 1))[0]:
            data = os.read(reader, 1 << 16)
            if not data:
                return True
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Wait for the guest to end; it has closed the output and is about to, or is killed."""
    try:
        process.wait(0 if sys.exc_info()[0] else 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def judge(control: Path, request: Request, in_time: bool) -> int:
    """Turn what the guest left in the control folder into an exit status; explain the bad ones."""
    console = read(control / "console").splitlines()
    status = read(control / "status").strip()
    if (control / "timed-out").exists() or (not in_time and (control / "started").exists()):
        say(
            f"the command was still running after {request.time_limit:g} s and was ended"
            " (VM_TIMEOUT= sets the limit, in seconds)"
        )
        if not status:
            show(console, "it could not be ended: the guest hung. The kernel's last words:")
        return TIMED_OUT
    if status:
        for line in console:
            if re.search(r"\b(BUG|WARNING|Oops):", line):
                say(f"the guest's kernel complained: {line.strip()}")
        return int(status)
    show(console, "the guest died, or hung while booting. The kernel's last words:")
    return DIED


def read(path: Path) -> str:
    """The file's text; none if it is missing: QEMU may fail before it makes a console."""
    return path.read_text(errors="replace") if path.exists() else ""


def show(console: list[str], title: str) -> None:
    """Print the tail of the kernel's console."""
    say(title)
    for line in console[-40:]:
        print(f"    {line}", file=sys.stderr)
