"""What the connection manager has beside connecting: options, sources, migration, queue pairs that
librdmacm has not made, ECE, and the devices that it knows."""

import errno
import gc
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import anyio
import pytest

import aiordma
from aiordma import (
    AsyncEventType,
    Capacity,
    CmEvent,
    CmEventType,
    CompletionQueue,
    ConnectionParameters,
    Context,
    Ece,
    EventChannel,
    Identifier,
    MemoryRegion,
    QueuePair,
    QueuePairState,
)
from aiordma.enums import QueuePairAttribute
from tests.device.players import both_ways, connected, one_loop
from tests.devices import ADDRESS, DeviceUnderTest

anyio_test = pytest.mark.anyio

# -- options --------------------------------------------------------------------------------------


def _traffic_class(connection: aiordma.Connection) -> int:
    pair = connection._endpoint.queue_pair
    assert pair is not None
    return int(pair.query(QueuePairAttribute.AV).ah_attr.grh.traffic_class)


@anyio_test
@one_loop
@pytest.mark.capability("type_of_service")
async def test_the_type_of_service_of_the_side_that_connects_is_that_of_both() -> None:
    async with connected(client={"tos": 0xB8}, server={"tos": 0x20}) as (client, server):
        assert (_traffic_class(client), _traffic_class(server)) == (0xB8, 0xB8)
        await both_ways(client, server)
    async with connected() as (client, server):
        assert (_traffic_class(client), _traffic_class(server)) == (0, 0)


@anyio_test
@one_loop
async def test_the_peer_sees_the_source_that_was_bound() -> None:
    async with await aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:

        async def connect() -> None:
            async with await aiordma.connect(
                ADDRESS, listener.port, source=(ADDRESS, 23456)
            ) as connection:
                assert connection.local_address == (ADDRESS, 23456)
                await connection.send(b"from there")

        group.start_soon(connect)
        async with await listener.accept() as connection:
            assert connection.peer_address == (ADDRESS, 23456)
            assert await connection.receive() == b"from there"


@anyio_test
@one_loop
async def test_a_source_port_is_shared_by_those_who_all_say_so() -> None:
    source = (ADDRESS, 23457)

    async def echo(connection: aiordma.Connection) -> None:
        async for message in connection:
            await connection.send(message)

    async with (
        await aiordma.listen(ADDRESS, 0) as one,
        await aiordma.listen(ADDRESS, 0) as other,
        anyio.create_task_group() as group,
    ):
        group.start_soon(one.serve, echo)
        group.start_soon(other.serve, echo)
        async with await aiordma.connect(
            ADDRESS, one.port, source=source, reuse_address=True
        ) as first:
            with pytest.raises(aiordma.AddressError, match="reuse_address"):
                await aiordma.connect(ADDRESS, other.port, source=source)
            async with await aiordma.connect(
                ADDRESS, other.port, source=source, reuse_address=True
            ) as second:
                for each in (first, second):
                    assert each.local_address == source
                    await each.send(b"me too")
                    assert await each.receive() == b"me too"
        group.cancel_scope.cancel()


def test_a_shared_address_is_bound_twice_and_listened_on_by_one_alone() -> None:
    with EventChannel() as channel, Identifier(channel) as one, Identifier(channel) as other:
        for identifier in (one, other):
            identifier.set_reuse_address(True)
        one.bind(ADDRESS, 0)
        assert one.local_address is not None
        other.bind(*one.local_address)
        with pytest.raises(aiordma.VerbsCallError, match="Another listener") as caught:
            one.listen(1)
        assert caught.value.errno == errno.EADDRINUSE
        other.close()
        one.listen(1)


def test_options_out_of_range_are_refused_by_name() -> None:
    with EventChannel() as channel, Identifier(channel) as identifier:
        for tos in (-1, 256):
            with pytest.raises(ValueError, match=rf"^tos={tos} is not in 0\.\.255$"):
                identifier.set_tos(tos)
        with pytest.raises(ValueError, match=r"^ack_timeout=32 is not in 0\.\.31$"):
            identifier.set_ack_timeout(32)
        with pytest.raises(aiordma.VerbsCallError, match="rdma_set_option"):
            identifier.set_option(99, b"\0")
    with pytest.raises(aiordma.ClosedError):
        identifier.set_tos(0)


# -- identifiers by hand --------------------------------------------------------------------------


def next_event(channel: EventChannel) -> CmEvent:
    """The next event; pytest's timeout is the limit."""
    while True:
        select.select([channel.fd], [], [])
        for event in channel.events():
            return event


def expect(channel: EventChannel, kind: CmEventType) -> CmEvent:
    event = next_event(channel)
    assert event.type is kind
    return event


def no_event(channel: EventChannel) -> bool:
    return list(channel.events()) == []


def resolved(channel: EventChannel, port: int, stack: ExitStack) -> Identifier:
    identifier = stack.enter_context(Identifier(channel))
    identifier.resolve_address(ADDRESS, port, None, 5000)
    expect(channel, CmEventType.ADDR_RESOLVED)
    identifier.resolve_route(5000)
    expect(channel, CmEventType.ROUTE_RESOLVED)
    return identifier


def listening(channel: EventChannel, stack: ExitStack) -> tuple[Identifier, int]:
    listener = stack.enter_context(Identifier(channel))
    listener.bind(ADDRESS, 0)
    listener.listen(4)
    assert listener.local_address is not None
    return listener, listener.local_address[1]


class End:
    """A queue pair made without librdmacm, and a buffer."""

    def __init__(self, context: Context, stack: ExitStack) -> None:
        domain = stack.enter_context(context.alloc_pd())
        self.queue = stack.enter_context(CompletionQueue(context, 8))
        self.pair = stack.enter_context(
            QueuePair.create(domain, self.queue, self.queue, capacity=Capacity(4, 4))
        )
        self.buffer = bytearray(64)
        self.memory = stack.enter_context(MemoryRegion(domain, self.buffer))

    def move(self, identifier: Identifier, *states: QueuePairState) -> None:
        for state in states:
            self.pair.modify(**identifier.init_qp_attr(state))
        assert self.pair.state is states[-1]

    def completion(self) -> aiordma.WorkCompletion:
        while True:
            for completion in self.queue.poll():
                return completion


S = QueuePairState


@contextmanager
def answered(ece: Ece | None = None) -> Iterator[tuple[EventChannel, list[Identifier], list[End]]]:
    """A client and a server that make their queue pairs themselves, up to the point where the
    server has accepted, and the client has been told: (events, identifiers, ends)."""
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        _, port = listening(channel, stack)
        client = resolved(channel, port, stack)
        context = stack.enter_context(client.context())
        ours, theirs = End(context, stack), End(context, stack)
        ours.move(client, S.INIT)
        if ece is not None:
            client.set_local_ece(ece)
        client.connect(ConnectionParameters(qpn=ours.pair.qpn))
        request = expect(channel, CmEventType.CONNECT_REQUEST)
        assert request.qpn == ours.pair.qpn
        server = stack.enter_context(Identifier(channel, key=request.new_key))
        theirs.move(server, S.INIT, S.RTR, S.RTS)
        if ece is not None:
            assert server.remote_ece == ece
            server.set_local_ece(Ece(ece.vendor_id, ece.options & 1))
        server.accept(ConnectionParameters(qpn=theirs.pair.qpn))
        response = expect(channel, CmEventType.CONNECT_RESPONSE)
        assert (response.key, response.qpn) == (client.key, theirs.pair.qpn)
        yield channel, [client, server], [ours, theirs]


@pytest.mark.capability("queue pairs by hand")
@pytest.mark.capability("rdma_establish")
def test_a_queue_pair_of_ones_own_is_moved_and_established_by_hand() -> None:
    with answered() as (channel, (client, server), (ours, theirs)):
        ours.move(client, S.RTR, S.RTS)
        assert no_event(channel)  # the server waits for our word
        client.establish()
        assert expect(channel, CmEventType.ESTABLISHED).key == server.key
        theirs.pair.post_recv(1, [theirs.memory[0:32]])
        ours.buffer[0:5] = b"hello"
        ours.pair.post_send(2, [ours.memory[0:5]])
        assert ours.completion().status == 0
        received = theirs.completion()
        assert (received.status, received.byte_len) == (0, 5)
        assert bytes(theirs.buffer[0:5]) == b"hello"
        client.disconnect()
        assert expect(channel, CmEventType.DISCONNECTED).key == server.key


@pytest.mark.capability("queue pairs by hand")
@pytest.mark.capability("rdma_establish")
def test_a_message_may_stand_in_for_a_last_word_that_got_lost() -> None:
    with answered() as (channel, (client, server), (ours, theirs)):
        theirs.pair.post_recv(1, [theirs.memory[0:32]])
        ours.move(client, S.RTR, S.RTS)
        ours.pair.post_send(2, [ours.memory[0:5]])
        assert theirs.completion().status == 0
        assert no_event(channel)  # ours has not been said, and never will be
        server.notify(AsyncEventType.COMM_EST)
        assert expect(channel, CmEventType.ESTABLISHED).key == server.key
        server.notify()  # known by now
        assert no_event(channel)


@pytest.mark.capability("queue pairs by hand")
def test_attributes_asked_for_too_early_are_incomplete_and_modify_says_so() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        client = resolved(channel, 7471, stack)
        end = End(stack.enter_context(client.context()), stack)
        end.move(client, S.INIT)
        with pytest.raises(ValueError, match="INIT to RTR of a RC queue pair needs AV"):
            end.move(client, S.RTR)
        with pytest.raises(aiordma.VerbsCallError, match="rdma_establish"):
            client.establish()
        with pytest.raises(aiordma.VerbsCallError, match="rdma_notify"):
            client.notify()
        with Identifier(channel) as unbound, pytest.raises(aiordma.VerbsCallError):
            unbound.init_qp_attr(S.INIT)


def test_what_librdmacm_sees_to_is_not_done_by_hand() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        client = resolved(channel, 7471, stack)
        context = stack.enter_context(client.context())
        domain = stack.enter_context(context.alloc_pd())
        queue = stack.enter_context(CompletionQueue(context, 8))
        client.create_queue_pair(domain, queue, queue, Capacity(4, 4))
        for call in (
            client.establish,
            client.reject_ece,
            lambda: client.set_local_ece(Ece(1, 1)),
            lambda: client.remote_ece,
        ):
            with pytest.raises(ValueError, match="librdmacm made the queue pair"):
                call()


# -- enhanced connection establishment ------------------------------------------------------------


@pytest.mark.capability("ece")
def test_options_are_offered_and_agreed_to() -> None:
    with answered(Ece(0x15B3, 7)) as (_, (client, _server), _ends):
        assert client.remote_ece == Ece(0x15B3, 1)


@pytest.mark.capability("ece")
def test_options_that_do_not_suit_are_a_refusal_of_their_own() -> None:
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        _, port = listening(channel, stack)
        client = resolved(channel, port, stack)
        end = End(stack.enter_context(client.context()), stack)
        client.set_local_ece(Ece(0x15B3, 7))
        client.connect(ConnectionParameters(qpn=end.pair.qpn))
        request = expect(channel, CmEventType.CONNECT_REQUEST)
        with Identifier(channel, key=request.new_key) as server:
            with pytest.raises(ValueError, match="at most 148"):
                server.reject_ece(bytes(149))
            server.reject_ece(b"without, please")
            refusal = expect(channel, CmEventType.REJECTED)
        assert refusal.status in aiordma.errors.REJECT_REASONS
        assert "options" in aiordma.errors.REJECT_REASONS[refusal.status]
        assert refusal.private_data.rstrip(b"\0") == b"without, please"


def test_options_where_the_handshake_has_none_name_the_device(device: DeviceUnderTest) -> None:
    if not device.lacks("ece"):
        pytest.skip(f"{device.driver} has ece")
    with ExitStack() as stack:
        channel = stack.enter_context(EventChannel())
        client = resolved(channel, 7471, stack)
        with pytest.raises(aiordma.NotSupportedError, match=rf"{device.name}.*no ECE"):
            client.set_local_ece(Ece(1, 1))
        with pytest.raises(aiordma.NotSupportedError, match=device.name):
            _ = client.remote_ece


# -- migration ------------------------------------------------------------------------------------


def test_events_follow_an_identifier_to_its_new_channel() -> None:
    with ExitStack() as stack:
        old, new = EventChannel(), stack.enter_context(EventChannel())
        identifier = stack.enter_context(Identifier(old))
        key = identifier.key
        identifier.resolve_address(ADDRESS, 7471, None, 5000)
        select.select([old.fd], [], [])  # its event waits at the old one
        identifier.migrate(new)
        event = expect(new, CmEventType.ADDR_RESOLVED)
        assert (event.key, identifier.key) == (key, key)
        assert no_event(old)
        # It has nothing to do with the old one any more, which may be closed.
        old.close()
        gc.collect()
        assert not identifier.closed
        identifier.resolve_route(5000)
        assert expect(new, CmEventType.ROUTE_RESOLVED).key == key
        new.close()
        assert identifier.closed


def test_migrating_to_a_closed_channel_is_refused_with_nothing_lost() -> None:
    with EventChannel() as channel, Identifier(channel) as identifier:
        with EventChannel() as closed:
            pass
        with pytest.raises(aiordma.ClosedError):
            identifier.migrate(closed)
        identifier.resolve_address(ADDRESS, 7471, None, 5000)
        expect(channel, CmEventType.ADDR_RESOLVED)


# -- devices and names ----------------------------------------------------------------------------


@anyio_test
async def test_the_connection_managers_devices_are_listed(device: DeviceUnderTest) -> None:
    found = await aiordma.devices()
    assert [each.name for each in found] == aiordma.Device.names()
    assert device.name in [each.name for each in found]
    with found[0].open() as context:
        assert context.device_name == found[0].name


@anyio_test
@one_loop
async def test_names_are_resolved_as_librdmacm_does() -> None:
    (ours,) = await aiordma.resolve(ADDRESS, 7471, passive=True, numeric_host=True)
    assert (ours.source, ours.destination) == ((ADDRESS, 7471), None)
    (any_of_ours,) = await aiordma.resolve(
        None, "7471", passive=True, family=socket.AddressFamily.AF_INET
    )
    assert any_of_ours.source == ("0.0.0.0", 7471)
    (theirs,) = await aiordma.resolve(ADDRESS, no_route=True)
    assert (theirs.source, theirs.destination) == (None, (ADDRESS, 0))
    assert theirs.family is socket.AddressFamily.AF_INET
    assert theirs.service is aiordma.QueuePairType.RC
    assert theirs.port_space is aiordma.PortSpace.TCP
    for family, address in (("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")):
        (local,) = await aiordma.resolve(
            "localhost", 1, family=socket.AddressFamily[family], port_space=aiordma.PortSpace.UDP
        )
        assert local.destination == (address, 1)
        assert local.service is aiordma.QueuePairType.UD


@anyio_test
@one_loop
@pytest.mark.parametrize(
    ("host", "service", "hints", "reason"),
    [
        ("localhost", 1, {"numeric_host": True}, "no numeric address"),
        ("no.such.host.invalid", 1, {}, "no.such.host.invalid"),
        (ADDRESS, "no-such-service", {}, "/etc/services"),
        (ADDRESS, 1, {"family": socket.AddressFamily.AF_INET6}, "of this family"),
    ],
)
async def test_what_does_not_resolve_says_why(
    host: str, service: int | str, hints: dict[str, object], reason: str
) -> None:
    with pytest.raises(aiordma.AddressError, match=reason):
        await aiordma.resolve(host, service, **hints)  # type: ignore[arg-type]
