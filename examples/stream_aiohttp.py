"""aiohttp's server and client over RDMA: python examples/stream_aiohttp.py 192.0.2.1"""

import asyncio
import sys

import aiohttp.web

import aiordma.streams  # for the event loop; nothing else knows of RDMA


async def hello(request: aiohttp.web.Request) -> aiohttp.web.Response:
    return aiohttp.web.Response(text=f"hello from {request.path}")


async def main(host: str) -> None:
    app = aiohttp.web.Application()
    app.router.add_get("/rdma", hello)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, host, 0).start()
    url = f"http://{host}:{runner.addresses[0][1]}/rdma"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        print(await response.text())
    await runner.cleanup()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=aiordma.streams.new_event_loop) as loop:
        loop.run(main(sys.argv[1]))
