"""Drives an `Rsocket` over a connection that exists in this module only. The bytes of an input are
what a peer, a device and a program do; whatever they are, the rsocket must

- write only to memory that the peer has lent, and never beyond its credits;
- read only what has arrived, from its own ring;
- keep its number of requests within the queues' depths;
- end with a StreamProtocolError, and no other exception, for what no correct peer sends.

The data path is the model's (`World`, with `model_path`) or the engine's
(`engine_world.EngineWorld`). `run_both` plays an input with both, which have to do the same.
"""

import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from aiordma import DisconnectedError, RemoteMemory, WorkRequest
from aiordma.streams import StreamProtocolError
from aiordma.streams.path import CONTROL_SLOTS, TRANSFER_BYTES, WORD_BYTES
from aiordma.streams.path import Memory as StreamMemory
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from aiordma.streams.rsocket import CLOSE_TIMEOUT, Rsocket
from aiordma.verbs import AtomicCapability, WorkCompletionOpcode
from tests.fuzz.model_path import ModelPath
from tests.fuzz.model_protocol import Operation, operation_of
from tests.internals import EventLoop

__all__ = ("Bytes", "Play", "World", "compare", "run", "run_both", "start")

DEPTH = 16
RING = 64
TABLE = TABLE_ENTRIES * GRANT_BYTES
MOST_STEPS = 400
TRANSFER = TRANSFER_BYTES


class Request:
    """Stands for a work request."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], object]] = []
        self._error: Exception | None = None
        self._completion: Any = None

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._callbacks.append(callback)

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        return self._completion

    def complete(self, completion: Any = None, error: Exception | None = None) -> None:
        self._completion, self._error = completion, error
        for callback in self._callbacks:
            # A streams' chain looks at the error of its first request by this, and does no more.
            if callback is not WorkRequest.exception:
                callback(self)


class Memory:
    """Stands for a region of registered memory, and for its slices."""

    next_address = 0x10000

    def __init__(self, buffer: bytearray, start: int, stop: int, address: int) -> None:
        self._buffer, self._start, self._stop, self._address = buffer, start, stop, address
        self.view = memoryview(buffer)[start:stop]

    @classmethod
    def register(cls, buffer: bytearray) -> "Memory":
        address = cls.next_address
        cls.next_address += len(buffer) + 0x1000
        return cls(buffer, 0, len(buffer), address)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, where: slice) -> "Memory":
        start, stop, _ = where.indices(len(self))
        begin = self._start + start
        return Memory(self._buffer, begin, begin + max(stop - start, 0), self._address)

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def remote(self) -> RemoteMemory:
        return RemoteMemory(self._address + self._start, len(self), 7)

    @property
    def rkey(self) -> int:
        return 7

    @property
    def region(self) -> "Memory":
        return self

    _usable = True
    domain = None


class World:
    """The connection, the device below it, and the peer.

    Args:
        uses_words: as on iWARP without immediate data.
        max_recv_wr, max_send_wr: of the queue pair.
        loop: of aiordma, for a `Stream` on top.
    """

    def __init__(
        self,
        uses_words: bool,
        max_recv_wr: int = DEPTH,
        max_send_wr: int = DEPTH + CONTROL_SLOTS,
        loop: EventLoop | None = None,
    ) -> None:
        Memory.next_address = 0x10000
        self.uses_words = uses_words
        self.options = SimpleNamespace(max_recv_wr=max_recv_wr, max_send_wr=max_send_wr)
        self.ends: list[Callable[[], object]] = []
        self._endpoint = SimpleNamespace(
            name="the connection to a peer",
            hub=SimpleNamespace(
                is_iwarp=uses_words, attributes=SimpleNamespace(atomic_cap=AtomicCapability.NONE)
            ),
            teardown=SimpleNamespace(on_ended=self.ends, on_closed=[], has_ended=False),
            cause=None,
            domain=None,
            loop=loop,
            fail=self._fail,
            require_own_loop=lambda: None,
        )
        self.sends: deque[Any] = deque()
        self.receives: deque[tuple[Any, Memory]] = deque()
        self.registered: list[Memory] = []
        self.lent: deque[RemoteMemory] = deque()
        self.sent = 0  # messages with data
        self.permitted = 0  # more of them
        self.payload = bytearray()  # of these messages
        self.offered = deque((RING // 2,))  # lengths of memory that the peer may write to
        self.failure: Exception | None = None
        self.faults: list[BaseException] = []
        self.done: list[object] = []
        """What the rsocket did, for a comparison."""

    def __repr__(self) -> str:
        """Return the same name for both: errors have it, and are compared."""
        return "<World>"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter while the world is used."""
        yield

    def rsocket(self, ring_bytes: int = RING) -> Rsocket:
        """Return an rsocket over this connection."""
        connection: Any = self
        memory = StreamMemory(connection, ring_bytes)
        return Rsocket(connection, memory, self.path(memory), CLOSE_TIMEOUT)

    def path(self, memory: StreamMemory) -> Any:
        """Return its data path."""
        connection: Any = self
        return ModelPath(connection, memory)

    # -- what Rsocket calls -----------------------------------------------------------------------

    def register(self, buffer: bytearray, _access: object = None) -> Memory:
        memory = Memory.register(buffer)
        self.registered.append(memory)
        return memory

    def post_recv(self, memory: Memory) -> Any:
        assert len(self.receives) < self.options.max_recv_wr
        self.receives.append((Request(), memory))
        return self.receives[-1][0]

    def post_write(
        self, source: Memory | bytes, target: RemoteMemory, *, immediate: int | None = None
    ) -> Any:
        self._accept_write(bytes(source), target, immediate)
        return self._enqueue(Request())

    def post_send(self, word: bytes) -> Any:
        self._accept_word(word)
        return self._enqueue(Request())

    def chain(self, *, signal_last_only: bool) -> "World":
        assert signal_last_only
        return self

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def _accept_write(self, data: bytes, target: RemoteMemory, immediate: int | None) -> None:
        self.done.append((data, target, immediate))
        if target.length:
            assert len(data) == target.length
            self._check(target)
            if target.rkey == TABLE_KEY:
                self.offered.append(int.from_bytes(data[12:], sys.byteorder))
            else:
                self.payload += data
        elif immediate is not None:
            assert operation_of(immediate)[0] is not Operation.DATA

    def _accept_word(self, word: bytes) -> None:
        self.done.append(word)
        assert self.uses_words
        assert len(word) == WORD_BYTES

    def _enqueue(self, request: Any) -> Any:
        assert self.failure is None, "posted after the end"
        assert len(self.sends) < self.options.max_send_wr
        self.sends.append(request)
        return request

    def _check(self, target: RemoteMemory) -> None:
        if target.rkey == TABLE_KEY:
            assert target.length == GRANT_BYTES
            assert (target.address - TABLE_ADDRESS) % GRANT_BYTES == 0
            assert 0 <= target.address - TABLE_ADDRESS < TABLE
            return
        assert self.permitted > 0
        self.permitted -= 1
        self.sent += 1
        first = self.lent[0]
        assert target.rkey == first.rkey
        assert target.address == first.address
        assert target.length <= first.length
        self.lent[0] = first[target.length :]
        if not self.lent[0].length:
            self.lent.popleft()

    def _fail(self, error: Exception) -> None:
        assert isinstance(error, StreamProtocolError), error
        self.end(error)

    def end(self, error: Exception) -> None:
        if self.failure is None:
            self.done.append(str(error))
            self.failure = error
            self._endpoint.cause = error
            self._endpoint.teardown.has_ended = True
            for call in self.ends:
                call()


TABLE_KEY = 3
TABLE_ADDRESS = 0x1000
_HELLO = Hello(
    DEPTH, RemoteMemory(TABLE_ADDRESS, TABLE, TABLE_KEY), RemoteMemory(0x5000, RING // 2, 5)
)


class Bytes:
    """Numbers that are taken from an input."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken.ljust(length, b"\0")

    def number(self, length: int = 1) -> int:
        return int.from_bytes(self.take(length), "little")


def run(data: bytes, kind: type[World] = World) -> list[object]:
    """Play one input, and return what the rsocket did.

    Raises:
        AssertionError: the rsocket did what it must not do; any other exception is a bug, too.
    """
    given = Bytes(data)
    first = given.number()
    world = kind(uses_words=bool(first & 1))
    with world.running():
        start(world, given, first, Play)
    return world.done


def start(world: World, given: "Bytes", first: int, play: "type[Play]") -> None:
    """Play what is given in a world."""
    rsocket = world.rsocket()
    hello = _HELLO
    if first & 2:
        try:
            hello = Hello.unpack(given.take(44))
        except StreamProtocolError:
            return
        # Where its memory lies is the peer's affair; the checks here are for one place.
        buffer = _HELLO.buffer[: hello.buffer.length % RING]
        hello = Hello(hello.credits, _HELLO.table, buffer, hello.is_big_endian)
    rsocket.start(hello.pack())
    world.permitted = hello.credits
    if hello.buffer.length:
        world.lent.append(hello.buffer)
    play(world, rsocket, given, hello.credits).play(early=first >> 2 & 3)


def run_both(data: bytes) -> None:
    """Play one input in both worlds: the engine does what the model does.

    Raises:
        AssertionError: as `run`; or they differ.
    """
    from tests.fuzz.engine_world import EngineWorld

    compare(run(data, EngineWorld), run(data))


def compare(done: list[object], expected: list[object]) -> None:
    """Compare what the engine and the model did."""
    for number, (ours, theirs) in enumerate(zip(done, expected, strict=False)):
        assert ours == theirs, f"step {number}: the engine {ours}, the model {theirs}"
    assert len(done) == len(expected)


class Play:
    """What a peer, the device and the program do, and what each means to a correct rsocket."""

    def __init__(self, world: World, rsocket: Rsocket, given: Bytes, announced: int) -> None:
        self._world, self._rsocket, self._given = world, rsocket, given
        self._path = rsocket.path
        self._announced = announced
        self._next_entry = 1
        self._written = self._read_so_far = 0  # bytes of data
        self._steps: tuple[Callable[[], None], ...] = (
            *(self._any_message, self._data, self._data, self._grant, self._grant),
            *(self._write_table, self._complete, self._complete, self._complete),
            *(self._read, self._read, self._write, self._write, self._close_write),
            self._disconnect,
        )

    def play(self, early: int) -> None:
        for _ in range(early):
            self._data()
        self._rsocket.begin(is_first=bool(early & 1))
        for _ in range(MOST_STEPS):
            if self._given.is_empty:
                break
            self._step(self._given.number())
        self._finish()

    def _step(self, chosen: int) -> None:
        self._steps[chosen % len(self._steps)]()
        self._check()

    def _finish(self) -> None:
        # The end flushes everything, as a device does.
        self._world.end(DisconnectedError("the end"))
        flushed = DisconnectedError("flushed")
        for request in (*self._world.sends, *(each for each, _ in self._world.receives)):
            request.complete(error=flushed)

    def _check(self) -> None:
        path = self._path
        if self._world.faults:
            raise self._world.faults[0]
        assert 0 <= path.free_bytes <= RING
        assert 0 <= path.control_slots <= CONTROL_SLOTS
        assert 0 <= path.data_slots <= DEPTH
        self._world.done.append(
            (path.free_bytes, path.control_slots, path.data_slots, path.writable, path.readable)
        )
        self._world.done.append((path.can_write, path.is_drained, path.in_flight, path.at_eof))
        if self._world.failure is None:
            assert path.readable == self._written - self._read_so_far <= RING
            assert len(self._world.receives) == DEPTH

    # -- the peer ---------------------------------------------------------------------------------

    def _any_message(self) -> None:
        self._message(self._given.number(4))

    def _data(self) -> None:
        self._message(1 + self._given.number() % (RING // 2 + 1))

    def _grant(self) -> None:
        """As a correct peer does, if the numbers are right."""
        chosen = self._given.number()
        if chosen & 1:
            address, length = 0x100000 + 0x1000 * chosen, 1 + self._given.number() % RING
            start = RING + self._next_entry * GRANT_BYTES
            lent = self._world.registered[0].view
            lent[start : start + GRANT_BYTES] = struct.pack("=QII", address, 9, length)
        ahead = self._given.number(2) if chosen & 2 else self._announced
        self._message(Operation.GRANT << 29 | (self._world.sent + ahead & 0xFFFF))

    def _message(self, value: int) -> None:
        world = self._world
        if world.failure is not None:
            return
        wrong = self._given.number()
        request, word = world.receives.popleft()
        length = value & 0x1FFFFFFF
        opcode = WorkCompletionOpcode.RECV_RDMA_WITH_IMM
        if world.uses_words:
            word.view[:] = value.to_bytes(WORD_BYTES, sys.byteorder)
            length, opcode = WORD_BYTES, WorkCompletionOpcode.RECV
        if wrong == 0xFF:
            length = self._given.number()
        elif wrong == 0xFE:
            opcode = WorkCompletionOpcode(int(opcode) ^ 1)
        grant = self._before(value)
        immediate = 0 if world.uses_words else value
        request.complete(
            SimpleNamespace(
                immediate=immediate, byte_len=length, opcode=int(opcode), operation=opcode
            )
        )
        if world.failure is None:
            assert wrong != 0xFE
            self._after(value, grant)

    def _before(self, value: int) -> RemoteMemory | None:
        """Put data into the ring, or return the grant that the value announces."""
        lent = self._world.registered[0].view
        if value >> 29 == Operation.DATA and self._written - self._read_so_far + value <= RING:
            for number in range(self._written, self._written + value):
                lent[number % RING] = number & 0xFF
        start = RING + self._next_entry * GRANT_BYTES
        address, rkey, length = struct.unpack("=QII", lent[start : start + GRANT_BYTES])
        if value >> 29 != Operation.GRANT or not length or address + length >= 1 << 64:
            return None
        return RemoteMemory(address, length, rkey)

    def _after(self, value: int, grant: RemoteMemory | None) -> None:
        """Count what the rsocket has accepted."""
        world = self._world
        if value >> 29 == Operation.DATA:
            self._written += value
        elif value >> 29 == Operation.GRANT:
            if grant is not None:
                world.lent.append(grant)
                assert len(world.lent) <= TABLE_ENTRIES
                self._next_entry = (self._next_entry + 1) % TABLE_ENTRIES
            ahead = (value - world.sent) & 0xFFFF
            assert world.permitted <= ahead <= self._announced
            world.permitted = ahead

    def _write_table(self) -> None:
        at = self._given.number() % TABLE
        data = self._given.take(1 + self._given.number() % GRANT_BYTES)[: TABLE - at]
        self._world.registered[0].view[RING + at : RING + at + len(data)] = data

    # -- the device -------------------------------------------------------------------------------

    def _complete(self) -> None:
        if not self._world.sends:
            return
        request = self._world.sends.popleft()
        error = DisconnectedError("failed") if self._given.number() == 0xFF else None
        if error is not None:
            self._world.end(error)
        request.complete(error=error)

    def _disconnect(self) -> None:
        if self._given.number() == 0xFF:
            self._world.end(DisconnectedError("the peer has left"))

    # -- the program ------------------------------------------------------------------------------

    def _read(self) -> None:
        before = self._path.readable
        limit = 1 + self._given.number()
        if limit & 1:
            data = self._path.read(limit)
        else:
            buffer = bytearray(limit)
            length = self._path.read_into(memoryview(buffer))
            data = bytes(buffer[:length])
        self._world.done.append(data)
        assert len(data) == min(limit, before)
        first = self._read_so_far
        assert data == bytes(number & 0xFF for number in range(first, first + len(data)))
        self._read_so_far += len(data)

    def _write(self) -> None:
        if self._world.failure is None:
            length = self._given.number()
            done = self._rsocket.write(memoryview(bytes(each & 0xFF for each in range(length))))
            assert 0 <= done <= length

    def _close_write(self) -> None:
        self._path.close_write(bool(self._given.number() & 1))
