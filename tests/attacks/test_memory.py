"""Attacks on the memory of a process: peers that send more than the program receives, that never
answer, or that only stay connected."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import anyio
import pytest

import aiordma
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import RawPeer, Stream
from tests.attacks.victim import HOST, Ready, Victim
from tests.unit.mpa_peer import exactly
from tests.unit.software_device import memory
from tests.unit.stream_peer import SEND

FLOOD, ASK, MOVED = b"flood", b"ask", b"moved"
ADDRESS_SPACE = 220_000
"""KiB, as `ulimit -v`: 100,000 more than the process has before the attack. Without a limit, the
attack would take 130,000."""
SECONDS = 60


async def serve_slow_reader(ready: Ready) -> None:
    """Echo messages. Of a peer that floods, receive the first one only, and then sleep; of one that
    asks for it, after a message of our own, whose arrival its device is to confirm."""

    async def answer(connection: aiordma.Connection) -> None:
        async for message in connection:
            if message.startswith(ASK):
                connection.post_send(b"confirm this")
            if message.startswith((ASK, FLOOD)):
                await anyio.sleep_forever()
            await connection.send(message)

    async with await aiordma.listen(HOST, 0) as listener:
        ready(listener.port)
        await listener.serve(answer)


async def serve_one_receive(ready: Ready) -> None:
    """Echo messages, with one receive for each connection; tell how many bytes were moved."""

    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(b"%d" % memory("moved") if message == MOVED else message)

    async with await aiordma.listen(HOST, 0, receive_buffers=1) as listener:
        ready(listener.port)
        await listener.serve(echo)


def wait_for(condition: Callable[[], bool], client: GoodClient) -> None:
    """Wait until an attack has come so far; the good client is served all along."""
    limit = time.monotonic() + SECONDS
    while not condition():
        client.must_progress(1)
        assert time.monotonic() < limit, "the attack did not reach its end"


def flood(peer: RawPeer, first: bytes = FLOOD, size: int = 16000) -> Stream:
    return Stream(peer, partial(peer.message, first + bytes(size)))


def many_small(peer: RawPeer) -> bytes:
    return b"".join([peer.message(b"small") for _ in range(1000)])


def test_process_without_memory_serves_others() -> None:
    with (
        Victim(serve_slow_reader, address_space=ADDRESS_SPACE) as victim,
        GoodClient(victim.port) as client,
        ExitStack() as stack,
    ):
        peers = [stack.enter_context(RawPeer(victim.port)) for _ in range(30)]
        floods = [stack.enter_context(flood(peer)) for peer in peers]
        wait_for(lambda: any(each.was_ended.is_set() for each in floods), client)
        client.must_progress(200)
        victim.require_alive()


def test_flood_of_small_messages_moves_few_bytes() -> None:
    with (
        Victim(serve_one_receive) as victim,
        GoodClient(victim.port) as client,
        ExitStack() as stack,
    ):
        peers = [stack.enter_context(RawPeer(victim.port, is_our_kind=False)) for _ in range(3)]
        floods = [stack.enter_context(Stream(peer, partial(many_small, peer))) for peer in peers]
        # What TCP and the device hold, and more: from here on a buffer is nearly full.
        wait_for(lambda: all(each.sent > 8 << 20 for each in floods), client)
        client.must_progress(100)
        with RawPeer(victim.port, is_our_kind=False) as peer:
            peer.send(peer.message(MOVED))
            assert int(receive_message(peer)) <= sum(each.sent for each in floods)


def test_unanswered_reads_share_a_limit() -> None:
    limit = 64
    with (
        Victim(serve_slow_reader, environment={"AIORDMA_SOFTWARE_HELD_MIB": f"{limit}"}) as victim,
        GoodClient(victim.port) as client,
        ExitStack() as stack,
    ):
        before = victim.resident_kib()
        peers = [stack.enter_context(RawPeer(victim.port)) for _ in range(6)]
        # None of them answers the READ of no bytes that comes behind the victim's message.
        floods = [stack.enter_context(flood(peer, ASK)) for peer in peers]
        wait_for(lambda: any(each.was_ended.is_set() for each in floods), client)
        client.must_progress(50)
        assert victim.resident_kib() - before < (limit + 16) << 10


@pytest.mark.promise("Load loses nothing, and leaves nothing")
def test_idle_connections_cost_little_memory() -> None:
    count, most = 200, 64  # KiB each; their 16 receives of 16 KiB would be 256
    with (
        Victim(serve_slow_reader) as victim,
        GoodClient(victim.port) as client,
        ExitStack() as stack,
    ):
        before = victim.resident_kib()
        for _ in range(count):
            stack.enter_context(RawPeer(victim.port))
        client.must_progress()
        assert victim.resident_kib() - before < count * most


@pytest.mark.promise("Load loses nothing, and leaves nothing")
def test_memory_is_given_back_when_peers_leave() -> None:
    count, size = 60, 16000
    with Victim(serve_slow_reader) as victim, GoodClient(victim.port) as client:
        before = victim.resident_kib()
        with ExitStack() as stack:
            for _ in range(count):
                peer = stack.enter_context(RawPeer(victim.port, is_our_kind=False))
                for _ in range(16):
                    peer.send(peer.message(bytes(size)))
                    receive_message(peer)
            used = victim.resident_kib() - before
            assert used > count * 256  # each of their receives has been filled
        wait_for(lambda: victim.resident_kib() - before < used / 2, client)


def receive_message(peer: RawPeer) -> bytes:
    """Receive the next SEND, and whatever comes before it."""
    while True:
        size = int.from_bytes(exactly(peer.socket, 2), "big")
        frame = exactly(peer.socket, size + -(size + 2) % 4 + 4)
        if frame[1] & 15 == SEND:
            return frame[18:size]
