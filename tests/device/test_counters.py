"""Counters: notifications of the peer, which say that what it wrote is there."""

from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Access
from tests.device.players import OWN_RECEIVES, REMOTE, Outcome, both_ways, connected, one_loop

pytestmark = [pytest.mark.anyio, pytest.mark.capability("immediate")]


async def test_notifications_are_counted_and_are_no_messages() -> None:
    async with connected() as (client, server):
        target = server.register(bytearray(8), REMOTE).remote()
        first, second = server.counter(), server.counter()
        assert (first.number, second.number) == (2**32 - 1, 2**32 - 2)
        async with anyio.create_task_group() as group:
            group.start_soon(first.wait, 3)
            await client.write(b"written!", target, immediate=first.number)
            await client.send(b"", immediate=first.number)
            await client.send(b"with bytes", immediate=first.number)
            await client.send(b"", immediate=second.number)
            await client.send(b"", immediate=7)
            await client.write_blocks([], immediate=first.number)
        assert await server.receive_message() == (b"with bytes", first.number, None, None)
        assert (await server.receive_message()).immediate == 7
        await second.wait(1)
        assert (first.count, second.count) == (3, 1)
        await first.wait(3)
        await first.wait(0)
        await both_ways(client, server)


async def test_more_notifications_than_receives_are_counted_without_a_receiver() -> None:
    async with connected(server={"receive_buffers": 4}) as (client, server):
        counter = server.counter()
        for _ in range(50):
            await client.send(b"", immediate=counter.number)
        with anyio.fail_after(30):
            await counter.wait(50)
        await both_ways(client, server)


async def test_a_counter_on_a_shared_receive_queue_counts_its_own_connection() -> None:
    async with connected(server={"shared_receive": 16}) as (client, server):
        counter = server.counter()
        await client.send(b"", immediate=counter.number)
        await counter.wait(1)
        await both_ways(client, server)


@pytest.mark.parametrize("ends", ["the peer's", "ours"])
async def test_the_connection_s_end_ends_the_wait(ends: str) -> None:
    async with connected() as (client, server):
        counter, outcome = server.counter(), Outcome()
        await client.send(b"", immediate=counter.number)
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.of, lambda: counter.wait(2))
            await anyio.sleep(0.05)
            await (client if ends == "the peer's" else server).aclose()
        assert isinstance(outcome.error, aiordma.RdmaError)
        await counter.wait(1)  # those that have arrived stay counted
        with pytest.raises(aiordma.RdmaError):
            await counter.wait(2)
        with pytest.raises(aiordma.RdmaError):
            server.counter()


@pytest.mark.promise("A grant's access ends with its block")
@pytest.mark.parametrize("way", ["timeout", "cancellation", "wrong count"])
async def test_a_wait_in_a_grant_that_does_not_come_about_ends_it(way: str) -> None:
    async with connected() as (client, server):
        memory, counter = bytearray(8), server.counter()
        async with server.grant(memory, Access.REMOTE_WRITE) as grant:
            await client.write(b"in time!", grant.remote, immediate=counter.number)
            await grant.until(counter, 1)
            assert grant.is_active
            assert memory == b"in time!"
            if way == "timeout":
                with pytest.raises(TimeoutError), anyio.fail_after(0.05):
                    await grant.until(counter, 2)
            elif way == "cancellation":
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await grant.until(counter, 2)
            else:
                with pytest.raises(ValueError, match=r"wait\(\): count=-1"):
                    await grant.until(counter, -1)
            assert not grant.is_active
            with pytest.raises(aiordma.RdmaError):
                await client.write(b"too late", grant.remote)
            assert memory == b"in time!"


@one_loop
async def test_a_counter_needs_receives_that_are_posted_for_it() -> None:
    async with connected(server=OWN_RECEIVES) as (_, server):
        with pytest.raises(ValueError, match=r"counter\(\): the program posts"):
            server.counter()


@one_loop
@pytest.mark.parametrize("count", ["1", None, 1.0, True])
async def test_a_count_is_a_whole_number(count: Any) -> None:
    async with connected() as (_, server):
        with pytest.raises(TypeError, match=r"wait\(\): count"):
            await server.counter().wait(count)


@pytest.mark.promise("An object belongs to its event loop")
@pytest.mark.one_kernel_device
@one_loop
async def test_a_misplaced_wait_ends_no_grant() -> None:
    async with connected() as (client, server):
        counter, other = server.counter(), client.counter()
        async with server.grant(bytearray(8), Access.REMOTE_WRITE) as grant:

            def elsewhere() -> None:
                with pytest.raises(aiordma.EventLoopError):
                    anyio.run(grant.until, counter, 1)

            await anyio.to_thread.run_sync(elsewhere)
            with pytest.raises(ValueError, match="it is of another connection"):
                await grant.until(other, 1)
            assert grant.is_active
            await client.write(b"in time!", grant.remote, immediate=counter.number)
            await grant.until(counter, 1)


@pytest.mark.one_kernel_device
@one_loop
async def test_a_counter_belongs_to_its_event_loop() -> None:
    async with connected() as (_, server):
        counter = server.counter()

        def elsewhere() -> None:
            with pytest.raises(aiordma.EventLoopError):
                anyio.run(counter.wait, 1)

        await anyio.to_thread.run_sync(elsewhere)
