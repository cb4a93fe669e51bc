"""grpclib's server and client over RDMA: python examples/stream_grpc.py 192.0.2.1"""

import asyncio
import sys
from types import SimpleNamespace

from grpclib.client import Channel, StreamStreamMethod
from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.server import Server

import aiordma.streams  # for the event loop; nothing else knows of RDMA


class Bytes(CodecBase):  # in place of protobuf's generated classes
    __content_subtype__ = "bytes"
    encode = decode = staticmethod(lambda message, _kind: bytes(message))  # type: ignore


async def shout(stream):  # type: ignore[no-untyped-def]  # any grpclib handler
    async for message in stream:
        await stream.send_message(message.upper())


async def main(host: str) -> None:
    handlers = {"/demo/shout": Handler(shout, Cardinality.STREAM_STREAM, bytes, bytes)}
    server = Server([SimpleNamespace(__mapping__=lambda: handlers)], codec=Bytes())
    await server.start(host, 0)
    port = server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    async with Channel(host, port, codec=Bytes()) as channel:
        call = StreamStreamMethod(channel, "/demo/shout", bytes, bytes)
        print(await call([b"hello", b"rdma"], timeout=5))
    server.close()
    await server.wait_closed()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=aiordma.streams.new_event_loop) as loop:
        loop.run(main(sys.argv[1]))
