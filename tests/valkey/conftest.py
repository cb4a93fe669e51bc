"""The tests run on asyncio's loops, and leave nothing on the device."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import LOOPS
from tests.devices import device, nothing_is_left, required_capabilities
from tests.valkey.server import ValkeyServer

__all__ = ("anyio_backend", "device", "nothing_is_left", "required_capabilities")


@pytest.fixture(params=[each for each in LOOPS if each.id != "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """valkey-py needs asyncio."""
    return request.param


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[ValkeyServer]:
    """A Valkey server on TCP."""
    with ValkeyServer() as server:
        yield server
