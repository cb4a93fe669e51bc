"""The waits in the table of docs/dead-peers.md while a peer is silent: each ends at its bound,
which an option sets short here."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

import aiordma
from aiordma.streams import connect_stream, listen_stream
from aiordma.testing import Faults
from tests.attacks.test_unfinished_handshakes import silent_server
from tests.connections import connect_to
from tests.device.players import (
    OWN_RECEIVES,
    REMOTE,
    Outcome,
    both_ways,
    members,
    reactor_in_use,
    until,
)
from tests.device.silent_peer import silent_peer
from tests.devices import ADDRESS
from tests.internals import SOFTWARE, endpoint_of, handshakes_under_way

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

BOUND = 0.2
"""Seconds that the options of these tests set."""
NEVER = 3600.0
PATIENCE = 60
"""Seconds after which a wait counts as one without a bound. It is no measure of speed."""


@asynccontextmanager
async def silenced(
    faults: Faults, seconds: float = NEVER
) -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Yield (client, server), with one slot for sends at the client. A message of the client takes
    it, and is never acknowledged: its connection ends after these seconds."""
    async with aiordma.listen(ADDRESS, 0) as listener:
        client, server = await connect_to(
            listener, ADDRESS, options=aiordma.ConnectionOptions(max_send_wr=1)
        )
        async with client, server:
            await both_ways(client, server)
            faults.silence_peer(seconds)
            client.post_send(b"into the void").add_done_callback(aiordma.WorkRequest.exception)
            yield client, server


# -- handshakes -----------------------------------------------------------------------------------


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("said", [b"", b"MPA ID Rep"], ids=["nothing", "half"])
async def test_stream_to_silent_server_times_out(said: bytes) -> None:
    with silent_server(said) as port, anyio.fail_after(PATIENCE):
        with pytest.raises(aiordma.ConnectTimeoutError):
            await connect_stream(ADDRESS, port, timeout=BOUND, close_timeout=BOUND)
        # The connection waits for an answer until then, and the server's thread for its end.
        await until(lambda: not reactor_in_use())


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("is_prepared", [False, True])
async def test_accepted_peer_that_is_silent_times_out(is_prepared: bool) -> None:
    """`ConnectionRequest.accept`, and `establish` after `prepare`."""
    async with (
        aiordma.listen(ADDRESS, 0, accept_timeout=BOUND) as listener,
        silent_peer(listener.port) as peer,
    ):
        request = await listener.request()
        outcome = Outcome()
        with anyio.fail_after(PATIENCE):
            if is_prepared:
                async with request.prepare() as connection:
                    await outcome.of(connection.establish)
            else:
                await outcome.of(request.accept)
            await peer.ended()
        assert isinstance(outcome.error, aiordma.RdmaConnectionError)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_served_peer_that_is_silent_times_out() -> None:
    async with (
        aiordma.listen(ADDRESS, 0, accept_timeout=BOUND) as listener,
        silent_peer(listener.port) as peer,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, aiordma.Connection.ended)
        with anyio.fail_after(PATIENCE):
            await peer.ended()
        group.cancel_scope.cancel()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_silent_peer_of_a_stream_listener_times_out() -> None:
    async with (
        listen_stream(ADDRESS, 0, accept_timeout=BOUND) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, _ignore)
        async with silent_peer(listener.port) as peer:
            with anyio.fail_after(PATIENCE):
                await peer.ended()
        group.cancel_scope.cancel()


async def _ignore(_stream: object) -> None:
    """Serve a stream."""


# -- the send queue -------------------------------------------------------------------------------

BEHIND: dict[str, Callable[[aiordma.Connection], Awaitable[object]]] = {
    "send": lambda client: client.send(b"waits for a slot"),
    "write": lambda client: client.write(b"x", aiordma.RemoteMemory(0x1000, 1, 1)),
    "read": lambda client: client.read_bytes(aiordma.RemoteMemory(0x1000, 1, 1)),
    "fetch_add": lambda client: client.fetch_add(aiordma.RemoteMemory(0x1000, 8, 1), 1),
    "grant": lambda client: client.grant(bytearray(64), REMOTE),
    "bind": lambda client: client.bind(
        client.register(bytearray(64), aiordma.Access.LOCAL_WRITE | aiordma.Access.MW_BIND)[:],
        aiordma.Access.REMOTE_READ,
    ),
}
"""What waits for a slot of the send queue."""


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("call", BEHIND)
async def test_wait_for_a_slot_ends_with_the_connection(call: str, faults: Faults) -> None:
    async with silenced(faults, BOUND) as (client, _):
        outcome = Outcome()
        with anyio.fail_after(PATIENCE):
            await outcome.of(lambda: BEHIND[call](client))
            cause = await client.ended()
        assert isinstance(outcome.error, aiordma.RdmaError)
        assert type(outcome.error) is type(cause)
        assert isinstance(cause, aiordma.PeerGoneError)


# -- closing does not wait for a silent peer ------------------------------------------------------


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_grant_ends_while_the_peer_is_silent(faults: Faults) -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        client, server = await connect_to(listener, ADDRESS)
        async with client, server:
            await both_ways(client, server)
            buffer = bytearray(64)
            granted = await server.grant(buffer, REMOTE)
            expiring = await server.grant(buffer, REMOTE, expires=BOUND)
            faults.silence_peer(NEVER)
            server.post_send(b"into the void").add_done_callback(aiordma.WorkRequest.exception)
            with anyio.fail_after(PATIENCE):
                await expiring.ended()
                await granted.aclose()
            assert expiring.expired
            buffer.append(1)  # it is not held any more
            assert endpoint_of(server).cause is None


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_connection_closes_while_the_peer_is_silent(faults: Faults) -> None:
    async with silenced(faults) as (client, _):
        with anyio.fail_after(PATIENCE):
            await client.aclose()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_domain_and_shared_queue_close_behind_silent_peers(faults: Faults) -> None:
    """Both are closed once their connections are, and these do not wait for the peers."""
    async with aiordma.open_domain(ADDRESS) as domain:
        shared = await aiordma.open_shared_receive(ADDRESS, domain=domain, buffers=4)
        async with members(2, shared) as (_, servers):
            faults.silence_peer(NEVER, times=0)
            for server in servers:
                server.post_send(b"into the void").add_done_callback(aiordma.WorkRequest.exception)
            with anyio.fail_after(PATIENCE):
                for server in servers:
                    await server.aclose()
                await shared.aclose()
                await domain.aclose()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("way", ["listener", "request", "reject", "accepting"])
async def test_listener_does_not_wait_for_silent_peers(way: str) -> None:
    """Closing it, closing or rejecting a request, and closing it during a handshake."""
    async with (
        aiordma.listen(ADDRESS, 0, accept_timeout=NEVER) as listener,
        silent_peer(listener.port) as peer,
        anyio.create_task_group() as group,
    ):
        accepting = Outcome()
        with anyio.fail_after(PATIENCE):
            if way == "accepting":
                group.start_soon(accepting.of, listener.accept)
                await until(lambda: handshakes_under_way(listener) == 1)
            elif way != "listener":
                request = await listener.request()
                await (request.reject() if way == "reject" else request.aclose())
            await listener.aclose()
            await peer.ended()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_stream_closes_while_the_peer_is_silent(faults: Faults) -> None:
    async with listen_stream(ADDRESS, 0) as listener:
        async with anyio.create_task_group() as group:
            accepted = Outcome()
            group.start_soon(accepted.of, listener.accept)
            client = await connect_stream(ADDRESS, listener.port, close_timeout=BOUND)
        faults.silence_peer(NEVER)
        await client.send(b"into the void")
        with anyio.fail_after(PATIENCE):
            await client.aclose()
            await accepted.value.aclose()


# -- waits for the peer's program, which only a limit of the program's own ends --------------------


class Ends:
    """What there is to wait for. The server has no receives."""

    def __init__(
        self,
        listener: aiordma.Listener,
        shared: aiordma.SharedReceiveQueue,
        client: aiordma.Connection,
        server: aiordma.Connection,
        grant: aiordma.types.Grant,
    ) -> None:
        self.listener, self.shared, self.grant = listener, shared, grant
        self.client, self.server = client, server


async def _event() -> None:
    with aiordma.verbs.Device(SOFTWARE).open() as context:
        await anext(context.async_events())


WAITS: dict[str, Callable[[Ends], Awaitable[object]]] = {
    "serve": lambda ends: ends.listener.serve(aiordma.Connection.ended),
    "accept": lambda ends: ends.listener.accept(),
    "request": lambda ends: ends.listener.request(),
    "receive": lambda ends: ends.client.receive(),
    "ended": lambda ends: ends.client.ended(),
    "Grant.ended": lambda ends: ends.grant.ended(),
    "limit": lambda ends: ends.shared.limit(1),
    "async_events": lambda _: _event(),
    "a message without a receive": lambda ends: ends.client.send(b"for no receive"),
}


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("wait", WAITS)
async def test_limit_of_the_program_ends_a_wait(wait: str) -> None:
    async with (
        aiordma.listen(ADDRESS, 0, **OWN_RECEIVES) as listener,
        aiordma.open_shared_receive(ADDRESS, buffers=4) as shared,
    ):
        client, server = await connect_to(listener, ADDRESS)
        async with client, server:
            receive = server.post_recv(bytearray(64))
            await client.send(b"first")
            await receive
            async with server.grant(bytearray(8), REMOTE) as grant:
                ends = Ends(listener, shared, client, server, grant)
                with anyio.move_on_after(BOUND) as limit:
                    await WAITS[wait](ends)
                assert limit.cancelled_caught
            # Nothing has happened to the connection.
            for text in (b"for no receive", b"next")[wait != "a message without a receive" :]:
                receive = server.post_recv(memory := bytearray(64))
                if text == b"next":
                    await client.send(text)
                length = (await receive).byte_len
                assert memory[:length] == text
