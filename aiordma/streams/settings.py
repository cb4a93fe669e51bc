"""The options of a stream, checked, and the rsockets that they make."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from aiordma._base.arguments import seconds_within, whole_number
from aiordma._base.errors import (
    StreamProtocolError,
)
from aiordma._base.options import ConnectionOptions
from aiordma._connection.connection import Connection
from aiordma._connection.connector import Attempt
from aiordma.streams.path import CONTROL_SLOTS, Memory, stream_path
from aiordma.streams.protocol import CREDIT_LIMIT
from aiordma.streams.rsocket import CLOSE_TIMEOUT, Rsocket

__all__ = ("StreamOptions", "StreamSettings", "naming", "taken_close_timeout")

BUFFER_BYTES = 256 * 1024
QUEUE_DEPTH = 128
_MOST_BUFFER_BYTES = 1 << 30
_LEAST_BUFFER_BYTES = 4096
_LEAST_DEPTH = 16
_MOST_CLOSE_TIMEOUT = 3600


class StreamOptions(TypedDict, total=False):
    """The keyword arguments of `connect_stream` and `listen_stream` that set up the stream."""

    buffer_size: int | None
    queue_depth: int
    close_timeout: float
    tos: int | None
    ack_timeout: int
    retry_count: int
    peer_timeout: float | None
    keepalive: float | None


def taken_close_timeout(options: dict[str, Any], call: str) -> float:
    """Take the option `close_timeout` out of a call's options, and check it."""
    given = options.pop("close_timeout", CLOSE_TIMEOUT)
    return seconds_within(given, "close_timeout", 0, _MOST_CLOSE_TIMEOUT, call)


class StreamSettings:
    """The checked options of a stream.

    Args:
        function: the function that was called. The errors have its name, and the nearest one of its
            parameters.
        options: those of its keyword arguments that set up the stream.

    Raises:
        TypeError: an option is unknown, or has an unsuitable type.
        ValueError: an option is out of range.
    """

    def __init__(self, function: Callable[..., object], options: Mapping[str, Any]) -> None:
        self.call: str = function.__name__
        call = self.call
        others = dict(options)
        given = others.pop("buffer_size", None)
        self.grows: bool = given is None
        buffer_bytes = whole_number(
            BUFFER_BYTES if given is None else given,
            "buffer_size",
            _LEAST_BUFFER_BYTES,
            _MOST_BUFFER_BYTES,
            call,
        )
        self.ring_bytes: int = buffer_bytes - buffer_bytes % 2
        self.close_timeout: float = taken_close_timeout(others, call)
        depth = whole_number(
            others.pop("queue_depth", QUEUE_DEPTH), "queue_depth", _LEAST_DEPTH, CREDIT_LIMIT, call
        )
        # What the protocol needs: own receives, retries without limit where the peer has none.
        self.options: ConnectionOptions = ConnectionOptions._of(
            function,
            StreamOptions.__annotations__,
            others,
            receive_buffers=0,
            max_recv_wr=depth,
            max_send_wr=depth + CONTROL_SLOTS,
            rnr_retry_count=7,
            responder_resources=0,
        )

    def attempt(
        self,
        host: str,
        port: int,
        source: tuple[str, int] | None = None,
        timeout: float | None = 30.0,
        device: str = "auto",
    ) -> Attempt:
        """Return a connect with these options. Arguments and errors are as of `connect_stream`."""
        return Attempt(self.call, self.options, host, port, source, timeout, device)

    def rsocket(self, connection: Connection) -> Rsocket:
        """Return an rsocket with these options over a prepared connection.

        Raises:
            VerbsCallError: memory could not be registered, or a receive not posted.
        """
        memory = Memory(connection, self.ring_bytes, self.grows)
        return Rsocket(connection, memory, stream_path(connection, memory), self.close_timeout)


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Let the error of a handshake say which one."""
    try:
        yield
    except StreamProtocolError as error:
        raise StreamProtocolError(f"{operation}: {error}") from None
