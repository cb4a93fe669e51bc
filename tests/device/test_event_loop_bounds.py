"""What belongs to an event loop is used there: from elsewhere it is refused, with both named, and
closed as far as that goes without its loop."""

import asyncio
import gc
import inspect
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, cast

import anyio
import anyio.from_thread
import pytest

import aiordma
from aiordma._endpoint.domain_state import start_deregistering
from aiordma._loop.polling import new_event_loop
from aiordma._loop.threads import DESTROYS, calls_under_way
from aiordma.verbs import AddressHandle, MemoryRegion, ProtectionDomain
from aiordma.verbs.identifier import Identifier
from tests.conftest import BACKENDS
from tests.connections import connect_to
from tests.device.players import OWN_RECEIVES, both_ways, connected, silent_taker
from tests.devices import ADDRESS, DEVICE, kernel_objects

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
    "read": lambda c, region, remote: c.post_read(remote, region),
    "write": lambda c, region, remote: c.post_write(region, remote),
    "register": lambda c, region, remote: c.register(bytearray(8)),
}


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
    "ended": lambda c, region, remote, window: c.ended(),
    "establish": lambda c, region, remote, window: c.establish(),
    "fetch_add": lambda c, region, remote, window: c.fetch_add(remote, 1),
    "grant": lambda c, region, remote, window: c.grant(bytearray(8), aiordma.Access.REMOTE_READ),
    "open_window": lambda c, region, remote, window: c.open_window(),
    "read": lambda c, region, remote, window: c.read(remote, region),
    "read_bytes": lambda c, region, remote, window: c.read_bytes(remote),
    "readv": lambda c, region, remote, window: c.readv(remote, [region]),
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


def test_every_coroutine_is_tried_elsewhere() -> None:
    methods = {
        name
        for name in dir(aiordma.Connection)
        if inspect.iscoroutinefunction(getattr(aiordma.Connection, name))
        and (not name.startswith("_") or name.startswith("__"))
    }
    # The first only returns the connection, the second only raises an error of its own.
    assert methods - {"__aenter__", "send_eof"} <= set(USES)


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


# -- a loop that was closed, or stands still ------------------------------------------------------

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "polling": new_event_loop,
}
try:
    import uvloop
except ImportError:
    pass
else:
    LOOPS["uvloop"] = uvloop.new_event_loop
OWN_LOOPS = pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)


async def open_pair() -> list[Any]:
    """Return what is open: a connection with a receive in flight, its peer, and their listener."""
    listener = await aiordma.listen(ADDRESS, 0, receive_buffers=0)
    client, server = await connect_to(listener, ADDRESS)
    server.post_recv(server.register(bytearray(8)))
    return [client, server, listener]


async def open_others() -> list[Any]:
    """Return a datagram socket that is in a group, and a shared receive queue."""
    socket = await aiordma.open_datagram(ADDRESS)
    shared = await aiordma.open_shared_receive(ADDRESS, buffers=4)
    return [socket, shared]


def objects() -> dict[str, int]:
    """Count the device's objects, but for streams, which the software device closes after them."""
    return {kind: count for kind, count in kernel_objects(DEVICE).items() if kind != "sockets"}


async def closing_fails(closable: Any, match: str) -> None:
    with pytest.raises(aiordma.EventLoopError, match=match):
        await closable.aclose()


def without_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Collect what is left, and assert that nothing was warned of or logged."""
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


@OWN_LOOPS
@pytest.mark.parametrize(
    "open_some",
    [
        pytest.param(open_pair, id="connections"),
        pytest.param(open_others, id="others", marks=pytest.mark.capability("datagrams")),
    ],
)
def test_closing_on_a_closed_loop_gives_everything_back(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    open_some: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = objects()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = new_loop()
        opened = loop.run_until_complete(open_some())
        loop.close()
        for closable in opened:
            asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
        assert objects() == before
        for closable in opened:
            asyncio.run(closable.aclose())  # idempotent
        del opened, closable, loop
        without_warnings(caplog)


@OWN_LOOPS
def test_closing_on_a_closed_loop_ends_requests(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    loop, buffer = new_loop(), bytearray(8)
    client, server, listener = loop.run_until_complete(open_pair())
    request = server.post_recv(server.register(buffer))
    loop.close()
    assert not request.done()
    for closable in (client, server, listener):
        asyncio.run(closing_fails(closable, "has ended"))
    assert isinstance(request.exception(), aiordma.FlushedError)
    buffer += b"no longer exported"


@OWN_LOOPS
def test_a_task_that_waited_on_a_closed_loop_hinders_no_close(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()
    loop = new_loop()
    client, server, listener = loop.run_until_complete(open_pair())

    async def wait_for_a_moment() -> None:
        waiting.append(asyncio.ensure_future(client.receive()))
        waiting.append(asyncio.ensure_future(client.ended()))
        await asyncio.sleep(0.01)

    waiting: list[Any] = []
    loop.run_until_complete(wait_for_a_moment())
    loop.close()
    leave_pending(*waiting)
    for closable in (client, server, listener):
        asyncio.run(closing_fails(closable, "has ended"))
    assert objects() == before


def leave_pending(*tasks: "asyncio.Task[Any]") -> None:
    """Let asyncio not report tasks of a closed loop, which never continue: it logs each one that is
    collected, unless this attribute of its own forbids it."""
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def drop(task: asyncio.Task[Any]) -> None:
    """End a task of a closed loop, which anyio would keep."""
    with suppress(RuntimeError):  # anyio's scopes end only in their task
        cast(Any, task.get_coro()).close()


@OWN_LOOPS
def test_a_listener_with_waiting_peers_closes_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()
    outcomes: list[BaseException] = []

    async def connect(port: int) -> None:
        try:
            await aiordma.connect(ADDRESS, port)
        except aiordma.RdmaConnectionError as error:
            outcomes.append(error)

    async def open_listener() -> tuple[aiordma.Listener, threading.Thread]:
        listener = await aiordma.listen(ADDRESS, 0)
        peer = threading.Thread(target=lambda: asyncio.run(connect(listener.port)))
        peer.start()
        while not listener.statistics().waiting:
            await asyncio.sleep(0.01)
        return listener, peer

    loop = new_loop()
    listener, peer = loop.run_until_complete(open_listener())
    loop.close()
    asyncio.run(closing_fails(listener, "belongs to the event loop.*has ended.*closed now"))
    peer.join(30)
    assert len(outcomes) == 1
    assert objects() == before
    asyncio.run(listener.aclose())  # idempotent


@OWN_LOOPS
def test_a_listener_with_a_handshake_closes_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The call of `accept` that began the handshake was cancelled."""
    before = objects()

    async def finish_handshake() -> tuple[aiordma.Listener, aiordma.Connection]:
        listener = await aiordma.listen(ADDRESS, 0)
        accept = asyncio.ensure_future(listener.accept())
        client = asyncio.ensure_future(aiordma.connect(ADDRESS, listener.port))
        while not len(listener._handshakes):
            await asyncio.sleep(0)
        accept.cancel()
        while not listener._handshakes._finished:
            await asyncio.sleep(0)
        return listener, await client

    loop = new_loop()
    listener, client = loop.run_until_complete(finish_handshake())
    loop.close()
    for closable in (listener, client):
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before
    asyncio.run(listener.aclose())  # idempotent


@OWN_LOOPS
def test_many_connections_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def open_many() -> list[Any]:
        listener = await aiordma.listen(ADDRESS, 0)
        pairs = [await connect_to(listener, ADDRESS) for _ in range(DESTROYS.max_workers)]
        return [*(connection for pair in pairs for connection in pair), listener]

    loop = new_loop()
    opened = loop.run_until_complete(open_many())
    loop.close()
    for closable in opened:
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before


@OWN_LOOPS
@pytest.mark.parametrize("turns", [1, 2, 8])
def test_closing_that_a_closed_loop_interrupted_is_finished(
    new_loop: Callable[[], asyncio.AbstractEventLoop], turns: int
) -> None:
    before = objects()

    async def begin_closing() -> tuple[list[Any], list[asyncio.Task[None]]]:
        opened = await open_pair()
        tasks = [asyncio.ensure_future(each.aclose()) for each in opened]
        for _ in range(turns):
            await asyncio.sleep(0)
        return opened, tasks

    loop = new_loop()
    opened, tasks = loop.run_until_complete(begin_closing())
    loop.close()
    leave_pending(*tasks)
    for closable in opened:
        with suppress(aiordma.EventLoopError):  # some have closed in time
            asyncio.run(closable.aclose())
    assert objects() == before


@OWN_LOOPS
def test_a_call_in_a_thread_hinders_no_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()
    begun, may_return = threading.Event(), threading.Event()

    class Slow(MemoryRegion):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            begun.set()
            may_return.wait(30)

    async def begin_registering() -> tuple[list[Any], asyncio.Task[Any]]:
        opened = await open_pair()
        task = asyncio.ensure_future(
            opened[0]._endpoint.make_in_thread(
                lambda: Slow(opened[0]._endpoint.domain, bytearray(64)), MemoryRegion.close
            )
        )
        await asyncio.sleep(0)
        begun.wait(30)
        return opened, task

    loop = new_loop()
    opened, task = loop.run_until_complete(begin_registering())
    loop.close()
    leave_pending(task)
    may_return.set()
    for closable in opened:
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before
    drop(task)
    assert objects() == before


@OWN_LOOPS
@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.1])
def test_a_registration_hinders_no_close_of_its_domain_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], seconds: float
) -> None:
    """The loop ends during the driver's call, or before the task continues."""
    before = objects()

    def register_slowly(raw: ProtectionDomain) -> MemoryRegion:
        region = MemoryRegion(raw, bytearray(8))
        time.sleep(seconds)
        return region

    async def begin_registering() -> tuple[aiordma.Domain, asyncio.Task[Any]]:
        domain = await aiordma.open_domain(ADDRESS)
        task = asyncio.ensure_future(domain._state.register(register_slowly))
        await asyncio.sleep(0)
        return domain, task

    loop = new_loop()
    domain, task = loop.run_until_complete(begin_registering())
    loop.close()
    leave_pending(task)
    asyncio.run(closing_fails(domain, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before
    asyncio.run(domain.aclose())  # idempotent
    drop(task)
    assert objects() == before


@pytest.mark.natively
@OWN_LOOPS
@pytest.mark.parametrize(
    ("size", "is_busy"),
    [
        pytest.param(64, False, id="on the loop's thread"),
        pytest.param(64, True, id="with no slot for the bind"),
        pytest.param(4 << 20, False, id="in a thread"),
    ],
)
@pytest.mark.parametrize("registered", [False, True], ids=["buffer", "region"])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_a_grant_hinders_no_close_of_its_domain_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    turns: int,
    registered: bool,
    size: int,
    is_busy: bool,
) -> None:
    """The loop ends during the driver's call or the bind, or before or after the task continues."""
    before = objects()

    async def begin_grant() -> tuple[list[Any], asyncio.Task[Any]]:
        domain = await aiordma.open_domain(ADDRESS)
        listener = await aiordma.listen(ADDRESS, 0)
        accepted = asyncio.ensure_future(listener.accept())
        client = await aiordma.connect(ADDRESS, listener.port, domain=domain)
        memory: Any = bytearray(size)
        if registered:
            memory = await domain.register(memory)
        if is_busy:
            client._endpoint.sends.slots.free = 0
        task = asyncio.ensure_future(client.grant(memory, access=aiordma.Access.REMOTE_READ))
        for _ in range(turns):
            await asyncio.sleep(0)
        return [client, await accepted, listener, domain], task

    loop = new_loop()
    opened, task = loop.run_until_complete(begin_grant())
    loop.close()
    leave_pending(task)
    for closable in opened:
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before
    drop(task)
    assert objects() == before


CHANGES: dict[str, Callable[[aiordma.SharedReceiveQueue], Coroutine[Any, Any, None]]] = {
    "limit": lambda shared: shared.limit(1),
    "resize": lambda shared: shared.resize(16),
}


@pytest.mark.natively
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(CHANGES["limit"], id="limit"),
        pytest.param(CHANGES["resize"], id="resize", marks=pytest.mark.capability("srq_resize")),
    ],
)
@pytest.mark.parametrize("closes_before", [False, True], ids=["closed after", "closed before"])
@pytest.mark.parametrize("turns", range(5))
@OWN_LOOPS
def test_a_change_hinders_no_close_of_its_queue_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    turns: int,
    closes_before: bool,
    change: Callable[[aiordma.SharedReceiveQueue], Coroutine[Any, Any, None]],
) -> None:
    """The loop ends before, during or after the driver's call, or before the task continues."""
    before = objects()

    async def begin_change() -> tuple[aiordma.SharedReceiveQueue, list[asyncio.Task[None]]]:
        shared = await aiordma.open_shared_receive(ADDRESS, depth=8)
        shared.post_srq_recv([bytearray(8)] * 4)
        tasks = [asyncio.ensure_future(change(shared))]
        if closes_before:
            tasks.append(asyncio.ensure_future(shared.aclose()))
        for _ in range(turns):
            await asyncio.sleep(0)
        return shared, tasks

    loop = new_loop()
    shared, tasks = loop.run_until_complete(begin_change())
    loop.close()
    leave_pending(*tasks)
    with suppress(aiordma.EventLoopError):  # it may have closed in time
        asyncio.run(shared.aclose())
    assert objects() == before


@OWN_LOOPS
def test_a_deregistration_hinders_no_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def begin_deregistering() -> list[Any]:
        opened = await open_pair()
        reactor = opened[0]._endpoint.reactor
        start_deregistering(reactor, None, lambda: time.sleep(0.1))
        return opened

    loop = new_loop()
    opened = loop.run_until_complete(begin_deregistering())
    loop.close()
    for closable in opened:
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before


@OWN_LOOPS
def test_closes_on_a_closed_loop_share_one_limit(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects()
    monkeypatch.setattr("aiordma._runtime.reactor.END_SECONDS", 1.0)
    may_return = threading.Event()

    async def begin_call() -> list[Any]:
        opened = await open_pair()
        reactor = opened[0]._endpoint.reactor
        start_deregistering(reactor, None, lambda: may_return.wait(30))
        return opened

    loop = new_loop()
    opened = loop.run_until_complete(begin_call())
    loop.close()
    begin = time.monotonic()
    for closable in opened:
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))
    assert 1.0 <= time.monotonic() - begin < 2.5  # three would be 3 s
    may_return.set()
    while calls_under_way():
        time.sleep(0.001)
    opened[0]._endpoint.reactor.close_elsewhere(lambda: None)  # takes the call's end
    assert objects() == before


@pytest.mark.capability("datagrams")
@OWN_LOOPS
def test_a_dropped_address_handle_hinders_no_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects()
    close = AddressHandle.close

    def close_slowly(self: AddressHandle) -> None:
        time.sleep(0.1)
        close(self)

    monkeypatch.setattr(AddressHandle, "close", close_slowly)

    async def drop_handle() -> aiordma.Datagram:
        opened = await aiordma.open_datagram(ADDRESS)
        await opened.send(b"hello", opened.peer(opened.gid, 5))
        opened._endpoint.handles._kept.popitem()[1].retire()
        return opened

    loop = new_loop()
    opened = loop.run_until_complete(drop_handle())
    loop.close()
    asyncio.run(closing_fails(opened, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before


@pytest.mark.capability("datagrams")
@OWN_LOOPS
def test_a_socket_that_resolves_closes_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def begin_resolving(host: str, port: int) -> tuple[aiordma.Datagram, asyncio.Task[Any]]:
        opened = await aiordma.open_datagram(ADDRESS)
        task = asyncio.ensure_future(opened.resolve(host, port))
        await asyncio.sleep(0.1)
        return opened, task

    loop = new_loop()
    with silent_taker() as silent:
        opened, task = loop.run_until_complete(begin_resolving(*silent))
        assert not task.done()
    loop.close()
    leave_pending(task)
    asyncio.run(closing_fails(opened, "belongs to the event loop.*has ended.*closed now"))
    drop(task)  # it has an identifier of its own
    assert objects() == before
    asyncio.run(opened.aclose())  # idempotent


@pytest.mark.capability("datagrams")
@OWN_LOOPS
def test_a_socket_that_joins_closes_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects()
    monkeypatch.setattr(Identifier, "join_multicast", lambda *given, **options: None)

    async def begin_joining() -> tuple[aiordma.Datagram, asyncio.Task[Any]]:
        opened = await aiordma.open_datagram(ADDRESS)
        task = asyncio.ensure_future(opened.join("239.1.2.3"))
        while not opened._endpoint.groups:
            await asyncio.sleep(0)
        return opened, task

    loop = new_loop()
    opened, task = loop.run_until_complete(begin_joining())
    loop.close()
    leave_pending(task)
    asyncio.run(closing_fails(opened, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before
    asyncio.run(opened.aclose())  # idempotent


@pytest.mark.capability("datagrams")
@OWN_LOOPS
def test_a_socket_that_looks_up_a_peer_closes_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def begin_sending() -> tuple[aiordma.Datagram, asyncio.Task[Any]]:
        opened = await aiordma.open_datagram(ADDRESS)
        task = asyncio.ensure_future(opened.send(b"hello", opened.peer(opened.gid, 5)))
        while not len(opened._endpoint.handles):
            await asyncio.sleep(0)
        return opened, task

    loop = new_loop()
    opened, task = loop.run_until_complete(begin_sending())
    loop.close()
    leave_pending(task)
    while calls_under_way():
        time.sleep(0.001)
    asyncio.run(closing_fails(opened, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before
    asyncio.run(opened.aclose())  # idempotent, and waits for no lookup
    drop(task)
    assert objects() == before


@pytest.mark.capability("datagrams")
@OWN_LOOPS
def test_a_socket_that_has_sent_closes_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def send() -> aiordma.Datagram:
        opened = await aiordma.open_datagram(ADDRESS)
        await opened.send(b"hello", opened.peer(opened.gid, 5))
        return opened

    loop = new_loop()
    opened = loop.run_until_complete(send())
    assert len(opened._endpoint.handles) == 1
    loop.close()
    asyncio.run(closing_fails(opened, "belongs to the event loop.*has ended.*closed now"))
    assert objects() == before


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
