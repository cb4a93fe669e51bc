"""What a stream or a transport has of its connection: the path of its bytes, errors, the end."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from aiordma._base.errors import detached
from aiordma._connection.connection import Connection
from aiordma._loop.event_loop import EventLoop
from aiordma._runtime.teardown import Teardown

__all__ = ("ABORT_SECONDS", "Channel", "TransportPath")

ABORT_SECONDS = 5.0
"""The longest time for which a connection outlives an abort or the end of its event loop, however
long a close may wait."""


class TransportPath(Protocol):
    """What moves a transport's bytes; a StreamPath, for instance. See there."""

    on_readable: Callable[[], object] | None
    on_writable: Callable[[], object] | None

    @property
    def readable(self) -> int:
        """How many bytes can be read now."""

    @property
    def at_eof(self) -> bool:
        """Whether the peer sends no more data; there may still be data to read."""

    @property
    def can_write(self) -> bool:
        """Whether a write can post anything now."""

    def read(self, limit: int, /) -> bytes:
        """Return bytes that have arrived, at most `limit`; b"" if there are none."""

    def read_into(self, buffer: memoryview, /) -> int:
        """Copy bytes that have arrived into the buffer; returns their number."""

    def feed(self, receive: Callable[[memoryview], object], limit: int, /) -> int:
        """Call a function with a view of bytes that have arrived, at most `limit`, which it must
        not keep; returns their number."""

    def close_write(self, both: bool, /) -> None:
        """End the data, or, with `both`, both directions."""


class Channel(ABC):
    """See the module; an Rsocket, for instance. Posted requests hold it, so it does not hold the
    connection.

    Args:
        connection: the connection below.
        close_timeout, buffer_sizes: as the attributes.

    Attributes:
        loop: the event loop.
        teardown: the end of the connection.
        close_timeout: how many seconds a close waits until the peer's device has everything.
        buffer_sizes: the bytes that the peer can send before this side reads them, and those that
            this side can send before the peer's device has them, at the beginning.
    """

    _is_ending: bool = False
    """See Above. `limit_close` sets `is_reported`."""

    def __init__(
        self, connection: Connection, close_timeout: float, buffer_sizes: tuple[int, int]
    ) -> None:
        self._endpoint = connection._endpoint
        self._error: Exception | None = None
        self.loop: EventLoop = self._endpoint.loop
        self.teardown: Teardown = self._endpoint.teardown
        self.close_timeout = close_timeout
        self.buffer_sizes = buffer_sizes

    @property
    @abstractmethod
    def path(self) -> TransportPath:
        """Moves the bytes."""

    @property
    def name(self) -> str:
        """The connection's name in messages."""
        return self._endpoint.name

    def require_here(self) -> None:
        """Check that the event loop runs here.

        Raises:
            EventLoopError: this is another thread, or another event loop.
        """
        self._endpoint.require_own_loop()

    def require_same_process(self) -> None:
        """Check that this is not a forked child of the process that made the connection.

        Raises:
            ForkError: it is.
        """
        self._endpoint.require_same_process()

    def poll(self) -> bool:
        """Deliver what has arrived since the event loop's last turn. Return False, and do nothing,
        if the loop does not run here."""
        return self._endpoint.poll()

    @abstractmethod
    def read_error(self) -> Exception | None:
        """Why nothing more can be read, once everything was read; None if data may still come, or
        if the peer has ended its data in order (`at_eof`)."""

    @abstractmethod
    def write_error(self) -> Exception | None:
        """Why nothing can be written, or None."""

    @abstractmethod
    def write(self, data: bytes | memoryview, /) -> int:
        """Copy and post as much as there is room for; returns the number of bytes.

        Args:
            data: contiguous bytes.

        Raises:
            RdmaError: a request could not be posted; the connection has ended.
        """

    # -- the end ----------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """End the connection with this error."""
        if self._error is None:
            self._error = detached(error)
        self._endpoint.fail(error)

    @abstractmethod
    def notify_drained(self, callback: Callable[[], object], /) -> bool:
        """Call the callback, once or several times, when the peer's device has everything that was
        written, or at the end. Return False, and do nothing, if that is so now."""

    def close_once_drained(self, connection: Connection) -> None:
        """Close the connection as soon as the peer's device has everything that was written, or
        after the time of `limit_close`."""
        if self.notify_drained(self.teardown.close):
            self.limit_close(connection)
        else:
            self.teardown.close()

    def limit_close(self, connection: Connection) -> None:
        """Close the connection, which is not closed yet, after `close_timeout` seconds, at most
        ABORT_SECONDS. Until then it is not collected, and the event loop's end waits for it."""
        teardown = self.teardown
        teardown.above, teardown.is_reported = self, True
        most = min(self.close_timeout, ABORT_SECONDS)
        timer = self.loop.call_later(most, connection._close_soon)
        teardown.on_closed.append(timer.cancel)

    def _end_soon(self) -> None:  # noqa: B027 - nothing is left to do
        """Nothing more: it is above the connection since `limit_close`."""
