"""What tools read of the tasks of a program: their coroutines' names, frames and stacks."""

import asyncio
import inspect
import io
from functools import partial
from types import FrameType
from typing import Any

import pytest
import trio

import aiordma
from aiordma.testing import connected_pair
from tests.internals import current_event_loop
from tests.unit.loops import until

pytestmark = pytest.mark.anyio


async def keep(event: asyncio.Event) -> None:
    """A background task's function."""
    await event.wait()


def frames(awaited: Any) -> list[FrameType]:
    """Return the frames from a coroutine down to what it waits for, as trio's iter_await_frames and
    asyncio.capture_call_graph find them."""
    found: list[FrameType] = []
    while awaited is not None and hasattr(awaited, "cr_frame"):
        found.append(awaited.cr_frame)
        awaited = awaited.cr_await
    return found


async def spawned(function: Any) -> "asyncio.Task[Any]":
    """Return the task of a spawned function that waits."""
    current_event_loop().spawn(function, "aiordma: a test")
    (task,) = [each for each in asyncio.all_tasks() if each.get_name() == "aiordma: a test"]
    coroutine: Any = task.get_coro()
    await until(lambda: coroutine.cr_await is not None)
    return task


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_background_task_has_a_coroutines_attributes() -> None:
    event = asyncio.Event()
    task = await spawned(partial(keep, event))
    coroutine: Any = task.get_coro()
    assert coroutine.__qualname__ == "aiordma: a test"  # a partial has none
    assert coroutine.__name__ == "_logged"
    assert not coroutine.cr_running
    assert coroutine.cr_code.co_name == "_logged"
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED
    assert [each.f_code.co_name for each in frames(coroutine)][:2] == ["_logged", "keep"]
    assert task.get_stack() == [coroutine.cr_frame]
    text = io.StringIO()
    task.print_stack(file=text)
    assert "in _logged" in text.getvalue()
    assert "coro=<aiordma: a test() running at " in repr(task)
    event.set()
    await task
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert coroutine.cr_frame is None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_background_task_has_its_functions_name() -> None:
    event = asyncio.Event()

    async def wait() -> None:
        await event.wait()

    task = await spawned(wait)
    coroutine: Any = task.get_coro()
    assert coroutine.__qualname__ == wait.__qualname__
    event.set()
    await task


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_every_task_of_a_connection_can_be_dumped() -> None:
    async with connected_pair() as (client, _):
        receiving = asyncio.create_task(client.receive())
        await until(lambda: frames(receiving.get_coro())[-1].f_code.co_name != "receive")
        for task in asyncio.all_tasks():
            coroutine: Any = task.get_coro()
            assert coroutine.__qualname__
            assert coroutine.__name__
            assert coroutine.cr_frame.f_lineno
            assert task.get_stack()
        receiving.cancel()


async def connect(listener: aiordma.Listener, as_block: bool) -> None:
    opening = aiordma.connect("127.0.0.1", listener.port, device="software")
    if as_block:
        async with opening:
            pass
    else:
        await (await opening).aclose()


AS_BLOCK = pytest.mark.parametrize("as_block", [True, False])


@AS_BLOCK
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_dump_of_a_connecting_task_shows_its_step(as_block: bool) -> None:
    """The steps of `connect` defer interrupts. Their frames are found all the same."""
    async with aiordma.listen("127.0.0.1", device="software") as listener:
        task = asyncio.create_task(connect(listener, as_block))
        await until(lambda: inner_step(frames(task.get_coro())))
        async with await listener.accept():
            await task


@AS_BLOCK
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio_finds_the_step_of_a_connecting_task(as_block: bool) -> None:
    async with (
        aiordma.listen("127.0.0.1", device="software") as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(connect, listener, as_block)
        (task,) = nursery.child_tasks
        await until(lambda: inner_step([frame for frame, _ in task.iter_await_frames()]))
        async with await listener.accept():
            pass


def inner_step(found: list[FrameType]) -> bool:
    """Whether the frames of `connect` above lead to one of aiordma's connection below."""
    return found[0].f_code is connect.__code__ and any(
        each.f_code.co_filename.endswith("_connection/connector.py") for each in found[1:]
    )
