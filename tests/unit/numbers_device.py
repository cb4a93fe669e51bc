"""A device of numbers, for tests of the hub: only the C call that drains it is played."""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import drain as drain_module
from aiordma import hub as hub_module
from aiordma._native import ffi
from aiordma.enums import Transport
from aiordma.event_loop import current_event_loop
from aiordma.hub import DeviceHub
from aiordma.verbs.completion import COMPLETION

MAX_CQE = 10_000
ASYNC_FD = 78


class Timer:
    def __init__(self, delay: float, callback: Callable[[], None]) -> None:
        self.delay = delay
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Remembers what it is asked for; the test plays the time."""

    def __init__(self) -> None:
        self.running: Any = None
        with suppress(RuntimeError):  # most of these tests need no real one
            self.running = current_event_loop()
        self.watched: dict[int, Callable[[], None]] = {}
        self.timers: list[Timer] = []

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    asyncio_loop = None

    def poll(self, _drain: object) -> bool:
        return False

    def unpoll(self, _drain: object) -> None:
        pass

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay, callback))
        return self.timers[-1]

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        self.running.call_from_thread(callback)

    def fire(self) -> None:
        """Let the timers pass that are there now."""
        due, self.timers = self.timers, []
        for timer in due:
            if not timer.cancelled:
                timer.callback()


class Closable:
    def __init__(self, *_: object) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Channel(Closable):
    fd = 77
    pointer = ffi.NULL


class Device:
    """Completions to be drained, and what the drain was given."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.armed: list[list[int]] = []
        self.failure = 0
        self.context = SimpleNamespace(
            query=lambda: SimpleNamespace(max_cqe=MAX_CQE),
            transport=Transport.INFINIBAND,
            device_name="numbers0",
            async_fd=ASYNC_FD,
            pointer=ffi.NULL,
            provider=SimpleNamespace(table=ffi.NULL),
            close=lambda: None,
        )
        self.making = threading.Event()
        self.making.set()

    def complete(self, wr_id: int, status: int = 0) -> None:
        self.waiting.append(COMPLETION.pack(wr_id, status, *[0] * 12))

    def drain(self, _table: object, drain: Any) -> int:
        self.threads.add(threading.get_ident())
        if self.failure:
            return -self.failure
        count = min(len(self.waiting), drain.capacity)
        packed = b"".join(self.waiting.popleft() for _ in range(count))
        ffi.memmove(drain.batch, packed, len(packed))
        drain.more = count == drain.capacity
        self.armed.append([drain.queues[i].armed for i in range(drain.queue_count)])
        for i in range(drain.queue_count):
            drain.queues[i].armed = 1
        return count

    def make_queue(self, _context: object, entries: int, _channel: object) -> Any:
        assert self.making.wait(20), "the loop was held up"
        assert 1 <= entries <= MAX_CQE
        self.sizes.append(entries)
        queue: Any = Closable()
        queue.cqe = entries
        queue.pointer = ffi.cast("struct ibv_cq *", len(self.sizes))
        queue.key = len(self.sizes)
        return queue

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let hubs be made on it."""
        patch.setattr(drain_module, "lib", SimpleNamespace(aiordma_drain=self.drain))
        patch.setattr(hub_module, "Drain", drain_module.ReferenceDrain)
        patch.setattr(hub_module, "CompletionQueue", self.make_queue)
        patch.setattr(hub_module, "CompletionChannel", Channel)
        patch.setattr(hub_module, "ProtectionDomain", Closable)
        patch.setattr(hub_module, "BufferPool", Closable)

    def hub(self) -> tuple[DeviceHub, Loop]:
        context: Any = self.context
        loop: Any = Loop()
        hub = DeviceHub(context, loop)
        hub.start()
        return hub, loop
