"""READ and WRITE a peer's memory while its program does nothing.

    python examples/one_sided.py --serve 127.0.0.1      # one terminal
    python examples/one_sided.py 127.0.0.1              # another

The server lends its memory: it sends a descriptor (address, length, rkey) and waits. The client
reads and writes it directly; the server's CPU has no part in that.
"""

import argparse
import asyncio
import contextlib

import aiordma
from aiordma import Access

SIZE = 4096


async def lend(connection: aiordma.Connection) -> None:
    """The server's side: lend a block of memory, and look at it when the client has left."""
    memory = bytearray(b"." * SIZE)
    region = connection.register(memory, Access.REMOTE_READ | Access.REMOTE_WRITE)
    await connection.receive()  # on iWARP, whoever connected speaks first
    await connection.send(region.remote().pack())
    async for _ in connection:
        pass
    print(f"the client left this behind: {bytes(memory[:24])!r}", flush=True)


async def serve(address: str, port: int) -> None:
    async with aiordma.listen(address, port) as listener:
        print(f"listening on {address}:{listener.port}", flush=True)
        await listener.serve(lend)


async def use(address: str, port: int) -> None:
    """The client's side: write, read back, gather, and pipeline."""
    async with aiordma.connect(address, port) as connection:
        await connection.send(b"ready")
        remote = aiordma.RemoteMemory.unpack(await connection.receive())
        print(f"the server lends {remote}")

        local = connection.register(bytearray(SIZE))
        local[:5].view[:] = b"hello"
        await connection.write(local[:5], remote[:5])
        await connection.read(local[64:72], remote[:8])
        print(f"read back {bytes(local[64:72].view)!r}")

        # Gathered from two places here into one place there; plain bytes will do as well.
        await connection.writev([local[:5], b", from a gather"], remote[:20])

        # Post now, await later: 16 READs in flight at once.
        requests = [
            connection.post_read(local[at : at + 256], remote[at : at + 256])
            for at in range(0, SIZE, 256)
        ]
        done = await asyncio.gather(*requests)
        print(f"{len(done)} pipelined READs brought {sum(wc.byte_len for wc in done)} bytes")
        assert bytes(local[:20].view) == b"hello, from a gather"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of the server's RDMA interface")
    parser.add_argument("--port", type=int, default=7472)
    parser.add_argument("--serve", action="store_true", help="be the server")
    arguments = parser.parse_args()
    await (serve if arguments.serve else use)(arguments.address, arguments.port)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
