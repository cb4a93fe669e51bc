"""A name with several addresses: each is tried by everything that connects, and all of them share
the time limit. (`connect` is tested with the other ways in which it fails.)"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import streams
from aiordma.integrations import valkey
from tests.device.many_addresses import MANY, names
from tests.device.players import one_loop, reactor_in_use, until
from tests.devices import ADDRESS, IPV6, NOT_OURS, UNREACHABLE
from tests.internals import address_text, with_device

pytestmark = [pytest.mark.anyio, one_loop]

Connect = Callable[..., Awaitable[Any]]


async def connect_asyncio(host: str, port: int, **options: Any) -> Any:
    transport, _ = await streams.create_connection(asyncio.Protocol, host, port, **options)
    return transport


@asynccontextmanager
async def echoing(host: str, port: int = 0) -> AsyncIterator[int]:
    """Yield the port of a listener whose streams are echoed."""

    async def echo(stream: streams.Stream) -> None:
        with suppress(aiordma.DisconnectedError):
            async for data in stream:
                await stream.send(data)

    async with streams.listen_stream(host, port) as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, echo)
        yield listener.port
        group.cancel_scope.cancel()


async def unused_port() -> int:
    async with aiordma.listen(IPV6, 0) as listener:
        return listener.port


# -- prepare_connection ---------------------------------------------------------------------------


async def test_prepare_skips_an_unreachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, UNREACHABLE, IPV6)
    async with (
        aiordma.listen(IPV6, 0) as listener,
        aiordma.prepare_connection(MANY, listener.port, receive_buffers=0) as connection,
        anyio.create_task_group() as group,
    ):
        received = connection.post_recv(bytearray(10))

        async def greet() -> None:
            async with await listener.accept() as server:
                assert await server.receive() == b"first"  # iWARP: from the side that connected
                await server.send(b"hello")

        group.start_soon(greet)
        await connection.establish()
        assert connection.peer_address == (IPV6, listener.port)
        await connection.send(b"first")
        assert (await received).byte_len == 5
    await until(lambda: not reactor_in_use())


async def test_prepare_names_every_unreachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    other = UNREACHABLE.replace("1%", "2%") if "%" in UNREACHABLE else "192.0.2.2"
    names(monkeypatch, UNREACHABLE, other)
    with pytest.raises(aiordma.AddressError) as caught:
        await aiordma.prepare_connection(MANY, 7471)
    first, another = str(caught.value).split("; another address: ")
    assert first.startswith(f"connect to {MANY}:7471 ({UNREACHABLE[:7]}")
    assert another.startswith(f"connect to {MANY}:7471 ({other.partition('%')[0]}")
    assert not reactor_in_use()


@pytest.mark.natively
async def test_establish_has_the_whole_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, UNREACHABLE, IPV6)
    async with (
        aiordma.listen(IPV6, 0) as listener,  # and accepts no request
        aiordma.prepare_connection(MANY, listener.port, timeout=3.0) as connection,
    ):
        with pytest.raises(aiordma.ConnectTimeoutError, match="longer than 3 s"):
            await connection.establish()
    await until(lambda: not reactor_in_use())


# -- Valkey ---------------------------------------------------------------------------------------


@pytest.mark.natively
async def test_valkeys_client_tries_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, UNREACHABLE, IPV6)
    with pytest.raises(aiordma.RejectedError) as caught:
        await valkey.open_connection(MANY, await unused_port())
    first, another = str(caught.value).split("; another address: ")
    assert f"({IPV6}): rejected" in first
    assert f"({UNREACHABLE[:7]}" in another
    assert not reactor_in_use()


# -- the time limit -------------------------------------------------------------------------------

CONNECT = [aiordma.connect, streams.connect_stream, connect_asyncio, valkey.open_connection]


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.natively
@pytest.mark.parametrize("connect", CONNECT)
async def test_lookup_and_answer_share_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, seconds=2.0)
    async with aiordma.listen(ADDRESS, 0) as listener:  # and accepts no request
        began = time.monotonic()
        with pytest.raises(aiordma.ConnectTimeoutError, match="accept took longer than"):
            await connect(MANY, listener.port, timeout=3)
        assert 2.9 < time.monotonic() - began < 4.9  # 5 if each had all of it
    await until(lambda: not reactor_in_use())


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.natively
@pytest.mark.parametrize("connect", CONNECT)
async def test_slow_lookup_ends_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, seconds=1.0)
    with pytest.raises(aiordma.ConnectTimeoutError, match=r"up the name took longer than 0\.2 s"):
        await connect(MANY, 7471, timeout=0.2)


@pytest.mark.natively
async def test_open_domain_limits_the_lookups_time(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, seconds=1.0)
    with pytest.raises(aiordma.ConnectTimeoutError, match=r"many\.test took longer than 0\.2"):
        await aiordma.open_domain(MANY, timeout=0.2)


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.one_kernel_device
@pytest.mark.parametrize("first", [UNREACHABLE, ADDRESS])
async def test_stream_connects_to_the_next_address(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    names(monkeypatch, first, IPV6)
    async with (
        echoing(IPV6) as port,
        streams.connect_stream(MANY, port) as stream,
    ):
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        assert stream.extra(anyio.abc.SocketAttribute.remote_address)[0] == IPV6
    await until(lambda: not reactor_in_use())


@pytest.mark.natively
async def test_stream_error_names_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    port = await unused_port()
    with pytest.raises(aiordma.RejectedError) as caught:
        await streams.connect_stream(MANY, port)
    first, another = str(caught.value).split("; another address: ")
    assert first.startswith(f"connect to {MANY}:{port} ({ADDRESS}): ")
    assert f"({IPV6})" in another
    assert not reactor_in_use()


@pytest.mark.natively
async def test_wrong_protocol_of_each_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    async with (
        aiordma.listen(ADDRESS, 0) as one,
        aiordma.listen(IPV6, one.port) as other,
        anyio.create_task_group() as group,
    ):
        for listener in (one, other):
            group.start_soon(listener.serve, aiordma.Connection.ended)
        with pytest.raises(aiordma.streams.StreamProtocolError) as caught:
            await streams.connect_stream(MANY, one.port)
        group.cancel_scope.cancel()
    texts = str(caught.value).split("; another address: ")
    starts = [f"connect to {MANY}:{one.port} ({each}): " for each in (ADDRESS, IPV6)]
    for text, start in zip(texts, starts, strict=True):
        assert text.startswith(f"{start}the peer")


def refuse_device(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let no permitted device reach these addresses."""

    async def choose(requirement: Any, address: str, attempt: Any) -> Any:
        if address in addresses:
            raise aiordma.DeviceRequirementError(f"no device for {address}")
        return await with_device(requirement, address, attempt)

    monkeypatch.setattr("aiordma._connection.connector.with_device", choose)


@pytest.mark.natively
@pytest.mark.parametrize("connect", CONNECT)
async def test_peers_error_comes_before_that_of_no_device(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    refuse_device(monkeypatch, ADDRESS)
    with pytest.raises(aiordma.RejectedError) as caught:
        await connect(MANY, await unused_port())
    assert f"no device for {ADDRESS}" in str(caught.value)
    assert not reactor_in_use()


@pytest.mark.natively
@pytest.mark.parametrize("connect", CONNECT)
async def test_no_device_for_any_address_is_the_error_of_one(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    refuse_device(monkeypatch, ADDRESS, IPV6)
    with pytest.raises(aiordma.DeviceRequirementError) as caught:
        await connect(MANY, 7471)
    assert f"no device for {ADDRESS}" in str(caught.value)
    assert f"no device for {IPV6}" in str(caught.value)


@pytest.mark.natively
async def test_reconnecting_outlasts_an_address_without_a_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    refuse_device(monkeypatch, ADDRESS)
    caplog.set_level(logging.INFO, "aiordma")
    port = await unused_port()

    async def serve() -> None:
        await until(lambda: "attempt 2: " in caplog.text)
        async with aiordma.listen(IPV6, port) as listener, listener.accept() as connection:
            await connection.ended()

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        async for session in aiordma.reconnecting(MANY, port, first_delay=0.01, max_delay=0.05):
            async with session as connection:
                assert connection.peer_address == (IPV6, port)
                break
    (attempt,) = (each for each in caplog.messages if each.startswith("attempt 1: "))
    assert f"({IPV6}): rejected" in attempt
    assert f"no device for {ADDRESS}" in attempt


@pytest.mark.natively
async def test_stream_ends_at_a_programs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, IPV6)

    async def refuse(listener: aiordma.Listener) -> None:
        await (await listener.request()).reject(b"not today")

    async with (
        aiordma.listen(ADDRESS, 0) as listener,
        aiordma.listen(IPV6, listener.port) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(refuse, listener)
        with pytest.raises(aiordma.RejectedError, match="rejected"):
            await streams.connect_stream(MANY, other.port)
        assert other.statistics().connection_requests == 0


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.natively
@pytest.mark.parametrize("connect", [streams.connect_stream, connect_asyncio])
async def test_silent_address_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    async with aiordma.listen(ADDRESS, 0) as silent, echoing(IPV6, silent.port) as port:
        began = time.monotonic()
        opened = await connect(MANY, port, timeout=6)
        assert 2.7 < time.monotonic() - began < 6  # a half of it
        await opened.aclose() if isinstance(opened, streams.Stream) else opened.abort()
    await until(lambda: not reactor_in_use())


@pytest.mark.capability("iwarp")
async def test_address_of_a_silent_tcp_server_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """siw's call, which waits for that server's answer for 10 s, ends in the background."""
    names(monkeypatch, ADDRESS, IPV6)
    async with echoing(IPV6) as port:
        with socket.create_server((ADDRESS, port)):
            async with streams.connect_stream(MANY, port, timeout=6) as stream:
                assert stream.extra(anyio.abc.SocketAttribute.remote_address)[0] == IPV6
    await until(lambda: not reactor_in_use())


@pytest.mark.natively
async def test_group_of_all_errors_has_a_programs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, UNREACHABLE, IPV6)

    async def refuse(listener: aiordma.Listener) -> None:
        await (await listener.request()).reject(b"not today")

    for all_errors in (True, False):
        async with aiordma.listen(IPV6, 0) as listener, anyio.create_task_group() as group:
            group.start_soon(refuse, listener)
            with pytest.raises((ExceptionGroup, aiordma.RejectedError)) as caught:
                await connect_asyncio(MANY, listener.port, all_errors=all_errors)
        answer: BaseException = caught.value
        assert isinstance(answer, ExceptionGroup) is all_errors
        if isinstance(answer, ExceptionGroup):
            first, answer = answer.exceptions
            assert type(first) is aiordma.AddressError
        else:
            assert f", connect to {UNREACHABLE[:7]}" in str(answer)
        assert isinstance(answer, aiordma.RejectedError)
        assert answer.private_data.rstrip(b"\0") == b"not today"


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@pytest.mark.natively
@pytest.mark.parametrize("connect", [streams.connect_stream, connect_asyncio])
async def test_silent_addresses_share_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, "127.0.0.2", IPV6)
    async with (
        aiordma.listen(ADDRESS, 0) as one,
        aiordma.listen("127.0.0.2", one.port),
        aiordma.listen(IPV6, one.port),
    ):
        began = time.monotonic()
        with pytest.raises(aiordma.RdmaConnectionError):
            await connect(MANY, one.port, timeout=1.5)
        assert 1.4 < time.monotonic() - began < 4.4  # 4.5 if each address had all of it
    await until(lambda: not reactor_in_use())


# -- the local address ----------------------------------------------------------------------------


async def connect_from(connect: Connect, host: str, port: int, source: Any) -> Any:
    name = "local_addr" if connect is connect_asyncio else "source"
    return await connect(host, port, **{name: source})


FROM: list[Connect] = [
    aiordma.connect,
    aiordma.prepare_connection,
    streams.connect_stream,
    connect_asyncio,
    valkey.open_connection,
]


@pytest.mark.natively
@pytest.mark.parametrize("host", [ADDRESS, IPV6, MANY])
@pytest.mark.parametrize("connect", [streams.connect_stream, connect_asyncio])
async def test_local_name_has_an_address_of_the_peers_family(
    monkeypatch: pytest.MonkeyPatch, connect: Connect, host: str
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    listens_on = ADDRESS if host == ADDRESS else IPV6
    async with echoing(listens_on) as port:
        opened = await connect_from(connect, host, port, (MANY, 0))
        if isinstance(opened, streams.Stream):
            assert opened.extra(anyio.abc.SocketAttribute.local_address)[0] == listens_on
            await opened.aclose()
        else:
            assert opened.get_extra_info("sockname")[0] == listens_on
            opened.abort()
    await until(lambda: not reactor_in_use())


@pytest.mark.natively
@pytest.mark.parametrize(
    ("host", "local", "family"), [(ADDRESS, IPV6, "IPv4"), (IPV6, ADDRESS, "IPv6")]
)
@pytest.mark.parametrize("connect", FROM)
async def test_local_address_of_another_family_is_named(
    connect: Connect, host: str, local: str, family: str
) -> None:
    with pytest.raises(aiordma.AddressError) as caught:
        await connect_from(connect, host, 7471, (local, 0))
    assert str(caught.value).startswith(f"connect to {host}:7471: ")
    assert f"=('{local}', 0) has no {family} address to connect from" in str(caught.value)
    assert not reactor_in_use()


@pytest.mark.natively
@pytest.mark.parametrize("connect", [each for each in FROM if each is not FROM[1]])
async def test_only_addresses_of_the_local_family_are_tried(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    with pytest.raises(aiordma.RejectedError) as caught:
        await connect_from(connect, MANY, await unused_port(), (IPV6, 0))
    assert f"=('{IPV6}', 0) has no IPv4 address to connect from" in str(caught.value)


@pytest.mark.one_kernel_device
@pytest.mark.parametrize("connect", FROM[:4])
async def test_local_address_that_cannot_be_bound_is_skipped(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, NOT_OURS, ADDRESS)
    async with (
        echoing(ADDRESS) as port,
        aiordma.listen(ADDRESS) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, aiordma.Connection.ended)
        is_plain = connect in (aiordma.connect, aiordma.prepare_connection)
        to = listener.port if is_plain else port
        opened = await connect_from(connect, ADDRESS, to, (MANY, 0))
        if isinstance(opened, asyncio.Transport):
            assert opened.get_extra_info("sockname")[0] == ADDRESS
            opened.abort()
        else:
            connection = opened.connection if isinstance(opened, streams.Stream) else opened
            assert address_text(connection.local_address).startswith(f"{ADDRESS}:")
            await opened.aclose()
        group.cancel_scope.cancel()
    await until(lambda: not reactor_in_use())


@pytest.mark.one_kernel_device
@pytest.mark.parametrize("connect", FROM)
async def test_every_local_address_that_cannot_be_bound_is_named(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, NOT_OURS, "10.99.99.98")
    with pytest.raises(aiordma.AddressError) as caught:
        await connect_from(connect, ADDRESS, 7471, (MANY, 0))
    first, another = str(caught.value).split("; another local address: ")
    for text, address in ((first, NOT_OURS), (another, "10.99.99.98")):
        assert text.startswith(f"connect to {ADDRESS}:7471: ")
        assert f"{address} is no address of this machine" in text
    assert not reactor_in_use()


@pytest.mark.natively
async def test_a_local_port_that_is_taken_is_free_at_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, "127.0.0.2", "127.0.0.3")
    async with aiordma.listen("127.0.0.2", 0) as taken, echoing(ADDRESS) as port:
        local = MANY, taken.port
        async with streams.connect_stream(ADDRESS, port, source=local) as stream:
            assert stream.connection.local_address == ("127.0.0.3", local[1])
    await until(lambda: not reactor_in_use())


@pytest.mark.natively
async def test_a_refused_connect_is_not_repeated_from_another_local_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As asyncio: the other ones are for those that cannot be bound."""
    names(monkeypatch, "127.0.0.2", "127.0.0.3")
    port = await unused_port()
    for connect in FROM[0], FROM[2], FROM[3]:
        with pytest.raises(aiordma.RejectedError) as caught:
            await connect_from(connect, ADDRESS, port, (MANY, 0))
        assert "another" not in str(caught.value)


@pytest.mark.natively
@pytest.mark.parametrize("connect", FROM)
async def test_local_name_that_does_not_resolve_is_named_once(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    with pytest.raises(aiordma.AddressError) as caught:
        await connect_from(connect, MANY, 7471, ("no.such.host.invalid", 0))
    assert str(caught.value).count("'no.such.host.invalid' does not resolve") == 1


@pytest.mark.natively
@pytest.mark.parametrize("local", [(None, 0), ["127.0.0.2", "0"]])
async def test_local_address_is_as_of_asyncios(local: Any) -> None:
    async with echoing("127.0.0.1") as port:
        transport = await connect_asyncio("127.0.0.1", port, local_addr=local)
        assert transport.get_extra_info("sockname")[0] == (local[0] or "127.0.0.1")
        transport.abort()
    await until(lambda: not reactor_in_use())


# -- cancellation ---------------------------------------------------------------------------------


@pytest.mark.natively
@pytest.mark.parametrize("connect", [aiordma.prepare_connection, streams.connect_stream])
async def test_cancelled_at_any_step_it_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    names(monkeypatch, UNREACHABLE, IPV6)
    ends = []
    async with echoing(IPV6) as port:
        for steps in range(200):

            async def opening() -> None:
                async with await connect(MANY, port):
                    pass

            task = asyncio.ensure_future(opening())
            for _ in range(steps):
                await asyncio.sleep(0)
            ends.append("done" if task.done() else "cancelled")
            task.cancel()
            await asyncio.wait([task])
            if steps % 20 == 19 and ends[-1] == "done":
                break
    await until(lambda: not reactor_in_use())
    assert "cancelled" in ends
