"""READ memory that its owner updates, and know whether the READ returned one version.

    python examples/read_versions.py 127.0.0.1

The owner counts in two numbers around its data: it adds 1 to the first one before an update, and to
the second one afterwards. The reader READs the second number, then the data, then the first one. If
the two are equal, no update was in progress or began meanwhile. Else it READs again.

This is a sequence lock. The three READs are awaited one after the other: the bytes of one READ have
no order. The owner's stores become visible in their order on x86. On other processors, put a memory
barrier between them.
"""

import argparse
import asyncio
import threading
import time

import numpy as np

import aiordma
from aiordma import Access

BEGUN, ENDED, DATA = slice(0, 8), slice(8, 16), slice(64, None)
"""Where the two numbers and the data are in the owner's memory."""


def update(memory: np.ndarray, rest: float, stop: threading.Event) -> None:
    """The owner's thread: each update writes one number to all of the data."""
    begun, ended = memory[BEGUN].view(np.uint64), memory[ENDED].view(np.uint64)
    data = memory[DATA].view(np.uint64)
    while not stop.is_set():
        begun[0] += 1
        data[:] = begun[0]
        ended[0] += 1
        time.sleep(rest)


async def own(connection: aiordma.Connection, memory: np.ndarray) -> None:
    region = connection.register(memory, Access.REMOTE_READ)
    await connection.receive()  # on iWARP, the side that connected sends first
    await connection.send(region.remote().pack())
    await connection.ended()


async def read(address: str, port: int, count: int) -> None:
    mixed = consistent = 0
    async with aiordma.connect(address, port) as connection:
        await connection.send(b"ready")
        remote = aiordma.RemoteMemory.unpack(await connection.receive())
        local = np.empty(remote.length, np.uint8)
        data, region = local[DATA].view(np.uint64), connection.register(local)
        while consistent < count:
            for part in (ENDED, DATA, BEGUN):  # each after the one before has completed
                await connection.read(region[part], remote[part])
            if local[ENDED].view(np.uint64)[0] == local[BEGUN].view(np.uint64)[0]:
                assert (data == data[0]).all()
                consistent += 1
            else:
                mixed += not (data == data[0]).all()
            await asyncio.sleep(0.001)
    print(f"{consistent} READs returned one version each")
    print(f"{mixed} READs returned a mixture of versions, and were repeated")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="of this machine's RDMA interface")
    parser.add_argument("--mib", type=int, default=8, help="size of the memory")
    parser.add_argument("--rest", type=float, default=0.02, help="seconds between two updates")
    parser.add_argument("--count", type=int, default=20, help="whole versions to read")
    arguments = parser.parse_args()

    memory, stop = np.zeros(arguments.mib << 20, np.uint8), threading.Event()
    owner = threading.Thread(target=update, args=(memory, arguments.rest, stop))
    owner.start()
    try:
        async with aiordma.listen(arguments.address, 0) as listener:
            reading = asyncio.create_task(read(arguments.address, listener.port, arguments.count))
            async with listener.accept() as connection:
                await own(connection, memory)
            await reading
    finally:
        stop.set()
        owner.join()


if __name__ == "__main__":
    asyncio.run(main())
