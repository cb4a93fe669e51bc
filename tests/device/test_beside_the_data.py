"""What goes beside the data: immediate data, invalidation, fence, solicited; and atomics."""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import Access, RemoteMemory
from aiordma.verbs import WorkCompletionOpcode
from tests.device.players import OWN_RECEIVES, REMOTE, connected, one_loop
from tests.internals import free_sends, pool_of

pytestmark = pytest.mark.anyio

immediate_data = pytest.mark.capability("immediate")
atomics = pytest.mark.capability("atomics")
ATOMIC = Access.REMOTE_ATOMIC | Access.REMOTE_READ | Access.REMOTE_WRITE


def number(buffer: bytearray, at: int = 0) -> int:
    return int.from_bytes(buffer[at : at + 8], sys.byteorder)


@immediate_data
async def test_a_message_carries_immediate_data() -> None:
    async with connected() as (client, server):
        await client.send(b"with", immediate=0x12345678)
        await client.send(b"without")
        await client.send(b"", immediate=0)
        assert await server.receive_message() == aiordma.types.Message(b"with", 0x12345678)
        assert await server.receive_message() == aiordma.types.Message(b"without")
        assert await server.receive_message() == aiordma.types.Message(b"", 0)


@immediate_data
async def test_write_with_immediate_completes_a_receive() -> None:
    async with connected() as (client, server):
        target = bytearray(64)
        theirs = server.register(target, REMOTE).remote()
        completion = await client.write(b"0123456789", theirs[:10], immediate=7)
        assert completion.operation is WorkCompletionOpcode.RDMA_WRITE
        message = await server.receive_message()
        assert message == aiordma.types.Message(b"", 7, None, 10)
        assert target[:10] == b"0123456789"
        # The receive that it took is posted again: many more than there are go through.
        for i in range(40):
            await client.write(b"x", theirs[:1], immediate=i)
            assert (await server.receive_message()).immediate == i


@one_loop
@immediate_data
async def test_immediate_data_reaches_receives_of_the_users_own() -> None:
    async with connected(server=OWN_RECEIVES) as (client, server):
        buffer = bytearray(16)
        receive = server.post_recv(buffer)
        await client.post_sendv([b"ab", b"cd"], immediate=2**32 - 1, solicited=True)
        completion = await receive
        assert (completion.immediate, completion.byte_len) == (2**32 - 1, 4)
        assert completion.flags & aiordma.verbs.WorkCompletionFlag.WITH_IMM
        assert buffer[:4] == b"abcd"


@one_loop
@pytest.mark.parametrize("value", [-1, 2**32])
@immediate_data
async def test_immediate_data_has_32_bits(value: int) -> None:
    async with connected() as (client, server):
        remote = RemoteMemory(0, 1, 0)
        with pytest.raises(ValueError, match="32 bits"):
            client.post_send(b"x", immediate=value)
        with pytest.raises(ValueError, match="32 bits"):
            client.post_write(b"x", remote, immediate=value)
        with pytest.raises(TypeError, match=r"immediate='7' \(str\): expected a whole number"):
            client.post_send(b"x", immediate="7")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="not both"):
            client.post_send(b"x", immediate=1, invalidate=1)
        await client.send(b"still there")
        assert await server.receive() == b"still there"


@one_loop
async def test_what_the_device_lacks_is_said_by_name_and_the_rest_works(device: Any) -> None:
    async with connected() as (client, server):
        bindable = Access.LOCAL_WRITE | Access.MW_BIND
        memory = server.register(bytearray(16), ATOMIC).remote()
        start = -memory.address % 8

        async def bind() -> None:
            (await server.bind(server.register(bytearray(8), bindable)[:], REMOTE)).close()

        async def invalidate() -> None:
            window = await server.bind(server.register(bytearray(8), bindable)[:], REMOTE)
            await client.send(b"x", invalidate=window.rkey)

        operations: dict[str, list[Callable[[], Awaitable[object]]]] = {
            "immediate": [
                lambda: client.send(b"x", immediate=1),
                lambda: client.write(b"x", memory[:1], immediate=1),
            ],
            "atomics": [lambda: client.fetch_add(memory[start : start + 8], 1)],
            "memory_windows": [bind, invalidate],
        }
        for capability, ways in operations.items():
            for way in ways:
                if not device.lacks(capability):
                    await way()
                    continue
                with pytest.raises(aiordma.NotSupportedError, match=device.name):
                    await way()
        if device.lacks("memory_windows"):
            with pytest.raises(aiordma.NotSupportedError, match=f"memory windows.*{device.name}"):
                await server.open_window()
            with pytest.raises(
                aiordma.NotSupportedError, match=f"{device.name} has no memory windows"
            ):
                client.post_send(b"x", invalidate=1)
        await client.send(b"still there")
        while await server.receive() != b"still there":
            pass


async def test_a_fenced_send_comes_after_the_read_before_it() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"x" * 4096), REMOTE).remote()
        ours = client.register(bytearray(4096))
        read = client.post_read(ours[:], theirs)
        send = client.post_send(ours[:16], fence=True)
        await read
        await send
        # Without the fence it might have sent what lay there before the READ.
        assert await server.receive() == b"x" * 16


@atomics
async def test_fetch_add_and_compare_swap_return_what_was_there() -> None:
    async with connected() as (client, server):
        counter = bytearray(24)
        theirs = server.register(counter, ATOMIC).remote()
        start = -theirs.address % 8
        place = theirs[start : start + 8]
        assert await client.fetch_add(place, 5) == 0
        assert await client.fetch_add(place, 2**64 - 1) == 5  # modulo 2**64: minus one
        assert await client.fetch_add(place, -4) == 4
        assert number(counter, start) == 0
        assert await client.compare_swap(place, 0, 2**63 + 1) == 0
        assert await client.compare_swap(place, 7, 8) == 2**63 + 1  # not 7: nothing swapped
        assert number(counter, start) == 2**63 + 1


@atomics
async def test_atomics_of_many_tasks_count_each_once() -> None:
    async with connected() as (client, server):
        counter = server.register(bytearray(16), ATOMIC).remote()
        start = -counter.address % 8
        place = counter[start : start + 8]
        seen: list[int] = []

        async def add() -> None:
            for _ in range(10):
                seen.append(await client.fetch_add(place, 1))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(add)
        assert sorted(seen) == list(range(40))


@one_loop
@atomics
async def test_posted_atomics_land_in_the_users_memory() -> None:
    async with connected() as (client, server):
        counter = bytearray(16)
        theirs = server.register(counter, ATOMIC).remote()
        start = -theirs.address % 8
        place = theirs[start : start + 8]
        ours = client.register(bytearray(8))
        add = await client.post_fetch_add(ours, place, 3)
        assert add.operation is WorkCompletionOpcode.FETCH_ADD
        plain = bytearray(b"\xff" * 8)
        swap = await client.post_compare_swap(plain, place, 3, 9, fence=True)
        assert swap.operation is WorkCompletionOpcode.COMP_SWAP
        assert (number(plain), number(counter, start)) == (3, 9)


@one_loop
@atomics
async def test_wrong_atomics_are_refused_with_nothing_lost() -> None:
    async with connected() as (client, server):
        remote = RemoteMemory(64, 8, 1)
        before = free_sends(client)
        for bad, match in (
            (RemoteMemory(64, 4, 1), "8 bytes"),
            (RemoteMemory(65, 8, 1), "aligned"),
        ):
            with pytest.raises(ValueError, match=match):
                await client.fetch_add(bad, 1)
            with pytest.raises(ValueError, match=match):
                client.post_compare_swap(bytearray(8), bad, 1, 1)
        with pytest.raises(ValueError, match="64 bits"):
            await client.compare_swap(remote, 1, 2**64)
        with pytest.raises(TypeError, match="whole number"):
            await client.fetch_add(remote, 1.0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="RemoteMemory"):
            client.post_fetch_add(bytearray(8), b"12345678", 1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="local has 4 bytes, and remote 8"):
            client.post_fetch_add(bytearray(4), remote, 1)
        with pytest.raises(TypeError, match="read-only"):
            client.post_fetch_add(bytes(8), remote, 1)
        assert free_sends(client) == before
        await client.send(b"still there")
        assert await server.receive() == b"still there"


@one_loop
@atomics
async def test_an_atomic_without_permission_is_a_remote_access_error() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(16), REMOTE).remote()
        start = -theirs.address % 8
        with pytest.raises(aiordma.RemoteAccessError, match="FETCH_ADD of 8 bytes"):
            await client.fetch_add(theirs[start : start + 8], 1)


@one_loop
@atomics
async def test_atomics_need_depth_that_was_agreed_on() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(initiator_depth=0)}) as (
        client,
        _,
    ):
        with pytest.raises(aiordma.NotSupportedError, match="initiator_depth"):
            await client.fetch_add(RemoteMemory(64, 8, 1), 1)


@atomics
async def test_cancelled_atomic_keeps_its_memory() -> None:
    async with connected() as (client, server):
        pool = pool_of(client)
        theirs = server.register(bytearray(16), ATOMIC).remote()
        start = -theirs.address % 8
        place = theirs[start : start + 8]
        assert await client.fetch_add(place, 1) == 0
        leased = pool.leased
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.fetch_add(place, 1)
        # The cancelled atomic may have been carried out, or not. The next one has its own memory.
        before = await client.fetch_add(place, 10)
        assert before in (1, 2)
        assert await client.compare_swap(place, before + 10, 7) == before + 10
        assert await client.fetch_add(place, 0) == 7
        while pool.leased != leased:
            await anyio.lowlevel.checkpoint()
    assert pool.leased == 0
