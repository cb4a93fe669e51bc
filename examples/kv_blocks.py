"""A key-value cache of fixed blocks: clients READ many scattered blocks with one call.

    python examples/kv_blocks.py --serve 192.0.2.1      # one terminal
    python examples/kv_blocks.py 192.0.2.1              # another, any number of times

The server's memory is registered once, for all clients. A client asks by a message where the blocks
of its keys are, and READs them all with one call: the server's processor moves no data. The server
evicts and reuses blocks without asking anybody, so a READ can return a part of one value and a part
of the next. Each block has the number of its use and a checksum. A client asks again for a block
that has another number or does not match its checksum.
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import random
import struct
import zlib

import aiordma
from aiordma import Access

BLOCK = 16 << 10
BLOCKS = 256
HEADER = struct.Struct("<QI")
"""The number of the block's use, and the checksum of the value and that number."""
VALUE = BLOCK - HEADER.size
MOST_KEYS = 64
"""Keys of one request: its answer has to fit into a receive of the client."""


class Cache:
    """The server's blocks, the oldest of which is reused first."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, BLOCK * BLOCKS)
        self.places: dict[str, tuple[int, int]] = {}  # the key's block, and the use of that block
        self.keys: list[str | None] = [None] * BLOCKS
        self.uses = 0

    def put(self, key: str, value: bytes) -> None:
        block = self.uses % BLOCKS
        self.uses += 1
        evicted = self.keys[block]
        if evicted is not None and self.places.get(evicted, (None,))[0] == block:
            del self.places[evicted]
        start = block * BLOCK
        header = HEADER.pack(self.uses, zlib.crc32(value, self.uses))
        self.memory[start : start + BLOCK] = header + value
        self.keys[block], self.places[key] = key, (block, self.uses)

    async def fill(self) -> None:
        """Put new values, and so evict the oldest ones, again and again."""
        while True:
            key = random.randrange(2 * BLOCKS)
            self.put(f"key {key}", value_of(key))
            await asyncio.sleep(0.001)


def value_of(key: int) -> bytes:
    return f"{key:4}".encode() * (VALUE // 4)


async def serve(address: str, port: int) -> None:
    cache = Cache()
    for key in range(BLOCKS):
        cache.put(f"key {key}", value_of(key))
    async with aiordma.open_domain(address) as domain:
        region = domain.register(cache.memory, Access.REMOTE_READ)

        async def handle(connection: aiordma.Connection) -> None:
            await connection.receive()  # on iWARP, the side that connected sends first
            await connection.send(region.remote().pack())
            async for message in connection:
                keys = json.loads(message)[:MOST_KEYS]
                await connection.send(json.dumps([cache.places.get(key) for key in keys]).encode())

        async with aiordma.listen(address, port, domain=domain, keepalive=5.0) as listener:
            filling = asyncio.create_task(cache.fill())
            print(f"listening on {address}:{listener.port}", flush=True)
            try:
                await listener.serve(handle)
            finally:
                filling.cancel()


class Client:
    def __init__(self, connection: aiordma.Connection, remote: aiordma.RemoteMemory) -> None:
        self.connection, self.remote = connection, remote
        self.local = connection.register(bytearray(BLOCK * MOST_KEYS))

    async def get(self, keys: list[str]) -> dict[str, bytes]:
        """Return the values of the keys that the server has."""
        values: dict[str, bytes] = {}
        while keys:
            await self.connection.send(json.dumps(keys[:MOST_KEYS]).encode())
            places = json.loads(await self.connection.receive())
            found = [(key, *place) for key, place in zip(keys, places, strict=False) if place]
            keys = keys[MOST_KEYS:]
            await self.connection.read_blocks(
                (
                    self.local[slot * BLOCK : slot * BLOCK + BLOCK],
                    self.remote[block * BLOCK : block * BLOCK + BLOCK],
                )
                for slot, (_, block, _) in enumerate(found)
            )
            for slot, (key, _, use) in enumerate(found):
                block = bytes(self.local[slot * BLOCK : slot * BLOCK + BLOCK].view)
                value = block[HEADER.size :]
                if HEADER.unpack_from(block) == (use, zlib.crc32(value, use)):
                    values[key] = value
                else:
                    keys.append(key)  # it was evicted, or put again, meanwhile
        return values


async def use(address: str, port: int, rounds: int) -> None:
    async with aiordma.connect(address, port) as connection:
        await connection.send(b"ready")
        client = Client(connection, aiordma.RemoteMemory.unpack(await connection.receive()))
        got = 0
        for _ in range(rounds):
            wanted = random.sample(range(2 * BLOCKS), 100)
            for key, value in (await client.get([f"key {each}" for each in wanted])).items():
                assert value == value_of(int(key.split()[1]))
                got += 1
        print(f"{got} of {100 * rounds} keys were there, each with its value")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server's RDMA interface")
    parser.add_argument("--port", type=int, default=7477)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.serve:
        await serve(arguments.address, arguments.port)
    else:
        await use(arguments.address, arguments.port, arguments.rounds)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
