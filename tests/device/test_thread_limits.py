"""A thread that cannot be started (a limit of threads or of memory) fails the call that wanted it,
and nothing else: nothing hangs, nothing stays half done, and what closes is closed."""

import operator
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import REMOTE, both_ways, connected, reactor_in_use, until
from tests.devices import ADDRESS, BUILT_IN, provider_under_test
from tests.internals import ACCEPTS, CREATES, PEERS, threads

pytestmark = pytest.mark.slow

HUNG_SECONDS = 30.0


class Starts:
    """Counts the worker threads that are started, and fails those that the test chooses."""

    def __init__(self) -> None:
        self.count = 0
        self.fails: Callable[[int], bool] = lambda number: False
        self.failed = 0

    def make(self, **arguments: Any) -> Any:
        """What stands in for Thread."""
        thread = Thread(**arguments)
        start = thread.start

        def start_or_fail() -> None:
            number, self.count = self.count, self.count + 1
            if self.fails(number):
                self.failed += 1
                raise RuntimeError("can't start new thread")
            start()

        thread.start = start_or_fail  # type: ignore[method-assign]
        return thread


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Every call into the driver starts a thread of its own, which the test can fail, but for
    those that destroy: they have a worker since the device was opened."""
    starts = Starts()
    monkeypatch.setattr(threads, "Thread", starts.make)
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(provider_under_test(), "blocks", True)  # also natively
    forget_workers()
    return starts


def forget_workers() -> None:
    """Let the next call start a thread, also where the one of an earlier call has not ended yet."""
    for lane in (PEERS, CREATES, ACCEPTS):
        lane.reset()


async def use_everything() -> None:
    """Listen, connect, accept, reject, register, transfer, disconnect and close."""
    async with connected() as (client, server):
        await both_ways(client, server)
        region = await client.register_in_thread(bytearray(64), REMOTE)
        await server.read(bytearray(64), region.remote())
        await client.send(bytes(2 * 1024 * 1024)[: client.options.receive_size])
        await server.receive()
        await client.aclose()
        with pytest.raises(anyio.EndOfStream):
            await server.receive()


async def bounded(function: Callable[[], Any]) -> None:
    with anyio.fail_after(HUNG_SECONDS):
        await function()


def errors_of(error: BaseException) -> list[BaseException]:
    """The errors in an exception group, or the one that is none."""
    parts = getattr(error, "exceptions", None)
    return [error] if parts is None else [leaf for part in parts for leaf in errors_of(part)]


async def check_outcome() -> None:
    """Use everything: it succeeds, or fails as a call whose thread could not be started."""
    try:
        await bounded(use_everything)
    except BaseException as error:
        leaves = errors_of(error)
        assert all(isinstance(leaf, aiordma.RdmaError) for leaf in leaves), leaves
        # One end's call names the limit; the other end is rejected or disconnected.
        assert any("pthread_create" in str(leaf) for leaf in leaves), leaves
    await bounded(let_go)


async def let_go() -> None:
    await until(lambda: not reactor_in_use())


@pytest.mark.anyio
async def test_one_failed_thread_start_fails_one_call(starts: Starts) -> None:
    await bounded(use_everything)
    await bounded(let_go)
    total = starts.count
    assert total > 3
    for at in range(total):
        starts.count, starts.fails = 0, partial(operator.eq, at)
        await check_outcome()
    assert starts.failed > total // 3  # the others were not reached: a worker was still there
    starts.fails = lambda number: False
    await bounded(use_everything)


@pytest.mark.promise("Closing leaves nothing open")
@pytest.mark.anyio
async def test_no_more_threads_still_closes_everything(starts: Starts) -> None:
    await bounded(use_everything)
    await bounded(let_go)
    total = starts.count
    for first in range(0, total, 3):
        starts.count, starts.fails = 0, partial(operator.le, first)
        await check_outcome()
    starts.fails = lambda number: False
    await bounded(use_everything)


@pytest.mark.anyio
async def test_close_without_threads_ends(starts: Starts) -> None:
    async with connected() as (client, server):
        forget_workers()
        starts.fails = lambda number: True
        await bounded(client.aclose)
        await bounded(server.aclose)
    await bounded(let_go)


@pytest.mark.anyio
async def test_connect_names_the_thread_limit(starts: Starts) -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        forget_workers()
        starts.fails = lambda number: True
        with pytest.raises(aiordma.RdmaConnectionError, match=r"thread.*ulimit -u"):
            await aiordma.connect(ADDRESS, listener.port)
        starts.fails = lambda number: False


MEMORY_LIMIT = """
import asyncio, resource, sys, threading
import aiordma
from aiordma._loop import threads

threads.IDLE_SECONDS = 0.0

def workers():
    return [thread for thread in threading.enumerate() if thread.name == threads.THREAD_NAME]

def use_up_threads():
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
    try:
        while True:  # the C library keeps the stacks of threads that have ended
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    except RuntimeError as error:
        print(error, flush=True)

async def main():
    async with await aiordma.listen(sys.argv[1], 0) as listener:
        accepting = asyncio.ensure_future(listener.accept())
        client = await aiordma.connect(sys.argv[1], listener.port)
        server = await accepting
        while workers():
            await asyncio.sleep(0.01)
        use_up_threads()
        try:
            await aiordma.connect("localhost", listener.port)  # looks the name up in a thread
        except aiordma.RdmaError as error:
            print("connect:", error, flush=True)
        await client.aclose()
        await server.aclose()
        print("closed", flush=True)

asyncio.run(main())
print("ended")
"""


@pytest.mark.promise("Closing leaves nothing open")
@pytest.mark.skipif(not BUILT_IN, reason="the limit is the process's: one device will do")
def test_real_memory_limit_still_closes_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_LIMIT, ADDRESS],
        capture_output=True,
        text=True,
        timeout=HUNG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        "can't start new thread\nconnect: .*pthread_create.*\nclosed\nended\n", done.stdout
    )
