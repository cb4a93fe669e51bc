"""Calls into the driver: each runs to its end before anyone goes on, whatever cancels the task
that waits: a scope of anyio, or asyncio's own cancellation, which scopes do not stop."""

import asyncio
import errno
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiordma import VerbsCallError
from aiordma._loop import threads
from aiordma._loop.threads import (
    ACCEPTS,
    CREATES,
    DESTROYS,
    PEERS,
    THREAD_NAME,
    Calls,
    Lane,
    in_thread,
    outwait,
    start_call,
    start_destroy,
)
from tests.internals import calls_under_way, current_event_loop
from tests.unit.child import run_child
from tests.unit.loops import Work, settle, until
from tests.waiting import wait_until

UVLOOP = pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])

# -- in_thread ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_result_and_the_error_are_the_functions() -> None:
    loop = current_event_loop()
    assert await in_thread(loop, lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await in_thread(loop, lambda: 1 / 0)


@pytest.mark.anyio
async def test_it_runs_in_a_daemon_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.01)
    thread = await in_thread(current_event_loop(), threading.current_thread, Lane(1))
    assert thread is not threading.main_thread()
    assert thread.daemon  # a call that never returns does not keep the program alive
    assert thread.name == THREAD_NAME
    await until(lambda: thread not in threading.enumerate())


@pytest.mark.anyio
async def test_a_cancelled_scope_waits_for_the_call() -> None:
    loop, work = current_event_loop(), Work()
    got: list[str] = []

    async def call() -> None:
        got.append(await in_thread(loop, work))
        await checkpoint()
        got.append("went on")

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await until(work.started.is_set)
        group.cancel_scope.cancel()
        loop.call_later(0, work.may_end.set)
    assert work.ended
    assert got == ["result"]


@pytest.mark.anyio
async def test_it_works_in_a_scope_that_is_cancelled_already() -> None:
    # That is where things are closed.
    work = Work()
    work.may_end.set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await in_thread(current_event_loop(), work)
    assert work.ended


@UVLOOP
@pytest.mark.parametrize("times", [1, 5])
def test_asyncios_own_cancellation_waits_for_the_call(use_uvloop: bool, times: int) -> None:
    # Going on early would destroy an identifier while a thread still makes its queue pair.
    async def main() -> None:
        work = Work()
        task = asyncio.ensure_future(in_thread(current_event_loop(), work))
        await until(work.started.is_set)
        for _ in range(times):
            task.cancel()
            await settle()
            assert not task.done()
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.ended

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


@UVLOOP
def test_error_of_a_cancelled_callers_call_is_logged(
    use_uvloop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    work = Work()

    def fail() -> None:
        work()
        raise VerbsCallError(errno.ENOMEM, "ibv_reg_mr")

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(current_event_loop(), fail))
        await until(work.started.is_set)
        task.cancel()
        await settle()
        work.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with caplog.at_level(logging.INFO, "aiordma"):
        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})
    (message,) = caplog.messages
    assert message.startswith(
        "a call failed whose caller had been cancelled: [Errno 12] ibv_reg_mr"
    )


@UVLOOP
def test_asyncios_timeout_comes_after_the_call(use_uvloop: bool) -> None:
    async def end_after(timeout: asyncio.Timeout, work: Work) -> None:
        await until(timeout.expired)
        work.may_end.set()

    async def limited(work: Work) -> None:
        async with asyncio.timeout(0.01) as timeout, anyio.create_task_group() as group:
            group.start_soon(end_after, timeout, work)
            await in_thread(current_event_loop(), work)

    async def main() -> None:
        work = Work()
        with pytest.raises(TimeoutError):
            await limited(work)
        assert work.ended
        await settle()  # and it is over: nothing cancels what follows

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


@UVLOOP
def test_the_end_of_asyncio_run_waits_for_the_call(use_uvloop: bool) -> None:
    work = Work()

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(current_event_loop(), work))
        await until(work.started.is_set)
        assert not task.done()  # forgotten
        threading.Timer(0.02, work.may_end.set).start()

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})
    assert work.ended


# -- outwait --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_event_that_is_set_is_not_waited_for() -> None:
    event = anyio.Event()
    event.set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await outwait(event)


@UVLOOP
def test_a_cancellation_goes_on_after_the_event(use_uvloop: bool) -> None:
    async def main() -> None:
        event = anyio.Event()
        task = asyncio.ensure_future(outwait(event))
        await settle()
        task.cancel("because")
        await settle()
        assert not task.done()
        event.set()
        with pytest.raises(asyncio.CancelledError, match="because"):
            await task

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


@UVLOOP
def test_a_cancellation_goes_on_beside_that_of_a_scope(use_uvloop: bool) -> None:
    """In one turn of the loop, asyncio delivers only the first one."""

    async def main() -> None:
        event, scope = anyio.Event(), anyio.CancelScope()

        async def wait() -> None:
            with scope:
                await outwait(event)

        task = asyncio.ensure_future(wait())
        await settle()
        scope.cancel()
        task.cancel()
        await settle()
        event.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


@UVLOOP
def test_a_time_limit_in_a_cancelled_scope_cancels_nothing_else(use_uvloop: bool) -> None:
    async def main() -> None:
        event, scope = anyio.Event(), anyio.CancelScope()

        async def wait() -> None:
            with scope, suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    scope.cancel()
                    await outwait(event)

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.02)
        event.set()
        await task

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop})


@UVLOOP
def test_a_wait_of_a_closed_loop_is_collected(use_uvloop: bool) -> None:
    async def main() -> "weakref.ref[asyncio.Task[None]]":
        task = asyncio.ensure_future(outwait(anyio.Event()))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        await settle()
        return weakref.ref(task)

    loop = (
        pytest.importorskip("uvloop").new_event_loop() if use_uvloop else asyncio.new_event_loop()
    )
    left = loop.run_until_complete(main())
    loop.close()
    del loop
    gc.collect()
    assert left() is None


# -- start_call -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_thread_call_returns_on_the_loops_thread() -> None:
    told: list[tuple[BaseException | None, int]] = []
    loop, work = current_event_loop(), Work()
    start_call(loop, work, lambda error: told.append((error, threading.get_ident())))
    await settle()
    assert told == []
    work.may_end.set()
    await until(lambda: told)
    assert told == [(None, threading.get_ident())]


@pytest.mark.anyio
async def test_thread_call_raises_its_exception() -> None:
    told: list[BaseException | None] = []
    start_call(current_event_loop(), lambda: 1 / 0, told.append)
    await until(lambda: told)
    assert isinstance(told[0], ZeroDivisionError)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_call_that_outlives_its_loop_is_ignored(backend: str) -> None:
    told: list[BaseException | None] = []
    work = Work()

    async def main() -> None:
        start_call(current_event_loop(), work, told.append)
        await until(work.started.is_set)

    anyio.run(main, backend=backend)
    work.may_end.set()
    wait_until(lambda: not calls_under_way())
    assert work.ended
    assert told == []


# -- workers --------------------------------------------------------------------------------------


class Starts:
    """Fails the starts of worker threads while `fail` is set."""

    def __init__(self) -> None:
        self.fail = False
        self.failed = 0

    def make(self, **keywords: Any) -> threading.Thread:
        """What stands in for Thread."""
        if self.fail:
            self.failed += 1
            raise RuntimeError("can't start new thread")
        return threading.Thread(**keywords)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """No worker is left of earlier tests, and the test can fail the start of further ones."""
    starts = Starts()
    for lane in (PEERS, CREATES, ACCEPTS, DESTROYS):
        lane.reset()
    monkeypatch.setattr(threads, "Thread", starts.make)
    yield starts
    # A worker tells the loop of a call's end, and counts it as ended after that.
    wait_until(lambda: not calls_under_way())


@pytest.mark.anyio
async def test_an_idle_worker_runs_the_next_call(starts: Starts) -> None:
    loop = current_event_loop()
    first = await in_thread(loop, threading.current_thread)
    await until(lambda: not calls_under_way())
    assert await in_thread(loop, threading.current_thread) is first


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
@pytest.mark.anyio
async def test_a_lane_has_at_most_so_many_workers(starts: Starts) -> None:
    loop, lane = current_event_loop(), Lane(2)
    ended: list[BaseException | None] = []
    work = [Work() for _ in range(3)]
    for one in work:
        start_call(loop, one, ended.append, lane)
    await until(lambda: work[0].started.is_set() and work[1].started.is_set())
    await settle()
    assert not work[2].started.is_set()
    work[1].may_end.set()
    await until(work[2].started.is_set)
    work[0].may_end.set()
    work[2].may_end.set()
    await until(lambda: len(ended) == 3)
    await until(lambda: not lane.calls)


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
@pytest.mark.anyio
async def test_abandoned_calls_delay_no_others(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MOST_ABANDONED", 2)
    loop, lane = current_event_loop(), Lane(2)
    ended: list[BaseException | None] = []
    work = [Work() for _ in range(6)]
    for one in work[:4]:
        abandon = start_call(loop, one, ended.append, lane)
        await until(one.started.is_set)
        assert not abandon()
        assert not abandon()
    start_call(loop, work[4], ended.append, lane)
    abandon = start_call(loop, work[5], ended.append, lane)
    await settle()
    assert not work[4].started.is_set()  # so many abandoned calls, and no more
    assert abandon()
    for one in work[:4]:
        one.may_end.set()
    await until(work[4].started.is_set)
    work[4].may_end.set()
    await until(lambda: len(ended) == 5)
    await until(lambda: not lane.calls)
    assert not work[5].started.is_set()
    assert lane._workers <= 2


@pytest.mark.anyio
async def test_held_up_connects_delay_no_destroy(starts: Starts) -> None:
    loop = current_event_loop()
    ended: list[BaseException | None] = []
    connects = [Work() for _ in range(PEERS.max_workers + 1)]
    for connect in connects:
        start_call(loop, connect, ended.append, PEERS)
    await until(lambda: sum(connect.started.is_set() for connect in connects) == PEERS.max_workers)
    assert await in_thread(loop, lambda: "created") == "created"
    destroyed = anyio.Event()
    start_destroy(loop, lambda: None, lambda _error: destroyed.set())
    await destroyed.wait()
    for connect in connects:
        connect.may_end.set()
    await until(lambda: len(ended) == len(connects))
    await until(lambda: not calls_under_way())


def test_a_lane_without_a_thread_to_keep_tries_again(starts: Starts) -> None:
    lane, ran = Lane(1), threading.Event()
    starts.fail = True
    with pytest.raises(VerbsCallError):
        lane.keep_worker()
    starts.fail = False
    lane.keep_worker()
    starts.fail = True
    lane.submit(ran.set)  # by the worker that is kept
    assert ran.wait(30)


@pytest.mark.anyio
async def test_a_call_without_a_thread_fails_clearly(starts: Starts) -> None:
    starts.fail, ran = True, []
    loop = current_event_loop()
    with pytest.raises(VerbsCallError, match=r"pthread_create.*ulimit -u") as caught:
        await in_thread(loop, lambda: ran.append(True))
    assert not loop.calls
    assert caught.value.errno == errno.EAGAIN
    starts.fail = False
    assert await in_thread(current_event_loop(), lambda: "later") == "later"
    assert ran == []
    await until(lambda: not calls_under_way())


@pytest.mark.anyio
async def test_a_call_waits_for_a_worker_that_is_busy(starts: Starts) -> None:
    loop, work = current_event_loop(), Work()
    ended: list[BaseException | None] = []
    start_call(loop, work, ended.append)
    await until(work.started.is_set)
    starts.fail = True
    start_call(loop, lambda: None, ended.append)
    await settle()
    assert starts.failed
    assert ended == []
    work.may_end.set()
    await until(lambda: ended == [None, None])
    await until(lambda: not calls_under_way())


@pytest.mark.anyio
async def test_a_withdrawn_call_never_runs(starts: Starts) -> None:
    loop, lane, work = current_event_loop(), Lane(1), Work()
    ended: list[BaseException | None] = []
    withdraw_first = start_call(loop, work, ended.append, lane)
    await until(work.started.is_set)
    withdraw = start_call(loop, lambda: ended.append(None), ended.append, lane)
    assert len(loop.calls) == 2
    assert withdraw()
    assert not withdraw()
    assert not withdraw_first()  # it has begun
    assert len(loop.calls) == 1
    work.may_end.set()
    await until(lambda: not lane.calls)
    await until(lambda: ended)
    assert ended == [None]
    await until(lambda: not loop.calls)


@pytest.mark.anyio
async def test_destroy_runs_on_the_loop_without_a_thread(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    starts.fail, ran = True, []
    errors: list[BaseException | None] = []

    def destroy() -> None:
        ran.append(threading.current_thread())
        raise ZeroDivisionError

    start_destroy(current_event_loop(), destroy, errors.append)
    await until(lambda: errors)
    assert ran == [threading.main_thread()]
    assert isinstance(errors[0], ZeroDivisionError)
    assert "no thread can be started" in caplog.text


FORKED = """
import asyncio, os
from aiordma._loop.event_loop import current_event_loop
from aiordma._loop.threads import in_thread
from tests.internals import calls_under_way

async def call():
    return await in_thread(current_event_loop(), os.getpid)

assert asyncio.run(call()) == os.getpid()
child = os.fork()
if not child:
    assert calls_under_way() == 0
    os._exit(0 if asyncio.run(call()) == os.getpid() else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_starts_its_own_workers() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


FORKED_WITHIN = """
import asyncio, os, threading
from aiordma._loop.event_loop import current_event_loop
from aiordma._loop.threads import Lane, start_call

async def main():
    lane, may_end, started = Lane(1), threading.Event(), threading.Event()
    loop = current_event_loop()
    ran = []

    def first():
        started.set()
        may_end.wait()

    withdraw = [
        start_call(loop, first, lambda _: None, lane),
        start_call(loop, lambda: ran.append(os.getpid()), lambda _: None, lane),
    ]
    started.wait()
    child = os.fork()
    if not child:
        assert not any(each() for each in withdraw)
        assert threading.active_count() == 1
        os._exit(1 if ran else 0)
    assert os.waitpid(child, 0)[1] == 0
    may_end.set()

asyncio.run(main())
"""


def test_forked_child_runs_no_call_of_its_parent() -> None:
    run_child(FORKED_WITHIN)


@pytest.mark.anyio
async def test_calls_are_counted_while_a_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector can end an event loop in a thread that begins, which asks for them."""
    counted: list[int] = []

    def make(**keywords: Any) -> threading.Thread:
        asking = threading.Thread(target=lambda: counted.append(lane.calls))
        asking.start()
        asking.join(5)
        return threading.Thread(**keywords)

    lane = Lane(1)
    monkeypatch.setattr(threads, "Thread", make)
    assert await in_thread(current_event_loop(), lambda: 42, lane) == 42
    assert counted == [1]


# -- errors ---------------------------------------------------------------------------------------


class Buffer:
    """What a call uses, and what must go with the call."""


def _fails(_buffer: Buffer) -> None:
    raise ZeroDivisionError


async def _failing(buffer: Buffer) -> None:
    with suppress(ZeroDivisionError):
        await in_thread(current_event_loop(), lambda: _fails(buffer))


async def _cancelled(function: Callable[[], object]) -> None:
    loop = current_event_loop()
    if loop.asyncio_loop is None:
        return  # trio has no cancellation that ignores a shield
    task = asyncio.ensure_future(in_thread(loop, function))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _ended(buffer: Buffer) -> None:
    ended: Any = SimpleNamespace(has_ended=True)
    start_destroy(ended, lambda: _fails(buffer), lambda _: None)


ENDS: dict[str, Callable[[Buffer], Awaitable[None]]] = {
    "failing": _failing,
    "cancelled": lambda buffer: _cancelled(lambda: buffer),
    "failing and cancelled": lambda buffer: _cancelled(lambda: _fails(buffer)),
    "ended loop": _ended,
}


@pytest.mark.promise("A buffer is held until its request completes")
@pytest.mark.anyio
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_call_keeps_nothing_after_its_end(
    end: Callable[[Buffer], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """The garbage collector is not needed: the buffer of a call can be large."""
    caplog.set_level(logging.WARNING, "aiordma")  # a record that is kept keeps its error

    async def call() -> weakref.ref[Buffer]:
        buffer = Buffer()
        await end(buffer)
        return weakref.ref(buffer)

    gc.collect()
    gc.disable()
    try:
        buffer = await call()
        await until(lambda: buffer() is None)
    finally:
        gc.enable()


# -- calls on one object --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_waits_for_calls_comes_after_the_last_one() -> None:
    loop, first, second = current_event_loop(), Work(), Work()
    calls, destroyed = Calls(loop), []
    assert not calls.delays(lambda: destroyed.append("at once"))
    async with anyio.create_task_group() as group:
        group.start_soon(calls.run, first)
        group.start_soon(calls.run, second)
        await until(lambda: first.started.is_set() and second.started.is_set())
        assert calls.delays(lambda: destroyed.append("later"))
        first.may_end.set()
        await settle()
        assert destroyed == []
        second.may_end.set()
    assert destroyed == ["later"]
    assert not calls.delays(lambda: destroyed.append("never"))
