"""A program: transfer data over a wire with faults in every way, and compare every byte.

It prints, as JSON, for each fault what became of each transfer: "ok", or what went wrong.
"""

import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeAlias

import anyio

import aiordma
from aiordma.streams import Stream, StreamListener, connect_stream, listen_stream
from tests.connections import connect_to

MESSAGES = 16
BYTES = 24 << 10
"""Of a transfer by WRITE, by READ and by a stream."""

PARTS = 3
SECONDS = 40.0
"""The time for one transfer: 0.1 s on a good wire, and the emulated machine can be busy."""

REMOTE = aiordma.Access.LOCAL_WRITE | aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE

Part: TypeAlias = "slice[int, int, None]"

Transfer = Callable[["Ends"], Awaitable[bool]]


class Ends:
    """Both addresses, with the listeners of one of them, and the data."""

    def __init__(
        self, server: str, client: str, listener: aiordma.Listener, streams: StreamListener
    ) -> None:
        self.server, self.client = server, client
        self.listener, self.streams = listener, streams
        self.data = random.Random(server).randbytes(BYTES)

    async def connect(self) -> tuple[aiordma.Connection, aiordma.Connection]:
        return await connect_to(self.listener, self.server, source=(self.client, 0))

    def message(self, number: int) -> bytes:
        """Return the message of that number; their lengths differ, from none to 3,825 bytes."""
        return self.data[number : number + number * 255]


async def by_messages(ends: Ends) -> bool:
    """Send messages both ways at the same time."""
    client, server = await ends.connect()
    messages = [ends.message(number) for number in range(MESSAGES)]
    same = []

    async def send(connection: aiordma.Connection) -> None:
        requests = [connection.post_send(message) for message in messages]
        for request in requests:
            await request

    async def receive(connection: aiordma.Connection) -> None:
        same.append([await connection.receive() for _ in messages] == messages)

    async with client, server, anyio.create_task_group() as group:
        for each in (client, server):
            group.start_soon(send, each)
            group.start_soon(receive, each)
    return same == [True, True]


async def by_write(ends: Ends) -> bool:
    client, server = await ends.connect()
    async with client, server:
        written = bytearray(BYTES)
        remote = server.register(written, REMOTE).remote()
        ours = client.register(bytearray(ends.data))
        await _in_parts(lambda part: client.write(ours[part], remote[part]))
        # What arrives behind the WRITEs says that they have arrived.
        await client.send(b"written")
        return await server.receive() == b"written" and written == ends.data


async def by_read(ends: Ends) -> bool:
    client, server = await ends.connect()
    async with client, server:
        remote = server.register(bytearray(ends.data), REMOTE).remote()
        found = bytearray(BYTES)
        ours = client.register(found)
        await _in_parts(lambda part: client.read(ours[part], remote[part]))
        return found == ends.data


async def _in_parts(transfer: Callable[[Part], Coroutine[Any, Any, object]]) -> None:
    size = BYTES // PARTS
    async with anyio.create_task_group() as group:
        for start in range(0, BYTES, size):
            group.start_soon(transfer, slice(start, start + size))


async def by_stream(ends: Ends) -> bool:
    """Send bytes both ways at the same time."""
    same = []
    accepted: list[Stream] = []

    async def accept() -> None:
        accepted.append(await ends.streams.accept())

    async with anyio.create_task_group() as group:
        group.start_soon(accept)
        client = await connect_stream(ends.server, ends.streams.port, source=(ends.client, 0))
    (server,) = accepted

    async def receive(stream: Stream) -> None:
        found = bytearray()
        while len(found) < BYTES:
            found += await stream.receive()
        same.append(found == ends.data)

    async with client, server, anyio.create_task_group() as group:
        for each in (client, server):
            group.start_soon(each.send, ends.data)
            group.start_soon(receive, each)
    return same == [True, True]


TRANSFERS: dict[str, Transfer] = {
    "messages": by_messages,
    "WRITE": by_write,
    "READ": by_read,
    "stream": by_stream,
}


async def _outcome(transfer: Transfer, ends: Ends) -> str:
    try:
        with anyio.fail_after(SECONDS):
            return "ok" if await transfer(ends) else "the bytes differ"
    except Exception as error:
        return repr(error)


def _netem(arguments: str) -> None:
    for end in (1, 2):
        words = ["tc", "qdisc", "replace", "dev", f"veth{end}", "root", "netem"]
        subprocess.run([*words, *arguments.split()], check=True)


async def _run(server: str, client: str, faults: dict[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    async with (
        aiordma.listen(server, 0) as listener,
        listen_stream(server) as streams,
    ):
        ends = Ends(server, client, listener, streams)
        for fault, arguments in faults.items():
            await anyio.to_thread.run_sync(_netem, arguments)
            found[fault] = {}
            for name, transfer in TRANSFERS.items():
                found[fault][name] = await _outcome(transfer, ends)
        # A wire that is good again, for what follows.
        await anyio.to_thread.run_sync(_netem, "loss 0%")
    return found


def main(server: str, client: str, faults: str) -> None:
    """Run the transfers.

    Args:
        server, client: the addresses of veth2 and of veth1.
        faults: JSON: for each name, the arguments of netem.
    """
    print(json.dumps(anyio.run(partial(_run, server, client, json.loads(faults)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
