"""Grants: a peer's access to a part of memory, which ends with the block, however it was left."""

import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import Access, RemoteMemory
from tests.device.late_writes import CANARY, SIZES, end_under_writes, memory_of, write_until_refused
from tests.device.players import OWN_RECEIVES, REMOTE, both_ways, connected, one_loop, until
from tests.devices import ADDRESS, BUILT_IN, DEVICE, kernel_objects
from tests.internals import SOFTWARE, endpoint_of, names_of
from tests.soak.expiry import lateness

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

REGIONS = ["plain", "bindable", "buffer"]
"""The kinds of memory: registered without and with MW_BIND, and not registered."""

ROUNDS = int(os.environ.get("AIORDMA_GRANT_ROUNDS", {SOFTWARE: 400, "siw0": 20}.get(DEVICE, 6)))
"""How often a grant ends under a peer that writes: AIORDMA_GRANT_ROUNDS=10000 for long."""
BATCH = 200 if BUILT_IN else 10
"""At most so many rounds in one test."""

LATEST = 10.0
"""Seconds after which an end counts as one that does not come. It is no measure of speed."""


async def refused(client: aiordma.Connection, remote: RemoteMemory) -> None:
    """Let the peer write, with the rkey of memory that it may not write to: its connection ends."""
    request = client.post_write(b"x" * remote.length, remote)
    request.add_done_callback(aiordma.WorkRequest.exception)
    await client.ended()


@asynccontextmanager
async def started() -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Yield (client, server), both of which may send."""
    async with connected() as (client, server):
        await both_ways(client, server)
        yield client, server


# -- what it gives --------------------------------------------------------------------------------


@pytest.mark.promise("A grant's access ends with its block")
@pytest.mark.parametrize("kind", REGIONS)
async def test_a_grant_gives_access_until_the_block_ends(kind: str) -> None:
    async with started() as (client, server):
        buffer = bytearray(64)
        async with server.grant(memory_of(kind, server, buffer), REMOTE) as grant:
            assert grant.is_active
            assert grant.remote.length == 64
            await client.write(b"from the peer", grant.remote[:13])
            assert await client.read_bytes(grant.remote[:8]) == b"from the"
        assert not grant.is_active
        assert buffer[:13] == b"from the peer"
        await both_ways(client, server)  # nothing has happened to the connection
        await refused(client, grant.remote)
        assert buffer[:13] == b"from the peer"


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("beside", [-1, 16])
async def test_a_grant_gives_no_access_beside_its_part(kind: str, beside: int) -> None:
    async with started() as (client, server):
        buffer = bytearray(64)
        memory = memory_of(kind, server, buffer)
        part = memoryview(memory)[16:32] if kind == "buffer" else memory[16:32]
        async with server.grant(part, REMOTE) as grant:
            remote = grant.remote
            await refused(client, RemoteMemory(remote.address + beside, 1, remote.rkey))
        assert buffer == bytes(64)


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.parametrize("kind", REGIONS)
async def test_a_grant_gives_only_the_access_that_was_asked_for(kind: str) -> None:
    async with started() as (client, server):
        buffer = bytearray(64)
        async with server.grant(memory_of(kind, server, buffer), Access.REMOTE_READ) as grant:
            assert await client.read_bytes(grant.remote) == bytes(64)
            await refused(client, grant.remote)
        assert buffer == bytes(64)


@one_loop
async def test_a_grant_of_read_only_memory() -> None:
    async with started() as (client, server):
        async with server.grant(b"never changes", Access.REMOTE_READ) as grant:
            assert await client.read_bytes(grant.remote) == b"never changes"
        for memory in (b"never changes", server.register(b"never changes")):
            for access in (Access.REMOTE_WRITE, Access.REMOTE_READ | Access.REMOTE_ATOMIC):
                with pytest.raises(TypeError, match=r"grant\(\): memory=.* is read-only") as caught:
                    await server.grant(memory, access)
                assert f"access={names_of(access)} lets" in str(caught.value)
        await both_ways(client, server)


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.capability("memory_windows")
@pytest.mark.parametrize("kind", REGIONS)
async def test_another_peer_cannot_use_the_rkey(kind: str) -> None:
    async with started() as (client, server), connected() as (other, _):
        buffer = bytearray(64)
        async with server.grant(memory_of(kind, server, buffer), REMOTE) as grant:
            await refused(other, grant.remote)
            assert buffer == bytes(64)
            await client.write(b"mine", grant.remote[:4])
        assert buffer[:4] == b"mine"


@one_loop
async def test_a_large_grant_is_registered_in_a_thread() -> None:
    async with started() as (client, server):
        buffer = bytearray(3 << 20)
        async with server.grant(buffer, REMOTE) as grant:
            await client.write(b"end", grant.remote[-3:])
        assert buffer[-3:] == b"end"
        buffer.append(1)


@one_loop
async def test_a_grant_can_be_awaited_and_closed() -> None:
    async with started() as (client, server):
        buffer = bytearray(8)
        grant = await server.grant(buffer, REMOTE)
        await client.write(b"12345678", grant.remote)
        await grant.aclose()
        await grant.aclose()
        await grant.ended()
        assert buffer == b"12345678"
        await both_ways(client, server)


# -- what it holds --------------------------------------------------------------------------------


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.parametrize("kind", ["plain", "bindable"])
async def test_a_region_stays_registered_while_it_is_granted(kind: str) -> None:
    async with started() as (_, server):
        region = memory_of(kind, server, bytearray(64))
        async with server.grant(region[8:16], REMOTE):
            with pytest.raises(aiordma.BusyError):
                region.close()
        region.close()
        with pytest.raises(aiordma.ClosedError):
            await server.grant(region, REMOTE)


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
async def test_a_buffer_stays_in_place_while_it_is_granted() -> None:
    async with started() as (_, server):
        buffer = bytearray(64)
        async with server.grant(buffer, REMOTE):
            with pytest.raises(BufferError):
                buffer.append(1)
        buffer.append(1)


@one_loop
@pytest.mark.parametrize("kind", REGIONS)
async def test_many_grants_leave_nothing_on_their_connection(kind: str) -> None:
    async with started() as (client, server):
        endpoint = endpoint_of(server)
        memory = memory_of(kind, server, bytearray(64))
        before = (
            len(endpoint.memory.regions),
            len(endpoint.pair.windows),
            len(endpoint.teardown.on_ended),
        )
        objects = kernel_objects(DEVICE)
        for _ in range(30):
            async with server.grant(memory, REMOTE) as grant:
                await client.write(b"x", grant.remote[:1])
        after = (
            len(endpoint.memory.regions),
            len(endpoint.pair.windows),
            len(endpoint.teardown.on_ended),
        )
        assert after == before
        assert kernel_objects(DEVICE) == objects


@one_loop
async def test_grants_of_the_same_memory_end_separately() -> None:
    async with started() as (client, server):
        buffer = bytearray(16)
        async with server.grant(buffer, REMOTE) as outer:
            async with server.grant(buffer, REMOTE) as inner:
                await client.write(b"inner", inner.remote[:5])
            await client.write(b"outer", outer.remote[8:13])
        assert buffer[:5] + buffer[8:13] == b"innerouter"


# -- however the block is left --------------------------------------------------------------------


class Leave(Exception):
    """Raised by a block to leave it."""


WAYS = ["end", "exception", "cancellation", "close", "loss"]
# In the VM, where each takes two seconds, only one kind of memory for the ways other than the end.
LEFT = [(way, kind) for way in WAYS for kind in REGIONS if BUILT_IN or way == "end"]
LEFT += [] if BUILT_IN else [(way, "plain") for way in WAYS[1:]]


@pytest.mark.promise(
    "A grant's access ends with its block", "Cancellation loses no message and leaves nothing open"
)
@pytest.mark.parametrize(("way", "kind"), LEFT)
async def test_no_byte_arrives_after_the_block(way: str, kind: str) -> None:
    size = 1 << 17
    async with started() as (client, server), anyio.create_task_group() as group:
        buffer = bytearray(size)
        memory = memory_of(kind, server, buffer)
        with suppress(Leave, aiordma.RdmaError, aiordma.EndOfStream), anyio.CancelScope() as scope:
            async with server.grant(memory, Access.REMOTE_WRITE) as grant:
                group.start_soon(write_until_refused, client, grant.remote)
                await until(lambda: buffer[-1] == 1)
                if way == "exception":
                    raise Leave
                if way == "cancellation":
                    scope.cancel()
                if way == "close":
                    await server.aclose()
                if way == "loss":
                    client_end = endpoint_of(client)
                    client_end.fail(aiordma.DisconnectedError("for the test"))
                    await server.receive()
                await anyio.lowlevel.checkpoint()
        assert not grant.is_active
        buffer[:] = bytes([CANARY]) * size
        await client.ended()
        await anyio.sleep(0.01)
        assert buffer.count(CANARY) == size
    assert buffer.count(CANARY) == size


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.parametrize("kind", ["plain", "bindable"])
@pytest.mark.parametrize("first", range(0, ROUNDS // 2, BATCH))
async def test_no_late_byte_of_a_peer_that_writes_in_a_loop(kind: str, first: int) -> None:
    chance, rounds = random.Random(f"{kind} {first}"), min(BATCH, ROUNDS // 2 - first)
    ends = successes = late = 0
    options: dict[str, Any] = {
        "receive_buffers": 1,
        "receive_size": 64,
        "options": aiordma.ConnectionOptions(max_send_wr=8),
    }
    async with aiordma.listen(ADDRESS, 0, **options) as listener:
        for _ in range(rounds):
            size = chance.choice(SIZES)
            written, wrong = await end_under_writes(listener, kind, size, chance)
            ends, successes, late = ends + 1, successes + written, late + wrong
    assert (ends, late) == (rounds, 0)
    assert successes >= ends // 2  # the peer did write


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.capability("copied_reads")
@pytest.mark.parametrize("kind", REGIONS)
async def test_no_read_sees_what_was_written_after_the_block(kind: str) -> None:
    size, secret = 1 << 16, 0x5A
    for _ in range(10):
        async with started() as (client, server), anyio.create_task_group() as group:
            buffer = bytearray(size)
            copies: list[bytes] = []

            async def read(
                client: aiordma.Connection, remote: RemoteMemory, copies: list[bytes]
            ) -> None:
                landing = bytearray(remote.length)
                with suppress(aiordma.RdmaError, ConnectionError):
                    while True:
                        await client.read(landing, remote)
                        copies.append(bytes(landing[:8]) + bytes(landing[-8:]))
                copies.append(bytes(landing))

            memory = memory_of(kind, server, buffer)
            async with server.grant(memory, Access.REMOTE_READ) as grant:
                group.start_soon(read, client, grant.remote, copies)
                await until(lambda: len(copies) > 1)  # noqa: B023
            buffer[:] = bytes([secret]) * size
            await client.ended()
        assert not any(secret in copy for copy in copies)


# -- a peer that does not cooperate ---------------------------------------------------------------


@pytest.mark.promise(
    "A grant's access ends with its block",
    "Every wait has a bound, except waits for the peer's program",
)
@pytest.mark.capability("rnr")
async def test_the_end_does_not_wait_for_a_blocked_send_queue() -> None:
    async with connected(client=OWN_RECEIVES) as (client, server):
        await client.send(b"first")
        await server.receive()
        buffer = bytearray(64)
        async with server.grant(buffer, Access.REMOTE_WRITE) as grant:
            blocked = server.post_send(b"to a peer that posts no receive")
            blocked.add_done_callback(aiordma.WorkRequest.exception)
            await client.write(b"12345678", grant.remote[:8])
        assert not blocked.done()
        buffer[:8] = b"returned"
        await refused(client, grant.remote)
        assert buffer[:8] == b"returned"


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@pytest.mark.capability("rnr")
@pytest.mark.capability("memory_windows")
async def test_cancelling_a_grant_that_waits_for_the_send_queue_leaves_nothing() -> None:
    server_options = {"options": aiordma.ConnectionOptions(max_send_wr=1)}
    async with connected(client=OWN_RECEIVES, server=server_options) as (client, server):
        await client.send(b"first")
        await server.receive()
        buffer = bytearray(64)
        blocked = server.post_send(b"to a peer that posts no receive yet")
        with anyio.move_on_after(0.05) as scope:
            await server.grant(buffer, REMOTE)
        assert scope.cancelled_caught
        assert not endpoint_of(server).pair.windows
        buffer.append(1)
        await client.post_recv(bytearray(64))
        await blocked


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
@pytest.mark.capability("memory_windows")
async def test_a_driver_that_refuses_the_end_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, refusals = aiordma.verbs.MemoryWindow._destroy, [errno.EBUSY]

    def destroy(window: aiordma.verbs.MemoryWindow) -> None:
        if refusals:
            raise aiordma.VerbsCallError(refusals.pop(), "ibv_dealloc_mw")
        real(window)

    async with started() as (_, server):
        grant = await server.grant(bytearray(64), REMOTE)
        monkeypatch.setattr(aiordma.verbs.MemoryWindow, "_destroy", destroy)
        with pytest.raises(aiordma.VerbsCallError, match="ibv_dealloc_mw"):
            await grant.aclose()
        assert isinstance(await server.ended(), aiordma.VerbsCallError)


# -- expires --------------------------------------------------------------------------------------


@pytest.mark.promise(
    "A grant's access ends with its block",
    "Every wait has a bound, except waits for the peer's program",
)
@pytest.mark.parametrize("kind", REGIONS)
async def test_a_grant_expires_within_its_block(kind: str) -> None:
    async with started() as (client, server), anyio.create_task_group() as group:
        buffer = bytearray(4096)
        memory = memory_of(kind, server, buffer)
        async with server.grant(memory, Access.REMOTE_WRITE, expires=0.05) as grant:
            group.start_soon(write_until_refused, client, grant.remote)
            await grant.ended()
            assert grant.expired
            assert not grant.is_active
            buffer[:] = bytes([CANARY]) * len(buffer)
            await client.ended()
            assert buffer.count(CANARY) == len(buffer)


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
async def test_expiry_is_not_delayed_by_a_peer_that_writes() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        for _ in range(3):
            assert await lateness(listener, ADDRESS, is_written=True) < LATEST


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
async def test_a_grant_that_ends_early_does_not_expire() -> None:
    async with started() as (client, server):
        async with server.grant(bytearray(64), REMOTE, expires=2.0) as grant:
            await client.write(b"x", grant.remote[:1])
        await anyio.sleep(2.1)
        assert not grant.expired
        await both_ways(client, server)


@pytest.mark.promise("A grant's access ends with its block")
@one_loop
async def test_a_grant_ends_with_its_connection() -> None:
    async with started() as (client, server):
        buffer = bytearray(64)
        grant = await server.grant(buffer, REMOTE, expires=3600)
        await client.aclose()
        await grant.ended()
        assert not grant.expired
        buffer.append(1)


# -- wrong arguments ------------------------------------------------------------------------------


@one_loop
async def test_wrong_grants_are_refused() -> None:
    async with started() as (client, server):
        region = server.register(bytearray(64))
        for memory, access, options, error, message in (
            (region, Access.LOCAL_WRITE, {}, ValueError, "a grant gives REMOTE_READ"),
            (region, Access(0), {}, ValueError, "a grant gives REMOTE_READ"),
            (region, "read", {}, TypeError, "Access flags"),
            (region[0:0], REMOTE, {}, ValueError, "no bytes"),
            (b"", REMOTE, {}, ValueError, "no bytes"),
            (42, REMOTE, {}, TypeError, "has no buffer"),
            (region, REMOTE, {"expires": 0}, ValueError, "more than 0 seconds"),
            (region, REMOTE, {"expires": "1"}, TypeError, "a number of seconds"),
        ):
            arguments: Any = (memory, access)
            more: Any = options
            with pytest.raises(error, match=message):
                await server.grant(*arguments, **more)
        async with aiordma.open_domain(ADDRESS) as domain:
            foreign = domain.register(bytearray(64))
            with pytest.raises(ValueError, match="another protection domain"):
                await server.grant(foreign, REMOTE)
        await both_ways(client, server)
