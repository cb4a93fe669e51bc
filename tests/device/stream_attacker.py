"""A stream's peer that uses rsockets' protocol as far as its test wants, and then violates it."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

import aiordma
from aiordma import Access, Connection, RemoteMemory, WorkRequest
from aiordma.streams import Stream, StreamListener, connect_stream, listen_stream
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from aiordma.types import MemorySlice
from tests.devices import ADDRESS, DeviceUnderTest
from tests.fuzz.model_protocol import Operation, immediate_of

RING = 128 * 1024
TABLE = TABLE_ENTRIES * GRANT_BYTES
CREDITS = 64
PATIENCE = 60
"""Seconds after which something counts as not having ended. It is no measure of speed."""
FEED, IGNORE = b"F", b"I"
"""What an attacker sends first: the victim then sends without end, or receives no more."""
NOWHERE = RemoteMemory(0, 0, 0)


def ignored(request: WorkRequest) -> WorkRequest:
    """Return a request whose error, if it fails, is of no interest."""
    request.add_done_callback(WorkRequest.exception)
    return request


class Attacker:
    """A hostile peer. Nothing is posted but what a test posts.

    Attributes:
        memory: its ring, and its table of grants.
        victim: the victim's Hello.
    """

    def __init__(self, connection: Connection, memory: MemorySlice, uses_words: bool) -> None:
        self.connection = connection
        self.memory = memory
        self.victim = Hello.unpack(connection.private_data)
        self.uses_words = uses_words
        """On iWARP without immediate data, each message is a WRITE and a SEND."""

    def post(self, source: bytes, target: RemoteMemory, immediate: int) -> WorkRequest:
        """Write to the victim, and notify it with that immediate data."""
        if not self.uses_words:
            return ignored(self.connection.post_write(source, target, immediate=immediate))
        if source:
            ignored(self.connection.post_write(source, target))
        return ignored(self.connection.post_send(immediate.to_bytes(4, sys.byteorder)))

    def data(self, data: bytes, at: int = 0, length: int | None = None) -> WorkRequest:
        """Write data at an offset of the first half of the victim's ring.

        Args:
            length: what the immediate says; None: the truth.
        """
        target = self.victim.buffer[at : at + len(data)]
        value = len(data) if length is None else length
        return self.post(data, target, immediate_of(Operation.DATA, value))

    def say(self, operation: int, value: int) -> WorkRequest:
        """Send a message without data."""
        return self.post(b"", NOWHERE, operation << 29 | value)

    def grant(self, entry: bytes, index: int, limit: int = CREDITS) -> WorkRequest:
        """Write an entry of the victim's table, and notify it."""
        place = self.victim.table[index * GRANT_BYTES : (index + 1) * GRANT_BYTES]
        return self.post(entry, place, immediate_of(Operation.GRANT, limit))

    async def flood(self, post: Callable[[int], WorkRequest], count: int) -> None:
        """Post so many messages as fast as they are sent, or until the connection's end."""
        waiting: list[WorkRequest] = []
        for number in range(count):
            try:
                waiting.append(post(number))
                if len(waiting) == CREDITS // 4:
                    await waiting.pop(0)
            except aiordma.RdmaError:
                return

    async def is_cut_off(self) -> None:
        """Wait until the victim has ended the connection."""
        with anyio.fail_after(PATIENCE):
            while self.connection.cause is None:
                await anyio.sleep(0.01)


@dataclass
class Victim:
    """A listener whose handler does what the first byte that arrives says, or echoes.

    Attributes:
        errors: what handlers ended with.
        fed: bytes that were sent to those that began with FEED.
        streams: how many handlers were started.
    """

    listener: StreamListener
    device: DeviceUnderTest
    errors: list[Exception] = field(default_factory=list)
    fed: int = 0
    streams: int = 0

    async def handle(self, stream: Stream) -> None:
        self.streams += 1
        try:
            data = await stream.receive(1)
            if data == IGNORE:
                await stream._rsocket.drained()
                while (error := stream._rsocket.write_error()) is None:
                    await anyio.sleep(0.01)
                raise error
            while data == FEED:
                await stream.send(bytes(4000))
                self.fed += 4000
            await stream.send(data)
            async for more in stream:
                await stream.send(more)
        except Exception as error:
            self.errors.append(error)

    async def serves(self) -> None:
        """Exchange bytes with the listener, as another peer of it."""
        with anyio.fail_after(PATIENCE):
            async with connect_stream(ADDRESS, self.listener.port) as stream:
                await stream.send(b"good day")
                received = b""
                while len(received) < 8:
                    received += await stream.receive()
                assert received == b"good day"

    async def has_taken_in(self, count: int = 1) -> None:
        """Wait until so many peers' handshakes have ended."""
        with anyio.fail_after(PATIENCE):
            while self.streams < count:
                await anyio.sleep(0.01)

    async def error(self) -> Exception:
        """Wait until a handler has failed, and return its error."""
        with anyio.fail_after(PATIENCE):
            while not self.errors:
                await anyio.sleep(0.01)
        return self.errors.pop()

    @asynccontextmanager
    async def attacked(
        self, *, announced: int = CREDITS, receives: int = 2 * CREDITS, uses_words: bool = False
    ) -> AsyncIterator[Attacker]:
        """Connect an attacker, which announces so many credits, once the handler has its stream.

        A message that arrives before that, which RoCE allows, fails the handshake instead.

        Args:
            receives: how many receives it posts.
            uses_words: on iWARP, even if the device has immediate data.
        """
        before = self.streams
        is_iwarp = not self.device.lacks("iwarp")
        has_immediate = not uses_words and not self.device.lacks("immediate")
        async with aiordma.prepare_connection(
            ADDRESS,
            self.listener.port,
            receive_buffers=0,
            options=aiordma.ConnectionOptions(max_recv_wr=2 * CREDITS, max_send_wr=4 * CREDITS),
        ) as connection:
            access = Access.LOCAL_WRITE | Access.REMOTE_WRITE
            memory = connection.register(bytearray(RING + TABLE), access)[:]
            words = connection.register(bytearray(4))
            for _ in range(receives):
                ignored(connection.post_recv(words))
            lent = memory.remote()
            hello = Hello(
                announced,
                lent[RING:],
                lent[: RING // 2],
                takes_immediate=is_iwarp and has_immediate,
            )
            await connection.establish(private_data=hello.pack())
            await self.has_taken_in(before + 1)
            yield Attacker(connection, memory, is_iwarp and not has_immediate)


@asynccontextmanager
async def serving(
    device: DeviceUnderTest, *, accept_timeout: float = 30.0
) -> AsyncIterator[Victim]:
    """Yield a listener that serves."""
    async with (
        listen_stream(
            ADDRESS, queue_depth=CREDITS, buffer_size=RING, accept_timeout=accept_timeout
        ) as listener,
        anyio.create_task_group() as group,
    ):
        victim = Victim(listener, device)
        group.start_soon(listener.serve, victim.handle)
        yield victim
        group.cancel_scope.cancel()
