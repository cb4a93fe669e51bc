"""Watching descriptors: the same promises on asyncio, uvloop and trio."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.internals import current_event_loop
from tests.unit.loops import settle, until


class Pipe:
    """A descriptor to be made readable, and the count of its callbacks."""

    def __init__(self) -> None:
        self.fd, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.calls = 0
        self.is_open = True

    def fill(self) -> None:
        os.write(self._writing, b"x")

    def empty(self) -> None:
        os.read(self.fd, 100)

    def on_readable(self) -> None:
        self.calls += 1

    def on_readable_empty(self) -> None:
        self.calls += 1
        self.empty()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.fd)
            os.close(self._writing)


@pytest.fixture
def pipes() -> Iterator[Callable[[], Pipe]]:
    made: list[Pipe] = []

    def make() -> Pipe:
        made.append(Pipe())
        return made[-1]

    yield make
    for pipe in made:
        pipe.close()


pytestmark = pytest.mark.anyio
Pipes = Callable[[], Pipe]


async def test_the_callback_is_called_for_as_long_as_there_is_something_to_read(
    pipes: Pipes,
) -> None:
    loop, pipe = current_event_loop(), pipes()
    loop.watch(pipe.fd, pipe.on_readable)
    await settle()
    assert pipe.calls == 0
    pipe.fill()
    await until(lambda: pipe.calls >= 3)  # level-triggered: it has not been read yet
    pipe.empty()
    await settle()
    seen = pipe.calls
    await settle()
    assert pipe.calls == seen
    pipe.fill()
    await until(lambda: pipe.calls > seen)
    loop.unwatch(pipe.fd)


async def test_data_before_the_watch_calls_the_callback(pipes: Pipes) -> None:
    loop, pipe = current_event_loop(), pipes()
    pipe.fill()
    loop.watch(pipe.fd, pipe.on_readable_empty)
    await until(lambda: pipe.calls == 1)
    loop.unwatch(pipe.fd)


async def test_nothing_is_called_after_unwatch(pipes: Pipes) -> None:
    loop, pipe = current_event_loop(), pipes()
    loop.watch(pipe.fd, pipe.on_readable)
    await settle()
    loop.unwatch(pipe.fd)
    pipe.fill()
    await settle()
    assert pipe.calls == 0


async def test_nothing_is_called_after_unwatch_of_a_readable_descriptor(pipes: Pipes) -> None:
    loop, pipe = current_event_loop(), pipes()
    loop.watch(pipe.fd, pipe.on_readable)
    pipe.fill()
    await until(lambda: pipe.calls)
    loop.unwatch(pipe.fd)
    seen = pipe.calls
    await settle()
    assert pipe.calls == seen


async def test_a_callback_can_unwatch_another_that_is_readable_too(pipes: Pipes) -> None:
    # Both events come out of one wait: whichever callback is first must silence the other.
    loop, pair = current_event_loop(), (pipes(), pipes())
    called: list[Pipe] = []

    def first(pipe: Pipe) -> None:
        called.append(pipe)
        for either in pair:
            loop.unwatch(either.fd)

    for pipe in pair:
        loop.watch(pipe.fd, partial(first, pipe))
    await settle()
    for pipe in pair:
        pipe.fill()
    await until(lambda: called)
    await settle()
    assert len(called) == 1


async def test_a_callback_can_unwatch_itself(pipes: Pipes) -> None:
    loop, pipe = current_event_loop(), pipes()

    def once() -> None:
        pipe.calls += 1
        loop.unwatch(pipe.fd)

    loop.watch(pipe.fd, once)
    pipe.fill()
    await until(lambda: pipe.calls)
    await settle()
    assert pipe.calls == 1


async def test_a_reused_number_wakes_the_new_object_only(
    pipes: Pipes, caplog: pytest.LogCaptureFixture
) -> None:
    loop, old = current_event_loop(), pipes()
    loop.watch(old.fd, old.on_readable)
    await settle()
    loop.unwatch(old.fd)
    old.close()
    new = pipes()
    assert new.fd == old.fd  # the lowest free number
    loop.watch(new.fd, new.on_readable_empty)
    new.fill()
    await until(lambda: new.calls == 1)
    await settle()
    assert (old.calls, new.calls) == (0, 1)
    loop.unwatch(new.fd)
    assert caplog.records == []


@pytest.mark.parametrize("times", range(8))
async def test_watching_again_at_once_works_and_says_nothing(
    pipes: Pipes, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    # As a reactor does that destroys one thing after the other. trio runs its tasks in random
    # order, hence several times.
    loop, pipe = current_event_loop(), pipes()
    for _ in range(times + 1):
        loop.watch(pipe.fd, lambda: pytest.fail("an old callback was called"))
        loop.unwatch(pipe.fd)
    loop.watch(pipe.fd, pipe.on_readable_empty)
    pipe.fill()
    await until(lambda: pipe.calls == 1)
    await settle()
    pipe.fill()
    await until(lambda: pipe.calls == 2)
    loop.unwatch(pipe.fd)
    await settle()
    assert caplog.records == []


async def test_a_descriptor_can_be_closed_as_soon_as_it_is_unwatched(
    pipes: Pipes, caplog: pytest.LogCaptureFixture
) -> None:
    loop = current_event_loop()
    for wait_first in (True, False):
        pipe = pipes()
        loop.watch(pipe.fd, pipe.on_readable)
        if wait_first:
            await settle()
        loop.unwatch(pipe.fd)
        pipe.close()
        await settle()
        assert pipe.calls == 0
    assert caplog.records == []


async def test_unwatching_what_is_not_watched_does_nothing(pipes: Pipes) -> None:
    loop, pipe = current_event_loop(), pipes()
    loop.unwatch(pipe.fd)
    loop.watch(pipe.fd, pipe.on_readable)
    loop.unwatch(pipe.fd)
    loop.unwatch(pipe.fd)
    await settle()


async def test_a_callback_that_raises_is_logged_and_called_again(
    pipes: Pipes, caplog: pytest.LogCaptureFixture, anyio_backend_name: str
) -> None:
    loop, pipe = current_event_loop(), pipes()
    if anyio_backend_name == "asyncio":
        # anyio's test runner keeps for itself what asyncio would log.
        asyncio.get_running_loop().set_exception_handler(None)

    def fail_once() -> None:
        pipe.on_readable_empty()
        if pipe.calls == 1:
            raise RuntimeError("something broke in here")

    loop.watch(pipe.fd, fail_once)
    pipe.fill()
    await until(lambda: pipe.calls == 1)
    await settle()
    assert "something broke in here" in caplog.text
    assert len(caplog.records) == 1
    pipe.fill()
    await until(lambda: pipe.calls == 2)
    loop.unwatch(pipe.fd)


async def test_sockets_are_watched_like_pipes() -> None:
    loop = current_event_loop()
    ours, theirs = socket.socketpair()
    seen: list[bytes] = []
    with ours, theirs:
        loop.watch(ours.fileno(), lambda: seen.append(ours.recv(10)))
        theirs.send(b"hello")
        await until(lambda: seen)
        loop.unwatch(ours.fileno())
    assert seen == [b"hello"]


async def test_it_works_in_a_callback_of_the_loop(pipes: Pipes) -> None:
    # Drains run there, and begin timers and waiters.
    loop, pipe = current_event_loop(), pipes()
    calls: list[str] = []

    def readable() -> None:
        pipe.empty()
        loop.call_later(0, lambda: calls.append("timer"))
        loop.waiter().wake()
        loop.unwatch(pipe.fd)

    loop.watch(pipe.fd, readable)
    pipe.fill()
    await until(lambda: calls)
