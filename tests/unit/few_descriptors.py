"""Each call that opens something, in a process that has 0, 1, 2, ... file descriptors left, until
they suffice: python -m tests.unit.few_descriptors OPERATION LOOP

Every attempt is made by a forked child, so that it is the first use of the device. It prints one
line of JSON: what each attempt found, the one that succeeded last.
"""

import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import anyio

import aiordma
from aiordma.testing import software_objects
from tests.conftest import BACKENDS
from tests.internals import close_unused_reactors

HOST = "127.0.0.1"
GROUP = "239.1.2.3"
MOST_FREE = 60
PATIENCE = 60

server_port = 0


async def connect(host: str = HOST) -> None:
    async with await aiordma.connect(host, server_port, device="software") as connection:
        await connection.send(b"hello")
        assert bytes(await connection.receive()) == b"hello"


async def connect_by_name() -> None:
    await connect("localhost")


async def prepare() -> None:
    async with await aiordma.prepare_connection(HOST, server_port, device="software") as connection:
        await connection.establish()


async def listen() -> None:
    async with await aiordma.listen(HOST, device="software") as listener:
        assert listener.port


async def datagram() -> None:
    async with await aiordma.open_datagram(HOST, device="software") as one:
        peer = await one.resolve(HOST, one.port)
        await one.send(b"hello", peer)
        assert bytes((await one.receive()).data) == b"hello"


async def multicast() -> None:
    async with await aiordma.open_datagram(HOST, device="software") as one:
        group = await one.join(GROUP)
        await one.send(b"hello", group)
        await group.leave()


async def shared_receive() -> None:
    async with await aiordma.open_shared_receive(HOST, device="software", buffers=4):
        pass


OPERATIONS: dict[str, Callable[[], Awaitable[None]]] = {
    call.__name__: call
    for call in (connect, connect_by_name, prepare, listen, datagram, multicast, shared_receive)
}


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Fillers:
    """Open files until the limit, but for so many."""

    def __init__(self, free: int) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files = [os.open("/dev/null", os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._files[0] + 128, self._limits[1]))
        with suppress(OSError):
            while True:
                self._files.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(self._files.pop())

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


async def attempt(operation: Callable[[], Awaitable[None]], free: int | None) -> dict[str, Any]:
    """Try with so many descriptors, then with enough; None: only with enough."""
    error: OSError | None = None
    if free is not None:
        fillers = Fillers(free)
        try:
            with anyio.fail_after(PATIENCE):
                await operation()
        except OSError as raised:
            error = raised
        finally:
            fillers.close()
    text, is_connection_error = str(error or ""), isinstance(error, ConnectionError)
    number = None if error is None else error.errno
    error = None
    with anyio.fail_after(PATIENCE):
        await operation()
        gc.collect()
        await close_unused_reactors()
    return {
        "free": free,
        "error": text,
        "errno": number,
        "is_connection_error": is_connection_error,
        "left": software_objects() | {"descriptors": open_descriptors()},
        "modules": sorted(sys.modules),
    }


def forked(function: Callable[[], Any]) -> Any:
    """Run in a child, and return what it returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            result = function()
        except BaseException as error:
            result = {"crash": repr(error)}
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    return found


def run(name: str, loop: str, free: int | None) -> dict[str, Any]:
    backend, options = BACKENDS[loop]
    errors = Errors()
    logging.getLogger().addHandler(errors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = anyio.run(attempt, OPERATIONS[name], free, backend=backend, backend_options=options)
        gc.collect()
    found["said"] = [str(warning.message) for warning in caught] + errors.lines
    return found


def start_server() -> int:
    """Start a child that echoes, and note its port; returns its process."""
    global server_port
    with socket.create_server((HOST, 0)) as probe:
        server_port = probe.getsockname()[1]
    reading, writing = os.pipe()
    child = os.fork()
    if not child:

        async def echo(connection: aiordma.Connection) -> None:
            async for message in connection:
                await connection.send(message)

        async def serve() -> None:
            async with await aiordma.listen(HOST, server_port, device="software") as listener:
                os.close(writing)
                await listener.serve(echo)

        os.close(reading)
        anyio.run(serve)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return child


def main() -> None:
    name, loop = sys.argv[1:]
    server = start_server()
    try:
        # What is imported late would need descriptors, which is not what is tried here.
        first = forked(lambda: run(name, loop, 0))
        for module in first.get("modules", ()):
            with suppress(Exception):
                import_module(module)
        found = [first, forked(lambda: run(name, loop, None))]
        for free in range(MOST_FREE):
            found.append(forked(partial(run, name, loop, free)))
            if not found[-1].get("error"):
                break
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    for one in found:
        one.pop("modules", None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
