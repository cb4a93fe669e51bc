"""Tests against C programs of other projects. They run on asyncio, which makes no
difference to a C program; with rping they run on every loop (`every_loop` of
tests.interop.programs)."""

from typing import Any

import pytest

from tests.conftest import LOOPS
from tests.devices import device, nothing_is_left, required_capabilities

__all__ = ("anyio_backend", "device", "nothing_is_left", "required_capabilities")


@pytest.fixture(params=LOOPS[:1])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param
