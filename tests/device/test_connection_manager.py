"""What the connection manager has beside connecting: options, sources, migration, names, and the
devices that it knows."""

import errno
import gc
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

import aiordma
from aiordma.verbs import CmEventType, EventChannel, Identifier
from tests.device.identifiers import expect, no_event
from tests.device.players import both_ways, connected, one_loop
from tests.devices import ADDRESS, DeviceUnderTest
from tests.internals import QueuePairAttribute, queue_pair_of

anyio_test = pytest.mark.anyio

# -- states ---------------------------------------------------------------------------------------


def test_calls_that_need_a_device_are_refused_without_one() -> None:
    """librdmacm would follow a null pointer."""
    parameters = aiordma.verbs.ConnectionParameters()
    with EventChannel() as channel, Identifier(channel) as identifier:
        uses: dict[str, Callable[[], object]] = {
            "rdma_cm_id": identifier.context,
            "rdma_resolve_route": lambda: identifier.resolve_route(1000),
            "rdma_connect": lambda: identifier.connect(parameters),
            "rdma_accept": lambda: identifier.accept(parameters),
        }
        for call, use in uses.items():
            with pytest.raises(aiordma.VerbsCallError, match=f"{call}: .*No device is bound") as no:
                use()
            assert no.value.errno == errno.EINVAL
        with pytest.raises(aiordma.VerbsCallError, match="rdma_disconnect") as no:
            identifier.disconnect()
        assert no.value.errno == errno.EINVAL
        with pytest.raises(aiordma.VerbsCallError, match="rdma_init_qp_attr"):
            identifier.init_qp_attr(aiordma.verbs.QueuePairState.INIT)
        with pytest.raises(aiordma.VerbsCallError, match="rdma_join_multicast"):
            identifier.join_multicast("239.1.2.3")


# -- options --------------------------------------------------------------------------------------


def _traffic_class(connection: aiordma.Connection) -> int:
    pair = queue_pair_of(connection)
    assert pair is not None
    return int(pair.query(QueuePairAttribute.AV).ah_attr.grh.traffic_class)


@anyio_test
@one_loop
@pytest.mark.capability("type_of_service")
async def test_the_type_of_service_of_the_side_that_connects_is_that_of_both() -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(tos=0xB8)},
        server={"options": aiordma.ConnectionOptions(tos=0x20)},
    ) as (client, server):
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
async def test_source_port_is_shared_with_reuse_address() -> None:
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
            ADDRESS, one.port, source=source, options=aiordma.ConnectionOptions(reuse_address=True)
        ) as first:
            with pytest.raises(aiordma.AddressError, match="reuse_address"):
                await aiordma.connect(ADDRESS, other.port, source=source)
            async with await aiordma.connect(
                ADDRESS,
                other.port,
                source=source,
                options=aiordma.ConnectionOptions(reuse_address=True),
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
    assert [each.name for each in found] == aiordma.verbs.Device.names()
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
    assert theirs.service is aiordma.verbs.QueuePairType.RC
    assert theirs.port_space is aiordma.verbs.PortSpace.TCP
    for family, address in (("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")):
        try:
            socket.getaddrinfo("localhost", 1, socket.AddressFamily[family])
        except socket.gaierror:
            continue  # nor does this machine's resolver know it
        (local,) = await aiordma.resolve(
            "localhost",
            1,
            family=socket.AddressFamily[family],
            port_space=aiordma.verbs.PortSpace.UDP,
        )
        assert local.destination == (address, 1)
        assert local.service is aiordma.verbs.QueuePairType.UD


@anyio_test
@one_loop
@pytest.mark.parametrize(
    ("host", "service", "hints", "reason"),
    [
        ("localhost", 1, {"numeric_host": True}, "is not numeric"),
        ("no.such.host.invalid", 1, {}, "no.such.host.invalid"),
        (ADDRESS, "no-such-service", {}, "/etc/services"),
        (ADDRESS, 1, {"family": socket.AddressFamily.AF_INET6}, "of this family"),
    ],
)
async def test_what_does_not_resolve_says_why(
    host: str, service: int | str, hints: dict[str, Any], reason: str
) -> None:
    with pytest.raises(aiordma.AddressError, match=reason):
        await aiordma.resolve(host, service, **hints)
