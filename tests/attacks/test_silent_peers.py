"""Peers that connect by TCP and then send nothing, or half of a request, and stay."""

import contextlib
import errno
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator

import anyio
import pytest

import aiordma
from tests.attacks.good_client import GoodClient
from tests.attacks.peer import raw_socket
from tests.attacks.victim import HOST, Ready, Victim
from tests.unit.mpa_peer import Frame, has_ended
from tests.waiting import wait_until

MANY_DESCRIPTORS = 8000
HALF = Frame().pack()[:10]


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """As many descriptors for this process, which is all the peers, as there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY_DESCRIPTORS:
        pytest.skip(f"{MANY_DESCRIPTORS} descriptors are needed, and there are {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class SilentPeers:
    """Connects so many sockets, each of which says the same and then nothing. One that the victim
    drops comes back at once, from a thread."""

    def __init__(self, port: int, count: int, said: bytes = b"", *, source: str = HOST) -> None:
        self._to = HOST, port
        self._count = count
        self._said = said
        self._source = source
        self._peers: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _connect(self) -> None:
        peer = socket.socket()
        peer.setblocking(False)
        peer.bind((self._source, 0))
        with contextlib.suppress(BlockingIOError):
            peer.connect(self._to)
        self._peers[peer.fileno()] = peer
        self._poll.register(peer, select.EPOLLOUT)

    def _run(self) -> None:
        while not self._is_over:
            for fd, events in self._poll.poll(0.05):
                self._see(fd, events)

    def _see(self, fd: int, events: int) -> None:
        if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLIN):
            self._poll.unregister(fd)
            self._peers.pop(fd).close()
            self._connect()
            return
        with contextlib.suppress(OSError):
            self._peers[fd].send(self._said)
        self._poll.modify(fd, select.EPOLLIN)

    def __enter__(self) -> "SilentPeers":
        for _ in range(self._count):
            self._connect()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(60)
        self._poll.close()
        for peer in self._peers.values():
            peer.close()


def take_descriptors(most: int) -> list[int]:
    """Open as many, or all there are."""
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while len(taken) < most:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    return taken


async def serve_commands(ready: Ready) -> None:
    """Echo every message. "take N" opens N files, "give" closes them; the answer has how many."""
    taken: list[int] = []

    async def handle(connection: aiordma.Connection) -> None:
        async for message in connection:
            words = bytes(message).split()
            if words[:1] == [b"take"]:
                taken.extend(take_descriptors(int(words[1])))
                await connection.send(b"%d" % len(taken))
            elif words[:1] == [b"give"]:
                while taken:
                    os.close(taken.pop())
                await connection.send(b"0")
            else:
                await connection.send(bytes(message))

    async with aiordma.listen(HOST, 0) as listener:
        ready(listener.port)
        await listener.serve(handle)


async def ask(connection: aiordma.Connection, command: bytes) -> bytes:
    with anyio.fail_after(60):
        await connection.send(command)
        return bytes(await connection.receive())


@pytest.mark.parametrize("said", [b"", HALF], ids=["nothing", "half"])
def test_silent_peers_do_not_lock_out_others(said: bytes) -> None:
    with (
        Victim(serve_commands, descriptors=MANY_DESCRIPTORS) as victim,
        GoodClient(victim.port) as early,
        SilentPeers(victim.port, 3000, said),
    ):
        for _ in range(3):
            with GoodClient(victim.port) as late:
                late.must_progress()
        early.must_progress()


def test_silent_peers_leave_descriptors() -> None:
    async def attack(victim: Victim) -> None:
        async with aiordma.connect(HOST, victim.port, device="software") as program:
            # While the peers keep coming, the program opens files.
            for _ in range(20):
                assert await ask(program, b"take 40") == b"40"
                assert await ask(program, b"give") == b"0"

    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(Victim(serve_commands, descriptors=1024))
        for host in range(2, 10):
            stack.enter_context(SilentPeers(victim.port, 250, source=f"127.0.0.{host}"))
        with GoodClient(victim.port) as client:
            client.must_progress()
            anyio.run(attack, victim)


def test_one_address_evicts_only_its_own_peers() -> None:
    request = Frame().pack()
    with (
        Victim(serve_commands, descriptors=128) as victim,
        raw_socket(victim.port, "127.0.0.2") as slow,
        contextlib.ExitStack() as stack,
    ):
        slow.sendall(request[:10])
        flood = [
            stack.enter_context(raw_socket(victim.port, "127.0.0.3")) for _ in range(128 // 4 + 20)
        ]
        # The oldest of the address that has the most have been dropped, the others have not.
        for peer in flood[:20]:
            assert has_ended(peer)
        slow.sendall(request[10:])
        assert Frame.receive(slow).is_reply
        flood[-1].sendall(request)
        assert Frame.receive(flood[-1]).is_reply


def test_shortage_is_logged_once_and_ends() -> None:
    async def attack(victim: Victim) -> None:
        async with aiordma.connect(HOST, victim.port, device="software") as program:
            assert int(await ask(program, b"take 10000")) > 0
            for _ in range(60):
                with pytest.raises(aiordma.RejectedError) as caught:
                    await aiordma.connect(HOST, victim.port, device="software", timeout=60)
                assert caught.value.reason == -errno.ECONNRESET
            assert await ask(program, b"give") == b"0"
            async with aiordma.connect(HOST, victim.port, device="software") as other:
                assert await ask(other, b"hello") == b"hello"

    with Victim(serve_commands, descriptors=256) as victim:
        anyio.run(attack, victim)
        wait_until(lambda: "RLIMIT_NOFILE" in victim.log())  # a thread reads it
        lines = [line for line in victim.log().splitlines() if "RLIMIT_NOFILE" in line]
        assert len(lines) == 1, victim.log()
        assert "256" in lines[0]
        assert "file descriptors" in lines[0]


def test_full_server_turns_peers_away_at_once() -> None:
    async def attack(victim: Victim) -> None:
        async with contextlib.AsyncExitStack() as stack:
            served: list[aiordma.Connection] = []
            is_full = False
            while not is_full:
                try:
                    connecting = aiordma.connect(HOST, victim.port, device="software")
                    served.append(await stack.enter_async_context(connecting))
                except aiordma.RejectedError:
                    is_full = True
            for each in served:
                assert await ask(each, b"hello") == b"hello"
            await served.pop().aclose()
            with anyio.fail_after(60):
                while True:  # the server takes a moment to see that one has left
                    with contextlib.suppress(aiordma.RejectedError):
                        await (await aiordma.connect(HOST, victim.port, device="software")).aclose()
                        break
            # The program has the descriptors that were kept for it.
            assert int(await ask(served[0], b"take 10")) == 10

    with Victim(serve_commands, descriptors=256) as victim:
        anyio.run(attack, victim)
        wait_until(lambda: "RLIMIT_NOFILE" in victim.log())
        assert victim.log().count("RLIMIT_NOFILE") == 1, victim.log()
