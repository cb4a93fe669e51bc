"""What belongs to an event loop is used there: from elsewhere it is refused, with both named, and
closed as far as that goes without its loop."""

import asyncio
import gc
import inspect
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.from_thread
import pytest

import aiordma
from tests.conftest import BACKENDS
from tests.device.own_loops import OWN_LOOPS, closing_fails, objects, open_pair, without_warnings
from tests.device.players import OWN_RECEIVES, both_ways, connected
from tests.devices import ADDRESS, DEVICE
from tests.internals import calls_under_way

pytestmark = pytest.mark.one_kernel_device

NAMES_BOTH = (
    r"belongs to the event loop .*'MainThread'.*and the event loop .*'elsewhere'.* runs here"
)
NAMES_THREAD = r"belongs to the event loop .*'MainThread'.*this is thread 'elsewhere'.*{}"


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a thread; return its result, or raise what it raised."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="elsewhere")
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it hangs"
    for error in errors:
        raise error
    return results[0]


async def elsewhere(function: Callable[[], Any]) -> Any:
    """`in_a_thread`, while this event loop goes on."""
    return await anyio.to_thread.run_sync(in_a_thread, function)


# -- another thread -------------------------------------------------------------------------------

POSTS: dict[str, Callable[[aiordma.Connection, aiordma.MemoryRegion, Any], object]] = {
    "send": lambda c, region, remote: c.post_send(b"inline"),
    "send of a region": lambda c, region, remote: c.post_send(region),
    "sendv": lambda c, region, remote: c.post_sendv([b"one", b"two"]),
    "recv": lambda c, region, remote: c.post_recv(region),
    "read": lambda c, region, remote: c.post_read(region, remote),
    "write": lambda c, region, remote: c.post_write(region, remote),
    "register": lambda c, region, remote: c.register(bytearray(8)),
}


@pytest.mark.promise("An object belongs to its event loop")
@pytest.mark.anyio
@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
async def test_a_post_from_another_thread_is_refused(
    post: Callable[[aiordma.Connection, aiordma.MemoryRegion, Any], object],
    anyio_backend: tuple[str, Any],
) -> None:
    async with connected(client=OWN_RECEIVES) as (client, server):
        region = client.register(bytearray(8))
        remote = server.register(bytearray(8), aiordma.Access.REMOTE_WRITE).remote()
        way = "trio.from_thread.run" if anyio_backend[0] == "trio" else "call_soon_threadsafe"
        with pytest.raises(aiordma.EventLoopError, match=NAMES_THREAD.format(way)):
            await elsewhere(lambda: post(client, region, remote))
        await client.send(b"works")
        assert await server.receive() == b"works"


@pytest.mark.anyio
async def test_a_chain_from_another_thread_is_refused() -> None:
    async with connected() as (client, server):

        def post() -> None:
            with client.chain() as chain:
                chain.post_send(b"one")
                chain.post_send(b"two")

        with pytest.raises(aiordma.EventLoopError, match=NAMES_THREAD.format("from_thread")):
            await elsewhere(post)
        await both_ways(client, server)


Use = Callable[[aiordma.Connection, Any, Any, Any], Awaitable[object]]
USES: dict[str, Use] = {
    "__aexit__": lambda c, region, remote, window: c.__aexit__(None, None, None),
    "__anext__": lambda c, region, remote, window: c.__anext__(),
    "aclose": lambda c, region, remote, window: c.aclose(),
    "bind": lambda c, region, remote, window: c.bind(region[:], aiordma.Access.REMOTE_READ),
    "compare_swap": lambda c, region, remote, window: c.compare_swap(remote, 0, 1),
    "drain": lambda c, region, remote, window: c.drain(),
    "ended": lambda c, region, remote, window: c.ended(),
    "establish": lambda c, region, remote, window: c.establish(),
    "fetch_add": lambda c, region, remote, window: c.fetch_add(remote, 1),
    "grant": lambda c, region, remote, window: c.grant(bytearray(8), aiordma.Access.REMOTE_READ),
    "open_window": lambda c, region, remote, window: c.open_window(),
    "read": lambda c, region, remote, window: c.read(region, remote),
    "read_blocks": lambda c, region, remote, window: c.read_blocks([(region[:], remote)]),
    "read_bytes": lambda c, region, remote, window: c.read_bytes(remote),
    "readv": lambda c, region, remote, window: c.readv([region], remote),
    "receive": lambda c, region, remote, window: c.receive(),
    "receive_message": lambda c, region, remote, window: c.receive_message(),
    "register_in_thread": lambda c, region, remote, window: c.register_in_thread(bytearray(8)),
    "revoke": lambda c, region, remote, window: c.revoke(window),
    "send": lambda c, region, remote, window: c.send(b"x"),
    "send of much": lambda c, region, remote, window: c.send(bytes(8192)),
    "sendv": lambda c, region, remote, window: c.sendv([b"x", b"y"]),
    "write": lambda c, region, remote, window: c.write(region, remote),
    "writev": lambda c, region, remote, window: c.writev([region], remote),
}
NEEDS_FEATURE = {
    "bind": "memory_windows",
    "compare_swap": "atomics",
    "fetch_add": "atomics",
    "open_window": "memory_windows",
    "revoke": "memory_windows",
}


@pytest.mark.promise("An object belongs to its event loop")
def test_every_coroutine_is_tried_elsewhere() -> None:
    methods = {
        name
        for name in dir(aiordma.Connection)
        if inspect.iscoroutinefunction(getattr(aiordma.Connection, name))
        and (not name.startswith("_") or name.startswith("__"))
    }
    # The first only returns the connection, the second only raises an error of its own.
    assert methods - {"__aenter__", "send_eof"} <= set(USES)


@pytest.mark.promise("An object belongs to its event loop")
@pytest.mark.anyio
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            use,
            id=name,
            marks=[pytest.mark.capability(NEEDS_FEATURE[name])] if name in NEEDS_FEATURE else [],
        )
        for name, use in USES.items()
    ],
)
async def test_another_threads_event_loop_is_refused(
    use: Use, anyio_backend: tuple[str, Any], request: pytest.FixtureRequest
) -> None:
    Access = aiordma.Access
    backend, options = anyio_backend
    async with connected() as (client, server):
        binds = request.node.callspec.id.endswith(("bind", "revoke"))
        bindable = Access.LOCAL_WRITE | (Access.MW_BIND if binds else Access(0))
        region = client.register(bytearray(8), bindable)
        window = await client.bind(region[:], Access.REMOTE_READ) if binds else None
        everything = Access.REMOTE_READ | Access.REMOTE_WRITE
        if request.node.callspec.id.endswith(("swap", "add")):
            everything |= Access.REMOTE_ATOMIC
        remote = server.register(bytearray(8), everything).remote()

        async def use_it() -> None:
            with pytest.raises(aiordma.EventLoopError, match=NAMES_BOTH):
                await use(client, region, remote, window)

        await elsewhere(lambda: anyio.run(use_it, backend=backend, backend_options=options))
        await both_ways(client, server)


@pytest.mark.promise("An object belongs to its event loop")
@pytest.mark.anyio
async def test_a_request_is_awaited_in_its_own_loop(anyio_backend: tuple[str, Any]) -> None:
    async def wait(request: aiordma.WorkRequest) -> None:
        with pytest.raises(aiordma.EventLoopError, match=NAMES_BOTH):
            await request

    backend, options = anyio_backend
    async with connected(server=OWN_RECEIVES) as (client, server):
        request = server.post_recv(server.register(bytearray(8)))
        await elsewhere(lambda: anyio.run(wait, request, backend=backend, backend_options=options))
        await client.send(b"arrives")
        assert (await request).byte_len == 7


# -- a loop that stands still ---------------------------------------------------------------------


@pytest.mark.promise("An object belongs to its event loop")
@OWN_LOOPS
def test_a_loop_that_stands_still_closes_later(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = new_loop()
    client, server, listener = loop.run_until_complete(open_pair())
    asyncio.run(closing_fails(client, "belongs to the event loop.*stands still"))
    in_a_thread(lambda: asyncio.run(closing_fails(server, "'elsewhere'.*stands still")))
    assert client.is_connected
    loop.run_until_complete(asyncio.sleep(0.01))
    assert not client.is_connected
    for closable in (client, server, listener):
        loop.run_until_complete(closable.aclose())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@OWN_LOOPS
def test_a_loop_may_go_on_in_another_thread(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop = new_loop()
    client, server, listener = loop.run_until_complete(open_pair())

    async def use_and_close() -> None:
        await client.send(b"there")
        for closable in (client, server, listener):
            await closable.aclose()

    in_a_thread(lambda: loop.run_until_complete(use_and_close()))
    loop.close()


def test_trio_closes_everything_at_its_end() -> None:
    opened: list[Any] = []

    async def leave_open() -> None:
        opened.append(await aiordma.listen(ADDRESS, 0))

    with pytest.warns(ResourceWarning, match="left open"):
        anyio.run(leave_open, backend="trio")
    asyncio.run(opened[0].aclose())


# -- what was forgotten ---------------------------------------------------------------------------


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of the test."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield record


def texts_of(warned: list[warnings.WarningMessage]) -> list[str]:
    """Collect what is left, and return what was warned of."""
    while calls_under_way():  # a worker that has just reported the end of its call to the loop
        time.sleep(0.001)
    gc.collect()
    return [str(entry.message) for entry in warned if entry.category is ResourceWarning]


@pytest.mark.promise("Closing leaves nothing open")
@pytest.mark.anyio
async def test_a_forgotten_connection_names_its_peer_and_place(
    warned: list[warnings.WarningMessage],
) -> None:
    async with connected() as (_, server), await aiordma.listen(ADDRESS, 0) as listener:
        accepted: list[aiordma.Connection] = []

        async def accept() -> None:
            accepted.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            client = await aiordma.connect(ADDRESS, listener.port)
        name = repr(client)
        del client
        gc.collect()
        async with accepted.pop() as server:
            with pytest.raises(anyio.EndOfStream):
                await server.receive()
    (text,) = texts_of(warned)
    assert text.startswith(f"unclosed {name}, opened at {__file__}:")


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_what_is_left_at_a_loops_end_is_named_once(
    backend: str, warned: list[warnings.WarningMessage]
) -> None:
    kept: list[Any] = []

    async def accept(listener: aiordma.Listener) -> None:
        kept.append(await listener.accept())

    async def leave_open() -> None:
        listener = await aiordma.listen(ADDRESS, 0)
        async with listener, anyio.create_task_group() as group:
            group.start_soon(accept, listener)
            kept.append(await aiordma.connect(ADDRESS, listener.port))

    name, options = BACKENDS[backend]
    anyio.run(leave_open, backend=name, backend_options=options)
    kept.clear()
    (text,) = texts_of(warned)
    assert text.startswith("left open at the end of the event loop: <Connection to")
    assert text.count("<Connection to (") == 2
    assert text.count(f"opened at {__file__}:") == 2


@pytest.mark.promise("An object belongs to its event loop")
@OWN_LOOPS
def test_a_loop_closed_and_collected_names_what_was_opened(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    warned: list[warnings.WarningMessage],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = objects()
    loop = new_loop()
    opened = loop.run_until_complete(open_pair())
    loop.close()
    del loop, opened
    texts = texts_of(warned)
    assert objects() == before
    assert "\n".join(texts).count("<Connection to (") == 2
    assert "\n".join(texts).count("<Listener on") == 1
    for text in texts:
        assert text.startswith(("unclosed <Connection", "unclosed <Listener", "left open"))
    without_warnings(caplog)


@pytest.mark.promise("Counters add up")
@OWN_LOOPS
def test_counters_of_a_collected_loop_remain(
    new_loop: Callable[[], asyncio.AbstractEventLoop], warned: list[warnings.WarningMessage]
) -> None:
    async def send() -> list[Any]:
        opened = await open_pair()
        await opened[0].send(b"x" * 8)
        return opened

    loop = new_loop()
    opened = loop.run_until_complete(send())
    loop.close()
    opened.append(opened)  # so that the garbage collector takes all at once
    before = aiordma.statistics()[DEVICE].requests
    assert before.bytes_sent >= 8
    del loop, opened
    assert texts_of(warned)
    requests = aiordma.statistics()[DEVICE].requests
    assert requests.bytes_sent == before.bytes_sent
    assert requests.posted_receives == before.posted_receives
