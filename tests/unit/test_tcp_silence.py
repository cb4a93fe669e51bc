"""Dead peers of the kernel's iWARP devices: what the kernel reports of its TCP sockets."""

import socket
from collections.abc import Callable
from typing import Any

import pytest

from aiordma import ConnectionOptions
from aiordma._runtime.tcp_silence import TcpInfo, TcpSilence, parse_answer, tcp_info
from tests.connections import connected
from tests.internals import retry_seconds

ENDS = (("192.0.2.1", 1), ("192.0.2.2", 2))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_is_asked_about_a_socket(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"this machine lacks {host}: {error}")
    with server, socket.create_connection(server.getsockname()[:2]) as client:
        ours, peer = client.getsockname()[:2], client.getpeername()[:2]
        info = tcp_info(ours, peer)
        if info is None:
            pytest.skip("this kernel lacks its module tcp_diag: modprobe tcp_diag")
        assert info.retransmits == 0
        assert info.unheard < 60
    assert tcp_info(("192.0.2.1", 1), ("192.0.2.2", 2)) is None


@pytest.mark.parametrize("answer", [b"", bytes(15), bytes(16), bytes(200)])
def test_other_answers_tell_nothing(answer: bytes) -> None:
    assert parse_answer(answer) is None


class Loop:
    """A loop whose clock the test moves; `info` is what the kernel reports of the socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        self.timers: list[Callable[[], None]] = []
        self.info: TcpInfo | None = TcpInfo(0, 0.0)
        monkeypatch.setattr("aiordma._runtime.tcp_silence.tcp_info", lambda *_: self.info)
        monkeypatch.setattr("aiordma._runtime.tcp_silence.system.now", lambda: self.time)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        self.timers.append(callback)
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.time += 1
            timers, self.timers = self.timers, []
            for callback in timers:
                callback()


class Watched:
    def __init__(self, loop: Loop, patience: float) -> None:
        self.probes, self.last_probe = 0, 0
        self.ends = 0
        given: Any = loop
        self.silence = TcpSilence(given, ENDS, patience, self.probe, self.end)

    def probe(self) -> None:
        self.probes += 1
        if self.probes == self.last_probe:
            self.silence.stop()

    def end(self) -> None:
        self.ends += 1


def test_a_peer_that_answers_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    loop.pass_seconds(100)
    assert (watched.ends, watched.probes) == (0, 0)


def test_silent_peer_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    loop.info = TcpInfo(0, 5.0)
    loop.pass_seconds(2)
    assert (watched.ends, watched.probes) == (0, 2)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_a_silent_peer_is_dead_after_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    loop.pass_seconds(100)
    loop.info = TcpInfo(1, 100.0)  # it had been idle for that long: the clock starts now
    loop.pass_seconds(3)
    assert watched.ends == 0
    loop.pass_seconds(1)
    assert watched.ends == 1
    loop.pass_seconds(10)
    assert (watched.ends, loop.timers) == (1, [])


def test_peer_that_answers_again_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    for _ in range(10):
        loop.info = TcpInfo(1, 2.0)
        loop.pass_seconds(2)
        loop.info = TcpInfo(0, 0.0)
        loop.pass_seconds(1)
    for _ in range(10):  # retransmits, and is acknowledged in between
        loop.info = TcpInfo(1, 1.0)
        loop.pass_seconds(1)
    assert watched.ends == 0


def test_an_unknown_socket_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    loop.info = None
    loop.pass_seconds(100)
    assert (watched.ends, watched.probes) == (0, 0)


def test_a_stopped_watch_looks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    watched.silence.stop()
    watched.silence.stop()
    assert loop.timers == []


def test_a_probe_that_fails_stops_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    watched = Watched(loop, 3)
    loop.info, watched.last_probe = TcpInfo(0, 5.0), 1
    loop.pass_seconds(10)
    assert (watched.probes, loop.timers) == (1, [])


PATIENCE: dict[str, tuple[dict[str, Any], float]] = {
    "default": ({}, retry_seconds(6, 16)),
    "an hour": ({"peer_timeout": 3600.0}, 900.0),
    "no limit": ({"options": ConnectionOptions(ack_timeout=0)}, 900.0),
}


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.anyio
@pytest.mark.parametrize(("options", "seconds"), PATIENCE.values(), ids=PATIENCE)
async def test_patience_is_the_peer_timeout(
    options: dict[str, Any], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []

    class Noted(TcpSilence):
        def __init__(self, loop: Any, addresses: Any, patience: float, *more: Any) -> None:
            super().__init__(loop, addresses, patience, *more)
            found.append(patience)

    monkeypatch.setattr("aiordma._endpoint.peer_watch.TcpSilence", Noted)
    monkeypatch.setattr("aiordma._runtime.hub.SOFTWARE", "another device")  # as siw
    both: Any = {"device": "software", **options}
    async with connected("127.0.0.1", server=both, client=both) as (client, server):
        assert found == [seconds, seconds]
        assert (client.peer_timeout, server.peer_timeout) == (max(seconds, 1), max(seconds, 1))


def test_the_defaults_notice_a_dead_peer_in_ten_seconds() -> None:
    options = ConnectionOptions()
    assert options.retry_count < 7  # which is for ever on rxe
    # Hardware may take four times as long (InfiniBand specification, 9.7.6.1.3).
    assert 4 * retry_seconds(options.retry_count, options.ack_timeout) < 10
