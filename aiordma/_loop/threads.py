"""Blocking calls into the driver, each run by a worker thread, each to its end.

A call owns what it works on until it returns: a queue pair that is being created cannot be
destroyed, memory that is being registered cannot be freed. So a call that has begun is never
abandoned. A shielded scope would not do: asyncio's own cancellation (Task.cancel, wait_for, the end
of asyncio.run) reaches through it, and ends the wait while the thread is still in C.

The workers are shared by every event loop of the process. Each `Lane` has its own, at most a fixed
number, so that no call waits for ever behind calls of another kind: a call that a peer can hold up
(`PEERS`) delays neither one that creates (`CREATES`) nor one that destroys (`DESTROYS`). A worker
is started when a call finds none idle, and ends after `IDLE_SECONDS` without a call. Workers are
daemons: no thread can call one back, and the program must be able to end. A forked child starts
with no workers and no calls.

A thread can fail to start (a limit of threads or of memory). While a lane has a worker, its calls
wait for that one. Otherwise `start_call` raises, and `start_destroy`, which has no caller to raise
to, tries again and at last runs the call on the event loop's own thread.
"""

import errno
import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import TypeVar

import anyio

from aiordma._base.errors import VerbsCallError
from aiordma._base.interrupts import deferring, deferring_steps
from aiordma._base.process import here
from aiordma._loop.event_loop import EventLoop

__all__ = (
    "CREATES",
    "DESTROYS",
    "PEERS",
    "THREAD_NAME",
    "Calls",
    "Lane",
    "Once",
    "calls_under_way",
    "in_thread",
    "outwait",
    "start_call",
    "start_destroy",
)

logger: logging.Logger = logging.getLogger("aiordma")

THREAD_NAME = "aiordma: a call into the driver"

IDLE_SECONDS = 5.0
"""How long a worker waits for another call before it ends."""

RETRY_SECONDS = 0.05
"""How long after a failed start of a thread the first retry is; each further one waits twice as
long."""

RETRIES = 4
"""After as many a destroy runs on the event loop's thread: after 0.75 s."""

Result = TypeVar("Result")


class _Call:
    """A function that waits for a worker, or is being run by one."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Callable[[], None] = run


class _Workers:
    """A queue of calls, and the threads that run them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = Condition()
        self._waiting: deque[_Call] = deque()
        self._count = 0
        self._idle = 0

    @property
    def calls(self) -> int:
        """How many calls wait or run."""
        with self._changed:
            return len(self._waiting) + self._count - self._idle

    def submit(self, call: _Call) -> bool:
        """Queue a call, and return whether a worker will run it: there is one, or one was started.
        The call stays queued either way."""
        with self._changed:
            self._waiting.append(call)
            return self._ensure_worker()

    def ensure_worker(self) -> bool:
        """Return whether there is a worker to run what is queued; start one if there is none."""
        with self._changed:
            return self._ensure_worker()

    def withdraw(self, call: _Call) -> bool:
        """Take a call out of the queue, and return whether it was still there: it never runs."""
        with self._changed:
            try:
                self._waiting.remove(call)
            except ValueError:
                return False
            return True

    def _ensure_worker(self) -> bool:
        if self._idle < len(self._waiting) and self._count < self._most:
            self._count += 1
            try:
                Thread(target=self._work, name=THREAD_NAME, daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                self._count -= 1
                logger.debug("no worker thread was started: %s", error)
        self._changed.notify()
        return self._count > 0

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                try:
                    found = self._changed.wait_for(lambda: self._waiting, IDLE_SECONDS)
                finally:
                    self._idle -= 1
                if not found:
                    self._count -= 1
                    return
                call = self._waiting.popleft()
            try:
                call.run()
            except BaseException:
                logger.exception("a call into the driver could not report its end")
            del call, found  # an idle worker keeps nothing alive


class Lane:
    """The calls of one kind: those that wait for one another.

    Args:
        max_workers: the most threads at the same time; further calls wait.
    """

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self.reset()

    def reset(self) -> None:
        """Begin with no worker. Those of before end once they are idle."""
        self._process = here.pid
        self._workers = _Workers(self.max_workers)

    @property
    def workers(self) -> _Workers:
        """This process's: a forked child has none of its parent's threads."""
        if self._process != here.pid:
            self.reset()
        return self._workers


PEERS = Lane(64)
"""Calls that last until a peer answers: siw connects within the call, RoCE asks for an address."""

CREATES = Lane(16)
"""Calls that open, create or register something of this machine."""

DESTROYS = Lane(16)
"""Calls that close or destroy something. None of them waits for a call of any lane."""

_LANES = (PEERS, CREATES, DESTROYS)


def calls_under_way() -> int:
    """Return how many calls wait for a worker or run, of all event loops."""
    return sum(lane.workers.calls for lane in _LANES)


def _reporting(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
) -> _Call:
    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = raised
        result = error
        loop.call_from_thread(lambda: then(result))

    return _Call(run)


@deferring
def start_call(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
    lane: Lane = CREATES,
) -> Callable[[], bool]:
    """Run a function in a worker thread, and `then(error or None)` on the loop's thread once it has
    returned.

    No task is involved, so no cancellation either. If the loop has ended by then, `then` is not
    called.

    Returns:
        A function that withdraws the call, and returns whether it could: the call had not begun,
        and now neither `function` nor `then` is ever called.

    Raises:
        VerbsCallError: no thread could be started, and the lane has none. Nothing was done.
    """
    call, workers = _reporting(loop, function, then), lane.workers
    if not workers.submit(call) and workers.withdraw(call):
        raise VerbsCallError(errno.EAGAIN, "pthread_create")
    return lambda: workers.withdraw(call)


@deferring
def start_destroy(
    loop: EventLoop,
    function: Callable[[], object],
    then: Callable[[BaseException | None], None],
) -> None:
    """`start_call` for a function that destroys: it runs whatever happens.

    While no thread can be started the call is retried by a timer, and after `RETRIES` retries it
    runs on the loop's thread, which it may block for some milliseconds. If the loop has ended, both
    functions run in the calling thread, at once.
    """
    if loop.has_ended:
        error: BaseException | None = None
        try:
            function()
        except Exception as raised:
            error = raised
        then(error)
        return
    call = _reporting(loop, function, then)
    if not DESTROYS.workers.submit(call):
        _retry(loop, call, RETRY_SECONDS, RETRIES)


def _retry(loop: EventLoop, call: _Call, delay: float, left: int) -> None:
    def again() -> None:
        if DESTROYS.workers.ensure_worker():
            return
        if left > 1:
            _retry(loop, call, 2 * delay, left - 1)
        elif DESTROYS.workers.withdraw(call):
            logger.warning(
                "no thread can be started: the event loop's thread destroys an RDMA object"
            )
            call.run()

    loop.call_later(delay, again)


class Once:
    """An event that can be set after its loop has ended, too: then it wakes nobody."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._event = anyio.Event()

    def set(self) -> None:
        """Set it, and wake the tasks that wait. Idempotent."""
        try:
            self._event.set()
        except RuntimeError:
            if not self._loop.has_ended:
                raise

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._event.wait()


async def outwait(event: anyio.Event | Once) -> None:
    """Wait for an event, whatever is raised in the wait: a cancellation, or trio's
    KeyboardInterrupt. The last of those is raised once the event is set."""
    interrupted: BaseException | None = None
    while not event.is_set():
        try:
            with anyio.CancelScope(shield=True):
                await event.wait()
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt) as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


@deferring_steps
async def in_thread(
    loop: EventLoop, function: Callable[[], Result], lane: Lane = CREATES
) -> Result:
    """Run a function in a worker thread, to its end, and return its result.

    Cancellation: the call runs to its end first. The caller gets no result: what the function
    makes, it must also put where the caller's clean-up finds it.

    Raises:
        VerbsCallError: no thread could be started. Nothing was done.
    """
    returned = anyio.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def then(error: BaseException | None) -> None:
        if error is not None:
            errors.append(error)
        returned.set()

    start_call(loop, lambda: results.append(function()), then, lane)
    await outwait(returned)
    if errors:
        raise errors[0]
    return results[0]


class Calls:
    """Calls under way on one object, and what must not happen before they are back: destroying it
    under a thread that works with it."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._count = 0
        self._then: Callable[[], object] | None = None

    @deferring_steps
    async def run(self, function: Callable[[], Result]) -> Result:
        """`in_thread`, counted."""
        self.begin()
        try:
            return await in_thread(self._loop, function)
        finally:
            self.end()

    def begin(self) -> None:
        """Count a call that the caller runs."""
        self._count += 1

    def end(self) -> None:
        """It is back; on the loop's thread."""
        self._count -= 1
        then, self._then = (None, self._then) if self._count else (self._then, None)
        if then is not None:
            then()

    def delays(self, then: Callable[[], object]) -> bool:
        """Return whether any is under way; if so, `then` is called when the last one is back."""
        if self._count:
            self._then = then
        return self._count > 0
