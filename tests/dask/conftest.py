"""The tests run on asyncio's loops, and leave nothing on the device."""

from typing import Any

import pytest

from tests.conftest import LOOPS
from tests.devices import device, nothing_is_left, required_capabilities

__all__ = ("anyio_backend", "device", "nothing_is_left", "required_capabilities")


@pytest.fixture(params=[each for each in LOOPS if each.id != "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """distributed needs asyncio."""
    return request.param
