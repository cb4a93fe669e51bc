"""Lend memory for one operation, and take it back: memory windows.

    python examples/memory_window.py 127.0.0.1

A registered region lends itself to every peer that learns its rkey, for as long as it is
registered. A window lends a part of it to one connection, is bound and revoked by posting, and
costs no registration. Both sides are one program here, to be short.
"""

import argparse
import asyncio
import logging
from contextlib import suppress

import aiordma
from aiordma import Access


async def lend(connection: aiordma.Connection) -> None:
    memory = bytearray(4096)
    region = connection.register(memory, Access.LOCAL_WRITE | Access.MW_BIND)
    for line in range(3):
        part = region[line * 64 : line * 64 + 64]
        window = await connection.bind(part, Access.REMOTE_WRITE)
        await connection.send(window.remote.pack())
        await connection.receive()  # "done": and until here it was the peer's
        await connection.revoke(window)
        window.close()
        print(f"line {line}: {bytes(part.view).rstrip(bytes(1))!r}", flush=True)
        await connection.send(b"revoked")
    with suppress(aiordma.RdmaError):  # the last WRITE is refused, which ends the connection
        await connection.receive()


async def borrow(address: str, port: int) -> None:
    async with aiordma.connect(address, port) as connection:
        for line in range(3):
            remote = aiordma.RemoteMemory.unpack(await connection.receive())
            text = f"borrowed for line {line}".encode()
            await connection.write(text, remote[: len(text)])
            await connection.send(b"done")
            await connection.receive()  # "revoked": until here it could still write
        try:
            await connection.write(b"once more", remote[:9])
        except (aiordma.RemoteAccessError, aiordma.FlushedError, aiordma.DisconnectedError):
            print("what was taken back is refused", flush=True)


async def main(address: str) -> None:
    async with aiordma.listen(address, 0) as listener:
        client = asyncio.create_task(borrow(address, listener.port))
        async with listener.accept() as connection:
            await lend(connection)
            await client


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # the device's refusal is logged as a warning
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of this machine's RDMA interface")
    asyncio.run(main(parser.parse_args().address))
