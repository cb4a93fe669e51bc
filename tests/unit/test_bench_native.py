"""`make bench` on this machine: every row that is soon measured is, by the command that it uses."""

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.sources import ROOT

SOON = "[ns]*/[!i]*"  # all but native/idle_wakeups, which idles for half a minute


def test_the_rows_of_this_machine_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ("native", str(file), "1", "0.05", SOON)
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.parts", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [row["name"] for row in rows] == [
        "software/echo/64",
        "software/echo/64/events",
        "software/echo/64/beside_protocol",
        "software/echo/64/beside_uvloop_streams",
        "software/messages/64",
        "native/completed_await",
        "native/post_beside_busy_thread",
    ]
    for row in rows:
        assert row["rounds"] == 1
        assert row["value"] > 0, row
        assert row["ratio"] > 0, row
