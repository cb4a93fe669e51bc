"""A device whose driver is Python: C polls it, arms it and posts to it as to any other one."""

import errno
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma._base.process import here
from aiordma.types import RegistrationCache
from aiordma.verbs import Transport
from tests.internals import DeviceHub, current_event_loop, ffi
from tests.internals import hub as hub_module

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
        self.calls: set[object] = set()
        self.returned: dict[object, Callable[[], object]] = {}

    def watch(self, fd: int, callback: Callable[[], None], *, hot: bool = False) -> None:
        self.watched[fd] = callback

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    asyncio_loop = None
    has_ended = False
    is_running = True
    thread = 0
    process = here.pid

    def is_running_here(self) -> bool:
        return True

    def poll(self, _drain: object) -> bool:
        return False

    def unpoll(self, _drain: object) -> None:
        pass

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay, callback))
        return self.timers[-1]

    def call_from_thread(self, callback: Callable[[], None]) -> None:
        self.running.call_from_thread(callback)

    def waiter(self) -> Any:
        return self.running.waiter()

    def fire(self) -> None:
        """Let the timers pass that are there now."""
        due, self.timers = self.timers, []
        for timer in due:
            if not timer.cancelled:
                timer.callback()


class Closable:
    def __init__(self, *_: object, **__: object) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Pool(Closable):
    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        self.registrations = RegistrationCache()


class Channel(Closable):
    fd = 77
    pointer = ffi.NULL


class Driver:
    """A context, its queue pair and its completion queues, whose functions are Python's.

    What its posts answer is to be set: `answer`, `errno`, and which of the requests is `refused`.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int]] = deque()
        self.threads: set[int] = set()
        self.armed: list[int] = []
        """Which queues were armed, by number, in order."""
        self.polled: list[int] = []
        """Which queues were polled, by number, in order."""
        self.failure = 0
        self.posted: list[int] = []
        """The wr_ids that it was given."""
        self.works: list[tuple[Any, ...]] = []
        """How many parts, and which; of a send also its opcode and flags."""
        self.answer = self.errno = 0
        self.refused: int | None = None
        self.queues: list[Any] = []
        self.raw = ffi.new("struct ibv_context *")
        self.table = ffi.new("struct aiordma_provider *")
        self.queue_pair = ffi.new("struct ibv_qp *", {"context": self.raw})
        self._kept: list[Any] = []
        for place, name, function in (
            (self.raw.ops, "poll_cq", self._poll),
            (self.raw.ops, "req_notify_cq", self._arm),
            (self.raw.ops, "post_send", self._post),
            (self.raw.ops, "post_recv", self._post),
            (self.table, "get_cq_event", self._no_event),
        ):
            callback = ffi.callback(ffi.typeof(getattr(place, name)), function, error=-1)
            self._kept.append(callback)
            setattr(place, name, callback)

    @property
    def polls(self) -> int:
        return len(self.polled)

    def complete(self, wr_id: int, status: int = 0) -> None:
        self.waiting.append((wr_id, status))

    def add_queue(self) -> Any:
        self.queues.append(ffi.new("struct ibv_cq *", {"context": self.raw}))
        return self.queues[-1]

    def _poll(self, queue: Any, most: int, found: Any) -> int:
        self.threads.add(threading.get_ident())
        self.polled.append(1 + self.queues.index(queue))
        if self.failure:
            return -1
        count = min(len(self.waiting), most)
        for i in range(count):
            found[i].wr_id, found[i].status = self.waiting.popleft()
        return count

    def _arm(self, queue: Any, _solicited_only: int) -> int:
        self.armed.append(1 + self.queues.index(queue))
        return 0

    def _no_event(self, _channel: Any, _queue: Any, _context: Any) -> int:
        ffi.errno = errno.EAGAIN
        return -1

    def _post(self, _to: Any, request: Any, refused: Any) -> int:
        while request != ffi.NULL:
            if len(self.posted) == self.refused:
                refused[0] = request
                break
            self.posted.append(request.wr_id)
            parts = ffi.buffer(request.sg_list, 16 * request.num_sge)[:]
            self.works.append((request.num_sge, parts, *self._rest(request)))
            request = request.next
        ffi.errno = self.errno
        return self.answer

    def _rest(self, request: Any) -> tuple[int, ...]:
        if ffi.typeof(request) is not ffi.typeof("struct ibv_send_wr *"):
            return ()
        return int(request.opcode), int(request.send_flags)


class Device(Driver):
    """The context that a hub is made on."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.context = SimpleNamespace(
            query=lambda: SimpleNamespace(max_cqe=MAX_CQE),
            transport=Transport.INFINIBAND,
            device_name="numbers0",
            async_fd=ASYNC_FD,
            pointer=ffi.NULL,
            provider=SimpleNamespace(table=self.table),
            close=lambda: None,
        )
        self.making = threading.Event()
        self.making.set()

    def make_queue(
        self, _context: object, entries: int, _channel: object, *, comp_vector: int
    ) -> Any:
        assert self.making.wait(20), "the loop was held up"
        assert 1 <= entries <= MAX_CQE
        self.sizes.append(entries)
        queue: Any = Closable()
        queue.cqe, queue.comp_vector = entries, comp_vector
        queue.pointer = self.add_queue()
        queue.key = int(ffi.cast("uintptr_t", queue.pointer))
        return queue

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let hubs be made on it."""
        patch.setattr(hub_module, "CompletionQueue", self.make_queue)
        patch.setattr(hub_module, "CompletionChannel", Channel)
        patch.setattr(hub_module, "ProtectionDomain", Closable)
        patch.setattr(hub_module, "BufferPool", Pool)

    def hub(self) -> tuple[DeviceHub, Loop]:
        context: Any = self.context
        loop: Any = Loop()
        hub = DeviceHub(context, loop)
        hub.start()
        return hub, loop
