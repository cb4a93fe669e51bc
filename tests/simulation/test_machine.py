"""The state machine of tests/faults on simulated hosts: see hosts.py.

AIORDMA_MACHINE_EXAMPLES is the number of runs, and AIORDMA_MACHINE_SEED the seed.
"""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.broken import BROKEN
from tests.faults.machine import unwatched_objects
from tests.simulation.hosts import SimulatedMachine

pytestmark = [pytest.mark.slow, pytest.mark.natively]

EXAMPLES = int(os.environ.get("AIORDMA_MACHINE_EXAMPLES", 100))
SEED = int(os.environ.get("AIORDMA_MACHINE_SEED", 1))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.promise("The guarantees hold in any order of calls")
@pytest.mark.timeout(max(150, EXAMPLES * 5))
def test_random_use_of_hosts_keeps_every_promise() -> None:
    with unwatched_objects():
        run_state_machine_as_test(seed(SEED)(SimulatedMachine), settings=SETTINGS)


@pytest.mark.promise("The guarantees hold in any order of calls")
@pytest.mark.parametrize("name", BROKEN)
def test_hosts_show_a_broken_library(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.broken", name, "simulated"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("AssertionError("), run.stdout
