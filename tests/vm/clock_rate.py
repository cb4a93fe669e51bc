"""How fast the processor's time-stamp counter (TSC) runs, which an emulated guest reads too.

A guest's kernel measures it at boot, against an emulated timer. Where the emulator does not run in
time, it may find a number that is far too low: seen was 986 MHz for 2,596, and a clock that ran 2.6
times too fast, with the time limits of all tests.
"""

import platform
import subprocess
from pathlib import Path

from . import cache

SOURCE = Path(__file__).with_suffix(".c")


def kilohertz() -> str | None:
    """Return the rate, measured once per boot of the host; None: this processor has no TSC."""
    if platform.machine() != "x86_64":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return (cache.once(f"clock-rate/{boot}", measure) / "kilohertz").read_text()


def measure(directory: Path) -> None:
    """Compile and run the program; its answer is the file "kilohertz"."""
    program = directory / "clock-rate"
    subprocess.run(["gcc", "-O2", "-o", program, SOURCE], check=True)
    answer = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
    (directory / "kilohertz").write_text(answer.strip())
