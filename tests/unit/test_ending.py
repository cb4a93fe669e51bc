"""The steps of an end: each is done once, also if there is no memory for some time."""

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from aiordma._loop import ending as ending_module
from aiordma._loop.ending import ATTEMPTS, Ending
from aiordma._loop.event_loop import EventLoop, current_event_loop
from aiordma._runtime.reactor import Reactor
from tests.unit.loops import until
from tests.unit.test_reactor import Channel, make

pytestmark = pytest.mark.natively


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "RETRY_SECONDS", 0.001)


def without_memory(times: int, done: list[str], name: str) -> Callable[[], None]:
    """A step that finds no memory so many times."""
    left = [None] * times

    def step() -> None:
        if left:
            left.pop()
            raise MemoryError
        done.append(name)

    return step


@pytest.mark.anyio
async def test_step_is_repeated_as_long_as_there_is_no_memory() -> None:
    done: list[str] = []
    steps = [without_memory(times, done, f"{times}") for times in (0, 3 * ATTEMPTS, 0, 1)]
    Ending(current_event_loop(), *steps).run()
    await until(lambda: len(done) == 4)
    assert done == ["0", f"{3 * ATTEMPTS}", "0", "1"]


@pytest.mark.anyio
async def test_step_is_repeated_without_memory_for_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_timer(*_: object) -> None:
        raise MemoryError

    loop, done = current_event_loop(), list[str]()
    monkeypatch.setattr(loop, "call_later", no_timer)
    Ending(loop, without_memory(3 * ATTEMPTS, done, "done")).run()
    assert done == ["done"]
    assert not loop.returned


def test_loop_that_ends_before_the_timer_leaves_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_module, "RETRY_SECONDS", 3600)
    done: list[str] = []

    async def begin() -> EventLoop:
        loop = current_event_loop()
        Ending(loop, without_memory(1, done, "first"), partial(done.append, "second")).run()
        return loop

    loop = asyncio.run(begin())
    assert done == []
    (left,) = loop.returned.values()
    left()
    assert done == ["first", "second"]
    assert not loop.returned


def test_attempts_after_the_end_of_the_loop_are_limited() -> None:
    done: list[str] = []

    async def begin() -> EventLoop:
        return current_event_loop()

    loop = asyncio.run(begin())
    Ending(loop, without_memory(ATTEMPTS, done, "never"), partial(done.append, "last")).run()
    assert done == ["last"]


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.mark.anyio
@pytest.mark.parametrize("times", [1, 2 * ATTEMPTS])
async def test_user_is_released_once_if_its_callback_finds_no_memory(
    channel: Channel, times: int
) -> None:
    reactor, done = make(channel), list[str]()
    for _ in range(3):
        reactor.retain()
    reactor.release(without_memory(times, done, "released"))
    reactor.destroy(lambda: None, closed=without_memory(times, done, "closed"))
    await until(lambda: len(done) == 2)
    assert reactor.users == 2
    await closes(reactor, times)
    await until(lambda: channel.closed)


async def closes(reactor: Reactor, times: int) -> None:
    """Release the last two users: the last callback is called behind the close."""
    done: list[str] = []
    reactor.destroy(
        without_memory(0, done, "destroyed"),
        without_memory(times, done, "then"),
        closed=without_memory(times, done, "closed"),
    )
    await until(lambda: len(done) == 3)
    assert done == ["destroyed", "then", "closed"]
    assert (reactor.users, reactor.ended) == (1, False)
    last = anyio.Event()
    reactor.release(last.set)
    with anyio.fail_after(20):
        await last.wait()
    assert reactor.ended
