"""Whatever opens something, without enough file descriptors: it says so, leaves nothing, and works
once there are some."""

import errno
import json
import os
import subprocess
import sys

import pytest

from tests.unit.few_descriptors import OPERATIONS
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

# What the loops differ in is the same for all.
CASES = [(name, "asyncio") for name in OPERATIONS] + [("connect", "uvloop"), ("connect", "trio")]
CONNECTS = ("connect", "connect_by_name", "prepare")


@pytest.mark.parametrize(("name", "loop"), CASES)
def test_too_few_descriptors_are_named(name: str, loop: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.few_descriptors", name, loop],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    _, enough, *attempts = json.loads(ran.stdout)
    for attempt in (enough, *attempts):
        assert "crash" not in attempt, attempt
        assert attempt["said"] == [], attempt  # neither warnings nor a log
        assert attempt["left"] == enough["left"], attempt
    *failed, succeeded = attempts
    assert not succeeded["error"]
    assert len(failed) >= 6  # each call that needs a descriptor was the one that had none
    for attempt in failed:
        assert "RLIMIT_NOFILE" in attempt["error"], attempt
        assert attempt["errno"] == errno.EMFILE, attempt
        assert attempt["is_connection_error"] or name not in CONNECTS, attempt
