"""User-mode Linux: a kernel that is a program of this machine, without QEMU and without emulation.

Debian builds none with RDMA. So it is built once from Debian's kernel sources, with the options of
guest/uml.config, and kept in the cache. `make vm BED=uml` and `make bench BED=uml` use it. The
sources are the newest that apt has or that Debian's backports have, else Debian 12's: since 6.16 a
user-mode kernel catches system calls by seccomp, which is much cheaper than ptrace, and since 6.19
it has more than one processor.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from . import cache, kernel, packages
from .kernel import Kernel
from .report import TestBedError, say

CONFIG = Path(__file__).with_name("guest") / "uml.config"

# The kernel's own clock for schedulers and processor time is a weak function that counts ticks
# (10 ms here), and user-mode Linux does not replace it. It has nanoseconds from the host.
CLOCK_FILE = "arch/um/kernel/time.c"
CLOCK = """
unsigned long long notrace sched_clock(void)
{
	return os_nsecs();
}
"""

# Of a kernel's sources, whole folders of which user-mode Linux compiles nothing.
UNUSED = re.compile(
    r"(arch/(?!um/|x86/)|Documentation/|drivers/(gpu|media|staging)/|sound/|tools/testing/)"
)
PROGRESS_SECONDS = 30
ABOUT_FILES = 900  # how many files are compiled, roughly: for the progress
LAST_LINES = 20


@dataclass(frozen=True)
class Source:
    """Sources that apt has: of `series` (7.3), as the package's `version`, and where from."""

    series: str
    version: str
    backports: bool = False

    @property
    def package(self) -> str:
        return f"linux-source-{self.series}"

    @property
    def options(self) -> tuple[str, ...]:
        """What apt has to be told to find it."""
        return packages.backports() if self.backports else ()


def prepare(choice: str) -> Kernel:
    """The kernel to run, built if need be. `choice` is VM_KERNEL: "", "apt" or a series (6.1)."""
    default = cache.root() / "uml" / "default"
    if not choice and default.exists():
        source = Source(**json.loads(default.read_text()))
    else:
        source = find(choice)
    recipe = hashlib.sha256(CONFIG.read_bytes() + CLOCK.encode()).hexdigest()[:16]
    entry = f"uml/{source.series}-{source.version}-{recipe}"
    directory = cache.once(entry, lambda scratch: build(source, scratch))
    if choice in ("", "apt"):
        cache.write_atomically(default, json.dumps(vars(source)))
    found = json.loads((directory / "kernel.json").read_text())
    return Kernel(found["release"], source.version, directory)


def find(choice: str) -> Source:
    """The sources of series `choice`; of the newest that can be had for "" and "apt"."""
    newest = choice in ("", "apt")
    offered = [source for source in offers() if newest or source.series == choice]
    if (newest or not offered) and os.environ.get("VM_BACKPORTS", "1") != "0":
        try:
            options = packages.backports(again=choice == "apt")
            offered += [each for each in offers(*options) if newest or each.series == choice]
        except TestBedError as error:
            say(f"{error}\nonly what apt has without backports is used")
    if not offered:
        wanted = "linux-source" if newest else f"linux-source-{choice}"
        raise TestBedError(
            f"apt has no {wanted} to build a user-mode kernel from: run `apt-get update` as root,"
            " on Debian 12; VM_KERNEL=6.1 takes Debian 12's own. BED=qemu needs no build."
        )
    return max(offered, key=lambda source: tuple(map(int, source.series.split("."))))


def offers(*options: str) -> list[Source]:
    """The sources that apt has; `options` are those of packages.backports(), or none."""
    names = packages.search(r"^linux-source-[0-9]+\.[0-9]+$", *options)
    return [
        Source(name.removeprefix("linux-source-"), version, backports=bool(options))
        for name, version in names.items()
    ]


def build(source: Source, directory: Path) -> None:
    """Leave the kernel in `directory` as vmlinux, with kernel.json and its configuration.

    Raises TestBedError with the compiler's last words if it does not build.
    """
    packages.ensure(packages.USER_MODE)
    say(f"building a user-mode kernel of {source.package} {source.version}, once: 5 to 15 minutes")
    logs = cache.root() / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"uml-{source.series}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="build.", dir=directory) as scratch:
        tree = unpack(source, Path(scratch))
        with (tree / CLOCK_FILE).open("a") as file:
            file.write(CLOCK)
        make(tree, log, f"KCONFIG_ALLCONFIG={CONFIG}", "allnoconfig")
        config = (tree / ".config").read_text()
        check(config, source)
        make(tree, log, f"-j{os.cpu_count() or 1}", "vmlinux")
        release = (tree / "include" / "config" / "kernel.release").read_text().strip()
        shutil.copy(tree / "vmlinux", directory / "vmlinux")
    (directory / "config").write_text(config)
    (directory / "kernel.json").write_text(json.dumps({"release": release}))


def unpack(source: Source, work: Path) -> Path:
    """The sources, below `work`; returns their folder."""
    say(f"fetching and unpacking {source.package} (150 MB)")
    package = f"{source.package}={source.version}"
    deb = packages.download(package, work, *source.options)
    archive = f"usr/src/{source.package}.tar.xz"
    kernel.extract(deb, work, lambda path: path == archive)
    deb.unlink()
    with subprocess.Popen(["xz", "-dc", work / archive], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            kernel.extract_tar(process.stdout, work, is_wanted)
        except (tarfile.TarError, OSError) as error:
            raise TestBedError(f"cannot unpack {archive}: {error}") from error
    (work / archive).unlink()
    return work / source.package


def is_wanted(path: str) -> bool:
    """Whether a file of the sources is worth unpacking. kconfig reads each Kconfig there is."""
    _, _, inside = path.partition("/")
    return not UNUSED.match(inside) or Path(path).name.startswith(("Kconfig", "Makefile"))


def check(config: str, source: Source) -> None:
    """Refuse a configuration in which kconfig has left out what the bed is for."""
    lines = config.splitlines()
    for option in ("HOSTFS", "OVERLAY_FS", "RDMA_RXE", "RDMA_SIW", "INFINIBAND_ADDR_TRANS"):
        if f"CONFIG_{option}=y" not in lines:
            raise TestBedError(
                f"{source.package} cannot have CONFIG_{option} as a user-mode kernel:"
                " take another series by VM_KERNEL="
            )


def make(tree: Path, log: Path, *words: str) -> None:
    """Run make for user-mode Linux below `tree`, at low priority, and print how far it is."""
    command = ["nice", "-n", "10", "make", "ARCH=um", *words]
    begun = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=tree, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        while True:
            try:
                status = process.wait(PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                compiled = len(re.findall(r"^  CC ", log.read_text(errors="replace"), re.MULTILINE))
                minutes = (time.monotonic() - begun) / 60
                say(f"{minutes:.1f} minutes, {compiled} of about {ABOUT_FILES} files; log: {log}")
    except BaseException:
        process.terminate()  # make ends what it has started
        process.wait()
        raise
    if status:
        raise TestBedError(explain(log.read_text(errors="replace"), status, log))


def explain(output: str, status: int, log: Path) -> str:
    """What to say of a build that failed: what is missing, where the output has it."""
    lines = output.splitlines()
    missing = dict.fromkeys(
        match[0]
        for line in lines
        if (match := re.search(r"\S+: (?:command not found|not found)$", line))
        or (match := re.search(r"\S+: No such file or directory$", line))
    )
    parts = [f"the user-mode kernel does not build (make ended with status {status})"]
    if missing:
        parts.append("missing: " + "; ".join(missing))
    parts.append(f"whole output: {log}; its end:")
    return "\n    ".join([*parts, *lines[-LAST_LINES:]])


def has_processors(built: Kernel) -> bool:
    """Whether the kernel can have more than one processor; it then has seccomp, too."""
    return "CONFIG_SMP=y" in (built.directory / "config").read_text().splitlines()


def frequency(cpuinfo: str) -> str:
    """The line of /proc/cpuinfo that a user-mode kernel's lacks, and that perftest needs."""
    found = re.search(r"^cpu MHz.*\n", cpuinfo, re.MULTILINE)
    return found[0] if found else ""


def describe(built: Kernel, processors: str) -> str:
    """The bed, in words for a table."""
    if not has_processors(built) or processors == "1":
        return f"user-mode Linux {built.release}, 1 processor"
    return f"user-mode Linux {built.release}, seccomp, {processors} processors"


@dataclass(frozen=True)
class Guest:
    """One user-mode kernel. `output` is an inherited descriptor for what the command prints."""

    built: Kernel
    initramfs: Path
    control: Path
    output: int
    processors: str = "2"
    memory: str = "2048"

    def command_line(self) -> list[str]:
        """Its arguments. The console goes to standard output."""
        arguments = ["setpriv", "--pdeathsig", "KILL", str(self.built.image)]
        arguments += [f"mem={self.memory}M", f"initrd={self.initramfs}"]
        arguments += ["con=null", "ssl=null", "con0=null,fd:1", f"con1=null,fd:{self.output}"]
        # An older kernel does not know seccomp=, and passes it on to the first process.
        arguments += ["seccomp=on"]
        if has_processors(self.built):
            arguments += [f"ncpus={self.processors}"]
        # io_uring: seen with 7.3 to end in "Bad page map".
        arguments += ["sysctl.kernel.io_uring_disabled=2", "dummy.numdummies=0"]
        arguments += ["quiet", "panic=-1", "oops=panic"]
        # uml_dir: else it leaves a folder in the home directory when it is killed.
        arguments += [f"uml_dir={self.control}", f"bed_folder={self.control}"]
        return arguments + shlex.split(os.environ.get("VM_UML", ""))

    def environment(self) -> dict[str, str]:
        """Its environment. The guest's memory is a file: in /dev/shm if that is large enough."""
        shared = Path("/dev/shm")
        room = shutil.disk_usage(shared).free >> 20 if shared.is_dir() else 0
        folder = str(shared) if room > int(self.memory) else tempfile.gettempdir()
        return {**os.environ, "TMPDIR": folder}
