"""A gateway between TCP and streams, for tests whose peer is a blocking socket.

Many tests of asyncio's and uvloop's suites have the program under test on one side and a socket in
a thread on the other. The socket speaks TCP with the gateway, and the gateway speaks rsockets with
the loop under test. It passes on bytes, the end of a direction, and aborts.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import aiordma.streams

T = TypeVar("T")

HOST = "127.0.0.1"
CHUNK = 65536


def has_tcp_listener(port: int) -> bool:
    """Whether a TCP socket of this machine listens on the port."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(name) as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
    return False


class Gateway:
    """Runs in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened: list[Any] = []
        self.count = 0

    def _call(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(main, self._loop).result(20)

    def to_stream(self, host: str, port: int) -> int:
        """Open a TCP port whose connections go to the stream server at host:port."""
        return self._call(self._to_stream(host, port))

    def to_tcp(self, host: str, port: int) -> int:
        """Open a stream port whose streams go to the TCP server at host:port."""
        return self._call(self._to_tcp(host, port))

    def reset(self) -> None:
        """End everything that a test left."""
        self._call(self._reset())

    async def _reset(self) -> None:
        for each in self._opened:
            if isinstance(each, asyncio.AbstractServer):
                each.close()
            else:
                await each.aclose()
        self._opened.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _to_stream(self, host: str, port: int) -> int:
        async def accepted(client: socket.socket) -> None:
            async with client_closed(client):
                stream = await aiordma.streams.connect_stream(host, port)
                await self._join(client, stream)

        listening = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=socket.has_ipv6
        )
        listening.setblocking(False)

        async def accept() -> None:
            with listening:
                while True:
                    client, _ = await self._loop.sock_accept(listening)
                    client.setblocking(False)
                    self._start(accepted(client))

        self._start(accept())
        chosen: int = listening.getsockname()[1]
        return chosen

    async def _to_tcp(self, host: str, port: int) -> int:
        async def accepted(stream: aiordma.streams.Stream) -> None:
            client = socket.socket()
            client.setblocking(False)
            async with client_closed(client):
                try:
                    await self._loop.sock_connect(client, (host, port))
                except OSError:
                    await stream.connection.aclose()
                    return
                await self._join(client, stream)

        listener = await aiordma.streams.listen_stream(HOST, 0)
        self._opened.append(listener)

        async def accept() -> None:
            while True:
                self._start(accepted(await listener.accept()))

        self._start(accept())
        return listener.port

    def _start(self, main: Coroutine[Any, Any, None]) -> None:
        async def quiet() -> None:
            with suppress(OSError, aiordma.RdmaError):
                await main

        task = self._loop.create_task(quiet())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, client: socket.socket, stream: aiordma.streams.Stream) -> None:
        self.count += 1
        ways = [
            self._loop.create_task(self._up(client, stream)),
            self._loop.create_task(self._down(client, stream)),
        ]
        try:
            await asyncio.gather(*ways)
        except BaseException:
            # One side broke: the other one is aborted.
            for each in ways:
                each.cancel()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await stream.connection.aclose()
            raise
        await stream.aclose()

    async def _up(self, client: socket.socket, stream: aiordma.streams.Stream) -> None:
        while data := await self._loop.sock_recv(client, CHUNK):
            await stream.send(data)
        with suppress(aiordma.RdmaError):
            await stream.send_eof()

    async def _down(self, client: socket.socket, stream: aiordma.streams.Stream) -> None:
        async for data in stream:
            await self._loop.sock_sendall(client, data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_WR)


class client_closed:
    """Closes a socket at the end of the block."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        self._client.close()
