"""Tests of other modules again, on the loop that polls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

OF_THE_ENGINE = [
    "tests/unit/test_request.py",
    "tests/unit/test_open_requests.py",
    "tests/unit/test_inflight.py",
    "tests/unit/test_credits.py",
    "tests/unit/test_hub.py",
    "tests/unit/test_memory.py",
    "tests/unit/test_work_completion.py",
]
ON_A_DEVICE = [
    "tests/device/test_echo.py",
    "tests/device/test_messages.py",
    "tests/device/test_one_sided.py",
    "tests/device/test_back_pressure.py",
    "tests/device/test_cancellation.py",
    "tests/device/test_chains.py",
    "tests/device/test_shared_receive.py",
    "tests/device/test_shared_receive_plain.py",
    "tests/device/test_raised_causes.py",
    "tests/device/test_unretrieved.py",
]


@pytest.mark.parametrize("files", [OF_THE_ENGINE, ON_A_DEVICE], ids=["engine", "device"])
def test_polling_loop_passes_the_same_tests(files: list[str]) -> None:
    environment = {
        **os.environ,
        "AIORDMA_TEST_DEVICE": "software",
        "AIORDMA_TEST_LOOPS": "polling",
        "AIORDMA_RESULTS": "",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
