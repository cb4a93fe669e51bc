"""The hot path by counts that do not depend on the machine: calls, wake-ups, events, memory; and
that it is fair: however fast a task is woken, the other tasks run.

On a device that takes no time (tests/bench/instant.c), so that nothing but aiordma is counted.
"""

import asyncio
import contextvars
import gc
import os
import resource
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any

import numpy
import pytest

import aiordma
from aiordma import Access, Connection, RemoteMemory
from aiordma._loop.polling import PollingEventLoop
from aiordma.streams import open_connection, start_server
from aiordma.types import MemorySlice
from tests import connections
from tests.bench.instant import instant, prepare
from tests.internals import drain_of, endpoint_of, engine, hub_of

WINDOW = 32
SLEEPS = 300
LEAST_POLLS = 8
"""Of a loop that polls before a sleep, as it looks at the clock after so many."""
WAKES_BY_ITSELF = 1.0
"""Seconds after which a timer wakes a loop that sleeps, without which a failing test would hang."""


@asynccontextmanager
async def connected(
    **options: Any,
) -> AsyncIterator[tuple[Connection, Connection, MemorySlice, RemoteMemory]]:
    """A client, a server, and memory of either, all in one process."""
    prepare()
    keywords: Any = {
        "device": "software",
        "options": aiordma.ConnectionOptions(max_send_wr=64),
        **options,
    }
    async with connections.connected("127.0.0.1", server=keywords, client=keywords) as ends:
        client, server = ends
        remote = server.register(bytearray(64), Access.REMOTE_READ | Access.REMOTE_WRITE)
        await client.write(b"x" * 64, remote.remote())  # from now on READs are known to be fine
        yield client, server, client.register(bytearray(64))[:], remote.remote()


def run(main: Callable[..., Any], **keywords: Any) -> None:
    async def body() -> None:
        async with connected() as (client, _, local, remote):
            with instant(client):
                await main(client, local, remote)

    aiordma.run(body(), **keywords)


class Calls:
    """Python functions entered, and functions of C called, by this thread."""

    def __init__(self) -> None:
        self.python = self.c = 0

    def __enter__(self) -> "Calls":
        gc.collect()
        gc.disable()  # what it finalizes, and calls for it, may be anybody's
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.python -= 1  # this one

    def _count(self, _frame: object, event: str, argument: object) -> None:
        self.python += event == "call"
        self.c += event == "c_call" and argument is not sys.setprofile


# -- counts ---------------------------------------------------------------------------------------


def test_an_awaited_write_is_no_python_call_and_one_crossing() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        steps = drain_of(client)
        await client.post_write(local, remote)
        crossings = steps.crossings
        with Calls() as calls:
            for _ in range(WINDOW):
                await client.post_write(local, remote)
        # The port posts, and finds the completion; nothing of Python's runs.
        assert (calls.python, calls.c) == (0, 0)
        assert steps.crossings == crossings + WINDOW

    run(main)


Call = tuple[str, tuple[Any, ...], dict[str, Any]]
KINDS: dict[str, Callable[[MemorySlice, RemoteMemory], Call]] = {
    "write_immediate": lambda m, r: ("post_write", (m, r), {"immediate": 7}),
    "write_keywords": lambda m, r: ("post_write", (), {"remote": r, "local": m, "fence": True}),
    "write_made_keyword": lambda m, r: ("post_write", (m, r), {"".join(["fen", "ce"]): True}),
    "write_region": lambda m, r: ("post_write", (m.region, r), {"solicited": True}),
    "write_inline": lambda m, r: ("post_write", (bytes(64), r), {"immediate": None}),
    "writev": lambda m, r: ("post_writev", ([m[:8], m[8:]], r), {}),
    "writev_immediate": lambda m, r: ("post_writev", ((m[:0], m), r), {"immediate": 1}),
    "readv": lambda m, r: ("post_readv", ([m[:8], m[8:]], r), {"fence": True}),
    "send_immediate": lambda m, _: ("post_send", (m,), {"immediate": 2**32 - 1}),
    "send_invalidate": lambda m, _: ("post_send", (m,), {"invalidate": 3, "solicited": True}),
    "sendv": lambda m, _: ("post_sendv", ([m] * 4,), {}),
    "sendv_inline": lambda m, _: ("post_sendv", ([b"a", bytearray(3), m[:4]],), {}),
    "send_plain": lambda _, __: ("post_send", (bytes(1000),), {}),
    "sendv_plain": lambda m, _: ("post_sendv", ((bytes(1000), m[:4], bytearray(1)),), {}),
    "send_nothing": lambda _, __: ("post_send", (b"",), {}),
    "compare_swap": lambda m, r: ("post_compare_swap", (m[:8], r[:8], -1, 2**64 - 1), {}),
    "fetch_add": lambda m, r: ("post_fetch_add", (m[:8], r[:8]), {"add": 5}),
}
"""The kinds of posts that the engine makes without Python code, in addition to the plain WRITE."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_post_is_no_python_call(kind: str) -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        name, arguments, keywords = KINDS[kind](local, remote)
        steps, post = drain_of(client), getattr(client, name)
        await post(*arguments, **keywords)  # from now on, the device is known to support it
        crossings = steps.crossings
        with Calls() as calls:
            await post(*arguments, **keywords)
        assert (calls.python, calls.c) == (0, 0)
        assert steps.crossings == crossings + 1
        with Calls() as calls, client.chain() as chain:
            collect = getattr(chain, name)
            before = calls.python
            request = collect(*arguments, **keywords)
            assert calls.python == before
        await request
        assert local.region._users == 0

    run(main)


def test_a_datagram_to_the_last_peer_is_no_python_call() -> None:
    async def main() -> None:
        prepare()
        options: Any = {"device": "software", "receive_buffers": 0}
        async with await aiordma.open_datagram("127.0.0.1", **options) as datagram:
            peer = await datagram.resolve("127.0.0.1", datagram.port)
            part = datagram.register(bytearray(64))[:]
            with instant(datagram):
                posts: list[tuple[Callable[..., Any], Any]] = [
                    (datagram.post_ud_send, part),
                    (datagram.post_ud_send, bytes(1000)),
                    (datagram.post_ud_sendv, [part, part]),
                ]
                for post, memory in posts:
                    await post(memory, peer, immediate=1)
                    with Calls() as calls:
                        request = post(memory, peer, immediate=2)
                        await request
                    assert (calls.python, calls.c) == (0, 0)
                with pytest.raises(ValueError, match="the MTU of"):
                    datagram.post_ud_send(bytes(datagram.mtu + 1), peer)
                handle = datagram._endpoint.handles.get(peer.address)
                assert handle._holders == 1
                handle.retire()  # it is destroyed as soon as nothing holds it
                assert datagram._port.ud_send(part, peer) is None
                handle.release()

    aiordma.run(main())


def test_numbers_and_flags_of_other_types_take_the_general_path() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        steps = drain_of(client)
        number: Any = numpy.uint32(7)
        flag: Any = 1
        for post in (
            partial(client.post_write, local, remote, fence=flag),
            partial(client.post_write, local, remote, immediate=number),
            partial(client.post_writev, iter([local]), remote),
            partial(client.post_fetch_add, local[:8], remote[:8], number),
        ):
            crossings = steps.crossings
            with Calls() as calls:
                request = post()
            assert calls.python >= 1
            assert steps.crossings in (crossings, crossings + 1)
            await request
        wrongly: Any = client.post_write
        for arguments in ((), (local,), (local, remote, 3)):
            with pytest.raises(TypeError, match="post_write"):
                wrongly(*arguments)

    run(main)


def test_a_coroutine_over_it_is_one_python_call_as_well() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        await client.write(local, remote)
        with Calls() as calls:
            for _ in range(WINDOW):
                await client.write(local, remote)
        assert (calls.python, calls.c) == (WINDOW, WINDOW)

    run(main)


def test_a_window_of_awaits_costs_no_wake_up_and_no_event() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        hub = hub_of(client)
        await client.post_write(local, remote)
        wakes, events, polls = hub.poller.wakes, hub.poller.events, hub.poller.polls
        slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(10):
            for request in [client.post_write(local, remote) for _ in range(WINDOW)]:
                await request
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw == slept
        # The loop had slept, with the queue armed: one event is that of the first of them. And the
        # device may have had a packet of the connection's beginning.
        assert hub.poller.wakes < wakes + 5
        # The first await of each window finds the ends of all its requests.
        assert hub.poller.polls < polls + 10 + 5
        assert hub.poller.events < events + 5

    run(main)


def test_nothing_grows_with_the_number_of_requests() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        async def some() -> None:
            for request in [client.post_write(local, remote) for _ in range(WINDOW)]:
                await request
            await client.write(b"inline" * 10 + b"1234", remote)

        for _ in range(20):
            await some()
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(200):
            await some()
        gc.collect()
        assert sys.getallocatedblocks() - before < 100  # 6,600 requests
        assert hub_of(client).in_flight.slots <= 128

    run(main)


def test_an_endpoint_with_its_port_is_collected() -> None:
    """Also where its slots lead back to it, as an error's traceback can."""

    async def body() -> None:
        async with connected() as (client, _, local, remote):
            await client.write(local, remote)
            endpoint = endpoint_of(client)
            seen.append(weakref.ref(endpoint))
            for slots in (endpoint.work.sends.slots, endpoint.work.receives.slots):
                vars(slots)["back"] = endpoint

    seen: list[weakref.ref[Any]] = []
    aiordma.run(body())
    gc.collect()
    assert seen[0]() is None


# -- fairness -------------------------------------------------------------------------------------


def test_awaits_that_never_wait_let_others_have_their_turn() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        turns = 0
        done = False

        async def other() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(4000):
            await client.post_write(local, remote)
        done = True
        await task
        assert turns >= 4000 // 256

    run(main)


def test_drain_in_an_await_wakes_other_tasks() -> None:
    """Both ends in one task's reach: an await finds the end of what somebody else awaits."""

    async def body() -> None:
        async with connected() as (client, server, _, _):

            async def answer() -> None:
                async for message in server:
                    await server.send(message)

            answering = asyncio.create_task(answer())
            async with asyncio.timeout(60):
                for number in range(500):
                    await client.send(str(number).encode())
                    assert await client.receive() == str(number).encode()
            answering.cancel()

    for run_with in (asyncio.run, aiordma.run):
        run_with(body())


def test_a_conversation_without_a_pause_holds_up_neither_timers_nor_descriptors() -> None:
    async def body() -> None:
        async with connected() as (client, server, _, _):
            loop, heard = asyncio.get_running_loop(), set[str]()
            done = asyncio.Event()

            async def answer() -> None:
                async for message in server:
                    await server.send(message)

            async def ask() -> None:
                while len(heard) < 3:
                    await client.send(b"?")
                    await client.receive()
                done.set()

            answering = asyncio.create_task(answer())
            loop.call_later(0.01, heard.add, "timer")
            loop.call_soon(heard.add, "soon")
            await asyncio.to_thread(loop.call_soon_threadsafe, heard.add, "thread")
            async with asyncio.timeout(30):
                await asyncio.gather(ask(), done.wait())
            answering.cancel()

    aiordma.run(body(), spin=1)


# -- waking tasks ---------------------------------------------------------------------------------


class Loop:
    """Keeps what is to be called soon."""

    def __init__(self) -> None:
        self.soon: list[tuple[Any, ...]] = []

    def call_soon(self, *call: Any, context: Any = None) -> None:
        self.soon.append((*call, context))


def test_a_woken_task_runs_in_its_own_context() -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number")

    async def body() -> None:
        async with connected() as (client, server, _, _):

            async def receive(value: int) -> int:
                number.set(value)
                await server.receive()
                return number.get()

            number.set(1)
            task = asyncio.create_task(receive(2))
            await asyncio.sleep(0)
            await client.send(b"x")
            assert await task == 2
            assert number.get() == 1

    for run_with in (asyncio.run, aiordma.run):
        run_with(body())


def test_what_a_stream_receives_needs_no_callback_of_the_loop() -> None:
    """But for the one with which asyncio's reader wakes its task."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(64):
            writer.write(data)
        writer.close()

    async def body() -> None:
        loop: Any = asyncio.get_running_loop()
        call_soon, scheduled = loop.call_soon, list[object]()

        def counted(callback: object, *given: Any, **keywords: Any) -> object:
            scheduled.append(callback)
            return call_soon(callback, *given, **keywords)

        async with await start_server(echo, "127.0.0.1", 0, device="software") as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await open_connection("127.0.0.1", port, device="software")
            loop.call_soon = counted
            for _ in range(100):
                scheduled.clear()
                writer.write(bytes(64))
                await reader.readexactly(64)
            assert len(scheduled) == 2  # one on each side
            writer.close()
            await writer.wait_closed()

    for run_with in (asyncio.run, aiordma.run):
        run_with(body())


def test_a_wait_that_is_woken_twice_or_cancelled_after_it_is_woken_once() -> None:
    loop: Any = Loop()
    waiter = engine.Waiter(loop)
    assert next(waiter) is waiter
    assert waiter._asyncio_future_blocking
    called: list[object] = []
    waiter.add_done_callback(called.append, context=None)
    waiter.wake()
    waiter.wake()
    assert not waiter.cancel()
    # The loop calls the waiter, and that calls back, once: it can be scheduled twice.
    assert [call[:-1] for call in loop.soon] == [(waiter,)]
    for _ in range(2):
        waiter()
    assert called == [waiter]
    assert waiter.result() is None
    with pytest.raises(StopIteration):
        next(waiter)


def test_cancelled_wait_keeps_its_message() -> None:
    loop: Any = Loop()
    waiter = engine.Waiter(loop)
    next(waiter)
    waiter.add_done_callback(print)
    assert waiter.cancel(msg="enough")
    assert waiter.cancelled()
    assert len(loop.soon) == 1
    waiter.wake()
    assert len(loop.soon) == 1
    with pytest.raises(asyncio.CancelledError, match="enough"):
        waiter.result()


def test_an_interrupt_in_a_woken_task_ends_the_loop_and_loses_no_other_wake_up() -> None:
    seen: list[str] = []

    async def body() -> None:
        async with connected() as (client, server, local, _):

            async def interrupted(request: aiordma.WorkRequest) -> None:
                await request
                seen.append("interrupted")
                raise KeyboardInterrupt

            async def other(request: aiordma.WorkRequest) -> None:
                await request
                seen.append("other")

            async def receive() -> None:
                for _ in range(2):
                    await server.receive()

            requests = [client.post_send(local) for _ in range(2)]
            tasks = [
                asyncio.create_task(interrupted(requests[0])),
                asyncio.create_task(other(requests[1])),
                asyncio.create_task(receive()),
            ]
            await asyncio.gather(*tasks)

    with pytest.raises(KeyboardInterrupt):
        aiordma.run(body())
    assert "interrupted" in seen


# -- the loop that polls --------------------------------------------------------------------------


@pytest.mark.parametrize("spin", [-0.001, 1.5])
def test_a_spin_that_makes_no_sense_is_refused(spin: float) -> None:
    with pytest.raises(ValueError, match=r"spin=.* is not in 0\.\.1"):
        aiordma.new_event_loop(spin)


@pytest.mark.parametrize("spin", [0.0, 0.0005])
def test_idle_connection_is_not_polled(spin: float) -> None:
    async def body() -> None:
        async with connected() as (client, _, _, _):
            steps = drain_of(client)
            for _ in range(20):
                await asyncio.sleep(0.02)  # long waits, from which it learns
            rounds = []
            for _ in range(5):
                settled = steps.polls
                for _ in range(10):
                    await asyncio.sleep(0.02)
                rounds.append(steps.polls - settled)
            # A look before each sleep; polling would make it thousands. On a busy machine a late
            # timer can look like a short wait, and one wait polls: some rounds are without.
            assert min(rounds) < 200, rounds

    aiordma.run(body(), spin=spin)


@contextmanager
def on_a_busy_core() -> Iterator[None]:
    """Run on one core, beside a process that computes there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
            try:
                yield
            finally:
                process.kill()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="on one core, no loop polls")
def test_polling_gives_way_on_a_busy_core() -> None:
    async def body() -> None:
        async with connected() as (client, _, _, _):
            loop, steps = asyncio.get_running_loop(), drain_of(client)
            assert isinstance(loop, PollingEventLoop)
            polled = 0
            with on_a_busy_core():
                for _ in range(SLEEPS):
                    loop._spinner.confidence = 8  # as if the waits before had been short
                    before = steps.polls
                    await asyncio.sleep(0.001)
                    polled += steps.polls - before >= LEAST_POLLS
            # One poll that loses the core stops polling for as long as many of these sleeps.
            assert polled < SLEEPS / 2

    aiordma.run(body())


def test_what_is_found_by_polling_needs_no_event() -> None:
    async def body() -> None:
        async with connected() as (client, server, _, _):
            steps = drain_of(client)

            async def answer() -> None:
                async for message in server:
                    await server.send(message)

            answering = asyncio.create_task(answer())
            for _ in range(50):
                await client.send(b"?")
                await client.receive()
            before = steps.events
            for _ in range(200):
                await client.send(b"?")
                await client.receive()
            assert steps.events - before < 100  # each round trip would have four
            answering.cancel()

    aiordma.run(body(), spin=1)


ACTS: dict[str, Callable[[asyncio.AbstractEventLoop, int], object]] = {
    "stop": lambda loop, _: loop.stop(),
    "call_soon": lambda loop, _: loop.call_soon(loop.stop),
    "call_soon_threadsafe": lambda loop, _: loop.call_soon_threadsafe(loop.stop),
    "call_later": lambda loop, _: loop.call_later(0.001, loop.stop),
    "add_reader": lambda loop, readable: loop.add_reader(readable, loop.stop),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_loop_heeds_a_task_woken_while_it_polls(
    act: Callable[[asyncio.AbstractEventLoop, int], object],
) -> None:
    """The selector runs the task, and has to return to the loop."""
    readable, written = socket.socketpair()
    written.send(b"!")

    async def wait(server: Connection) -> float:
        await server.receive()
        act(asyncio.get_running_loop(), readable.fileno())
        return time.monotonic()

    async def body() -> float:
        async with connected() as (client, server, _, _):
            waiting = asyncio.create_task(wait(server))
            await asyncio.sleep(0.01)
            client.post_send(b"?")
            await asyncio.sleep(WAKES_BY_ITSELF)
            return await waiting

    loop = aiordma.new_event_loop()
    with closing(loop), closing(readable), closing(written):
        task = loop.create_task(body())
        task.add_done_callback(lambda _: loop.stop())  # an error would leave it running
        loop.run_forever()
        stopped = time.monotonic()
        loop.remove_reader(readable)
        assert stopped - loop.run_until_complete(task) < WAKES_BY_ITSELF / 2
