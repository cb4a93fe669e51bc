"""A shared receive queue that reports when it runs low, and changes its depth."""

import errno
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import Outcome, members, one_loop, until
from tests.devices import ADDRESS
from tests.internals import endpoint_of, hub_of

pytestmark = pytest.mark.anyio


def limits_of(shared: aiordma.SharedReceiveQueue, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that the device is given from now on. (Not every device can be asked.)"""
    limits: list[int] = []
    modify = endpoint_of(shared).raw.modify

    def modify_too(*, max_wr: int | None = None, limit: int | None = None) -> None:
        modify(max_wr=max_wr, limit=limit)
        if limit is not None:
            limits.append(limit)

    monkeypatch.setattr(endpoint_of(shared).raw, "modify", modify_too)
    return limits


@pytest.mark.parametrize("plain", [True, False])
async def test_limit_returns_once_fewer_are_posted(
    monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        memory = shared.register(bytearray(64))
        requests = shared.post_srq_recv([memory[:] if plain else memory] * 5)
        told: list[aiordma.verbs.AsyncEventType] = []
        heard = hub_of(shared).on_object_event[endpoint_of(shared).raw.key]

        def hear_too(event: aiordma.verbs.AsyncEventType) -> None:
            told.append(event)
            heard(event)

        hub_of(shared).on_object_event[endpoint_of(shared).raw.key] = hear_too
        async with members(1, shared) as (clients, _):
            await requests[0]
            reached = anyio.Event()

            async def wait() -> None:
                await shared.limit(3)
                reached.set()

            async with anyio.create_task_group() as group:
                limits = limits_of(shared, monkeypatch)
                group.start_soon(wait)
                await until(lambda: limits == [3])
                await clients[0].send(b"four were left, three are")
                await requests[1]
                await anyio.sleep(0.1)
                assert not reached.is_set()
                await clients[0].send(b"two are")
            await until(lambda: bool(told))
            assert told == [aiordma.verbs.AsyncEventType.SRQ_LIMIT_REACHED]
            await shared.limit(3)  # it is so already


async def test_completions_alone_tell_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        memory = shared.register(bytearray(64))
        requests = shared.post_srq_recv([memory[:]] * 4)
        monkeypatch.setattr(
            endpoint_of(shared).raw, "modify", lambda **_: None
        )  # the device is not asked to tell
        async with members(1, shared) as (clients, _):
            await requests[0]
            async with anyio.create_task_group() as group:
                waited = Outcome()
                group.start_soon(waited.of, lambda: shared.limit(3))
                await until(lambda: endpoint_of(shared)._limit is not None)
                await clients[0].send(b"three were left, two are")
            assert waited.error is None
            assert shared.posted == 2


@pytest.mark.promise(
    "Cancellation loses no message and leaves nothing open",
    "A connection's end flushes no shared receive",
)
@one_loop
async def test_a_cancelled_wait_for_the_limit_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        shared.post_srq_recv([bytearray(8)] * 2)
        limits = limits_of(shared, monkeypatch)
        async with anyio.create_task_group() as group:
            group.start_soon(shared.limit, 2)
            await until(lambda: limits == [2])
            group.cancel_scope.cancel()
        assert limits == [2, 0]
        async with anyio.create_task_group() as group:
            again = Outcome()
            group.start_soon(again.of, lambda: shared.limit(1))
            await until(lambda: limits == [2, 0, 1])
            with pytest.raises(aiordma.BusyError):
                await shared.limit(1)
            await shared.aclose()
        assert isinstance(again.error, aiordma.ClosedError)


@one_loop
async def test_a_limit_out_of_range_is_refused() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        for count in (0, 9):
            with pytest.raises(ValueError, match=r"not in 1\.\.8"):
                await shared.limit(count)


# -- the depth ------------------------------------------------------------------------------------


@one_loop
@pytest.mark.capability("srq_resize")
async def test_a_queue_can_be_resized_while_it_is_used() -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        memory = shared.register(bytearray(64))
        shared.post_srq_recv([memory] * 4)
        before = endpoint_of(shared).queue.reserved
        await shared.resize(100)
        assert endpoint_of(shared).queue.reserved == before + 96
        requests = shared.post_srq_recv([memory] * 96)
        async with members(1, shared) as (clients, _):
            for _ in range(99):
                await clients[0].send(b"more")
            await requests[-1]
            await until(lambda: shared.posted == 0)
            grown = endpoint_of(shared).queue.reserved
            await shared.resize(10)
            assert endpoint_of(shared).queue.reserved == grown - 90
            with pytest.raises(aiordma.QueueFullError):
                shared.post_srq_recv([memory] * 11)
            (request,) = shared.post_srq_recv([memory])
            await clients[0].send(b"and works")
            assert (await request).byte_len == 9
        shared.post_srq_recv([memory] * 3)
        with pytest.raises(ValueError, match=r"resize\(\): depth=2 is not in 3\.\."):
            await shared.resize(2)
        with pytest.raises(ValueError, match=r"resize\(\): depth: \d+ more .* are free"):
            await shared.resize(endpoint_of(shared).queue.queue.cqe + 1)


@one_loop
@pytest.mark.capability("srq_resize")
async def test_depth_has_room_for_the_buffers_of_unread_messages() -> None:
    async with (
        await aiordma.open_shared_receive(ADDRESS, buffers=8, buffer_size=64) as shared,
        members(1, shared) as (clients, servers),
    ):
        for _ in range(4):
            await clients[0].send(b"not read yet")
        await until(lambda: shared.posted < 8)
        with pytest.raises(ValueError, match=r"not in 8\.\."):
            await shared.resize(7)
        await shared.resize(8)
        assert await servers[0].receive() == b"first"
        for _ in range(20):
            await clients[0].send(b"one more")
            await servers[0].receive()
        assert servers[0].is_connected


@one_loop
async def test_unsupported_resize_names_the_device(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(**_: int) -> None:
        raise aiordma.VerbsCallError(errno.EOPNOTSUPP, "ibv_modify_srq")

    async with await aiordma.open_shared_receive(ADDRESS, depth=4) as shared:
        if device.lacks("srq_resize") is None:
            # As a device that lacks it.
            monkeypatch.setattr(endpoint_of(shared).raw, "modify", cannot)
        with pytest.raises(aiordma.NotSupportedError, match=rf"{device.name} cannot resize"):
            await shared.resize(8)
        assert shared.depth == 4


@one_loop
async def test_query_reports_the_device_or_is_unsupported(device: Any) -> None:
    async with await aiordma.open_shared_receive(ADDRESS, depth=5, max_sge=2) as shared:
        if device.lacks("srq_query") is None:
            told = endpoint_of(shared).raw.query()
            assert told.max_wr >= 5
            assert told.max_sge >= 2
            assert told.srq_limit == 0
        else:
            with pytest.raises(aiordma.NotSupportedError, match=rf"{device.name} cannot query"):
                endpoint_of(shared).raw.query()


@one_loop
@pytest.mark.capability("srq_resize")
async def test_a_resize_counts_although_the_query_after_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise aiordma.VerbsCallError(errno.ENOMEM, "ibv_query_srq")

    async with await aiordma.open_shared_receive(ADDRESS, depth=8) as shared:
        raw = endpoint_of(shared).raw
        with monkeypatch.context() as patched:
            patched.setattr(raw, "query", fail)
            raw.modify(max_wr=100)
        assert raw.max_wr == 100
        assert raw.query().max_wr >= 100
