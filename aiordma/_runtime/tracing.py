"""trace(): a record of each work request, for a file or a function.

The engine notes when a request is posted and when it ends (`engine/trace.c`). A thread takes these
records ten times a second, and writes them, so the event loop does not wait for the file.
"""

import atexit
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from threading import Event, Thread, current_thread
from types import TracebackType
from typing import Any, Self, TypeAlias

from aiordma._base.arguments import whole_number, wrong_type
from aiordma._base.enums import WorkCompletionStatus
from aiordma._base.errors import BusyError
from aiordma._native import begin_trace, take_trace

logger: logging.Logger = logging.getLogger("aiordma")

TRACE = "AIORDMA_TRACE"
INTERVAL_SECONDS = 0.1
MOST_WAITING = 1 << 18
NO_COMPLETION = -1

TracedTo: TypeAlias = "str | os.PathLike[str] | Callable[[Sequence[TracedRequest]], object]"


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A work request that has ended."""

    operation: str
    """Its name: SEND, RECV, RDMA_READ, ..."""
    bytes: int
    """The bytes of its local memory; of a receive, those that arrived."""
    status: str
    """The status of its completion, "SUCCESS" for instance; "DISCARDED" if it had none."""
    posted_ns: int
    """When it was posted: nanoseconds since the epoch."""
    latency_ns: int
    """Nanoseconds from the post until the completion was delivered. Of a receive, this includes the
    time until the peer sent a message."""
    device: str
    """The device's name."""
    qp_num: int
    """The number of its queue pair; 0 for a shared receive queue."""
    peer: str | None
    """The peer's address and port; None if the queue has no peer."""
    wr_id: int
    """Its wr_id, which is unique while it is in flight."""


class Trace:
    """A running trace: see `trace`. At the end of the `with` block, everything is written."""

    def __init__(self, to: TracedTo, limit: int) -> None:
        self._consume, self._close_file = _consumer(to)
        self._lost = 0
        self._has_failed = False
        self._stop = Event()
        self._was_closed_here = False  # by its own function
        # Between the two clocks. The system's clock can be set during the trace.
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._thread = Thread(target=self._run, name="aiordma: the trace", daemon=True)
        self._is_open = True
        self._thread.start()
        begin_trace(limit)

    def __repr__(self) -> str:
        return f"<Trace: {'running' if self._is_open else 'closed'}>"

    @property
    def lost(self) -> int:
        """How many requests are missing, because they ended faster than they could be written."""
        return self._lost

    def close(self) -> None:
        """End the trace, and write what has been recorded. Blocks until it is written. Idempotent.

        If the trace's own function calls it, that was its last call: what was recorded since is
        dropped.

        Raises: nothing.
        """
        if not self._is_open:
            return
        self._is_open = False
        begin_trace(0)
        self._stop.set()
        self._was_closed_here = self._thread is current_thread()
        if not self._was_closed_here:
            self._thread.join()
        _active.clear()
        self._close_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            self._pass_on()
        if not self._was_closed_here:  # else the next records may be another trace's
            self._pass_on()

    def _pass_on(self) -> None:
        records, lost = take_trace()
        self._lost += lost
        if not records or self._has_failed:
            return
        try:
            self._consume([self._traced(*record) for record in records])
        except Exception:
            self._has_failed = True
            logger.exception("the trace of the work requests ends, because it cannot be written")

    def _traced(
        self,
        owner: Any,
        operation: str,
        wr_id: int,
        size: int,
        status: int,
        posted: int,
        ended: int,
    ) -> TracedRequest:
        device, qp_num, peer = owner.trace_labels
        return TracedRequest(
            operation=operation,
            bytes=size,
            status=_status_name(status),
            posted_ns=posted + self._epoch,
            latency_ns=ended - posted,
            device=device,
            qp_num=qp_num,
            peer=peer,
            wr_id=wr_id,
        )


_active: list[Trace] = []
_watches_forks: list[bool] = []


def trace(to: TracedTo, *, limit: int = MOST_WAITING) -> Trace:
    """Record each work request of this process that is posted from now on, when it ends.

    Use it as a context manager, or call `close` of what it returns. One trace runs at a time.

    Args:
        to: a file, to which a line of JSON is appended for each request, with the fields of
            TracedRequest; or a function, which is called with a list of TracedRequest. A thread
            writes and calls, ten times a second and at the end, so `to` may block.
        limit: how many records may wait for the thread. Further ones are lost (`Trace.lost`).

    Raises:
        BusyError: another trace is running.
        TypeError, ValueError: an argument is invalid.
        OSError: the file cannot be opened.
    """
    whole_number(limit, "limit", 1, 1 << 32, "trace")
    if _active:
        raise BusyError(f"trace(): {_active[0]!r} is running: close it first")
    if not _watches_forks:
        _watches_forks.append(True)
        os.register_at_fork(after_in_child=_forked)
    started = Trace(to, limit)
    _active.append(started)
    return started


def _consumer(
    to: TracedTo,
) -> tuple[Callable[[Sequence[TracedRequest]], object], Callable[[], None]]:
    if callable(to):
        return to, lambda: None
    if not isinstance(to, (str, os.PathLike)):
        raise wrong_type(to, "to", "a file name, or a function of a list", "trace")
    # Without a buffer, a forked child inherits no half of a line.
    file = open(to, "ab", buffering=0)  # noqa: SIM115

    def write(requests: Iterable[TracedRequest]) -> None:
        lines = [json.dumps(asdict(request)) + "\n" for request in requests]
        left = memoryview("".join(lines).encode())
        while left:
            left = left[file.write(left) :]

    return write, file.close


def _status_name(status: int) -> str:
    if status == NO_COMPLETION:
        return "DISCARDED"
    try:
        return WorkCompletionStatus(status).name
    except ValueError:  # a status of a newer device
        return f"status {status}"


def start_trace_of_environment() -> None:
    """Start the trace that the environment variable AIORDMA_TRACE asks for, once per process.

    Raises:
        ValueError: the file cannot be opened.
    """
    path = os.environ.get(TRACE)
    if not path or _started or _active:
        return
    try:
        started = trace(path.replace("%p", str(os.getpid())))
    except OSError as error:
        raise ValueError(f"{TRACE}={path!r}: the file cannot be opened: {error}") from error
    _started.append(path)
    atexit.register(started.close)


_started: list[str] = []


def _forked() -> None:
    """In a forked child: the thread and the file are the parent's."""
    begin_trace(0)
    take_trace()
    for each in _active:
        atexit.unregister(each.close)
    _active.clear()
    if _started and "%p" in _started[0]:
        _started.clear()
