"""The bytes between a Valkey client and its server, by callbacks.

Each side announces a buffer. The other one writes into it from its beginning to its end, each WRITE
with the number of its bytes as immediate data. When the buffer is full, its owner announces
another. Ours are the parts of a ring in turn, each once it has been read: the server writes the
next one while this side reads.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from aiordma._base.enums import Access
from aiordma._base.errors import RdmaError, detached
from aiordma._base.ranges import RemoteMemory
from aiordma._base.states import ConnectionState
from aiordma._connection.connection import Connection
from aiordma._connection.messages import Message
from aiordma._connection.posting import Posting
from aiordma._endpoint.capabilities import require_immediate
from aiordma._requests.request import WorkRequest
from aiordma.integrations.valkey.control import (
    Opcode,
    ValkeyProtocolError,
    memory_of,
    opcode_of,
    pack_memory,
    pack_opcode,
)
from aiordma.streams.channel import Channel

__all__ = ("CONTROL_SLOTS", "DATA_SLOTS", "RECEIVES", "ValkeyChannel")

RECEIVES = 128
"""Posted receives. Without one, the server's device tries again (our rnr_retry_count)."""
DATA_SLOTS = 16
"""Requests at the same time, with which no WRITE is posted."""
CONTROL_SLOTS = 4
"""Requests of the send queue that are kept for control messages."""
PARTS = 2
"""Of the ring: the server writes one and this side reads the other. Four gained nothing more."""
MESSAGE_BYTES = 64 * 1024
"""The most bytes of one WRITE: the engine copies so many."""

SERVER_RECEIVES = 1024
"""The receives that a Valkey server posts. Without one, the connection ends at once: the server's
answer to our connect permits our device no retries."""


class ValkeyChannel(Channel, Posting):
    """See the module. It is a Channel and, as there is nothing else to do, its path.

    Attributes:
        readable: how many bytes can be read now.
        at_eof: whether the server has closed the connection; there may still be data to read.
        on_readable: called when data has arrived, and at the end; None: nobody waits for it.
        on_writable: called when there may be room to send again, and at the end; or None.

    Args:
        connection: a prepared one, with RECEIVES receives of CONTROL_BYTES, and DATA_SLOTS +
            CONTROL_SLOTS requests.
        buffer_bytes: of the memory that the peer writes to.

    Raises:
        NotSupportedError: the device has no immediate data.
        VerbsCallError: memory could not be registered.
    """

    most_unhandled: int = SERVER_RECEIVES // 2
    """The most messages that the server may not have handled yet. Half of them after its last
    answer, it is asked for its features: the answer shows that it has handled what was sent before.
    Nothing else does for certain."""

    def __init__(self, connection: Connection, buffer_bytes: int, close_timeout: float) -> None:
        super().__init__(connection, close_timeout, (buffer_bytes, DATA_SLOTS * MESSAGE_BYTES))
        require_immediate(self._endpoint)
        self._port, self._staging = connection._port, connection._staging
        self._general = connection._general
        self.on_readable: Callable[[], object] | None = None
        self.on_writable: Callable[[], object] | None = None
        access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        self._part_bytes = buffer_bytes // PARTS
        self._buffer = connection.register(bytearray(PARTS * self._part_bytes), access)
        self._buffer_view = self._buffer[:].view
        self._part = 0  # the next one that is announced
        self._read_at = 0  # in the buffer
        self.readable: int = 0
        self.at_eof: bool = False
        # Bytes of the announced part. Before the first, there is no room.
        self._arrived = self._part_bytes
        self._peer: RemoteMemory | None = None
        self._written = 0  # bytes of the peer's buffer
        self._in_flight = 0  # requests
        self._unhandled = 0  # messages that the server may not have handled yet
        self._asked: int | None = None  # how many these were at the question, with itself
        self._write_closed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._on_drained: Callable[[], object] | None = None
        self.teardown.on_ended.append(self._ended)
        self._arrivals = connection._messages.queue
        self._arrivals.set_waiter(self)

    @property
    def path(self) -> "ValkeyChannel":
        """This object."""
        return self

    # -- the beginning ----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Announce the buffer, once the connection is established, and wait until the server has
        announced its own.

        Raises:
            RdmaError: the connection has ended.
            ValkeyProtocolError: the peer is no Valkey server.

        Cancellation: has no effect on the channel.
        """
        self._announce()
        while self._peer is None:
            await self._changed()

    def notify_drained(self, callback: Callable[[], object], /) -> bool:
        """As `Channel.notify_drained`."""
        if self._is_drained:
            return False
        self._on_drained = callback
        return True

    @property
    def _is_drained(self) -> bool:
        return self._is_over or not self._in_flight

    async def _changed(self) -> None:
        error = self.write_error()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._on_drained is not None and self._is_drained:
            self._on_drained()

    # -- errors and the end -----------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self.teardown.cause is not None

    def read_error(self) -> Exception | None:
        """As `Channel.read_error`."""
        if self._error is not None:
            return detached(self._error)
        if self.teardown.has_ended and not self.at_eof:
            return self.write_error()
        return None

    def write_error(self) -> Exception | None:
        """As `Channel.write_error`."""
        found = self._error or self.teardown.cause
        return None if found is None else detached(found)

    def fail(self, error: Exception) -> None:
        """End the connection, because of the server or because a request could not be posted."""
        super().fail(error)
        self._ended()

    def _ended(self) -> None:
        is_disconnected = self._endpoint.state is ConnectionState.DISCONNECTED
        self.at_eof = self._error is None and self.teardown.has_ended and is_disconnected
        self._wake()
        for call in (self.on_readable, self.on_writable):
            if call is not None:
                call()

    # -- reading ----------------------------------------------------------------------------------

    def read(self, limit: int, /) -> bytes:
        """Return bytes that have arrived, at most `limit`; b"" if there are none."""
        data = bytearray()
        self.feed(data.extend, limit)
        return bytes(data)

    def read_into(self, buffer: memoryview, /) -> int:
        """Copy bytes that have arrived into the buffer; returns their number."""

        def copy(view: memoryview) -> None:
            buffer[: len(view)] = view

        return self.feed(copy, len(buffer))

    def feed(self, receive: Callable[[memoryview], object], limit: int, /) -> int:
        """Call a function with a view of bytes that have arrived, at most `limit`, which it must
        not keep; returns their number."""
        start = self._read_at
        view = self._buffer_view[start : start + min(limit, self.readable)]
        length = len(view)  # less at the end of the ring
        receive(view)
        view.release()
        self._read_at = (start + length) % len(self._buffer)
        self.readable -= length
        self._announce()
        return length

    # -- writing ----------------------------------------------------------------------------------

    def _room(self) -> int:
        """Return how many bytes the next message may have now."""
        peer, error = self._peer, self._error or self.teardown.cause
        if peer is None or self._write_closed or error is not None:
            return 0
        if self._unhandled >= self.most_unhandled or self._in_flight >= DATA_SLOTS:
            return 0
        return min(peer.length - self._written, MESSAGE_BYTES)

    @property
    def can_write(self) -> bool:
        """Whether `write` can post anything now."""
        return self._room() > 0

    def write(self, data: bytes | memoryview, /) -> int:
        """As `Channel.write`."""
        done = 0
        while done < len(data) and (room := self._room()):
            peer, part = self._peer, data[done : done + room]
            assert peer is not None
            length = len(part)
            done += length
            target = RemoteMemory(peer.address + self._written, length, peer.rkey)
            try:
                request = self.post_write(part, target, immediate=length)
            except RdmaError as error:
                self._refuse(error)
            self._written += length
            self._unhandled += 1
            self._in_flight += 1
            request.add_done_callback(self._sent)
            if self._asked is None and self._unhandled >= self.most_unhandled // 2:
                self._post_control(pack_opcode(Opcode.GET_SERVER_FEATURE))
                self._asked = self._unhandled
        return done

    def close_write(self, both: bool, /) -> None:
        """Write nothing more. The protocol has no message for that."""
        self._write_closed = True

    def _sent(self, request: WorkRequest) -> None:
        self._in_flight -= 1
        if request.exception() is not None:
            return  # the connection has ended, or is about to: `_ended` is called
        if self._waiters or self._on_drained is not None:
            self._wake()
        if self.on_writable is not None:
            self.on_writable()

    # -- control messages -------------------------------------------------------------------------

    def _announce(self) -> None:
        """Announce the next part of the ring, if the one before is full, and it has been read."""
        is_unread = self.readable > (PARTS - 1) * self._part_bytes
        if self._arrived < self._part_bytes or is_unread or self._is_over:
            return
        start = self._part * self._part_bytes
        self._part = (self._part + 1) % PARTS
        self._arrived = 0
        with suppress(RdmaError):  # the reader gets the error
            part = self._buffer[start : start + self._part_bytes]
            self._post_control(pack_memory(part.remote()))

    def _post_control(self, message: bytes) -> None:
        try:
            request = self.post_send(message)
        except RdmaError as error:
            self._refuse(error)
        self._unhandled += 1
        self._in_flight += 1
        request.add_done_callback(self._sent)

    def _refuse(self, error: RdmaError) -> NoReturn:
        try:
            self.fail(error)
            raise error
        finally:
            del error  # its traceback holds this frame

    # -- arrivals ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Take what has arrived. The queue of arrivals calls this, and calls it at the end."""
        arrivals = self._arrivals
        try:
            while arrivals.arrived and self._error is None:
                data, immediate, invalidated, written = arrivals.take_message(Message)
                if written is not None and written == immediate <= (
                    self._part_bytes - self._arrived
                ):
                    self._arrived += written
                    self.readable += written
                    self._announce()
                elif written is not None:
                    self._refuse_data(immediate, written)
                elif immediate is None and invalidated is None:
                    self._take_control(data)
                else:
                    kind = "SEND_WITH_INV" if immediate is None else "SEND_WITH_IMM"
                    raise ValkeyProtocolError(f"the peer sent a message of kind {kind}")
        except ValkeyProtocolError as error:
            if self._peer is None:
                self.fail(error)  # `open_connection` says to whom it connects
            else:
                self.fail(ValkeyProtocolError(f"{self.name}: {error}"))
        except RdmaError:
            return  # the connection has ended: `_ended` is called
        if self.readable and self.on_readable is not None:
            self.on_readable()

    def _refuse_data(self, announced: int | None, written: int) -> NoReturn:
        if announced != written:
            raise ValkeyProtocolError(
                f"the peer says that it wrote {announced} bytes, and it wrote {written}"
            )
        raise ValkeyProtocolError(
            f"the peer wrote {written} bytes where {self._part_bytes - self._arrived} of the "
            "buffer were left"
        )

    def _take_control(self, message: bytes) -> None:
        opcode = opcode_of(message)
        if opcode is Opcode.REGISTER_XFER_MEMORY:
            self._take_memory(memory_of(message))
        elif opcode is Opcode.GET_SERVER_FEATURE:
            if self._asked is None:
                raise ValkeyProtocolError("the peer answered, and nothing was asked")
            self._unhandled -= self._asked
            self._asked = None
            self._call_writable()
        elif opcode is not Opcode.KEEPALIVE:
            raise ValkeyProtocolError(f"the peer sent {opcode.name}, which only clients send")

    def _take_memory(self, memory: RemoteMemory) -> None:
        if self._peer is not None and self._written < self._peer.length:
            raise ValkeyProtocolError(
                "the peer announced memory again, with "
                f"{self._peer.length - self._written} bytes of the previous left"
            )
        self._peer, self._written = memory, 0
        self._wake()
        self._call_writable()

    def _call_writable(self) -> None:
        if self.on_writable is not None:
            self.on_writable()
