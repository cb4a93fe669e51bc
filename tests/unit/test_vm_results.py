"""What a run of the test bed reports: its exit status, and the table of `make test`."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.vm import __main__ as command_line
from tests.vm import machine, summary
from tests.vm.report import TestBedError

REQUEST = machine.Request(command="true", project=Path("/nowhere"), time_limit=7)


@pytest.fixture
def control(tmp_path: Path) -> Path:
    (tmp_path / "console").write_text("the kernel's last word\n")
    return tmp_path


def test_the_command_s_status_is_the_run_s(control: Path) -> None:
    (control / "started").touch()
    (control / "status").write_text("42\n")
    assert machine.judge(control, REQUEST, in_time=True) == 42


def test_time_limit_ends_the_command_with_124(
    control: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("started", ""), ("timed-out", ""), ("status", "143\n")):
        (control / name).write_text(text)
    assert machine.judge(control, REQUEST, in_time=True) == machine.TIMED_OUT
    assert "still running after 7 s" in capsys.readouterr().err


@pytest.mark.parametrize("started", [False, True])
def test_a_guest_that_dies_gives_125_and_its_console(
    control: Path, capsys: pytest.CaptureFixture[str], started: bool
) -> None:
    if started:
        (control / "started").touch()
    assert machine.judge(control, REQUEST, in_time=True) == machine.DIED
    assert "the kernel's last word" in capsys.readouterr().err


def test_a_guest_that_never_boots_gives_125(control: Path) -> None:
    assert machine.judge(control, REQUEST, in_time=False) == machine.DIED


def test_what_the_kernel_complains_about_is_passed_on(
    control: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (control / "console").write_text("[ 1.0] WARNING: CPU: 0 PID: 1 at drivers/infiniband\n")
    (control / "status").write_text("0\n")
    assert machine.judge(control, REQUEST, in_time=True) == 0
    assert "drivers/infiniband" in capsys.readouterr().err


def test_shell_assignments_survive_any_value() -> None:
    value = "a 'b' \"c\" $d `e` \\ \n f"
    script = machine.assignments({"name": value}) + 'printf %s "$name"'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout == value


def test_a_time_limit_that_is_no_number_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VM_TIMEOUT", "ten")
    with pytest.raises(TestBedError, match="VM_TIMEOUT=ten"):
        command_line.request("true")


def test_an_empty_command_is_explained() -> None:
    with pytest.raises(TestBedError, match="make vm CMD="):
        command_line.request(" ")


def write_summary(results: Path, device: str, passed: int, failed: int, skipped: int) -> None:
    row = {
        "loop": "asyncio",
        "kind": "unit",
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
    }
    text = json.dumps({"device": device, "rows": [row], "skips": {"no atomics": skipped}})
    (results / f"summary-{device}.json").write_text(text)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_the_last_line_holds_the_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(tmp_path, "rxe0", 5, 0, 1)
    write_summary(tmp_path, "siw0", 7, 0, 2)
    assert summary.report(tmp_path, ["rxe0", "siw0"]) == 0
    assert last_line(capsys) == "12 passed, 0 failed, 3 skipped"


def test_a_failed_test_fails_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(tmp_path, "rxe0", 5, 1, 0)
    assert summary.report(tmp_path, ["rxe0"]) == 1
    assert last_line(capsys) == "5 passed, 1 failed, 0 skipped"


def test_a_missing_summary_fails_even_if_all_others_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_summary(tmp_path, "rxe0", 5, 0, 0)
    assert summary.report(tmp_path, ["rxe0", "siw0"]) == 1
    output = capsys.readouterr().out
    assert "no results for siw0" in output
    assert output.splitlines()[-1] == "5 passed, 0 failed, 0 skipped"


def test_an_unreadable_summary_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(tmp_path, "rxe0", 5, 0, 0)
    (tmp_path / "summary-siw0.json").write_text('{"device": "siw0"')
    assert summary.report(tmp_path, ["rxe0"]) == 1
    assert last_line(capsys) == "5 passed, 0 failed, 0 skipped"


def test_no_test_at_all_is_no_success(tmp_path: Path) -> None:
    write_summary(tmp_path, "rxe0", 0, 0, 3)
    assert summary.report(tmp_path, ["rxe0"]) == 1
