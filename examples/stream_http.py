"""A web server, uvicorn, and its client, httpx, over RDMA, of which only the event loop knows.

uvicorn --loop aiordma.streams:new_event_loop --host 192.0.2.1 --app-dir examples stream_http:app
python examples/stream_http.py http://192.0.2.1:8000/rdma
"""

import asyncio
import sys

import httpx

import aiordma.streams


async def app(scope, receive, send):  # type: ignore[no-untyped-def]  # any ASGI application
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello from " + scope["path"].encode()})


async def main(url: str) -> None:
    async with httpx.AsyncClient() as client:
        print((await client.get(url)).text)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=aiordma.streams.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
