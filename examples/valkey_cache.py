"""Valkey over RDMA: a counter, a large value, and messages to subscribers.

pip install 'aiordma[valkey]'; valkey-server --rdma-bind 192.0.2.1 --rdma-port 6379
python examples/valkey_cache.py 192.0.2.1
"""

import asyncio
import sys

from valkey.asyncio import ConnectionPool, Valkey

from aiordma.integrations.valkey import RdmaConnection


async def main(host: str, port: int = 6379) -> None:
    pool = ConnectionPool(connection_class=RdmaConnection, host=host, port=port)
    async with Valkey.from_pool(pool) as client, client.pubsub() as subscriber:
        await client.delete("visits")
        await asyncio.gather(*(client.incr("visits") for _ in range(10)))
        print(int(await client.get("visits")), "visits")
        await client.set("picture", bytes(1 << 20))
        print(len(await client.get("picture")), "bytes")
        await subscriber.subscribe("news")
        await client.publish("news", "hello")
        async for message in subscriber.listen():
            if message["type"] == "message":
                print(message["data"].decode())
                break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
