"""A program: move blocks over two devices, take one of them away, and compare every byte.

It prints, as JSON, the classes of the error of each broken rail, and what the rail that is left has
moved since.
"""

import json
import random
import sys
from contextlib import AsyncExitStack
from functools import partial

import anyio

import aiordma
from aiordma import Blocks

from .links import start
from .transfers import REMOTE

SECONDS = 60.0
"""The time within which all has to end."""

SIZE = 1000
COUNT = 200
STRIDE = 2 * SIZE
"""In the peer's memory, so that no blocks are neighbours."""


async def main(own: str, server: str, client: str, cut: str) -> None:
    """Run it.

    Args:
        own: the address of the device that stays.
        server, client: the addresses of both ends of the wire.
        cut: a shell command, which takes away the wire or the client's device.
    """
    here, there = bytearray(COUNT * SIZE), bytearray(COUNT * STRIDE)
    ours, theirs = range(0, len(here), SIZE), range(0, len(there), STRIDE)
    seed = random.Random(1)
    peers: list[aiordma.Connection] = []
    async with AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(aiordma.listen(address, 0, keepalive=1.0))
            for address in (own, server)
        ]

        async def accept() -> None:
            for listener in listeners:
                peers.append(await stack.enter_async_context(await listener.accept()))

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            addresses = [(own, listeners[0].port), (server, listeners[1].port)]
            sources = [None, (client, 0)]
            rails = await aiordma.open_rails(addresses, sources=sources, peer_timeout=2.0)
        await stack.enter_async_context(rails)
        stays, goes = rails.connections
        assert stays.device_name != goes.device_name
        for each, peer in zip(rails.connections, peers, strict=True):
            await each.send(b"alive")  # on iWARP, the side that connected sends first
            await peer.receive()
        remotes = [each.register(there, REMOTE).remote() for each in peers]
        blocks = [
            Blocks(local, remote, ours, theirs, SIZE)
            for local, remote in zip(rails.register(here), remotes, strict=True)
        ]

        async def move() -> None:
            """Move other bytes, there and back, and compare them."""
            here[:] = sent = seed.randbytes(len(here))
            await rails.write_blocks(blocks)
            if b"".join(there[place : place + SIZE] for place in theirs) != sent:
                raise ValueError("the bytes that were written differ")
            here[:] = bytes(len(here))
            await rails.read_blocks(blocks)
            if here != sent:
                raise ValueError("the bytes that were read differ")

        moves = 0
        with anyio.move_on_after(SECONDS) as limit:
            await move()
            assert goes.statistics().bytes_sent, "its rail moved nothing"
            process = start(cut)
            while not rails.broken:
                await move()
                moves += 1
            await peers[1].ended()  # no WRITE of it is late then
            before = stays.statistics().bytes_sent
            await move()
        if limit.cancelled_caught:
            states = [(each, each.statistics()) for each in (stays, goes, *peers)]
            raise TimeoutError(f"{moves} moves; the cut: {process.poll()}; {rails!r}; {states}")
    broken = {
        rails.connections.index(each): [kind.__name__ for kind in type(error).__mro__]
        for each, error in rails.broken.items()
    }
    print(json.dumps({"broken": broken, "moved": stays.statistics().bytes_sent - before}))


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:]))
