"""Servers of streams in several threads."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from aiordma.streams import server


class Closed:
    """A listener that another event loop has closed."""


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_server_may_start_while_another_thread_closes_one() -> None:
    closing: Any = server._closing
    kept = [Closed() for _ in range(500)]
    is_over = threading.Event()

    def close() -> None:
        while not is_over.is_set():
            one = Closed()
            closing[one] = 1
            del one

    async def start() -> None:
        for _ in range(50):
            await server._until_free(2)

    for each in kept:
        closing[each] = 1
    thread = threading.Thread(target=close)
    thread.start()
    try:
        asyncio.run(start())
    finally:
        is_over.set()
        thread.join()
        for each in kept:
            del closing[each]
