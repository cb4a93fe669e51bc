"""Asynchronous events: each type says what it is about, no cancellation loses one, and what one
loop reads reaches every other."""

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from aiordma import BusyError, VerbsCallError
from aiordma._runtime import async_events as router_module
from aiordma._runtime.async_events import AsyncEventRouter, Subscription, join_router
from aiordma.verbs import AsyncEvent, AsyncEvents, AsyncEventType
from aiordma.verbs.async_event import take_async_event
from tests.internals import current_event_loop, ffi
from tests.unit.child import run_child
from tests.unit.loops import settle, until

# -- out of C -------------------------------------------------------------------------------------


class Library:
    """libibverbs' two calls, played: events are pairs of a type and an element."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int]] = deque()
        self.acknowledged = 0
        self.error = errno.EAGAIN
        self.table = ffi.new("struct aiordma_provider *")
        self._get = ffi.callback(
            "int(struct ibv_context *, struct ibv_async_event *)", self._get_event
        )
        self._ack = ffi.callback("void(struct ibv_async_event *)", self._ack_event)
        self.table.get_async_event = self._get
        self.table.ack_async_event = self._ack

    def _get_event(self, _context: Any, event: Any) -> int:
        if not self.waiting:
            ffi.errno = self.error
            return -1
        kind, element = self.waiting.popleft()
        # The element comes first: a port's number is an int, everything else a pointer.
        ffi.buffer(event)[0:8] = element.to_bytes(8, "little")
        event.event_type = kind
        return 0

    def _ack_event(self, _event: Any) -> None:
        self.acknowledged += 1

    def take(self) -> AsyncEvent | None:
        provider: Any = SimpleNamespace(table=self.table)
        return take_async_event(provider, ffi.NULL)


OBJECT = ffi.new("char[1024]")  # for any object: its fields are 0
ADDRESS = int(ffi.cast("uintptr_t", OBJECT))

PORT = {
    AsyncEventType.PORT_ACTIVE,
    AsyncEventType.PORT_ERR,
    AsyncEventType.LID_CHANGE,
    AsyncEventType.PKEY_CHANGE,
    AsyncEventType.SM_CHANGE,
    AsyncEventType.CLIENT_REREGISTER,
    AsyncEventType.GID_CHANGE,
}


@pytest.mark.parametrize("kind", AsyncEventType)
def test_each_type_says_which_port_or_object_it_is_about(kind: AsyncEventType) -> None:
    library = Library()
    library.waiting.append((kind, 3 if kind in PORT else ADDRESS))
    event = library.take()
    if kind in PORT:
        assert event == AsyncEvent(kind, port=3)
    elif kind is AsyncEventType.DEVICE_FATAL:
        assert event == AsyncEvent(kind)
    else:
        assert event == AsyncEvent(kind, key=ADDRESS)
    assert library.acknowledged == 1
    assert library.take() is None


def test_a_type_that_is_newer_than_we_are_is_an_event_all_the_same() -> None:
    library = Library()
    library.waiting.append((77, 1))
    event = library.take()
    assert event is not None
    assert (event.type.name, event.port) == ("UNKNOWN_77", 1)


def test_a_device_that_is_gone_is_an_error() -> None:
    library = Library()
    library.error = errno.EIO
    with pytest.raises(VerbsCallError, match="ibv_get_async_event"):
        library.take()


# -- the iterator ---------------------------------------------------------------------------------


class Source:
    """A context with a descriptor that is readable while an event waits."""

    def __init__(self) -> None:
        self.closed = False
        self.async_fd, self._writing = os.pipe()
        os.set_blocking(self.async_fd, False)
        self.waiting: deque[AsyncEvent] = deque()

    def tell(self, kind: AsyncEventType, port: int = 0, key: int = 0) -> None:
        self.waiting.append(AsyncEvent(kind, port, key))
        os.write(self._writing, b"x")

    def wake(self) -> None:
        """Make it readable for an event that another one takes."""
        os.write(self._writing, b"x")

    def take_async_event(self) -> AsyncEvent | None:
        try:
            os.read(self.async_fd, 1)
        except BlockingIOError:
            return None
        return self.waiting.popleft() if self.waiting else None

    def close(self) -> None:
        self.closed = True
        os.close(self.async_fd)
        os.close(self._writing)


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    if not source.closed:
        source.close()


@pytest.mark.anyio
async def test_events_come_in_order_until_the_context_is_closed(source: Source) -> None:
    events = AsyncEvents(source)
    seen: list[AsyncEvent] = []
    ended = False

    async def iterate() -> None:
        nonlocal ended
        async for event in events:
            seen.append(event)
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(iterate)
        await settle()
        source.wake()
        source.tell(AsyncEventType.PORT_ERR, 1)
        source.tell(AsyncEventType.PORT_ACTIVE, 1)
        await until(lambda: len(seen) == 2)
        assert not ended
        source.closed = True
        events._stop()
    assert ended
    assert [event.type for event in seen] == [AsyncEventType.PORT_ERR, AsyncEventType.PORT_ACTIVE]
    assert [event async for event in events] == []  # and stays ended


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.anyio
async def test_a_second_task_may_not_wait_and_a_cancelled_wait_loses_nothing(
    source: Source,
) -> None:
    events = AsyncEvents(source)
    async with anyio.create_task_group() as group:
        group.start_soon(events.__anext__)
        await settle()
        with pytest.raises(BusyError, match="another task waits"):
            await anext(events)
        group.cancel_scope.cancel()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(events)
    source.tell(AsyncEventType.GID_CHANGE, 1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(events)
    assert scope.cancelled_caught
    assert await anext(events) == AsyncEvent(AsyncEventType.GID_CHANGE, 1)


def test_a_task_that_asyncio_cancels_by_itself_takes_no_event_with_it(source: Source) -> None:
    async def run() -> AsyncEvent:
        events = AsyncEvents(source)
        task = asyncio.create_task(events.__anext__())
        await asyncio.sleep(0.01)
        source.tell(AsyncEventType.GID_CHANGE, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await anext(events)

    assert asyncio.run(run()) == AsyncEvent(AsyncEventType.GID_CHANGE, 1)


@pytest.mark.anyio
async def test_another_thread_may_not_close_under_a_waiting_task(source: Source) -> None:
    events = AsyncEvents(source)
    async with anyio.create_task_group() as group:
        group.start_soon(events.__anext__)
        await settle()
        events._require_here()
        with pytest.raises(BusyError, match="another thread"):
            await anyio.to_thread.run_sync(events._require_here)
        group.cancel_scope.cancel()
    await anyio.to_thread.run_sync(events._require_here)


# -- the router -----------------------------------------------------------------------------------


def context_of(source: Source, address: int) -> Any:
    pointer = ffi.cast("struct ibv_context *", address)
    return SimpleNamespace(provider=None, pointer=pointer, async_fd=source.async_fd)


@pytest.fixture
def context(source: Source, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        router_module, "take_async_event", lambda _provider, _pointer: source.take_async_event()
    )
    return context_of(source, 0x1000)


EVENTS = 200


class LoopInAThread:
    """A loop that watches the context, in a thread of its own."""

    def __init__(self, context: Any, backend: str) -> None:
        self.context = context
        self.heard: list[int] = []
        self.threads: set[int] = set()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: anyio.run(self._run, backend=backend))
        self.thread.start()
        assert self.ready.wait(20)

    def _handle(self, event: AsyncEvent) -> None:
        self.threads.add(threading.get_ident())
        self.heard.append(event.port)

    async def _run(self) -> None:
        loop = current_event_loop()
        subscription = join_router(self.context, loop, self._handle)
        loop.watch(self.context.async_fd, subscription.router.read)
        self.ready.set()
        await until(lambda: len(self.heard) == EVENTS)
        loop.unwatch(self.context.async_fd)
        subscription.leave()


def test_what_any_of_two_loops_reads_both_hear_in_the_same_order(
    source: Source, context: Any
) -> None:
    loops = [LoopInAThread(context, backend) for backend in ("asyncio", "trio")]
    for number in range(EVENTS):
        source.tell(AsyncEventType.GID_CHANGE, number)
    for loop in loops:
        loop.thread.join(30)
        assert loop.heard == list(range(EVENTS))
        assert loop.threads == {loop.thread.ident}
    assert not {0x1000, 0x2000} & {address for _, address in router_module._routers}


@pytest.mark.anyio
async def test_left_router_gets_no_event_in_flight(context: Any) -> None:
    heard: list[tuple[str, AsyncEvent]] = []

    def hear(name: str) -> Callable[[AsyncEvent], None]:
        return lambda event: heard.append((name, event))

    loop = current_event_loop()
    first, second = (join_router(context, loop, hear(name)) for name in ("first", "second"))
    assert first.router is second.router
    event = AsyncEvent(AsyncEventType.SM_CHANGE, 1)
    first.router.deliver(event)
    first.leave()
    first.leave()
    await until(lambda: heard)
    assert heard == [("second", event)]
    second.leave()
    third = join_router(context, loop, hear("third"))
    assert third.router is not second.router  # the last one's was forgotten
    third.leave()


@pytest.mark.anyio
async def test_contexts_have_routers_of_their_own(source: Source, context: Any) -> None:
    loop = current_event_loop()
    one = join_router(context, loop, lambda event: None)
    other = join_router(context_of(source, 0x2000), loop, lambda event: None)
    assert isinstance(one.router, AsyncEventRouter)
    assert one.router is not other.router
    one.leave()
    other.leave()
    assert not {0x1000, 0x2000} & {address for _, address in router_module._routers}


COLLECTED = """
import faulthandler, gc
from types import SimpleNamespace
from aiordma._base.enums import AsyncEventType
from aiordma._native import ffi
from aiordma._runtime import async_events
from aiordma._runtime.async_events import join_router
from aiordma.verbs import AsyncEvent

class Loop:
    def call_from_thread(self, callback):
        callback()

class Forgotten:
    def __init__(self, subscription):
        self.subscription, self.itself = subscription, self

    def __del__(self):
        self.subscription.leave()
        ended.append(self.subscription)

faulthandler.dump_traceback_later(20, exit=True)
pointer = ffi.cast("struct ibv_context *", 0x1000)
context, loop = SimpleNamespace(provider=None, pointer=pointer), Loop()
gc.collect()
gc.disable()
within = 0
for allocations in range(40):
    ended, heard = [], []
    Forgotten(join_router(context, loop, heard.append))
    gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
    gc.enable()
    second = join_router(context, loop, heard.append)
    gc.disable()
    within += bool(ended)
    third = join_router(context, loop, heard.append)
    assert third.router is second.router
    third.router.deliver(AsyncEvent(AsyncEventType.SM_CHANGE, 1))
    assert len(heard) == 3 - len(ended), (allocations, heard)
    gc.collect()
    for subscription in (second, third):
        subscription.leave()
    assert not async_events._routers
print("a finalizer left within", within)
"""


def test_finalizer_may_leave_while_another_hub_joins() -> None:
    """The garbage collector ends a hub at any allocation, also of the thread that joins."""
    assert int(run_child(COLLECTED).split()[-1]) > 0


FORKED_WITHIN = """
import asyncio, faulthandler, os, threading
import aiordma.testing
from aiordma._runtime import async_events

async def main():
    async with aiordma.testing.connected_pair() as (client, server):
        await client.send(b"x")
        await server.receive()

def hold():
    with async_events._lock:
        held.set()
        may_end.wait()

asyncio.run(main())
held, may_end = threading.Event(), threading.Event()
holding = threading.Thread(target=hold)
holding.start()
held.wait()
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(20, exit=True)
    asyncio.run(main())
    os._exit(0)
status = os.waitpid(child, 0)[1]
may_end.set()
holding.join()
assert status == 0
"""


@pytest.mark.promise("Fork safety")
def test_child_joins_though_a_thread_joined_at_the_fork() -> None:
    run_child(FORKED_WITHIN, AIORDMA_DEVICE="software")


def test_finalizer_that_reads_keeps_the_order(source: Source, context: Any) -> None:
    heard: list[int] = []
    subscription: Subscription

    def tell(callback: Callable[[], None]) -> None:
        subscription.router.read()  # as a finalizer may, at an allocation of the delivery
        callback()

    loop: Any = SimpleNamespace(call_from_thread=tell)
    subscription = join_router(context, loop, lambda event: heard.append(event.port))
    for number in range(3):
        source.tell(AsyncEventType.GID_CHANGE, number)
    subscription.router.read()
    subscription.leave()
    assert heard == [0, 1, 2]
