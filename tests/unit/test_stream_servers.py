"""Servers of streams in several threads."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.internals import listener_endpoint


class Closed:
    """A listener that another event loop has closed."""

    is_closed = True
    port = 1


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_server_may_start_while_another_thread_closes_one() -> None:
    listeners: Any = listener_endpoint._open
    kept = [Closed() for _ in range(500)]
    is_over = threading.Event()

    def close() -> None:
        while not is_over.is_set():
            listeners.add(Closed())

    async def start() -> None:
        for _ in range(2000):
            await listener_endpoint.wait_for_port(2)

    for each in kept:
        listeners.add(each)
    thread = threading.Thread(target=close)
    thread.start()
    try:
        asyncio.run(start())
    finally:
        is_over.set()
        thread.join()
