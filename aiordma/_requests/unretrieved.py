"""Failed requests whose error was never retrieved: one report for each connection."""

from collections.abc import Sequence

from aiordma._base.errors import ClosedError, DeviceRemovedError, DisconnectedError, FlushedError
from aiordma._base.process import here
from aiordma._loop.event_loop import EventLoop
from aiordma._requests.request import WorkRequest

NAMED = 3
"""Number of requests that a report names; it counts the rest."""


class Unretrieved:
    """Collects failed requests from their finalizers until the owner has ended, and then reports
    them, as asyncio reports a future's exception that was never retrieved.

    Args:
        loop: the loop that gets the report.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._process = here.pid
        self._failed: list[tuple[str, bool, Exception]] = []
        self._owner = ""
        self._cause: Exception | None = None
        self._scheduled = self._ended = self._reported = False

    def add(self, request: WorkRequest) -> None:
        """Record a failed request. A finalizer calls this, in any thread."""
        error = request.exception()
        if error is None or self._reported or not request.wr_id:
            return  # without a wr_id, it belongs to a chain that was not posted
        self._failed.append((str(request), request.is_receive, error))
        if self._ended:
            self._schedule()

    def end(self, owner: str, cause: Exception | None) -> None:
        """Report the recorded requests, now that all requests have completed.

        Args:
            owner: the name of the object that they were posted on, for the message.
            cause: the cause of its end.
        """
        self._owner, self._cause, self._ended = owner, cause, True
        if self._failed:
            self._schedule()

    def _schedule(self) -> None:
        # Later, because many requests are usually collected together.
        if not self._scheduled:
            self._scheduled = True
            if self._loop.has_ended:
                self._report()
            else:
                self._loop.call_from_thread(self._report)

    def __del__(self) -> None:
        # The loop was closed before it called `_report`. A forked child leaves that to its parent.
        if self._failed and self._ended and self._process == here.pid:
            self._report()

    def _report(self) -> None:
        self._scheduled = False
        failed = [each for each in self._failed if not self._is_orderly(*each)]
        self._failed.clear()
        if not failed or self._reported:
            return
        self._reported = True
        errors = [error for _, _, error in failed]
        # A flush is only the consequence of another error.
        errors.sort(key=lambda error: isinstance(error, FlushedError))
        self._loop.report(self._text([name for name, _, _ in failed]), errors[0])

    def _is_orderly(self, _name: str, is_receive: bool, error: Exception) -> bool:
        """Whether this is a receive that was flushed by an orderly disconnect of either side."""
        cause = error.__cause__ or self._cause
        return (
            is_receive
            and isinstance(error, FlushedError)
            and isinstance(cause, ClosedError | DisconnectedError)
            and not isinstance(cause, DeviceRemovedError)
        )

    def _text(self, names: Sequence[str]) -> str:
        count = len(names)
        text = f"{count} work request{'s' * (count > 1)} on {self._owner} failed, and the "
        text += f"error{'s' * (count > 1)} never retrieved: {', '.join(names[:NAMED])}"
        if count > NAMED:
            text += f" and {count - NAMED} more"
        return f"{text}. Await each posted request, or call its result() or exception()"
