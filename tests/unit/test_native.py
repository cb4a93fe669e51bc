"""The C that has no Python in it, by small C programs in tests/native."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A sanitizer's runtime is preloaded for Python. The compiler is slow with it, and a program that is
# compiled for the sanitizer brings its own.
WITHOUT_RUNTIME = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Iaiordma/_native")


@pytest.mark.parametrize(
    ("program", "sources"),
    [("crc32c", ("crc32c.c",)), ("mapping", ()), ("roce", ("roce.c", "sidr.c"))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_program(program: str, sources: tuple[str, ...], tmp_path: Path) -> None:
    binary = tmp_path / program
    paths = [f"tests/native/{program}.c", *(f"aiordma/_native/software/{s}" for s in sources)]
    subprocess.run(["gcc", *FLAGS, *paths, "-o", binary], cwd=ROOT, check=True)
    ran = subprocess.run([binary], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def build_with_device(program: str, folder: Path) -> Path:
    """Compile a program with the whole software device, for the sanitizer that runs, if any."""
    binary = folder / program
    software = sorted((ROOT / "aiordma/_native/software").glob("*.c"))
    flags = [*FLAGS, *os.environ.get("AIORDMA_SANITIZER_FLAGS", "").split()]
    source = f"tests/native/{program}.c"
    command = [*flags, source, *map(str, software), "-lpthread", "-o", str(binary)]
    subprocess.run(["gcc", *command], cwd=ROOT, env=WITHOUT_RUNTIME, check=True)
    return binary


def test_many_timers_cost_no_more_than_few(tmp_path: Path) -> None:
    binary = build_with_device("timers", tmp_path)
    ran = subprocess.run([binary], env=WITHOUT_RUNTIME, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_engine_takes_turns_with_threads(tmp_path: Path) -> None:
    binary = build_with_device("turns", tmp_path)
    ran = subprocess.run([binary], env=WITHOUT_RUNTIME, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_echo(tmp_path: Path) -> None:
    """The program that measures the device, for a moment: each way of waiting ends."""
    binary = build_with_device("echo", tmp_path)
    ran = subprocess.run([binary, "64", "100", "1"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["sleep", "spin", "tcp"]
