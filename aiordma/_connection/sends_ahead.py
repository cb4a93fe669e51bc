"""The sends of a connection that have returned before the peer's device had their messages
(`ConnectionOptions.send_ahead`)."""

from collections import deque
from contextlib import suppress

from aiordma._base.errors import RdmaError
from aiordma._requests.request import WorkRequest

__all__ = ("SendsAhead",)


class SendsAhead:
    """Requests that the program does not wait for, because their memory is not its own.

    A request that fails ends its connection, whose next `send` then raises the cause.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests: deque[WorkRequest] = deque()

    async def add(self, request: WorkRequest) -> None:
        """Add a posted request. If there are too many, wait until the older half has completed: so
        one wake-up serves several.

        Raises:
            WorkCompletionError: a request has failed; FlushedError if the connection ended before.

        Cancellation: the requests stay.
        """
        self._requests.append(request)
        if len(self._requests) > self._most:
            await self._until(self._requests[self._most // 2])

    async def drain(self) -> None:
        """Wait for all.

        Raises: as `add`.

        Cancellation: the requests stay.
        """
        if self._requests:
            await self._until(self._requests[-1])

    def give_up(self) -> None:
        """Wait for none, and report none: the program has got an error."""
        for request in self._requests:
            request.add_done_callback(WorkRequest.exception)
        self._requests.clear()

    async def _until(self, request: WorkRequest) -> None:
        """Wait for a request, and so for those before it: they complete in order."""
        with suppress(RdmaError):  # an earlier one may have failed first
            await request
        errors = []
        while self._requests and self._requests[0].done():
            errors.append(self._requests.popleft().exception())
        for error in filter(None, errors):
            raise error
