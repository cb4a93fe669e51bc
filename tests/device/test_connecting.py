"""Connecting, refusing, and every way in which it fails: which step, and why."""

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiordma
import aiordma.streams
from tests.device.many_addresses import names
from tests.device.players import (
    Outcome,
    connected,
    one_loop,
    reactor_in_use,
    silent_taker,
    until,
)
from tests.device.second_device import second_device
from tests.devices import (
    ADDRESS,
    BUILT_IN,
    DEVICE,
    IPV6,
    NOT_OURS,
    SILENT,
    UNREACHABLE,
    DeviceUnderTest,
    kernel_objects,
    provider_under_test,
)
from tests.internals import connector, requests_of

pytestmark = pytest.mark.anyio

A_WHILE = 2.0
"""Seconds for all steps but the one that never ends."""


async def test_private_data_goes_both_ways() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        accepted: list[aiordma.Connection] = []

        async def accept() -> None:
            request = await listener.request()
            assert request.private_data.rstrip(b"\0") == b"who I am"
            accepted.append(await request.accept(private_data=b"welcome"))

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            client = await aiordma.connect(ADDRESS, listener.port, private_data=b"who I am")
        async with client, accepted[0] as server:
            assert client.private_data.rstrip(b"\0") == b"welcome"
            assert server.private_data.rstrip(b"\0") == b"who I am"


async def test_a_refusal_carries_the_reason_of_the_peers_program() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:

        async def refuse() -> None:
            request = await listener.request()
            await request.reject(b"not today")
            with pytest.raises(aiordma.ClosedError):
                await request.accept()

        async with anyio.create_task_group() as group:
            group.start_soon(refuse)
            with pytest.raises(aiordma.RejectedError, match="rejected") as caught:
                await aiordma.connect(ADDRESS, listener.port)
        assert caught.value.private_data.rstrip(b"\0") == b"not today"
        assert isinstance(caught.value, ConnectionRefusedError)


async def test_connect_to_closed_port_names_the_reason() -> None:
    with pytest.raises(aiordma.RejectedError, match="no program listens"):
        await aiordma.connect(ADDRESS, 17, timeout=20)


async def test_unreachable_address_names_the_failed_step() -> None:
    with pytest.raises(aiordma.AddressError, match="unreachable"):
        await aiordma.connect(UNREACHABLE, 7471, timeout=20)


async def test_a_name_that_does_not_resolve_is_an_address_error() -> None:
    with pytest.raises(aiordma.AddressError, match="does not resolve"):
        await aiordma.connect("no.such.host.invalid", 7471)


# -- a name with several addresses ------------------------------------------------------------


async def stay(connection: aiordma.Connection) -> None:
    await connection.ended()


@one_loop
async def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    async with aiordma.listen(IPV6, 0) as listener, anyio.create_task_group() as group:
        port = listener.port
        group.start_soon(listener.serve, stay)
        async with aiordma.connect("many.test", port) as client:
            assert client.peer_address == (IPV6, port)
        group.cancel_scope.cancel()
    with pytest.raises(aiordma.RejectedError) as caught:
        await aiordma.connect("many.test", port)
    first, another = str(caught.value).split("; another address: ")
    assert first.startswith(f"connect to many.test:{port} ({ADDRESS}): ")
    assert f"({IPV6})" in another
    assert not reactor_in_use()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
@one_loop
async def test_a_silent_address_of_a_name_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    async with (
        aiordma.listen(ADDRESS, 0) as silent,  # accepts no request
        aiordma.listen(IPV6, silent.port) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, stay)
        port = listener.port
        async with aiordma.connect("many.test", port, timeout=4 * A_WHILE) as client:
            assert client.peer_address == (IPV6, port)
        group.cancel_scope.cancel()
    await until(lambda: not reactor_in_use())


@one_loop
async def test_programs_answer_ends_the_search_for_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    async with aiordma.listen(ADDRESS, 0) as listener:

        async def refuse(listener: aiordma.Listener) -> None:
            await (await listener.request()).reject(b"not today")

        async with (
            aiordma.listen(IPV6, listener.port) as other,
            anyio.create_task_group() as group,
        ):
            group.start_soon(refuse, listener)
            with pytest.raises(aiordma.RejectedError) as caught:
                await aiordma.connect("many.test", other.port)
            assert caught.value.private_data.rstrip(b"\0") == b"not today"
            assert other.statistics().connection_requests == 0


@one_loop
async def test_a_full_backlog_is_no_programs_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, ADDRESS, IPV6)
    async with (
        aiordma.listen(ADDRESS, 0, backlog=1) as listener,
        aiordma.listen(IPV6, listener.port) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(other.serve, stay)
        group.start_soon(Outcome().of, lambda: aiordma.connect(ADDRESS, other.port))
        await until(lambda: listener.statistics().waiting == 1)
        async with aiordma.connect("many.test", other.port) as client:
            assert client.peer_address == (IPV6, other.port)
        group.cancel_scope.cancel()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_a_peer_that_never_answers_is_a_timeout_that_names_the_step() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        requests: list[aiordma.ConnectionRequest] = []

        async def take() -> None:
            # Before the peer gives up: a request that it withdrew may be forgotten.
            requests.append(await listener.request())

        group.start_soon(take)
        with pytest.raises(aiordma.ConnectTimeoutError, match="waiting for the peer to accept"):
            await aiordma.connect(ADDRESS, listener.port, timeout=A_WHILE)
        # The program finds out when it tries to answer. (On siw the connect cannot be withdrawn:
        # the connection is established, and ended.)
        (request,) = requests
        with pytest.raises((aiordma.RdmaError, anyio.EndOfStream)):
            async with await request.accept() as connection:
                await connection.receive()


@one_loop
@pytest.mark.parametrize("answered", [True, False])
async def test_a_connect_that_fails_waits_for_no_flush(answered: bool) -> None:
    """Nothing moves a queue pair that never was connected, and so nothing flushes its receives."""
    error = aiordma.RejectedError if answered else aiordma.ConnectTimeoutError
    async with await aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:

        async def reject() -> None:
            await (await listener.request()).reject()

        if answered:
            group.start_soon(reject)
        with pytest.raises(error):
            await aiordma.connect(
                ADDRESS,
                listener.port,
                timeout=30 if answered else A_WHILE,
                options=aiordma.ConnectionOptions(flush_timeout=1000.0),
            )


@contextmanager
def silent_peer() -> Iterator[tuple[str, int]]:
    """A peer that never answers."""
    if DEVICE == "software_roce":
        with silent_taker() as peer:
            yield peer
    elif BUILT_IN:
        # TCP takes the connection; no program takes the request that comes over it.
        with socket.create_server((ADDRESS, 0)) as server:
            yield ADDRESS, server.getsockname()[1]
    else:
        # A dummy interface does no neighbour discovery, so it is the CM that gets no answer.
        # On siw it is the TCP connection, inside the driver's call, that only ends by itself.
        retries = Path("/proc/sys/net/ipv4/tcp_syn_retries")
        before = retries.read_text()
        retries.write_text("1")
        try:
            yield SILENT, 7471
        finally:
            retries.write_text(before)


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.1)


@pytest.mark.promise("No coroutine waits for a peer or the network on the event loop's thread")
@pytest.mark.parametrize("how", ["time limit", "close"])
@pytest.mark.capability("iwarp")
@one_loop
async def test_unanswered_handshake_does_not_block_the_loop(how: str) -> None:
    # iw_cm's calls wait for the answer, up to 10 s on siw.
    gaps: list[float] = []

    async def tick() -> None:
        last = anyio.current_time()
        while True:
            await anyio.sleep(0.01)
            now = anyio.current_time()
            gaps.append(now - last)
            last = now

    with socket.create_server((ADDRESS, 0)) as silent:
        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            port = silent.getsockname()[1]
            if how == "time limit":
                with pytest.raises(aiordma.ConnectTimeoutError, match="the peer to accept"):
                    await aiordma.connect(ADDRESS, port, timeout=A_WHILE)
            else:
                connection = await aiordma.prepare_connection(ADDRESS, port)
                async with anyio.create_task_group() as connecting:
                    connecting.start_soon(fails_to_establish, connection)
                    await anyio.sleep(A_WHILE)
                    connection._endpoint.teardown.close()
            group.cancel_scope.cancel()
        assert max(gaps) < 5
    await until(lambda: not reactor_in_use())


async def fails_to_establish(connection: aiordma.Connection) -> None:
    with pytest.raises(aiordma.RdmaError):
        await connection.establish()


@pytest.mark.promise("Every wait has a bound, except waits for the peer's program")
async def test_an_address_without_an_answer_is_a_timeout_that_names_the_step() -> None:
    with silent_peer() as (address, port):
        with pytest.raises(aiordma.ConnectTimeoutError, match="waiting for the peer to accept"):
            await aiordma.connect(address, port, timeout=A_WHILE)
        await _until(lambda: not reactor_in_use())


@pytest.mark.natively
@pytest.mark.parametrize(
    "connect", [aiordma.connect, aiordma.prepare_connection, aiordma.streams.connect_stream]
)
async def test_wait_for_a_worker_is_named_in_a_timeout(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[..., Any]
) -> None:
    """As if all worker threads were busy. A numeric address is not looked up."""

    async def reactor_of(_provider: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(provider_under_test(), "blocks", True)
    monkeypatch.setattr(connector, "reactor_of", reactor_of)
    with pytest.raises(aiordma.ConnectTimeoutError, match="7471: making the identifier took lo"):
        await connect(ADDRESS, 7471, timeout=0.1)


async def test_a_port_in_use_is_named() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with pytest.raises(aiordma.VerbsCallError, match="Another listener") as caught:
            await aiordma.listen(ADDRESS, listener.port)
        assert caught.value.errno == errno.EADDRINUSE
        assert f"{ADDRESS} port {listener.port}" in str(caught.value)


async def test_listen_on_foreign_address_names_it() -> None:
    text = f"{NOT_OURS} is no address of this machine"
    with pytest.raises(aiordma.VerbsCallError, match=text):
        await aiordma.listen(NOT_OURS, 0)
    with pytest.raises(aiordma.VerbsCallError, match=text):
        await aiordma.open_shared_receive(NOT_OURS)
    with pytest.raises(aiordma.AddressError, match=text) as caught:
        await aiordma.connect(ADDRESS, 1, source=(NOT_OURS, 0))
    assert caught.value.errno == errno.EADDRNOTAVAIL  # as of a socket's bind


@contextmanager
def plain_server(answer: bytes) -> Iterator[int]:
    """A TCP server that answers the first bytes with these, and closes; yields its port."""
    with socket.create_server((ADDRESS, 0)) as listening:
        listening.settimeout(60)

        def serve() -> None:
            connection, _ = listening.accept()
            # The device may reset the connection as soon as it has the answer.
            with connection, suppress(OSError):
                connection.recv(1)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.capability("iwarp")
@pytest.mark.capability("malformed_answers")
@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b""])
async def test_server_without_iwarp_is_named(answer: bytes) -> None:
    with (
        plain_server(answer) as port,
        pytest.raises(aiordma.RdmaConnectionError, match=r"does not speak iWARP \(MPA\)"),
    ):
        await aiordma.connect(ADDRESS, port, timeout=30)


@pytest.mark.capability("iwarp")
async def test_timeout_names_plain_tcp_as_possible_cause() -> None:
    with (
        socket.create_server((ADDRESS, 0)) as silent,
        pytest.raises(aiordma.ConnectTimeoutError, match=r"s: .* accept now, or .* plain TCP"),
    ):
        await aiordma.connect(ADDRESS, silent.getsockname()[1], timeout=A_WHILE)


@pytest.mark.capability("second_device")
async def test_a_device_that_is_insisted_on_must_reach_the_address(
    device: DeviceUnderTest,
) -> None:
    with second_device(device) as other:
        text = rf"{device.name}.*not .*{other}, which was asked for"
        with pytest.raises(aiordma.AddressError, match=text):
            await aiordma.connect(ADDRESS, 1, device=other)
        with pytest.raises(aiordma.AddressError, match=text):
            await aiordma.open_domain(ADDRESS, device=other)


async def test_a_device_that_is_insisted_on_must_exist(device: DeviceUnderTest) -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with pytest.raises(aiordma.NoDeviceError, match="there is no RDMA device 'mlx5_9'"):
            await aiordma.connect(ADDRESS, listener.port, device="mlx5_9")
    async with connected(client={"device": device.name}) as (client, _):
        assert client.device_name == device.name


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"private_data": bytes(57)}, "at most 56"),
        ({"receive_buffers": -1}, "receive_buffers=-1"),
    ],
)
async def test_bad_arguments_are_refused_before_anything_is_opened(
    arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        await aiordma.connect(ADDRESS, 1, **arguments)


async def test_wrong_lengths_of_private_data_are_refused_with_nothing_lost() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:
        with pytest.raises(ValueError, match="at most 196"):
            await listener.accept(private_data=bytes(197))  # before anybody is taken off the queue

        async def accept() -> None:
            request = await listener.request()
            with pytest.raises(ValueError, match="at most 196"):
                await request.accept(private_data=bytes(197))
            with pytest.raises(ValueError, match="at most 148"):
                await request.reject(bytes(149))
            async with await request.accept(private_data=bytes(196)) as connection:
                assert await connection.receive() == b"I go first"
                await connection.send(b"still here")

        async with anyio.create_task_group() as group:
            group.start_soon(accept)
            async with await aiordma.connect(
                ADDRESS, listener.port, private_data=bytes(56)
            ) as connection:
                await connection.send(b"I go first")
                assert await connection.receive() == b"still here"


async def test_requests_beyond_the_backlog_are_refused() -> None:
    async with await aiordma.listen(ADDRESS, 0, backlog=1) as listener:
        refused: list[str] = []
        two_refused = anyio.Event()

        async def try_to_connect() -> None:
            try:
                async with await aiordma.connect(ADDRESS, listener.port) as connection:
                    await connection.send(b"the one in the queue")
            except aiordma.RejectedError as error:
                refused.append(str(error))
                if len(refused) == 2:
                    two_refused.set()

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(try_to_connect)
            await two_refused.wait()
            async with await listener.accept() as connection:
                assert await connection.receive() == b"the one in the queue"
    assert all("the listener's backlog is full" in text for text in refused)
    assert all("larger backlog=" in text for text in refused)


async def test_listener_close_rejects_waiting_requests() -> None:
    listener = await aiordma.listen(ADDRESS, 0)
    async with anyio.create_task_group() as group:

        async def connect() -> None:
            with pytest.raises(aiordma.RejectedError):
                await aiordma.connect(ADDRESS, listener.port)

        group.start_soon(connect)
        await until(lambda: len(requests_of(listener)) == 1)
        await listener.aclose()
        await listener.aclose()
    with pytest.raises(aiordma.ClosedError):
        await listener.accept()


@pytest.mark.promise("Messages arrive whole and in order")
@pytest.mark.capability("heard_at_once")
async def test_what_a_peer_sent_before_it_left_is_received_even_if_it_left_at_once() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener:

        async def speak_and_leave() -> None:
            async with await aiordma.connect(ADDRESS, listener.port) as connection:
                await connection.send(b"last words")

        for _ in range(5):
            async with anyio.create_task_group() as group:
                group.start_soon(speak_and_leave)
                async with await listener.accept() as connection:
                    assert [message async for message in connection] == [b"last words"]


async def test_a_connection_knows_both_ends(device: DeviceUnderTest) -> None:
    async with connected() as (client, server):
        assert client.peer_address == server.local_address
        assert client.local_address == server.peer_address
        assert client.peer_address is not None
        assert client.peer_address[0] == ADDRESS
        assert client.extra(aiordma.types.ConnectionInfo.device_name) == device.name


async def test_many_connections_share_one_channel_and_queue(device: DeviceUnderTest) -> None:
    before = kernel_objects(device.name)
    async with await aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:

        async def echo(connection: aiordma.Connection) -> None:
            async for message in connection:
                await connection.send(message)

        group.start_soon(listener.serve, echo)
        connections = [await aiordma.connect(ADDRESS, listener.port) for _ in range(10)]
        for number, connection in enumerate(connections):
            await connection.send(b"%d" % number)
        for number, connection in enumerate(connections):
            assert await connection.receive() == b"%d" % number
        during = kernel_objects(device.name)
        assert during["qp"] - before["qp"] == 20
        assert during["cq"] - before["cq"] == 1
        assert during["pd"] - before["pd"] <= 2  # librdmacm has one of its own
        for connection in connections:
            await connection.aclose()
        group.cancel_scope.cancel()
