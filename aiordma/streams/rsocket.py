"""One rsocket over one connection: rsockets' protocol, carried out by callbacks. Nothing waits in
this module, so that streams and asyncio transports can both be built on it.

Data to send is copied into a ring of registered memory, or written from the caller's registered
memory. Data that arrived lies in another ring, until it is read. On iWARP rsockets uses no
immediate data: each WRITE is followed by a SEND of the same 4 bytes.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from aiordma._base.enums import Access
from aiordma._base.errors import (
    DisconnectedError,
    RdmaError,
    StreamProtocolError,
    detached,
)
from aiordma._base.ranges import RemoteMemory
from aiordma._connection.connection import Connection
from aiordma._loop.threads import Once
from aiordma._requests.request import WorkRequest
from aiordma.streams.protocol import (
    GRANT_BYTES,
    TABLE_ENTRIES,
    Control,
    Hello,
    Operation,
    Receiver,
    Sender,
    Update,
    immediate_of,
    operation_of,
    unpack_grant,
)
from aiordma.verbs.memory import MemorySlice

__all__ = ("CONTROL_SLOTS", "Rsocket")

CONTROL_SLOTS = 4
"""Requests of the send queue that are kept for grants and for the end. (On iWARP a grant takes
two.)"""
WORD_BYTES = 4
TRANSFER_BYTES = 64 * 1024
"""The most bytes of one message: the peer can read the first while others are on the way."""

_TABLE_BYTES = TABLE_ENTRIES * GRANT_BYTES
_NOWHERE = RemoteMemory(0, 0, 0)


class _SendRing:
    """Registered memory for data that is being sent. It is taken and released in order."""

    def __init__(self, memory: MemorySlice) -> None:
        self._memory = memory
        self._view = memory.view
        self._next = 0
        self.free = len(memory)

    def room(self) -> int:
        """How many bytes there are side by side."""
        return min(self.free, len(self._memory) - self._next)

    def copy(self, data: memoryview) -> MemorySlice:
        """Copy data, at most `room` bytes, and return where it is."""
        start, end = self._next, self._next + len(data)
        self._view[start:end] = data
        self._next = end % len(self._memory)
        self.free -= len(data)
        return self._memory[start:end]


class Rsocket:
    """See the module. The connection is a prepared one, with `receive_buffers=0`.

    Attributes:
        changed: called when data has arrived, when there is room to send again, and at the end.
        at_eof: whether the peer sends no more data; there may still be data to read.

    Raises:
        VerbsCallError: memory could not be registered, or a receive not posted.
    """

    def __init__(self, connection: Connection, ring_bytes: int) -> None:
        options = connection.options
        # Posted requests hold this object. It must not hold the connection, so that one that was
        # forgotten is collected, and says so.
        self._connection = weakref.ref(connection)
        self._endpoint = connection._endpoint
        self._is_iwarp = self._endpoint.hub.is_iwarp
        self._credits = options.max_recv_wr
        self._control_slots = CONTROL_SLOTS
        self._data_slots = options.max_send_wr - CONTROL_SLOTS
        self._slots_of_data = 2 if self._is_iwarp else 1
        # The peer may write to the ring and the table. It cannot reach the rest.
        lent = connection.register(
            bytearray(ring_bytes + _TABLE_BYTES), Access.LOCAL_WRITE | Access.REMOTE_WRITE
        )
        ours = connection.register(
            bytearray(ring_bytes + WORD_BYTES * self._credits + GRANT_BYTES * CONTROL_SLOTS)
        )
        self._ring = lent[:ring_bytes]
        self._ring_view = self._ring.view
        self._table = lent[ring_bytes:]
        self._table_view = self._table.view
        self._next_entry = 1  # of our table, that the peer fills next
        self._sends = _SendRing(ours[:ring_bytes])
        words = ours[ring_bytes : ring_bytes + WORD_BYTES * self._credits]
        self._words = [
            words[at : at + WORD_BYTES] for at in range(0, WORD_BYTES * self._credits, WORD_BYTES)
        ]
        self._next_word = 0
        grants = ours[ring_bytes + WORD_BYTES * self._credits :]
        self._grants = [grants[at : at + GRANT_BYTES] for at in range(0, len(grants), GRANT_BYTES)]
        self._next_grant = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # bytes of the ring, slots
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._control: Control | None = None  # to be sent when a slot is free
        self._write_closed = False
        self._peer_disconnected = False
        self._error: Exception | None = None
        self._early: list[tuple[int, int]] = []  # arrived before `begin`
        self._is_begun = False  # the connection is established
        self._may_send = False
        self._drained: Once | None = None
        self.at_eof: bool = False
        self.changed: Callable[[], object] = lambda: None
        for word in self._words:
            self._post_receive(word)
        self._endpoint.life.on_end.append(self._ended)

    # -- the handshake ----------------------------------------------------------------------------

    def hello(self) -> bytes:
        """Return the private data for the peer."""
        ring, table = self._ring.remote(), self._table.remote()
        return Hello(self._credits, table, ring[: len(ring) // 2]).pack()

    def start(self, private_data: bytes) -> None:
        """Set the peer's private data.

        Raises:
            StreamProtocolError: the peer is no rsocket of this version.
        """
        hello = Hello.unpack(private_data)
        self._sender = Sender(hello)
        self._receiver = Receiver(self._ring.remote(), self._credits, hello)

    def begin(self, *, is_first: bool) -> None:
        """Begin to send, once the connection is established and `start` was called.

        Args:
            is_first: this side has connected. On iWARP the other side sends nothing before
                something has arrived (RFC 5044, 7.1); a side that connected sends a grant at once.
        """
        self._is_begun = True
        self._may_send = is_first or not self._is_iwarp
        early, self._early = self._early, []
        for word, written in early:
            self._handle(word, written)
        self._send_pending()

    # -- state ------------------------------------------------------------------------------------

    @property
    def readable(self) -> int:
        """How many bytes can be read now."""
        return self._receiver.readable if self._receiver is not None else 0

    @property
    def writable(self) -> int:
        """How many bytes the next message may have now, if it is not copied."""
        if self._sender is None or not self._may_send or self._write_closed or self._is_over:
            return 0
        if self._data_slots < self._slots_of_data:
            return 0
        return min(self._sender.room, TRANSFER_BYTES)

    @property
    def can_write(self) -> bool:
        """Whether `write` and `write_registered` can post anything now."""
        return self.writable > 0 and self._sends.room() > 0

    @property
    def _is_over(self) -> bool:
        return self._error is not None or self._endpoint.cause is not None

    def read_error(self) -> Exception | None:
        """Why nothing more can be read, once everything was read; None if data may still come, or
        if the peer has ended its data in order (`at_eof`)."""
        if self.at_eof:
            return None
        if self._error is not None:
            return detached(self._error)
        if self._endpoint.life.has_ended:
            return self._end_error()
        return None

    def write_error(self) -> Exception | None:
        """Why nothing can be written, or None."""
        if self._error is not None:
            return detached(self._error)
        if self._endpoint.cause is not None:
            return self._end_error()
        if self._peer_disconnected:
            return DisconnectedError("the peer has closed the stream")
        return None

    def _end_error(self) -> Exception:
        cause = self._endpoint.cause
        assert cause is not None
        error = detached(cause)
        if isinstance(error, DisconnectedError) and not self.at_eof:
            return DisconnectedError(f"{cause}, without an end of its data")
        return error

    # -- reading ----------------------------------------------------------------------------------

    def read(self, limit: int) -> bytes:
        """Return bytes that have arrived, at most `limit`; b"" if there are none."""
        receiver = self._receiver
        if receiver is None:
            return b""
        start, length = receiver.span(limit)
        data = bytes(self._ring_view[start : start + length])
        if length < limit and receiver.readable > length:  # it goes on at the ring's beginning
            self._consume(receiver, length)
            return data + self.read(limit - length)
        self._consume(receiver, length)
        return data

    def read_into(self, buffer: memoryview) -> int:
        """Copy bytes that have arrived into the buffer; returns their number."""
        done = 0
        receiver = self._receiver
        while receiver is not None and receiver.readable and done < len(buffer):
            start, length = receiver.span(len(buffer) - done)
            buffer[done : done + length] = self._ring_view[start : start + length]
            self._consume(receiver, length)
            done += length
        return done

    def _consume(self, receiver: Receiver, length: int) -> None:
        receiver.consume(length)
        if receiver.is_update_due:
            self._send_update()

    # -- writing ----------------------------------------------------------------------------------

    def write(self, data: memoryview) -> int:
        """Copy and post as much as there is room for; returns the number of bytes.

        Args:
            data: contiguous bytes.

        Raises:
            RdmaError: the device refused a request; the stream has ended.
        """
        done = 0
        while done < len(data):
            length = min(self.writable, self._sends.room(), len(data) - done)
            if not length:
                break
            copy = self._sends.copy(data[done : done + length])
            self._post_data(copy, length)
            done += length
        return done

    def write_registered(self, memory: MemorySlice) -> int:
        """Post as much of registered memory as there is room for, without a copy; returns the
        number of bytes. The memory must stay as it is while there is data in flight.

        Raises:
            RdmaError: the device refused a request; the stream has ended.
        """
        done = 0
        while done < len(memory):
            length = min(self.writable, len(memory) - done)
            if not length:
                break
            self._post_data(memory[done : done + length], 0)
            done += length
        return done

    def _post_data(self, memory: MemorySlice, ring_bytes: int) -> None:
        assert self._sender is not None
        length = len(memory)
        self._data_slots -= self._slots_of_data
        self._in_flight.append((ring_bytes, self._slots_of_data))
        immediate = immediate_of(Operation.DATA, length)
        self._post(memory, self._sender.take(length), immediate, self._data_sent)

    def _post(
        self,
        memory: MemorySlice | None,
        target: RemoteMemory,
        immediate: int,
        sent: Callable[[WorkRequest], None],
    ) -> None:
        connection = self._connection()
        if connection is None:
            return  # it was forgotten, and is being closed
        try:
            if not self._is_iwarp:
                source = b"" if memory is None else memory
                request = connection.post_write(source, target, immediate=immediate)
            else:
                if memory is not None:
                    first = connection.post_write(memory, target)
                    first.add_done_callback(WorkRequest.exception)
                request = connection.post_send(immediate.to_bytes(WORD_BYTES, sys.byteorder))
        except RdmaError as error:
            self._fail(error)
            raise
        request.add_done_callback(sent)

    def _data_sent(self, request: WorkRequest) -> None:
        ring_bytes, slots = self._in_flight.popleft()
        self._sends.free += ring_bytes
        self._data_slots += slots
        self._sent(request)

    def _control_sent(self, request: WorkRequest) -> None:
        self._control_slots += 1
        self._sent(request)

    def _grant_sent(self, request: WorkRequest) -> None:
        self._control_slots += 2 if self._is_iwarp else 1
        self._sent(request)

    def _sent(self, request: WorkRequest) -> None:
        if request.exception() is not None:
            return  # the connection has ended, or is about to: `_ended` is called
        self._send_pending()
        if self.is_drained and self._drained is not None:
            self._drained.set()
        self.changed()

    # -- control messages -------------------------------------------------------------------------

    def _send_pending(self) -> None:
        """Post what has waited for one of the control slots, or for the beginning."""
        if not self._may_send:
            return
        if self._receiver is not None and self._receiver.is_update_due:
            self._send_update()
        if self._control is not None and self._control_slots:
            control, self._control = self._control, None
            self._control_slots -= 1
            immediate = immediate_of(Operation.CONTROL, control)
            with suppress(RdmaError):  # it ends the stream, and says so there
                self._post(None, _NOWHERE, immediate, self._control_sent)

    def _send_update(self) -> None:
        assert self._receiver is not None
        needed = 2 if self._is_iwarp else 1
        if not self._may_send or self._peer_disconnected or self._is_over:
            return
        if self._control_slots < needed:
            return
        update = self._receiver.update()
        with suppress(RdmaError):  # it ends the stream, and says so there
            self._post_update(update, needed)

    def _post_update(self, update: Update, needed: int) -> None:
        if not update.grant:
            self._control_slots -= 1
            self._post(None, _NOWHERE, update.immediate, self._control_sent)
            return
        self._control_slots -= needed
        memory = self._grants[self._next_grant]
        self._next_grant = (self._next_grant + 1) % len(self._grants)
        memory.view[:] = update.grant
        self._post(memory, update.target, update.immediate, self._grant_sent)

    def close_write(self, *, both: bool = False) -> None:
        """Tell the peer that no more data comes. What was written before arrives before that.

        Args:
            both: nothing will be read any more, either.
        """
        if self._write_closed and not both:
            return
        self._write_closed = True
        if not self._peer_disconnected and not self._is_over and self._sender is not None:
            self._control = Control.DISCONNECT if both or self.at_eof else Control.SHUTDOWN
            self._send_pending()

    @property
    def has_data_in_flight(self) -> bool:
        """Whether the device may still read data that was written."""
        return bool(self._in_flight)

    @property
    def is_drained(self) -> bool:
        """Whether the device of the peer has everything that was written."""
        return (
            not self._in_flight and self._control is None and self._control_slots == CONTROL_SLOTS
        )

    async def drained(self) -> None:
        """Wait until `is_drained`, or the end.

        Cancellation: has no effect on the stream.
        """
        while not self.is_drained and not self._endpoint.life.has_ended and self._error is None:
            self._drained = Once(self._endpoint.loop)
            await self._drained.wait()

    # -- arrivals ---------------------------------------------------------------------------------

    def _post_receive(self, word: MemorySlice) -> None:
        connection = self._connection()
        if connection is not None:
            connection.post_recv(word).add_done_callback(self._arrived)

    def _arrived(self, request: WorkRequest) -> None:
        if request.exception() is not None:
            return  # the connection has ended, or is about to: `_ended` is called
        completion = request.result()
        word = self._words[self._next_word]  # receives complete in order
        self._next_word = (self._next_word + 1) % self._credits
        value, written = completion.immediate, completion.byte_len
        if self._is_iwarp:
            value, written = int.from_bytes(bytes(word), sys.byteorder), -1
        if self._error is not None:
            return
        with suppress(RdmaError):  # the connection has ended: `_ended` is called
            self._post_receive(word)
        if value is None:
            self._fail(StreamProtocolError("the peer sent a message without immediate data"))
        elif not self._is_begun:
            # On RoCE and InfiniBand a message can arrive before the handshake's last step.
            self._early.append((value, written))
        else:
            self._handle(value, written)

    def _handle(self, immediate: int, written: int) -> None:
        self._may_send = True
        try:
            operation, value = operation_of(immediate)
            self._handle_operation(operation, value, written)
        except StreamProtocolError as error:
            self._fail(error)
        self._send_pending()  # the first time, this grants the second half of the ring
        self.changed()

    def _handle_operation(self, operation: Operation, value: int, written: int) -> None:
        assert self._receiver is not None
        assert self._sender is not None
        if operation is Operation.DATA:
            if self.at_eof:
                raise StreamProtocolError("the peer sent data after the end of its data")
            if written not in (value, -1):
                raise StreamProtocolError(f"the peer says that it wrote {value} bytes: {written}")
            self._receiver.add(value)
        elif operation is Operation.GRANT:
            self._take_grant(self._sender)
            self._sender.set_limit(value)
        elif operation is Operation.IOMAP:
            raise StreamProtocolError("the peer maps memory (riomap), which was not offered to it")
        elif value == Control.DISCONNECT:
            self.at_eof = self._peer_disconnected = True
        elif value == Control.SHUTDOWN:
            self.at_eof = True
            self._peer_disconnected |= self._write_closed
        elif value != Control.KEEPALIVE:
            raise StreamProtocolError(f"the peer sent control message {value}, which is reserved")

    def _take_grant(self, sender: Sender) -> None:
        # Copied once, because the peer can write to the table at any time.
        start = self._next_entry * GRANT_BYTES
        entry = self._table_view[start : start + GRANT_BYTES]
        grant = unpack_grant(bytes(entry))
        if grant is not None:
            entry[:] = bytes(GRANT_BYTES)
            self._next_entry = (self._next_entry + 1) % TABLE_ENTRIES
            sender.add_grant(grant)

    # -- the end ----------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = detached(error)
        self._endpoint.fail(error)
        self._ended()

    def _ended(self) -> None:
        if self._drained is not None:
            self._drained.set()
        self.changed()
