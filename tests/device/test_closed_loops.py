"""Closing on an event loop that was closed: everything goes, whatever was under way."""

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast

import pytest

import aiordma
from aiordma import MemoryRegion
from aiordma.verbs import AddressHandle, ProtectionDomain
from aiordma.verbs.identifier import Identifier
from tests.connections import connect_to
from tests.device.own_loops import (
    OWN_LOOPS,
    closing_fails,
    objects,
    open_others,
    open_pair,
    without_warnings,
)
from tests.device.players import silent_taker
from tests.devices import ADDRESS
from tests.internals import (
    DESTROYS,
    calls_under_way,
    handshakes_of,
    handshakes_under_way,
    make_in_thread,
    start_deregistering,
)

pytestmark = pytest.mark.one_kernel_device

Opened = TypeVar("Opened")


def left_open(
    new_loop: Callable[[], asyncio.AbstractEventLoop], opening: Coroutine[Any, Any, Opened]
) -> Opened:
    """Run a coroutine on a loop of its own, and close that."""
    loop = new_loop()
    opened = loop.run_until_complete(opening)
    loop.close()
    return opened


def close_all(opened: Iterable[Any]) -> None:
    """Close objects of a closed loop, which raises, and closes them."""
    for closable in opened:
        asyncio.run(closing_fails(closable, "belongs to the event loop.*has ended.*closed now"))


@pytest.mark.promise("An object belongs to its event loop")
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
        close_all(opened)
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
    close_all((client, server, listener))
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
    close_all((client, server, listener))
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


@pytest.mark.promise("An object belongs to its event loop")
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

    listener, peer = left_open(new_loop, open_listener())
    close_all([listener])
    peer.join(30)
    assert len(outcomes) == 1
    assert objects() == before
    asyncio.run(listener.aclose())  # idempotent


@pytest.mark.promise("An object belongs to its event loop")
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
        while not handshakes_under_way(listener):
            await asyncio.sleep(0)
        accept.cancel()
        while not handshakes_of(listener)._finished:
            await asyncio.sleep(0)
        return listener, await client

    listener, client = left_open(new_loop, finish_handshake())
    close_all((listener, client))
    assert objects() == before
    asyncio.run(listener.aclose())  # idempotent


@pytest.mark.promise("An object belongs to its event loop")
@OWN_LOOPS
def test_many_connections_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def open_many() -> list[Any]:
        listener = await aiordma.listen(ADDRESS, 0)
        pairs = [await connect_to(listener, ADDRESS) for _ in range(DESTROYS.max_workers)]
        return [*(connection for pair in pairs for connection in pair), listener]

    opened = left_open(new_loop, open_many())
    close_all(opened)
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
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

    opened, tasks = left_open(new_loop, begin_closing())
    leave_pending(*tasks)
    for closable in opened:
        with suppress(aiordma.EventLoopError):  # some have closed in time
            asyncio.run(closable.aclose())
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
@pytest.mark.natively
@OWN_LOOPS
def test_a_failed_callback_hinders_no_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    before = objects()
    opened = left_open(new_loop, open_pair())
    called: list[str] = []

    def fail() -> None:
        called.append("failed")
        raise OSError("disk on fire")

    for callback in (fail, lambda: called.append("next")):
        opened[0]._endpoint.loop.call_from_thread(callback)
    opened[0]._endpoint.loop.returned[object()] = fail
    close_all(opened)
    assert called == ["failed", "next", "failed"]
    assert caplog.text.count("OSError: disk on fire") == 2
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
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
            make_in_thread(
                opened[0]._endpoint,
                lambda: Slow(opened[0]._endpoint.memory.domain, bytearray(64)),
                MemoryRegion.close,
            )
        )
        await asyncio.sleep(0)
        begun.wait(30)
        return opened, task

    opened, task = left_open(new_loop, begin_registering())
    leave_pending(task)
    may_return.set()
    close_all(opened)
    assert objects() == before
    drop(task)
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
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
        task = asyncio.ensure_future(domain._state.register_in_thread(register_slowly))
        await asyncio.sleep(0)
        return domain, task

    domain, task = left_open(new_loop, begin_registering())
    leave_pending(task)
    close_all([domain])
    assert objects() == before
    asyncio.run(domain.aclose())  # idempotent
    drop(task)
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
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
            memory = domain.register(memory)
        if is_busy:
            client._endpoint.work.sends.slots.free = 0
        task = asyncio.ensure_future(client.grant(memory, access=aiordma.Access.REMOTE_READ))
        for _ in range(turns):
            await asyncio.sleep(0)
        return [client, await accepted, listener, domain], task

    opened, task = left_open(new_loop, begin_grant())
    leave_pending(task)
    close_all(opened)
    assert objects() == before
    drop(task)
    assert objects() == before


CHANGES: dict[str, Callable[[aiordma.SharedReceiveQueue], Coroutine[Any, Any, None]]] = {
    "limit": lambda shared: shared.limit(1),
    "resize": lambda shared: shared.resize(16),
}


@pytest.mark.promise("An object belongs to its event loop")
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

    shared, tasks = left_open(new_loop, begin_change())
    leave_pending(*tasks)
    with suppress(aiordma.EventLoopError):  # it may have closed in time
        asyncio.run(shared.aclose())
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
@OWN_LOOPS
def test_a_deregistration_hinders_no_close_on_a_closed_loop(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    before = objects()

    async def begin_deregistering() -> list[Any]:
        opened = await open_pair()
        reactor = opened[0]._endpoint.reactor
        start_deregistering(reactor.loop, None, lambda: time.sleep(0.1))
        return opened

    opened = left_open(new_loop, begin_deregistering())
    close_all(opened)
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
@OWN_LOOPS
def test_closes_on_a_closed_loop_share_one_limit(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = objects()
    monkeypatch.setattr("aiordma._runtime.reactor.END_SECONDS", 3.0)
    may_return = threading.Event()

    async def begin_call() -> list[Any]:
        opened = await open_pair()
        reactor = opened[0]._endpoint.reactor
        start_deregistering(reactor.loop, None, lambda: may_return.wait(30))
        return opened

    opened = left_open(new_loop, begin_call())
    begin = time.monotonic()
    close_all(opened)
    assert 3.0 <= time.monotonic() - begin < 8.5  # three would be 9 s
    may_return.set()
    while calls_under_way():
        time.sleep(0.001)
    opened[0]._endpoint.reactor.close_elsewhere(lambda: None)  # takes the call's end
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
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

    opened = left_open(new_loop, drop_handle())
    close_all([opened])
    assert objects() == before


@pytest.mark.promise("An object belongs to its event loop")
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
    close_all([opened])
    drop(task)  # it has an identifier of its own
    assert objects() == before
    asyncio.run(opened.aclose())  # idempotent


@pytest.mark.promise("An object belongs to its event loop")
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

    opened, task = left_open(new_loop, begin_joining())
    leave_pending(task)
    close_all([opened])
    assert objects() == before
    asyncio.run(opened.aclose())  # idempotent


@pytest.mark.promise("An object belongs to its event loop")
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

    opened, task = left_open(new_loop, begin_sending())
    leave_pending(task)
    while calls_under_way():
        time.sleep(0.001)
    close_all([opened])
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
    close_all([opened])
    assert objects() == before
