"""Each part of `make soak`, small: what it counts has to be exact here, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .figures import AT_MOST, SCALE, Figure, count
from .numbered import Tally, message
from .parts import PARTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.promise("Load loses nothing, and leaves nothing")
@pytest.mark.parametrize("part", PARTS)
def test_small_soak_loses_no_message(part: str, tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.soak", part],
        cwd=ROOT,
        env=os.environ | {"SOAK_SCALE": "0.002", "SOAK_RESULTS": str(results)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(results.read_text())["parts"][part]
    assert not found["missed"]
    assert any(figure["counted"] for figure in found["figures"])


@pytest.mark.promise("Load loses nothing, and leaves nothing")
def test_tally_counts_lost_doubled_and_changed_messages() -> None:
    tally = Tally()
    received = [message(3, 0), message(3, 2), message(3, 2), message(3, 3)[:-1]]
    for number, data in enumerate(received):
        tally.add(3, number, data)
    assert (tally.received, tally.wrong) == (4, 2)
    assert "expected message 1 of connection 3" in tally.examples[0]


def test_unknown_part_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.soak", "nonsense"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert "slow_readers" in ran.stdout


@pytest.mark.promise("Load loses nothing, and leaves nothing")
def test_figure_misses_its_goal() -> None:
    assert count("lost", 0).met
    assert not count("lost", 1).met
    assert Figure("KiB", 64.0, (AT_MOST, 64)).met
    assert Figure("KiB", 65.0, (AT_MOST, 64)).met == (SCALE < 1)
