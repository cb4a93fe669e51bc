"""What tests on an event loop share: letting it run, without a clock."""

import threading
from collections.abc import Callable

import anyio
from anyio.lowlevel import checkpoint

ROUNDS = 12
"""More rounds of the loop than a cancellation or a wake-up takes to reach its task."""


async def settle() -> None:
    """Let everything that is ready to run do so."""
    for _ in range(ROUNDS):
        await checkpoint()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something holds; a test that waits in vain fails."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.001)


class Work:
    """A call that takes as long as the test wants."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.started.set()
        assert self.may_end.wait(20), "nobody let it end"
        self.ended = True
        return "result"
