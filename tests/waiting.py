"""Waiting in a thread for what the device or another process does."""

import time
from collections.abc import Callable

from tests.conftest import PATIENCE


def wait_until(condition: Callable[[], object], interval: float = 0.002) -> None:
    """Poll until the condition holds; fail after PATIENCE seconds."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, f"not within {PATIENCE:g} s"
        time.sleep(interval)
