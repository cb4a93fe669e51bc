"""Count and lock in a peer's memory, without its program.

    python examples/atomics.py 127.0.0.1

Four clients draw tickets from one counter with fetch-and-add, and take turns at a lock with
compare-and-swap, which the server's device carries out. All are one program here, to be short.
"""

import argparse
import asyncio
import sys

import aiordma
from aiordma import Access

CLIENTS = 4
TICKETS = 8


async def lend(connection: aiordma.Connection, memory: bytearray) -> None:
    access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
    region = connection.register(memory, access)
    start = -region.address % 8  # atomics work on 8 bytes that are aligned to 8
    await connection.send(region[start : start + 24].remote().pack())
    async for _ in connection:
        pass


async def draw(address: str, port: int, client: int) -> list[int]:
    """Draw tickets; and add to the third number with a lock around it."""
    async with aiordma.connect(address, port) as connection:
        remote = aiordma.RemoteMemory.unpack(await connection.receive())
        counter, lock, total = remote[:8], remote[8:16], remote[16:24]
        tickets = [await connection.fetch_add(counter, 1) for _ in range(TICKETS)]

        while await connection.compare_swap(lock, 0, client) != 0:
            pass  # somebody else has it; asking again lets other tasks run
        before = int.from_bytes(await connection.read_bytes(total), sys.byteorder)
        await connection.write((before + sum(tickets)).to_bytes(8, sys.byteorder), total)
        assert await connection.compare_swap(lock, client, 0) == client
        return tickets


async def main(address: str) -> None:
    memory = bytearray(32)
    async with aiordma.listen(address, 0) as listener:
        serving = asyncio.create_task(listener.serve(lambda each: lend(each, memory)))
        drawn = await asyncio.gather(
            *(draw(address, listener.port, number) for number in range(1, CLIENTS + 1))
        )
        serving.cancel()
    tickets = sorted(ticket for each in drawn for ticket in each)
    print(f"{len(tickets)} tickets, each once: {tickets == list(range(CLIENTS * TICKETS))}")
    expected = sum(range(CLIENTS * TICKETS)).to_bytes(8, sys.byteorder)
    print(f"added up under the lock: {expected in bytes(memory)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of this machine's RDMA interface")
    asyncio.run(main(parser.parse_args().address))
