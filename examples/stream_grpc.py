"""grpclib's server and client over RDMA: python examples/stream_grpc.py 192.0.2.1 50051"""

import asyncio
import sys

from grpclib.client import Channel
from grpclib.health.service import Health
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest
from grpclib.server import Server

import aiordma.streams  # for the event loop; nothing else knows of RDMA


async def main(host: str, port: int) -> None:
    server = Server([Health()])  # gRPC's standard health service
    await server.start(host, port)
    async with Channel(host, port) as channel:
        print(await HealthStub(channel).Check(HealthCheckRequest(), timeout=5))
    server.close()
    await server.wait_closed()
    # Python 3.11 does not wait here for the server's side of the stream; later versions do.
    await asyncio.sleep(0.5)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=aiordma.streams.new_event_loop) as loop:
        loop.run(main(sys.argv[1], int(sys.argv[2])))
