"""Blocking calls into the driver. A worker thread runs each call to its end.

A call owns its objects until it returns: a queue pair that is being created cannot be destroyed,
and memory that is being registered cannot be freed. So a call that has begun is never abandoned. A
shielded scope is not enough: asyncio's own cancellation (Task.cancel, wait_for, the end of
asyncio.run) ignores it, and ends the wait while the thread is still in C.

All event loops of the process share the workers. Each `Lane` has its own workers, at most a fixed
number, so that calls of one kind do not block calls of another kind: a call that waits for a peer
(`PEERS`) delays neither creating calls (`CREATES`, `ACCEPTS`) nor destroying calls (`DESTROYS`). A
lane starts a worker for a call if none is idle. A call that the program has abandoned (a connect
that took too long) does not count while it lasts. A worker ends after `IDLE_SECONDS` without a
call. Workers are daemons, because a call in C cannot be interrupted, and the program must be able
to end. A forked child starts with no workers and no calls.

A thread can fail to start (a limit of threads or of memory). If the lane has a worker, the call
waits for it. Otherwise `start_call` raises. `start_destroy` has no caller that could handle an
error: it tries again, and finally runs the call on the event loop's own thread.
"""

import atexit
import errno
import logging
import sys
import threading
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache, partial
from threading import Lock, current_thread, get_ident
from typing import Any, TypeVar, cast
from weakref import ref

import anyio
import anyio.lowlevel

from aiordma._base.errors import VerbsCallError
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._base.process import here, reentrant_lock
from aiordma._loop.ending import ATTEMPTS, Ending
from aiordma._loop.event_loop import EventLoop, Waiter
from aiordma._native import persist

__all__ = (
    "ACCEPTS",
    "CREATES",
    "DESTROYS",
    "PEERS",
    "THREAD_NAME",
    "Calls",
    "Lane",
    "Once",
    "calls_under_way",
    "close_unwanted",
    "in_thread",
    "outwait",
    "start_call",
    "start_destroy",
)

logger: logging.Logger = logging.getLogger("aiordma")

THREAD_NAME = "aiordma: a call into the driver"

IDLE_SECONDS = 5.0
"""Seconds that a worker waits for another call before it ends."""

MOST_ABANDONED = 448
"""The maximum number of abandoned calls of a lane that delay no other call."""

START_AGAIN_SECONDS = 0.05
"""Seconds between the failed start of a thread and the first retry. The delay doubles for each
further retry."""

RETRIES = 4
"""Number of retries before a destroying call runs on the event loop's thread, after 0.75 s."""

Result = TypeVar("Result")


class _Call:
    """A function that waits for a worker, or that a worker runs.

    Args:
        run: the function.
        forget: removes the call from its loop's `calls`.
    """

    __slots__ = ("forget", "is_abandoned", "run")

    def __init__(self, run: Callable[[], None], forget: Callable[[], None]) -> None:
        self.run: Callable[[], None] = run
        self.forget: Callable[[], None] = forget
        self.is_abandoned: bool = False


_COMING: set[tuple[int, int]] = set()
"""The worker threads that have been started and have not begun: the process, and a number."""

_COMING_SECONDS = 5.0
"""The longest time for which the end of the process waits for threads to begin."""


def _outwait_coming() -> None:
    """Wait until every worker thread that was started has begun. CPython frees the state of all
    other threads as it ends, and a thread that begins afterwards uses it: the process crashed."""
    give_up = time.monotonic() + _COMING_SECONDS
    while any(process == here.pid for process, _ in tuple(_COMING)) and time.monotonic() < give_up:
        time.sleep(0.001)


def _runs_at_exit() -> bool:
    """Return whether a function that the program has registered for its exit calls: the main thread
    has ended, and runs."""
    main = threading.main_thread()
    return not main.is_alive() and main.ident == get_ident()


@cache
def _outwait_coming_at_exit() -> None:
    # Once, at the first start: functions that the program registers later are called before.
    atexit.register(_outwait_coming)


class _Worker:
    """The function of a worker thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self) -> None:
        _COMING.discard((here.pid, id(self)))
        self._work()


class _Workers:
    """A queue of calls, and the threads that run them.

    No lack of memory ends a worker that has begun, or leaves the lock locked: the lock and what
    wakes an idle worker are locks in C, and `persist` (`_native/engine/persist.c`) calls the
    worker's function again. Nobody waits for a thread to begin, except the end of the process: one
    that has not begun is counted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._process = here.pid
        self._lock = reentrant_lock()
        self._waiting: deque[_Call] = deque()
        self._count = 0
        self._idle: list[Lock] = []  # each idle worker waits until its lock is released
        self._running: set[_Call] = set()
        self._abandoned = 0

    @property
    def calls(self) -> int:
        """How many calls wait or run, in any thread. Without the lock, which a finalizer in another
        thread would wait for."""
        return len(self._waiting) + len(self._running)

    def submit(self, call: _Call) -> bool:
        """Queue a call, start a worker if needed, and return whether there is a worker to run it.
        The call stays queued in both cases. If this raises, it is not queued."""
        with self._lock:
            self._waiting.append(call)
            try:
                return self._ensure_worker()
            except BaseException:
                self._waiting.remove(call)
                raise

    def ensure_worker(self) -> bool:
        """Start a worker if needed, and return whether there is a worker to run queued calls."""
        with self._lock:
            return self._ensure_worker()

    def withdraw(self, call: _Call) -> bool:
        """Take a call out of the queue, and return whether it was there. It then never runs."""
        with self._lock:
            if call not in self._waiting:
                return False
            self._waiting.remove(call)
            return True

    def abandon(self, call: _Call) -> bool:
        """Withdraw a call, and return whether it had not begun. Otherwise another call may run in
        addition until this one returns, for at most `MOST_ABANDONED` calls."""
        if self._process != here.pid:
            return False  # the calls are those of the parent, which runs them
        if self.withdraw(call):
            return True
        with self._lock:
            if call in self._running and not call.is_abandoned:
                if self._abandoned < MOST_ABANDONED:
                    call.is_abandoned = True
                    self._abandoned += 1
                self._ensure_worker()
        return False

    def _ensure_worker(self) -> bool:
        # The other workers look at the queue before they wait.
        coming = self._count - len(self._running) - len(self._idle)
        if coming < len(self._waiting):
            if self._idle:
                self._idle.pop().release()
            elif self._count < self._most + self._abandoned:
                self._start_worker()
        return self._count > 0

    def _start_worker(self) -> None:
        work = _Worker(self._work)
        coming = here.pid, id(work)
        started = ref(work)  # the thread has the only reference, from its start to its end
        _outwait_coming_at_exit()
        _COMING.add(coming)
        self._count += 1
        try:
            start_new_thread(persist, (work,))
        except Exception as error:
            with suppress(MemoryError):
                logger.debug("starting a worker thread failed: %s", error)
        del work
        if started() is None:  # else it runs, and there was no memory for the number of the thread
            self._count -= 1
            _COMING.discard(coming)
        elif _runs_at_exit():
            # `_outwait_coming` may have been called before the function that calls this.
            _outwait_coming()

    def _work(self) -> None:
        try:
            with suppress(Exception):  # without memory it has another name
                # Not a Thread: `Thread.start` waits for ever for one that finds no memory.
                current_thread().name = THREAD_NAME
            while self._work_once():
                pass
        finally:
            if sys.version_info < (3, 13):  # later ones do it themselves
                threading._active.pop(get_ident(), None)  # type: ignore[attr-defined]

    def _work_once(self) -> bool:
        # In a call of its own: an idle worker must not keep objects alive.
        call = self._next()
        if call is None:
            return self._wait()
        try:
            call.run()
        except BaseException:
            with suppress(MemoryError):
                logger.exception("a call into the driver could not report its end")
        finally:
            self._lock.acquire()  # `with` would take memory
            self._running.discard(call)
            self._abandoned -= call.is_abandoned
            self._lock.release()
        return True

    def _next(self) -> _Call | None:
        with self._lock:
            if not self._waiting or self._count > self._most + self._abandoned:
                return None
            call = self._waiting[0]
            self._running.add(call)  # first: `calls` counts it at every moment
            self._waiting.popleft()
            return call

    def _wait(self) -> bool:
        """Wait for a call, and return whether the worker goes on. If not, it is not counted."""
        wake = Lock()
        wake.acquire()
        with self._lock:
            if self._count > self._most + self._abandoned:
                self._count -= 1
                return False
            if self._waiting:
                return True
            self._idle.append(wake)
        try:
            wake.acquire(True, IDLE_SECONDS)
        finally:
            self._lock.acquire()  # `with` would take memory
            is_woken = wake not in self._idle
            if not is_woken:
                self._idle.remove(wake)
            self._lock.release()
        with self._lock:
            if not is_woken and not self._waiting:
                self._count -= 1
                return False
            return True


class Lane:
    """The calls of one kind, which share a limited number of workers.

    Args:
        max_workers: the largest number of threads at a time; further calls wait.
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self.reset()

    def reset(self) -> None:
        """Begin with no worker. The previous workers end once they are idle."""
        self._process = here.pid
        self._workers = _Workers(self.max_workers)

    @property
    def workers(self) -> _Workers:
        """The workers of this process. A forked child has none of its parent's threads."""
        if self._process != here.pid:
            self.reset()
        return self._workers


PEERS = Lane(64)
"""Calls that last until a peer answers: siw connects within the call, and RoCE resolves an address
within the call."""

CREATES = Lane(16)
"""Calls that open, create or register an object on this machine."""

ACCEPTS = Lane(16)
"""Calls that create what a listener's accepts wait for. The connects of the process, which create
in `CREATES`, do not delay them: they may wait for the accepts of a listener of the process."""

DESTROYS = Lane(16)
"""Calls that close or destroy an object. None of them waits for a call of any lane."""

_LANES = (PEERS, CREATES, ACCEPTS, DESTROYS)


def calls_under_way() -> int:
    """Return how many calls of all event loops wait for a worker or run."""
    return sum(lane.workers.calls for lane in _LANES)


def _reporting(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
) -> _Call:
    counted = object()

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = raised
        try:
            while True:
                try:
                    loop.call_from_thread(partial(then, error))
                    break
                except MemoryError:  # nothing else ends the caller's wait
                    time.sleep(START_AGAIN_SECONDS)
        finally:
            forget()
            del error  # its traceback holds this frame

    def forget() -> None:
        loop.calls.discard(counted)

    call = _Call(run, forget)
    loop.calls.add(counted)  # last: the loop's end waits for it
    return call


@deferring
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
        A function that abandons the call. If it has not begun, it is withdrawn: the result is True,
        and neither `function` nor `then` is called. Otherwise the call continues, and delays no
        others.

    Raises:
        VerbsCallError: no thread could be started, and the lane has none. Nothing was done.
        MemoryError: nothing was done.
    """
    workers = lane.workers

    def abandon() -> bool:  # made first: nothing may fail once the call is queued
        is_withdrawn = workers.abandon(call)
        if is_withdrawn:
            call.forget()
        return is_withdrawn

    call = _reporting(loop, function, then)
    try:
        has_worker = workers.submit(call) or not workers.withdraw(call)
    except BaseException:
        call.forget()
        raise
    if not has_worker:
        call.forget()
        raise VerbsCallError(errno.EAGAIN, "pthread_create")
    return abandon


@deferring
def start_destroy(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
) -> None:
    """Run a destroying function as `start_call` does, but always run it.

    If no thread can be started, a timer tries again. After `RETRIES` retries the function runs on
    the loop's thread, which it may block for some milliseconds. If the loop has ended, both
    functions run in the calling thread, at once. A MemoryError is raised before anything is done.
    """
    if loop.has_ended:
        error: BaseException | None = None
        try:
            function()
        except Exception as raised:
            error = raised
        try:
            then(error)
        finally:
            del error  # its traceback holds this frame
        return
    call = _reporting(loop, function, then)
    try:
        has_worker = DESTROYS.workers.submit(call)
    except BaseException:
        call.forget()
        raise
    try:
        if not has_worker:
            _retry(loop, call, START_AGAIN_SECONDS, RETRIES)
    except MemoryError:
        if DESTROYS.workers.withdraw(call):
            call.forget()
            raise
        # Otherwise a worker has it already.


def _retry(loop: EventLoop, call: _Call, delay: float, left: int) -> None:
    def again() -> None:
        if DESTROYS.workers.ensure_worker():
            return
        if left > 1:
            with suppress(MemoryError):  # no memory for a timer: now
                _retry(loop, call, 2 * delay, left - 1)
                return
        if DESTROYS.workers.withdraw(call):
            with suppress(MemoryError):
                logger.warning(
                    "no thread can be started: the event loop's thread destroys an RDMA object"
                )
            call.run()

    loop.call_later(delay, again)


class Once:
    """An event that can also be set after its loop has ended. It then wakes no task."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiters: list[Waiter] = []

    def set(self) -> None:
        """Set the event, and wake the waiting tasks. Idempotent: if there was no memory to wake a
        task (MemoryError), the next call wakes it."""
        self._is_set = True
        try:
            while self._waiters:
                self._waiters[-1].wake()
                self._waiters.pop()
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
    exception is raised once the event is set."""
    interrupted: BaseException | None = None
    attempts = ATTEMPTS
    try:
        while not event.is_set():
            try:
                with anyio.CancelScope(shield=True):
                    await event.wait()
            except (anyio.get_cancelled_exc_class(), KeyboardInterrupt) as error:
                interrupted = error
            except MemoryError:
                attempts -= 1
                if not attempts:
                    raise
        if interrupted is not None:
            raise interrupted
    finally:
        del interrupted  # its traceback holds this frame, and so the callers' buffers


def close_unwanted(close: Callable[[Result], object], made: Result) -> None:
    """Close what a cancelled call has created. An error is logged, because the caller gets the
    cancellation: what the driver refuses to destroy is destroyed with its parent."""
    try:
        close(made)
    except MemoryError:
        raise
    except Exception as error:
        with suppress(MemoryError):
            logger.error("closing %r, which a cancelled call created, failed: %s", made, error)


@deferring_steps
async def in_thread(
    loop: EventLoop,
    function: Callable[[], Result],
    lane: Lane = CREATES,
    *,
    on_cancelled: Callable[[Result], object] = lambda _result: None,
    on_lost: Callable[[], object] = lambda: None,
) -> Result:
    """Run a function in a worker thread, to its end, and return its result.

    Args:
        loop: the caller's event loop.
        function: the function to run.
        lane: the lane of the worker.
        on_cancelled: called with the result on the loop's thread if the caller is cancelled, to
            close or to keep the object that the function created. Its errors are logged.
        on_lost: called once the function has returned if the loop has ended, because the caller
            does not continue then. `on_cancelled` is called before it.

    Raises:
        VerbsCallError: no thread could be started. Nothing was done.

    Cancellation: the call first runs to its end.
    """
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
        settling.run()

    def settle() -> None:
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

    settling = Ending(loop, settle)
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
    """Counts the calls under way on one object, and delays its destruction until they return."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._count = 0
        self._then: Callable[[], object] | None = None
        self.lane: Lane = CREATES
        """The lane of the calls that `run` begins."""

    @deferring_steps
    async def run(self, function: Callable[[], Result]) -> Result:
        """Run a function as `in_thread` does, and count the call."""
        self.begin()
        with ExitStack() as until_end:
            until_end.callback(self.end)
            return await in_thread(self._loop, function, self.lane, on_lost=until_end.close)

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
