"""Blocking calls into the driver. A worker thread runs each call to its end.

A call owns its objects until it returns: a queue pair that is being created cannot be destroyed,
and memory that is being registered cannot be freed. So a call that has begun is never abandoned by
its caller. A shielded scope is not enough: asyncio's own cancellation (Task.cancel, wait_for, the
end of asyncio.run) ignores it, and ends the wait while the thread is still in C.

All event loops of the process share the workers. Each `Lane` has its own, so that calls of one
kind do not block calls of another kind: a call that waits for a peer (`PEERS`) delays neither
creating calls (`CREATES`, `ACCEPTS`) nor destroying calls (`DESTROYS`). Workers are daemons,
because a call in C cannot be interrupted, and the program must be able to end. A forked child has
none.
"""

import errno
import logging
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from threading import RLock, Thread
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel

from aiordma._base.errors import VerbsCallError
from aiordma._base.process import here
from aiordma._base.system import system
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._loop.private import is_in_scope

logger: logging.Logger = logging.getLogger("aiordma")

THREAD_NAME = "aiordma: a call into the driver"

IDLE_SECONDS = 5.0
"""Seconds that a worker waits for another call before it ends."""

MOST_ABANDONED = 448
"""The maximum number of abandoned calls of a lane that delay no other call."""

Result = TypeVar("Result")


class _Call:
    """A function that waits for a worker, or that a worker runs."""

    __slots__ = ("has_ended", "is_abandoned", "todo")

    def __init__(self, run: Callable[[], None]) -> None:
        self.todo: list[Callable[[], None]] = [run]
        """Emptied by the worker that runs it, or by who withdraws it."""
        self.has_ended = self.is_abandoned = False

    def run(self) -> None:
        """Run it, unless it was withdrawn."""
        try:
            function = self.todo.pop()
        except IndexError:
            return
        try:
            function()
        except BaseException:
            logger.exception("a call into the driver could not report its end")


class Lane:
    """The calls of one kind, and the worker threads that run them.

    Args:
        max_workers: the largest number of threads at a time; further calls wait.
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self._keeps_worker = False
        self.reset()

    def reset(self) -> None:
        """Begin with no worker and no call: in a forked child, which has none of the threads. The
        workers of before end once they are idle."""
        self._process = here.pid
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = RLock()  # a finalizer can submit a call where this thread holds it
        self._calls = self._workers = self._abandoned = 0

    @property
    def calls(self) -> int:
        """How many calls wait or run, in any thread."""
        return self._calls if self._process == here.pid else 0

    def submit(self, run: Callable[[], None]) -> Callable[[], bool]:
        """Run a function in a worker thread. It must not raise.

        Returns:
            A function that abandons the call. If it has not begun, it never runs: the result is
            True. Otherwise it goes on, and delays no other call.

        Raises:
            VerbsCallError: no thread could be started, and the lane has none.
        """
        if system.is_simulated:
            run()  # in a simulation, nothing happens at the same time
            return lambda: False
        if self._process != here.pid:
            self.reset()
        call = _Call(run)
        with self._lock:
            self._calls += 1
            try:
                self._ensure_worker()
            except BaseException:
                self._calls -= 1
                raise
        self._queue.put(call)
        return partial(self._abandon, call, self._lock)

    def keep_worker(self) -> None:
        """Start a worker that never ends, unless there is one: later calls need no new thread.

        Raises:
            VerbsCallError: no thread could be started.
        """
        if not self._keeps_worker or self._process != here.pid:
            self.submit(lambda: None)
            self._keeps_worker = True

    def _ensure_worker(self) -> None:
        if self._calls <= self._workers or self._workers >= self.max_workers + self._abandoned:
            return
        work = partial(self._work, self._queue, self._lock)
        self._workers += 1
        try:
            Thread(target=work, name=THREAD_NAME, daemon=True).start()
        except RuntimeError as error:
            self._workers -= 1
            logger.debug("starting a worker thread failed: %s", error)
            if not self._workers:
                raise VerbsCallError(errno.EAGAIN, "pthread_create") from None

    def _abandon(self, call: _Call, lock: RLock) -> bool:
        if lock is not self._lock or self._process != here.pid:
            return False  # a call of the parent, which runs it
        with lock:
            with suppress(IndexError):  # the call has begun
                call.todo.pop()
                call.has_ended = True
                return True
            if not (call.has_ended or call.is_abandoned) and self._abandoned < MOST_ABANDONED:
                call.is_abandoned = True
                self._abandoned += 1
                self._ensure_worker()
        return False

    def _work(self, calls: "queue.SimpleQueue[_Call]", lock: RLock) -> None:
        while True:
            try:
                call = calls.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with lock:
                    if lock is self._lock and (
                        self._calls >= self._workers or (self._keeps_worker and self._workers == 1)
                    ):
                        continue  # a call is being put into the queue, or this one is kept
                    self._workers -= lock is self._lock
                    return
            call.run()
            with lock:
                call.has_ended = True
                if lock is self._lock:
                    self._calls -= 1
                    self._abandoned -= call.is_abandoned
                    if self._workers > self.max_workers + self._abandoned:
                        self._workers -= 1
                        return
            del call  # an idle worker keeps no objects alive


PEERS = Lane(64)
"""Calls that last until a peer or a name server answers: siw connects within the call, and RoCE
resolves an address within the call."""

CREATES = Lane(16)
"""Calls that open, create or register an object on this machine."""

ACCEPTS = Lane(16)
"""Calls that create what a listener's accepts wait for: the connects of the process do not delay
them."""

DESTROYS = Lane(16)
"""Calls that close or destroy an object. None of them waits for a call of any lane."""


def start_call(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
    lane: Lane = CREATES,
) -> Callable[[], bool]:
    """Run a function in a worker thread, and then `then(error or None)` on the loop's thread.

    No task is involved, so nothing can be cancelled. If the loop has ended by then, `then` is kept
    for `EventLoop.undelivered`.

    Returns:
        A function that abandons the call, as of `Lane.submit`. After it has returned True, neither
        `function` nor `then` is called.

    Raises:
        VerbsCallError: no thread could be started, and the lane has none. Nothing was done.
    """
    counted = object()

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = raised
        try:
            loop.call_from_thread(partial(then, error))
        finally:
            loop.calls.discard(counted)
            del error  # its traceback holds this frame

    def abandon() -> bool:
        is_withdrawn = withdraw()
        if is_withdrawn:
            loop.calls.discard(counted)
        return is_withdrawn

    loop.calls.add(counted)
    try:
        withdraw = lane.submit(run)
    except BaseException:
        loop.calls.discard(counted)
        raise
    return abandon


def start_destroy(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
    *,
    blocks: bool = True,
) -> None:
    """Run a destroying function as `start_call` does, but always run it: in the calling thread if
    it does not block, if the loop has ended, or if no thread can be started, where it may block for
    some milliseconds."""
    if blocks and not loop.has_ended:
        try:
            start_call(loop, function, then, DESTROYS)
        except VerbsCallError:
            logger.warning("no thread can be started: the calling thread destroys an RDMA object")
        else:
            return
    error: BaseException | None = None
    try:
        function()
    except BaseException as raised:
        error = raised
    try:
        then(error)
    finally:
        del error  # its traceback holds this frame


class Once:
    """An event that can also be set after its loop has ended. It then wakes no task."""

    __slots__ = ("_is_set", "_loop", "_waiters")

    def __init__(self, loop: EventLoop, *, is_set: bool = False) -> None:
        self._loop = loop
        self._is_set = is_set
        self._waiters: list[Waiter] = []

    def set(self) -> None:
        """Set the event, and wake the waiting tasks. Idempotent."""
        self._is_set = True
        try:
            while self._waiters:
                self._waiters.pop().wake()
        except RuntimeError:
            if not self._loop.has_ended:
                raise

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._is_set

    async def wait(self) -> None:
        """Wait until the event is set."""
        if self._is_set:
            await anyio.lowlevel.checkpoint()
            return
        waiter = self._loop.waiter()
        self._waiters.append(waiter)
        try:
            await waiter.wait()
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)


async def outwait(event: anyio.Event | Once) -> None:
    """Wait for an event in spite of cancellations and trio's KeyboardInterrupt. The last such
    exception is raised once the event is set; but a scope's cancellation not here: the scope raises
    it at the next wait."""
    interrupted: BaseException | None = None
    try:
        while not event.is_set():
            shield: AbstractContextManager[object] = nullcontext()
            if is_in_scope():
                shield = anyio.CancelScope(shield=True)
            try:
                with shield:
                    await event.wait()
            except GeneratorExit:
                raise  # no event loop runs here, which anyio would be asked for
            except (anyio.get_cancelled_exc_class(), KeyboardInterrupt) as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
    finally:
        del interrupted  # its traceback holds this frame, and so the callers' buffers


def close_unwanted(close: Callable[[Result], object], made: Result) -> None:
    """Close what a cancelled call has created. An error is logged, because the caller gets the
    cancellation."""
    try:
        close(made)
    except Exception as error:
        logger.error("closing %r, which a cancelled call created, failed: %s", made, error)


async def in_thread(
    loop: EventLoop,
    function: Callable[[], Result],
    lane: Lane = CREATES,
    *,
    blocks: bool = True,
    on_cancelled: Callable[[Result], object] = lambda _result: None,
    on_lost: Callable[[], object] = lambda: None,
) -> Result:
    """Run a function in a worker thread, to its end, and return its result.

    Args:
        loop: the caller's event loop.
        function: the function to run.
        lane: the lane of the worker.
        blocks: whether the function can block; else it runs here.
        on_cancelled: called with the result on the loop's thread if the caller is cancelled, to
            close or to keep the object that the function created. Its errors are logged.
        on_lost: called once the function has returned if the loop has ended, because the caller
            does not continue then. `on_cancelled` is called before it.

    Raises:
        VerbsCallError: no thread could be started. Nothing was done.

    Cancellation: the call first runs to its end.
    """
    if not blocks:
        return function()
    returned, nothing = Once(loop), object()
    result: Any = nothing
    error: BaseException | None = None
    wait, has_left = object(), False

    def call() -> None:
        nonlocal result
        result = function()

    def drop() -> None:
        nonlocal result, error
        made, result = result, nothing
        failed, error = error, None
        if made is not nothing:
            close_unwanted(on_cancelled, made)
        if failed is not None:  # no caller is left to see it
            logger.info("a call failed whose caller had been cancelled: %s", failed)

    def then(raised: BaseException | None) -> None:
        nonlocal error
        error = raised
        if has_left:
            lose()
            return
        loop.returned[wait] = lose
        returned.set()

    def lose() -> None:
        try:
            drop()
        finally:
            on_lost()

    start_call(loop, call, then, lane)
    try:
        try:
            await outwait(returned)
        except BaseException:
            drop()
            raise
        if error is not None:
            raise error
        return cast(Result, result)
    finally:
        has_left = True
        loop.returned.pop(wait, None)
        result = error = None  # its traceback holds this frame, and so the callers' buffers


class Calls:
    """Counts the calls under way on one object, and delays its destruction until they return.

    Args:
        loop: the object's event loop.
        blocks: whether the calls can block.
    """

    def __init__(self, loop: EventLoop, *, blocks: bool = True) -> None:
        self._loop = loop
        self._blocks = blocks
        self._count = 0
        self._then: Callable[[], object] | None = None
        self.lane: Lane = CREATES
        """The lane of the calls that `run` begins."""

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a function as `in_thread` does, and count the call."""
        if not self._blocks:
            return function()
        self.begin()
        under_way = [self.end]

        def end() -> None:
            while under_way:
                under_way.pop()()

        try:
            return await in_thread(self._loop, function, self.lane, on_lost=end)
        finally:
            end()

    def begin(self) -> None:
        """Count the beginning of a call that the caller runs."""
        self._count += 1

    def end(self) -> None:
        """Count the end of such a call, on the loop's thread."""
        self._count -= 1
        then, self._then = (None, self._then) if self._count else (self._then, None)
        if then is not None:
            then()

    def delays(self, then: Callable[[], object]) -> bool:
        """Return whether a call is under way; if so, call `then` when the last one has returned."""
        if self._count:
            self._then = then
        return self._count > 0
