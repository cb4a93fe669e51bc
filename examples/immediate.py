"""Write into a peer's memory, and tell it with the same request: 32 bits of immediate data.

    python examples/immediate.py 127.0.0.1

The server lends a ring of slots. The client WRITEs into a slot, and the number of the slot comes
as the immediate data of the WRITE: the server is told when, and where, without a message of its
own. Both are one program here, to be short.
"""

import argparse
import asyncio

import aiordma
from aiordma import Access

SLOTS = 8
SIZE = 64
LAST = 0xFFFFFFFF


async def serve(connection: aiordma.Connection) -> None:
    ring = bytearray(SLOTS * SIZE)
    region = connection.register(ring, Access.REMOTE_WRITE)
    await connection.send(region.remote().pack())
    while True:
        message = await connection.receive_message()
        if message.immediate == LAST:
            print(f"told to stop: {message.data!r}", flush=True)
            return
        assert message.immediate is not None
        assert message.written is not None
        at = message.immediate * SIZE
        print(f"slot {message.immediate}: {bytes(ring[at : at + message.written])!r}", flush=True)


async def use(address: str, port: int) -> None:
    async with aiordma.connect(address, port) as connection:
        remote = aiordma.RemoteMemory.unpack(await connection.receive())
        for slot in range(SLOTS):
            text = f"written into slot {slot}".encode()
            place = remote[slot * SIZE : slot * SIZE + len(text)]
            await connection.write(text, place, immediate=slot)
        await connection.send(b"that was all", immediate=LAST)


async def main(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        client = asyncio.create_task(use(address, listener.port))
        async with listener.accept() as connection:
            await serve(connection)
            await client


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of this machine's RDMA interface")
    asyncio.run(main(parser.parse_args().address))
