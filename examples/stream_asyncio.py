"""An asyncio server and client over RDMA: only the functions that open streams are aiordma's.

python examples/stream_asyncio.py 192.0.2.1
"""

import asyncio
import sys

from aiordma.streams import open_connection, start_server


async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line.upper())
    writer.close()


async def main(host: str) -> None:
    async with await start_server(shout, host, 0) as server:
        reader, writer = await open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello\n")
        writer.write_eof()
        print(await reader.read())
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
