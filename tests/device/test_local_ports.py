"""Local ports that the connection manager chooses while a socket has them."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import VerbsCallError
from aiordma.streams import Stream, connect_stream, listen_stream
from aiordma.verbs import Identifier
from tests.device.players import both_ways, connected, one_loop
from tests.devices import ADDRESS
from tests.internals import MOST_ATTEMPTS

pytestmark = pytest.mark.anyio

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LAST, BUSY = 20000, 20015, range(20000, 20016, 4)  # no other test has one of these
ROUNDS = 20
"""In which at least one busy port is met, but for one run in 300; each has a substitute."""


class BusyPorts:
    """The driver finds the local port in use, so many times: siw does, if a socket has it.

    Args:
        call: the method that finds it, "_connect" or "listen".
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, call: str, times: int, error: int = errno.EADDRINUSE
    ) -> None:
        self.times, self.calls = times, 0
        real = getattr(Identifier, call)

        def refuse_at_first(identifier: Identifier, *arguments: Any) -> None:
            self.calls += 1
            if self.calls <= self.times:
                raise VerbsCallError(error, f"rdma_{call.removeprefix('_')}")
            real(identifier, *arguments)

        patch.setattr(Identifier, call, refuse_at_first)


@pytest.mark.parametrize("error", [errno.EADDRINUSE, errno.EADDRNOTAVAIL])
async def test_local_port_that_is_in_use_is_replaced(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = BusyPorts(monkeypatch, "_connect", 3, error)
    async with connected() as (client, server):
        await both_ways(client, server)
    assert ports.calls == 4


async def test_local_port_of_a_stream_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = BusyPorts(monkeypatch, "_connect", 3)

    async def serve(stream: Stream) -> None:
        await stream.send(await stream.receive())

    async with listen_stream(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        async with connect_stream(ADDRESS, listener.port) as stream:
            await stream.send(b"here")
            assert await stream.receive() == b"here"
        group.cancel_scope.cancel()
    assert ports.calls == 4


@pytest.mark.parametrize(("source_port", "calls"), [(0, MOST_ATTEMPTS), (34567, 1)])
async def test_local_port_in_use_is_an_error(
    source_port: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program chose it, and if each other one is in use."""
    ports = BusyPorts(monkeypatch, "_connect", 1000)
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with pytest.raises(aiordma.RdmaConnectionError, match="Address already in use") as caught:
            await aiordma.connect(ADDRESS, listener.port, source=(ADDRESS, source_port))
    assert caught.value.errno == errno.EADDRINUSE
    assert ports.calls == calls


async def test_local_port_of_a_listener_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = BusyPorts(monkeypatch, "listen", 3)
    async with connected() as (client, server):
        await both_ways(client, server)
    assert ports.calls == 4


@pytest.mark.parametrize(("port", "calls"), [(0, MOST_ATTEMPTS), (7471, 1)])
async def test_local_port_of_a_listener_in_use_is_an_error(
    port: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program chose it, and if each other one is in use."""
    ports = BusyPorts(monkeypatch, "listen", 1000)
    with pytest.raises(VerbsCallError, match="Another listener has this port") as caught:
        await aiordma.listen(ADDRESS, port)
    assert caught.value.errno == errno.EADDRINUSE
    assert ports.calls == calls


@contextmanager
def few_ports() -> Iterator[None]:
    """Let the system choose ports out of sixteen, of which sockets have four."""
    before = PORT_RANGE.read_text()
    with ExitStack() as stack:
        for port in BUSY:
            stack.enter_context(socket.socket()).bind((ADDRESS, port))
        PORT_RANGE.write_text(f"{FIRST} {LAST}")
        stack.callback(PORT_RANGE.write_text, before)
        yield


@one_loop
@pytest.mark.capability("librdmacm")
async def test_ports_of_sockets_are_passed_over() -> None:
    with few_ports():
        for _ in range(ROUNDS):
            async with connected() as (client, server):
                await both_ways(client, server)
