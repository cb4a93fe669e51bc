"""Calls into the driver that can block, each in a thread, each to its end.

What such a call works on belongs to it until it returns: a queue pair that is being made cannot be
destroyed, memory that is being registered cannot be freed. So nothing here can be cancelled. A
shielded scope would not do: asyncio's own cancellation (Task.cancel, wait_for, the end of
asyncio.run) reaches through it, and ends the wait while the thread is still in C.

The threads are daemons: nothing can call one back, and the program must be able to end.
"""

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import anyio

from aiordma.event_loop import EventLoop

__all__ = ("THREAD_NAME", "Calls", "in_thread", "outwait", "start_call")

THREAD_NAME = "aiordma: a call into the driver"

Result = TypeVar("Result")


def start_call(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
) -> None:
    """Run a function in a thread, and `then(error or None)` on the loop's once it has returned.

    No task is involved, so no cancellation either. If the loop has ended by then, nothing is.
    """

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = raised
        result = error
        loop.call_from_thread(lambda: then(result))

    Thread(target=run, name=THREAD_NAME, daemon=True).start()


async def outwait(event: anyio.Event) -> None:
    """Wait for an event, whatever cancels the task; only then does a cancellation go on."""
    cancelled: BaseException | None = None
    while not event.is_set():
        try:
            with anyio.CancelScope(shield=True):
                await event.wait()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def in_thread(loop: EventLoop, function: Callable[[], Result]) -> Result:
    """Run a function in a thread, to its end, and return its result.

    A cancelled caller gets no result: what the function makes, it must also put where it will be
    found.
    """
    returned = anyio.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def then(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        returned.set()

    start_call(loop, lambda: results.append(function()), then)
    await outwait(returned)
    if errors:
        raise errors[0]
    return results[0]


class Calls:
    """Calls under way on one object, and what must not happen before they are back: destroying it
    under a thread that works with it."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._count = 0
        self._then: Callable[[], object] | None = None

    async def run(self, function: Callable[[], Result]) -> Result:
        """`in_thread`, counted."""
        self.begin()
        try:
            return await in_thread(self._loop, function)
        finally:
            self.end()

    def begin(self) -> None:
        """Count a call that the caller runs."""
        self._count += 1

    def end(self) -> None:
        """It is back; on the loop's thread."""
        self._count -= 1
        then, self._then = (None, self._then) if self._count else (self._then, None)
        if then is not None:
            then()

    def delays(self, then: Callable[[], object]) -> bool:
        """Return whether any is under way; if so, `then` is called when the last one is back."""
        if self._count:
            self._then = then
        return self._count > 0
