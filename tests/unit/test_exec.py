"""`aiordma exec`: the program's environment, its exit status, and what cannot be executed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma.cli.exec import FOLDER

pytestmark = pytest.mark.slow


def execute(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiordma", "exec", *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_program_finds_our_libraries_first() -> None:
    program = (sys.executable, "-c", "import os; print(os.environ['LD_LIBRARY_PATH'])")
    shown = execute(*program, LD_LIBRARY_PATH="/before")
    assert (shown.returncode, shown.stdout) == (0, f"{FOLDER}:/before\n")
    shown = execute(*program, LD_LIBRARY_PATH="")
    assert shown.stdout == f"{FOLDER}\n"


def test_exit_status_and_arguments_are_the_programs() -> None:
    program = (sys.executable, "-c", "import sys; print(*sys.argv[1:]); sys.exit(7)")
    done = execute(*program, "-h", "--help", "--", "-x")
    assert (done.returncode, done.stdout, done.stderr) == (7, "-h --help -- -x\n", "")


def test_missing_program_is_named() -> None:
    done = execute("no-such-program")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == ("aiordma exec: no program 'no-such-program' in PATH. Is it installed?\n")
    done = execute("./no-such-program")
    assert (done.returncode, done.stderr) == (
        127,
        "aiordma exec: there is no file ./no-such-program\n",
    )


def test_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no program\n")
    done = execute(text)
    assert (done.returncode, done.stderr) == (
        126,
        f"aiordma exec: {text} is not an executable file\n",
    )
    text.chmod(0o755)
    done = execute(text)
    assert done.returncode == 126
    assert done.stderr.startswith(f"aiordma exec: {text} cannot be executed: ")
    text.chmod(0o4755)
    done = execute(text)
    assert done.returncode == 126
    assert "is setuid or setgid" in done.stderr


def test_without_a_program_the_usage_is_shown() -> None:
    assert execute().returncode == 2
    assert execute("--no-such-option", "true").returncode == 2


def test_variables_of_the_software_device_are_the_programs(tmp_path: Path) -> None:
    if shutil.which("ibv_devinfo") is None:
        pytest.skip("this machine has no ibv_devinfo: apt-get install ibverbs-utils")
    capture = {"AIORDMA_CAPTURE": str(tmp_path / "%p")}
    done = execute("ibv_devinfo", **capture)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hca_id:\tsoftware" in done.stdout
    (written,) = tmp_path.iterdir()
    assert written.name.isdigit()
    assert written.read_bytes()[:4] == b"\x0a\x0d\x0d\x0a"  # a section of pcapng
    done = execute("ibv_devinfo", AIORDMA_CAPTURE=str(tmp_path / "missing" / "file"))
    assert done.returncode == 0
    assert "missing/file cannot be written: No such file or directory" in done.stderr
    for name in ("AIORDMA_SOFTWARE_HELD_MIB", "AIORDMA_CAPTURE_MIB"):
        done = execute("true", **{name: "few"})
        assert done.returncode == 2
        assert done.stderr.startswith(f"aiordma exec: {name}='few': give a whole number of MiB")
