"""An echo client over RDMA: says a few things and prints what comes back."""

import argparse
import asyncio
import time

import aiordma


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host", help="address of the server's RDMA interface")
    parser.add_argument("--port", type=int, default=7471)
    parser.add_argument("--count", type=int, default=5)
    arguments = parser.parse_args()
    async with aiordma.connect(arguments.host, arguments.port) as connection:
        print(f"connected to {arguments.host}:{arguments.port} through {connection.device_name}")
        for number in range(arguments.count):
            message = f"hello {number} over RDMA".encode()
            before = time.perf_counter()
            await connection.send(message)
            answer = await connection.receive()
            elapsed = time.perf_counter() - before
            print(f"sent {message!r}, received {answer!r} after {elapsed * 1e6:.0f} us")


if __name__ == "__main__":
    asyncio.run(main())
