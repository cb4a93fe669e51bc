"""Waiting in a thread for what the device or another process does."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import PATIENCE


def wait_until(condition: Callable[[], object], interval: float = 0.002) -> None:
    """Poll until the condition holds; fail after PATIENCE seconds."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit, f"not within {PATIENCE:g} s"
        time.sleep(interval)


class HeldCalls:
    """Replaces a function by one whose calls wait: `entered` is set by the first, and all go on
    when the test sets `proceed`."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.entered, self.proceed = threading.Event(), threading.Event()
        self._real = getattr(owner, name)
        patch.setattr(owner, name, self._call)

    def _call(self, *arguments: Any) -> Any:
        self.entered.set()
        self.proceed.wait()
        return self._real(*arguments)
