"""The end of asyncio's event loops, which cancels all tasks at once: those that still clean up use
their connections, and what they leave open is closed after them."""

import asyncio
import gc
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiordma
from tests.device.players import connected
from tests.device.transports import LOOPS
from tests.devices import ADDRESS, DEVICE, kernel_objects
from tests.internals import reactor

pytestmark = [
    pytest.mark.one_kernel_device,
    pytest.mark.parametrize("make_loop", LOOPS.values(), ids=LOOPS),
]

MakeLoop = Callable[[], asyncio.AbstractEventLoop]

LONG = 60.0
AT_ONCE = LONG / 2
"""Seconds: an end that takes longer has waited for what does not end."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a loop waits LONG for its tasks: longer than any of them takes here."""
    monkeypatch.setattr(reactor, "END_SECONDS", LONG)


def run(make_loop: MakeLoop, main: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Run a coroutine function, and return how many seconds it and the loop's end took."""
    began = time.monotonic()
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
    return time.monotonic() - began


class Background:
    """Tasks of a program that goes on while they run."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, and wait until it has set `open`."""
        self.tasks.append(asyncio.create_task(work))
        await self.open.wait()
        self.open.clear()


def ended_texts(record: list[warnings.WarningMessage]) -> list[str]:
    """Collect what is left, and return what was warned of."""
    gc.collect()
    return [str(each.message) for each in record if each.category is ResourceWarning]


@pytest.mark.promise("Cancelled tasks clean up before their connections close")
def test_cancelled_tasks_use_their_connections(make_loop: MakeLoop) -> None:
    received: list[bytes] = []
    background = Background()

    async def work() -> None:
        async with connected() as (client, server):
            background.open.set()
            try:
                await asyncio.sleep(3600)
            finally:
                for number in range(10):
                    await client.send(b"goodbye %d" % number)
                    received.append(await server.receive())

    async def main() -> None:
        for _ in range(3):
            await background.start(work())

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        took = run(make_loop, main)
    assert sorted(received) == sorted(3 * [b"goodbye %d" % number for number in range(10)])
    assert ended_texts(record) == []
    assert took < AT_ONCE


@pytest.mark.promise("Cancelled tasks clean up before their connections close")
def test_task_that_does_not_end_delays_the_close_for_a_time(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when its connection is closed."""
    monkeypatch.setattr(reactor, "END_SECONDS", 0.3)
    ends: list[str] = []
    background = Background()

    async def refuse() -> None:
        listener = await aiordma.listen(ADDRESS, 0)
        background.open.set()
        while not ends:
            try:
                await listener.accept()
            except asyncio.CancelledError:
                pass
            except aiordma.ClosedError:
                ends.append("closed")

    async def main() -> None:
        await background.start(refuse())

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        took = run(make_loop, main)
    assert ends == ["closed"]
    (text,) = ended_texts(record)
    assert text.startswith("left open at the end of the event loop: <Listener on")
    assert 0.3 <= took < AT_ONCE


@pytest.mark.promise("Cancelled tasks clean up before their connections close")
def test_task_that_cancels_and_awaits_all_others_is_not_awaited(make_loop: MakeLoop) -> None:
    kept: list[Any] = []

    async def main() -> None:
        kept.append(await aiordma.listen(ADDRESS, 0))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        with pytest.raises(aiordma.ClosedError):
            await kept[0].accept()

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        took = run(make_loop, main)
    (text,) = ended_texts(record)
    assert text.startswith("left open at the end of the event loop: <Listener on")
    assert took < AT_ONCE


@pytest.mark.promise("Cancelled tasks clean up before their connections close")
def test_loop_closed_while_a_task_cleans_up_gives_everything_back(make_loop: MakeLoop) -> None:
    before = kernel_objects(DEVICE)
    background = Background()

    async def work() -> None:
        listener = await aiordma.listen(ADDRESS, 0)
        background.open.set()
        try:
            await listener.accept()
        finally:
            await asyncio.sleep(3600)

    async def main() -> None:
        await background.start(work())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        loop = make_loop()
        loop.run_until_complete(main())
        loop.close()
        background.tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]
        background.tasks.clear()
        del loop
        (text,) = ended_texts(record)
    assert "<Listener on" in text
    assert kernel_objects(DEVICE) == before


@pytest.mark.promise("Cancelled tasks clean up before their connections close")
def test_what_is_opened_after_a_cancellation_of_all_tasks_stays_open(make_loop: MakeLoop) -> None:
    background = Background()

    async def clean_up() -> None:
        listener = await aiordma.listen(ADDRESS, 0)
        background.open.set()
        try:
            await listener.accept()
        finally:
            await asyncio.sleep(0.1)

    async def main() -> None:
        await background.start(clean_up())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        async with aiordma.listen(ADDRESS, 0) as listener, asyncio.TaskGroup() as group:
            await asyncio.wait(background.tasks)
            await asyncio.sleep(0.1)
            accepting = group.create_task(_accept(listener))
            async with aiordma.connect(ADDRESS, listener.port) as client, await accepting as server:
                await client.send(b"hello")
                assert await server.receive() == b"hello"

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        run(make_loop, main)
    (text,) = ended_texts(record)
    assert text.count("<Listener on") == 1


@pytest.mark.promise("A process ends, whatever is open")
def test_what_a_loop_opens_after_its_tasks_were_cancelled_is_closed_at_its_end(
    make_loop: MakeLoop,
) -> None:
    before = kernel_objects(DEVICE)
    background, kept = Background(), list[aiordma.Listener]()

    async def clean_up() -> None:
        async with aiordma.listen(ADDRESS, 0) as listener:
            background.open.set()
            try:
                await listener.accept()
            finally:
                await asyncio.sleep(0.2)

    async def main() -> None:
        await background.start(clean_up())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        kept.append(await aiordma.listen(ADDRESS, 0))
        await asyncio.sleep(0.3)  # the end of what the cancellation has begun

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        run(make_loop, main)
        (text,) = ended_texts(record)
    assert "<Listener on" in text
    assert kernel_objects(DEVICE) == before


async def _accept(listener: aiordma.Listener) -> aiordma.Connection:
    return await listener.accept()
