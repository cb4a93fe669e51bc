"""Protocols, and pairs of transports, on each of asyncio's event loops: what the tests of asyncio's
transports share."""

import asyncio
import select
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

import aiordma
from aiordma import streams
from tests.devices import ADDRESS

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
    "polling": aiordma.new_event_loop,
}

Main = Callable[[], Coroutine[Any, Any, None]]
Run = Callable[[Main], None]


def on_loop(make_loop: Callable[[], asyncio.AbstractEventLoop], main: Main) -> None:
    """Run a coroutine function on a loop; what the loop reports is an error."""
    reported: list[dict[str, Any]] = []

    async def reporting() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        async with asyncio.timeout(60):
            await main()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(reporting())
    assert reported == []


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


def is_readable(below: Any) -> bool:
    """Whether poll() finds the descriptor of what stands in for a socket readable."""
    poll = select.poll()
    poll.register(below.fileno(), select.POLLIN)
    return bool(poll.poll(0))


class Recorder(asyncio.Protocol):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.data = b""
        self.eof = False
        self.error: Exception | None = None
        self.paused = 0
        self.lost = asyncio.Event()
        self.made = asyncio.Event()
        self.changed = asyncio.Event()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.made.set()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.changed.set()

    def eof_received(self) -> None:
        self.eof = True
        self.changed.set()

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.paused -= 1
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self.lost.set()
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def two(make: Callable[[], Any] = Recorder, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the protocols of both sides: (client, server)."""
    servers: list[Any] = []

    def accepted() -> Any:
        servers.append(make())
        return servers[-1]

    server = await streams.create_server(accepted, ADDRESS, 0, **options)
    host, port = server.sockets[0].getsockname()
    _, client = await streams.create_connection(make, host, port, **options)
    client.transport.write(b"?")  # on iWARP the side that connected sends first
    while not servers:
        await asyncio.sleep(0.001)
    await servers[0].made.wait()
    await servers[0].until(lambda: bool(servers[0].data))
    servers[0].data = b""
    try:
        yield client, servers[0]
    finally:
        for each in (client, servers[0]):
            each.transport.abort()
            await each.lost.wait()
        server.close()
        await server.wait_closed()
