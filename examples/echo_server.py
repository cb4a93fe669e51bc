"""An echo server over RDMA: every message goes back to whom it came from."""

import argparse
import asyncio
import contextlib

import aiordma


async def echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bind", default="0.0.0.0", help="address of an RDMA interface")
    parser.add_argument("--port", type=int, default=7471)
    arguments = parser.parse_args()
    # A client may send the next message before it has the answer to the last one.
    options = aiordma.ConnectionOptions(send_ahead=16)
    async with aiordma.listen(arguments.bind, arguments.port, options=options) as listener:
        print(f"listening on {arguments.bind}:{listener.port}", flush=True)
        await listener.serve(echo)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
