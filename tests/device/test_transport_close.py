"""How asyncio's transports over RDMA end: connection_lost is called once, whatever happens."""

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import pytest

from aiordma import DisconnectedError, streams
from aiordma.streams.rsocket import CLOSE_TIMEOUT, Rsocket
from tests.device.transports import LOOPS, Recorder, Run, on_loop, two
from tests.devices import ADDRESS

pytestmark = [pytest.mark.one_kernel_device, pytest.mark.slow]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each of asyncio's loops."""
    return partial(on_loop, LOOPS[request.param])


class Counts(Recorder):
    """Counts the calls of connection_lost."""

    calls = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls += 1
        super().connection_lost(exc)


@pytest.mark.parametrize("backlog", [0, 500_000])
@pytest.mark.parametrize("ending", ["close", "abort"])
def test_connection_lost_is_called_at_the_end_of_the_loop(
    run: Run, ending: str, backlog: int
) -> None:
    kept: list[Counts] = []

    async def main() -> None:
        server = await streams.create_server(Counts, ADDRESS, 0, buffer_size=8192)
        address = server.sockets[0].getsockname()
        transport, client = await streams.create_connection(Counts, *address, buffer_size=8192)
        kept.append(client)
        server.close()
        transport.write(bytes(backlog))
        getattr(transport, ending)()

    run(main)
    assert [each.calls for each in kept] == [1]


def plain_factory(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]
) -> "asyncio.Task[Any]":
    """A task factory of Python 3.10 and before, without `context`."""
    return asyncio.Task(coroutine, loop=loop)


@pytest.mark.parametrize("name", ["asyncio", "polling"])
def test_a_task_factory_without_context_is_supported(name: str) -> None:
    """(uvloop passes `context` to every factory.)"""

    async def main() -> None:
        factory: Any = plain_factory
        asyncio.get_running_loop().set_task_factory(factory)
        async with two(Counts) as (client, server):
            client.transport.write(b"the last")
            client.transport.close()
            await client.lost.wait()
            await server.lost.wait()
            assert (client.error, server.data) == (None, b"the last")

    on_loop(LOOPS[name], main)


@pytest.mark.parametrize("first", ["close", "abort"])
@pytest.mark.parametrize("second", ["close", "abort"])
def test_connection_lost_is_called_once(run: Run, first: str, second: str) -> None:
    async def main() -> None:
        async with two(Counts) as (client, server):
            for ending in (first, second):
                getattr(client.transport, ending)()
            await client.lost.wait()
            await server.lost.wait()
            client.transport.abort()
            await asyncio.sleep(0.05)
            assert (client.calls, server.calls) == (1, 1)
            assert client.error is None

    run(main)


def test_connection_lost_comes_in_the_next_turn_if_the_peer_has_everything_by_then(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in asyncio: drain() raises after a close, so that a task that writes on ends."""

    async def main() -> None:
        async with two(Counts) as (client, _):
            client.transport.write(b"the last")
            client.transport.close()
            with monkeypatch.context() as patched:
                patched.setattr(Rsocket, "notify_drained", lambda self, callback: False)
                await asyncio.sleep(0)
            assert client.calls == 1

    run(main)


@pytest.mark.parametrize("is_paused", [False, True])
def test_the_end_of_the_connection_fails_a_close_with_a_backlog(run: Run, is_paused: bool) -> None:
    """As in asyncio: not everything that was written was sent."""

    async def main() -> None:
        async with two(Counts, buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            if is_paused:
                client.transport.pause_reading()
            client.transport.write(bytes(500_000))
            client.transport.close()
            await asyncio.sleep(0.05)
            server.transport.abort()
            await client.lost.wait()
            assert isinstance(client.error, ConnectionError)
            assert client.calls == 1

    run(main)


def test_the_end_of_the_peers_data_fails_a_close_with_a_backlog(run: Run) -> None:
    async def main() -> None:
        async with two(Counts, buffer_size=8192) as (client, server):
            server.transport.pause_reading()
            client.transport.write(bytes(500_000))
            client.transport.close()
            await asyncio.sleep(0.05)
            server.transport.close()
            await client.lost.wait()
            assert isinstance(client.error, ConnectionError)

    run(main)


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_transport_closes_after_its_loop_was_closed(run: Run, ending: str) -> None:
    """It has paused reading, so it did not get the error of the connection that was closed."""
    kept: list[Any] = []

    async def main() -> None:
        async with two() as (_client, server):
            address = server.transport.get_extra_info("sockname")
            transport, _ = await streams.create_connection(asyncio.Protocol, *address)
            transport.pause_reading()
            await transport.get_extra_info("connection").aclose()
            kept.append(transport)

    run(main)
    assert not kept[0].is_closing()
    getattr(kept[0], ending)()
    assert kept[0].is_closing()


# -- an abort with nothing left to be posted ------------------------------------------------------


@pytest.mark.parametrize("is_closed_first", [False, True])
def test_abort_sends_what_was_posted_and_the_end(run: Run, is_closed_first: bool) -> None:
    """As over TCP, where the kernel sends what it has. anyio's sockets close by an abort."""

    async def main() -> None:
        async with two(Counts) as (client, server):
            client.transport.write(bytes(100_000))
            assert client.transport.get_write_buffer_size() == 0
            if is_closed_first:
                client.transport.close()
            client.transport.abort()
            await asyncio.sleep(0)
            assert (client.calls, client.error) == (1, None)
            await server.lost.wait()
            assert (len(server.data), server.eof, server.error) == (100_000, True, None)

    run(main)


class AnswersAndFails(Counts):
    """Answers, and raises an error."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if data != b"?":
            self.transport.write(b"no")
            raise OSError("a fault of the program")


@pytest.mark.parametrize("linger", [(1, 0), (1, 5), (0, 0)])
@pytest.mark.parametrize("ending", ["close", "abort", "end of the loop"])
def test_linger_of_no_time_resets_the_stream(
    run: Run, ending: str, linger: tuple[int, int]
) -> None:
    """The usual recipe for it: the peer gets an error in place of an end of the data."""

    async def main() -> None:
        async with two() as (client, server):
            below = client.transport.get_extra_info("socket")
            below.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
            client.transport.write(b"hello")
            await server.until(lambda: server.data == b"hello")
            if ending == "end of the loop":
                client.transport._end_soon()
                await client.transport.get_extra_info("connection").aclose()
            else:
                getattr(client.transport, ending)()
            await server.lost.wait()
            assert server.eof is (linger != (1, 0))
            assert isinstance(server.error, ConnectionResetError) is (linger == (1, 0))
            await client.lost.wait()
            if ending != "end of the loop":
                assert client.error is None

    run(main)


def test_linger_of_no_time_resets_the_stream_once_the_backlog_is_posted(run: Run) -> None:
    async def main() -> None:
        async with two(buffer_size=8192) as (client, server):
            below = client.transport.get_extra_info("socket")
            below.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.transport.write(bytes(500_000))
            client.transport.close()
            await server.lost.wait()
            assert len(server.data) > 400_000  # what was posted last may be lost, as over TCP
            assert not server.eof
            assert isinstance(server.error, ConnectionResetError)

    run(main)


def test_the_peer_of_a_protocol_that_fails_gets_what_was_written(run: Run) -> None:
    async def main() -> None:
        async with two(AnswersAndFails) as (client, server):
            client.data_received = partial(Counts.data_received, client)
            client.transport.write(b"request")
            await client.lost.wait()
            assert (client.data, client.eof, client.error) == (b"no", True, None)
            assert str(server.error) == "a fault of the program"

    run(main)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("limit", [0.05, 3600], ids=["close_timeout", "aclose"])
def test_wait_of_an_abort_ends(run: Run, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's device never has everything."""

    async def main() -> None:
        async with two(Counts, close_timeout=limit) as (client, _server):
            connection = client.transport.get_extra_info("connection")
            with monkeypatch.context() as patched:
                patched.setattr(Rsocket, "notify_drained", lambda self, callback: True)
                client.transport.abort()
                await client.lost.wait()
            if limit > 1:
                await connection.aclose()
            await connection._endpoint.teardown.closed.wait()

    run(main)


ENDS_AT_ONCE = """
import asyncio, sys
from aiordma import streams

async def main():
    host, port, ending = sys.argv[1:]
    _, writer = await streams.open_connection(host, int(port))
    writer.write(bytes(100_000))
    getattr(writer.transport, ending)()

asyncio.run(main())
"""


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_a_program_that_ends_at_once_has_sent_what_it_wrote(ending: str) -> None:
    """As over TCP. The end of the event loop waits for it."""

    async def main() -> None:
        servers: asyncio.Queue[Counts] = asyncio.Queue()

        class Accepted(Counts):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                servers.put_nowait(self)

        server = await streams.create_server(Accepted, ADDRESS, 0)
        host, port = server.sockets[0].getsockname()
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", ENDS_AT_ONCE, host, str(port), ending)
        )
        accepted = await servers.get()
        await accepted.lost.wait()
        assert (len(accepted.data), accepted.eof, accepted.error) == (100_000, True, None)
        assert await program.wait() == 0
        server.close()
        await server.wait_closed()

    on_loop(asyncio.new_event_loop, main)


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.parametrize("ending", ["close", "abort"])
def test_the_end_of_the_loop_waits_for_the_peers_device(
    run: Run, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most `close_timeout` seconds, and only if everything was posted."""
    ours: list[Any] = []
    drained: list[Rsocket] = []

    def drain_later(rsocket: Rsocket, callback: Callable[[], object]) -> bool:
        def drain() -> None:
            drained.append(rsocket)
            callback()

        asyncio.get_running_loop().call_later(0.1, drain)
        return True

    async def main() -> None:
        server = await streams.create_server(Counts, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        transport, _ = await streams.create_connection(Counts, *address)
        server.close()
        ours.append(cast(Any, transport)._channel)
        monkeypatch.setattr(Rsocket, "notify_drained", drain_later)
        getattr(transport, ending)()

    run(main)
    assert ours[0] in drained


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
def test_the_end_of_the_loop_waits_no_longer_because_of_a_close(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a long `close_timeout`, whose peer's device never has everything."""
    monkeypatch.setattr("aiordma.streams.channel.ABORT_SECONDS", 0.1)
    monkeypatch.setattr("aiordma._runtime.reactor.LONGEST_END", 5.0)
    began: list[float] = []

    async def main() -> None:
        server = await streams.create_server(Counts, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        transport, protocol = await streams.create_connection(Counts, *address, close_timeout=3600)
        server.close()
        monkeypatch.setattr(Rsocket, "notify_drained", lambda rsocket, callback: True)
        transport.close()
        await asyncio.sleep(0.1)
        assert not protocol.lost.is_set()
        began.append(time.monotonic())

    run(main)
    assert time.monotonic() - began[0] < 4.0


# -- transports that are left open ----------------------------------------------------------------


class Accepted(Counts):
    """The server's side; it does not read before it is told to."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()


def peer_of_a_program(run: Run, written: int, **options: Any) -> tuple[Accepted, float]:
    """Run a program in a thread that writes so many bytes, and ends with its transport open. Return
    its peer, which reads only then, and how many seconds the program took."""
    servers: list[Accepted] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        made = asyncio.Event()

        def accept() -> Accepted:
            servers.append(Accepted())
            loop.call_soon(made.set)
            return servers[-1]

        server = await streams.create_server(accept, ADDRESS, 0, **options)
        address = server.sockets[0].getsockname()

        async def program() -> None:
            _, client = await streams.create_connection(Counts, *address, **options)
            client.transport.write(bytes(written))
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made.wait(), loop))
            kept.append(client)

        kept: list[Counts] = []
        began = loop.time()
        await asyncio.to_thread(run, program)
        took = loop.time() - began
        assert [each.calls for each in kept] == [1]
        await asyncio.sleep(0.1)
        servers[0].transport.resume_reading()
        await servers[0].lost.wait()
        server.close()
        await server.wait_closed()
        return took

    took: list[float] = []

    async def timed() -> None:
        took.append(await main())

    on_loop(asyncio.new_event_loop, timed)
    return servers[0], took[0]


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.filterwarnings("ignore:left open at the end of the event loop")
def test_an_open_transport_ends_its_data_with_the_loop(run: Run) -> None:
    """As over TCP: asyncio's StreamReader would lose what has arrived, if an error followed."""
    peer, _ = peer_of_a_program(run, 100_000)
    assert (len(peer.data), peer.eof, peer.error) == (100_000, True, None)


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.filterwarnings("ignore:left open at the end of the event loop")
def test_an_open_transport_with_a_backlog_is_cut_off_by_the_end_of_the_loop(run: Run) -> None:
    """What was cut off is no end of the data; and a peer that does not read delays nothing."""
    peer, took = peer_of_a_program(run, 500_000, buffer_size=8192)
    assert 0 < len(peer.data) < 500_000
    assert not peer.eof
    assert isinstance(peer.error, DisconnectedError)
    assert took < CLOSE_TIMEOUT / 2


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.filterwarnings("ignore:left open at the end of the event loop")
def test_open_transports_delay_the_end_of_the_loop_together(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for its peer's device, at most `close_timeout` seconds."""
    began: list[float] = []

    async def main() -> None:
        server = await streams.create_server(Counts, ADDRESS, 0, close_timeout=1.0)
        address = server.sockets[0].getsockname()
        for _ in range(10):
            await streams.create_connection(Counts, *address, close_timeout=1.0)
        server.close()
        monkeypatch.setattr(Rsocket, "notify_drained", lambda rsocket, callback: True)
        began.append(time.monotonic())

    run(main)
    assert 1.0 <= time.monotonic() - began[0] < 9.0  # ten if one waited for the other


# -- warnings -------------------------------------------------------------------------------------


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.parametrize("backlog", [0, 500_000])
@pytest.mark.parametrize("kind", ["the one that connected", "the one that was accepted"])
def test_a_transport_that_still_closes_at_the_end_of_the_loop_is_not_called_left_open(
    run: Run, kind: str, backlog: int, recwarn: pytest.WarningsRecorder
) -> None:
    """With or without a backlog, its close waits for a peer that does not read."""
    kept: list[Any] = []

    async def main() -> None:
        servers: list[Recorder] = []

        def make() -> Recorder:
            servers.append(Recorder())
            return servers[-1]

        server = await streams.create_server(make, ADDRESS, 0, buffer_size=8192)
        address = server.sockets[0].getsockname()
        _, client = await streams.create_connection(Recorder, *address, buffer_size=8192)
        kept.append(server)
        client.transport.write(b"?")
        while not servers:
            await asyncio.sleep(0.001)
        await servers[0].until(lambda: bool(servers[0].data))
        ends = [client, servers[0]]
        if kind != "the one that connected":
            ends.reverse()
        closing, reading = ends
        reading.transport.pause_reading()
        closing.transport.write(bytes(backlog))
        closing.transport.close()
        kept.extend(ends)
        server.close()

    run(main)
    text = "; ".join(str(each.message) for each in recwarn)
    # The side that does not read was left open, and the other one was not.
    assert text.count("<Connection ") == 1, text
