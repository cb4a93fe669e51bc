"""Hostile peers of a stream's listener: each is disconnected with an error that names its fault, or
is held back, and other peers of the same listener are served."""

import asyncio
import gc
import os
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import DisconnectedError, RdmaError, RemoteMemory, WorkRequest
from aiordma.streams import (
    Stream,
    StreamProtocolError,
    connect_stream,
    create_server,
    listen_stream,
)
from aiordma.streams.protocol import GRANT_BYTES, Hello
from aiordma.streams.rsocket import CLOSE_TIMEOUT
from aiordma.streams.settings import StreamSettings
from tests.device.players import Outcome, one_loop, until
from tests.device.silent_peer import silent_peer
from tests.device.stream_attacker import (
    CREDITS,
    FEED,
    IGNORE,
    PATIENCE,
    RING,
    Attacker,
    Victim,
    serving,
)
from tests.devices import ADDRESS, BUILT_IN, DeviceUnderTest
from tests.fuzz.model_protocol import Control, Operation, immediate_of
from tests.internals import SOFTWARE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Attack = Callable[[Attacker], object]


def beyond_the_credits(attacker: Attacker) -> None:
    attacker.data(IGNORE)
    for number in range(1, CREDITS + 2):
        attacker.data(b"x", number)


def data_after_the_end(attacker: Attacker) -> None:
    attacker.data(IGNORE)
    attacker.say(Operation.CONTROL, Control.SHUTDOWN)
    attacker.data(b"x")


def third_grant(attacker: Attacker) -> None:
    half = attacker.memory.remote()[: RING // 2]
    entry = struct.pack("=QII", half.address, half.rkey, half.length)
    attacker.grant(entry, 1)
    attacker.grant(entry, 0)


def grant_beyond_all_memory(attacker: Attacker) -> None:
    attacker.grant(struct.pack("=QII", 2**64 - 10, 1, 100), 1)


VIOLATIONS: dict[str, tuple[Attack, str]] = {
    "reserved operation": (lambda peer: peer.say(3, 7), "rsockets reserves operation 3"),
    "reserved control": (
        lambda peer: peer.say(Operation.CONTROL, 3),
        "control message 3, which is reserved",
    ),
    "iomap": (lambda peer: peer.say(Operation.IOMAP, 0), "riomap"),
    "no data": (lambda peer: peer.say(Operation.DATA, 0), r"wrote 0 bytes, and could write 1\.\."),
    "more than granted": (
        lambda peer: peer.data(bytes(RING // 2), length=RING // 2 + 1),
        "the peer says that it wrote 65537 bytes",
    ),
    "largest value": (
        lambda peer: peer.say(Operation.DATA, 2**29 - 1),
        "the peer says that it wrote 536870911 bytes",
    ),
    "beyond the credits": (beyond_the_credits, f"beyond its {CREDITS} credits"),
    "credits taken back": (
        lambda peer: peer.say(Operation.GRANT, CREDITS - 1),
        f"up to number {CREDITS - 1}, where 0 were sent",
    ),
    "too many credits": (
        lambda peer: peer.say(Operation.GRANT, CREDITS + 1),
        f"up to number {CREDITS + 1}, where 0 were sent",
    ),
    "credits of the past": (
        lambda peer: peer.say(Operation.GRANT, 0xFFFF),
        "up to number 65535, where 0 were sent",
    ),
    "third grant": (third_grant, "granted memory a third time"),
    "grant beyond all memory": (grant_beyond_all_memory, r"ends beyond 2\*\*64"),
    "data after the end": (data_after_the_end, "data after the end of its data"),
}


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@pytest.mark.parametrize("name", VIOLATIONS)
@one_loop
async def test_a_violation_ends_its_connection_only(name: str, device: DeviceUnderTest) -> None:
    attack, said = VIOLATIONS[name]
    async with serving(device) as victim, connect_stream(ADDRESS, victim.listener.port) as early:
        await victim.has_taken_in()
        async with victim.attacked() as attacker:
            attack(attacker)
            await attacker.is_cut_off()
            error = await victim.error()
        if name == "beyond the credits" and device.lacks("rnr"):
            # The credits are the receives: the device may end the connection first.
            assert isinstance(error, StreamProtocolError | DisconnectedError)
        else:
            with pytest.raises(StreamProtocolError, match=said):
                raise error
        await early.send(b"still here")
        assert await early.receive(1) == b"s"
        await victim.serves()


@pytest.mark.capability("immediate")
@pytest.mark.parametrize("immediate", [None, immediate_of(Operation.DATA, 4)])
@one_loop
async def test_a_send_is_refused(immediate: int | None, device: DeviceUnderTest) -> None:
    # Its bytes are in the receive's memory, not in the ring.
    async with serving(device) as victim, victim.attacked() as attacker:
        attacker.connection.post_send(b"four", immediate=immediate).add_done_callback(
            WorkRequest.exception
        )
        with pytest.raises(StreamProtocolError, match="a message that is no WRITE with immediate"):
            raise await victim.error()
        await victim.serves()


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.capability("iwarp")
@one_loop
async def test_a_short_word_is_refused(length: int, device: DeviceUnderTest) -> None:
    async with serving(device) as victim, victim.attacked(uses_words=True) as attacker:
        attacker.connection.post_send(bytes(length)).add_done_callback(WorkRequest.exception)
        with pytest.raises(StreamProtocolError, match=f"a word of {length} bytes"):
            raise await victim.error()
        await victim.serves()


# -- memory that is not the peer's ----------------------------------------------------------------


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@one_loop
async def test_a_write_outside_the_ring_reaches_nothing(device: DeviceUnderTest) -> None:
    async with serving(device) as victim, victim.attacked() as attacker:
        ring, table = attacker.victim.buffer, attacker.victim.table
        outside = RemoteMemory(table.address + table.length, 16, ring.rkey)
        attacker.post(bytes(16), outside, immediate_of(Operation.DATA, 16))
        await attacker.is_cut_off()
        assert not isinstance(await victim.error(), StreamProtocolError)
        await victim.serves()


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@one_loop
async def test_a_grant_of_foreign_memory_ends_the_stream(device: DeviceUnderTest) -> None:
    async with serving(device) as victim, victim.attacked() as attacker:
        foreign = struct.pack("=QII", 0x10000, 0xBAD, RING)
        attacker.grant(foreign, 1)
        attacker.data(FEED)  # the victim fills our first half, and then writes to the grant
        await attacker.is_cut_off()
        assert isinstance(await victim.error(), RdmaError)
        # What was lent, and what waits in the victim's own memory until its first WRITE fails.
        assert victim.fed <= RING // 2 + RING
        await victim.serves()


# -- peers that do nothing, or too much -----------------------------------------------------------


@pytest.mark.promise(
    "Every wait has a bound, except waits for the peer's program",
    "A stream's peer reaches its ring, and nothing else",
)
@pytest.mark.capability("slow_handshakes")
@one_loop
async def test_unfinished_handshakes_end_and_delay_no_other(device: DeviceUnderTest) -> None:
    lent = RemoteMemory(0x1000, 2 * GRANT_BYTES, 1)
    hello = Hello(CREDITS, lent, lent, takes_immediate=not device.lacks("iwarp")).pack()
    async with serving(device, accept_timeout=3.0) as victim, AsyncExitStack() as stack:
        port = victim.listener.port
        await victim.serves()
        before = descriptors()
        silent = [await stack.enter_async_context(silent_peer(port, hello)) for _ in range(8)]
        await victim.serves()
        assert victim.streams == 2
        with anyio.fail_after(PATIENCE):
            for peer in silent:
                await peer.ended()
        await victim.serves()
        assert victim.streams == 3
        # On the iWARP of the software device a connection has a descriptor, and gives it back when
        # the peer's end has arrived, or after 2 s.
        if device.name == SOFTWARE:
            with anyio.fail_after(PATIENCE):
                while descriptors() > before + len(silent):
                    await anyio.sleep(0.01)


class Echo(asyncio.Protocol):
    """Sends back what it receives."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def serving_protocols(
    device: DeviceUnderTest, kind: type[Echo] = Echo, **options: Any
) -> AsyncIterator[Victim]:
    """Yield the listener of an asyncio server."""
    victim: Victim

    def make() -> Echo:
        victim.streams += 1
        return kind()

    options |= {"queue_depth": CREDITS, "buffer_size": RING}
    server = await create_server(make, ADDRESS, 0, **options)
    victim = Victim(server._listeners[0], device)
    try:
        yield victim
    finally:
        server.close()
        await server.wait_closed()


SERVERS: dict[str, Callable[[DeviceUnderTest], AbstractAsyncContextManager[Victim]]] = {
    "stream": serving,
    "asyncio": serving_protocols,
}
if not BUILT_IN:  # On rxe, each waits for the handshake's time limit.
    SERVERS = {"stream": partial(serving, accept_timeout=5.0)}


@pytest.mark.capability("slow_handshakes")
@pytest.mark.parametrize("message", ["long", "write"])
@pytest.mark.parametrize("serves", SERVERS.values(), ids=SERVERS)
@one_loop
async def test_a_message_in_place_of_the_handshakes_end_stops_no_server(
    serves: Callable[[DeviceUnderTest], AbstractAsyncContextManager[Victim]],
    message: str,
    device: DeviceUnderTest,
) -> None:
    """The device then ends the connection with an error of its own, which is no error of the
    connection manager."""
    lent = RemoteMemory(0x1000, 2 * GRANT_BYTES, 1)
    hello = Hello(CREDITS, lent, lent, takes_immediate=not device.lacks("iwarp")).pack()
    async with serves(device) as victim:
        async with silent_peer(victim.listener.port, hello) as peer:
            await peer.misbehave(message)
            with anyio.fail_after(PATIENCE):
                await peer.ended()
        await victim.serves()


def descriptors() -> int:
    """How many descriptors this process has, of both sides."""
    return len(os.listdir("/proc/self/fd"))


async def is_held_back(victim: Victim) -> int:
    """Wait until the victim sends no more, and return what it has sent."""
    before = -1
    while victim.fed != before:
        before = victim.fed
        await anyio.sleep(0.3)
    return before


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@one_loop
async def test_a_peer_that_reads_nothing_holds_its_writer_back(device: DeviceUnderTest) -> None:
    async with serving(device) as victim:
        async with victim.attacked() as attacker:
            attacker.data(FEED)
            assert 0 < await is_held_back(victim) <= RING // 2
            await victim.serves()
        assert isinstance(await victim.error(), DisconnectedError)


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@one_loop
async def test_a_peer_without_credits_gets_nothing(device: DeviceUnderTest) -> None:
    async with serving(device) as victim:
        async with victim.attacked(announced=0) as attacker:
            attacker.data(FEED)
            attacker.say(Operation.GRANT, 0)
            assert await is_held_back(victim) == 0
            await victim.serves()
        assert isinstance(await victim.error(), DisconnectedError)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.capability("rnr")
@pytest.mark.parametrize("close_timeout", [0, 0.3])
@pytest.mark.parametrize("kind", ["stream", "transport"])
@one_loop
async def test_close_timeout_bounds_the_close_of_a_held_back_stream(
    kind: str, close_timeout: float, device: DeviceUnderTest
) -> None:
    """Where the peer has posted no receive, its device does not take the end of the data."""
    limits: Any = {"queue_depth": CREDITS, "buffer_size": RING, "close_timeout": close_timeout}
    took: list[float] = []

    async def close(stream: Stream) -> None:
        victim.streams += 1
        await stream.receive(1)
        started = anyio.current_time()
        await stream.aclose()
        took.append(anyio.current_time() - started)

    class Closing(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            victim.streams += 1
            self.transport = transport

        def data_received(self, _data: bytes) -> None:
            self.started = anyio.current_time()
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            assert exc is None
            took.append(anyio.current_time() - self.started)

    async with AsyncExitStack() as stack:
        if kind == "stream":
            listener = await stack.enter_async_context(listen_stream(ADDRESS, **limits))
            group = await stack.enter_async_context(anyio.create_task_group())
            group.start_soon(listener.serve, close)
            stack.callback(group.cancel_scope.cancel)
        else:
            server = await create_server(Closing, ADDRESS, 0, **limits)
            stack.push_async_callback(server.wait_closed)
            stack.callback(server.close)
            (listener,) = server._listeners
        victim = Victim(listener, device)
        async with victim.attacked(announced=0, receives=0) as attacker:
            attacker.data(b"x")
            await attacker.is_cut_off()
        with anyio.fail_after(PATIENCE):
            while not took:
                await anyio.sleep(0.01)
    assert close_timeout <= took[0] < CLOSE_TIMEOUT


@pytest.mark.capability("rnr")
@one_loop
async def test_abort_ends_the_wait_of_a_close(device: DeviceUnderTest) -> None:
    """Where the peer has posted no receive, its device does not take the end of the data."""
    ended = asyncio.Event()

    class Aborting(Echo):
        def data_received(self, _data: bytes) -> None:
            self.transport.close()
            asyncio.get_running_loop().call_later(0.1, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            assert exc is None
            ended.set()

    async with (
        serving_protocols(device, Aborting, close_timeout=1000) as victim,
        victim.attacked(announced=0, receives=0) as attacker,
    ):
        attacker.data(b"x")
        with anyio.fail_after(PATIENCE):
            await ended.wait()
        await attacker.is_cut_off()


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Yield what tells how many bytes Python's objects and the engine's take."""

    def taken() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        yield taken
    finally:
        tracemalloc.stop()


@pytest.mark.promise("A stream's peer reaches its ring, and nothing else")
@pytest.mark.parametrize("what", ["keepalives", "credits", "shutdowns"])
@one_loop
async def test_a_flood_of_control_messages_is_survived(what: str, device: DeviceUnderTest) -> None:
    values = {
        "keepalives": (Operation.CONTROL, Control.KEEPALIVE),
        "credits": (Operation.GRANT, CREDITS),
        "shutdowns": (Operation.CONTROL, Control.SHUTDOWN),
    }
    count = 5000 if device.is_built_in else 500
    async with serving(device) as victim, victim.attacked() as attacker:
        with anyio.fail_after(PATIENCE), traced() as memory:
            await attacker.flood(lambda _number: attacker.say(*values[what]), count // 5)
            before = memory()
            await attacker.flood(lambda _number: attacker.say(*values[what]), count)
            if device.is_built_in:  # with fewer messages, other objects are as many bytes
                assert memory() - before < 16 * count  # an object has at least 32 bytes
            await victim.serves()
    assert [type(each) for each in victim.errors] in ([], [anyio.EndOfStream], [DisconnectedError])


@one_loop
async def test_a_peer_that_leaves_inside_a_message_is_no_end(device: DeviceUnderTest) -> None:
    async with serving(device) as victim:
        async with victim.attacked() as attacker:
            attacker.data(b"whole")
            # Written, and not notified.
            await attacker.connection.write(b"half", attacker.victim.buffer[5:9])
        with pytest.raises(DisconnectedError, match="without an end of its data"):
            raise await victim.error()
        await victim.serves()


@pytest.mark.capability("passive_side_first")
@one_loop
async def test_messages_before_the_handshakes_end_are_limited(device: DeviceUnderTest) -> None:
    settings = StreamSettings(connect_stream, {"queue_depth": 16})

    async def attack(connection: aiordma.Connection) -> None:
        attacker = Attacker(connection, connection.register(bytearray(16))[:], uses_words)
        await attacker.flood(lambda _: attacker.say(Operation.CONTROL, Control.KEEPALIVE), 200)
        await attacker.is_cut_off()

    async def accept() -> None:
        lent = RemoteMemory(0x1000, 2 * GRANT_BYTES, 1)
        hello = Hello(16, lent, lent, takes_immediate=not uses_words)
        async with await listener.accept(private_data=hello.pack()) as connection:
            await attack(connection)

    uses_words = not device.lacks("iwarp") and bool(device.lacks("immediate"))
    async with (
        aiordma.listen(ADDRESS) as listener,
        anyio.create_task_group() as group,
        aiordma.prepare_connection(ADDRESS, listener.port, options=settings.options) as connection,
    ):
        group.start_soon(accept)
        rsocket = settings.rsocket(connection)
        await connection.establish(private_data=rsocket.hello())
        rsocket.start(connection.private_data)
        with anyio.fail_after(PATIENCE):
            while (error := rsocket.write_error()) is None:
                await anyio.sleep(0.01)
        with pytest.raises(StreamProtocolError, match="33 messages before the connection was"):
            raise error


# -- peers that do not use rsockets -------------------------------------------------------------


async def test_a_peer_without_rsockets_is_rejected() -> None:
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        waiting = Outcome()
        group.start_soon(waiting.of, listener.accept)
        with pytest.raises(aiordma.RejectedError):
            await aiordma.connect(ADDRESS, listener.port, private_data=b"hello")
        await until(lambda: waiting.error is not None)
        assert isinstance(waiting.error, StreamProtocolError)
        assert "does not use rsockets" in str(waiting.error) or "version" in str(waiting.error)
        assert str(waiting.error).startswith(f"accept ('{ADDRESS}', ")


async def test_a_listener_without_rsockets_is_named() -> None:
    async with aiordma.listen(ADDRESS) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, aiordma.Connection.ended)
        with pytest.raises(StreamProtocolError, match="private data") as caught:
            await connect_stream(ADDRESS, listener.port)
        assert str(caught.value).startswith(f"connect to {ADDRESS}:{listener.port}: ")
        group.cancel_scope.cancel()
