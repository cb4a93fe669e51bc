"""Many connections on one queue of receives, topped up when the device says that it runs low.

    python examples/shared_receive.py 127.0.0.1

Memory for receiving is sized by what arrives altogether, not by the number of peers. Server and
clients are one program here, to be short.
"""

import argparse
import asyncio
from collections import Counter
from functools import partial

import aiordma

CLIENTS = 4
MESSAGES = 25
DEPTH = 32
LOW = 8
SIZE = 256


async def talk(address: str, port: int, name: str) -> None:
    async with aiordma.connect(address, port) as connection:
        for number in range(MESSAGES):
            await connection.send(f"{name}: {number}".encode())


async def serve(shared: aiordma.SharedReceiveQueue, listener: aiordma.Listener) -> None:
    memory = shared.register(bytearray(DEPTH * SIZE))
    free = [memory[at : at + SIZE] for at in range(0, len(memory), SIZE)]
    heard: Counter[str] = Counter()
    everything = asyncio.Event()

    def top_up() -> None:
        """Post all the free receives as one chain."""
        blocks, free[:] = free[:], []
        for block, request in zip(blocks, shared.post_srq_recv(blocks), strict=True):
            request.add_done_callback(partial(arrived, block))

    def arrived(block: aiordma.types.MemorySlice, request: aiordma.WorkRequest) -> None:
        if request.exception() is not None:
            return  # it was left over as the queue closed
        completion = request.result()
        connection = shared.connection_of(completion)
        name, _, _ = bytes(block[: completion.byte_len].view).decode().partition(":")
        heard[f"{name} on queue pair {completion.qp_num:#x}"] += 1
        assert connection is not None
        free.append(block)
        if heard.total() == CLIENTS * MESSAGES:
            everything.set()

    async def keep_full() -> None:
        while True:
            await shared.limit(LOW)  # until fewer are left than that
            top_up()

    top_up()
    filler = asyncio.create_task(keep_full())
    connections = [await listener.accept() for _ in range(CLIENTS)]
    await everything.wait()
    filler.cancel()
    for connection in connections:
        await connection.aclose()
    for who, count in sorted(heard.items()):
        print(f"{count} messages of {who}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of an RDMA interface of this machine")
    address = parser.parse_args().address
    async with (
        aiordma.open_shared_receive(address, depth=DEPTH) as shared,
        aiordma.listen(address, 0, shared_receive=shared) as listener,
    ):
        clients = [
            asyncio.create_task(talk(address, listener.port, f"client {number}"))
            for number in range(CLIENTS)
        ]
        await serve(shared, listener)
        await asyncio.gather(*clients)


if __name__ == "__main__":
    asyncio.run(main())
