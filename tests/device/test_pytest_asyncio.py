"""The same API as plain asyncio programs use it: gather, wait_for, TaskGroup, cancel()."""

import asyncio
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import (
    OWN_RECEIVES,
    REMOTE,
    connected,
    until,
)
from tests.devices import provider_under_test
from tests.internals import (
    endpoint_of,
    free_sends,
    has_ended,
    identifier_of,
)
from tests.waiting import HeldCalls

pytestmark = [pytest.mark.asyncio, pytest.mark.one_kernel_device, pytest.mark.slow]


async def test_gather_over_work_requests() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        receives = [server.post_recv(bytearray(8)) for _ in range(10)]
        sends = [client.post_send(b"x" * i) for i in range(8)]
        completions = await asyncio.gather(*sends, *receives[:8])
        assert [completion.byte_len for completion in completions[8:]] == list(range(8))


async def test_as_completed_over_work_requests() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(range(64)), REMOTE)
        ours = client.register(bytearray(64))
        reads = [client.post_read(ours[i : i + 8], theirs.remote()[i : i + 8]) for i in (0, 8, 16)]
        seen = set()
        for future in asyncio.as_completed(reads):
            seen.add((await future).wr_id)
        assert seen == {read.wr_id for read in reads}
        assert bytes(ours.view[:24]) == bytes(range(24))


async def test_wait_for_a_receive_loses_no_message() -> None:
    async with connected() as (client, server):
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(server.receive(), 0.02)
        await client.send(b"late")
        assert await asyncio.wait_for(server.receive(), 60) == b"late"


async def test_a_task_group_of_senders_and_a_receiver() -> None:
    # As many receives as messages: iWARP has nothing that would hold up the senders.
    options = {"receive_buffers": 20}
    async with connected(server=options) as (client, server), asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.send(b"%d" % i)) for i in range(20)]
        received = [await server.receive() for _ in tasks]
        assert received == [b"%d" % i for i in range(20)]


@pytest.mark.capability("named_refusals")
async def test_a_failing_request_ends_its_task_group_with_its_error() -> None:
    async with connected() as (client, _):

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(client.receive())
                group.create_task(client.read_bytes(aiordma.RemoteMemory(4096, 8, 1)))

        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert caught.group_contains(aiordma.RemoteAccessError)


# -- task.cancel(), which anyio's shields do not hold off -------------------------------------


def resizable(buffer: bytearray) -> bool:
    """Whether nothing holds the buffer any more."""
    try:
        buffer.append(1)
    except BufferError:
        return False
    return True


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.capability("rnr")
async def test_a_slot_granted_to_a_cancelled_task_goes_to_the_next() -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(max_send_wr=1)}, server=OWN_RECEIVES
    ) as (client, server):
        first = client.post_send(b"first")  # its slot is its own until it meets a receive
        second = asyncio.create_task(client.send(b"second"))
        await asyncio.sleep(0)
        third = asyncio.create_task(client.send(b"third"))
        # The slot is granted within the completion, the cancellation follows at once.
        first.add_done_callback(lambda _: second.cancel())
        buffers = [bytearray(5), bytearray(5), bytearray(5)]
        receives = [server.post_recv(buffer) for buffer in buffers]
        await asyncio.wait([second, third])
        assert second.cancelled()
        assert free_sends(client) == 1
        await client.send(b"after")
        for receive in receives:
            await receive
        assert buffers == [b"first", b"third", b"after"]


async def test_a_close_that_times_out_closes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider_under_test(), "blocks", True)  # also natively
    async with connected() as (client, server):
        provider = client.protection_domain.provider
        held = HeldCalls(monkeypatch, provider, "destroy_qp")
        closing = asyncio.create_task(client.aclose())
        await until(held.entered.is_set)
        closing.cancel()
        closing.cancel()
        await asyncio.sleep(0.05)
        assert not closing.done()
        held.proceed.set()
        await _cancelled(closing)
        monkeypatch.undo()
        assert has_ended(client)
        assert identifier_of(client).closed
        with pytest.raises(anyio.EndOfStream):
            await server.receive()


async def test_a_long_send_whose_task_is_cancelled_keeps_slot_and_registration_in_order() -> None:
    length = (1 << 20) + 1
    async with connected(server={"receive_size": length}) as (client, server):
        buffer = bytearray(length)
        for turns in range(8):
            sending = asyncio.create_task(client.send(buffer))
            for _ in range(turns):
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
        endpoint = endpoint_of(client)
        await until(lambda: endpoint.work.sends.slots.free == client.options.max_send_wr)
        await until(lambda: resizable(buffer))
        assert server.is_connected
