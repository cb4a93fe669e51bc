"""SIGINT while a view's block is replaced, because the program still uses a part of the view: no
receive is lost."""

import pytest

from tests.unit.child import run_child

VIEWS = """
import asyncio, faulthandler, signal, sys
import aiordma, anyio
from aiordma.testing import connected_pair
from tests.internals import endpoint_of

faulthandler.dump_traceback_later(60, exit=True)  # what hangs fails, and says where

interrupts = []

async def leave(server):
    # Returns a part of the view.
    sent = []
    def trace(frame, event, argument):
        if frame.f_code.co_name == WHERE and not sent:
            sent.append(1)
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
    try:
        async with server.receive_view() as view:
            part = memoryview(view)
            sys.settrace(trace)
        await anyio.sleep(0.05)
    except KeyboardInterrupt:
        interrupts.append("of the task")
    assert sent
    return part

async def main():
    async with connected_pair(receive_buffers=1) as (client, server):
        pool = endpoint_of(server).pool
        before = pool.leased
        await client.send(b"first")
        part = await leave(server)
        await client.send(b"second")
        with anyio.fail_after(5):
            assert await server.receive() == b"second"
        assert bytes(part) == b"first"
        part.release()
        del part
        with anyio.fail_after(5):
            while pool.leased > before:
                await anyio.sleep(0.01)
        for text in (b"third", b"fourth"):
            await client.send(text)
            with anyio.fail_after(5):
                assert await server.receive() == text

# Not by `asyncio.run`, whose handler of SIGINT cancels the main task: here it raises at once.
if LOOP == "trio":
    import trio
    trio.run(main)
else:
    if LOOP == "uvloop":
        import uvloop as module
    else:
        module = {"asyncio": asyncio, "polling": aiordma}[LOOP]
    loop = module.new_event_loop()
    task = loop.create_task(main())
    while not task.done():
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            interrupts.append("of the loop")
    task.result()
assert interrupts
"""


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "polling", "trio"])
@pytest.mark.parametrize("where", ["release_later", "replace"])
def test_interrupted_replacement_of_a_view_loses_no_receive(
    engine: str, loop: str, where: str
) -> None:
    run_child(f"LOOP, WHERE = {loop!r}, {where!r}\n", VIEWS, AIORDMA_BACKEND=engine)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "polling", "trio"])
def test_interrupt_as_the_end_of_a_view_begins_loses_no_receive(loop: str) -> None:
    """With the backend in C, the end begins in C, where no signal is handled."""
    run_child(f"LOOP, WHERE = {loop!r}, '__aexit__'\n", VIEWS, AIORDMA_BACKEND="python")


ENTERED = """
import asyncio, faulthandler, signal, sys
import aiordma, anyio
from aiordma.testing import connected_pair

faulthandler.dump_traceback_later(60, exit=True)

sent = []

def trace(frame, event, argument):
    # Of a coroutine, the waits are returns, too.
    ends = event == "return" and isinstance(argument, memoryview)
    if frame.f_code.co_name == "enter" and ends and not sent:
        sys.settrace(None)
        sent.append(1)
        signal.raise_signal(signal.SIGINT)
    return trace

async def enter(server):
    sys.settrace(trace)
    try:
        async with server.receive_view():
            await anyio.sleep(0.05)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)

async def main():
    async with connected_pair(receive_buffers=2) as (client, server):
        async def send():
            await anyio.sleep(0.02)
            await client.send(b"first")

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            await enter(server)  # trio interrupts this task, its main one
        messages = server._messages
        assert (messages.receives.posted, messages.queue.views) == (2, 0)

if LOOP == "trio":
    import trio
    trio.run(main)
else:
    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    while not task.done():
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            pass
    task.result()
assert sent
"""


@pytest.mark.parametrize(
    ("engine", "loop"), [("c", "trio"), ("python", "trio"), ("python", "asyncio")]
)
def test_interrupt_as_a_view_is_entered_loses_no_receive(engine: str, loop: str) -> None:
    """With the backend in C, asyncio's tasks take a view in C, where no signal is handled."""
    run_child(f"LOOP = {loop!r}\n", ENTERED, AIORDMA_BACKEND=engine)
