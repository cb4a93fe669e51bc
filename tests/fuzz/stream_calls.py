"""Drives the calls of a `Stream` as tasks, over the worlds of `rsocket_driver`: the engine's calls
(`_native/engine/transfer.c`) over the engine's data path, and the general path's over the model's.

Beside what an rsocket must do, whatever the order of steps,

- each byte that arrives is received once, in order, also if a call was cancelled;
- what the device was given is a prefix of what was sent, in order;
- each call ends once the stream has ended.

If the loop may finish its work after each step, both do the same. If not, they may differ in which
call gets the bytes, and only the above is checked.
"""

import asyncio
import struct
from collections.abc import Awaitable, Coroutine
from typing import Any

from anyio import BusyResourceError, EndOfStream

from aiordma import RdmaError
from aiordma.streams.protocol import GRANT_BYTES
from aiordma.streams.rsocket import Rsocket
from aiordma.streams.stream import Stream
from tests.fuzz.engine_world import EngineWorld
from tests.fuzz.model_protocol import Control, Operation
from tests.fuzz.rsocket_driver import RING, Bytes, Play, World, compare, start
from tests.internals import EventLoop, current_event_loop

__all__ = ("run_calls",)

TURNS = 8
"""Rounds of the loop after which nothing moves without a further step."""
ENDS = (RdmaError, EndOfStream, BusyResourceError, TypeError, ValueError, asyncio.CancelledError)
NOT_TO_SEND: tuple[Any, ...] = (b"", "no buffer", None, memoryview(bytes(8))[::2])
NOT_TO_FILL: tuple[Any, ...] = (bytearray(), b"read-only", None, memoryview(bytearray(8))[::2])


class CallsPlay(Play):
    """What a peer, the device, and a program that calls a stream's methods do."""

    loop: asyncio.AbstractEventLoop
    settles: bool

    def __init__(self, world: World, rsocket: Rsocket, given: Bytes, announced: int) -> None:
        super().__init__(world, rsocket, given, announced)
        connection: Any = world
        self._stream = Stream(connection, rsocket)
        self._tasks: list[asyncio.Task[None]] = []
        self._steps = (
            *(self._data, self._data, self._data, self._permit, self._permit, self._grant),
            *(self._complete, self._complete, self._complete, self._complete),
            *(self._receive, self._receive, self._receive_into, self._send, self._send),
            *(self._wrong, self._cancel, self._cancel, self._end, self._disconnect),
        )

    def _step(self, chosen: int) -> None:
        self.loop.run_until_complete(self._turn(chosen))
        self._check()

    async def _turn(self, chosen: int) -> None:
        if isinstance(self._world, EngineWorld):
            self._world.drain.settle()  # each step is another run of the loop
        self._steps[chosen % len(self._steps)]()
        if self.settles or chosen & 0x80:
            await _settle()

    def _check(self) -> None:
        if self.settles:
            super()._check()
        elif self._world.faults:
            raise self._world.faults[0]
        payload = self._world.payload
        assert payload == bytes(number & 0xFF for number in range(len(payload)))

    def _finish(self) -> None:
        super()._finish()
        self.loop.run_until_complete(_settle())
        assert all(task.done() for task in self._tasks), self._tasks
        for task in self._tasks:
            task.result()

    # -- a correct peer, most of the time ---------------------------------------------------------

    def _data(self) -> None:
        offered = self._world.offered
        if offered and self._world.failure is None:
            length = 1 + self._given.number() % offered[0]
            offered[0] -= length
            if not offered[0]:
                offered.popleft()
            self._message(length)

    def _permit(self) -> None:
        """Permit as many messages as a peer may, and lend memory for them."""
        start = RING + self._next_entry * GRANT_BYTES
        if len(self._world.lent) < 2 and self._world.failure is None:
            number = self._next_entry
            grant = struct.pack("=QII", 0x100000 + 0x1000 * number, 9, 1 + self._given.number())
            self._world.registered[0].view[start : start + GRANT_BYTES] = grant
            self._message(Operation.GRANT << 29 | (self._world.sent + self._announced & 0xFFFF))

    # -- the program ------------------------------------------------------------------------------

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self.loop.create_task(coroutine))

    async def _outcome(self, name: str, call: Awaitable[Any]) -> Any:
        """Await a call, and note how it ends; None: by an error."""
        result = error = None
        try:
            result = await call
        except ENDS as raised:
            error = raised
        if self.settles:
            text = "" if isinstance(error, asyncio.CancelledError) else str(error)
            self._world.done.append((name, result, type(error).__name__, text))
        return result

    def _receive(self) -> None:
        self._call(self._received(self._given.number() % (RING + 1) + 1))

    async def _received(self, limit: int) -> None:
        data = await self._outcome("receive", self._stream.receive(limit))
        if data is not None:
            assert 0 < len(data) <= limit
            self._take(data)

    def _receive_into(self) -> None:
        self._call(self._received_into(bytearray(self._given.number() % (RING + 1) + 1)))

    async def _received_into(self, buffer: bytearray) -> None:
        length = await self._outcome("receive_into", self._stream.receive_into(buffer))
        if length is not None:
            assert length > 0
            self._take(buffer[:length])

    def _take(self, data: bytes | bytearray) -> None:
        first = self._read_so_far
        assert data == bytes(number & 0xFF for number in range(first, first + len(data)))
        self._read_so_far += len(data)

    def _send(self) -> None:
        self._call(self._sent(self._given.number()))

    async def _sent(self, length: int) -> None:
        first = len(self._world.payload)  # nothing else is posted: other calls are refused
        data = bytes(number & 0xFF for number in range(first, first + length))
        await self._outcome("send", self._stream.send(data))

    def _wrong(self) -> None:
        call: Coroutine[Any, Any, Any]
        chosen = self._given.number()
        if chosen & 0x80:
            call = self._stream.receive_into(NOT_TO_FILL[chosen % 4])
        else:
            call = self._stream.send(NOT_TO_SEND[chosen % 4])
        self._call(self._refused(call))

    async def _refused(self, call: Awaitable[Any]) -> None:
        await self._outcome("wrong", call)

    def _cancel(self) -> None:
        waiting = [task for task in self._tasks if not task.done()]
        if waiting:
            waiting[self._given.number() % len(waiting)].cancel()

    def _end(self) -> None:
        """Seldom: end the data, of either side, or begin `aclose`, whose other steps are the
        connection's."""
        chosen = self._given.number()
        if chosen >= 0xF8:
            self._close_write()
        elif chosen >= 0xF0:
            self._message(Operation.CONTROL << 29 | Control.SHUTDOWN)
        elif chosen >= 0xEC:
            self._path.closed = True
            self._path.wake()


async def _settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def _event_loop() -> EventLoop:
    return current_event_loop()


def _run(data: bytes, kind: type[World], loop: asyncio.AbstractEventLoop) -> list[object]:
    given = Bytes(data)
    first = given.number()
    world = kind(bool(first & 1), loop=loop.run_until_complete(_event_loop()))
    settles = bool(first & 16)
    play = type("CallsPlay", (CallsPlay,), {"loop": loop, "settles": settles})
    with world.running():
        start(world, given, first, play)
    return world.done if settles else []


def run_calls(data: bytes) -> None:
    """Play one input in both worlds.

    Raises:
        AssertionError: a byte was lost, doubled or misplaced, a call did not end, or the engine and
            the model differ. Any other exception is a bug, too.
    """
    loop = asyncio.new_event_loop()
    try:
        compare(_run(data, EngineWorld, loop), _run(data, World, loop))
    finally:
        loop.close()
