"""A forked child: what its parent opened is an error there, and stays whole for the parent; what
the child opens itself works."""

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import streams, verbs
from tests.device.players import both_ways, connected, one_loop
from tests.device.transports import echo
from tests.devices import ADDRESS, BUILT_IN, DEVICE, DeviceUnderTest
from tests.forked import python
from tests.internals import find_gid
from tests.unit.sources import ROOT

pytestmark = pytest.mark.slow

SECONDS = 120  # a spawned child imports everything again, in the VM thirteen times slower


def in_child(function: Callable[[], object]) -> str:
    """Run it in a forked child; "" if all went well there, else what went wrong."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(SECONDS)  # it never outlives its test
            function()
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-3000:])
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or (f"status {status}" if status else "")


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(aiordma.ForkError, match=r"forked child.*open it anew"):
        call()


def step(made: Any) -> object:
    """Run a coroutine as far as it goes without a loop, which is where it raises."""
    try:
        return made.send(None)
    finally:
        made.close()


def echo_once() -> None:
    """All that a program does, from nothing."""

    async def main() -> None:
        async with connected() as (one, other):
            assert one.device_name == DEVICE
            await both_ways(one, other)

    anyio.run(main)


@pytest.mark.promise("Fork safety")
@pytest.mark.anyio
@one_loop
async def test_use_in_a_forked_child_raises_fork_error() -> None:
    async with await aiordma.listen(ADDRESS) as listener, connected() as (one, other):
        memory = one.register(bytearray(b"the parent's"), aiordma.Access.REMOTE_READ)
        receive = other._messages.receive()

        def use() -> None:
            refused(lambda: one.post_send(b"hello"))
            refused(lambda: one.post_send(memory))
            refused(lambda: one.register(bytearray(8)))
            refused(lambda: step(one.send(b"hello")))
            refused(lambda: step(one.receive()))
            refused(lambda: step(listener.accept()))
            refused(lambda: one.chain())
            refused(memory.reregister)
            # Closing, and being collected, is nothing to the parent's.
            memory.close()
            step_to_end(one.aclose())
            step_to_end(listener.aclose())
            gc.collect()

        assert in_child(use) == ""
        receive.close()
        await both_ways(one, other)
        assert await other.read_bytes(memory.remote()) == b"the parent's"
        port = listener.port
        async with anyio.create_task_group() as group:
            group.start_soon(accept_and_close, listener)
            async with await aiordma.connect(ADDRESS, port):
                pass


class Leaving(Exception):
    """What a child raises to leave its parent's event loop."""


async def exits(_: aiordma.WorkRequest) -> None:
    sys.exit(0)


async def raises(_: aiordma.WorkRequest) -> None:
    raise Leaving


async def awaits(posted: aiordma.WorkRequest) -> None:
    with pytest.raises(aiordma.ForkError, match=r"forked child.*open it anew"):
        await posted


async def goes_on(_: aiordma.WorkRequest) -> None:
    for _turn in range(100):
        await asyncio.sleep(0)  # asyncio has no timers in such a child


async def post_eight(one: aiordma.Connection) -> list[aiordma.WorkRequest]:
    """Post messages, whose completions and arrivals then wait: no loop takes them."""
    posted = [one.post_send(b"%d" % number) for number in range(8)]
    time.sleep(0.5)  # noqa: ASYNC251 - on the loop's thread, which must not run
    return posted


def wait_for_child(pid: int) -> None:
    """Wait on the event loop's thread: the loop must not run."""
    os.waitpid(pid, 0)


async def nothing_was_taken(
    posted: list[aiordma.WorkRequest], one: aiordma.Connection, other: aiordma.Connection
) -> None:
    for request in posted:
        await asyncio.wait_for(request, SECONDS)
    for number in range(8):
        assert await asyncio.wait_for(other.receive(), SECONDS) == b"%d" % number
    await both_ways(one, other)
    await one.aclose()
    await other.aclose()


@asynccontextmanager
async def beating() -> AsyncIterator[None]:
    """Wake the loop again and again. It is asyncio's own fault that this is needed: a child that
    closes an inherited loop takes the descriptor by which threads wake it out of the epoll that the
    parent shares. Timers still wake it."""

    async def beats() -> None:
        while True:
            await asyncio.sleep(0.01)

    beat = asyncio.create_task(beats())
    try:
        yield
    finally:
        beat.cancel()


@pytest.mark.promise("Fork safety")
@pytest.mark.parametrize("child", [exits, raises, awaits, goes_on])
def test_child_leaves_completions_to_its_parent(
    child: Callable[[aiordma.WorkRequest], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """A child that ends the loop in whose task it was forked, by `asyncio.run`."""
    reading, writing = os.pipe()
    pid = -1

    async def main() -> None:
        nonlocal pid
        async with AsyncExitStack() as until_closed, connected() as (one, other):
            posted = await post_eight(one)
            pid = os.fork()
            if not pid:
                signal.alarm(SECONDS)
                await child(posted[0])
                return
            wait_for_child(pid)
            await until_closed.enter_async_context(beating())
            await nothing_was_taken(posted, one, other)

    try:
        asyncio.run(main())
    except (SystemExit, Leaving):
        if pid:
            raise
    except BaseException:
        if pid:
            raise
        os.write(writing, traceback.format_exc().encode()[-3000:])
    finally:
        if not pid:
            gc.collect()
            os.write(writing, caplog.text.encode()[-3000:])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == ""


@pytest.mark.promise("Fork safety")
@pytest.mark.parametrize("how", ["collects", "closes", "runs"])
def test_inherited_loop_takes_nothing(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def opened() -> tuple[Any, ...]:
        context = connected()
        one, other = await context.__aenter__()
        return context, await post_eight(one), one, other

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(opened())

    def use() -> None:
        nonlocal loop, kept
        if how == "closes":
            loop.close()
        elif how == "runs":
            loop.run_until_complete(asyncio.sleep(0.1))
        else:
            del loop, kept
        gc.collect()
        assert caplog.text == ""

    async def check_and_close() -> None:
        context, *rest = kept
        async with beating():
            await nothing_was_taken(*rest)
            await context.__aexit__(None, None, None)

    assert in_child(use) == ""
    with closing(loop):
        loop.run_until_complete(check_and_close())


def step_to_end(made: object) -> None:
    with pytest.raises(StopIteration):
        step(made)


async def accept_and_close(listener: aiordma.Listener) -> None:
    async with await listener.accept():
        pass


@pytest.mark.promise("Fork safety")
@pytest.mark.anyio
@one_loop
async def test_transports_and_servers_of_asyncio_are_the_parents_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = await streams.start_server(echo, ADDRESS, 0)
    address = server.sockets[0].getsockname()
    reader, writer = await streams.open_connection(*address)
    transport: Any = writer.transport

    def use() -> None:
        refused(lambda: writer.write(b"hello"))
        refused(lambda: writer.write(bytes(1 << 20)))
        refused(lambda: writer.writelines([b"hello"]))
        refused(writer.write_eof)
        transport.pause_reading()
        transport.resume_reading()
        for close in (transport.close, transport.abort, server.close_clients, server.abort_clients):
            close()
        assert not server.is_serving()
        refused(lambda: step(server.start_serving()))
        refused(lambda: step(server.serve_forever()))
        server.close()
        step_to_end(server.wait_closed())
        gc.collect()
        assert caplog.text == ""

    def forget() -> None:
        nonlocal server, reader, writer, transport
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del server, reader, writer, transport
            gc.collect()

    writer.write(b"before")  # both sides have sent something when the process is forked
    assert await reader.readexactly(6) == b"before"
    assert in_child(use) == ""
    assert in_child(forget) == ""
    writer.write(b"after")
    assert await reader.readexactly(5) == b"after"
    other_reader, other = await streams.open_connection(*address)
    other.write(b"hello")
    assert await other_reader.readexactly(5) == b"hello"
    for each in (writer, other):
        each.close()
        await each.wait_closed()
    server.close()
    await server.wait_closed()


@pytest.mark.natively
@pytest.mark.parametrize("state", ["serving", "closed", "not started"])
def test_an_inherited_loop_logs_that_its_servers_do_not_serve(
    state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that listens, forks, and runs its loop in the child would answer nobody."""
    with closing(streams.new_event_loop()) as loop:
        starting = asyncio.start_server(echo, ADDRESS, 0, start_serving=state != "not started")
        server = loop.run_until_complete(starting)
        assert server.is_serving() is (state != "not started")
        assert caplog.text == ""

        def use() -> None:
            if state == "closed":
                server.close()
            for _ in range(2):
                loop.run_until_complete(asyncio.sleep(0))
            texts = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
            assert len(texts) == (state == "serving")
            for text in texts:
                assert re.search(r"serves no streams: <StreamServer .*forked child.*open it", text)

        assert in_child(use) == ""
        server.close()
        loop.run_until_complete(server.wait_closed())


@pytest.mark.promise("Fork safety")
def test_synchronous_objects_are_the_parents_too() -> None:
    with (
        aiordma.verbs.Device(DEVICE).open() as context,
        context.alloc_pd() as domain,
        aiordma.verbs.CompletionQueue(context, 16) as queue,
        aiordma.MemoryRegion(domain, bytearray(8)) as region,
        aiordma.verbs.EventChannel(DEVICE) as channel,
        aiordma.verbs.Identifier(channel) as identifier,
        aiordma.verbs.Identifier(channel) as other,
    ):
        identifier.resolve_address(ADDRESS, 7471, None, 5000)
        select.select([channel.fd], [], [])
        events = channel.events()
        assert next(events).key == identifier.key
        other.resolve_address(ADDRESS, 7471, None, 5000)

        def use() -> None:
            refused(lambda: next(channel.events()))
            refused(lambda: next(events))
            refused(lambda: identifier.resolve_route(1000))
            refused(context.query_port)
            refused(context.alloc_pd)
            refused(queue.poll)
            refused(lambda: aiordma.MemoryRegion(domain, bytearray(8)))
            region.close()
            context.close()
            channel.close()

        select.select([channel.fd], [], [])
        assert in_child(use) == ""
        assert next(events).key == other.key
        assert queue.poll() == []
        with context.alloc_pd():
            pass


WITHOUT_DEVICE = {"address", "capacity", "close", "domain", "kind", "length", "lkey", "view"}
"""What a region and a queue pair know, and a Context's kind, which is "software" without a query. A
child's close leaves the parent's object alone."""


def each_call(made: verbs.Resource) -> list[str]:
    """The names of what a program can call on an object, and of its properties."""
    names: list[str] = []
    for owner in type(made).__mro__:
        if owner is verbs.Resource:
            break
        names += (name for name in vars(owner) if not name.startswith("_"))
    return [name for name in dict.fromkeys(names) if name not in WITHOUT_DEVICE]


@pytest.mark.natively
@pytest.mark.promise("Fork safety")
def test_every_call_on_a_verbs_object_raises_fork_error() -> None:
    def opened(made: Any) -> Any:
        return stack.enter_context(made)

    with ExitStack() as stack:
        context = opened(verbs.Device(DEVICE).open())
        domain = opened(context.alloc_pd())
        channel = opened(verbs.CompletionChannel(context))
        queue = opened(verbs.CompletionQueue(context, 16, channel, timestamps=True))
        region = opened(aiordma.MemoryRegion(domain, bytearray(8), aiordma.Access.MW_BIND))
        window = opened(verbs.MemoryWindow(domain, verbs.MemoryWindowType.TYPE_1))
        shared = opened(verbs.RawSharedReceiveQueue(domain, 16))
        pair = opened(verbs.QueuePair.create(domain, queue, queue))
        events = opened(verbs.EventChannel(DEVICE))
        identifier = opened(verbs.Identifier(events))
        vector = verbs.AddressVector(gid=context.query_gid())
        handle = opened(verbs.AddressHandle(domain, vector))
        size, parameters, ece = verbs.Capacity(), verbs.ConnectionParameters(), verbs.Ece(1, 1)
        state, send = verbs.QueuePairState.INIT, verbs.WorkRequestOpcode.SEND
        completion = aiordma.verbs.WorkCompletion._make([0] * 14)
        group = bytes(16)
        # Arguments of the calls that need some.
        arguments: dict[Any, dict[str, tuple[Any, ...]]] = {
            queue: {"resize": (32,), "moderate": (1, 1)},
            region: {"reregister": (aiordma.Access.LOCAL_WRITE,)},
            pair: {
                "create": (domain, queue, queue),
                "modify": (state,),
                "query_data_in_order": (send,),
                "post_send": (1, []),
                "post_recv": (1, []),
                "post_send_chain": ([verbs.SendWork("SEND", send, b"", 0)], [1], [0]),
                "bind_window": (1, window, region[:], 0, 0),
                "attach_multicast": (group,),
                "detach_multicast": (group,),
            },
            shared: {"post_srq_recv": ([(1, [])],)},
            identifier: {
                "set_option": (1, b"1"),
                "set_ack_timeout": (1,),
                "set_tos": (1,),
                "set_reuse_address": (True,),
                "set_ipv6_only": (True,),
                "migrate": (events,),
                "bind": (ADDRESS, 0),
                "listen": (1,),
                "resolve_address": (ADDRESS, 1, None, 1),
                "resolve_route": (1,),
                "create_queue_pair": (domain, queue, queue, size),
                "connect": (parameters,),
                "accept": (parameters,),
                "init_qp_attr": (state,),
                "set_local_ece": (ece,),
                "join_multicast": ("239.1.1.1",),
                "leave_multicast": ("239.1.1.1",),
            },
        }

        def call(made: verbs.Resource, name: str) -> object:
            found = getattr(made, name)
            result = found(*arguments.get(made, {}).get(name, ())) if callable(found) else found
            return next(result) if isinstance(result, Iterator) else result

        def use() -> None:
            objects = (context, domain, channel, queue, region, window, shared, pair, events)
            for made in (*objects, identifier, handle):
                refused(made.__enter__)
                for name in each_call(made):
                    refused(partial(call, made, name))
            refused(lambda: setattr(window, "rkey", 1))
            refused(lambda: region[:].advise(verbs.MemoryAdvice.PREFETCH))
            refused(lambda: verbs.AddressVector.of_sender(context, 1, completion, bytes(40)))
            refused(lambda: find_gid(context, 1, ADDRESS))
            for make in (verbs.CompletionChannel, verbs.ProtectionDomain):
                refused(partial(make, context))
            refused(lambda: verbs.CompletionQueue(context, 16))
            refused(lambda: verbs.MemoryWindow(domain))
            refused(lambda: verbs.RawSharedReceiveQueue(domain, 16))
            refused(lambda: verbs.AddressHandle(domain, vector))
            refused(lambda: verbs.DmabufRegion(domain, 0, 8))
            refused(lambda: verbs.Identifier(events))
            for made in (*objects, identifier, handle):
                made.close()

        before = aiordma.testing.software_objects()
        assert in_child(use) == ""
        assert aiordma.testing.software_objects() == before
        pair.modify(state, port=1, pkey_index=0, access=0)
        pair.post_recv(1, [])


@pytest.mark.promise("Fork safety")
@pytest.mark.capability("anew_in_a_child")
def test_a_child_opens_anew_what_it_needs() -> None:
    echo_once()
    assert in_child(echo_once) == ""
    echo_once()


@pytest.mark.promise("Fork safety")
@pytest.mark.capability("anew_in_a_child")
@pytest.mark.anyio
@one_loop
async def test_a_child_opens_anew_while_its_parent_is_connected() -> None:
    async with connected() as (one, other):
        failure = await anyio.to_thread.run_sync(in_child, echo_once)
        assert failure == ""
        await both_ways(one, other)


@pytest.mark.promise("Fork safety")
@pytest.mark.capability("librdmacm")
def test_fork_error_names_the_librdmacm_workaround(
    device: DeviceUnderTest,
) -> None:
    def use() -> None:
        for call in (
            lambda: anyio.run(aiordma.listen, ADDRESS),
            lambda: anyio.run(lambda: aiordma.connect(ADDRESS, 1, device=device.name)),
            lambda: aiordma.verbs.EventChannel(device.name),
            lambda: anyio.run(aiordma.devices),
        ):
            with pytest.raises(aiordma.ForkError, match=r'spawn.*device="software"'):
                call()
        # Which works, and so does what does without librdmacm.
        with aiordma.verbs.Device(device.name).open() as context, context.alloc_pd():
            pass
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AIORDMA_DEVICE", "software")
            anyio.run(meet_on_software)

    assert in_child(use) == ""


async def meet_on_software() -> None:
    async with connected() as (one, other):
        assert one.device_name == other.device_name == "software"
        await both_ways(one, other)


def answer(pipe: Pipe) -> None:
    signal.alarm(SECONDS)
    echo_once()
    pipe.send("it works")


@pytest.mark.promise("Fork safety")
@pytest.mark.parametrize(
    "method",
    [
        "spawn",
        pytest.param("forkserver", marks=pytest.mark.natively),
        pytest.param("fork", marks=pytest.mark.capability("anew_in_a_child")),
    ],
)
def test_multiprocessing_starts_children_that_work(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=answer, args=(theirs,))
    child.start()
    try:
        assert ours.poll(SECONDS)
        assert ours.recv() == "it works"
        child.join(SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
        child.close()
        ours.close()
        theirs.close()


METHODS = ("fork", "spawn", "forkserver") if BUILT_IN else ("fork",)
"""In the virtual machine, the children of the others take ten seconds to import everything. The
test above starts some."""


@pytest.mark.promise("Fork safety")
@pytest.mark.parametrize("method", METHODS)
def test_pools_of_processes_work_beside_live_connections(
    method: str, device: DeviceUnderTest
) -> None:
    can_connect = method != "fork" or not device.lacks("anew_in_a_child")
    arguments = [ADDRESS, method, *(["connect"] if can_connect else [])]
    done = subprocess.run(
        [*python(), "-m", "tests.device.pool_program", *arguments],
        cwd=ROOT,
        env={**os.environ, "AIORDMA_DEVICE": device.name},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.natively
@pytest.mark.anyio
@one_loop
async def test_objects_of_a_process_cannot_be_pickled_or_copied() -> None:
    async with await aiordma.listen(ADDRESS) as listener, connected() as (one, _):
        for each in (listener, one, one.chain()):
            for call in (pickle.dumps, copy.copy):
                with pytest.raises(
                    TypeError, match=r"<.*> cannot be pickled or copied: it belongs"
                ):
                    call(each)
