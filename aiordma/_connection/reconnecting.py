"""reconnecting(): connect again, with back-off, each time the peer of a connection goes."""

import logging
import random
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Unpack

import anyio

from aiordma._base.arguments import seconds_within, whole_number, wrong_type
from aiordma._base.errors import (
    FlushedError,
    PeerFlushedError,
    PeerGoneError,
    RdmaConnectionError,
    RdmaError,
    detached,
    leaf_errors,
)
from aiordma._base.options import ConnectionKeywords, ConnectionOptions
from aiordma._base.socket_address import address_text
from aiordma._base.system import system
from aiordma._connection.connection import Connection
from aiordma._connection.connector import connect
from aiordma._connection.domain import DomainArgument
from aiordma._connection.shared_receive import SharedReceiveQueue
from aiordma._requests.request import WorkRequest

logger: logging.Logger = logging.getLogger("aiordma")

EXPLANATION_SECONDS = 2.0
"""The time in which a connection learns why its requests were flushed, and more."""


class ConnectKeywords(ConnectionKeywords, total=False):
    """The keyword arguments of `connect`."""

    private_data: bytes
    source: tuple[str, int] | None
    timeout: float | None
    device: str
    shared_receive: SharedReceiveQueue | None
    domain: DomainArgument
    options: ConnectionOptions | None


def reconnecting(
    host: str,
    port: int,
    *,
    attempts: int | None = None,
    first_delay: float = 0.1,
    max_delay: float = 10.0,
    retry_on: tuple[type[Exception], ...] = (),
    **arguments: Unpack[ConnectKeywords],
) -> "Reconnecting":
    """Connect, and connect again each time the peer has gone. Leave the loop with `break` or
    `return`.

        async for session in aiordma.reconnecting("192.0.2.1", 7471, keepalive=5.0):
            async with session as connection:
                await connection.send(b"hello")
                print(await connection.receive())
                break

    The end of the `async with` block closes the connection. If the block ends with a
    PeerGoneError of its connection, or with EndOfStream because the peer has disconnected, the
    block suppresses the exception, and the loop connects again. It does so also if the block ends
    without an exception. All other exceptions leave the loop.

    A new connection has new memory registrations, unless they are of a `domain=`, and the peer's
    memory may be elsewhere: let the program exchange its keys again. No request is repeated for
    you: `Session.uncertain` are the requests that the peer may, or may not, have executed.

    The pause before the nth repetition is first_delay x 2^(n-1) seconds, at most max_delay. Of
    this, a random part between one half and the whole is waited, so that many clients of a server
    do not return at the same moment. After a connection that lasted max_delay seconds, the pauses
    start with first_delay again.

    Args:
        host, port: as of `connect`.
        attempts: the number of connects that may fail, one after the other, before the error of
            the last one is raised; None: no limit.
        first_delay: seconds of the first pause, 0.001..3600.
        max_delay: seconds of the longest pause, 0.001..3600.
        retry_on: classes of further errors of the block after which to connect again, also if the
            block ends with a FlushedError because of one. On rxe, for example, the WRITEs to a
            killed process can fail with RemoteAccessError.
        arguments: as of `connect`. `keepalive` is useful for a connection that is idle, or only
            receives.

    Raises:
        TypeError, ValueError: `attempts`, a delay or `retry_on` is invalid; the loop raises the
            errors for the others.

    Cancellation: nothing is left, also in a pause.
    """
    call = "reconnecting"
    if attempts is not None:
        attempts = whole_number(attempts, "attempts", 1, 1 << 31, call)
    first_delay = seconds_within(first_delay, "first_delay", 0.001, 3600, call)
    max_delay = seconds_within(max_delay, "max_delay", 0.001, 3600, call)
    if not isinstance(retry_on, tuple) or not all(
        isinstance(each, type) and issubclass(each, Exception) for each in retry_on
    ):
        raise wrong_type(retry_on, "retry_on", "a tuple of exception classes", call)
    return Reconnecting(host, port, attempts, first_delay, max_delay, retry_on, arguments)


class Reconnecting(AsyncIterator["Session"]):
    """Connections to one peer, one after the other. `reconnecting` makes it."""

    def __init__(
        self,
        host: str,
        port: int,
        attempts: int | None,
        first_delay: float,
        max_delay: float,
        retry_on: tuple[type[Exception], ...],
        arguments: ConnectKeywords,
    ) -> None:
        self._target = host, port
        self._attempts = attempts
        self._first_delay, self._max_delay = first_delay, max_delay
        self._retry_on = retry_on
        self._arguments = arguments
        self._session: Session | None = None
        self._repetitions = 0
        self._connected_at = 0.0

    async def __anext__(self) -> "Session":
        before = self._session
        if before is not None:
            await before.aclose()
            if system.now() - self._connected_at >= self._max_delay:
                self._repetitions = 0
            await self._pause()
        failed = 0
        while True:
            try:
                connection = await connect(*self._target, **self._arguments)
                break
            except RdmaConnectionError as error:
                failed += 1
                if self._attempts is not None and failed >= self._attempts:
                    raise
                logger.info("attempt %d: %s", failed, error)
            await self._pause()
        self._connected_at = system.now()
        self._session = Session(connection, before, self._retry_on)
        return self._session

    async def _pause(self) -> None:
        longest = self._first_delay * 2.0 ** min(self._repetitions, 40)
        self._repetitions += 1
        await anyio.sleep(min(longest, self._max_delay) * random.uniform(0.5, 1))


class Session:
    """One connection of a `reconnecting` loop. Enter it with `async with`."""

    def __init__(
        self,
        connection: Connection,
        before: "Session | None",
        retry_on: tuple[type[Exception], ...],
    ) -> None:
        self._number = 1 if before is None else before.number + 1
        self._lost = None if before is None else before._cause
        self._uncertain = () if before is None else before._failed()
        self._connection = connection
        self._retry_on = retry_on
        self._cause: Exception | None = None
        connection._endpoint.work.failed_sends = []

    def __repr__(self) -> str:
        return f"<Session {self.number}: {self._connection!r}>"

    @property
    def number(self) -> int:
        """1 for the first connection of the loop, and so on."""
        return self._number

    @property
    def lost(self) -> Exception | None:
        """Why the connection before ended: its PeerGoneError, or the error of `retry_on`. None for
        the first connection, and if the block before ended while its connection still worked."""
        return None if self._lost is None else detached(self._lost)

    @property
    def uncertain(self) -> tuple[WorkRequest, ...]:
        """The requests of the connection before that were posted on its send queue and did not
        complete successfully. The peer's device may have executed each of them, or not, or (a
        WRITE) in part.

        A request that is neither here nor complete was never posted, so it was not executed. A
        request that did complete was executed by the peer's device, with an exception: on siw, and
        on the software device if the peer is on siw or this side has `initiator_depth=0`, a SEND
        or WRITE completes when the local TCP has it, and may never have reached the peer. No
        device knows whether the peer's program has
        acted upon it: only its answer says so. So give requests that must not be executed twice a
        number, by which the peer recognizes a repetition."""
        return self._uncertain

    def _failed(self) -> tuple[WorkRequest, ...]:
        return tuple(self._connection._endpoint.work.failed_sends or ())

    async def aclose(self) -> None:
        """Close the connection. Idempotent.

        Raises:
            EventLoopError: called outside of the connection's event loop.

        Cancellation: the connection closes all the same.
        """
        await self._connection.aclose()

    async def __aenter__(self) -> Connection:
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        ahead = self._connection._ahead
        try:
            if error is None and not ahead.has_failed:
                try:
                    await ahead.drain()
                except RdmaError as lost:
                    if await self._is_lost(lost):
                        return True
                    raise
            return await self._is_lost(error)
        finally:
            ahead.give_up()
            await self.aclose()

    async def _is_lost(self, error: BaseException | None) -> bool:
        """Record why the connection ended, and return whether this explains the block's error."""
        leaves = [] if error is None else leaf_errors(error)
        cause = self._connection.cause
        if cause is None and any(isinstance(leaf, PeerFlushedError) for leaf in leaves):
            # An iWARP device flushes before the connection manager reports the disconnect.
            with anyio.move_on_after(EXPLANATION_SECONDS):
                cause = await self._connection.ended()
        if isinstance(cause, PeerGoneError):
            self._cause = cause
            if self._all_due_to_peer(leaves):
                return True
        for leaf in leaves:
            found = self._reason_to_retry(leaf)
            if found is None:
                return False
            self._cause = detached(found)
        return bool(leaves)

    def _reason_to_retry(self, leaf: BaseException) -> Exception | None:
        """Return the error of `retry_on` that an error of the block is, or that flushed its
        request: such an error flushes the other requests in flight. None if there is none."""
        if isinstance(leaf, FlushedError) and not isinstance(leaf, self._retry_on):
            flushed_by = leaf.__cause__ or self._connection.cause
            return flushed_by if isinstance(flushed_by, self._retry_on) else None
        return leaf if isinstance(leaf, self._retry_on) else None

    def _all_due_to_peer(self, leaves: list[BaseException]) -> bool:
        """Whether the block's errors say nothing but that the peer has gone. Other tasks of the
        block can have other errors of a connection that ended."""
        peer = address_text(self._connection.peer_address)
        logger.info("the peer %s has gone: %s", peer, self._cause)
        return all(isinstance(leaf, RdmaError | anyio.EndOfStream) for leaf in leaves) and any(
            isinstance(leaf, PeerGoneError | anyio.EndOfStream) for leaf in leaves
        )
