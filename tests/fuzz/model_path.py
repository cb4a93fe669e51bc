"""The data path of a stream in Python, on the protocol's model (`aiordma.streams.protocol`): the
oracle of the engine's (`_native/engine/stream_path.c`). `rsocket_driver` and `stream_calls` play
each input with both. `tests/interop/record_streams.py` records it beside C programs.
"""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from aiordma import Connection, RdmaError, RemoteMemory, WorkRequest
from aiordma.streams import StreamProtocolError
from aiordma.streams.path import CONTROL_SLOTS, TRANSFER_BYTES, WORD_BYTES, Memory
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from aiordma.streams.rsocket import Rsocket
from aiordma.verbs import WorkCompletionOpcode
from aiordma.verbs.memory import MemorySlice
from tests.fuzz.model_protocol import (
    Control,
    Operation,
    Receiver,
    Sender,
    Update,
    immediate_of,
    operation_of,
    unpack_grant,
)

__all__ = ("ModelPath",)

Result = TypeVar("Result")

_NOWHERE = RemoteMemory(0, 0, 0)
_RECEIVED_SEND = WorkCompletionOpcode.RECV
_RECEIVED_WRITE = WorkCompletionOpcode.RECV_RDMA_WITH_IMM


class _SendRing:
    """Registered memory for data that is being sent. It is taken and released in order."""

    def __init__(self, memory: MemorySlice) -> None:
        self._memory = memory
        self._view = memory.view
        self._next = 0
        self.free: int = len(memory)

    def room(self) -> int:
        """How many bytes there are side by side."""
        return min(self.free, len(self._memory) - self._next)

    def copy(self, data: bytes | memoryview) -> MemorySlice:
        """Copy data, at most `room` bytes, and return where it is."""
        start, end = self._next, self._next + len(data)
        self._view[start:end] = data
        self._next = end % len(self._memory)
        self.free -= len(data)
        return self._memory[start:end]


class ModelPath:
    """See the module. StreamPath in `_engine.pyi` has the same attributes and methods."""

    def __init__(self, connection: Connection, memory: Memory) -> None:
        options = connection.options
        # Posted requests hold this object. It must not hold the connection, so that one that was
        # forgotten is collected, and says so.
        self._connection = weakref.ref(connection)
        self._endpoint = connection._endpoint
        self.owner: Rsocket | None = None
        self.on_readable: Callable[[], object] | None = None
        self.on_writable: Callable[[], object] | None = None
        self.on_drained: Callable[[], object] | None = None
        self.is_cancelled: Callable[[], bool] | None = None
        self.at_once: int = 0
        self.receiving: bool = False
        self.sending: bool = False
        self.closed: bool = False
        self.lacks_send: bool = False
        self.failed: bool = False
        self.lost_data: bool = False
        self.at_eof: bool = False
        self.peer_disconnected: bool = False
        self.uses_words: bool = self._endpoint.hub.is_iwarp
        self._arrival = int(_RECEIVED_SEND if self.uses_words else _RECEIVED_WRITE)
        self._credits = options.max_recv_wr
        self.control_slots: int = CONTROL_SLOTS
        self.data_slots: int = options.max_send_wr - CONTROL_SLOTS
        self._slots_of_data = 2 if self.uses_words else 1
        ring_bytes, lent, ours = memory.ring_bytes, memory.lent, memory.ours
        self._ring_view = lent[:ring_bytes].view
        self._table_view = lent[ring_bytes:].view
        self._remote_ring = memory.ring
        self._next_entry = 1  # of our table, that the peer fills next
        self._sends = _SendRing(ours[:ring_bytes])
        grants = ring_bytes + WORD_BYTES * self._credits
        self._words = [ours[at : at + WORD_BYTES] for at in range(ring_bytes, grants, WORD_BYTES)]
        self._next_word = 0
        self._grants = [
            ours[at : at + GRANT_BYTES]
            for at in range(grants, grants + GRANT_BYTES * CONTROL_SLOTS, GRANT_BYTES)
        ]
        self._next_grant = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # bytes of the ring, slots
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._control: Control | None = None  # to be sent when a slot is free
        self._write_closed = False
        self._early: list[tuple[int, int]] = []  # arrived before `begin`
        self._is_begun = False  # the connection is established
        self._may_send = False

    # -- the beginning ----------------------------------------------------------------------------

    def post_receives(self) -> None:
        """Post all receives."""
        for word in self._words:
            self._post_receive(word)

    def start(
        self,
        permitted: int,
        table_address: int,
        table_rkey: int,
        table_entries: int,
        buffer_address: int,
        buffer_rkey: int,
        buffer_length: int,
        is_big_endian: bool,
        uses_words: bool,
        /,
    ) -> None:
        """Set what the peer's Hello says, and whether messages carry words."""
        table = RemoteMemory(table_address, table_entries * GRANT_BYTES, table_rkey)
        buffer = RemoteMemory(buffer_address, buffer_length, buffer_rkey)
        hello = Hello(permitted, table, buffer, is_big_endian)
        self._sender = Sender(hello)
        self._receiver = Receiver(self._remote_ring, self._credits, hello)
        if not uses_words:
            self.uses_words, self._slots_of_data = False, 1
            self._arrival = int(_RECEIVED_WRITE)

    def begin(self, may_send: bool, /) -> None:
        """Begin, after `start`: handle what has arrived, and send if this side may."""
        self._is_begun = True
        self._may_send = may_send
        early, self._early = self._early, []
        for word, written in early:
            if not self.failed:
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
        if self.data_slots < self._slots_of_data:
            return 0
        return min(self._sender.room, TRANSFER_BYTES)

    @property
    def can_write(self) -> bool:
        """Whether `write` and `write_registered` can post anything now."""
        return self.writable > 0 and self._sends.room() > 0

    @property
    def in_flight(self) -> int:
        """See the class."""
        return len(self._in_flight)

    @property
    def free_bytes(self) -> int:
        """See the class."""
        return self._sends.free

    @property
    def is_drained(self) -> bool:
        """Whether the device of the peer has everything that was written."""
        return not self._in_flight and self._control is None and self.control_slots == CONTROL_SLOTS

    @property
    def _is_over(self) -> bool:
        return self.failed or self._endpoint.cause is not None

    # -- a task's calls, all of them by the general path -------------------------------------------

    def receive(
        self,
        general: Callable[..., Coroutine[Any, Any, Result]],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        /,
    ) -> Coroutine[Any, Any, Result]:
        return general(*arguments, **keywords)

    receive_into = send = receive

    # -- reading ----------------------------------------------------------------------------------

    def read(self, limit: int, /) -> bytes:
        """Return bytes that have arrived, at most `limit`; b"" if there are none."""
        receiver = self._receiver
        if receiver is None:
            return b""
        data = b"".join(self._parts(receiver, limit))
        self._consume(receiver, len(data))
        return data

    def read_into(self, buffer: memoryview, /) -> int:
        """Copy bytes that have arrived into the buffer; returns their number."""
        done = 0
        receiver = self._receiver
        if receiver is None:
            return 0
        for part in self._parts(receiver, len(buffer)):
            buffer[done : done + len(part)] = part
            done += len(part)
        self._consume(receiver, done)
        return done

    def _parts(self, receiver: Receiver, limit: int) -> tuple[memoryview, memoryview]:
        """Return what can be read: up to the ring's end, and from its beginning on."""
        start, length = receiver.span(limit)
        rest = min(limit, receiver.readable) - length
        return self._ring_view[start : start + length], self._ring_view[:rest]

    def _consume(self, receiver: Receiver, length: int) -> None:
        receiver.consume(length)
        if length and receiver.is_update_due:
            self._send_update()

    # -- writing ----------------------------------------------------------------------------------

    def write(self, data: bytes | memoryview, /) -> int:
        """Copy and post as much as there is room for; returns the number of bytes. -1: a request
        could not be posted, and the stream has ended.

        Args:
            data: contiguous bytes.
        """
        done, total = 0, len(data)
        while done < total:
            length = min(self.writable, self._sends.room(), total - done)
            if not length:
                break
            part = data if length == total else data[done : done + length]
            if not self._post_data(self._sends.copy(part), length):
                return -1
            done += length
        return done

    def write_registered(self, memory: MemorySlice, /) -> int | None:
        """Post as much of registered memory as there is room for, as `write` does, without a copy.
        None: the memory cannot be used. It must stay as it is while there is data in flight."""
        if not memory.region._usable or memory.region.domain is not self._endpoint.memory.domain:
            return None
        done = 0
        while done < len(memory):
            length = min(self.writable, len(memory) - done)
            if not length:
                break
            if not self._post_data(memory[done : done + length], 0):
                return -1
            done += length
        return done

    def _post_data(self, memory: MemorySlice, ring_bytes: int) -> bool:
        assert self._sender is not None
        length = len(memory)
        self.data_slots -= self._slots_of_data
        self._in_flight.append((ring_bytes, self._slots_of_data))
        immediate = immediate_of(Operation.DATA, length)
        return self._post(memory, self._sender.take(length), immediate, self._data_sent)

    def _post(
        self,
        memory: MemorySlice | None,
        target: RemoteMemory,
        immediate: int,
        sent: Callable[[WorkRequest], None],
    ) -> bool:
        """Return whether the device has accepted it. If not, the stream has ended."""
        connection = self._connection()
        if connection is None:
            return False  # it was forgotten, and is being closed
        try:
            if not self.uses_words:
                source = b"" if memory is None else memory
                request = connection.post_write(source, target, immediate=immediate)
            elif memory is None:
                request = connection.post_send(_word_of(immediate))
            else:
                # In one call of the device: the data alone would wake the peer for nothing.
                with connection.chain(signal_last_only=True) as chain:
                    chain.post_write(memory, target).add_done_callback(WorkRequest.exception)
                    request = chain.post_send(_word_of(immediate))
        except RdmaError as error:
            self._fail(error)
            return False
        request.add_done_callback(sent)
        return True

    def _data_sent(self, request: WorkRequest) -> None:
        ring_bytes, slots = self._in_flight.popleft()
        self._sends.free += ring_bytes
        self.data_slots += slots
        if request.exception() is not None:
            self.lost_data = True
            return  # the connection has ended, or is about to: `_ended` is called
        self._call_if_drained()
        if self.on_writable is not None:
            self.on_writable()

    def _control_sent(self, request: WorkRequest) -> None:
        self._control_done(request, 1)

    def _grant_sent(self, request: WorkRequest) -> None:
        self._control_done(request, self._slots_of_data)

    def _control_done(self, request: WorkRequest, slots: int) -> None:
        self.control_slots += slots
        if request.exception() is not None:
            return  # as above
        self._send_pending()
        self._call_if_drained()

    # -- control messages -------------------------------------------------------------------------

    def _send_pending(self) -> None:
        """Post what has waited for one of the control slots, or for the beginning."""
        if not self._may_send or self._is_over:
            return
        if self._receiver is not None and self._receiver.is_update_due:
            self._send_update()
        if self._control is not None and self.control_slots:
            control, self._control = self._control, None
            self.control_slots -= 1
            immediate = immediate_of(Operation.CONTROL, control)
            self._post(None, _NOWHERE, immediate, self._control_sent)

    def _send_update(self) -> None:
        assert self._receiver is not None
        needed = self._slots_of_data
        if not self._may_send or self.peer_disconnected or self._is_over:
            return
        if self.control_slots < needed:
            return
        self._post_update(self._receiver.update(), needed)

    def _post_update(self, update: Update, needed: int) -> None:
        if not update.grant:
            self.control_slots -= 1
            self._post(None, _NOWHERE, update.immediate, self._control_sent)
            return
        self.control_slots -= needed
        memory = self._grants[self._next_grant]
        self._next_grant = (self._next_grant + 1) % len(self._grants)
        memory.view[:] = update.grant
        self._post(memory, update.target, update.immediate, self._grant_sent)

    def close_write(self, both: bool, /) -> None:
        """Send the end of the data, or, with `both`, of both directions."""
        if self._write_closed and not both:
            return
        self._write_closed = True
        if not self.peer_disconnected and not self._is_over and self._sender is not None:
            self._control = Control.DISCONNECT if both or self.at_eof else Control.SHUTDOWN
            self._send_pending()

    def _call_if_drained(self) -> None:
        if self.on_drained is not None and self.is_drained:
            self.on_drained()

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
        if self.failed:
            return
        if completion.opcode != self._arrival or (self.uses_words and written != WORD_BYTES):
            self.failed = True
            if self.owner is not None:
                self.owner.wrong_arrival(completion)
            return
        if self.uses_words:
            value, written = int.from_bytes(bytes(word), sys.byteorder), -1
        with suppress(RdmaError):  # the connection has ended: `_ended` is called
            self._post_receive(word)
        if self._is_begun:
            self._handle(value, written)
            return
        # On RoCE and InfiniBand a message can arrive before the handshake's last step.
        self._early.append((value, written))
        if len(self._early) > 2 * self._credits:
            self._violated(
                f"the peer sent {len(self._early)} messages before the connection was "
                f"established, where it has {self._credits} credits"
            )

    def _handle(self, immediate: int, written: int) -> None:
        is_first, self._may_send = not self._may_send, True
        try:
            operation, value = operation_of(immediate)
            if operation is Operation.DATA:
                self._take_data(value, written)
            else:
                self._take_control(operation, value)
                return
        except StreamProtocolError as error:
            self._violated(str(error))
        if is_first and not self.failed:  # what has waited for an arrival goes out
            self._send_pending()
            if self.on_writable is not None:
                self.on_writable()

    def _take_data(self, value: int, written: int) -> None:
        if self.at_eof:
            raise StreamProtocolError("the peer sent data after the end of its data")
        if written not in (value, -1):
            raise StreamProtocolError(f"the peer says that it wrote {value} bytes: {written}")
        receiver = self._receiver
        assert receiver is not None
        receiver.add(value)
        if receiver.is_update_due:
            self._send_update()  # the first time, this grants the second half of the ring
        if self.on_readable is not None:
            self.on_readable()

    def _take_control(self, operation: Operation, value: int) -> None:
        sender = self._sender
        assert sender is not None
        if operation is Operation.GRANT:
            self._take_grant(sender)
            sender.set_limit(value)
        elif operation is Operation.IOMAP:
            raise StreamProtocolError("the peer maps memory (riomap), which was not offered to it")
        elif value == Control.DISCONNECT:
            self.at_eof = self.peer_disconnected = True
        elif value == Control.SHUTDOWN:
            self.at_eof = True
            self.peer_disconnected |= self._write_closed
        elif value != Control.KEEPALIVE:
            raise StreamProtocolError(f"the peer sent control message {value}, which is reserved")
        self._send_pending()
        self._call_both()

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

    def _violated(self, text: str) -> None:
        self.failed = True
        if self.owner is not None:
            self.owner.violated(text)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        if self.owner is not None:
            self.owner.fail(error)

    def wake(self) -> None:
        """Wake the tasks that wait."""
        self._call_both()

    def end(self) -> None:
        """Call all callbacks: the stream has ended."""
        if self.on_drained is not None:
            self.on_drained()
        self._call_both()

    def _call_both(self) -> None:
        for call in (self.on_readable, self.on_writable):
            if call is not None:
                call()


def _word_of(immediate: int) -> bytes:
    return immediate.to_bytes(WORD_BYTES, sys.byteorder)
