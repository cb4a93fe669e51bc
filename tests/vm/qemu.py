"""QEMU: whether KVM works here, and the command line of one guest."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from . import cache, clock_rate
from .report import say

PROGRAM = "qemu-system-x86_64"
KVM = ("-accel", "kvm", "-cpu", "host")
# Without fast string instructions: TCG emulates `rep movsb` byte by byte, and both the kernel and
# the C library copy with it where the processor says that it is fast. Without what the kernel uses
# where it is there, and what costs an emulator more than a processor: checks of each access to a
# program's memory (smap, smep, pku), a fifth level of page tables (la57), and wide vectors (avx),
# which are calls in QEMU where SSE's are instructions.
EMULATION = (
    *("-accel", "tcg,thread=multi"),
    *("-cpu", "max,-erms,-fsrm,-smap,-smep,-pku,-umip,-la57,-avx,-avx2"),
)
# With one processor, no other one can see half of an atomic instruction: QEMU then translates them
# as plain ones.
EMULATION_OF_ONE = ("-accel", "tcg,thread=single", *EMULATION[2:])
# The kernel distrusts the emulated TSC unasked, though QEMU derives it from one clock for all
# processors, and falls back to the HPET: every look at the clock is then a trap into QEMU.
# clearcpuid=112 takes rep_good away, for which the kernel copies with `rep movsq`: reading 4 MiB of
# a file in memory took 2.0 ms with it, and takes 1.5.
EMULATION_PARAMETERS = "clocksource=tsc tsc=reliable clearcpuid=112"
PROBE_SECONDS = 20

# panic=-1 with -no-reboot: a guest that panics ends QEMU instead of hanging.
KERNEL_PARAMETERS = (
    "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr no_timer_check"
    " random.trust_cpu=on"
)


@dataclass(frozen=True)
class Guest:
    """What one guest is made of. `control` receives the console in its file "console"."""

    image: Path
    initramfs: Path
    control: Path
    processors: str = "2"
    memory: str = "2048"
    results: Path | None = None
    output: int | None = None  # a file descriptor, inherited, that gets what the command prints
    extra: list[str] = field(default_factory=list)

    def command_line(self, accelerator: tuple[str, ...]) -> list[str]:
        """QEMU's arguments. It dies with this process, however that ends (setpriv)."""
        is_emulated = accelerator == EMULATION
        if is_emulated and self.processors == "1":
            accelerator = EMULATION_OF_ONE
        arguments = ["setpriv", "--pdeathsig", "KILL", PROGRAM, *accelerator]
        arguments += ["-nodefaults", "-display", "none", "-no-reboot"]
        # A second one that is never there still gives rxe a second completion vector.
        arguments += ["-smp", f"{self.processors},maxcpus={max(2, int(self.processors))}"]
        arguments += ["-m", self.memory]
        arguments += ["-kernel", str(self.image), "-initrd", str(self.initramfs)]
        parameters = [KERNEL_PARAMETERS]
        if is_emulated:
            parameters.append(EMULATION_PARAMETERS)
            if (rate := clock_rate.kilohertz()) is not None:
                parameters.append(f"tsc_early_khz={rate}")
        arguments += ["-append", " ".join(parameters)]
        arguments += ["-serial", f"file:{self.control / 'console'}"]
        arguments += share(self.control, "control")
        if self.results is not None:
            arguments += share(Path("/"), "host", ",readonly=on")
            arguments += share(self.results, "results")
        if self.output is not None:
            # Not "-chardev stdio": the end of standard input closes that, and the guest's writes
            # then block.
            arguments += ["-device", "virtio-serial-pci"]
            arguments += ["-chardev", f"file,id=output,append=on,path=/dev/fd/{self.output}"]
            arguments += ["-device", "virtserialport,chardev=output,name=output"]
        return arguments + self.extra


def share(directory: Path, tag: str, options: str = "") -> list[str]:
    """A folder of the host that the guest mounts over 9p by its tag."""
    if "," in str(directory):
        directory = Path(str(directory).replace(",", ",,"))  # QEMU's way to quote
    local = f"local,id={tag},path={directory},security_model=none,multidevs=remap{options}"
    return ["-fsdev", local, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def accelerator(image: Path, initramfs: Path) -> tuple[str, ...]:
    """KVM where it runs this kernel, else emulation. VM_ACCEL=kvm or tcg decides instead.

    /dev/kvm alone proves nothing: on a PVM host it exists and cannot run a stock kernel. So the
    processor's flag is asked first and then a guest is booted, once per boot of the host.
    """
    asked = os.environ.get("VM_ACCEL", "")
    if asked:
        return KVM if asked == "kvm" else EMULATION
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return EMULATION
    if not re.search(r"^flags\s*:.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
        return EMULATION
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    answer = cache.once(
        f"kvm/{boot}-{image.parent.name}", lambda scratch: probe(Guest(image, initramfs, scratch))
    )
    return KVM if (answer / "status").exists() else EMULATION


def describe(accelerator: tuple[str, ...], release: str, processors: str) -> str:
    """The bed, in words for a table."""
    how = "KVM" if accelerator == KVM else "emulated (TCG)"
    count = "1 processor" if processors == "1" else f"{processors} processors"
    return f"QEMU, {how}, Linux {release}, {count}"


def probe(guest: Guest) -> None:
    """Boot the initramfs under KVM; the guest writes the file "status" if it gets that far."""
    (guest.control / "probe").touch()
    try:
        subprocess.run(
            guest.command_line(KVM),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        say("KVM is there but boots no kernel: emulating")


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A control folder for one guest, gone afterwards."""
    return tempfile.TemporaryDirectory(prefix="aiordma-vm.", ignore_cleanup_errors=True)
