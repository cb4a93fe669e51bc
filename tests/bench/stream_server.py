"""The server of the stream rows, a process of its own: python -m tests.bench.stream_server JSON

It serves the same exchanges four ways: by our ByteStream, by our asyncio transport, and by
asyncio's TCP streams; it prints their ports when it is ready. A connection begins with `HEAD`: the
size of its messages, and whether they are sent back or only counted. After the end of counted data
comes the number of its bytes, as `COUNT`.
"""

import asyncio
import json
import socket
import struct
import sys
from contextlib import suppress
from functools import partial

import anyio

from aiordma.bench.loops import run
from aiordma.streams import Stream, listen_stream
from aiordma.streams import start_server as start_rdma_server

HEAD = struct.Struct("!I?")
COUNT = struct.Struct("!Q")
READ_BYTES = 1 << 18


async def by_byte_stream(stream: Stream) -> None:
    """Serve one connection by `receive` and `send`."""
    head = b""
    while len(head) < HEAD.size:
        head += await stream.receive(HEAD.size - len(head))
    size, echoes = HEAD.unpack(head)
    with suppress(anyio.EndOfStream):
        if echoes:
            while True:
                await stream.send(await stream.receive(size))
        count, buffer = 0, bytearray(READ_BYTES)
        try:
            while True:
                count += await stream.receive_into(buffer)
        finally:
            await stream.send(COUNT.pack(count))
    await stream.aclose()


async def by_asyncio(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection by asyncio's streams, whatever is below them."""
    below = writer.get_extra_info("socket")
    if below is not None:
        below.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        size, echoes = HEAD.unpack(await reader.readexactly(HEAD.size))
        while echoes:
            writer.write(await reader.readexactly(size))
            await writer.drain()
        count = 0
        while data := await reader.read(READ_BYTES):
            count += len(data)
        writer.write(COUNT.pack(count))
    writer.close()


async def serve(host: str, device: str) -> None:
    """Serve until the process is terminated."""
    async with await listen_stream(host, 0, device=device) as listener:
        ours = await start_rdma_server(by_asyncio, host, 0, device=device)
        tcp = await asyncio.start_server(by_asyncio, host, 0)
        async with ours, tcp:
            ports = (
                listener.port,
                ours.sockets[0].getsockname()[1],
                tcp.sockets[0].getsockname()[1],
            )
            print(json.dumps(ports), flush=True)
            await listener.serve(by_byte_stream)


def main(settings: str) -> None:
    """Run the server on a loop as the settings say."""
    given = json.loads(settings)
    place = partial(serve, given["host"], given["device"])
    run(place, loop=given["loop"], spin=given["spin"])


if __name__ == "__main__":
    main(sys.argv[1])
