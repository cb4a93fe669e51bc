"""The sends of a connection that have returned before the peer's device had their messages
(`ConnectionOptions.send_ahead`)."""

from collections import deque
from contextlib import suppress
from itertools import islice

from aiordma._base.errors import RdmaError, detached
from aiordma._requests.request import WorkRequest


class SendsAhead:
    """Requests that the program does not wait for, because their memory is not its own. They
    complete in order. One that fails ends its connection.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.requests: deque[WorkRequest] = deque()
        """Those that have not completed, and that have failed unreported."""
        self._error: Exception | None = None

    async def add(self, request: WorkRequest) -> None:
        """Add a posted request. If there are too many, wait until the older half has completed: so
        one wake-up serves several.

        Raises: as `drain`.

        Cancellation: the requests stay.
        """
        self.requests.append(request)
        if len(self.requests) > self.most:
            await self._wait_for(self.most // 2 + 1)

    async def drain(self) -> None:
        """Wait for all.

        Raises:
            RdmaError: a message was lost. Every later call raises it, too.

        Cancellation: the requests stay.
        """
        await self._wait_for(len(self.requests))

    @property
    def has_failed(self) -> bool:
        """Whether a call has raised that a message was lost."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """Wait for none any more: this error, which the program has got, is theirs."""
        self._error = self._error or detached(error)
        self.give_up()

    def give_up(self) -> None:
        """Wait for none, and report none: the program ends the connection."""
        for request in self.requests:
            request.add_done_callback(WorkRequest.exception)
        self.requests.clear()

    async def _wait_for(self, count: int) -> None:
        """Wait for the oldest ones. Several tasks may wait, and each gets the error."""
        waited = list(islice(self.requests, count))
        if waited:
            with suppress(RdmaError):  # an earlier one may have failed first
                await waited[-1]
        errors = (request.exception() for request in waited)
        error = self._error or next(filter(None, errors), None)
        if error is not None:
            self.fail(error)
            raise detached(error)
        while self.requests and self.requests[0].done() and not self.requests[0].exception():
            self.requests.popleft()
