"""The software device's connection manager, call by call: what it refuses, and what it stands."""

import errno
import os
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import anyio
import pytest

import aiordma
from aiordma.testing import software_objects
from aiordma.verbs import (
    AsyncEventType,
    Capacity,
    CmEventType,
    CompletionQueue,
    ConnectionParameters,
    Device,
    Identifier,
    PortSpace,
    QueuePair,
    QueuePairState,
    QueuePairType,
)
from tests.internals import Provider, ffi, lib, software
from tests.unit.engine_thread import EngineThread
from tests.unit.mpa_peer import HOST, REJECTS, Frame, expect, has_ended
from tests.unit.mpa_peer import Device as Players
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def players() -> Iterator[Players]:
    with ExitStack() as stack:
        yield Players(stack)


def refused(error: int, call: Callable[[], object]) -> None:
    with pytest.raises(aiordma.VerbsCallError) as caught:
        call()
    assert caught.value.errno == error


# -- states ----------------------------------------------------------------------------------------


def test_calls_out_of_turn_are_refused_and_change_nothing(players: Players) -> None:
    identifier = players.identifier()
    parameters = ConnectionParameters()
    bind = partial(identifier.bind, HOST, 0)
    resolve = partial(identifier.resolve_address, HOST, 1, None, 1000)
    route = partial(identifier.resolve_route, 1000)
    listen = partial(identifier.listen, 1)
    connect = partial(identifier.connect, parameters)
    accept = partial(identifier.accept, parameters)
    for call in (route, connect, accept, partial(identifier.reject), identifier.disconnect):
        refused(errno.EINVAL, call)
    for call in (identifier.establish, lambda: identifier.notify()):
        refused(errno.EINVAL, call)
    resolve()
    for call in (bind, resolve, listen, connect, accept, identifier.disconnect):
        refused(errno.EINVAL, call)
    route()
    for call in (bind, resolve, route, listen, accept):
        refused(errno.EINVAL, call)
    refused(errno.EINVAL, connect)  # it has no queue pair
    expect(players.channel, CmEventType.ADDR_RESOLVED)
    expect(players.channel, CmEventType.ROUTE_RESOLVED)
    assert list(players.channel.events()) == []


def test_identifier_of_a_request_is_adopted_once(players: Players) -> None:
    _, port = players.listener()
    with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
        peer.sendall(Frame().pack())
        key = expect(players.channel, CmEventType.CONNECT_REQUEST).new_key
        other = players.stack.enter_context(aiordma.verbs.EventChannel("software"))
        with pytest.raises(ValueError, match=r"^Identifier\(\): key=.* of this channel"):
            Identifier(other, key=key)
        request = players.identifier(key)
        for wrong in (key, players.identifier().key, 12345):
            with pytest.raises(ValueError, match=r"^Identifier\(\): key=.* not adopted before"):
                players.identifier(wrong)
        request.close()
        with pytest.raises(ValueError, match="not adopted before"):
            players.identifier(key)
    with pytest.raises(TypeError, match=r"^Identifier\(\): key="):
        Identifier(players.channel, key="1")  # type: ignore[arg-type]


def test_identifier_stays_with_its_connection_manager(players: Players) -> None:
    """A channel of another provider is another struct in C."""
    identifier = players.identifier()
    with aiordma.verbs.EventChannel(Provider("other", software().table)) as other:
        with pytest.raises(ValueError, match=r"^migrate\(\): channel=.* the identifier"):
            identifier.migrate(other)
        assert identifier.channel is players.channel
    with pytest.raises(TypeError, match=r"^migrate\(\): channel=None"):
        identifier.migrate(None)  # type: ignore[arg-type]


def test_a_listener_does_nothing_but_listen(players: Players) -> None:
    listener, _ = players.listener()
    for call in (
        lambda: listener.bind(HOST, 0),
        lambda: listener.listen(1),
        lambda: listener.resolve_address(HOST, 1, None, 1000),
        lambda: listener.connect(ConnectionParameters()),
        listener.disconnect,
    ):
        refused(errno.EINVAL, call)


def test_an_identifier_that_was_not_bound_listens_anywhere(players: Players) -> None:
    identifier = players.identifier()
    identifier.listen(1)
    assert identifier.local_address is not None
    assert identifier.local_address[0] == "0.0.0.0"
    with closing(socket.create_connection((HOST, identifier.local_address[1]), timeout=5)) as peer:
        peer.sendall(Frame().pack())
        event = expect(players.channel, CmEventType.CONNECT_REQUEST)
        assert players.identifier(event.new_key).local_address == peer.getpeername()


@pytest.mark.parametrize(
    ("port_space", "name", "value", "error"),
    [
        (PortSpace.TCP, lib.RDMA_OPTION_ID_TOS, b"\0\0", errno.EINVAL),
        (PortSpace.TCP, lib.RDMA_OPTION_ID_REUSEADDR, b"\1", errno.EINVAL),
        (PortSpace.TCP, lib.RDMA_OPTION_ID_AFONLY, b"", errno.EINVAL),
        (PortSpace.TCP, lib.RDMA_OPTION_ID_ACK_TIMEOUT, b"\x20", errno.EINVAL),
        (PortSpace.UDP, lib.RDMA_OPTION_ID_ACK_TIMEOUT, b"\1", errno.EINVAL),
        (PortSpace.TCP, 99, b"\0", errno.ENOSYS),
    ],
)
def test_options_that_make_no_sense_are_refused(
    players: Players, port_space: PortSpace, name: int, value: bytes, error: int
) -> None:
    identifier = players.stack.enter_context(Identifier(players.channel, port_space))
    refused(error, lambda: identifier.set_option(name, value))


def test_options_that_come_too_late_are_refused(players: Players) -> None:
    identifier = players.identifier()
    identifier.bind(HOST, 0)
    refused(errno.EINVAL, lambda: identifier.set_ipv6_only(True))
    refused(errno.EINVAL, lambda: identifier.set_reuse_address(False))
    identifier.set_reuse_address(True)
    identifier.listen(1)
    refused(errno.EINVAL, lambda: identifier.set_reuse_address(True))


@pytest.mark.parametrize(
    ("listens_on", "connects_to", "is_"),
    [
        ("0.0.0.0", "0.0.0.0", HOST),
        ("0.0.0.0", "127.0.0.2", "127.0.0.2"),
        ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        ("::", "::1", "::1"),
        ("::", HOST, HOST),
        ("::1", "::", "::1"),
    ],
)
def test_this_machine_is_reached_by_all_of_its_addresses(
    players: Players, listens_on: str, connects_to: str, is_: str
) -> None:
    listener = players.identifier()
    listener.set_ipv6_only(False)
    listener.bind(listens_on, 0)
    listener.listen(1)
    assert listener.local_address is not None
    client = players.connecting(listener.local_address[1], ConnectionParameters(), host=connects_to)
    event = expect(players.channel, CmEventType.CONNECT_REQUEST)
    server = players.identifier(event.new_key)
    assert server.local_address == client.peer_address == (is_, listener.local_address[1])
    assert server.peer_address == client.local_address


@pytest.mark.parametrize("host", ["10.99.99.99", "2001:db8::77"])
def test_an_address_that_is_not_ours_cannot_be_bound(players: Players, host: str) -> None:
    refused(errno.ENODEV, lambda: players.identifier().bind(host, 0))


def test_a_link_local_address_without_its_interface_is_refused(players: Players) -> None:
    refused(errno.EINVAL, lambda: players.identifier().bind("fe80::1", 0))
    refused(errno.EINVAL, lambda: players.identifier().resolve_address("fe80::1", 1, None, 1000))


# -- queue pairs -----------------------------------------------------------------------------------


def test_a_queue_pair_has_to_suit_its_identifier(players: Players) -> None:
    identifier = players.identifier()
    identifier.resolve_address(HOST, 1, None, 1000)
    expect(players.channel, CmEventType.ADDR_RESOLVED)
    with ExitStack() as stack:
        context = stack.enter_context(identifier.context())
        domain = stack.enter_context(context.alloc_pd())
        queue = stack.enter_context(CompletionQueue(context, 8))
        other = stack.enter_context(Device("software").open())
        others_domain = stack.enter_context(other.alloc_pd())
        others_queue = stack.enter_context(CompletionQueue(other, 8))

        def make(service: QueuePairType = QueuePairType.RC) -> None:
            identifier.create_queue_pair(domain, queue, queue, Capacity(1, 1), service)

        refused(errno.EINVAL, lambda: make(QueuePairType.UD))
        refused(
            errno.EINVAL,
            lambda: identifier.create_queue_pair(
                others_domain, others_queue, others_queue, Capacity(1, 1)
            ),
        )
        make()
        refused(errno.EINVAL, make)
        identifier.close()


@pytest.mark.parametrize("depths", [(129, 0), (0, 254)])
def test_depths_beyond_the_device_are_refused(players: Players, depths: tuple[int, int]) -> None:
    _, port = players.listener()
    too_deep = ConnectionParameters(responder_resources=depths[0], initiator_depth=depths[1])
    refused(errno.EINVAL, lambda: players.connecting(port, too_deep))


def test_a_queue_pair_of_the_programs_own_is_connected_by_its_number(players: Players) -> None:
    _, port = players.listener()
    ends: list[tuple[Identifier, QueuePair]] = []

    def make(identifier: Identifier) -> QueuePair:
        context = players.stack.enter_context(identifier.context())
        domain = players.stack.enter_context(context.alloc_pd())
        queue = players.stack.enter_context(CompletionQueue(context, 8))
        pair = players.stack.enter_context(QueuePair.create(domain, queue, queue))
        pair.modify(**identifier.init_qp_attr(QueuePairState.INIT))
        ends.append((identifier, pair))
        return pair

    client = players.identifier()
    client.resolve_address(HOST, port, None, 1000)
    expect(players.channel, CmEventType.ADDR_RESOLVED)
    client.resolve_route(1000)
    expect(players.channel, CmEventType.ROUTE_RESOLVED)
    refused(errno.EINVAL, lambda: client.connect(ConnectionParameters(qp_num=1)))
    client.connect(ConnectionParameters(qp_num=make(client).qp_num))
    server = players.identifier(expect(players.channel, CmEventType.CONNECT_REQUEST).new_key)
    server.accept(ConnectionParameters(qp_num=make(server).qp_num))
    for _ in range(2):
        expect(players.channel, CmEventType.ESTABLISHED)
    server.notify(AsyncEventType.COMM_EST)
    for _, pair in ends:
        assert pair.state is QueuePairState.RTS
    client.disconnect()
    for _ in range(2):
        expect(players.channel, CmEventType.DISCONNECTED)
    for _, pair in ends:
        assert pair.state is QueuePairState.ERR


def next_event(table: Provider, channel: Any) -> tuple[Any, int]:
    """Take the first event of a channel, which has one: its identifier and its type."""
    assert select.select([channel.fd], [], [], 10)[0]
    event = ffi.new("struct aiordma_cm_event *")
    assert lib.aiordma_next_cm_event(table.table, channel, event) == 1
    return ffi.cast("struct rdma_cm_id *", event.id), event.event


def test_request_follows_its_listener_to_a_new_channel(players: Players) -> None:
    """The new channel counts both identifiers, so its destruction leaves no pointer to it."""
    listener, port = players.listener()
    table = listener.provider
    with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
        peer.sendall(Frame().pack())
        select.select([players.channel.fd], [], [], 10)
        new = table.create_event_channel()
        assert table.migrate_id(listener.pointer, new) == 0
        request, kind = next_event(table, new)
        assert kind == CmEventType.CONNECT_REQUEST
        assert request.channel == listener.pointer.channel == new
        table.destroy_id(request)
        table.destroy_event_channel(new)
    assert listener.pointer.channel == ffi.NULL


def test_events_of_a_request_follow_its_listener(players: Players) -> None:
    """A request whose peer has left has two events, which only its own channel may have."""
    listener, port = players.listener()
    table = listener.provider
    engine = players.stack.enter_context(closing(EngineThread()))
    for _ in range(2):
        with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
            peer.sendall(Frame().pack())
    wait_until(engine.is_resting)  # it has reported that both peers left
    new = table.create_event_channel()
    assert table.migrate_id(listener.pointer, new) == 0
    assert not select.select([players.channel.fd], [], [], 0)[0]
    kinds: dict[Any, list[int]] = {}
    for _ in range(4):
        identifier, kind = next_event(table, new)
        kinds.setdefault(identifier, []).append(kind)
    assert not select.select([new.fd], [], [], 0)[0]
    assert len(kinds) == 2
    for request, found in kinds.items():
        assert found == [CmEventType.CONNECT_REQUEST, CmEventType.CONNECT_ERROR]
        assert request.channel == new
        table.destroy_id(request)
    table.destroy_event_channel(new)


def test_request_without_a_channel_leaves_nothing(players: Players) -> None:
    """A listener whose channel was destroyed drops its requests, and may get another channel."""
    listener, port = players.listener(backlog=1)
    table = listener.provider
    engine = players.stack.enter_context(closing(EngineThread()))
    old, new = table.create_event_channel(), table.create_event_channel()
    before = software_objects()
    assert table.migrate_id(listener.pointer, old) == 0
    with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
        peer.sendall(Frame().pack())
        assert select.select([old.fd], [], [], 10)[0]
        table.destroy_event_channel(old)  # drops the request
        assert Frame.receive(peer).flags & REJECTS
        assert has_ended(peer)
    with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
        peer.sendall(Frame().pack())
        assert Frame.receive(peer).flags & REJECTS
        assert has_ended(peer)
    wait_until(engine.is_resting)
    assert software_objects() == {**before, "event_channels": before["event_channels"] - 1}
    assert table.migrate_id(listener.pointer, new) == 0
    with closing(socket.create_connection((HOST, port), timeout=5)) as peer:
        peer.sendall(Frame().pack())
        request, _ = next_event(table, new)
        table.destroy_id(request)
    table.destroy_event_channel(new)


# -- TCP's own ways --------------------------------------------------------------------------------


def test_connect_from_own_port_is_refused(players: Players) -> None:
    with closing(socket.create_server((HOST, 0))) as server:
        port = server.getsockname()[1]
    identifier = players.identifier()
    identifier.resolve_address(HOST, port, (HOST, port), 1000)
    expect(players.channel, CmEventType.ADDR_RESOLVED)
    identifier.resolve_route(1000)
    expect(players.channel, CmEventType.ROUTE_RESOLVED)
    players.give_queue_pair(identifier)
    identifier.connect(ConnectionParameters())
    assert expect(players.channel, CmEventType.REJECTED).status == -errno.ECONNREFUSED


def test_a_listener_out_of_descriptors_waits_for_one_without_spinning(players: Players) -> None:
    listener, port = players.listener()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(socket.socket()) as peer:
        engine = players.stack.enter_context(closing(EngineThread()))
        with closing(socket.socket()) as probe:
            lowest = probe.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            peer.connect((HOST, port))
            peer.sendall(Frame().pack())
            event = expect(players.channel, CmEventType.CONNECT_ERROR)
            assert (event.key, event.status) == (listener.key, -errno.EMFILE)
            wait_until(engine.is_resting)
            assert not list(players.channel.events())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        players.identifier(expect(players.channel, CmEventType.CONNECT_REQUEST).new_key)


@pytest.mark.anyio
async def test_a_listener_comes_back_to_its_port_at_once() -> None:
    port = 0
    for _ in range(3):
        async with await aiordma.listen(HOST, port, device="software") as listener:
            port = listener.port

            async def connect(port: int = port) -> None:
                async with await aiordma.connect(HOST, port, device="software") as client:
                    await client.receive()

            async with anyio.create_task_group() as group:
                group.start_soon(connect)
                async with await listener.accept() as server:
                    await server.send(b"the side that ends it keeps the port, as TCP sees it")


@pytest.mark.asyncio
async def test_a_peer_that_takes_its_time_is_not_taken_for_dead() -> None:
    dead_after = 2 * 4.096e-6 * 2**17  # of its silence: more than the least, which is a second
    async with (
        await aiordma.listen(HOST, 0, device="software", receive_buffers=0) as listener,
        anyio.create_task_group() as group,
    ):
        data = bytes(1 << 20)

        async def send() -> None:
            async with await aiordma.connect(
                HOST,
                listener.port,
                device="software",
                options=aiordma.ConnectionOptions(ack_timeout=17, retry_count=1),
            ) as client:
                for _ in range(16):
                    await client.send(data)
                await client.receive()

        group.start_soon(send)
        async with await listener.accept() as server:
            await anyio.sleep(3 * dead_after)
            buffer = bytearray(len(data))
            region = server.register(buffer)
            for _ in range(16):
                await server.post_recv(region)
            await server.send(b"all of it")


@pytest.mark.asyncio
async def test_idle_connection_stops_the_dead_peer_check() -> None:
    async with (
        await aiordma.listen(HOST, 0, device="software") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, _echo)
        async with await aiordma.connect(HOST, listener.port, device="software") as client:
            with closing(EngineThread()) as engine, anyio.fail_after(40):
                for _ in range(2):  # what has been idle is looked after again, and is idle again
                    await client.send(b"awake")
                    await client.receive()
                    before = -1
                    while engine.sleeps != before:
                        before = engine.sleeps
                        await anyio.sleep(1.2)  # two looks, where there are any
        group.cancel_scope.cancel()


async def _echo(connection: aiordma.Connection) -> None:
    async for message in connection:
        await connection.send(message)


def test_a_channel_blocks_where_the_program_wants_it(players: Players) -> None:
    os.set_blocking(players.channel.fd, True)
    provider, pointer = players.channel.provider, players.channel.pointer
    out = ffi.new("struct rdma_cm_event **")
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(provider.get_cm_event(pointer, out)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    identifier = players.identifier()
    identifier.resolve_address(HOST, 1, None, 1000)
    thread.join(10)
    assert results == [0]
    # What is taken and not acknowledged holds back the identifier's end.
    closing_it = threading.Thread(target=identifier.close)
    closing_it.start()
    closing_it.join(0.1)
    assert closing_it.is_alive()
    assert provider.ack_cm_event(out[0]) == 0
    closing_it.join(10)
    assert not closing_it.is_alive()
