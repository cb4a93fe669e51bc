"""Handshakes that the other side begins and does not finish, in both directions."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import anyio
import pytest

import aiordma
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import raw_socket
from tests.attacks.services import echo, serve_echo
from tests.attacks.test_accept import OTHER_HOST, is_open
from tests.attacks.victim import HOST, Ready, Victim
from tests.internals import MOST_HANDSHAKES
from tests.unit.mpa_peer import LOWER, UPPER, Frame, has_ended

REQUEST = Frame(inbound=4 | UPPER, outbound=4 | UPPER | LOWER).pack()
HALF_A_REPLY = Frame(True).pack()[:10]
PATIENCE = 60


async def serve_echo_impatiently(ready: Ready) -> None:
    async with aiordma.listen(HOST, accept_timeout=0.2) as listener:
        ready(listener.port)
        await listener.serve(echo)


async def serve_echo_patiently(ready: Ready) -> None:
    async with aiordma.listen(HOST, accept_timeout=3600) as listener:
        ready(listener.port)
        await listener.serve(echo)


async def serve_late(ready: Ready) -> None:
    """Accept no request until the backlog has been full for a while."""
    async with aiordma.listen(HOST, backlog=16) as listener:
        ready(listener.port)
        await anyio.sleep(1)
        await listener.serve(echo)


@contextmanager
def silent_server(said: bytes, *, accepts: bool = True) -> Iterator[int]:
    """A plain socket that accepts by TCP, says so much, and reads what comes. Its port."""
    with closing(socket.create_server((HOST, 0), backlog=0)) as server, ExitStack() as stack:
        port = server.getsockname()[1]

        def run() -> None:
            peer, _ = server.accept()
            with closing(peer), suppress(ConnectionError):  # a reset, if the client gives up
                peer.sendall(said)
                while peer.recv(1000):
                    pass

        if accepts:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            stack.callback(thread.join, PATIENCE)
        else:
            # TCP's own queue is full: the request to connect gets no answer.
            for _ in range(2):
                filler = stack.enter_context(closing(socket.socket()))
                filler.setblocking(False)
                filler.connect_ex((HOST, port))
        yield port


def left_by_peers(port: int) -> int:
    """Return how many TCP connections to a port are open on its side only (CLOSE_WAIT)."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(local.endswith(f":{port:04X}") and state == "08" for _, local, _, state, *_ in lines)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.anyio
@pytest.mark.parametrize("said", [b"", HALF_A_REPLY], ids=["nothing", "half"])
async def test_connect_to_silent_server_times_out(said: bytes) -> None:
    with (
        silent_server(said) as port,
        pytest.raises(aiordma.ConnectTimeoutError, match="waiting for the peer to accept"),
    ):
        await aiordma.connect(HOST, port, device="software", timeout=3)


@pytest.mark.anyio
async def test_connect_to_full_server_times_out() -> None:
    with (
        silent_server(b"", accepts=False) as port,
        pytest.raises(aiordma.ConnectTimeoutError, match="waiting for the peer to accept"),
    ):
        await aiordma.connect(HOST, port, device="software", timeout=3)


@pytest.mark.promise("A listener's peers do not hold each other up")
def test_peers_without_a_first_frame_delay_no_other() -> None:
    with Victim(serve_echo) as victim, ExitStack() as stack:
        for _ in range(50):
            peer = stack.enter_context(raw_socket(victim.port))
            peer.sendall(REQUEST)
            assert Frame.receive(peer).is_reply  # accepted, and now it says nothing
        with GoodClient(victim.port) as client:
            client.must_progress()


@pytest.mark.promise("A listener's peers do not hold each other up")
def test_unfinished_handshakes_of_serve_are_bounded() -> None:
    with Victim(serve_echo_patiently) as victim, ExitStack() as stack:
        with GoodClient(victim.port, OTHER_HOST) as before:
            silent = []
            for _ in range(MOST_HANDSHAKES + 72):
                peer = stack.enter_context(raw_socket(victim.port))
                peer.sendall(REQUEST)
                assert Frame.receive(peer).is_reply
                silent.append(peer)
            # The oldest ones give way, to each other and to a good peer, of whatever address.
            for address in (HOST, OTHER_HOST):
                with GoodClient(victim.port, address) as client:
                    client.must_progress()
            before.must_progress()
        # The device itself ends such peers, after a minute.
        deadline = time.monotonic() + 30
        while any(is_open(peer) for peer in silent[:72]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(is_open(peer) for peer in silent[:72])
        assert all(is_open(peer) for peer in silent[-100:])
        assert "Traceback" not in victim.log()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_peer_without_a_first_frame_is_dropped() -> None:
    with Victim(serve_echo_impatiently) as victim:
        with ExitStack() as stack:
            peers = [stack.enter_context(raw_socket(victim.port)) for _ in range(5)]
            for peer in peers:
                peer.sendall(REQUEST)
                assert Frame.receive(peer).is_reply
            for peer in peers:
                assert has_ended(peer)
        with GoodClient(victim.port) as client:
            client.must_progress()


def test_requests_of_peers_that_left_do_not_stay() -> None:
    with Victim(serve_late) as victim:
        for _ in range(100):
            with raw_socket(victim.port) as peer:
                peer.sendall(REQUEST)
        deadline = time.monotonic() + PATIENCE
        while left_by_peers(victim.port) and time.monotonic() < deadline:
            time.sleep(0.05)
        with GoodClient(victim.port) as client:
            client.must_progress()
