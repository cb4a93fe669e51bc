"""READ and WRITE: the right bytes at the right place, and nothing that was not permitted."""

import gc
import mmap
import random
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import Access, RemoteMemory
from aiordma.verbs import WorkCompletionOpcode as Opcode
from tests.alike import alike
from tests.device.players import REMOTE, Outcome, both_ways, connected, until
from tests.devices import DeviceUnderTest, provider_under_test
from tests.internals import COPY_LIMIT, THREAD_LIMIT, pool_of

pytestmark = pytest.mark.anyio


async def test_reads_and_writes_give_their_completions() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"theirs!!"), REMOTE)
        ours = client.register(bytearray(8))
        read = await client.post_read(ours, theirs.remote())
        assert read.operation is Opcode.RDMA_READ
        assert bytes(ours.view) == b"theirs!!"
        ours.view[:] = b"ours now"
        write = await client.post_write(ours, theirs.remote())
        assert write.operation is Opcode.RDMA_WRITE
        assert bytes(theirs.view) == b"ours now"
        assert (await client.read(ours, theirs.remote())).ok
        assert (await client.write(ours, theirs.remote())).ok


async def test_remote_memory_travels_in_a_message() -> None:
    async with connected() as (client, server):
        region = client.register(bytearray(b"0123456789"), REMOTE)
        await client.send(region[2:8].remote().pack())
        remote = RemoteMemory.unpack(await server.receive())
        assert len(remote) == 6
        assert await server.read_bytes(remote) == b"234567"
        await server.write(b"ABC", remote[1:4])
        assert bytes(region.view) == b"012ABC6789"
        assert await server.read_bytes(remote[6:6]) == b""


async def test_one_sided_operations_touch_exactly_their_range() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"." * 256), REMOTE)
        ours = client.register(bytearray(b"#" * 256))
        await client.write(ours[100:110], theirs.remote()[50:60])
        assert bytes(theirs.view) == b"." * 50 + b"#" * 10 + b"." * 196
        await client.read(ours[200:210], theirs.remote()[45:55])
        assert bytes(ours.view) == b"#" * 200 + b"....." + b"#####" + b"#" * 46


async def test_a_short_read_may_cross_a_page_at_any_byte(device: DeviceUnderTest) -> None:
    """Except on siw, whose fault is tested, too: if it has gone, docs/devices.md has to say so."""
    wrong = []
    async with connected() as (client, server):
        theirs = server.register(mmap.mmap(-1, 2 * mmap.PAGESIZE), REMOTE)
        for before in range(1, 32):
            start = mmap.PAGESIZE - before
            expected = bytes(range(before, before + 32))
            theirs.view[start : start + 32] = expected
            if await client.read_bytes(theirs.remote()[start : start + 32]) != expected:
                wrong.append(before)
    has_fault = device.lacks("short_reads_across_pages")
    assert wrong == ([each for each in range(1, 32) if each != 16] if has_fault else [])


@pytest.mark.capability("fenced_reads")
async def test_a_read_may_be_fenced() -> None:
    async with connected() as (client, server):
        memory = bytearray(b"before..")
        theirs = server.register(memory, REMOTE).remote()
        first, second = bytearray(8), bytearray(8)
        requests = [
            client.post_read(first, theirs),
            client.post_write(b"written.", theirs, fence=True),
            client.post_read(second, theirs, fence=True),
        ]
        for request in requests:
            assert (await request).ok
        assert (bytes(first), bytes(second)) == (b"before..", b"written.")


async def test_writev_gathers_in_the_order_of_the_parts() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(12), REMOTE)
        ours = client.register(bytearray(b"0123456789abcdef"))
        await client.writev([ours[10:14], ours[0:4], ours[6:10]], theirs.remote())
        assert bytes(theirs.view) == b"abcd01236789"
        await client.post_writev([ours[14:16], ours[4:6]], theirs.remote()[4:8])
        assert bytes(theirs.view) == b"abcdef456789"


async def test_more_parts_than_the_device_can_read_into_are_refused_by_name() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(max_send_sge=64)}) as (
        client,
        server,
    ):
        theirs = server.register(bytearray(64), REMOTE)
        with pytest.raises(aiordma.NotSupportedError, match="READ into 64 parts"):
            client.post_readv([bytearray(1) for _ in range(64)], theirs.remote())
        await both_ways(client, server)


@pytest.mark.capability("scattered_read")
async def test_readv_scatters_in_the_order_of_the_parts() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"abcdef456789"), REMOTE)
        target = client.register(bytearray(b"." * 16))
        await client.readv([target[12:16], target[2:4], target[4:10]], theirs.remote())
        assert bytes(target.view) == b"..ef456789..abcd"
        await client.post_readv([target[1:2], target[14:16]], theirs.remote()[:3])
        assert bytes(target.view) == b".aef456789..abbc"


async def test_plain_buffers_need_no_registration() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(8192), REMOTE)
        for length in (1, 64, 500, 8192):
            data = bytes(i * 7 % 256 for i in range(length))
            await client.write(data, theirs.remote()[:length])
            target = bytearray(length)
            await client.read(target, theirs.remote()[:length])
            assert target == data
        await client.writev([b"a" * 10, bytearray(b"b" * 20)], theirs.remote()[:30])
        assert await client.read_bytes(theirs.remote()[:30]) == b"a" * 10 + b"b" * 20


@pytest.mark.capability("scattered_read")
async def test_plain_buffers_are_read_into_in_order() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"a" * 10 + b"b" * 20), REMOTE)
        one, other = bytearray(5), bytearray(25)
        await client.readv([one, other], theirs.remote()[:30])
        assert one + other == b"a" * 10 + b"b" * 20


async def test_operations_beyond_the_copy_limit_are_complete() -> None:
    async with connected() as (client, server):
        length = 4 * COPY_LIMIT + 3
        data = b"".join(i.to_bytes(4, "big") for i in range(length // 4 + 1))[:length]
        theirs = server.register(bytearray(length), REMOTE)
        await client.write(data, theirs.remote())
        assert theirs.view == data
        assert await client.read_bytes(theirs.remote()) == data


async def test_operations_of_no_bytes_succeed() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"unchanged"), REMOTE)
        ours = client.register(bytearray(16))
        await client.write(b"", theirs.remote()[3:3])
        await client.write(ours[4:4], theirs.remote()[3:3])
        await client.read(ours[16:16], theirs.remote()[9:9])
        assert bytes(theirs.view) == b"unchanged"
        assert bytes(ours.view) == bytes(16)


READS_NOTHING: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a region": lambda c, remote, ours: c.post_read(ours[16:16], remote),
    "a buffer": lambda c, remote, ours: c.post_read(bytearray(), remote),
    "parts": lambda c, remote, ours: c.post_readv([ours[3:3]], remote),
    "no parts": lambda c, remote, ours: c.post_readv([], remote),
}


@pytest.mark.parametrize("read", READS_NOTHING.values(), ids=READS_NOTHING)
async def test_read_of_no_bytes_keeps_the_connection(read: Callable[..., Any]) -> None:
    """Also after other READs, which the port then posts without the general path's checks."""
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"unchanged"), REMOTE).remote()
        ours = client.register(bytearray(b"#" * 16))
        for _ in range(3):
            completion = await read(client, theirs[9:9], ours)
            assert completion.ok
            assert completion.operation is Opcode.RDMA_READ
            await client.read(ours[:4], theirs[:4])
        assert await client.read_bytes(theirs[9:9]) == b""
        leased = pool_of(client).leased
        for _ in range(3):
            await read(client, theirs[9:9], ours)
        assert pool_of(client).leased == leased
        assert bytes(ours.view) == b"unch" + b"#" * 12
        await both_ways(client, server)


@pytest.mark.capability("ordered_ends")
async def test_read_of_no_bytes_in_a_chain_keeps_the_connection() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"unchanged"), REMOTE).remote()
        ours = client.register(bytearray(8))
        for last_only in (False, True):
            with client.chain(signal_last_only=last_only) as chain:
                chain.post_read(ours[:0], theirs[:0])
                chain.post_write(b"", theirs[:0])
                chain.post_read(bytearray(), theirs[:0])
            for request in chain.requests:
                assert (await request).ok
        await both_ways(client, server)


async def test_a_pipeline_of_64_reads_and_writes_matches_one_to_one() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(range(64)) * 8, REMOTE)
        ours = client.register(bytearray(512))
        remote = theirs.remote()
        reads = [client.post_read(ours[i : i + 8], remote[i : i + 8]) for i in range(0, 512, 8)]
        for request in reversed(reads):
            assert (await request).wr_id == request.wr_id
        assert ours.view == theirs.view
        ours.view[:] = bytes(reversed(ours.view))
        writes = [client.post_write(ours[i : i + 8], remote[i : i + 8]) for i in range(0, 512, 8)]
        for request in writes:
            assert (await request).wr_id == request.wr_id
        assert ours.view == theirs.view


async def test_a_write_is_seen_before_the_message_that_follows_it() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(4), REMOTE)
        for i in range(20):
            write = client.post_write(i.to_bytes(4, "big"), theirs.remote())
            notice = client.post_send(b"written")
            await server.receive()
            assert int.from_bytes(theirs.view, "big") == i
            await write
            await notice


async def test_without_outstanding_reads_a_read_is_refused_before_the_device_sees_it() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(initiator_depth=0)}) as (
        client,
        server,
    ):
        theirs = server.register(bytearray(8), REMOTE)
        with pytest.raises(aiordma.NotSupportedError, match="initiator_depth"):
            client.post_read(bytearray(8), theirs.remote())
        with pytest.raises(aiordma.NotSupportedError, match="initiator_depth"):
            await client.read_bytes(theirs.remote())
        await client.write(b"12345678", theirs.remote())
        await both_ways(client, server)


# -- what the peer's device refuses -----------------------------------------------------------


async def refused(client: aiordma.Connection, server: aiordma.Connection, post: Any) -> None:
    """Post what the peer's device must refuse; check how everything that is open ends."""
    waiting, receiving = Outcome(), Outcome()
    async with anyio.create_task_group() as group:
        group.start_soon(waiting.of, client.receive)
        group.start_soon(receiving.of, server.receive)
        await anyio.wait_all_tasks_blocked()
        culprit = post()
        behind = [client.post_send(b"behind %d" % i) for i in range(3)]
        with pytest.raises(aiordma.RemoteAccessError) as caught:
            await culprit
    cause = caught.value
    assert cause.request == str(culprit)
    assert str(culprit) in str(cause)
    assert cause.status == aiordma.verbs.WorkCompletionStatus.REM_ACCESS_ERR
    for request in behind:
        with pytest.raises(aiordma.FlushedError) as flushed:
            await request
        assert alike(flushed.value.__cause__, cause)
    assert alike(waiting.error, cause)
    with pytest.raises(aiordma.RemoteAccessError) as again:
        client.post_send(b"more")
    assert alike(again.value, cause)
    # The peer learns of it: its receive ended with the group, by an error or the end.
    assert isinstance(receiving.error, anyio.EndOfStream | anyio.BrokenResourceError)


READ, WRITE = "READ", "WRITE"
UNPERMITTED = "READ without REMOTE_READ"
REFUSED: dict[str, tuple[str, Access, Callable[[RemoteMemory], RemoteMemory]]] = {
    UNPERMITTED: (READ, Access.REMOTE_WRITE, lambda remote: remote),
    "WRITE without REMOTE_WRITE": (WRITE, Access.REMOTE_READ, lambda remote: remote),
    "READ beyond the region": (
        READ,
        REMOTE,
        lambda remote: RemoteMemory(remote.address + 8, remote.length, remote.rkey),
    ),
    "WRITE before the region": (
        WRITE,
        REMOTE,
        lambda remote: RemoteMemory(remote.address - 1, remote.length, remote.rkey),
    ),
    "READ with a wrong rkey": (
        READ,
        REMOTE,
        lambda remote: RemoteMemory(remote.address, remote.length, remote.rkey ^ 0x5A),
    ),
    "WRITE with a wrong rkey": (
        WRITE,
        REMOTE,
        lambda remote: RemoteMemory(remote.address, remote.length, remote.rkey ^ 0x5A00),
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(UNPERMITTED, marks=pytest.mark.capability("read_permission")),
        *(case for case in REFUSED if case != UNPERMITTED),
    ],
)
async def test_a_refused_access_ends_the_connection_and_touches_nothing(case: str) -> None:
    operation, access, forge = REFUSED[case]
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"untouched" * 100), access)
        ours = client.register(bytearray(900))
        remote = forge(theirs.remote())
        here, there = Outcome(), Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(here.of, client.receive)
            group.start_soon(there.of, server.receive)
            post = client.post_read(ours, remote) if operation == READ else None
            post = post or client.post_write(ours, remote)
            with suppress(aiordma.WorkCompletionError):
                await post
        for outcome in (here, there):
            assert isinstance(outcome.error, anyio.EndOfStream | anyio.BrokenResourceError)
        assert bytes(theirs.view) == b"untouched" * 100
        assert bytes(ours.view) == bytes(900)


@pytest.mark.capability("named_refusals")
@pytest.mark.parametrize("case", REFUSED)
async def test_the_peers_device_enforces(case: str) -> None:
    operation, access, forge = REFUSED[case]
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"untouched" * 100), access)
        ours = client.register(bytearray(900))
        remote = forge(theirs.remote())

        def post() -> aiordma.WorkRequest:
            if operation == READ:
                return client.post_read(ours, remote)
            return client.post_write(ours, remote)

        await refused(client, server, post)
        assert bytes(theirs.view) == b"untouched" * 100
        assert bytes(ours.view) == bytes(900)


@pytest.mark.capability("named_refusals")
async def test_closed_region_rejects_its_old_rkey() -> None:
    async with connected() as (client, server):
        buffer = bytearray(b"was mine")
        theirs = server.register(buffer, REMOTE)
        remote = theirs.remote()
        assert await client.read_bytes(remote) == b"was mine"
        theirs.close()
        await refused(client, server, lambda: client.post_read(bytearray(8), remote))


async def test_a_refused_access_does_not_touch_other_connections_of_the_loop() -> None:
    async with connected() as (client, server), connected() as (other, another):
        memory = another.register(bytearray(b"still mine"), REMOTE)
        waiting = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(waiting.of, another.receive)
            theirs = server.register(bytearray(8), Access.REMOTE_READ)
            with suppress(aiordma.RemoteAccessError):
                await client.write(b"12345678", theirs.remote())
            await until(lambda: not server.is_connected)
            assert other.is_connected
            assert another.is_connected
            await other.send(b"hello")
        assert waiting.value == b"hello"
        assert await other.read_bytes(memory.remote()) == b"still mine"
        await both_ways(other, another)


# -- read_bytes: what the peer's descriptor says is not believed ----------------------------------


async def test_read_bytes_of_any_length() -> None:
    async with connected() as (client, server):
        data = random.Random(0).randbytes(3 * THREAD_LIMIT)
        theirs = server.register(bytearray(data), REMOTE).remote()
        for length in (0, 1, 2, 256, 70_000, THREAD_LIMIT, THREAD_LIMIT + 1, len(data)):
            assert await client.read_bytes(theirs[:length]) == data[:length]
        assert bytes(1) == b"\0"  # Python has one object of each single byte


@pytest.mark.promise("Invalid arguments raise before any C call")
@pytest.mark.parametrize("length", [(1 << 26) + 1, 3 << 30, 1 << 62])
async def test_read_bytes_allocates_nothing_beyond_a_limit(length: int) -> None:
    async with connected() as (client, server):
        remote = aiordma.RemoteMemory(4096, length, 1)
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=f"descriptor says {length} .*max_bytes=67108864"):
                await client.read_bytes(remote)
            with pytest.raises(ValueError, match="carries at most"):
                await client.read_bytes(aiordma.RemoteMemory(4096, 1 << 62, 1), max_bytes=1 << 63)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20
        await both_ways(client, server)


async def test_read_bytes_takes_a_limit() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(b"twelve bytes"), REMOTE).remote()
        assert await client.read_bytes(theirs, max_bytes=12) == b"twelve bytes"
        with pytest.raises(ValueError, match=r"^read_bytes\(\).*says 12 bytes, and max_bytes=11"):
            await client.read_bytes(theirs, max_bytes=11)
        assert await client.read_bytes(theirs[:0], max_bytes=0) == b""


async def test_read_bytes_registers_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    length = THREAD_LIMIT + 1
    async with connected() as (client, server):
        theirs = server.register(bytearray(length), REMOTE).remote()
        provider, threads = provider_under_test(), []
        register = provider.reg_mr

        def watched(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return register(*arguments)

        monkeypatch.setattr(provider, "reg_mr", watched)
        assert len(await client.read_bytes(theirs)) == length
        assert threads
        assert threading.get_ident() not in threads


async def test_an_abandoned_read_bytes_keeps_its_memory() -> None:
    async with connected() as (client, server):
        data = bytes(range(256)) * (THREAD_LIMIT // 128)
        theirs = server.register(bytearray(data), REMOTE).remote()
        for rounds in range(20):
            async with anyio.create_task_group() as group:
                group.start_soon(client.read_bytes, theirs)
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        gc.collect()
        assert await client.read_bytes(theirs) == data
        await both_ways(client, server)
