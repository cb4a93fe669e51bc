"""Memory windows: remote access given for a while, and revoked by either side."""

import gc
from collections.abc import Awaitable, Callable

import anyio
import pytest

import aiordma
from aiordma import Access, Connection, RemoteMemory
from aiordma.types import BoundWindow
from aiordma.verbs import MemoryWindowType, WorkCompletionOpcode
from tests.device.players import both_ways, connected, one_loop
from tests.internals import free_sends

pytestmark = [pytest.mark.anyio, pytest.mark.capability("memory_windows")]

BINDABLE = Access.LOCAL_WRITE | Access.MW_BIND
BOTH = Access.REMOTE_READ | Access.REMOTE_WRITE
TYPES = list(MemoryWindowType)


@pytest.mark.parametrize("kind", TYPES)
async def test_a_window_gives_access_to_what_it_is_bound_to(
    kind: MemoryWindowType,
) -> None:
    async with connected() as (client, server):
        memory = bytearray(64)
        region = server.register(memory, BINDABLE)
        window = await server.bind(region[16:32], BOTH, kind)
        assert window.is_bound
        theirs = window.remote
        assert (theirs.length, theirs.address) == (16, region.address + 16)
        await client.write(b"0123456789abcdef", theirs)
        assert memory[16:32] == b"0123456789abcdef"
        assert await client.read_bytes(theirs[4:8]) == b"4567"


@one_loop
@pytest.mark.capability("window_bounds")
async def test_a_window_gives_no_access_beside_it() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(64), BINDABLE)
        window = await server.bind(region[16:32], BOTH)
        theirs = window.remote
        with pytest.raises(aiordma.RemoteAccessError):
            await client.write(b"x", RemoteMemory(theirs.address - 1, 1, theirs.rkey))


@pytest.mark.parametrize("kind", TYPES)
async def test_a_window_gives_only_the_access_that_it_was_bound_with(
    kind: MemoryWindowType,
) -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(b"0123456789abcdef"), BINDABLE)
        window = await server.bind(region[:], Access.REMOTE_READ, kind)
        assert await client.read_bytes(window.remote) == b"0123456789abcdef"
        with pytest.raises(aiordma.RemoteAccessError):
            await client.write(b"x", window.remote[:1])


@pytest.mark.parametrize("kind", TYPES)
async def test_a_revoked_window_gives_no_access(kind: MemoryWindowType) -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(64), BINDABLE)
        window = await server.bind(region[:], BOTH, kind)
        theirs = window.remote
        await client.write(b"x", theirs[:1])
        with pytest.raises(aiordma.BusyError):
            region.close()  # it is bound
        await server.revoke(window)
        assert not window.is_bound
        with pytest.raises(aiordma.RemoteAccessError):
            await client.write(b"y", theirs[:1])
        assert bytes(region.view[0:1]) == b"x"
        window.close()
        region.close()


@pytest.mark.parametrize("kind", TYPES)
async def test_a_window_can_be_bound_again_with_another_rkey(kind: MemoryWindowType) -> None:
    async with connected() as (client, server):
        memory = bytearray(b"0123456789abcdef")
        region = server.register(memory, BINDABLE)
        window = await server.open_window(kind)
        rkeys = set()
        for i in range(3):
            completion = await server.post_bind_window(
                window, region[4 * i : 4 * i + 4], Access.REMOTE_READ
            )
            assert completion.operation is WorkCompletionOpcode.BIND_MW
            rkeys.add(window.rkey)
            assert await client.read_bytes(window.remote) == memory[4 * i : 4 * i + 4]
            await server.revoke(window)
        assert len(rkeys) == 3


@one_loop
async def test_what_a_window_cannot_be_bound_to_is_refused_before_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[None] = []
    async with connected() as (_, server):
        region = server.register(bytearray(64))
        monkeypatch.setattr(aiordma.Connection, "open_window", lambda *_: made.append(None))
        for memory in (region[:], bytearray(64)):
            with pytest.raises((TypeError, ValueError)):
                await server.bind(memory, BOTH)  # type: ignore[arg-type]
    assert not made


@pytest.mark.parametrize("kind", TYPES)
async def test_a_window_is_invalidated_once(kind: MemoryWindowType) -> None:
    """A device that finds nothing to invalidate breaks the connection."""
    async with connected() as (client, server):
        region = server.register(bytearray(64), BINDABLE)
        window = await server.bind(region[:], BOTH, kind)
        request = server.post_invalidate(window)
        with pytest.raises(ValueError, match="posted already"):
            server.post_invalidate(window)
        with pytest.raises(ValueError, match="posted already"):
            await server.revoke(window)
        await request
        with pytest.raises(ValueError, match="bind it first"):
            server.post_invalidate(window)
        await both_ways(client, server)


async def test_region_under_a_window_that_is_still_bound_stays_registered() -> None:
    async with connected() as (client, server):
        memory = bytearray(16)
        region = server.register(memory, BINDABLE)
        window = await server.bind(region[:], Access.REMOTE_WRITE)
        theirs = window.remote
        window.mark_invalidated()  # which is wrong
        for _ in range(2):
            with pytest.raises(aiordma.BusyError, match="a memory window is bound to it"):
                region.close()
            assert not region.closed
        await client.write(b"done by the peer", theirs)
        assert memory == b"done by the peer"
        window.close()
        region.close()
        assert region.closed


@pytest.mark.promise("A buffer is held until its request completes")
async def test_memory_under_a_window_that_is_still_bound_is_kept() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(4000), BINDABLE)
        window = await server.bind(region[:], Access.REMOTE_WRITE)
        theirs = window.remote
        window.mark_invalidated()
        with pytest.raises(aiordma.BusyError):
            region.close()
        del region, window
        gc.collect()
        others = [bytearray(4000) for _ in range(200)]
        await client.write(b"x" * 4000, theirs)
        assert not any(map(any, others))


async def test_the_peers_send_revokes_what_it_was_given() -> None:
    async with connected() as (client, server):
        memory = bytearray(16)
        region = server.register(memory, BINDABLE)
        window = await server.bind(region[:], Access.REMOTE_WRITE)
        theirs = window.remote
        await client.write(b"done by the peer", theirs)
        await client.send(b"all yours", invalidate=theirs.rkey)
        assert (await server.receive_message()).data == b"all yours"
        window.mark_invalidated()
        assert not window.is_bound
        assert memory == b"done by the peer"
        with pytest.raises(aiordma.RemoteAccessError):
            await client.write(b"x", theirs[:1])


@one_loop
@pytest.mark.capability("invalidation_told")
async def test_message_names_the_invalidated_rkey() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(16), BINDABLE)
        theirs = (await server.bind(region[:], Access.REMOTE_WRITE)).remote
        await client.send(b"all yours", invalidate=theirs.rkey)
        message = await server.receive_message()
        assert message == aiordma.types.Message(b"all yours", None, theirs.rkey)


@one_loop
async def test_what_a_window_cannot_be_bound_to_is_refused() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(64), BINDABLE)
        window = await server.open_window()
        with pytest.raises(ValueError, match="bind it first"):
            _ = window.remote
        with pytest.raises(ValueError, match="bind it first"):
            server.post_invalidate(window)
        with pytest.raises(ValueError, match="REMOTE_READ"):
            server.post_bind_window(window, region[:], Access.LOCAL_WRITE)
        with pytest.raises(TypeError, match="slice"):
            server.post_bind_window(window, bytearray(8), BOTH)  # type: ignore[arg-type]
        plain = server.register(bytearray(64))
        with pytest.raises(ValueError, match=r"post_bind_window\(\): memory: .*expected .*MW_BIND"):
            server.post_bind_window(window, plain[:], BOTH)
        fixed = server.register(bytes(64), Access.MW_BIND)
        with pytest.raises(
            ValueError, match=r"post_bind_window\(\): memory: .*expected .*LOCAL_WRITE"
        ):
            server.post_bind_window(window, fixed[:], Access.REMOTE_WRITE)
        with pytest.raises(ValueError, match=r"post_bind_window\(\): memory: no bytes: give"):
            server.post_bind_window(window, region[:0], BOTH)
        text = r"post_bind_window\(\): window=.*: it belongs to another connection"
        with pytest.raises(ValueError, match=text):
            client.post_bind_window(window, region[:], BOTH)
        await server.post_bind_window(window, region[:], BOTH)
        with pytest.raises(
            ValueError, match=r"post_bind_window\(\): window=.*: it is bound: revoke it first"
        ):
            server.post_bind_window(window, region[:], BOTH)
        window.close()
        window.close()
        with pytest.raises(aiordma.ClosedError):
            server.post_bind_window(window, region[:], BOTH)
        first = await server.open_window(MemoryWindowType.TYPE_1)
        with pytest.raises(aiordma.NotSupportedError, match="type 1"), server.chain() as chain:
            chain.post_bind_window(first, region[:], BOTH)
        await client.send(b"still there")
        assert await server.receive() == b"still there"


Invalidate = Callable[[Connection, BoundWindow], Awaitable[object]]


async def chain_invalidate(connection: Connection, window: BoundWindow) -> None:
    with connection.chain() as chain:
        chain.post_invalidate(window)


async def post_invalidate(connection: Connection, window: BoundWindow) -> None:
    await connection.post_invalidate(window)


@pytest.mark.parametrize("invalidate", [post_invalidate, chain_invalidate, Connection.revoke])
async def test_invalidation_of_another_connections_window(invalidate: Invalidate) -> None:
    """A device would find no window of the connection to invalidate, and end the connection."""
    async with connected() as (client, server):
        region = server.register(bytearray(64), BINDABLE)
        window = await server.bind(region[:], Access.REMOTE_READ)
        with pytest.raises(ValueError, match=r"\(\): window=.*: it belongs to another connection"):
            await invalidate(client, window)
        assert window.is_bound
        await server.revoke(window)
        await both_ways(client, server)


async def test_a_bind_and_the_message_that_gives_it_away_are_one_chain() -> None:
    async with connected() as (client, server):
        region = server.register(bytearray(b"for the peer only"), BINDABLE)
        window = await server.open_window()
        rkey = window._window.next_rkey()
        theirs = RemoteMemory(region.address, region.length, rkey)
        with server.chain(signal_last_only=True) as chain:
            chain.post_bind_window(window, region[:], Access.REMOTE_READ)
            chain.post_send(theirs.pack())
        given = RemoteMemory.unpack(await client.receive())
        assert await client.read_bytes(given) == b"for the peer only"
        for request in chain.requests:
            await request
        assert window.remote == theirs


async def test_windows_are_closed_with_their_connection() -> None:
    async with connected() as (_, server):
        region = server.register(bytearray(64), BINDABLE)
        window = await server.bind(region[:], BOTH)
        await server.aclose()
        assert window._window.closed
        assert region.closed


@one_loop
async def test_binding_and_revoking_wait_for_their_turn() -> None:
    async with connected(server={"options": aiordma.ConnectionOptions(max_send_wr=1)}) as (
        client,
        server,
    ):
        region = server.register(bytearray(64), BINDABLE)

        async def talk() -> None:
            for _ in range(5):
                await server.send(b"busy")

        async def listen() -> None:
            for _ in range(15):
                await client.receive()

        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            for _ in range(3):
                group.start_soon(talk)
            for _ in range(3):
                window = await server.bind(region[:], BOTH)
                await server.revoke(window)
                window.close()
        assert free_sends(server) == 1
