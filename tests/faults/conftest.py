"""Tests under faults, on the software device; the fixtures apply because they are imported."""

from collections.abc import Iterator

import pytest

from aiordma.testing import Faults
from tests.devices import device, nothing_is_left, required_capabilities

__all__ = ("device", "faults", "nothing_is_left", "required_capabilities")


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults(seed=20261121) as chosen:
        yield chosen
