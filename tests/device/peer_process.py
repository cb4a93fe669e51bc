"""A program: accept connections, and be a peer to stop, to kill or to cut off.

It prints its port and its process id, and echoes the messages of its peers. It never closes a
connection by itself.
"""

import os
import sys

import anyio

import aiordma


async def _echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def main(address: str, kind: str, port: str) -> None:
    """Listen on an address.

    Args:
        address: the address.
        port: the port; "0": any.
        kind: "echo", or "silent": post no receives, so that messages wait.
    """
    options: aiordma.types.ConnectionKeywords = {"receive_buffers": 0} if kind == "silent" else {}
    async with aiordma.listen(address, int(port), **options) as listener:
        print(listener.port, os.getpid(), flush=True)
        if kind == "silent":
            kept = []
            while True:
                kept.append(await listener.accept())
        await listener.serve(_echo)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
