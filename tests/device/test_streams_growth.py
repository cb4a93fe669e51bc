"""The rings of a stream grow when they are full several times, and its bytes stay exact."""

import random
from typing import Any

import anyio
import numpy as np
import pytest

import aiordma
from aiordma.streams import Stream
from tests.device.test_streams import streams
from tests.internals import path_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

GROWN = 2 << 20
TOTAL = 6 << 20


DATA = np.arange(TOTAL // 4, dtype=">u4").tobytes()
"""Numbers: a lost, doubled or moved part shows."""


async def send_all(stream: Stream, chance: random.Random) -> None:
    sent = 0
    while sent < TOTAL:
        length = min(chance.randrange(1, 600_000), TOTAL - sent)
        data = DATA[sent : sent + length]
        if chance.random() < 0.2:  # without a copy, and so not from the ring
            region = stream.connection.register(bytearray(data))
            await stream.send(region)
            region.close()
        else:
            await stream.send(data)
        sent += length


async def receive_all(stream: Stream, chance: random.Random) -> None:
    received = 0
    while received < TOTAL:
        if chance.random() < 0.1:
            await anyio.sleep(0.005)  # the ring fills
        data = await stream.receive(chance.randrange(1, 900_000))
        assert data == DATA[received : received + len(data)]
        received += len(data)


async def exchange(ours: Stream, theirs: Stream) -> None:
    """Send in both directions at the same time."""
    async with anyio.create_task_group() as group:
        for number, (one, other) in enumerate(((ours, theirs), (theirs, ours))):
            group.start_soon(send_all, one, random.Random(number))
            group.start_soon(receive_all, other, random.Random(number + 10))


@pytest.mark.promise("Messages arrive whole and in order")
async def test_rings_grow_with_the_traffic() -> None:
    async with streams() as (ours, theirs):
        await exchange(ours, theirs)
        for stream in (ours, theirs):
            with anyio.fail_after(30):
                while not path_of(stream).is_drained:
                    await anyio.sleep(0.01)
            assert path_of(stream).free_bytes == GROWN


async def test_a_given_size_stays() -> None:
    async with streams(buffer_size=1 << 18) as (ours, theirs):
        await exchange(ours, theirs)
        assert path_of(ours).free_bytes <= 1 << 18


async def test_without_memory_the_rings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise aiordma.VerbsCallError(12, "ibv_reg_mr")

    monkeypatch.setattr("aiordma.streams.rsocket.register", refuse)
    async with streams() as (ours, theirs):
        await exchange(ours, theirs)
        assert path_of(ours).free_bytes <= 1 << 18
