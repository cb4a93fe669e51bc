"""What ib_read_lat and ib_write_lat say to each other before they measure, with -R: everything by
messages on a connection of its own, the client first and the server after it, then the same once
more for each further step; the measured connection is made in the middle of it, to the same port.

Seen in perftest 4.5. A message is the sender's, and the two are of the same size.
"""

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel

import aiordma
from aiordma import Access, Connection, ConnectionOptions, RemoteMemory

DESTINATION = struct.Struct("!iiiiI4xQ16sIi")
"""lid, READs outstanding, queue pair, PSN, rkey, address, GID, SRQ, GID index: C's struct."""

CONTROL = ConnectionOptions(
    receive_buffers=2,
    receive_size=DESTINATION.size,
    max_send_wr=2,
    responder_resources=1,
    initiator_depth=1,
)
MEASURED = ConnectionOptions(receive_buffers=0, max_recv_wr=1, max_send_wr=4)

PEER = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE

VERSION = b"6.11".ljust(16, b"\0")
PAGE = struct.pack("!i", 4096)
CACHE_LINE = struct.pack("!i", 64)
MTU = b"5\0"
"""As the enumeration has it, in one digit: 4096."""


@dataclass
class Exchange:
    """The connection for what is said, from either side."""

    control: Connection
    speaks_first: bool

    async def swap(self, ours: bytes) -> bytes:
        """Give and take one message."""
        if self.speaks_first:
            await self.control.send(ours)
            theirs = await self.control.receive()
        else:
            theirs = await self.control.receive()
            await self.control.send(ours)
        assert len(theirs) == len(ours), (ours, theirs)
        return theirs

    async def greet(self) -> None:
        """Versions and sizes: what must suit."""
        theirs = await self.swap(VERSION)
        assert float(theirs.rstrip(b"\0").partition(b"\0")[0]) >= 5.7
        await self.swap(PAGE)
        await self.swap(CACHE_LINE)
        await self.swap(MTU)

    async def describe(self, memory: RemoteMemory | None = None) -> RemoteMemory:
        """Exchange where each side's memory is; also used to keep in step."""
        ours = (0, 1, 0, 0, memory.rkey if memory else 0, memory.address if memory else 0)
        theirs = DESTINATION.unpack(await self.swap(DESTINATION.pack(*ours, bytes(16), 0, 0)))
        return RemoteMemory(theirs[5], memory.length if memory else 0, theirs[4])


@dataclass
class Session:
    """The measured connection, with the memory of both sides."""

    exchange: Exchange
    connection: Connection
    ours: bytearray
    theirs: RemoteMemory

    async def read(self, rounds: int) -> list[bytes]:
        """Be ib_read_lat's client."""
        found = [await self.connection.read_bytes(self.theirs) for _ in range(rounds)]
        await self.exchange.describe()  # which is how it says that it is done
        return found

    async def be_read(self) -> None:
        """Be ib_read_lat's server: wait until the client says that it is over."""
        await self.exchange.describe()

    async def write_in_turn(self, rounds: int) -> None:
        """Be ib_write_lat: each WRITE's last byte counts, and is waited for. The server begins."""
        message = bytearray(len(self.ours))
        for number in range(1, rounds + 1):
            if self.exchange.speaks_first:
                await self._until_last_byte_is(number)
            message[-1] = number & 0xFF
            await self.connection.write(message, self.theirs)
            if not self.exchange.speaks_first:
                await self._until_last_byte_is(number)

    async def _until_last_byte_is(self, number: int) -> None:
        while self.ours[-1] != number & 0xFF:
            await anyio.lowlevel.checkpoint()


async def _ready(exchange: Exchange, connection: Connection, size: int) -> Session:
    """The steps between the second connection and the measuring."""
    ours = bytearray(size)
    memory = connection.register(ours, PEER).remote()
    await exchange.describe(memory)  # connected
    theirs = await exchange.describe(memory)
    for _ in range(3):  # the same for each queue pair, to print it, and when all are ready
        theirs = await exchange.describe(memory)
    return Session(exchange, connection, ours, theirs)


@asynccontextmanager
async def server_of(listener: aiordma.Listener, size: int) -> AsyncIterator[Session]:
    """Be the server of the client that comes next."""
    async with await listener.accept() as control:
        exchange = Exchange(control, speaks_first=False)
        await exchange.greet()
        await exchange.describe()
        async with await listener.accept() as connection:
            yield await _ready(exchange, connection, size)


@asynccontextmanager
async def client_of(host: str, port: int, size: int, device: str) -> AsyncIterator[Session]:
    """Be the client of a server."""
    async with await aiordma.connect(host, port, device=device, options=CONTROL) as control:
        exchange = Exchange(control, speaks_first=True)
        await exchange.greet()
        await exchange.describe()
        # It listens again only now, and does not say when.
        connection = await _connect_soon(host, port, device)
        async with connection:
            yield await _ready(exchange, connection, size)


async def _connect_soon(host: str, port: int, device: str) -> Connection:
    while True:
        try:
            return await aiordma.connect(host, port, device=device, options=MEASURED)
        except aiordma.RejectedError:
            await anyio.sleep(0.05)
