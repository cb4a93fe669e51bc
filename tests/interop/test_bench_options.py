"""perftest's options mean the same to `aiordma bench`: each is tried with both, on one device."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench.perftest import run_perftest
from tests.devices import ADDRESS, DEVICE
from tests.docs.programs import ROOT
from tests.forked import python

COMMAND = ("-c", "from aiordma.cli.main import main; main()", "bench", "local", "--no-tcp")
ITERATIONS, SIZE = 60, 64
LEFT, COUNT = 0, 1
"""Columns of perftest: #bytes, #iterations."""


def ours(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "rows.json"
    chosen = ("--host", ADDRESS, "--device", DEVICE, "-s", str(SIZE), "-n", str(ITERATIONS))
    done = subprocess.run(
        [*python(), *COMMAND, *chosen, *words, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())
    assert isinstance(row, dict)
    return row


@pytest.mark.capability("rnr")
@pytest.mark.capability("librdmacm")
@pytest.mark.parametrize("option", ["", "-I 32 -T 16", "-q 2 -b"])
def test_bandwidth_options_count_as_perftest_does(tmp_path: Path, option: str) -> None:
    words = option.split()
    theirs = run_perftest("ib_send_bw", ADDRESS, SIZE, ITERATIONS, *words)
    row = ours(tmp_path, "-o", "send", "-d", "16", *words)
    assert theirs[LEFT] == row["size"]
    if "-b" in words:
        assert row["count"] > theirs[COUNT]  # ours counts the messages of both sides
    else:
        assert row["count"] == theirs[COUNT]


@pytest.mark.capability("rnr")
@pytest.mark.capability("librdmacm")
@pytest.mark.parametrize("option", ["-I 0 -T 16"])
def test_latency_options_count_as_perftest_does(tmp_path: Path, option: str) -> None:
    theirs = run_perftest("ib_send_lat", ADDRESS, SIZE, ITERATIONS, *option.split())
    row = ours(tmp_path, "-o", "echo", "-d", "1", "-R", *option.split())
    assert (row["size"], row["count"]) == (theirs[LEFT], theirs[COUNT])
