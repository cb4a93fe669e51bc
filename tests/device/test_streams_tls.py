"""TLS in asyncio's streams over RDMA, from the start or by an upgrade, on the device under test."""

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import trustme
import uvloop

from aiordma import streams
from tests.device.transports import LOOPS, Run, echo, on_loop
from tests.devices import ADDRESS, BUILT_IN

pytestmark = pytest.mark.one_kernel_device


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each of asyncio's loops."""
    return partial(on_loop, LOOPS[request.param])


@pytest.fixture(scope="module")
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's context and the client's, with a certificate made for this test."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("stream.test").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


def test_tls_runs_over_a_stream(run: Run, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    data = os.urandom(200_000)

    async def main() -> None:
        server = await streams.start_server(echo, ADDRESS, 0, ssl=contexts[0])
        reader, writer = await streams.open_connection(
            *server.sockets[0].getsockname(), ssl=contexts[1], server_hostname="stream.test"
        )
        async with asyncio.TaskGroup() as group:
            writer.write(data)
            group.create_task(writer.drain())
            assert await reader.readexactly(len(data)) == data
        assert writer.get_extra_info("cipher")
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    run(main)


@pytest.mark.promise("A process ends, whatever is open")
@pytest.mark.filterwarnings("ignore:Exception ignored [^<]*<function _SSLProtocolTransport.__del__")
@pytest.mark.parametrize("is_client_closed", [True, False])
def test_a_transport_whose_tls_still_closes_at_the_end_of_the_loop_is_not_called_left_open(
    run: Run,
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    is_client_closed: bool,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """The server's close waits for TLS's last message, and the client does not read."""
    kept: list[asyncio.StreamWriter] = []

    async def main() -> None:
        async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            kept.append(writer)
            writer.close()

        server = await streams.start_server(close, ADDRESS, 0, ssl=contexts[0])
        _, writer = await streams.open_connection(
            *server.sockets[0].getsockname(), ssl=contexts[1], server_hostname="stream.test"
        )
        writer.transport._ssl_protocol._transport.pause_reading()  # type: ignore[attr-defined]
        while not kept:
            await asyncio.sleep(0.001)
        kept.append(writer)
        if is_client_closed:
            writer.close()
        server.close()

    run(main)
    text = "; ".join(str(each.message) for each in recwarn)
    assert text.count("<Connection ") == (not is_client_closed), text


@pytest.mark.parametrize("name", ["asyncio", "polling"])
def test_an_upgraded_transport_whose_tls_still_closes_is_not_called_left_open(
    name: str, contexts: tuple[ssl.SSLContext, ssl.SSLContext], recwarn: pytest.WarningsRecorder
) -> None:
    kept: list[Any] = []

    async def main() -> None:
        async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"\n")
            await writer.start_tls(contexts[0])
            kept.append(writer)

        server = await streams.start_server(upgrade, ADDRESS, 0)
        reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
        writer.write(b"\n")
        await reader.readline()
        await writer.start_tls(contexts[1], server_hostname="stream.test")
        while not kept:
            await asyncio.sleep(0.001)
        kept.append(writer)
        for each in kept:
            each.transport._ssl_protocol._transport.pause_reading()
            each.close()
        server.close()

    on_loop(LOOPS[name], main)
    assert [str(each.message) for each in recwarn] == []


def test_a_wrong_certificate_is_refused(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # the server's side of the failed handshake
        server = await streams.start_server(echo, ADDRESS, 0, ssl=contexts[0])
        with pytest.raises(ssl.SSLCertVerificationError):
            await streams.open_connection(
                *server.sockets[0].getsockname(), ssl=contexts[1], server_hostname="other.test"
            )
        server.close()
        await server.wait_closed()

    asyncio.run(main())


async def shout_after_tls(
    context: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer in plain text until the client asks for TLS, and echo from then on."""
    assert await reader.readline() == b"STARTTLS\n"
    writer.write(b"go ahead\n")
    await writer.drain()
    await writer.start_tls(context)
    await echo(reader, writer)


UPGRADING = {name: loop for name, loop in LOOPS.items() if name != "uvloop"}
"""uvloop's start_tls takes uvloop's own transports only."""


def upgrading(
    loop: Callable[[], asyncio.AbstractEventLoop],
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
) -> list[BaseException]:
    """Run a client of a server that upgrades to TLS; returns what the server's tasks ended with."""
    ends: list[BaseException] = []
    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await shout_after_tls(contexts[0], reader, writer)
        except Exception as error:
            ends.append(error)
            writer.close()
        finally:
            served.set()

    async def main() -> None:
        server = await streams.start_server(serve, ADDRESS, 0)
        async with asyncio.timeout(60):
            reader, writer = await streams.open_connection(*server.sockets[0].getsockname())
            writer.write(b"STARTTLS\n")
            assert await reader.readline() == b"go ahead\n"
            await client(reader, writer)
            await served.wait()
            server.close()
            await server.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    return ends


@pytest.mark.parametrize("loop", UPGRADING.values(), ids=UPGRADING)
def test_a_stream_in_use_is_upgraded_to_tls(
    loop: Callable[[], asyncio.AbstractEventLoop],
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    data = os.urandom(1_500_000 if BUILT_IN else 200_000)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await writer.start_tls(contexts[1], server_hostname="stream.test")
        assert writer.get_extra_info("cipher")
        async with asyncio.TaskGroup() as group:
            writer.write(data)
            group.create_task(writer.drain())
            assert await reader.readexactly(len(data)) == data
        writer.close()
        await writer.wait_closed()

    assert upgrading(loop, contexts, client) == []


def test_uvloop_upgrades_no_transport_but_its_own(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(TypeError, match="transport"):
            await writer.start_tls(contexts[1], server_hostname="stream.test")
        writer.close()
        await writer.wait_closed()

    (error,) = upgrading(uvloop.new_event_loop, contexts, client)
    assert isinstance(error, TypeError)


def test_an_upgrade_with_a_wrong_certificate_fails_on_both_sides(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await writer.start_tls(contexts[1], server_hostname="other.test")
        assert writer.transport.is_closing()

    (error,) = upgrading(asyncio.new_event_loop, contexts, client)
    assert isinstance(error, ConnectionError)  # as over TCP: the client sends no alert


def test_an_upgrade_that_is_cancelled_ends_the_connection(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upgrade = asyncio.create_task(writer.start_tls(contexts[1], server_hostname="stream.test"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not upgrade.done()
        upgrade.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upgrade
        assert writer.transport.is_closing()

    (error,) = upgrading(asyncio.new_event_loop, contexts, client)
    assert isinstance(error, ConnectionError)
