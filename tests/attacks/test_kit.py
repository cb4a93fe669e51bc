"""The parts of an attack, without one: a test that uses them can fail."""

import os
import signal

import pytest

import aiordma
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import RawPeer, Stream, raw_socket
from tests.attacks.victim import HOST, Ready, Victim
from tests.unit.mpa_peer import ENHANCED, Frame, exactly


async def serve_echo(ready: Ready) -> None:
    """Echo every message, for the attacks that need no more."""

    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with await aiordma.listen(HOST, 0) as listener:
        ready(listener.port)
        await listener.serve(echo)


async def serve_nothing(ready: Ready) -> None:
    raise SystemExit("no service today")


def test_good_client_is_served() -> None:
    with Victim(serve_echo) as victim, GoodClient(victim.port) as client:
        client.must_progress()


def test_raw_peer_is_echoed() -> None:
    with Victim(serve_echo) as victim, RawPeer(victim.port) as peer:
        assert peer.reply.flags & ENHANCED
        peer.send(peer.message(b"hello"))
        # The echo's frame begins with its length, and has the message behind 18 bytes of headers.
        size = int.from_bytes(exactly(peer.socket, 2), "big")
        assert exactly(peer.socket, size)[18:23] == b"hello"


def test_stream_reaches_the_victim() -> None:
    with (
        Victim(serve_echo) as victim,
        GoodClient(victim.port) as client,
        RawPeer(victim.port) as peer,
    ):
        with Stream(peer, peer.write(0, 0, b"")) as stream:
            client.must_progress()
        assert stream.sent
        victim.require_alive()


def test_victim_that_dies_is_a_failure() -> None:
    victim = Victim(serve_echo)
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(AssertionError, match="ended with status -9"):
        victim.__exit__(None, None, None)


def test_victim_that_cannot_start_is_a_failure() -> None:
    with pytest.raises(AssertionError, match="no service today"):
        Victim(serve_nothing)


def test_client_that_fails_is_a_failure() -> None:
    victim = Victim(serve_echo)
    client = GoodClient(victim.port).__enter__()
    os.kill(victim.pid, signal.SIGKILL)
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(AssertionError, match="good client failed"):
        client.must_progress(1 << 40)
    with pytest.raises(AssertionError, match="good client failed"):
        client.__exit__(None, None, None)
    with pytest.raises(AssertionError, match="ended with status -9"):
        victim.__exit__(None, None, None)


def test_limits_hold_in_the_victim() -> None:
    with Victim(serve_echo, descriptors=77, address_space=2_000_000) as victim:
        with open(f"/proc/{victim.pid}/limits") as limits:
            text = limits.read().split("\n")
        assert any(line.startswith("Max open files") and " 77 " in line for line in text)
        assert any("Max address space" in line and "2048000000" in line for line in text)
        assert victim.descriptors() < 77
        assert victim.resident_kib() > 1000
        with raw_socket(victim.port) as plain:
            plain.sendall(Frame().pack())
            assert Frame.receive(plain).is_reply
