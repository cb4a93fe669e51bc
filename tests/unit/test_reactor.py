"""The reactor: one per loop, until its end; no event is taken while a thread destroys what it might
move."""

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aiordma import ForkError, VerbsCallError
from aiordma._runtime import reactor as reactor_module
from aiordma._runtime.reactor import DESTROYS_AT_ONCE, Reactor, current_reactors, reactor_of
from tests.internals import EventLoop, Once, Provider, close_if_unused, current_event_loop, here
from tests.unit.loops import Work, settle, until

PLAYED = Provider("played", None)
LONG = 60.0


class Channel:
    """A CM event channel whose events the test chooses."""

    provider = PLAYED

    def __init__(self) -> None:
        self.fd, self._writing = os.pipe()
        self.closed = False
        self.waiting: list[Any] = []
        self.polls = 0

    def _take(self) -> Any:
        self.polls += 1
        if not self.waiting:
            return None
        os.read(self.fd, 1)
        return self.waiting.pop(0)

    def tell(self, key: int) -> None:
        self.waiting.append(SimpleNamespace(key=key, new_key=0))
        os.write(self._writing, b"x")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.fd)
            os.close(self._writing)


def identifier(key: int) -> Any:
    return SimpleNamespace(key=key)


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel()
    yield channel
    channel.close()


def make(channel: Channel) -> Reactor:
    any_channel: Any = channel
    return Reactor(current_event_loop(), any_channel)


async def close(reactor: Reactor) -> None:
    await until(lambda: not reactor.loop.calls)
    for key in (1, 2):
        reactor.unsubscribe(identifier(key))
    with anyio.fail_after(20):
        await close_if_unused(reactor)
    assert reactor.ended


class Closable:
    """What the loop's end closes; closed as soon as the test says so."""

    hub = None

    def __init__(self, reactor: Reactor) -> None:
        self.closed = Once(reactor.loop)
        self.is_asked = False
        reactor.enter(self)
        self._reactor = reactor

    def left_open(self) -> str:
        return "unclosed thing"

    def end_with_loop(self) -> None:
        self.is_asked = True
        self.leave()

    close = end_with_loop

    def leave(self) -> None:
        self._reactor.leave(self)
        self.closed.set()


def ignore(_error: BaseException | None) -> None:
    pass


# -- events ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_event_goes_to_its_identifier(channel: Channel) -> None:
    reactor = make(channel)
    seen: list[tuple[int, int]] = []

    def subscribe(key: int) -> None:
        reactor.subscribe(identifier(key), lambda event: seen.append((key, event.key)))

    for key in (1, 2):
        subscribe(key)
    for key in (2, 1, 3, 2):
        channel.tell(key)
    await until(lambda: not channel.waiting)
    assert seen == [(2, 2), (1, 1), (2, 2)]
    reactor.unsubscribe(identifier(2))
    channel.tell(2)
    await until(lambda: not channel.waiting)
    assert len(seen) == 3
    await close(reactor)


def noting(woken: list[bool], watch: Callable[..., None]) -> Callable[..., None]:
    """A loop's watch that notes every call of its callbacks."""

    def watch_and_note(loop: EventLoop, fd: int, callback: Callable[[], None]) -> None:
        def note() -> None:
            woken.append(True)
            callback()

        watch(loop, fd, note)

    return watch_and_note


@pytest.mark.anyio
async def test_no_event_is_taken_while_something_is_destroyed(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Taking one moves queue pairs, maybe the one that is being destroyed.
    woken: list[bool] = []
    face = type(current_event_loop())
    monkeypatch.setattr(face, "watch", noting(woken, face.watch))
    reactor, first, second = make(channel), Work(), Work()
    seen: list[Any] = []
    reactor.subscribe(identifier(1), seen.append)
    reactor.destroy(first, ignore)
    reactor.destroy(second, ignore)
    await until(lambda: first.started.is_set() and second.started.is_set())
    channel.tell(1)
    first.may_end.set()
    await until(lambda: first.ended)
    await settle()
    reactor.poll_events()
    await settle()
    channel.tell(1)
    await settle()
    assert channel.polls == 0
    assert len(woken) == 1  # and the waiting events do not keep the loop busy
    second.may_end.set()
    await until(lambda: seen)
    await close(reactor)


@pytest.mark.anyio
async def test_a_handlers_destroy_follows_waiting_events(channel: Channel) -> None:
    reactor, work = make(channel), Work()
    seen: list[bool] = []

    def handle(_event: Any) -> None:
        seen.append(work.started.is_set())
        if len(seen) == 1:
            reactor.destroy(work, ignore)

    reactor.subscribe(identifier(1), handle)
    channel.tell(1)
    channel.tell(1)
    await until(work.started.is_set)
    assert seen == [False, False]
    channel.tell(1)
    await settle()
    assert len(seen) == 2  # none is taken while something is destroyed
    work.may_end.set()
    await until(lambda: len(seen) == 3)
    await close(reactor)


@pytest.mark.anyio
async def test_events_and_destroys_take_turns(channel: Channel) -> None:
    # Many closes at once must not delay the events of disconnects.
    reactor, order = make(channel), list[str]()
    work = [Work() for _ in range(DESTROYS_AT_ONCE + 1)]
    reactor.subscribe(identifier(1), lambda _: order.append("event"))
    for one in work:
        reactor.destroy(one, lambda _: order.append("destroyed"))
    await until(lambda: all(one.started.is_set() for one in work[:-1]))
    channel.tell(1)
    for one in work[:-1]:
        one.may_end.set()
    await until(work[-1].started.is_set)
    assert order == ["destroyed"] * DESTROYS_AT_ONCE + ["event"]
    work[-1].may_end.set()
    await close(reactor)


@pytest.mark.anyio
async def test_after_events_waits_for_a_destroy(channel: Channel) -> None:
    reactor, work, order = make(channel), Work(), list[str]()
    reactor.subscribe(identifier(1), lambda _: order.append("event"))
    channel.tell(1)
    reactor.after_events(lambda: order.append("at once"))
    assert order == ["event", "at once"]
    reactor.destroy(work, ignore)
    await until(work.started.is_set)
    channel.tell(1)
    reactor.after_events(lambda: order.append("later"))
    await settle()
    assert len(order) == 2
    work.may_end.set()
    await until(lambda: len(order) == 4)
    assert order[2:] == ["event", "later"]
    await close(reactor)


@pytest.mark.anyio
async def test_after_events_looks_again_if_taking_an_event_fails(channel: Channel) -> None:
    reactor, calls = make(channel), list[str]()
    take: Any = channel._take

    def fail_once() -> None:
        channel._take = take  # type: ignore[method-assign]
        raise VerbsCallError(errno.ENOMEM, "rdma_get_cm_event")

    channel._take = fail_once  # type: ignore[method-assign]
    reactor.after_events(lambda: calls.append("called"))
    assert calls == []
    await until(lambda: calls)
    await close(reactor)


# -- its life -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_identifier_that_waits_for_an_event_keeps_it_open(channel: Channel) -> None:
    """A connect that resolves its address is no object yet."""
    reactor = make(channel)
    reactor.subscribe(identifier(1), lambda _: None)
    await close_if_unused(reactor)
    assert not reactor.ended
    await close(reactor)


@pytest.mark.anyio
async def test_a_destruction_that_fails_tells_its_caller(channel: Channel) -> None:
    reactor = make(channel)
    then: list[Any] = []
    reactor.destroy(lambda: 1 / 0, then.append)
    await until(lambda: then)
    assert isinstance(then[0], ZeroDivisionError)
    reactor.subscribe(identifier(1), lambda _: then.append("event"))
    channel.tell(1)
    await until(lambda: len(then) == 2)
    await close(reactor)


@pytest.mark.anyio
async def test_it_stays_open_for_its_objects_and_for_a_destruction_under_way(
    channel: Channel,
) -> None:
    reactor, work = make(channel), Work()
    used = Closable(reactor)
    await close_if_unused(reactor)
    assert not reactor.ended
    used.leave()
    reactor.destroy(work, ignore)
    await until(work.started.is_set)
    await close_if_unused(reactor)
    assert not reactor.ended
    work.may_end.set()
    await close(reactor)
    assert channel.closed


@pytest.fixture
def opening(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Opening a channel takes as long as the test wants."""
    opening = Work()

    def open_channel(_provider: object) -> Channel:
        opening()
        return channel

    monkeypatch.setattr(reactor_module, "EventChannel", open_channel)
    return opening


@pytest.mark.anyio
async def test_all_objects_of_a_loop_share_one_reactor(channel: Channel, opening: Work) -> None:
    reactors: list[Reactor] = []

    async def acquire() -> None:
        reactors.append(await reactor_of(PLAYED))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(acquire)
        await until(opening.started.is_set)
        await settle()
        opening.may_end.set()
    (reactor,) = set(reactors)
    assert current_reactors() == [reactor]
    await close(reactor)
    assert current_reactors() == []


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_an_abandoned_acquisition_leaves_no_reactor(
    channel: Channel, opening: Work, use_uvloop: bool
) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(reactor_of(PLAYED))
        await until(opening.started.is_set)
        task.cancel()
        await settle()
        assert not task.done()
        opening.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert channel.closed
        assert current_reactors() == []

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


@pytest.mark.anyio
async def test_each_provider_has_a_reactor_of_its_own(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Channel()
    channels: dict[str, Any] = {"one": channel, "other": other}
    monkeypatch.setattr(reactor_module, "EventChannel", lambda provider: channels[provider.name])
    reactors = [await reactor_of(Provider(name, None)) for name in channels]
    assert [reactor.channel for reactor in reactors] == list(channels.values())
    assert current_reactors() == reactors
    seen: list[str] = []

    def subscribe(reactor: Reactor, name: str) -> None:
        reactor.subscribe(identifier(1), lambda _event: seen.append(name))

    for name, reactor in zip(channels, reactors, strict=True):
        subscribe(reactor, name)
    other.tell(1)
    await until(lambda: seen == ["other"])
    await close(reactors[0])
    assert channel.closed
    assert current_reactors() == reactors[1:]
    other.tell(1)
    await until(lambda: seen == ["other", "other"])
    await close(reactors[1])
    assert other.closed


@pytest.mark.promise("Cancelled tasks clean up before their connections close")
@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_guards_of_a_loop_do_not_wait_for_each_other(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, use_uvloop: bool
) -> None:
    """The loop's end cancels both. Each waits for the program's task, which closes its objects."""
    other = Channel()
    channels: dict[str, Any] = {"one": channel, "other": other}
    monkeypatch.setattr(reactor_module, "EventChannel", lambda provider: channels[provider.name])
    monkeypatch.setattr(reactor_module, "END_SECONDS", LONG)
    tasks: list[asyncio.Task[None]] = []

    async def work(acquired: asyncio.Event) -> None:
        reactors = [await reactor_of(Provider(name, None)) for name in channels]
        closables = [Closable(reactor) for reactor in reactors]
        acquired.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await settle()
            assert not any(reactor.ended for reactor in reactors)
            assert not any(each.is_asked for each in closables)
            for each in closables:
                each.leave()

    async def main() -> None:
        acquired = asyncio.Event()
        tasks.append(asyncio.create_task(work(acquired)))
        await acquired.wait()

    began = time.monotonic()
    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})
    assert time.monotonic() - began < LONG / 2  # they ended before it
    assert tasks[0].cancelled()
    assert channel.closed
    assert other.closed


@pytest.mark.anyio
async def test_a_childs_use_of_the_loops_reactor_is_an_error(
    channel: Channel, opening: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening.may_end.set()
    reactor = await reactor_of(PLAYED)
    with monkeypatch.context() as patch:
        patch.setattr(here, "pid", here.pid + 1)
        with pytest.raises(ForkError, match=r"forked child.*anew"):
            await reactor_of(PLAYED)
        with pytest.raises(ForkError):
            Closable(reactor)
    assert reactor.closables == {}
    await close(reactor)
