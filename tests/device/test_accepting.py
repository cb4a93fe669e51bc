"""`Listener.accept()` while peers do not finish their handshakes: which peer it returns, and what
becomes of the others."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aiordma
from aiordma import streams
from aiordma.streams.protocol import GRANT_BYTES, TABLE_ENTRIES, Hello
from tests.device.players import Outcome, both_ways, one_loop, reactor_in_use, until
from tests.device.silent_peer import SilentPeer, silent_peer
from tests.devices import ADDRESS
from tests.internals import (
    CREATES,
    ConnectionState,
    Endpoint,
    Handshakes,
    current_event_loop,
    endpoint_of,
    handshakes,
    handshakes_of,
    handshakes_under_way,
    hubs_of,
    reactor_of,
    requests_of,
    start_call,
)

pytestmark = [pytest.mark.anyio]

slow = pytest.mark.capability("slow_handshakes")

TABLE = aiordma.RemoteMemory(0x10000, GRANT_BYTES * TABLE_ENTRIES, 1)
HELLO = Hello(64, TABLE, aiordma.RemoteMemory(0x100000, 1 << 16, 2)).pack()
"""The private data of a silent peer of a stream's listener."""


def listen(**options: Any) -> Any:
    """A listener whose handshakes do not time out within a test."""
    return aiordma.listen(ADDRESS, 0, **{"accept_timeout": 3600.0} | options)


@asynccontextmanager
async def passed_over(
    listener: aiordma.Listener, private_data: bytes = b""
) -> AsyncIterator[tuple[aiordma.Connection, aiordma.Connection]]:
    """Yield (client, server), where the server was accepted past the peers that are silent."""
    async with anyio.create_task_group() as group:
        accepting = Outcome()
        group.start_soon(accepting.of, lambda: listener.accept(private_data=private_data))
        client = await aiordma.connect(ADDRESS, listener.port)
    assert accepting.error is None
    async with client, accepting.value as server:
        assert server.peer_address == client.local_address
        yield client, server


@pytest.mark.promise("A listener's peers do not hold each other up")
@slow
async def test_accept_returns_the_first_established() -> None:
    async with (
        listen() as listener,
        silent_peer(listener.port),
        passed_over(listener) as (client, server),
    ):
        assert handshakes_under_way(listener) == 1  # the silent one's goes on
        await both_ways(client, server)


@pytest.mark.promise("A listener's peers do not hold each other up")
@slow
async def test_late_peer_is_for_the_next_accept() -> None:
    async with listen() as listener, silent_peer(listener.port) as late:
        async with passed_over(listener):
            await late.finish()
            async with listener.accept() as server:
                assert server.is_connected
        assert handshakes_under_way(listener) == 0


@pytest.mark.promise("Cancellation loses no message and leaves nothing open")
@slow
async def test_cancelled_accept_leaves_its_handshake() -> None:
    async with listen() as listener, silent_peer(listener.port) as late:
        async with anyio.create_task_group() as group:
            group.start_soon(listener.accept)
            await until(lambda: handshakes_under_way(listener) == 1)
            group.cancel_scope.cancel()
        await late.finish()
        async with listener.accept() as server:
            assert server.is_connected


@one_loop
async def test_accept_cancelled_as_its_listener_closes_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one turn of the loop, the call gets its peer, and is cancelled before it runs."""
    async with listen() as listener:
        accepting = asyncio.create_task(listener.accept())
        hand_over = Handshakes._hand_over

        def hand_over_and_close(handshakes: Handshakes) -> None:
            had_caller = bool(handshakes._callers)
            hand_over(handshakes)
            if had_caller and not handshakes._callers:
                accepting.cancel()
                endpoint_of(listener).teardown.close()

        monkeypatch.setattr(Handshakes, "_hand_over", hand_over_and_close)
        with anyio.fail_after(30), suppress(aiordma.RdmaConnectionError):
            async with aiordma.connect(ADDRESS, listener.port) as client:
                await client.ended()
        with suppress(asyncio.CancelledError):
            await accepting
        assert accepting.cancelled()
    await until(lambda: not reactor_in_use())  # it closes in the background


@slow
async def test_closing_ends_handshakes() -> None:
    async with listen() as listener, silent_peer(listener.port) as silent:
        async with anyio.create_task_group() as group:
            accepting = Outcome()
            group.start_soon(accepting.of, listener.accept)
            await until(lambda: handshakes_under_way(listener) == 1)
            await listener.aclose()
        assert isinstance(accepting.error, aiordma.ClosedError)
        await silent.ended()
    assert not reactor_in_use()


async def test_closing_ends_a_handshake_as_it_begins() -> None:
    for turns in (0, 1, 2, 3, 5, 8, 13):
        async with listen() as listener, anyio.create_task_group() as group:
            connecting, accepting = Outcome(), Outcome()
            group.start_soon(connecting.of, lambda: aiordma.connect(ADDRESS, listener.port))
            await until(lambda: len(requests_of(listener)) == 1)
            group.start_soon(accepting.of, listener.accept)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            await listener.aclose()
        if accepting.value is None:
            assert isinstance(accepting.error, aiordma.ClosedError)
        for outcome in (connecting, accepting):
            if outcome.value is not None:
                await outcome.value.aclose()
    assert not reactor_in_use()


@pytest.mark.promise("A listener's peers do not hold each other up")
@slow
async def test_close_ends_connections_not_accepted() -> None:
    async with listen() as listener, silent_peer(listener.port) as late, passed_over(listener):
        await late.finish()
        await until(lambda: len(handshakes_of(listener)._finished) == 1)
        await listener.aclose()
        await late.ended()
    assert not reactor_in_use()


@slow
async def test_serving_takes_handshakes_left_behind() -> None:
    served = anyio.Event()

    async def handler(connection: aiordma.Connection) -> None:
        served.set()
        await connection.ended()

    async with listen() as listener, silent_peer(listener.port) as late:
        async with passed_over(listener), anyio.create_task_group() as group:
            group.start_soon(listener.serve, handler)
            await late.finish()
            await served.wait()
            group.cancel_scope.cancel()
        await late.ended()


@slow
async def test_handshakes_of_a_cancelled_serve_go_on_for_the_next_call() -> None:
    async with listen() as listener, silent_peer(listener.port) as silent:
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, aiordma.Connection.ended)
            await until(lambda: handshakes_under_way(listener) == 1)
            group.cancel_scope.cancel()
        await silent.finish()
        async with await listener.accept() as connection:
            assert connection.is_connected


@pytest.mark.promise(
    "Every wait has a bound, except waits for the peer's program",
    "A listener's peers do not hold each other up",
)
@slow
async def test_accept_raises_that_a_peer_did_not_finish() -> None:
    async with listen(accept_timeout=0.2) as listener, silent_peer(listener.port) as silent:
        with pytest.raises(aiordma.DisconnectedError, match=r"did not finish within 0\.2 s"):
            await listener.accept()
        await silent.ended()


@pytest.mark.promise("A listener's peers do not hold each other up")
@slow
async def test_failure_without_a_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiordma")
    async with listen() as listener:
        async with silent_peer(listener.port), anyio.create_task_group() as group:
            group.start_soon(listener.accept)
            await until(lambda: handshakes_under_way(listener) == 1)
            group.cancel_scope.cancel()
        await until(lambda: handshakes_under_way(listener) == 0)  # the peer has left
    (record,) = [record for record in caplog.records if record.module == "handshakes"]
    assert "was not accepted: " in record.getMessage()


@pytest.mark.promise("A listener's peers do not hold each other up")
@slow
async def test_accepted_peers_got_the_calls_private_data() -> None:
    async with listen() as listener, silent_peer(listener.port) as one:
        async with passed_over(listener, b"one") as (client, _):
            assert client.private_data.rstrip(b"\0") == b"one"
        async with silent_peer(listener.port) as two, passed_over(listener, b"two") as (client, _):
            assert client.private_data.rstrip(b"\0") == b"two"
            await one.ended()
            assert (await two.finish()).rstrip(b"\0") == b"two"
            async with listener.accept(private_data=b"two") as server:
                assert server.is_connected


@pytest.mark.promise("A listener's peers do not hold each other up")
@slow
async def test_silent_peers_give_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "MOST_HANDSHAKES", 2)
    async with (
        listen() as listener,
        silent_peer(listener.port) as oldest,
        silent_peer(listener.port) as newest,
        passed_over(listener) as (client, server),
    ):
        await oldest.ended()
        await both_ways(client, server)
        await newest.finish()
        async with listener.accept() as other:
            assert other.is_connected


async def hold_up(seconds: float) -> None:
    """Let each turn of the event loop take so long, until cancelled."""
    while True:
        time.sleep(seconds)  # noqa: ASYNC251 # what a program computes
        await anyio.lowlevel.checkpoint()


async def stay(_: aiordma.Connection) -> None:
    await anyio.sleep_forever()


async def accept_all(listener: aiordma.Listener | streams.StreamListener) -> None:
    with suppress(aiordma.ClosedError):
        while True:
            await (await listener.accept()).aclose()


@asynccontextmanager
async def taking(
    kind: str, monkeypatch: pytest.MonkeyPatch, most: int = 1
) -> AsyncIterator[tuple[aiordma.Listener, Any]]:
    """Yield a listener that takes its peers all the time, with so many handshakes in progress, and
    the function of a port that connects to it."""
    monkeypatch.setattr(handshakes, "MOST_HANDSHAKES", most)
    async with anyio.create_task_group() as group:
        if kind == "streams":
            async with streams.listen_stream(ADDRESS, accept_timeout=3600.0) as listening:
                group.start_soon(accept_all, listening)
                face = aiordma.Listener(endpoint_of(listening))
                yield face, lambda port: streams.connect_stream(ADDRESS, port)
                group.cancel_scope.cancel()
            return
        async with listen() as listener:
            if kind == "serve":
                group.start_soon(listener.serve, stay)
            else:
                group.start_soon(accept_all, listener)
            yield listener, lambda port: aiordma.connect(ADDRESS, port)
            group.cancel_scope.cancel()


async def connect_all(listener: aiordma.Listener, connect: Any, count: int = 2) -> None:
    """Connect peers at once. All must be accepted."""
    async with anyio.create_task_group() as clients:
        connecting = [Outcome() for _ in range(count)]
        for outcome in connecting:
            clients.start_soon(outcome.of, lambda: connect(listener.port))
    assert [outcome.error for outcome in connecting] == [None] * count
    for outcome in connecting:
        await outcome.value.aclose()


def open_slowly(monkeypatch: pytest.MonkeyPatch, wait: Any) -> None:
    """Let accepted peers wait for their queue pair, as if the worker threads were busy."""
    make = Endpoint.open

    async def open_slowly(endpoint: Endpoint, *args: Any, **options: Any) -> None:
        if endpoint.state is ConnectionState.ACCEPTING:
            await wait()
        await make(endpoint, *args, **options)

    monkeypatch.setattr(Endpoint, "open", open_slowly)


each_kind = pytest.mark.parametrize("kind", ["serve", "accept", "streams"])


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
@each_kind
async def test_no_peer_gives_way_because_the_loop_is_busy(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="aiordma")
    async with taking(kind, monkeypatch) as (listener, connect), anyio.create_task_group() as busy:
        busy.start_soon(hold_up, 0.12)
        await connect_all(listener, connect)
        busy.cancel_scope.cancel()
    assert "gave way" not in caplog.text


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
@each_kind
async def test_no_peer_gives_way_because_threads_are_busy(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="aiordma")
    slow_seconds = handshakes.SLOW_LOOKS * handshakes.LOOK_SECONDS
    open_slowly(monkeypatch, lambda: anyio.sleep(4 * slow_seconds))
    async with taking(kind, monkeypatch) as (listener, connect):
        await connect_all(listener, connect)
    assert "gave way" not in caplog.text


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
@each_kind
async def test_no_peer_gives_way_while_its_event_waits(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A destroying call holds up the events, and with them the end of a peer's handshake."""
    caplog.set_level(logging.INFO, logger="aiordma")
    monkeypatch.setattr(handshakes, "SLOW_LOOKS", 1 << 30)
    hello = HELLO if kind == "streams" else b""
    may_end = threading.Event()
    async with (
        taking(kind, monkeypatch) as (listener, _),
        silent_peer(listener.port, hello) as first,
    ):
        await until(lambda: listener.statistics().connection_requests == 1)
        async with silent_peer(listener.port, hello) as second:
            await until(lambda: listener.statistics().connection_requests == 2)
            monkeypatch.setattr(reactor_of(listener), "blocks", True)
            reactor_of(listener).destroy(may_end.wait, lambda _: None)
            try:
                await first.finish()
                # From here on, one more look at which it waited for the peer would be too many.
                waits = max(each.waits for each in handshakes_of(listener)._running)
                monkeypatch.setattr(handshakes, "SLOW_LOOKS", waits + 1)
                await anyio.sleep(20 * handshakes.LOOK_SECONDS)
            finally:
                may_end.set()
            await until(lambda: listener.statistics().established == 1)
            await second.finish()
            await until(lambda: listener.statistics().established == 2)
    assert "gave way" not in caplog.text


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
@each_kind
async def test_silent_peer_gives_way_before_one_without_a_queue_pair(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, may_make = [anyio.Event()], anyio.Event()
    hello = HELLO if kind == "streams" else b""

    async def wait() -> None:
        if not made[0].is_set():  # the first peer's
            made[0].set()
            await may_make.wait()

    open_slowly(monkeypatch, wait)
    async with (
        taking(kind, monkeypatch, most=2) as (listener, _),
        silent_peer(listener.port, hello) as oldest,
    ):
        await made[0].wait()
        async with silent_peer(listener.port, hello) as silent:
            await until(lambda: listener.statistics().connection_requests == 2)
            async with silent_peer(listener.port, hello) as newest:
                await silent.ended()
                await newest.finish()
            may_make.set()
            await oldest.finish()
            await until(lambda: listener.statistics().established == 2)


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
async def test_streams_are_accepted_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server begins all handshakes at once, as `serve` does, and not only beside slow ones."""
    monkeypatch.setattr(handshakes, "LOOK_SECONDS", 3600.0)
    count, all_began = 0, anyio.Event()

    async def wait() -> None:
        nonlocal count
        count += 1
        if count == 3:
            all_began.set()
        await all_began.wait()

    open_slowly(monkeypatch, wait)
    async with (
        streams.listen_stream(ADDRESS) as listener,
        await streams.start_server(lambda _, writer: writer.close(), ADDRESS, 0) as server,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, streams.Stream.aclose)
        for port in (listener.port, server.sockets[0].getsockname()[1]):
            count, all_began = 0, anyio.Event()
            with anyio.fail_after(30):
                async with anyio.create_task_group() as clients:
                    connecting = [Outcome() for _ in range(3)]
                    for each in connecting:
                        clients.start_soon(
                            each.of, lambda port=port: streams.connect_stream(ADDRESS, port)
                        )
            for outcome in connecting:
                await outcome.value.aclose()
        group.cancel_scope.cancel()


# -- accepts beside the connects of the same process -----------------------------------------------


async def accept_silent(listener: aiordma.Listener, peer: SilentPeer) -> None:
    """Accept a peer, while the process's connects wait."""
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            accepting = Outcome()
            group.start_soon(accepting.of, listener.accept)
            await peer.finish()
    await accepting.value.aclose()


accepts = pytest.mark.parametrize(
    "options", [{}, {"shared_receive": 16}, {"domain": "each"}], ids=str
)


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
@accepts
async def test_accept_needs_no_thread_of_connects(options: dict[str, Any]) -> None:
    may_end = threading.Event()
    async with listen(**options) as listener, silent_peer(listener.port) as peer:
        for _ in range(CREATES.max_workers):
            start_call(current_event_loop(), may_end.wait, lambda _: None)
        try:
            await accept_silent(listener, peer)
        finally:
            may_end.set()


@pytest.mark.promise("A listener's peers do not hold each other up")
@one_loop
@pytest.mark.natively
@accepts
async def test_accept_does_not_wait_for_locks_of_connects(options: dict[str, Any]) -> None:
    """Each of many connects that wait for a lock gets it in a turn of the loop of its own."""
    async with listen(**options) as listener, silent_peer(listener.port) as peer:
        await accept_silent(listener, peer)  # which opens what is shared
        async with silent_peer(listener.port) as other:
            opening = reactor_of(listener)._opening
            (hub,) = hubs_of(listener)
            async with opening, hub._making_queue:
                await accept_silent(listener, other)


async def test_several_accepts_at_once_get_a_peer_each() -> None:
    async with listen() as listener, anyio.create_task_group() as group:
        accepting = [Outcome() for _ in range(3)]
        for outcome in accepting:
            group.start_soon(outcome.of, listener.accept)
        clients = [await aiordma.connect(ADDRESS, listener.port) for _ in range(3)]
    servers = [outcome.value for outcome in accepting]
    peers = {server.peer_address for server in servers}
    assert peers == {client.local_address for client in clients}
    for connection in clients + servers:
        await connection.aclose()


async def test_only_as_many_peers_are_accepted_as_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "LOOK_SECONDS", 3600.0)  # a busy machine's would count as slow
    async with listen() as listener, anyio.create_task_group() as group:
        connecting = [Outcome() for _ in range(3)]
        for outcome in connecting:
            group.start_soon(outcome.of, lambda: aiordma.connect(ADDRESS, listener.port))
        await until(lambda: len(requests_of(listener)) == 3)
        async with listener.accept():
            assert (len(requests_of(listener)), handshakes_under_way(listener)) == (2, 0)
        await listener.aclose()
        await until(lambda: all(bool(each.value or each.error) for each in connecting))
        refused = [each for each in connecting if isinstance(each.error, aiordma.RejectedError)]
        assert len(refused) == 2
        (established,) = [each.value for each in connecting if each.value is not None]
        await established.aclose()
