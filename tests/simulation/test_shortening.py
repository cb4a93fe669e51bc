"""A failing run is shortened, and its text runs it again, in another process, too."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from aiordma.testing import OwnershipError, Simulation, SimulationError, simulate, simulated
from tests.simulation.planted import PLANTED
from tests.simulation.test_simulation import ask, two_hosts
from tests.unit.sources import ROOT

pytestmark = pytest.mark.natively


def failure_of(test: Callable[[], None]) -> BaseException:
    with pytest.raises((AssertionError, OwnershipError, SimulationError, TimeoutError)) as caught:
        test()
    return caught.value


def read(error: BaseException) -> tuple[str, int, int]:
    """The text of a shortened run, how many choices it has, and how many the whole had."""
    found = re.search(r"(\d+) of its (\d+) choices .* AIORDMA_SEED=(\S+),", error.__notes__[-1])
    assert found, error.__notes__
    return found[3], int(found[1]), int(found[2])


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_needs_few_choices(name: str) -> None:
    found = failure_of(simulated(seeds=1000)(PLANTED[name](False)))
    text, left, before = read(found)
    assert left <= before // 4, found.__notes__[-1]
    with pytest.raises(type(found)) as again:
        simulate(PLANTED[name](False), seed=text)
    assert again.value.__notes__ == found.__notes__[:-1]


@simulated(seeds=100)
async def two_late_packets(simulation: Simulation) -> None:
    """Fails if two of many packets are lost."""
    server, client = await two_hosts(simulation)
    others = [simulation.host() for _ in range(2)]
    simulation.link(latency=0.001, jitter=0.01, loss=0.02)
    await asyncio.gather(*(each.run(ask, server, 10) for each in (client, *others)))
    lost = sum(": lost: " in line for line in simulation.trace)
    assert lost < 2


def test_what_a_failure_does_not_need_is_left_out() -> None:
    text, left, before = read(failure_of(two_late_packets))
    assert re.fullmatch(r"\d+:l\d+(,l\d+|-\d+)", text)
    assert left == 2
    assert before > 100


@simulated(seeds=100)
async def fault_with_a_chance(simulation: Simulation) -> None:
    strikes = [simulation.random.random() < 0.3 for _ in range(20)]
    simulation.random.randrange(1 << 40)
    assert strikes.count(True) < 3


def test_the_scenarios_own_faults_become_fewer() -> None:
    error = failure_of(fault_with_a_chance)
    assert read(error)[1] == 3


SCRIPT = """
from tests.simulation.test_shortening import two_late_packets
try:
    two_late_packets()
except AssertionError as error:
    print(*error.__notes__, sep="\\n")
"""


def run_script(hash_seed: int, seed: str = "") -> str:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "AIORDMA_SEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_another_process_finds_and_repeats_the_same_run() -> None:
    first = run_script(1)
    *trace, last = first.splitlines()
    found = re.search(r"AIORDMA_SEED=(\S+),", last)
    assert found
    assert run_script(2) == first
    assert run_script(3, found[1]).splitlines() == trace


calls = iter(range(1000))


@simulated(seeds=1)
async def fails_once(simulation: Simulation) -> None:
    assert next(calls), "something outside of the seed"


def test_a_failure_that_no_seed_decides_is_not_shortened() -> None:
    assert failure_of(fails_once).__notes__[-1].startswith("Not shortened: seed 0 does not fail")


@pytest.mark.parametrize("text", ["19:x3", "19:d", "19:d3-", "d3", "-1", "19 "])
def test_a_seed_that_is_no_text_of_a_run(text: str) -> None:
    async def scenario(simulation: Simulation) -> None:
        pass

    with pytest.raises(ValueError, match="text of a shortened run"):
        simulate(scenario, seed=text)
