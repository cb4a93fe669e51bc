"""Lend one large region to many clients, which READ it while the server's program does nothing.

    python examples/lending_library.py --serve 127.0.0.1      # one terminal
    python examples/lending_library.py 127.0.0.1              # another, any number of times

The server registers its memory once, in a domain, and every connection of the domain uses the same
region. The clients can read it, and nothing else: what the server registers for one connection is
in another domain.
"""

import argparse
import asyncio
import contextlib
import mmap
import time

import aiordma
from aiordma import Access

MIB = 1 << 20
PAGE = b"page %05d of the library. "


def library(size: int) -> mmap.mmap:
    """Memory to lend: each page begins with its number."""
    memory = mmap.mmap(-1, size)
    for number in range(size // mmap.PAGESIZE):
        memory.seek(number * mmap.PAGESIZE)
        memory.write(PAGE % number)
    return memory


async def serve(address: str, port: int, size: int) -> None:
    async with aiordma.open_domain(address) as domain:
        started = time.perf_counter()
        # Registered once, for as long as the domain is open; not once per client.
        region = domain.register(library(size), Access.REMOTE_READ)
        took = time.perf_counter() - started
        print(f"{size // MIB} MiB were registered in {took * 1000:.0f} ms", flush=True)

        async def lend(connection: aiordma.Connection) -> None:
            await connection.receive()  # on iWARP, the side that connected sends first
            await connection.send(region.remote().pack())
            async for _ in connection:  # until the client disconnects
                pass
            print(f"{connection.peer_address} has left", flush=True)

        async with aiordma.listen(address, port, domain=domain) as listener:
            print(f"listening on {address}:{listener.port}", flush=True)
            await listener.serve(lend)


async def read_pages(address: str, port: int, first: int) -> None:
    """One client: read every eighth page."""
    async with aiordma.connect(address, port) as connection:
        await connection.send(b"ready")
        remote = aiordma.RemoteMemory.unpack(await connection.receive())
        numbers = range(first, remote.length // mmap.PAGESIZE, 8)
        for number in numbers:
            at = number * mmap.PAGESIZE
            expected = PAGE % number
            assert await connection.read_bytes(remote[at : at + len(expected)]) == expected
        print(f"client {first} read {len(numbers)} of the pages")


async def use(address: str, port: int) -> None:
    await asyncio.gather(*(read_pages(address, port, first) for first in range(8)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server's RDMA interface")
    parser.add_argument("--port", type=int, default=7474)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--mib", type=int, default=16, help="size of the server's region")
    arguments = parser.parse_args()
    if arguments.serve:
        await serve(arguments.address, arguments.port, arguments.mib * MIB)
    else:
        await use(arguments.address, arguments.port)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
