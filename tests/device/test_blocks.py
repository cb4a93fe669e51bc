"""Blocks: any number of pieces of registered memory, moved by one await."""

import asyncio
import gc
import logging
import random
import warnings
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest

import aiordma
from aiordma import Blocks, RemoteMemory
from tests.device.players import OWN_RECEIVES, REMOTE, Outcome, both_ways, connected, one_loop
from tests.devices import DEVICE
from tests.internals import DeviceHub, free_sends, hub_of

pytestmark = pytest.mark.anyio

SIZE = 512
COUNT = 200


class Memory:
    """Registered memory of both ends: `theirs` describes the server's for the client."""

    def __init__(
        self, client: aiordma.Connection, server: aiordma.Connection, size: int = SIZE * COUNT
    ) -> None:
        self.here = bytearray(random.Random(1).randbytes(size))
        self.there = bytearray(random.Random(2).randbytes(size))
        self.ours = client.register(self.here)
        self.theirs = server.register(self.there, REMOTE).remote()

    def pairs(self, places: Sequence[int]) -> list[tuple[aiordma.types.MemorySlice, RemoteMemory]]:
        """Return blocks: those at 0, 1, ... here, and at `places` there."""
        return [
            (self.ours[i * SIZE : (i + 1) * SIZE], self.theirs[at * SIZE : (at + 1) * SIZE])
            for i, at in enumerate(places)
        ]


def shuffled() -> list[int]:
    """Return places, no two of which are neighbours in both memories."""
    places = list(range(COUNT))
    random.Random(3).shuffle(places)
    return places


def at(memory: bytearray, place: int) -> bytes:
    return bytes(memory[place * SIZE : (place + 1) * SIZE])


async def run(transfer: aiordma.types.BlockTransfer) -> None:
    """Await a transfer in a task."""
    await transfer


async def test_a_transfer_is_a_coroutine() -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        async with anyio.create_task_group() as group:
            group.start_soon(client.write_blocks, memory.pairs(shuffled()))
        client.read_blocks(memory.pairs(range(4))).close()


# -- what is moved --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4, 64])
async def test_more_blocks_than_slots_arrive_at_their_places(depth: int) -> None:
    options = aiordma.ConnectionOptions(max_send_wr=depth)
    async with connected(client={"options": options}) as (client, server):
        memory, places = Memory(client, server), shuffled()
        transfer = client.write_blocks(memory.pairs(places))
        assert (transfer.total_bytes, transfer.completed_bytes) == (0, 0)
        await transfer
        assert transfer.total_bytes == transfer.completed_bytes == SIZE * COUNT
        assert all(at(memory.there, place) == at(memory.here, i) for i, place in enumerate(places))
        assert free_sends(client) == depth

        before = bytes(memory.there)
        random.Random(4).shuffle(places)
        await client.read_blocks(memory.pairs(places))
        assert bytes(memory.there) == before
        assert all(at(memory.here, i) == at(memory.there, place) for i, place in enumerate(places))
        assert free_sends(client) == depth
        await both_ways(client, server)


class Tensor:
    """Numbers without a buffer, as torch's."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def tolist(self) -> list[int]:
        return self._values


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        np.array,
        lambda values: array("q", values),
        lambda values: np.array(values, "i4"),
        lambda values: np.array(values, ">i8"),
        Tensor,
    ],
)
async def test_offsets_name_blocks_of_one_memory(kind: Any) -> None:
    async with connected() as (client, server):
        memory, places = Memory(client, server), shuffled()
        ours = kind([SIZE * i for i in range(COUNT)])
        theirs = kind([SIZE * place for place in places])
        lengths = kind([SIZE - i for i in range(COUNT)])
        old = [at(memory.there, place) for place in places]
        await client.write_blocks(Blocks(memory.ours, memory.theirs, ours, theirs, lengths))
        for i, place in enumerate(places):
            length = SIZE - i
            assert at(memory.there, place) == at(memory.here, i)[:length] + old[i][length:]
        await client.read_blocks(Blocks(memory.ours[:], memory.theirs, ours, theirs, SIZE))
        assert all(at(memory.here, i) == at(memory.there, place) for i, place in enumerate(places))


async def test_neighbours_are_moved_by_one_request() -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        before = client.statistics().posted_sends
        await client.write_blocks(memory.pairs(range(COUNT)))
        assert client.statistics().posted_sends == before + 1
        assert memory.there == memory.here


async def test_no_bytes_are_moved_by_no_request() -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        before = client.statistics().posted_sends
        await client.write_blocks([])
        await client.read_blocks([])
        await client.write_blocks([(memory.ours[0:0], memory.theirs[0:0])])
        await client.write_blocks(Blocks(memory.ours, memory.theirs, [], [], 8))
        assert client.statistics().posted_sends == before


async def test_blocks_longer_than_a_message_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    # The device's own limit is 1 or 2 GiB.
    monkeypatch.setattr(DeviceHub, "message_limit", lambda *_: 700)
    async with connected() as (client, server):
        memory = Memory(client, server)
        before = client.statistics().posted_sends
        await client.write_blocks([(memory.ours[:5000], memory.theirs[100:5100])])
        assert memory.there[100:5100] == memory.here[:5000]
        assert client.statistics().posted_sends == before + 8


@pytest.mark.capability("immediate")
async def test_immediate_data_arrives_after_all_blocks() -> None:
    async with connected() as (client, server):
        memory, places = Memory(client, server), shuffled()
        found: list[tuple[int | None, bool]] = []

        async def receive() -> None:
            for _ in range(2):
                message = await server.receive_message()
                arrived = all(
                    at(memory.there, place) == at(memory.here, i) for i, place in enumerate(places)
                )
                found.append((message.immediate, arrived))

        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            await client.write_blocks(memory.pairs(places), immediate=7)
            await client.write_blocks([], immediate=2**32 - 1)
        assert found == [(7, True), (2**32 - 1, True)]


async def test_progress_grows_to_all_bytes() -> None:
    async with connected() as (client, server):
        memory, found = Memory(client, server), list[int]()
        await client.write_blocks(memory.pairs(shuffled()), progress=found.append)
        assert found == sorted(found)
        assert found[-1] == SIZE * COUNT
        assert len(found) > 2


async def test_what_progress_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: int) -> None:
        raise LookupError("of the program's")

    async with connected() as (client, server):
        memory, places = Memory(client, server), shuffled()
        with caplog.at_level(logging.ERROR, "aiordma"):
            await client.write_blocks(memory.pairs(places), progress=fail)
        assert "the progress callback of" in caplog.text
        assert "of the program's" in caplog.text
        caplog.clear()
        assert all(at(memory.there, place) == at(memory.here, i) for i, place in enumerate(places))


# -- beside others --------------------------------------------------------------------------------


async def test_transfers_share_the_queue_with_each_other_and_with_messages() -> None:
    options = aiordma.ConnectionOptions(max_send_wr=4)
    async with connected(client={"options": options}) as (client, server):
        memory, places = Memory(client, server), shuffled()
        pairs, rounds = memory.pairs(places), 20

        async def echo() -> None:
            for _ in range(rounds):
                await server.send(await server.receive())

        async def ask() -> None:
            for i in range(rounds):
                await client.send(b"%d" % i)
                assert await client.receive() == b"%d" % i

        async with anyio.create_task_group() as group:
            for part in range(4):
                group.start_soon(run, client.write_blocks(pairs[part::4]))
            group.start_soon(echo)
            group.start_soon(ask)
        assert all(at(memory.there, place) == at(memory.here, i) for i, place in enumerate(places))
        assert free_sends(client) == 4


@pytest.mark.capability("rnr")
async def test_a_full_queue_is_waited_for() -> None:
    options = aiordma.ConnectionOptions(max_send_wr=2)
    async with connected(client={"options": options}, server=OWN_RECEIVES) as (client, server):
        memory = Memory(client, server)
        messages = [client.post_send(b"1"), client.post_send(b"2")]  # the peer has no receive yet
        transfer = client.write_blocks(memory.pairs(shuffled()))
        async with anyio.create_task_group() as group:
            group.start_soon(run, transfer)
            await anyio.sleep(0.05)
            receives = [server.post_recv(bytearray(1)) for _ in range(2)]
        for request in messages + receives:
            await request
        assert transfer.completed_bytes == SIZE * COUNT


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.promise("A buffer is held until its request completes")
async def test_a_cancelled_transfer_posts_no_more_and_holds_what_is_in_flight() -> None:
    options = aiordma.ConnectionOptions(max_send_wr=4)
    async with connected(client={"options": options}) as (client, server):
        memory, places = Memory(client, server), shuffled()
        transfer = client.write_blocks(memory.pairs(places))
        async with anyio.create_task_group() as group:
            group.start_soon(run, transfer)
            while not transfer.total_bytes:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await client.send(b"behind those in flight")
        assert await server.receive() == b"behind those in flight"
        done = transfer.completed_bytes
        assert done < transfer.total_bytes == SIZE * COUNT
        assert done % SIZE == 0
        assert [at(memory.there, place) for place in places[: done // SIZE]] == [
            at(memory.here, i) for i in range(done // SIZE)
        ]
        memory.ours.close()  # nothing holds it
        assert free_sends(client) == 4
        with pytest.raises(RuntimeError, match="already awaited"):
            await transfer
        await both_ways(client, server)


@pytest.mark.capability("named_refusals")
async def test_a_refused_access_ends_the_transfer_with_its_error() -> None:
    async with connected() as (client, server):
        memory, places = Memory(client, server), shuffled()
        pairs = memory.pairs(places)
        beyond = RemoteMemory(memory.theirs.address + SIZE * COUNT - 1, SIZE, memory.theirs.rkey)
        pairs[100] = (pairs[100][0], beyond)
        transfer = client.write_blocks(pairs)
        with pytest.raises(aiordma.RemoteAccessError):
            await transfer
        assert transfer.completed_bytes <= 100 * SIZE
        with pytest.raises(aiordma.RdmaError):
            await client.write_blocks(pairs)
        gc.collect()
        memory.ours.close()


async def test_the_peer_s_end_ends_the_transfer() -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        outcome, transfer = Outcome(), client.read_blocks(memory.pairs(shuffled()) * 20)
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.of, lambda: transfer)
            while not transfer.completed_bytes:
                await anyio.lowlevel.checkpoint()
            group.start_soon(server.aclose)
        has_moved_all = transfer.completed_bytes == transfer.total_bytes
        assert (outcome.error is None) == has_moved_all
        assert has_moved_all or isinstance(outcome.error, aiordma.RdmaError)
        memory.ours.close()


async def test_our_own_end_ends_the_transfer() -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        outcome, transfer = Outcome(), client.write_blocks(memory.pairs(shuffled()) * 20)
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.of, lambda: transfer)
            while not transfer.completed_bytes:
                await anyio.lowlevel.checkpoint()
            await client.aclose()
        # siw fails what is posted while it closes (LocalQueuePairError).
        usual = (aiordma.FlushedError, aiordma.ClosedError)
        assert isinstance(outcome.error, aiordma.RdmaError if DEVICE == "siw0" else usual)
        assert transfer.completed_bytes < transfer.total_bytes


# -- arguments ------------------------------------------------------------------------------------


@one_loop
@pytest.mark.promise("Invalid arguments raise before any C call")
@pytest.mark.parametrize("call", ["write_blocks", "read_blocks"])
async def test_a_block_that_cannot_be_moved_is_named_and_none_is_posted(call: str) -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        region = client.register(bytearray(SIZE))
        closed = region[:]
        region.close()
        strange = server.register(bytearray(SIZE))
        good = memory.pairs(range(4))
        local, remote = good[3]
        wrong: list[tuple[object, type[Exception], str]] = [
            ((bytearray(SIZE), remote), TypeError, r"blocks\[2\], local=.*slice of registered"),
            ((local, None), TypeError, r"blocks\[2\], remote=None"),
            ((local, remote[:5]), ValueError, r"blocks\[2\]: local has 512 bytes, and remote 5"),
            (local, TypeError, r"blocks\[2\]=.*a tuple of local and remote memory"),
            ((local, remote, 1), TypeError, r"blocks\[2\]=.*a tuple"),
            ((closed, remote), aiordma.ClosedError, "closed"),
        ]
        if strange.domain is not memory.ours.domain:
            wrong.append(((strange[:], remote), ValueError, "another"))
        before = client.statistics().posted_sends
        for pair, error, text in wrong:
            blocks: Any = [*good[:2], pair, *good[:2]]
            with pytest.raises(error, match=text):
                await getattr(client, call)(blocks)
        for blocks in (None, 5, good[0][0]):
            with pytest.raises(TypeError, match=rf"{call}\(\): blocks"):
                await getattr(client, call)(blocks)
        with pytest.raises(TypeError, match=rf"{call}\(\): progress=5"):
            await getattr(client, call)(good, progress=5)
        assert client.statistics().posted_sends == before
        memory.ours.close()  # nothing of them is held
        await both_ways(client, server)


@one_loop
@pytest.mark.parametrize(
    ("ours", "theirs", "lengths", "text"),
    [
        ([0, SIZE * COUNT], [0, 0], 1, "block 1: 1 bytes at 102400 of the 102400 bytes of local"),
        ([0, 0], [0, SIZE * COUNT - 7], 8, "block 1: 8 bytes at 0 .*102393 of the 102400 of"),
        (np.array([0, -1]), [0, 0], 1, "block 1: 1 bytes at -1 "),
        ([0, 2**63 - 1], [0, 0], 2**63 - 1, "block 0: 9223372036854775807 bytes"),
        ([0], [0, 0], 1, "1 local_offsets, 2 remote_offsets and 1 lengths"),
        ([0, 0], [0, 0], [1], "2 local_offsets, 2 remote_offsets and 1 lengths"),
        ([0, -1], [0, 0], 1, "local_offsets=-1 is not in"),
        ([0, 0], [0, 0], -1, "lengths=-1 is not in"),
    ],
)
async def test_offsets_out_of_bounds_are_named(
    ours: Any, theirs: Any, lengths: Any, text: str
) -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        before = client.statistics().posted_sends
        with pytest.raises(ValueError, match=text):
            await client.write_blocks(Blocks(memory.ours, memory.theirs, ours, theirs, lengths))
        for wrong in ("abc", 1.5, [0.5], object(), None):
            with pytest.raises(TypeError, match=r"write_blocks\(\): local_offsets"):
                await client.write_blocks(
                    Blocks(memory.ours, memory.theirs, wrong, [0], 1)  # type: ignore[arg-type]
                )
        assert client.statistics().posted_sends == before
        memory.ours.close()


@one_loop
async def test_read_only_memory_is_not_read_into() -> None:
    async with connected() as (client, server):
        memory = Memory(client, server)
        fixed = client.register(b"f" * SIZE)
        with pytest.raises(TypeError, match=r"read_blocks\(\): blocks\[0\].*LOCAL_WRITE"):
            await client.read_blocks([(fixed[:], memory.theirs[:SIZE])])
        await client.write_blocks([(fixed[:], memory.theirs[:SIZE])])
        assert at(memory.there, 0) == b"f" * SIZE
        assert hub_of(client).in_flight


@one_loop
async def test_pairs_of_other_classes_are_moved() -> None:
    class Pair(NamedTuple):
        local: aiordma.types.MemorySlice
        remote: RemoteMemory

    async with connected() as (client, server):
        memory = Memory(client, server)
        await client.write_blocks([Pair(*memory.pairs([3])[0])])
        assert at(memory.there, 3) == at(memory.here, 0)


@pytest.mark.promise("Closing leaves nothing open")
@pytest.mark.one_kernel_device
def test_a_loop_that_stops_in_a_transfer_leaves_nothing_registered() -> None:
    """Without a task that could end it: the connection's end gives the regions back."""
    loop = asyncio.new_event_loop()
    tasks: list[Any] = []

    async def begin() -> None:
        options = aiordma.ConnectionOptions(max_send_wr=2)
        ends = connected(client={"options": options, "domain": "each"})
        client, server = await ends.__aenter__()
        memory = Memory(client, server)
        tasks.append((asyncio.ensure_future(client.write_blocks(memory.pairs(shuffled()))), ends))
        while not client.statistics().bytes_sent:
            await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.run_until_complete(begin())
        loop.close()
        tasks.clear()
        gc.collect()
