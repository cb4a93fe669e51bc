"""A program: one end of a connection, to be killed or stopped while it works.

It prints its port (0: it connects) and its process id. It sends the address of memory that the
peer may access, and then answers each numbered message with one of its own.
"""

import os
import random
import sys

import anyio

import aiordma
from tests.soak.numbered import message

SIZE = 3000
MEMORY = random.Random(17).randbytes(SIZE)
ALL = aiordma.Access.LOCAL_WRITE | aiordma.Access.REMOTE_READ | aiordma.Access.REMOTE_WRITE
THEIRS, OURS = 1, 2
"""In the messages' numbers: those of the peer, and of this program."""


async def _work(connection: aiordma.Connection) -> None:
    readable = connection.register(bytearray(MEMORY), ALL)
    writable = connection.register(bytearray(SIZE), ALL)
    await connection.send(readable.remote().pack() + writable.remote().pack())
    number = 0
    async for data in connection:
        if data != message(THEIRS, number):
            raise ValueError(f"message {number} differs")
        await connection.send(message(OURS, number))
        number += 1


async def main(address: str, port: str) -> None:
    """Connect, or listen if the port is 0; the connecting side sends the first message."""
    if int(port):
        print(0, os.getpid(), flush=True)
        async with aiordma.connect(address, int(port)) as connection:
            await connection.send(b"first")
            await _work(connection)
        return
    async with aiordma.listen(address, 0) as listener:
        print(listener.port, os.getpid(), flush=True)
        async with await listener.accept() as connection:
            await connection.receive()
            await _work(connection)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
