"""The data path of a stream, over a device that exists in the test only: which task it wakes, its
grants for a peer of another byte order, and the result of sending registered memory."""

import asyncio
import struct
import sys
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from aiordma import DisconnectedError, RemoteMemory
from aiordma.streams import Stream
from aiordma.streams.path import WORD_BYTES
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from aiordma.streams.rsocket import Rsocket
from aiordma.verbs import WorkCompletionOpcode
from aiordma.verbs.memory import MemorySlice
from tests.fuzz.engine_world import EngineWorld
from tests.fuzz.model_protocol import Control, Operation
from tests.fuzz.rsocket_driver import DEPTH, RING, TABLE_ADDRESS, TABLE_KEY, World
from tests.internals import current_event_loop

TABLE = RemoteMemory(TABLE_ADDRESS, TABLE_ENTRIES * GRANT_BYTES, TABLE_KEY)
BUFFER = RemoteMemory(0x100000, 1 << 16, 5)


def rsocket_in(world: World, *, is_big_endian: bool = sys.byteorder == "big") -> Rsocket:
    """Return an rsocket that knows its peer, and has not begun."""
    rsocket = world.rsocket()
    rsocket.start(Hello(DEPTH, TABLE, BUFFER, is_big_endian).pack())
    world.permitted = DEPTH
    world.lent.append(BUFFER)
    return rsocket


def arrives(world: World, operation: Operation, value: int) -> None:
    """A message of the peer arrives."""
    request, word = world.receives.popleft()
    immediate, opcode = operation << 29 | value, WorkCompletionOpcode.RECV_RDMA_WITH_IMM
    length = value if operation is Operation.DATA else 0
    if world.uses_words:
        word.view[:] = immediate.to_bytes(WORD_BYTES, sys.byteorder)
        immediate, length, opcode = 0, WORD_BYTES, WorkCompletionOpcode.RECV
    request.complete(
        SimpleNamespace(immediate=immediate, byte_len=length, opcode=int(opcode), operation=opcode)
    )


# -- the accepting side on iWARP, which sends nothing before something has arrived ----------------


def test_data_wakes_a_writer_that_waits_for_the_first_arrival() -> None:
    world = EngineWorld(uses_words=True)
    with world.running():
        rsocket = rsocket_in(world)
        rsocket.begin(is_first=False)
        woken: list[str] = []
        rsocket.path.on_writable = lambda: woken.append("writer")
        rsocket.path.on_readable = lambda: woken.append("reader")
        assert not rsocket.path.can_write
        arrives(world, Operation.DATA, 3)
        assert rsocket.path.can_write
        assert sorted(woken) == ["reader", "writer"]
        woken.clear()
        arrives(world, Operation.DATA, 2)
        assert woken == ["reader"]
        assert not world.faults


@pytest.mark.parametrize("operation", [Operation.DATA, Operation.CONTROL])
def test_the_first_arrival_sends_an_end_that_waited_for_it(operation: Operation) -> None:
    world = EngineWorld(uses_words=True)
    with world.running():
        rsocket = rsocket_in(world)
        rsocket.begin(is_first=False)
        rsocket.path.close_write(False)
        end = (Operation.CONTROL << 29 | Control.SHUTDOWN).to_bytes(WORD_BYTES, sys.byteorder)
        assert end not in world.done
        arrives(world, operation, 1)
        assert end in world.done
        assert not world.faults


# -- grants for a peer of the other byte order ----------------------------------------------------


@pytest.mark.parametrize("is_big_endian", [False, True])
def test_grants_are_in_the_byte_order_of_the_peer(is_big_endian: bool) -> None:
    world = EngineWorld(uses_words=False)
    with world.running():
        rsocket = rsocket_in(world, is_big_endian=is_big_endian)
        rsocket.begin(is_first=True)
        ring = world.registered[0].remote()[:RING]
        for half in (RING // 2, 0, RING // 2):
            (written,) = world.done
            assert isinstance(written, tuple)
            data, target, _immediate = written
            address, rkey, length = struct.unpack(f"{'>' if is_big_endian else '<'}QII", data)
            assert (address, rkey, length) == (ring.address + half, ring.rkey, RING // 2)
            assert target.rkey == TABLE_KEY
            world.sends.popleft().complete()
            world.done.clear()
            arrives(world, Operation.DATA, RING // 2)
            assert len(rsocket.path.read(RING)) == RING // 2
        assert not world.faults


# -- memory that is written from where it is ------------------------------------------------------


async def send(then: Callable[[World], None]) -> None:
    """Send registered memory, and call `then` when all of it is posted."""
    world = EngineWorld(uses_words=False, loop=current_event_loop())
    with world.running():
        connection: Any = world
        rsocket = rsocket_in(world)
        rsocket.begin(is_first=True)
        world.sends.popleft().complete()  # the grant
        region: Any = world.register(bytearray(100))
        memory = MemorySlice(region, 0, 100)
        call: Coroutine[Any, Any, None] = Stream(connection, rsocket)._send_registered(memory)
        sending = asyncio.create_task(call)
        await asyncio.sleep(0)
        assert len(world.sends) == 1
        assert not sending.done()
        then(world)
        async with asyncio.timeout(10):
            await sending
        assert not world.faults


def succeed(world: World) -> None:
    while world.sends:
        world.sends.popleft().complete()


def flush(world: World) -> None:
    world.end(DisconnectedError("the peer has gone"))
    while world.sends:
        world.sends.popleft().complete(error=DisconnectedError("flushed"))
    for call in world.ends:  # once every request has completed
        call()


def test_memory_that_was_written_was_sent_though_the_peer_has_closed() -> None:
    def close_then_acknowledge(world: World) -> None:
        arrives(world, Operation.CONTROL, Control.DISCONNECT)
        asyncio.get_running_loop().call_later(0.01, succeed, world)

    asyncio.run(send(close_then_acknowledge))


def test_memory_that_was_written_was_sent_though_the_connection_has_ended() -> None:
    def acknowledge_then_end(world: World) -> None:
        succeed(world)
        flush(world)

    asyncio.run(send(acknowledge_then_end))


def test_memory_that_was_not_written_is_an_error() -> None:
    with pytest.raises(DisconnectedError, match="the peer has gone"):
        asyncio.run(send(flush))
