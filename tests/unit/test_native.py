"""The C that has no Python in it, by small C programs in tests/native."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Iaiordma/_native")


@pytest.mark.parametrize(
    ("program", "sources"),
    [("crc32c", ("crc32c.c",)), ("roce", ("roce.c", "sidr.c"))],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_program(program: str, sources: tuple[str, ...], tmp_path: Path) -> None:
    binary = tmp_path / program
    paths = [f"tests/native/{program}.c", *(f"aiordma/_native/software/{s}" for s in sources)]
    subprocess.run(["gcc", *FLAGS, *paths, "-o", binary], cwd=ROOT, check=True)
    ran = subprocess.run([binary], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def test_echo(tmp_path: Path) -> None:
    """The program that measures the device, for a moment: each way of waiting ends."""
    binary = tmp_path / "echo"
    software = sorted((ROOT / "aiordma/_native/software").glob("*.c"))
    command = ["gcc", *FLAGS, "tests/native/echo.c", *software, "-lpthread", "-o", binary]
    subprocess.run(command, cwd=ROOT, check=True)
    ran = subprocess.run([binary, "64", "100", "1"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [line.split()[0] for line in ran.stdout.splitlines()] == ["sleep", "spin", "tcp"]
