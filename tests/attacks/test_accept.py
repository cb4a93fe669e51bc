"""A listener whose peers ask and say nothing more, or ask far more often than others."""

import select
import socket
from contextlib import ExitStack

import anyio
import pytest

import aiordma
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import raw_socket
from tests.attacks.victim import HOST, Ready, Victim
from tests.conftest import BACKENDS
from tests.internals import requests_of
from tests.unit.mpa_peer import LOWER, REJECTS, UPPER, Frame

OTHER_HOST = "127.0.0.2"
REQUEST = Frame(inbound=4 | UPPER, outbound=4 | UPPER | LOWER).pack()
SILENT = 50
BACKLOG = 16

loops = pytest.mark.parametrize("loop", BACKENDS)


async def echo(connection: aiordma.Connection) -> None:
    async with connection:
        async for message in connection:
            await connection.send(message)


async def accept_and_echo(ready: Ready) -> None:
    """Accept one after the other, and echo in tasks. No handshake times out within the test."""
    async with (
        aiordma.listen(HOST, accept_timeout=3600) as listener,
        anyio.create_task_group() as group,
    ):
        ready(listener.port)
        while True:
            group.start_soon(echo, await listener.accept())


async def serve_once_other_asks(ready: Ready) -> None:
    """Let requests wait until one of the other address does, and then serve all that wait."""
    async with aiordma.listen(HOST, backlog=BACKLOG) as listener:
        ready(listener.port)
        while not any(OTHER_HOST in repr(request) for request in requests_of(listener)):
            await anyio.sleep(0.01)
        await listener.serve(echo)


def silent_peers(
    victim: Victim, stack: ExitStack, count: int, source: str = HOST
) -> list[socket.socket]:
    """Peers that send their request, and nothing else."""
    peers = []
    for _ in range(count):
        peer = stack.enter_context(raw_socket(victim.port, source))
        peer.sendall(REQUEST)
        peers.append(peer)
    return peers


def is_open(peer: socket.socket) -> bool:
    """Whether the victim has not ended the connection, as far as it has said."""
    peer.setblocking(False)
    try:
        while peer.recv(1000):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


@pytest.mark.promise("A listener's peers do not hold each other up")
@loops
def test_accept_passes_over_silent_peers(loop: str) -> None:
    with Victim(accept_and_echo, loop=loop) as victim, ExitStack() as stack:
        silent = silent_peers(victim, stack, SILENT)
        with GoodClient(victim.port) as client:
            client.must_progress()
            assert all(is_open(peer) for peer in silent)  # the victim still waits for each of them


def take_refusals(peers: list[socket.socket]) -> list[Frame]:
    """Read what has arrived, and return the rejections. Their peers leave the list."""
    refusals = []
    arrived = select.poll()  # select() takes no descriptor above 1,023
    for peer in peers:
        arrived.register(peer, select.POLLIN)
    by_fd = {peer.fileno(): peer for peer in peers}
    for fd, _ in arrived.poll(0):
        peer = by_fd[fd]
        peers.remove(peer)
        reply = Frame.receive(peer)
        refusals += [reply] if reply.flags & REJECTS else []
    return refusals


@pytest.mark.promise("A listener's peers do not hold each other up")
def test_flood_of_requests_does_not_lock_out_others() -> None:
    with Victim(serve_once_other_asks) as victim, ExitStack() as stack:
        flood = silent_peers(victim, stack, 4 * BACKLOG)
        refusals: list[Frame] = []
        while len(flood) > BACKLOG:  # those have filled the backlog
            refusals += take_refusals(flood)
        with GoodClient(victim.port, OTHER_HOST) as client:
            client.must_progress()
        refusals += take_refusals(flood)
        assert len(refusals) == 3 * BACKLOG + 1  # one of the flood has given way
        assert {each.private_data for each in refusals} == {b"the listener's backlog is full"}
