"""Rails: several connections to one peer, over which blocks are spread."""

import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Blocks
from tests.device.players import REMOTE, one_loop
from tests.devices import ADDRESS

pytestmark = pytest.mark.anyio

SIZE = 256
COUNT = 300
BYTES = SIZE * COUNT


class World:
    """A peer's memory, its connections, and rails to them."""

    def __init__(self, rails: aiordma.Rails, peers: list[aiordma.Connection]) -> None:
        self.rails = rails
        self.peers = peers
        self.here = bytearray(random.Random(1).randbytes(BYTES))
        self.there = bytearray(BYTES)
        self.places = random.Random(2).sample(range(COUNT), COUNT)

    def blocks(self) -> list[Blocks]:
        """Return all blocks, for each connection, shuffled."""
        ours = [SIZE * i for i in range(COUNT)]
        theirs = [SIZE * place for place in self.places]
        local = self.rails.register(self.here)
        remote = [each.register(self.there, REMOTE).remote() for each in self.peers]
        return [Blocks(*pair, ours, theirs, SIZE) for pair in zip(local, remote, strict=True)]

    def check(self) -> None:
        """Compare every byte."""
        for i, place in enumerate(self.places):
            here = self.here[i * SIZE : (i + 1) * SIZE]
            assert self.there[place * SIZE : (place + 1) * SIZE] == here


@asynccontextmanager
async def world(count: int, **options: Any) -> AsyncIterator[World]:
    peers: list[aiordma.Connection] = []
    async with aiordma.listen(ADDRESS, 0, domain="each") as listener:

        async def accept() -> None:
            while len(peers) < count:
                peers.append(await listener.accept())

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            rails = await aiordma.open_rails([(ADDRESS, listener.port)] * count, **options)
        async with rails:
            yield World(rails, peers)
        for peer in peers:
            await peer.aclose()


async def test_blocks_are_spread_over_the_rails() -> None:
    async with world(3) as each:
        found: list[int] = []
        assert len(each.rails.connections) == 3
        blocks = each.blocks()
        await each.rails.write_blocks(blocks, progress=found.append)
        each.check()
        assert max(found) == BYTES
        used = [connection.statistics().bytes_sent for connection in each.rails.connections]
        assert sum(used) == BYTES
        assert all(used)
        each.here[:] = bytes(BYTES)
        await each.rails.read_blocks(blocks)
        each.check()
        assert any(each.here)
        assert each.rails.broken == {}


@pytest.mark.parametrize("who", ["ours", "the peer's"])
async def test_the_others_go_on_when_a_rail_breaks(
    who: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(3, options=aiordma.ConnectionOptions(max_send_wr=4)) as each:
        first = each.rails.connections[0] if who == "ours" else each.peers[0]
        blocks = each.blocks()
        with caplog.at_level(logging.WARNING, "aiordma"):
            async with anyio.create_task_group() as group:
                group.start_soon(each.rails.write_blocks, blocks)
                while not first.statistics().bytes_sent and who == "ours":
                    await anyio.lowlevel.checkpoint()
                await first.aclose()
            await each.rails.write_blocks(blocks)  # the broken one is not used
        each.check()
        assert list(each.rails.broken) == [each.rails.connections[0]]
        (error,) = each.rails.broken.values()
        assert isinstance(error, aiordma.RdmaError)
        assert [text for text in caplog.messages if "2 rails go on" in text] != []
        caplog.clear()


async def test_what_a_broken_rail_had_completed_is_moved_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On siw, a complete WRITE may not have arrived."""
    async with world(2, options=aiordma.ConnectionOptions(max_send_wr=4)) as each:
        first, second = each.rails.connections
        found: list[int] = []

        def close_first(completed: int) -> None:
            found.append(completed)
            if first.statistics().bytes_sent > BYTES // 8 and not closing:
                closing.append(True)
                group.start_soon(first.aclose)

        closing: list[bool] = []
        async with anyio.create_task_group() as group:
            await each.rails.write_blocks(each.blocks(), progress=close_first)
        each.check()
        assert list(each.rails.broken) == [first]
        assert second.statistics().bytes_sent == BYTES
        assert found[-1] == BYTES
        caplog.clear()


async def test_without_rails_the_error_is_the_last_one_s(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2) as each:
        blocks = each.blocks()
        for connection in each.rails.connections:
            await connection.aclose()
        for _ in range(2):
            with pytest.raises(aiordma.ClosedError):
                await each.rails.write_blocks(blocks)
        assert len(each.rails.broken) == 2
        caplog.clear()


@one_loop
async def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"open_rails\(\): addresses: none"):
        await aiordma.open_rails([])
    with pytest.raises(ValueError, match=r"open_rails\(\): 1 sources and 2 addresses"):
        await aiordma.open_rails([(ADDRESS, 1)] * 2, sources=[None])
    with pytest.raises(aiordma.RejectedError):
        await aiordma.open_rails([(ADDRESS, 1)] * 2)
    async with world(2) as each:
        blocks = each.blocks()
        with pytest.raises(ValueError, match=r"write_blocks\(\): blocks for 1 connections"):
            await each.rails.write_blocks(blocks[:1])
        fewer = Blocks(blocks[1].local, blocks[1].remote, [0], [0], SIZE)
        with pytest.raises(ValueError, match=r"read_blocks\(\): \[1, 300\] blocks"):
            await each.rails.read_blocks([blocks[0], fewer])
        closed = each.rails.register(bytearray(SIZE))
        whole = [Blocks(part[:], blocks[0].remote, [0], [0], SIZE) for part in closed]
        for region in closed:
            region.close()
        with pytest.raises(aiordma.ClosedError):
            await each.rails.write_blocks(whole)
        outside = [Blocks(part.local, part.remote, [BYTES], [0], 1) for part in blocks]
        with pytest.raises(ValueError, match="out of bounds"):
            await each.rails.write_blocks(outside)
        assert each.rails.broken == {}
