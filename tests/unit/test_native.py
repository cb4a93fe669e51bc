"""The C that has no Python in it, by small C programs in tests/native."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# A sanitizer's runtime is preloaded for Python. The compiler is slow with it, and a program that is
# compiled for the sanitizer brings its own.
WITHOUT_RUNTIME = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'aiordma/_native'}")


@pytest.mark.parametrize(
    ("program", "sources"),
    [
        ("crc32c", ("crc32c.c", "crc_tables.c")),
        ("crc32", ("crc32.c", "crc_tables.c")),
        ("mapping", ()),
        ("roce", ("roce.c", "crc32.c", "crc_tables.c", "cm_messages.c")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_program(program: str, sources: tuple[str, ...], tmp_path: Path) -> None:
    binary = tmp_path / program
    paths = [f"tests/native/{program}.c", *(f"aiordma/_native/software/{s}" for s in sources)]
    subprocess.run(["gcc", *FLAGS, *paths, "-o", binary], cwd=ROOT, check=True)
    ran = subprocess.run([binary], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def compile_c(*arguments: str | Path, folder: Path) -> None:
    """Compile for the sanitizer that runs, if any."""
    sanitizer = os.environ.get("AIORDMA_SANITIZER_FLAGS", "").split()
    command = ["gcc", *FLAGS, *sanitizer, *map(str, arguments)]
    subprocess.run(command, cwd=folder, env=WITHOUT_RUNTIME, check=True)


@pytest.fixture(scope="module")
def software_device(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The object files of the whole software device, compiled once."""
    folder = tmp_path_factory.mktemp("software")
    compile_c("-c", *sorted((ROOT / "aiordma/_native/software").glob("*.c")), folder=folder)
    return sorted(folder.glob("*.o"))


def build_with_device(program: str, device: list[Path], folder: Path) -> Path:
    """Compile a program, and link it with the software device."""
    source = ROOT / "tests/native" / f"{program}.c"
    compile_c(source, *device, "-lpthread", "-o", program, folder=folder)
    return folder / program


def test_many_timers_cost_no_more_than_few(software_device: list[Path], tmp_path: Path) -> None:
    binary = build_with_device("timers", software_device, tmp_path)
    ran = subprocess.run([binary], env=WITHOUT_RUNTIME, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_engine_takes_turns_with_threads(software_device: list[Path], tmp_path: Path) -> None:
    binary = build_with_device("turns", software_device, tmp_path)
    ran = subprocess.run([binary], env=WITHOUT_RUNTIME, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


def test_answer_needs_no_search_of_the_queue(software_device: list[Path], tmp_path: Path) -> None:
    binary = build_with_device("answers", software_device, tmp_path)
    ran = subprocess.run([binary], env=WITHOUT_RUNTIME, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
