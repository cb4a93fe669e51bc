"""What anyio expects of a TCP stream and its listener (TestTCPStream and TestTCPListener), in our
own words, on streams."""

import asyncio
import gc
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from socket import AF_INET, AF_INET6
from typing import Any

import anyio
import pytest
import trustme
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.text import TextStream
from anyio.streams.tls import TLSAttribute, TLSStream

from aiordma import DisconnectedError
from aiordma.streams import Stream, StreamListener, connect_stream, listen_stream
from tests.devices import ADDRESS, IPV6
from tests.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.one_kernel_device, pytest.mark.slow]


async def accepted_by(listener: StreamListener) -> tuple[Stream, Stream]:
    """Return (client, server)."""
    servers: list[Stream] = []

    async def accept() -> None:
        servers.append(await listener.accept())

    async with anyio.create_task_group() as group:
        group.start_soon(accept)
        client = await connect_stream(ADDRESS, listener.port)
    # On iWARP the side that connected sends first.
    await client.send(b"?")
    assert await servers[0].receive() == b"?"
    return client, servers[0]


@asynccontextmanager
async def both() -> AsyncIterator[tuple[Stream, Stream]]:
    async with listen_stream(ADDRESS) as listener:
        client, server = await accepted_by(listener)
        async with client, server:
            yield client, server


@pytest.mark.parametrize("ends", [False, True])
async def test_is_readable_tells_what_has_arrived_before_the_loop_runs(ends: bool) -> None:
    """httpcore asks before it uses an idle connection."""
    async with both() as (client, server):
        assert not client.is_readable
        await (server.aclose() if ends else server.send(b"hello"))
        wait_until(lambda: client.is_readable)  # without the loop
        if ends:
            with pytest.raises(anyio.EndOfStream):
                await client.receive()
        else:
            assert await client.receive() == b"hello"


# -- the end of the event loop --------------------------------------------------------------------


async def send_large(stream: Stream) -> None:
    await stream.send(bytes(4_000_000))


async def send_registered(stream: Stream) -> None:
    await stream.send(stream.connection.register(bytearray(4_000_000)))


async def send_registered_by_the_call(stream: Stream) -> None:
    await stream.send(bytes(5_000_000))


async def send_blocks(stream: Stream) -> None:
    """The ring has room for a whole number of them."""
    while True:
        await stream.send(bytes(65_536))


async def receive_all(stream: Stream) -> None:
    """Receive until the error at the end."""
    while True:
        await stream.receive()


Sends = Callable[[Stream], Coroutine[Any, Any, None]]


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.filterwarnings("ignore:left open at the end of the event loop")
@pytest.mark.parametrize(
    ("backend", "options"),
    [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})],
    ids=["asyncio", "uvloop", "trio"],
)
@pytest.mark.parametrize(
    "send", [None, send_large, send_registered, send_registered_by_the_call, send_blocks]
)
def test_open_stream_ends_its_data_with_the_loop(
    backend: str, options: dict[str, bool], send: Sends | None
) -> None:
    """Unless the end of the loop, or of the task, has cut off a send."""
    kept: list[Any] = []
    is_over = threading.Event()

    async def program(port: int) -> None:
        stream = await connect_stream(ADDRESS, port)
        kept.append(stream)
        await stream.send(b"everything")
        if send is None:
            return
        if backend == "asyncio":
            kept.append(asyncio.create_task(send(stream)))
            await asyncio.sleep(0.3)
            return
        with anyio.move_on_after(0.3):
            await send(stream)

    async def run(port: int) -> None:
        function = partial(anyio.run, program, port, backend=backend, backend_options=options)
        await anyio.to_thread.run_sync(function)
        is_over.set()

    async def main() -> None:
        async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
            group.start_soon(run, listener.port)
            async with await listener.accept() as server:
                assert await server.receive(10) == b"everything"
                if send is not None:
                    await anyio.to_thread.run_sync(is_over.wait)
                with pytest.raises(anyio.EndOfStream if send is None else DisconnectedError):
                    await receive_all(server)

    anyio.run(main)
    assert kept[0].connection._endpoint.teardown.closed.is_set()


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.natively
@pytest.mark.filterwarnings("ignore:left open at the end of the event loop")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("size", "later", "has_room", "end"),
    [
        (65_536, b"the end", False, anyio.EndOfStream),
        (65_536, b"the end", True, anyio.EndOfStream),  # in C on asyncio
        (65_536, b"", False, DisconnectedError),
        (60_000, b"the end", False, DisconnectedError),
        (60_000, b"the end", True, DisconnectedError),
    ],
)
def test_later_send_gives_data_an_end_if_a_cancelled_one_posted_nothing(
    backend: str, size: int, later: bytes, has_room: bool, end: type[Exception]
) -> None:
    """The ring has room for a whole number of 65,536 bytes, and not of 60,000."""
    kept: list[Stream] = []
    is_full = threading.Event()

    async def program(port: int) -> None:
        stream = await connect_stream(ADDRESS, port)
        kept.append(stream)
        is_cancelled = False
        while not is_cancelled:
            with anyio.move_on_after(0.3) as scope:
                await stream.send(bytes(size))
            is_cancelled = scope.cancelled_caught
        is_full.set()
        if has_room:
            await stream.wait_writable()
        await stream.send(later)

    async def main() -> None:
        async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
            function = partial(anyio.run, program, listener.port, backend=backend)
            group.start_soon(anyio.to_thread.run_sync, function)
            async with await listener.accept() as server:
                await anyio.to_thread.run_sync(is_full.wait)
                with pytest.raises(end):
                    await receive_all(server)

    anyio.run(main)
    assert kept[0].connection._endpoint.teardown.closed.is_set()


# -- the stream -----------------------------------------------------------------------------------


async def test_attributes_of_both_sides_agree() -> None:
    async with both() as (client, server):
        local = client.extra(SocketAttribute.local_address)
        remote = client.extra(SocketAttribute.remote_address)
        assert server.extra(SocketAttribute.remote_address) == local
        assert server.extra(SocketAttribute.local_address) == remote
        assert client.extra(SocketAttribute.remote_port) == remote[1]
        with pytest.raises(anyio.TypedAttributeLookupError):
            client.extra(SocketAttribute.raw_socket)


async def test_two_tasks_cannot_send() -> None:
    async with both() as (client, _server), anyio.create_task_group() as group:
        group.start_soon(client.send, bytes(10_000_000))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError, match="sending to"):
            await client.send(b"x")
        group.cancel_scope.cancel()


async def test_a_peer_that_breaks_off_breaks_the_stream() -> None:
    async with both() as (client, server):
        await server.connection.aclose()
        with pytest.raises(anyio.BrokenResourceError, match="disconnected"):
            await client.receive()
        with pytest.raises(anyio.BrokenResourceError, match="disconnected"):
            await client.send(b"x")


async def test_a_peer_that_breaks_off_leaves_no_unretrieved_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with both() as (client, server):
        await client.send(b"GET")
        await server.connection.aclose()
        with pytest.raises(anyio.BrokenResourceError):
            await client.receive()
    del client, server
    gc.collect()
    assert caplog.messages == []


async def test_receiving_and_sending_let_other_tasks_run() -> None:
    ran = 0

    async def count() -> None:
        nonlocal ran
        while True:
            ran += 1
            await anyio.lowlevel.checkpoint()

    async with both() as (client, server), anyio.create_task_group() as group:
        group.start_soon(count)
        for _ in range(100):
            await server.send(b"x")
            assert await client.receive() == b"x"
        assert ran > 1
        group.cancel_scope.cancel()


async def test_a_port_without_a_listener_refuses() -> None:
    async with listen_stream(ADDRESS) as listener:
        port = listener.port
    with pytest.raises(ConnectionRefusedError) as caught:
        await connect_stream(ADDRESS, port)
    error = weakref.ref(caught.value)
    caught.value.__traceback__ = None  # pytest's frames and this one refer to the error
    del caught
    assert error() is None, gc.get_referrers(error())


async def test_a_stream_connects_from_a_given_port() -> None:
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, Stream.send_eof)
        async with connect_stream(ADDRESS, listener.port, source=(ADDRESS, port)) as client:
            assert client.extra(SocketAttribute.local_address) == (ADDRESS, port)
        group.cancel_scope.cancel()


async def test_anyios_wrappers_take_a_stream() -> None:
    async with both() as (client, server):
        await TextStream(server).send("a line\nand more")
        buffered = BufferedByteReceiveStream(client)
        assert await buffered.receive_until(b"\n", 100) == b"a line"
        assert await buffered.receive_exactly(8) == b"and more"


async def test_anyios_tls_runs_over_a_stream() -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("stream.test").configure_cert(ours)
    authority.configure_trust(theirs)
    data = bytes(range(256)) * 100

    async with both() as (client, server):

        async def serve() -> None:
            secure = await TLSStream.wrap(server, server_side=True, ssl_context=ours)
            got = await BufferedByteReceiveStream(secure).receive_exactly(len(data))
            await secure.send(got)
            with pytest.raises(anyio.EndOfStream):
                await secure.receive()
            await secure.aclose()

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            secure = await TLSStream.wrap(client, hostname="stream.test", ssl_context=theirs)
            assert secure.extra(TLSAttribute.tls_version).startswith("TLS")
            await secure.send(data)
            assert await BufferedByteReceiveStream(secure).receive_exactly(len(data)) == data
            await secure.aclose()


async def test_anyios_tls_refuses_an_untrusted_certificate() -> None:
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("stream.test").configure_cert(ours)

    async with both() as (client, server):

        async def serve() -> None:
            with pytest.raises((ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream)):
                await TLSStream.wrap(server, server_side=True, ssl_context=ours)

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            with pytest.raises(ssl.SSLCertVerificationError):
                await TLSStream.wrap(client, hostname="stream.test")
            await client.aclose()


# -- the listener ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "family"), [(ADDRESS, AF_INET), (IPV6, AF_INET6)])
async def test_a_listener_has_the_attributes_of_its_address(host: str, family: int) -> None:
    async with listen_stream(host) as listener:
        assert listener.extra(SocketAttribute.family) == family
        address = listener.extra(SocketAttribute.local_address)
        assert address is not None
        assert address[:2] == (host, listener.port)
        assert listener.extra(SocketAttribute.local_port) == listener.port


async def test_a_closed_listener_accepts_nobody() -> None:
    async with listen_stream(ADDRESS) as listener:
        pass
    with pytest.raises(anyio.ClosedResourceError):
        await listener.accept()


async def test_closing_wakes_the_task_that_accepts() -> None:
    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:

        async def close() -> None:
            await anyio.wait_all_tasks_blocked()
            await listener.aclose()

        group.start_soon(close)
        with pytest.raises(anyio.ClosedResourceError):
            await listener.accept()


async def test_serve_runs_a_task_for_each_peer() -> None:
    async def shout(stream: Stream) -> None:
        async for data in stream:
            await stream.send(data.upper())

    async with listen_stream(ADDRESS) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, shout)
        async with (
            connect_stream(ADDRESS, listener.port) as first,
            connect_stream(ADDRESS, listener.port) as second,
        ):
            for stream in (second, first):
                await stream.send(b"hello")
                assert await stream.receive() == b"HELLO"
        group.cancel_scope.cancel()
