"""The simulation finds each planted fault, and nothing in the mended programs."""

import pytest

from aiordma.testing import OwnershipError, SimulationError, simulate
from tests.simulation.planted import PLANTED

pytestmark = pytest.mark.natively

SEEDS = 1000
FOUND = (AssertionError, OwnershipError, SimulationError, TimeoutError)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_its_seed_shows_it_again(name: str) -> None:
    for seed in range(SEEDS):
        try:
            simulate(PLANTED[name](False), seed=seed)
        except FOUND as error:
            found = error
            break
    else:
        raise AssertionError(f"{SEEDS} seeds have not found it")
    with pytest.raises(type(found)) as caught:
        simulate(PLANTED[name](False), seed=seed)
    assert caught.value.__notes__ == found.__notes__


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
@pytest.mark.parametrize("name", PLANTED)
def test_a_mended_program_survives(name: str, first: int) -> None:
    for seed in range(first, first + 100):
        simulate(PLANTED[name](True), seed=seed)
