"""Receives of registered memory on a shared receive queue, which are posted without Python."""

import errno
from typing import Any

import pytest

import aiordma
from aiordma.verbs import ProtectionDomain
from tests.device.players import members, one_loop
from tests.devices import ADDRESS
from tests.internals import drain_of, endpoint_of, hub_of

pytestmark = pytest.mark.anyio


@one_loop
async def test_what_the_device_took_of_plain_ones_before_it_refused_is_live() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        room = endpoint_of(shared).raw.max_wr
        endpoint_of(shared)._set_depth(8 * room)
        memory, free = shared.register(bytearray(64)), endpoint_of(shared)._slots.free
        with pytest.raises(aiordma.verbs.PartialPostError) as caught:
            shared.post_srq_recv([memory[:8]] * (4 * room))
        error = caught.value
        assert error.errno == errno.ENOMEM
        assert 4 <= error.refused == len(error.posted) == shared.posted < 4 * room
        assert endpoint_of(shared)._slots.free == free - shared.posted
        assert memory._users == shared.posted
        assert len(hub_of(shared).in_flight) == shared.posted
        async with members(1, shared):
            completion = await error.posted[0]
            assert bytes(memory[: completion.byte_len].view) == b"first"
            assert shared.posted == error.refused - 1


@one_loop
async def test_plain_receives_are_posted_with_one_call_and_their_slots_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        memory = shared.register(bytearray(64))
        requests = shared.post_srq_recv([memory[:32], memory[32:]])
        general: list[object] = []
        post_packed = endpoint_of(shared).raw._post_packed

        def counted(receives: Any) -> Any:
            general.append(receives)
            return post_packed(receives)

        monkeypatch.setattr(endpoint_of(shared).raw, "_post_packed", counted)
        async with members(1, shared) as (clients, servers):
            await requests[0]
            for number in range(20):
                before = len(general) + drain_of(shared).crossings
                requests += shared.post_srq_recv([memory[:32], memory[32:]])
                assert len(general) + drain_of(shared).crossings == before + 1
                with pytest.raises(aiordma.QueueFullError, match="2 receives, and 1 of 4"):
                    shared.post_srq_recv([memory[:8], memory[8:16]])
                for i in range(2):
                    await clients[0].send(b"%d" % (2 * number + i))
                    completion = await requests[2 * number + i + 1]
                    assert shared.connection_of(completion) is servers[0]
        assert not general
        assert shared.posted == 1
        assert endpoint_of(shared)._slots.free == 3
        assert memory._users == 1


@one_loop
async def test_one_that_is_not_plain_takes_the_others_the_general_way() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4, max_sge=2) as shared:
        memory, other = shared.register(bytearray(64)), bytearray(8)
        for bad, error in ((b"read-only", TypeError), ([memory[:1]] * 3, ValueError)):
            with pytest.raises(error):
                shared.post_srq_recv([memory[:8], memory[8:16], bad])
            assert (shared.posted, endpoint_of(shared)._slots.free, memory._users) == (0, 4, 0)
        requests = shared.post_srq_recv([memory[:8], other, [memory[8:12], memory[12:16]]])
        assert (shared.posted, endpoint_of(shared)._slots.free) == (3, 1)
        async with members(1, shared):
            await requests[0]
        assert bytes(memory[:5].view) == b"first"
        assert (shared.posted, endpoint_of(shared)._slots.free) == (2, 2)


@one_loop
async def test_memory_that_will_not_do_is_refused() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        hub, good = hub_of(shared), shared.register(bytearray(8))
        unwritable = aiordma.MemoryRegion(hub.domain, bytearray(8), aiordma.Access.REMOTE_READ)
        elsewhere = ProtectionDomain(hub.context)
        strange = aiordma.MemoryRegion(elsewhere, bytearray(8))
        gone = aiordma.MemoryRegion(hub.domain, bytearray(8))
        closed = gone[:]
        gone.close()
        for part, error, message in (
            (unwritable[:], TypeError, "LOCAL_WRITE"),
            (strange[:], ValueError, "another protection domain"),
            (closed, aiordma.ClosedError, "closed"),
        ):
            with pytest.raises(error, match=message):
                shared.post_srq_recv([good[:], part])
        assert (shared.posted, endpoint_of(shared)._slots.free, good._users) == (0, 4, 0)
        for resource in (unwritable, strange, elsewhere):
            resource.close()


@pytest.mark.promise("A connection's end flushes no shared receive")
@one_loop
async def test_closing_ends_plain_receives_and_lets_go_of_their_memory() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        memory = aiordma.MemoryRegion(hub_of(shared).domain, bytearray(64))
        requests = shared.post_srq_recv([memory[:32], memory[32:]])
        assert memory._users == 2
        in_flight = hub_of(shared).in_flight
        await shared.aclose()
        for request in requests:
            with pytest.raises(aiordma.FlushedError):
                await request
        assert (memory._users, len(in_flight), endpoint_of(shared)._slots.free) == (0, 0, 4)
        with pytest.raises(aiordma.ClosedError):
            shared.post_srq_recv([memory[:]])
        memory.close()
