"""Timers, waiters and background tasks: the same promises on asyncio, uvloop and trio."""

import asyncio
import logging
import socket
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio

import aiordma
import aiordma._loop.event_loop
from aiordma import EventLoopError
from aiordma._loop.event_loop import EventLoop, Timer, current_event_loop, require_here
from aiordma.streams import create_connection, create_server, open_connection, start_server
from aiordma.testing import connected_pair
from tests.unit.loops import settle, until

pytestmark = pytest.mark.anyio

# -- timers ---------------------------------------------------------------------------------------


def hold_up(seconds: float) -> None:
    """Hold up the loop until timers of different deadlines are due in the same round."""
    time.sleep(seconds)


async def test_a_timer_calls_once() -> None:
    calls: list[str] = []
    loop = current_event_loop()
    loop.call_later(0, lambda: calls.append("soon"))
    loop.call_later(0.001, lambda: calls.append("later"))
    assert calls == []
    await until(lambda: len(calls) == 2)
    await settle()
    assert sorted(calls) == ["later", "soon"]


async def test_the_sooner_timer_is_first() -> None:
    calls: list[str] = []
    loop = current_event_loop()
    loop.call_later(0.05, lambda: calls.append("second"))
    loop.call_later(0, lambda: calls.append("first"))
    await until(lambda: len(calls) == 2)
    assert calls == ["first", "second"]


@pytest.mark.parametrize("delay", [0, 0.001, 1000])
async def test_a_cancelled_timer_does_not_call(delay: float) -> None:
    calls: list[str] = []
    timer = current_event_loop().call_later(delay, lambda: calls.append("cancelled"))
    timer.cancel()
    timer.cancel()
    await settle()
    await anyio.sleep(0.003)
    assert calls == []


async def test_of_two_timers_due_together_the_first_cancels_the_other() -> None:
    loop = current_event_loop()
    timers: list[Timer] = []
    calls: list[int] = []

    def call(number: int) -> None:
        calls.append(number)
        timers[1 - number].cancel()

    timers += [loop.call_later(0.01, partial(call, number)) for number in (0, 1)]
    await settle()
    hold_up(0.03)
    await until(lambda: calls)
    await settle()
    assert len(calls) == 1


async def test_a_timer_that_has_called_can_be_cancelled() -> None:
    calls: list[str] = []
    timer = current_event_loop().call_later(0, lambda: calls.append("called"))
    await until(lambda: calls)
    timer.cancel()


# -- from another thread --------------------------------------------------------------------------


async def test_a_thread_calls_on_the_loops_thread() -> None:
    loop = current_event_loop()
    ran_in: list[int] = []
    thread = threading.Thread(
        target=lambda: loop.call_from_thread(lambda: ran_in.append(threading.get_ident()))
    )
    thread.start()
    await until(lambda: ran_in)
    thread.join()
    assert ran_in == [threading.get_ident()]


# -- callbacks that fail --------------------------------------------------------------------------


def _from_thread(loop: EventLoop, callback: Callable[[], None]) -> None:
    loop.call_from_thread(callback)


def _by_timer(loop: EventLoop, callback: Callable[[], None]) -> None:
    loop.call_later(0.001, callback)


def _in_the_next_turn(loop: EventLoop, callback: Callable[[], None]) -> None:
    loop.call_later(0, callback)


@pytest.mark.natively
@pytest.mark.parametrize("schedule", [_from_thread, _by_timer, _in_the_next_turn])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_error_of_a_callback_is_logged(
    backend: str,
    schedule: Callable[[EventLoop, Callable[[], None]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[str] = []

    def fail() -> None:
        called.append("failed")
        raise OSError("disk on fire")

    async def main() -> None:
        schedule(current_event_loop(), fail)
        schedule(current_event_loop(), lambda: called.append("next"))
        await until(lambda: len(called) == 2)
        await settle()

    anyio.run(main, backend=backend)
    assert sorted(called) == ["failed", "next"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "disk on fire" in caplog.text


@pytest.mark.natively
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_error_of_a_watched_descriptor_is_logged(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[bytes] = []
    reading, writing = socket.socketpair()

    def read() -> None:
        called.append(reading.recv(1))
        raise OSError("disk on fire")

    async def main() -> None:
        loop = current_event_loop()
        loop.watch(reading.fileno(), read)
        writing.send(b"x")
        await until(lambda: called)
        writing.send(b"y")
        await until(lambda: len(called) == 2)
        loop.unwatch(reading.fileno())
        await settle()

    with reading, writing:
        anyio.run(main, backend=backend)
    assert called == [b"x", b"y"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "disk on fire" in caplog.text


# -- waiters --------------------------------------------------------------------------------------


async def test_a_wake_lets_the_waiting_task_go_on() -> None:
    waiter = current_event_loop().waiter()
    went_on: list[bool] = []

    async def wait() -> None:
        await waiter.wait()
        went_on.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await settle()
        assert went_on == []
        waiter.wake()
        waiter.wake()
        assert went_on == []  # not inside the wake: the waker's own work comes first
    assert went_on == [True]


async def test_a_wake_before_the_wait_is_not_lost() -> None:
    waiter = current_event_loop().waiter()
    waiter.wake()
    with anyio.fail_after(20):
        await waiter.wait()


async def test_a_wake_after_a_cancelled_wait_does_nothing() -> None:
    waiter = current_event_loop().waiter()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await waiter.wait()
    assert scope.cancelled_caught
    waiter.wake()
    await settle()


# -- background tasks -----------------------------------------------------------------------------


async def test_a_spawned_task_runs_by_itself() -> None:
    done: list[bool] = []

    async def work() -> None:
        await settle()
        done.append(True)

    current_event_loop().spawn(work, "aiordma: test")
    assert done == []
    await until(lambda: done)


async def test_a_spawned_tasks_exception_is_logged_under_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise OSError("disk on fire")

    current_event_loop().spawn(fail, "aiordma: test of failing")
    await until(lambda: caplog.records)
    await settle()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("aiordma", logging.ERROR)
    assert record.getMessage() == "aiordma: test of failing failed"
    assert "disk on fire" in caplog.text


# -- which loop -----------------------------------------------------------------------------------


def _outside() -> EventLoop:
    return current_event_loop()


async def test_a_worker_thread_is_outside() -> None:
    failed: list[Any] = []

    def work() -> None:
        try:
            _outside()
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    await until(lambda: not thread.is_alive())
    assert failed == ["aiordma was called outside a running asyncio or trio event loop"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thread_calls_in_vain_after_the_loops_end(backend: str) -> None:
    called: list[bool] = []

    async def main() -> EventLoop:
        return current_event_loop()

    loop = anyio.run(main, backend=backend)
    loop.call_from_thread(lambda: called.append(True))
    assert called == []


# -- asyncio only ---------------------------------------------------------------------------------

OF_ASYNCIO: dict[str, tuple[Callable[[], Any], str]] = {
    "open_connection": (lambda: open_connection("127.0.0.1", 1), "connect_stream"),
    "create_connection": (
        lambda: create_connection(asyncio.Protocol, "127.0.0.1", 1),
        "connect_stream",
    ),
    "start_server": (
        lambda: start_server(lambda reader, writer: None, "127.0.0.1", 0),
        "listen_stream",
    ),
    "create_server": (lambda: create_server(asyncio.Protocol, "127.0.0.1", 0), "listen_stream"),
}


@pytest.mark.parametrize("name", OF_ASYNCIO)
def test_functions_of_asyncio_name_those_for_trio(name: str) -> None:
    call, instead = OF_ASYNCIO[name]
    text = rf"{name}\(\) needs a running asyncio event loop: on trio, use aiordma.streams.{instead}"
    with pytest.raises(RuntimeError, match=text):
        trio.run(call)


# -- trio's guest mode ----------------------------------------------------------------------------


def as_guest(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine function on trio, as a guest of asyncio's loop, and return its result."""

    async def host() -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        trio.lowlevel.start_guest_run(
            main,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=done.set_result,
        )
        async with asyncio.timeout(20):
            return (await done).unwrap()

    return asyncio.run(host())


def test_a_guest_of_asyncio_is_on_trios_loop() -> None:
    async def main() -> EventLoop:
        guest = current_event_loop()
        assert guest.is_running_here()
        waiter = guest.waiter()
        guest.call_later(0.01, waiter.wake)
        await waiter.wait()
        with pytest.raises(RuntimeError, match=r"on trio, use aiordma.streams.connect_stream"):
            await open_connection("127.0.0.1", 1)
        return guest

    assert as_guest(main).asyncio_loop is None


def test_the_host_of_trio_is_on_asyncios_loop() -> None:
    async def main() -> None:
        guest, host = current_event_loop(), asyncio.get_running_loop()
        called: list[EventLoop] = []

        def call() -> None:
            assert current_event_loop().is_running_here()
            assert not guest.is_running_here()
            called.append(current_event_loop())

        host.call_soon(call)
        await until(lambda: called)
        (loop,) = called
        assert loop.asyncio_loop is host
        assert not loop.is_running_here()
        with pytest.raises(EventLoopError, match=r"belongs to the event loop .*<trio run> .*here"):
            require_here(loop, "it")

    as_guest(main)


def test_a_guest_of_asyncio_has_connections() -> None:
    async def main() -> bytes:
        async with connected_pair(device="software") as (client, server):
            await client.send(b"hello")
            return await server.receive()

    assert as_guest(main) == b"hello"


def test_run_in_a_running_loop_says_to_await() -> None:
    async def main() -> None:
        coroutine = anyio.lowlevel.checkpoint()
        with pytest.raises(RuntimeError, match=r"aiordma\.run\(\).* `await main\(\)`"):
            aiordma.run(coroutine)
        coroutine.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also of a coroutine that was never awaited
        asyncio.run(main())
