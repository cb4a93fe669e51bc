"""WorkRequest: the awaitable that a posted work request is.

The rule of cancellation lives here. No verb takes one posted request back, so cancelling a task
that awaits a request abandons the result and nothing else: the request stays in flight, and what
the device may touch stays held, until the completion arrives or the queue pair is destroyed.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from aiordma._native import given, in_c
from aiordma.event_loop import EventLoop, Waiter
from aiordma.ranges import RemoteMemory
from aiordma.verbs import WorkCompletion

__all__ = ("Holdable", "OpenRequests", "RequestOwner", "WorkRequest")

logger = logging.getLogger("aiordma")


class Holdable(Protocol):
    """Memory that a request keeps from being freed or reused."""

    def hold(self) -> None:
        """The request is posted."""

    def release(self) -> None:
        """The request has ended."""


class RequestOwner(Protocol):
    """The endpoint that posted a request."""

    loop: EventLoop

    def request_failed(self, request: "WorkRequest", raw: tuple[int, ...]) -> Exception:
        """Turn a failed completion into its error."""

    def request_ended(self, request: "WorkRequest") -> None:
        """Take back the request's slot."""

    def run_ended(self, earlier: "WorkRequest", last: "WorkRequest") -> None:
        """End a request that tells nothing of its end by the one behind it, which has ended."""


@in_c("WorkRequest")
class WorkRequest:
    """A posted work request. Await it for its WorkCompletion; any number of tasks may, any
    number of times.

    Awaiting raises the WorkCompletionError that ended it. Cancelling an await leaves the request
    in flight and its memory held; the completion then is nobody's news. `operation` names the
    request (SEND, RECV, RDMA_READ, RDMA_WRITE, ...), `length` is its local bytes.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_error",
        "_held",
        "_owner",
        "_result",
        "_run",
        "_waiters",
        "completes_as",
        "is_receive",
        "length",
        "operation",
        "remote",
        "wr_id",
    )

    def __init__(
        self,
        owner: RequestOwner,
        operation: str,
        length: int,
        held: Sequence[Holdable],
        remote: RemoteMemory | None = None,
        *,
        is_receive: bool = False,
    ) -> None:
        self.operation = operation
        self.length = length
        self.remote = remote
        self.is_receive = is_receive
        self.wr_id = 0
        self.completes_as = 0
        self._owner = owner
        self._held = held
        self._result: WorkCompletion | None = None
        self._error: Exception | None = None
        self._waiters: list[Waiter] = []
        self._callbacks: list[Callable[[WorkRequest], None]] = []
        self._run: Sequence[WorkRequest] = ()
        for memory in held:
            memory.hold()

    def __repr__(self) -> str:
        state = "in flight"
        if self._error is not None:
            state = f"failed: {type(self._error).__name__}"
        elif self._result is not None:
            state = "done"
        return f"<WorkRequest {self}, wr_id {self.wr_id:#x}, {state}>"

    def __str__(self) -> str:
        text = f"{self.operation} of {self.length} bytes"
        if self.remote is not None:
            text += f" (remote: {self.remote})"
        return text

    def done(self) -> bool:
        """Whether it has ended."""
        return self._result is not None or self._error is not None

    def result(self) -> WorkCompletion:
        """Return the completion of an ended request.

        Raises:
            WorkCompletionError: it failed.
            RuntimeError: it is still in flight.
        """
        if self._error is not None:
            # Raised once per await: without this, every raise would add to one traceback.
            raise self._error.with_traceback(None)
        if self._result is None:
            raise RuntimeError(f"{self!r} has not ended: await it")
        return self._result

    def exception(self) -> Exception | None:
        """Return the error of an ended request, None if it succeeded or is in flight."""
        return self._error

    def add_done_callback(self, callback: Callable[["WorkRequest"], None]) -> None:
        """Call back once it has ended: at once if it has, else on the loop's thread as the
        completion is delivered. Keep it short. What it raises is logged."""
        if self.done():
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def tell(self, callback: Callable[["WorkRequest"], None]) -> None:
        """`add_done_callback`, of one that runs no code of the program's: it may be called inside
        another request's post."""
        self.add_done_callback(callback)

    def remove_done_callback(self, callback: Callable[["WorkRequest"], None]) -> int:
        """Forget a callback; return how many were forgotten. What asyncio.wait needs."""
        kept = [known for known in self._callbacks if known != callback]
        removed = len(self._callbacks) - len(kept)
        self._callbacks = kept
        return removed

    def cancelled(self) -> bool:
        """Never: no verb takes one posted request back. What asyncio.wait needs."""
        return False

    def __await__(self) -> Generator[Any, Any, WorkCompletion]:
        if self._result is None and self._error is None:
            if not self.wr_id:
                raise RuntimeError(f"{self!r} is part of a chain that is not posted yet")
            waiter = self._owner.loop.waiter()
            self._waiters.append(waiter)
            try:
                yield from waiter.wait().__await__()
            finally:
                self.forget_waiter(waiter)
        return self.result()

    # -- for the hub and the endpoint ---------------------------------------------------------

    def tells_for(self, run: Sequence["WorkRequest"]) -> None:
        """Be the one whose end tells of the end of those before it in a run, up to itself."""
        self._run = run

    def complete(self, raw: tuple[int, ...]) -> None:
        """End with a completion."""
        if raw[1]:
            self._error = self._owner.request_failed(self, raw)
        else:
            self._result = WorkCompletion._make(raw)
        run, self._run = self._run, ()
        for earlier in run:
            if earlier is self:
                break
            if not earlier.done():
                self._owner.run_ended(earlier, self)
        self._end()

    def fail(self, error: Exception) -> None:
        """End without a completion: the queue pair is gone, or it never was posted. One that has
        ended stays as it is."""
        if self.done():
            return
        self._error = error
        self._end()

    def forget_waiter(self, waiter: Waiter) -> None:
        """Wake it no more."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _end(self) -> None:
        held, self._held = self._held, ()
        for memory in held:
            try:
                memory.release()
            except Exception:  # a region's last user closes it, which can fail
                logger.exception("releasing the memory of %r failed", self)
        self._owner.request_ended(self)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[["WorkRequest"], None]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("a callback of %r failed", self)

    def drop(self) -> None:
        """Undo the construction of a request that the device did not take."""
        held, self._held = self._held, ()
        for memory in held:
            memory.release()


@given("wait_elsewhere")
def _wait_elsewhere(request: WorkRequest, waiter: Waiter) -> Generator[Any, Any, WorkCompletion]:
    """Await a request of the engine's on a loop that the engine does not know."""
    try:
        yield from waiter.wait().__await__()
    finally:
        request.forget_waiter(waiter)
    return request.result()


@given("log")
def _log(text: str, about: object, error: BaseException) -> None:
    logger.error(text, *([about] if "%r" in text else []), exc_info=error)


@in_c("OpenRequests")
class OpenRequests(set[WorkRequest]):
    """The requests of one queue pair that have not ended."""
