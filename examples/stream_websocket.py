"""A WebSocket server, uvicorn, and a client, websockets, over RDMA; only the loop knows of it.
uvicorn --loop aiordma.streams:new_event_loop --host 192.0.2.1 examples.stream_websocket:app
python examples/stream_websocket.py ws://192.0.2.1:8000
"""

import asyncio
import sys

from websockets.asyncio.client import connect

import aiordma.streams


async def app(scope, receive, send):  # type: ignore[no-untyped-def]  # any ASGI application
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"].upper()})


async def main(url: str) -> None:
    async with connect(url, proxy=None) as socket:
        await socket.send("hello")
        print(await socket.recv())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=aiordma.streams.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
