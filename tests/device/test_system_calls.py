"""How many system calls a post costs: as many as its driver makes, and none of ours."""

from pathlib import Path

import pytest

from tests.device.players import REMOTE, connected
from tests.devices import BUILT_IN

pytestmark = [pytest.mark.anyio, pytest.mark.loop_and_device]

COUNT = 32

# rxe and siw ring their doorbell by a write to the device's file; the software device has none.
WRITES = 0 if BUILT_IN else 1


def reads_and_writes() -> tuple[int, int]:
    """Return how many of these system calls this thread has made (proc(5); reading it is one)."""
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["syscr"]), int(counts["syscw"])


def difference(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]


async def test_a_post_is_one_doorbell() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(64), REMOTE).remote()
        ours = client.register(bytearray(64))
        await client.write(ours, theirs)
        looking, _ = difference(reads_and_writes(), reads_and_writes())
        before = reads_and_writes()
        requests = [client.post_write(ours[:], theirs) for _ in range(COUNT)]
        reads, writes = difference(before, reads_and_writes())
        assert (reads, writes) == (looking, COUNT * WRITES)
        for request in requests:
            await request


async def test_a_chain_is_one_doorbell() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(64), REMOTE).remote()
        ours = client.register(bytearray(64))
        await client.write(ours, theirs)
        before = reads_and_writes()
        with client.chain() as chain:
            for _ in range(COUNT):
                chain.post_write(ours[:], theirs)
        _, writes = difference(before, reads_and_writes())
        assert writes == WRITES
        for request in chain.requests:
            await request
