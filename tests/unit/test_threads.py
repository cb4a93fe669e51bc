"""Calls into the driver: each runs to its end before anyone goes on, whatever cancels the task
that waits: a scope of anyio, or asyncio's own cancellation, which scopes do not stop."""

import asyncio
import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiordma.event_loop import current_event_loop
from aiordma.threads import THREAD_NAME, Calls, in_thread, outwait, start_call
from tests.unit.loops import Work, settle, until

UVLOOP = pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])

# -- in_thread ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_result_and_the_error_are_the_functions() -> None:
    loop = current_event_loop()
    assert await in_thread(loop, lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await in_thread(loop, lambda: 1 / 0)


@pytest.mark.anyio
async def test_it_runs_in_a_daemon_thread_that_ends() -> None:
    thread = await in_thread(current_event_loop(), threading.current_thread)
    assert thread is not threading.main_thread()
    assert thread.daemon  # a call that never returns does not keep the program alive
    assert thread.name == THREAD_NAME
    await until(lambda: not thread.is_alive())


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


# -- start_call -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_call_tells_the_loops_thread_that_it_has_returned() -> None:
    told: list[tuple[BaseException | None, int]] = []
    loop, work = current_event_loop(), Work()
    start_call(loop, work, lambda error: told.append((error, threading.get_ident())))
    await settle()
    assert told == []
    work.may_end.set()
    await until(lambda: told)
    assert told == [(None, threading.get_ident())]


@pytest.mark.anyio
async def test_a_call_tells_what_it_raised() -> None:
    told: list[BaseException | None] = []
    start_call(current_event_loop(), lambda: 1 / 0, told.append)
    await until(lambda: told)
    assert isinstance(told[0], ZeroDivisionError)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_call_that_outlives_its_loop_tells_nobody(backend: str) -> None:
    told: list[BaseException | None] = []
    work = Work()

    async def main() -> None:
        start_call(current_event_loop(), work, told.append)
        await until(work.started.is_set)

    anyio.run(main, backend=backend)
    work.may_end.set()
    while any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        threading.Event().wait(0.001)
    assert work.ended
    assert told == []


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
