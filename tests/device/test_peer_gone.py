"""Peers that end, that are stopped or cut off: PeerGoneError, keepalive, and its limits."""

import signal
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.peers import peer_process
from tests.device.players import OWN_RECEIVES, Outcome, both_ways, connected, until
from tests.devices import ADDRESS, BUILT_IN
from tests.internals import Probe, endpoint_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.promise(
    "Every wait has a bound, except waits for the peer's program",
    "A peer that has gone is a PeerGoneError, or the end of the stream",
)
async def test_disconnect_of_the_peer_flushes_with_its_cause() -> None:
    async with connected(client=OWN_RECEIVES) as (client, server):
        receives = [client.post_recv(bytearray(8)) for _ in range(3)]
        await server.aclose()
        for receive in receives:
            with pytest.raises(aiordma.PeerGoneError) as raised:
                await receive
            assert isinstance(raised.value, aiordma.verbs.PeerFlushedError)
        assert isinstance(await client.ended(), aiordma.PeerGoneError)
        with pytest.raises(aiordma.PeerGoneError):
            client.post_recv(bytearray(8))
        with pytest.raises(aiordma.PeerGoneError):
            client.post_send(b"too late")


@pytest.mark.promise("A peer that has gone is a PeerGoneError, or the end of the stream")
async def test_own_close_is_no_peer_that_has_gone() -> None:
    async with connected(client=OWN_RECEIVES) as (client, _):
        receive = client.post_recv(bytearray(8))
        await client.aclose()
        with pytest.raises(aiordma.FlushedError) as raised:
            await receive
        assert not isinstance(raised.value, aiordma.PeerGoneError)
        assert not isinstance(client.cause, aiordma.PeerGoneError)


@pytest.mark.promise("A peer that has gone is a PeerGoneError, or the end of the stream")
@pytest.mark.capability("named_refusals")
async def test_refused_access_is_no_peer_that_has_gone() -> None:
    async with connected(client=OWN_RECEIVES) as (client, _):
        receive = client.post_recv(bytearray(8))
        with pytest.raises(aiordma.RemoteAccessError) as refused:
            await client.read_bytes(aiordma.RemoteMemory(4096, 8, 1))
        with pytest.raises(aiordma.FlushedError) as flushed:
            await receive
        for error in (refused.value, flushed.value):
            assert not isinstance(error, aiordma.PeerGoneError)


@pytest.mark.promise(
    "Every wait has a bound, except waits for the peer's program",
    "A peer that has gone is a PeerGoneError, or the end of the stream",
)
@pytest.mark.capability("rnr")
async def test_killed_peer_fails_the_messages_that_wait_for_it() -> None:
    async with (
        peer_process("silent") as peer,
        aiordma.connect(ADDRESS, peer.port) as client,
    ):
        outcome = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.of, lambda: client.send(b"no receive for it"))
            await anyio.wait_all_tasks_blocked()
            peer.signal(signal.SIGKILL)
        assert isinstance(outcome.error, aiordma.PeerGoneError)
        assert isinstance(await client.ended(), aiordma.PeerGoneError)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.capability("killed_peers_reported")
async def test_killed_peer_fails_the_receives_that_wait_for_it() -> None:
    async with (
        peer_process() as peer,
        aiordma.connect(ADDRESS, peer.port, receive_buffers=0) as client,
    ):
        first, second = (client.post_recv(bytearray(8)) for _ in range(2))
        await client.send(b"alive?")
        await first
        peer.signal(signal.SIGKILL)
        with pytest.raises(aiordma.verbs.PeerFlushedError):
            await second
        await until(lambda: not client.is_connected)
        with pytest.raises(aiordma.PeerGoneError):
            await client.send(b"too late")


@pytest.mark.promise("A peer that has gone is a PeerGoneError, or the end of the stream")
@pytest.mark.capability("killed_peers_reported")
async def test_killed_peer_ends_a_waiting_receive() -> None:
    """As an end of the stream: its kernel disconnects; TCP may reset the connection."""
    async with peer_process() as peer, aiordma.connect(ADDRESS, peer.port) as client:
        await client.send(b"alive?")
        await client.receive()
        outcome = Outcome()
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.of, client.receive)
            await anyio.wait_all_tasks_blocked()
            peer.signal(signal.SIGKILL)
        if isinstance(outcome.error, aiordma.EndOfStream):
            assert not isinstance(outcome.error, aiordma.PeerGoneError | ConnectionError)
        else:
            assert BUILT_IN
            assert isinstance(outcome.error, aiordma.DisconnectedError)


# -- keepalive --------------------------------------------------------------------------------


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("side", ["client", "server"])
async def test_keepalive_disturbs_no_living_peer(side: str) -> None:
    options: dict[str, Any] = {side: {"keepalive": 0.01}}
    async with connected(**options) as (client, server):
        for _ in range(3):
            await anyio.sleep(0.05)
            await both_ways(client, server)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_keepalive_needs_no_receive_of_the_peer() -> None:
    async with connected(client={"keepalive": 0.01}, server=OWN_RECEIVES) as (client, server):
        await anyio.sleep(0.1)
        receive = server.post_recv(bytearray(8))
        await client.send(b"hello")
        assert (await receive).byte_len == 5


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_keepalive_posts_nothing_while_requests_are_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes: list[bool] = []
    post = Probe.post

    def watched(probe: Probe, operation: str) -> None:
        slots = probe._sends.slots
        probes.append(slots.free < slots.total)
        post(probe, operation)

    monkeypatch.setattr(Probe, "post", watched)
    async with connected(client={"keepalive": 0.01}, server=OWN_RECEIVES) as (client, _):
        await until(lambda: len(probes) >= 3)
        assert client.is_connected
    assert not any(probes)
    count = len(probes)
    await anyio.sleep(0.05)
    assert len(probes) == count  # the end of the connection stops it


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("collected", [False, True])
async def test_keepalive_needs_no_free_slot(collected: bool) -> None:
    # A chain has the slots, whose requests are not in flight.
    options: dict[str, Any] = {
        "keepalive": 0.05,
        "options": aiordma.ConnectionOptions(max_send_wr=2),
    }
    async with connected(client=options) as (client, server):
        await both_ways(client, server)
        endpoint = endpoint_of(client)
        with client.chain() as chain:
            requests = [chain.post_send(b"later") for _ in range(2 * collected)]
            assert endpoint.work.sends.slots.free == 2 - 2 * collected
            posted = client.statistics().posted_sends
            await until(lambda: client.statistics().posted_sends >= posted + 3)
            if collected:
                with pytest.raises(aiordma.QueueFullError):
                    client.post_send(b"now")
        for request in requests:
            await request


# -- a peer that is stopped -------------------------------------------------------------------


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.capability("stopped_peers_acknowledge")
async def test_stopped_peer_is_no_peer_that_has_gone() -> None:
    # Its device, or the TCP of its kernel, acknowledges: only a limit of the program's own tells.
    async with (
        peer_process() as peer,
        aiordma.connect(ADDRESS, peer.port, keepalive=0.1, peer_timeout=1.0) as client,
    ):
        await client.send(b"alive?")
        assert await client.receive() == b"alive?"
        peer.signal(signal.SIGSTOP)
        with anyio.move_on_after(3) as limit:
            await client.receive()
        assert limit.cancelled_caught
        assert client.is_connected
        peer.signal(signal.SIGCONT)
        await client.send(b"and now?")
        assert await client.receive() == b"and now?"


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_connecting_to_a_stopped_peer_ends_with_its_timeout() -> None:
    async with peer_process() as peer:
        peer.signal(signal.SIGSTOP)
        with pytest.raises(aiordma.ConnectTimeoutError, match="took longer than 1 s"):
            await aiordma.connect(ADDRESS, peer.port, timeout=1.0)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_closing_does_not_wait_for_a_stopped_peer() -> None:
    async with (
        peer_process() as peer,
        aiordma.connect(
            ADDRESS, peer.port, options=aiordma.ConnectionOptions(max_send_wr=4)
        ) as client,
    ):
        await client.send(b"alive?")
        await client.receive()
        peer.signal(signal.SIGSTOP)
        sends = [client.post_send(bytes(16_000)) for _ in range(4)]
        for send in sends:
            send.add_done_callback(aiordma.WorkRequest.exception)
        await client.aclose()
        assert all(send.done() for send in sends)
