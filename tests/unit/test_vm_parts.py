"""The parts of `make test` run at the same time, and report one after the other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sources import ROOT
from tests.vm import packages, parts
from tests.waiting import wait_until

MAKEFILE = """
one: ; @echo this is one; echo >was-here-one; while ! test -e was-here-two; do sleep 0.01; done
two: ; @echo this is two; echo >was-here-two; while ! test -e was-here-one; do sleep 0.01; done
bad: ; @echo this is bad; exit 3
endless: ; @echo $$$$ >pid; mv pid was-here-endless; exec sleep 600
"""


@pytest.fixture(autouse=True)
def makefile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "TESTS", ())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("MAKEFLAGS", "MFLAGS"):  # of the make that runs these tests
        monkeypatch.delenv(name, raising=False)


def test_parts_run_together_and_are_shown_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert parts.run("make", ["one", "two"], tmp_path / "logs") == 0
    output = capfd.readouterr().out
    for name in ("one", "two"):
        assert f"\n== {name}: status 0 after " in output
        assert f" s\n\nthis is {name}\n" in output
        assert (tmp_path / "logs" / f"{name}.log").read_text() == f"this is {name}\n"


def test_failed_part_ends_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert parts.run("make", ["bad", "one", "two"], tmp_path) == 1
    output = capfd.readouterr().out
    assert "== bad: status 2 after " in output
    assert "this is one" in output


def test_missing_packages_leave_parts_that_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "TESTS", ("a-package-that-does-not-exist",))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert parts.run("make", ["one", "two"], tmp_path) == 0
    assert "a-package-that-does-not-exist" in capfd.readouterr().err


def test_sigterm_ends_every_part(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from tests.vm import packages, parts
packages.TESTS = ()
class Late(parts.Part):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        time.sleep(0.5)  # the signal comes before the part is known
parts.Part = Late
parts.run("make", ["endless"], Path({str(tmp_path)!r}))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        started = tmp_path / "was-here-endless"
        wait_until(started.exists)
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    sleeper = Path("/proc", started.read_text().strip())
    wait_until(lambda: not sleeper.exists())
