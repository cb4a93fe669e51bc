"""A web server and its client over RDMA, neither of which knows: uvicorn and httpx.

python examples/stream_http.py 192.0.2.1
"""

import asyncio
import sys

import httpx
import uvicorn

import aiordma.streams
from aiordma.integrations.httpcore import StreamTransport


async def app(scope, receive, send):  # type: ignore[no-untyped-def]  # any ASGI application
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello from " + scope["path"].encode()})


async def main(host: str) -> None:
    server = uvicorn.Server(uvicorn.Config(app, host, 0, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(transport=StreamTransport()) as client:
        print((await client.get(f"http://{host}:{port}/rdma")).text)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=aiordma.streams.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
