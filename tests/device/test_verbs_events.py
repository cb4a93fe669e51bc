"""Asynchronous events of a real device: its ports', its objects', and those that a device can
report and ours does not, injected where every event passes."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest
import uvloop

import aiordma
from aiordma.verbs import AsyncEvent, AsyncEventType, Device, RawSharedReceiveQueue
from tests.device.by_hand import End, end_in
from tests.device.players import OWN_RECEIVES, connected, one_loop, until
from tests.device.second_device import LINK, ip, second_device
from tests.devices import DeviceUnderTest
from tests.internals import hub_of, queue_pair_of

# -- the device's own -----------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.capability("port_events")
async def test_a_port_that_goes_down_and_up_is_reported_until_the_context_is_closed(
    device: DeviceUnderTest,
) -> None:
    with second_device(device) as name:
        context = Device(name).open()
        seen: list[AsyncEvent] = []

        async def iterate() -> None:
            async for event in context.async_events():
                seen.append(event)

        def heard(kind: AsyncEventType) -> Callable[[], bool]:
            return lambda: any(event.type is kind for event in seen)

        async with anyio.create_task_group() as group:
            group.start_soon(iterate)
            ip("link", "set", LINK, "down")
            await until(heard(AsyncEventType.PORT_ERR))
            ip("link", "set", LINK, "up")
            await until(heard(AsyncEventType.PORT_ACTIVE))
            with pytest.raises(aiordma.BusyError, match="another task waits"):
                await anext(context.async_events())
            with pytest.raises(aiordma.BusyError, match="another thread"):
                await anyio.to_thread.run_sync(context.close)
            context.close()
        assert {event.port for event in seen} == {1}
        with pytest.raises(aiordma.ClosedError):
            context.async_events()


@pytest.mark.anyio
@one_loop
@pytest.mark.capability("gid_events")
@pytest.mark.capability("second_device")
async def test_an_address_that_comes_changes_the_gid_table(device: DeviceUnderTest) -> None:
    with second_device(device) as name, Device(name).open() as context:
        while context.take_async_event() is not None:
            pass
        ip("address", "add", "10.7.7.7/24", "dev", LINK)
        async for event in context.async_events():
            if event.type is AsyncEventType.GID_CHANGE:
                break
        assert event == AsyncEvent(AsyncEventType.GID_CHANGE, port=1)


# -- an object's ----------------------------------------------------------------------------------


@contextmanager
def two_ends(
    domain: aiordma.verbs.ProtectionDomain,
) -> Iterator[tuple[End, End, RawSharedReceiveQueue]]:
    """A sender, a receiver, and the shared receive queue of the latter."""
    with (
        RawSharedReceiveQueue(domain, 8) as shared,
        end_in(domain) as one,
        end_in(domain, shared) as other,
    ):
        one.connect(other)
        other.connect(one)
        yield one, other, shared


def reach_the_limit(one: End, other: End, shared: RawSharedReceiveQueue) -> None:
    """Leave one receive, where two are the limit."""
    shared.post_srq_recv([(number, []) for number in range(3)])
    shared.modify(limit=2)
    for number in range(2):
        one.pair.post_send(number, [])
    one.completions(2)
    other.completions(2)


@pytest.mark.capability("queue pairs by hand")
def test_the_limit_of_a_shared_receive_queue_is_reported_with_the_queue(
    device: DeviceUnderTest,
) -> None:
    with (
        Device(device.by_hand).open() as context,
        context.alloc_pd() as domain,
        two_ends(domain) as (one, other, shared),
    ):
        assert context.take_async_event() is None
        reach_the_limit(one, other, shared)
        events = list(iter(context.take_async_event, None))
        limits = [event for event in events if event and event.key == shared.key]
        assert limits == [
            AsyncEvent(AsyncEventType.SRQ_LIMIT_REACHED, key=shared.key, resource=shared)
        ]


# -- those of the connections ---------------------------------------------------------------------


def inject(connection: aiordma.Connection, event: AsyncEvent) -> None:
    """Tell every loop's hub of the device, as if the event had been read."""
    subscription = hub_of(connection)._events
    assert subscription is not None
    subscription.router.deliver(event)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "kind", [AsyncEventType.QP_FATAL, AsyncEventType.QP_ACCESS_ERR], ids=lambda kind: kind.name
)
async def test_a_queue_pair_that_fails_ends_its_connection_with_the_event(
    kind: AsyncEventType,
) -> None:
    async with connected(server=OWN_RECEIVES) as (client, server), connected() as (other, _):
        receive = server.post_recv(bytearray(8))
        pair = queue_pair_of(server)
        assert pair is not None
        inject(server, AsyncEvent(kind, qp_num=pair.qp_num))
        with pytest.raises(aiordma.FlushedError) as flushed:
            await receive
        cause = flushed.value.__cause__
        assert isinstance(cause, aiordma.DeviceEventError)
        assert cause.event is kind
        with pytest.raises(aiordma.DeviceEventError, match=kind.name):
            server.post_send(b"too late")
        with pytest.raises(anyio.EndOfStream):  # the peer is disconnected as by any close
            await client.receive()
        assert other.is_connected


@pytest.mark.anyio
@one_loop
async def test_a_completion_queue_that_fails_ends_every_connection_on_the_device() -> None:
    async with connected() as (client, server):
        (shared,) = hub_of(client)._queues
        inject(client, AsyncEvent(AsyncEventType.CQ_ERR, key=shared.queue.key))
        for connection in (client, server):
            with pytest.raises(aiordma.DeviceEventError, match="CQ_ERR"):
                await connection.receive()


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("how", ["callback", "suspended", "another loop", "closed loop"])
def test_context_closes_outside_of_the_waiting_loops_tasks(
    how: str, new_loop: Callable[[], asyncio.AbstractEventLoop], device: DeviceUnderTest
) -> None:
    loop = new_loop()
    context = Device(device.name).open()
    descriptor = context.async_fd

    async def iterate() -> str:
        async for _ in context.async_events():
            pass
        return "ended"

    async def close() -> None:
        context.close()

    try:
        waiting = loop.create_task(iterate())
        loop.run_until_complete(asyncio.sleep(0.01))
        if how == "callback":
            loop.call_soon(context.close)
        elif how == "suspended":
            context.close()
        elif how == "another loop":
            asyncio.run(close())
        else:
            waiting._log_destroy_pending = False  # type: ignore[attr-defined]
            loop.close()
            context.close()
        if how != "closed loop":
            assert loop.run_until_complete(asyncio.wait_for(waiting, 10)) == "ended"
    finally:
        loop.close()
    assert context.closed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.anyio
@one_loop
async def test_the_events_of_librdmacms_contexts_are_not_for_taking() -> None:
    async with connected() as (client, _):
        context = hub_of(client).context
        with pytest.raises(aiordma.BusyError, match="makes a context with events of its own"):
            context.take_async_event()
        with pytest.raises(aiordma.BusyError, match="makes a context with events of its own"):
            await anext(context.async_events())


@pytest.mark.capability("queue pairs by hand")
def test_a_real_event_reaches_the_loops_of_both_threads_whichever_reads_it(
    device: DeviceUnderTest,
) -> None:
    by_hand = {"device": device.by_hand}
    both = threading.Barrier(2)
    shared_keys: dict[str, int] = {}
    heard: dict[str, list[AsyncEventType]] = {"asyncio": [], "trio": []}

    async def use(backend: str) -> None:
        async with connected(server=by_hand, client=by_hand) as (client, _):
            hub = hub_of(client)
            with two_ends(hub.domain) as (one, other, shared):
                shared_keys[backend] = shared.key
                await anyio.to_thread.run_sync(both.wait, 30)
                for key in shared_keys.values():
                    hub.on_object_event[key] = heard[backend].append
                await anyio.to_thread.run_sync(both.wait, 30)
                reach_the_limit(one, other, shared)
                await until(lambda: len(heard[backend]) == 2)
                await anyio.to_thread.run_sync(both.wait, 30)

    threads = [
        threading.Thread(target=lambda backend=backend: anyio.run(use, backend, backend=backend))
        for backend in heard
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    twice = [AsyncEventType.SRQ_LIMIT_REACHED] * 2
    assert heard == {"asyncio": twice, "trio": twice}


@asynccontextmanager
async def an_event_of(connection: aiordma.Connection) -> AsyncIterator[list[AsyncEventType]]:
    """Yield what happens to an object of the device that the connection uses."""
    heard: list[AsyncEventType] = []
    hub = hub_of(connection)
    hub.on_object_event[1234] = heard.append
    yield heard
    del hub.on_object_event[1234]


def test_loops_in_two_threads_each_hear_the_events_of_their_shared_context() -> None:
    barrier = threading.Barrier(2)
    heard: dict[str, list[AsyncEventType]] = {}

    async def use(backend: str) -> None:
        async with connected() as (client, server), an_event_of(client) as events:
            await anyio.to_thread.run_sync(barrier.wait, 30)
            if backend == "trio":
                inject(client, AsyncEvent(AsyncEventType.SRQ_LIMIT_REACHED, key=1234))
            await until(lambda: bool(events))
            heard[backend] = list(events)
            # No connection failed: both loops' connections work on.
            await client.send(b"hello")
            assert await server.receive() == b"hello"
            await anyio.to_thread.run_sync(barrier.wait, 30)

    threads = [
        threading.Thread(target=lambda backend=backend: anyio.run(use, backend, backend=backend))
        for backend in ("asyncio", "trio")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    once = [AsyncEventType.SRQ_LIMIT_REACHED]
    assert heard == {"asyncio": once, "trio": once}


@pytest.mark.anyio
async def test_event_of_a_destroyed_queue_pair_spares_the_next_at_its_address() -> None:
    async with connected() as (_, server):
        pair = queue_pair_of(server)
        assert pair is not None
        kind = AsyncEventType.QP_ACCESS_ERR
        inject(server, AsyncEvent(kind, key=pair.key, qp_num=pair.qp_num ^ 0x800000))
        await anyio.sleep(0.2)
        assert server.is_connected
