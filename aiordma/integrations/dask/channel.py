"""The messages of a comm over a connection.

A message is announced by one SEND. Bulk is received by WRITEs of the sender's, from its own memory
(registered once and kept in the registration cache, where it is a numpy array) into memory that the
receiver has granted for this message. A task receives everything that arrives, so that answers of
the peer's reach a writer while no task reads; CREDITs bound what it keeps. The bulk of one message
is received before the program reads it: a program may write a large message and then read, as over
TCP.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import anyio

from aiordma._base.enums import Access
from aiordma._base.errors import ClosedError, RdmaError, detached
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma.integrations.dask.bulk import BulkMemory
from aiordma.integrations.dask.frames import (
    BATCH,
    CREDIT,
    CREDITS,
    DONE,
    MESSAGE,
    READY,
    Announcement,
    ProtocolError,
    Turns,
    assembled,
    at_once,
    credit,
    pack,
    parse_announcement,
    parse_credit,
    parse_ready,
    parse_table,
    ready,
)

__all__ = ("BROKEN", "Channel")

BROKEN: tuple[type[Exception], ...] = (RdmaError, OSError, anyio.EndOfStream, ProtocolError)
"""The errors of a connection that has ended, or has to end."""

PIECE = 1 << 26
"""The longest WRITE, so that one piece is registered while the other pieces are on the wire."""

PIECES = 8
"""The largest number of WRITEs of a message at the same time."""

FLUSH_SECONDS = 5.0
"""How long `close` waits for a message that another task is sending."""

_DONE = bytes([DONE])

_bulk = BulkMemory(128 << 20)

Result = TypeVar("Result")


class Channel:
    """Lists of frames, to and from one peer.

    Args:
        connection: established, with receives of MESSAGE_BYTES, CREDITS + CONTROLS of them.
        most: the largest number of bytes of a message that is received.
        is_first: this side has connected. The other side sends nothing before something has
            arrived (RFC 5044, 7.1).
    """

    def __init__(self, connection: Connection, most: int, is_first: bool) -> None:
        self.connection = connection
        self.cause: Exception | None = None
        """Why no more messages arrive, and none can be sent; None while they can."""
        self._most = most
        self._may_send = is_first
        self._inbox: deque[bytes] = deque()  # MESSAGEs behind one whose bulk is not received
        self._complete: deque[tuple[list[memoryview], bool]] = deque()  # frames; had they bulk?
        self._bulk_is_ahead = False  # a message with bulk is being received, or is complete
        self._fetching: asyncio.Task[None] | None = None
        self._is_aborted = False
        self._arrived = self._taken = self._credited = 0
        self._sent = self._peer_took = 0
        self._ranges: deque[list[RemoteMemory]] = deque()
        self._expected_ranges = 0
        self._dones = self._expected_dones = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._receiving = self._loop.create_task(self._receive_all())

    @property
    def has_ended(self) -> bool:
        """Whether `read` would raise, because the connection has ended."""
        return not self._complete and self._cannot_complete

    @property
    def _cannot_complete(self) -> bool:
        """Whether no further message will be complete: the rest of one that has arrived before the
        end may still be."""
        return self.cause is not None and (self._is_aborted or self._fetching is None)

    # -- what arrives -----------------------------------------------------------------------------

    async def _receive_all(self) -> None:
        cause: Exception = ClosedError("the task that receives was cancelled")
        try:
            while True:
                self._dispatch(await self.connection.receive())
        except BROKEN as error:
            cause = error
        finally:
            self.abort(cause)
            del cause  # its traceback holds this frame

    def _dispatch(self, data: bytes) -> None:
        kind = data[0] if data else 0
        if kind == MESSAGE:
            self._arrived += 1
            if self._arrived - self._credited > CREDITS:
                raise ProtocolError(f"more than {CREDITS} messages without a CREDIT")
            self._may_send = True
            self._inbox.append(data)
            self._advance()
        elif kind == READY and self._expected_ranges:
            self._expected_ranges -= 1
            self._ranges.append(parse_ready(data))
        elif kind == DONE and self._expected_dones:
            self._expected_dones -= 1
            self._dones += 1
        elif kind == CREDIT:
            self._peer_took = parse_credit(data, self._peer_took, self._sent)
        else:
            raise ProtocolError(f"a message of kind {kind} that was not expected")
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition that an arrival can change."""
        while not condition():
            if self.cause is not None:
                raise detached(self.cause)
            await self._wait()

    async def _wait(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    # -- receiving --------------------------------------------------------------------------------

    async def read(self) -> list[memoryview]:
        """Return the next message. Each of its frames has memory of its own, except that a frame
        that continues another in the sender's memory also does so here.

        Raises:
            RdmaError, anyio.EndOfStream: the connection has ended.
            ProtocolError: the peer violates the protocol.

        Cancellation: the channel cannot be used any more; `abort` it.
        """
        async with self._reading:
            while not self._complete:
                if self.cause is not None and self._cannot_complete:
                    raise detached(self.cause)
                await self._wait()
            frames, had_bulk = self._complete.popleft()
            self._taken += 1
            if had_bulk:
                self._bulk_is_ahead = False
            if had_bulk or self._taken == 1:
                try:
                    self._advance()
                except ProtocolError as error:  # of a later message
                    self.abort(error)
            await self._return_credit()
            return frames

    def _advance(self) -> None:
        """Complete the MESSAGEs that have arrived, up to the second one with bulk. None with bulk
        until the program has read the first one, Dask's handshake, which has none: a peer without
        a handshake takes no memory beyond the receives.

        Raises:
            ProtocolError: a MESSAGE is not valid.
        """
        while self._inbox and self._fetching is None:
            announcement = parse_announcement(self._inbox[0], self._most)
            if announcement.head is not None and not announcement.bulk_length:
                at_once(parse_table(announcement, announcement.head))
                frames = at_once(assembled(announcement, announcement.head, []))
                self._complete.append((frames, False))
            elif not self._taken and not self._complete:
                length = announcement.head_length + announcement.bulk_length
                raise ProtocolError(f"the first message, a handshake, has {length} bytes")
            elif self._bulk_is_ahead or self.cause is not None or not self._taken:
                return
            else:
                self._bulk_is_ahead = True
                self._fetching = self._loop.create_task(self._fetch(announcement))
            self._inbox.popleft()

    async def _fetch(self, announcement: Announcement) -> None:
        """Receive the bulk of a message, and complete those behind it."""
        try:
            frames = await self._receive(announcement)
            self._fetching = None
            if not self._is_aborted:
                self._complete.append((frames, True))
                self._advance()
            self._wake()
        except BaseException as error:
            self._fetching = None
            if not isinstance(error, Exception):
                self.abort(ClosedError("the task that receives was cancelled"))
                raise
            self.abort(error)  # `read` raises it

    async def _receive(self, announcement: Announcement) -> list[memoryview]:
        head = announcement.head
        if head is None:
            head = _bulk.take(announcement.head_length)
            await self._take([head])
        sizes = await self._in_turns(parse_table(announcement, head))
        buffers: list[memoryview] = []
        for start in range(0, len(sizes), BATCH):
            batch = [_bulk.take(size) for size in sizes[start : start + BATCH]]
            await self._take(batch)
            buffers += batch
        return await self._in_turns(assembled(announcement, head, buffers))

    async def _in_turns(self, turns: Turns[Result]) -> Result:
        """Do a work, and let other tasks run after each turn. A peer chooses the number of frames
        of a message, and the program that of its own.

        Raises:
            Exception: the work's; and the cause, once the channel is aborted.
        """
        while True:
            try:
                next(turns)
            except StopIteration as end:
                result: Result = end.value
                return result
            await asyncio.sleep(0)
            if self._is_aborted and self.cause is not None:
                raise detached(self.cause)

    async def _return_credit(self) -> None:
        if self._taken - self._credited >= CREDITS // 2 and self.cause is None:
            self._credited = self._taken
            try:
                await self.connection.send(credit(self._taken))
            except RdmaError:
                return  # what has arrived is still read

    async def _take(self, buffers: Sequence[memoryview]) -> None:
        """Let the peer write into these buffers, until it is done."""
        async with AsyncExitStack() as stack:
            ranges = []
            for buffer in buffers:
                grant = self.connection.grant(buffer, Access.REMOTE_WRITE)
                ranges.append((await stack.enter_async_context(grant)).remote)
            self._expected_dones += 1
            await self.connection.send(ready(ranges))
            await self._until(lambda: self._dones)
            self._dones -= 1

    # -- sending ----------------------------------------------------------------------------------

    async def write(self, frames: Sequence[Any]) -> int:
        """Send a message, and return the bytes of its frames, which are anything with a buffer.

        Returns when the peer's device has the message. Until its program takes it, at most CREDITS
        messages are sent, and nothing of the bulk of the second one that has any.

        Raises:
            RdmaError, anyio.EndOfStream: the connection has ended.
            ProtocolError: the peer violates the protocol.
            ValueError: there are too many frames.

        Cancellation: the channel cannot be used any more; `abort` it.
        """
        async with self._writing:  # before the frames are arranged: messages go in the calls' order
            message = await self._in_turns(pack(frames))
            await self._until(lambda: self._may_send and self._sent - self._peer_took < CREDITS)
            if self.cause is not None:
                raise detached(self.cause)
            self._sent += 1
            self._expected_ranges += (message.head is not None) + -(-len(message.bulk) // BATCH)
            await self.connection.send(message.announcement)
            if message.head is not None:
                await self._give([[memoryview(message.head)]])
            for start in range(0, len(message.bulk), BATCH):
                await self._give(message.bulk[start : start + BATCH])
        return message.length

    async def _give(self, buffers: Sequence[Sequence[memoryview]]) -> None:
        """Write each list of parts into a range that the peer offers."""
        await self._until(lambda: self._ranges)
        ranges = self._ranges.popleft()
        wanted = [sum(part.nbytes for part in parts) for parts in buffers]
        offered = [remote.length for remote in ranges]
        if offered != wanted:
            raise ProtocolError(f"a READY for {offered} bytes, where {wanted} were announced")
        limit = asyncio.Semaphore(PIECES)

        async def write(piece: memoryview, remote: RemoteMemory) -> None:
            async with limit:
                await self.connection.write(piece, remote)

        pieces = [
            each
            for parts, remote in zip(buffers, ranges, strict=True)
            for each in _pieces(parts, remote)
        ]
        await asyncio.gather(*(write(*each) for each in pieces))
        await self.connection.send(_DONE)

    # -- the end ----------------------------------------------------------------------------------

    def abort(self, cause: Exception | None = None) -> None:
        """End at once. What has arrived can still be read. Idempotent.

        Args:
            cause: why; None: the program wants it.
        """
        if self.cause is None:
            self.cause = cause or ClosedError("this comm was closed")
        if cause is None:
            self._is_aborted = True
            self._complete.clear()
        self._wake()
        self.connection._close_soon()

    async def aclose(self) -> None:
        """Wait for a message that another task is sending, for at most FLUSH_SECONDS; then end.

        Cancellation: ends at once.
        """
        try:
            if self._writing.locked() and self.cause is None:
                async with asyncio.timeout(FLUSH_SECONDS), self._writing:
                    pass
        except TimeoutError:
            pass
        finally:
            self.abort()
        await self.connection.aclose()
        if self._fetching is not None:
            await asyncio.wait([self._fetching])


def _pieces(
    parts: Iterable[memoryview], remote: RemoteMemory
) -> Iterable[tuple[memoryview, RemoteMemory]]:
    place = 0
    for part in parts:
        for start in range(0, part.nbytes, PIECE):
            piece = part[start : start + PIECE]
            yield piece, remote[place : place + piece.nbytes]
            place += piece.nbytes
