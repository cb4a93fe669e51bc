"""A program with live connections that uses pools of processes: for tests of fork and spawn.

    python -m tests.device.pool_program ADDRESS METHOD [connect]

METHOD is multiprocessing's start method. With "connect", the children connect to the parent. Where
they cannot, they get a ForkError. It prints "done" when all is closed.
"""

import asyncio
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import anyio

import aiordma

SECONDS = 110


def work(number: int) -> tuple[int, int]:
    """Compute, as a child's task that does not use RDMA."""
    return os.getpid(), sum(range(number))


def ask(address: str, port: int, text: bytes) -> bytes:
    """Connect to the parent, and return its answer."""

    async def main() -> bytes:
        with anyio.fail_after(SECONDS):
            async with aiordma.connect(address, port) as connection:
                await connection.send(text)
                return await connection.receive()

    return asyncio.run(main())


async def echo(connection: aiordma.Connection) -> None:
    """Send back what arrives."""
    async for message in connection:
        await connection.send(message)


async def both_ways(connection: aiordma.Connection) -> None:
    """Prove that the parent's own connection works."""
    await connection.send(b"the parent's")
    assert await connection.receive() == b"the parent's"


async def main(address: str, method: str, connects: bool) -> None:
    """Use both kinds of pools beside a connection."""
    context: Any = multiprocessing.get_context(method)
    loop = asyncio.get_running_loop()
    async with (
        aiordma.listen(address, 0) as listener,
        asyncio.TaskGroup() as group,
    ):
        serving = group.create_task(listener.serve(echo))
        async with aiordma.connect(address, listener.port) as connection:
            await both_ways(connection)
            with ProcessPoolExecutor(2, mp_context=context) as pool:
                results = [loop.run_in_executor(pool, work, number) for number in range(10)]
                await both_ways(connection)
                found = await asyncio.gather(*results)
                assert os.getpid() not in {pid for pid, _ in found}
                assert [total for _, total in found] == [work(number)[1] for number in range(10)]
                asking = loop.run_in_executor(pool, ask, address, listener.port, b"a child's")
                (answer,) = await asyncio.gather(asking, return_exceptions=True)
                if connects:
                    assert answer == b"a child's", answer
                else:
                    assert isinstance(answer, aiordma.ForkError), answer
                await both_ways(connection)
            with context.Pool(1) as pool:
                ((pid, total),) = await loop.run_in_executor(None, pool.map, work, [5])
                assert (pid != os.getpid(), total) == (True, 10)
                pool.close()
                pool.join()
            await both_ways(connection)
        serving.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], "connect" in sys.argv[3:]))
    print("done")
