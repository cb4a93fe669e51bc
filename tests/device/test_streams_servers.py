"""The addresses of asyncio's servers and connections over RDMA, and how a server ends."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any

import pytest

import aiordma
from aiordma import streams
from tests.device.many_addresses import names
from tests.device.transports import LOOPS, Recorder, Run, echo, on_loop
from tests.devices import ADDRESS, IPV6
from tests.internals import endpoint_of

pytestmark = pytest.mark.one_kernel_device


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each of asyncio's loops."""
    return partial(on_loop, LOOPS[request.param])


@asynccontextmanager
async def serving(host: Any, port: Any, **options: Any) -> AsyncIterator[list[Any]]:
    """Yield the addresses of a server that echoes."""
    server = await streams.start_server(echo, host, port, **options)
    try:
        yield [each.getsockname() for each in server.sockets]
    finally:
        server.close()
        await server.wait_closed()


async def echoes(host: str, port: Any, **options: Any) -> tuple[Any, Any]:
    """Exchange bytes with a server; returns both addresses of the connection."""
    reader, writer = await streams.open_connection(host, port, **options)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"hello"
    names = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
    writer.close()
    await writer.wait_closed()
    return names


def test_ports_may_be_strings(run: Run) -> None:
    async def main() -> None:
        async with serving(ADDRESS, "0") as (address,):
            assert (await echoes(ADDRESS, str(address[1])))[1] == address

    run(main)


def test_unknown_service_is_an_address_error() -> None:
    async def main() -> None:
        for call in (streams.open_connection, partial(streams.start_server, echo)):
            with pytest.raises(aiordma.AddressError, match="'no-such-service' does not resolve"):
                await call(ADDRESS, "no-such-service")

    asyncio.run(main())


def test_addresses_of_ipv6_have_four_parts(run: Run) -> None:
    async def main() -> None:
        async with serving(IPV6, 0) as (address,):
            assert address == (IPV6, address[1], 0, 0)
            local, peer = await echoes(*address[:2])
            assert peer == address
            assert local == (IPV6, local[1], 0, 0)

    run(main)


@pytest.mark.parametrize("host", [None, ""])
def test_a_server_without_a_host_listens_on_all_addresses(run: Run, host: str | None) -> None:
    async def main() -> None:
        async with serving(host, 0) as (four, six):
            assert (four[0], six[0]) == ("0.0.0.0", "::")
            await echoes(ADDRESS, four[1])
            await echoes(IPV6, six[1])
        async with serving(host, 0, family=socket.AF_INET) as (four,):
            await echoes(ADDRESS, four[1])

    run(main)


def test_a_server_listens_on_each_address_of_a_name(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, IPV6, ADDRESS, ADDRESS)

    async def main() -> None:
        async with serving("many.test", 0) as (four, six):
            assert (four[0], six[0]) == (ADDRESS, IPV6)
            await echoes(*four)
            await echoes(*six[:2])
        async with serving(["many.test", ADDRESS], 0, family=socket.AF_INET) as (four,):
            assert four[0] == ADDRESS

    run(main)


def test_each_address_of_a_name_is_tried(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, IPV6)

    async def main() -> None:
        async with serving(IPV6, 0) as (address,):
            assert (await echoes("many.test", address[1]))[1] == address
            with pytest.raises(ConnectionRefusedError):
                await echoes("many.test", address[1], family=socket.AF_INET)
        with pytest.raises(ConnectionError, match="Multiple exceptions: ") as joined:
            await echoes("many.test", address[1])
        assert ADDRESS in str(joined.value)
        assert IPV6 in str(joined.value)
        with pytest.raises(ExceptionGroup) as group:
            await echoes("many.test", address[1], all_errors=True)
        assert [type(each) for each in group.value.exceptions] == [aiordma.RejectedError] * 2

    run(main)


@pytest.mark.parametrize("begin", ["start_serving", "serve_forever"])
def test_a_server_refuses_peers_until_it_serves(run: Run, begin: str) -> None:
    async def main() -> None:
        server = await streams.start_server(echo, ADDRESS, 0, start_serving=False)
        address = server.sockets[0].getsockname()
        for _ in range(2):
            assert not server.is_serving()
            with pytest.raises(ConnectionRefusedError, match=r"does not serve yet: try again"):
                await echoes(*address[:2])
        beginning = asyncio.create_task(getattr(server, begin)())
        await asyncio.sleep(0)
        assert server.is_serving()
        assert (await echoes(*address[:2]))[1] == address
        server.close()
        await asyncio.wait([beginning])
        await server.wait_closed()

    run(main)


def test_each_accepted_stream_has_a_context_of_its_own(run: Run) -> None:
    """As in asyncio, it is a copy of the one in which the server was started."""
    number: ContextVar[int] = ContextVar("number", default=0)
    numbers = count(1)
    made: list[int] = []
    seen: list[int] = []

    class Server(asyncio.Protocol):
        def __init__(self) -> None:
            made.append(number.get())
            number.set(next(numbers))

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            seen.append(number.get())
            self.transport.write(data)

    async def main() -> None:
        number.set(-1)
        server = await streams.create_server(Server, ADDRESS, 0)
        address = server.sockets[0].getsockname()
        number.set(-2)
        for _ in range(2):
            await echoes(*address[:2])
        assert (made, seen) == ([-1, -1], [1, 2])
        assert number.get() == -2
        server.close()
        server.close_clients()
        await server.wait_closed()

    run(main)


# -- the end --------------------------------------------------------------------------------------


@asynccontextmanager
async def serving_one() -> AsyncIterator[tuple[streams.StreamServer, Recorder]]:
    """Yield a server that has accepted a stream, and the stream's peer."""
    server = await streams.create_server(Recorder, ADDRESS, 0)
    _, peer = await streams.create_connection(Recorder, *server.sockets[0].getsockname())
    peer.transport.write(b"?")
    while not server._transports:
        await asyncio.sleep(0.001)
    yield server, peer
    server.close_clients()
    await peer.lost.wait()
    assert peer.error is None
    server.close()
    await server.wait_closed()


def test_wait_closed_of_a_closed_server_is_that_of_this_python(run: Run) -> None:
    """Python 3.11 waits for no connection then. Programs whose clients stay connected need that."""

    async def main() -> None:
        async with serving_one() as (server, _):
            server.close()
            waiting = asyncio.create_task(server.wait_closed())
            if sys.version_info >= (3, 12):
                await asyncio.sleep(0.05)
                assert not waiting.done()
                server.close_clients()
            await waiting

    run(main)


def test_wait_closed_of_an_open_server_waits_for_streams(run: Run) -> None:
    async def main() -> None:
        async with serving_one() as (server, _):
            waiting = asyncio.create_task(server.wait_closed())
            await asyncio.sleep(0)
            server.close()
            await asyncio.sleep(0.05)
            assert not waiting.done()
            server.close_clients()
            await waiting

    run(main)


def fail_handshake_before_close(listener: streams.StreamListener, close: Any) -> None:
    """Let the listener's next handshake fail, and be closed before its `accept` can raise that."""
    establish = endpoint_of(listener).handshakes._establish

    async def fail(request: Any, private_data: bytes) -> aiordma.Connection:
        connection = await establish(request, private_data)
        await connection.aclose()
        asyncio.get_running_loop().call_soon(close)
        raise aiordma.RdmaConnectionError("the peer's handshake failed")

    endpoint_of(listener).handshakes._establish = fail


def test_a_server_that_is_closed_when_a_handshake_fails_ends_in_order(run: Run) -> None:
    async def main() -> None:
        server = await streams.start_server(echo, ADDRESS, 0)
        (accepting,) = server._accepting
        fail_handshake_before_close(server._listeners[0], server.close)
        with contextlib.suppress(aiordma.RdmaError):
            await echoes(*server.sockets[0].getsockname()[:2])
        await server.wait_closed()
        await accepting

    run(main)


def test_serve_of_a_listener_that_is_closed_when_a_handshake_fails_returns(run: Run) -> None:
    async def main() -> None:
        listener = await streams.listen_stream(ADDRESS, 0)
        fail_handshake_before_close(listener, endpoint_of(listener).teardown.close)
        serving = asyncio.create_task(listener.serve(streams.Stream.aclose))
        with contextlib.suppress(aiordma.RdmaError):
            await echoes(ADDRESS, listener.port)
        await serving
        await listener.aclose()

    run(main)


def test_the_port_of_a_closed_server_can_be_used_again(run: Run) -> None:
    async def main() -> None:
        port = 0
        for _ in range(10):
            server = await streams.start_server(echo, ADDRESS, port)
            port = server.sockets[0].getsockname()[1]
            await echoes(ADDRESS, port)
            server.close()
        await server.wait_closed()
        server = await streams.start_server(echo, ADDRESS, port)
        server.close()
        await server.wait_closed()

    run(main)


def test_tasks_of_servers_and_connections_are_named(run: Run) -> None:
    """So that a program that waits for all tasks of its loop can leave them out."""

    async def main() -> None:
        async with serving_one():
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert others
            assert [each for each in others if not each.get_name().startswith("aiordma: ")] == []

    run(main)


def test_a_server_ends_with_all_tasks_of_its_loop(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio's own goes on: it has no task."""

    async def main() -> None:
        async with serving_one() as (server, peer):
            cancelled = asyncio.all_tasks() - {asyncio.current_task()}
            for task in cancelled:
                task.cancel()
            await asyncio.wait(cancelled)
            await peer.lost.wait()
            assert isinstance(peer.error, aiordma.RdmaError)
            peer.error = None
            assert not server.is_serving()
            assert server.sockets == ()
            assert repr(server)
        async with serving(ADDRESS, 0) as (address,):
            await echoes(*address[:2])

    run(main)
    assert "left open at the end of the event loop: <Listener on" in caplog.text
