"""Connections used in random order, with canary bytes in all memory: see machine.py.

AIORDMA_MACHINE_EXAMPLES is the number of runs, and AIORDMA_MACHINE_SEED the seed. Both have fixed
defaults, so that `make test` repeats the same runs. For a long run:

    AIORDMA_MACHINE_EXAMPLES=5000 AIORDMA_MACHINE_SEED=7 pytest tests/faults/test_machine.py
"""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.broken import BROKEN
from tests.faults.machine import Machine, unwatched_objects

pytestmark = [pytest.mark.slow, pytest.mark.natively]

EXAMPLES = int(os.environ.get("AIORDMA_MACHINE_EXAMPLES", 40))
SEED = int(os.environ.get("AIORDMA_MACHINE_SEED", 20261123))
STEPS = 50
# A failure is reported as it came: the device has its own pace, so a shorter run may not fail.
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.promise("The guarantees hold in any order of calls")
@pytest.mark.timeout(max(150, EXAMPLES * 5))
def test_random_use_keeps_every_promise() -> None:
    print(f"AIORDMA_MACHINE_SEED={SEED} AIORDMA_MACHINE_EXAMPLES={EXAMPLES}")
    Machine.failures.clear()
    try:
        with unwatched_objects():
            run_state_machine_as_test(seed(SEED)(Machine), settings=SETTINGS)
    finally:
        if Machine.failures:
            raise Machine.failures[0]


@pytest.mark.promise("The guarantees hold in any order of calls")
@pytest.mark.parametrize("name", BROKEN)
def test_machine_finds_a_broken_library(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.broken", name],
        capture_output=True,
        text=True,
        env={**os.environ, "AIORDMA_PATIENCE": "2"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("AssertionError("), run.stdout
