"""connect_stream(): a byte stream to a peer that uses rsockets."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Unpack

import anyio

from aiordma._base.errors import ConnectTimeoutError
from aiordma._base.opening import opens
from aiordma._base.rejections import NOT_ACCEPTED, is_backlog_full
from aiordma._connection.connection import Connection
from aiordma._connection.connector import Attempt, LocalAddresses
from aiordma._connection.local_ports import LocalPorts
from aiordma._connection.several_addresses import Routes
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.settings import StreamOptions, StreamSettings, naming
from aiordma.streams.stream import Stream

__all__ = ("connect_rsocket", "connect_stream")

FULL_SECONDS = 0.05
MOST_FULL_SECONDS = 1.0
"""The longest of the pauses before a listener is tried again whose backlog was full. They begin
with `FULL_SECONDS`, and are doubled."""
LEAST_LEFT_SECONDS = 0.05
"""With less time left, a listener whose backlog was full is not tried again."""


@opens
async def connect_stream(
    host: str,
    port: int,
    *,
    source: tuple[str, int] | None = None,
    timeout: float | None = 30.0,
    device: str = "auto",
    **options: Unpack[StreamOptions],
) -> Stream:
    """Connect a byte stream over RDMA. Await the call, or enter it with `async with`.

    The peer is `listen_stream`, or any program that uses rsockets.

    Args:
        host, port, source, device: as of `aiordma.connect`.
        timeout: same as `aiordma.connect`. While time remains, an aiordma listener whose backlog is
            full is tried again, as a client of TCP does, too.
        buffer_size: bytes that the peer can send before this side has received them; as many again
            are used for sending. 4 KiB to 1 GiB. None: 256 KiB, and 2 MiB once they were full
            several times.
        queue_depth: messages that can be on the way in each direction, 16 to 65,534. Each send is
            at least one message.
        close_timeout: seconds in which a close waits until the peer's device has everything that
            was sent, 0 to 3,600. At its end, the connection ends, and what was not acknowledged by
            then may be lost. 0: do not wait.
        tos, ack_timeout, retry_count, peer_timeout, keepalive: see ConnectionOptions.

    Raises:
        as `aiordma.connect`.
        StreamProtocolError: the program at that port does not use rsockets.

    Cancellation: the peer, if it accepts, gets an end of the data. On iWARP, the connection waits
        in the background for that, at most `close_timeout` seconds, at most 5.

    See: man 7 rsocket.
    """
    settings = StreamSettings(connect_stream, options)
    attempt = settings.attempt(host, port, source, timeout, device)
    return Stream(*await connect_rsocket(settings, attempt))


class _FullBacklog:
    """The attempts to reach a listener whose backlog is full, for programs that were written for
    TCP: the kernel repeats the SYN there, so that a burst of clients waits."""

    def __init__(self) -> None:
        self._longest = FULL_SECONDS
        self._seconds = 0.0
        self._waited = 0.0

    def has_another(self, error: BaseException, left: float | None) -> bool:
        """Return whether to try again, after `pause`.

        Args:
            left: seconds for the pause and the attempt; None: no limit. The pause takes at most a
                half of them: the peer needs the others for its answer.
        """
        if not is_backlog_full(error) or (left is not None and left < LEAST_LEFT_SECONDS):
            return False
        # A random part, so that the clients of a burst do not come together again.
        seconds = self._longest * random.uniform(0.5, 1)
        self._longest = min(2 * self._longest, MOST_FULL_SECONDS)
        self._seconds = seconds if left is None else min(seconds, left / 2)
        return True

    async def pause(self) -> None:
        """Wait before the next attempt. For another local port, there is nothing to wait for."""
        seconds, self._seconds = self._seconds, 0.0
        if seconds:
            self._waited += seconds
            await anyio.sleep(seconds)

    def explain(self, error: BaseException) -> None:
        """Add to the text of an attempt's error that waiting has taken a part of the time."""
        if self._waited and isinstance(error, ConnectTimeoutError):
            waited = f"the listener's backlog was full for {self._waited:.3g} s of that time"
            error.args = (f"{str(error).removesuffix(NOT_ACCEPTED)}; {waited}",)


@asynccontextmanager
async def _closed_on_failure(connection: Connection) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await connection.aclose()
        raise


class _Connecting:
    """A stream whose connection is not established yet. See Above."""

    _is_ending = False

    def __init__(self, connection: Connection, rsocket: Rsocket) -> None:
        self._connection, self._rsocket = connection, rsocket
        rsocket.teardown.above = self

    def _end_soon(self) -> None:
        self._rsocket.withdraw(self._connection)


async def connect_rsocket(
    settings: StreamSettings,
    attempt: Attempt,
    routes: Routes | None = None,
    check: Callable[[Connection], object] = lambda _: None,
) -> tuple[Connection, Rsocket]:
    """Do the work of `connect_stream`.

    Args:
        settings: those of the stream.
        attempt: of `settings.attempt`.
        routes: the peer's addresses; None: they are looked up.
        check: called with the connection before it is established. It can raise.
    """

    async def establish(connection: Connection) -> Rsocket:
        async with _closed_on_failure(connection):
            check(connection)
            rsocket = settings.rsocket(connection)
        # If it fails, it closes the connection itself: in the background while the driver waits for
        # the peer, which takes iWARP's up to two minutes.
        connecting = _Connecting(connection, rsocket)
        await connection.establish(private_data=rsocket.hello())
        del connecting
        async with _closed_on_failure(connection):
            with naming(f"connect to {attempt.target}"):
                rsocket.start(connection.private_data)
            rsocket.begin(is_first=True)
        return rsocket

    async def connect_to(address: str, local: LocalAddresses) -> tuple[Connection, Rsocket]:
        ports, waits = LocalPorts(local[0]), _FullBacklog()
        while True:
            try:
                connection = await attempt.prepare(address, local)
                return connection, await establish(connection)
            except Exception as error:
                if waits.has_another(error, attempt.limit.left()):
                    ports = LocalPorts(local[0])
                elif not ports.has_another(error):
                    waits.explain(error)
                    raise
            await waits.pause()

    if routes is None:
        return await attempt.of_name(connect_to)
    return await attempt.of_first(routes, connect_to)
