"""reconnecting(): connections to one peer, one after the other."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.peers import peer_process
from tests.device.players import OWN_RECEIVES, until
from tests.devices import ADDRESS

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device]

Handler = Callable[[aiordma.Connection], Awaitable[None]]

SLOWER: dict[str, Any] = {"first_delay": 0.05, "max_delay": 0.5}
FAST: dict[str, Any] = {"first_delay": 0.001, "max_delay": 0.01}


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[int]:
    """Yield the port of a listener that calls the handler for each connection."""
    async with (
        aiordma.listen(ADDRESS, 0, **options) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, handler)
        yield listener.port
        group.cancel_scope.cancel()


async def _answer_once(connection: aiordma.Connection) -> None:
    await connection.send(await connection.receive())


@pytest.mark.promise("Reconnecting retries no request")
async def test_reconnects_each_time_the_peer_has_gone() -> None:
    async with serving(_answer_once) as port:
        sessions = []
        async for session in aiordma.reconnecting(ADDRESS, port, **FAST):
            sessions.append(session)
            async with session as connection:
                await connection.send(b"%d" % session.number)
                assert await connection.receive() == b"%d" % session.number
                if session.number == 3:
                    break
                await connection.receive()  # EndOfStream
        assert [session.number for session in sessions] == [1, 2, 3]
        assert sessions[0].lost is None
        assert all(isinstance(each.lost, aiordma.DisconnectedError) for each in sessions[1:])
        assert all(each.uncertain == () for each in sessions)
        with pytest.raises(aiordma.ClosedError):  # break has closed it
            await connection.send(b"closed")


async def _stay(connection: aiordma.Connection) -> None:
    await connection.ended()


@pytest.mark.promise("Reconnecting retries no request")
async def test_block_that_ends_while_connected_lost_nothing() -> None:
    async with serving(_stay) as port:
        async for session in aiordma.reconnecting(ADDRESS, port, **FAST):
            if session.number == 2:
                assert session.lost is None
                await session.aclose()
                return
            async with session as connection:
                await connection.send(b"hello")


async def _raise_in_block(port: int, error: Exception) -> None:
    async for session in aiordma.reconnecting(ADDRESS, port, **FAST):
        async with session:
            raise error


@pytest.mark.promise("Reconnecting retries no request")
async def test_error_of_the_program_leaves_the_loop() -> None:
    async with serving(_answer_once) as port:
        with pytest.raises(ZeroDivisionError):
            await _raise_in_block(port, ZeroDivisionError())


async def test_end_of_another_connection_leaves_the_loop() -> None:
    async with serving(_answer_once) as port:
        with pytest.raises(aiordma.DisconnectedError, match="another peer"):
            await _raise_in_block(port, aiordma.DisconnectedError("another peer"))


async def _connects(port: int, **arguments: Any) -> None:
    async for session in aiordma.reconnecting(ADDRESS, port, **{**FAST, **arguments}):
        pytest.fail(f"{session!r} was not to be connected")


async def test_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="unknown_option"):
        await _connects(1, unknown_option=1)


@pytest.mark.promise("A peer that has gone is a PeerGoneError, or the end of the stream")
async def test_retry_on_adds_errors_of_the_block() -> None:
    async with serving(_answer_once) as port:
        async for session in aiordma.reconnecting(
            ADDRESS, port, retry_on=(ZeroDivisionError,), **FAST
        ):
            async with session:
                if session.number == 1:
                    raise ZeroDivisionError
                assert isinstance(session.lost, ZeroDivisionError)
                break


async def _offer_and_revoke(connection: aiordma.Connection) -> None:
    region = connection.register(bytearray(16), aiordma.Access.REMOTE_WRITE)
    remote = region.remote()
    region.close()
    await connection.send(remote.pack())
    await connection.ended()


async def _write_in_tasks(port: int, retry_on: type[Exception]) -> Exception | None:
    """Write to revoked memory in two tasks. Return why the session before was lost."""
    async for session in aiordma.reconnecting(ADDRESS, port, retry_on=(retry_on,), **FAST):
        async with session as connection, anyio.create_task_group() as group:
            if session.number == 2:
                return session.lost
            remote = aiordma.RemoteMemory.unpack(await connection.receive())
            for part in (remote[:8], remote[8:]):
                group.start_soon(connection.write, b"8 bytes.", part)
    return None


@pytest.mark.promise("A peer that has gone is a PeerGoneError, or the end of the stream")
async def test_retry_on_accepts_the_flushes_of_such_an_error() -> None:
    async with serving(_offer_and_revoke) as port:
        lost = await _write_in_tasks(port, aiordma.RemoteAccessError)
        assert isinstance(lost, aiordma.RemoteAccessError)


async def test_retry_on_refuses_the_flushes_of_other_errors() -> None:
    async with serving(_offer_and_revoke) as port:
        with pytest.raises(ExceptionGroup) as raised:
            await _write_in_tasks(port, aiordma.verbs.RemoteOperationError)
    assert any(isinstance(e, aiordma.RemoteAccessError) for e in raised.value.exceptions)


async def _receive_in_tasks(port: int, sessions: list[aiordma.types.Session]) -> None:
    async def receive_twice(connection: aiordma.Connection, number: int) -> None:
        await connection.receive()
        try:
            await connection.receive()
        except anyio.EndOfStream as error:
            if number == 2:
                raise ValueError from error
            raise

    async for session in aiordma.reconnecting(ADDRESS, port, **FAST):
        sessions.append(session)
        async with session as connection, anyio.create_task_group() as group:
            await connection.send(b"hello")
            group.start_soon(receive_twice, connection, session.number)


async def test_errors_of_the_tasks_of_a_block_are_distinguished() -> None:
    sessions: list[aiordma.types.Session] = []
    async with serving(_answer_once) as port:
        with pytest.raises(ExceptionGroup) as raised:
            await _receive_in_tasks(port, sessions)
    assert isinstance(raised.value.exceptions[0], ValueError)
    assert len(sessions) == 2


@pytest.mark.promise("Reconnecting retries no request")
@pytest.mark.capability("rnr")
async def test_uncertain_requests_are_those_that_did_not_complete() -> None:
    goes = anyio.Event()
    sends: list[aiordma.WorkRequest] = []

    async def take_one(connection: aiordma.Connection) -> None:
        await connection.post_recv(bytearray(8))
        await goes.wait()

    async with serving(take_one, **OWN_RECEIVES) as port:
        async for session in aiordma.reconnecting(ADDRESS, port, keepalive=0.01, **FAST):
            async with session as connection:
                if session.number == 2:
                    assert session.uncertain == tuple(sends[1:])
                    assert isinstance(session.lost, aiordma.PeerGoneError)
                    for request in session.uncertain:
                        assert isinstance(request.exception(), aiordma.PeerGoneError)
                    break
                sends += [connection.post_send(b"%d" % i) for i in range(3)]
                await sends[0]
                goes.set()
                await sends[1]


@pytest.mark.promise(
    "Every wait has a bound, except waits for the peer's program",
    "Reconnecting retries no request",
)
async def test_attempts_limit_the_connects_that_fail() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        port = listener.port
    with pytest.raises(aiordma.RdmaConnectionError, match=f"connect to {ADDRESS}:{port}"):
        await _connects(port, attempts=3)


@pytest.mark.promise("Reconnecting retries no request")
async def test_peer_that_returns_is_found() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        port = listener.port
    found: list[int] = []

    async def connect() -> None:
        async for session in aiordma.reconnecting(ADDRESS, port, **FAST):
            async with session as connection:
                await connection.send(b"hello")
                found.append(session.number)
                break

    async with anyio.create_task_group() as group:
        group.start_soon(connect)
        await anyio.sleep(0.05)
        async with aiordma.listen(ADDRESS, port) as listener, await listener.accept():
            await until(lambda: bool(found))
    assert found == [1]


@pytest.mark.promise("Reconnecting retries no request")
@pytest.mark.capability("killed_peers_reported")
async def test_killed_peer_is_replaced_by_another_process() -> None:
    """kill -9 while the program waits for an answer; a process that listens at the same port takes
    its place."""
    async with AsyncExitStack() as later, AsyncExitStack() as first:
        peer = await first.enter_async_context(peer_process())

        async def replace() -> None:
            await first.aclose()  # kills it
            await later.enter_async_context(peer_process(port=peer.port))

        async with anyio.create_task_group() as group:
            async for session in aiordma.reconnecting(ADDRESS, peer.port, timeout=5, **SLOWER):
                async with session as connection:
                    await connection.send(b"%d" % session.number)
                    assert await connection.receive() == b"%d" % session.number
                    if session.number == 1:
                        group.start_soon(replace)
                        await connection.receive()
                    assert isinstance(session.lost, aiordma.PeerGoneError)
                    break
            assert session.number == 2


@pytest.mark.promise("Reconnecting retries no request")
async def test_cancelled_pause_leaves_nothing() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        port = listener.port
    with anyio.move_on_after(0.2) as limit:
        await _connects(port, first_delay=100.0, max_delay=100.0)
    assert limit.cancelled_caught


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"attempts": 0}, r"reconnecting\(\): attempts=0 is not in 1\.\."),
        ({"first_delay": 0}, r"reconnecting\(\): first_delay=0"),
        ({"max_delay": -1}, r"reconnecting\(\): max_delay=-1"),
        ({"retry_on": ValueError}, r"reconnecting\(\): retry_on=.*tuple of exception classes"),
    ],
)
def test_invalid_arguments_raise_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        aiordma.reconnecting(ADDRESS, 1, **arguments)
