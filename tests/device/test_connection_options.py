"""Options that choose the completion queue or the path, and those that are refused: each has its
effect, or an error that says why not and what to use instead."""

import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.by_hand import GID_INDEX
from tests.device.players import Outcome, both_ways, connected, members, one_loop
from tests.device.test_queue_pairs import by_hand
from tests.devices import ADDRESS, IPV6, DeviceUnderTest, kernel_objects
from tests.internals import completion_queue_of, endpoint_of

pytestmark = pytest.mark.anyio


def queues(device: DeviceUnderTest) -> int:
    """How many completion queues the device has."""
    return kernel_objects(device.name)["cq"]


# -- completion queues --------------------------------------------------------------------------


@pytest.mark.capability("completion_vectors")
async def test_connections_use_the_completion_vector_they_ask_for(device: DeviceUnderTest) -> None:
    async with connected() as usual:
        before = queues(device)
        vector: dict[str, Any] = {"options": aiordma.ConnectionOptions(comp_vector=1)}
        async with (
            connected(client=vector, server=vector) as ends,
            connected(client=vector) as more,
        ):
            assert queues(device) == before + 1  # one queue of that vector, for all three
            assert [completion_queue_of(end).comp_vector for end in (*usual, *ends, *more)] == [
                0,
                0,
                1,
                1,
                1,
                0,
            ]
            for client, server in (usual, ends, more):
                await both_ways(client, server)


@pytest.mark.capability("completion_vectors")
async def test_listeners_shared_receives_use_its_completion_vector() -> None:
    async with members(1, 4, options=aiordma.ConnectionOptions(comp_vector=1)) as (
        (client,),
        (server,),
    ):
        shared = endpoint_of(server).shared_receive
        assert shared is not None
        assert shared.queue.queue.comp_vector == 1
        assert await server.receive() == b"first"
        await both_ways(client, server)


@pytest.mark.capability("completion_vectors")
@pytest.mark.capability("datagrams")
async def test_datagram_sockets_use_the_completion_vector_they_ask_for() -> None:
    async with aiordma.open_datagram(
        ADDRESS, options=aiordma.ConnectionOptions(comp_vector=1)
    ) as socket:
        assert completion_queue_of(socket).comp_vector == 1
        await socket.send(b"to myself", socket.peer(socket.gid, socket.qp_num))
        assert (await socket.receive()).data == b"to myself"


@one_loop
async def test_connection_refuses_a_missing_completion_vector(device: DeviceUnderTest) -> None:
    with aiordma.verbs.Device(device.name).open() as context:
        count = context.num_comp_vectors
    said = rf"^comp_vector={count}: {device.name} has 0\.\.{count - 1}$"
    with pytest.raises(ValueError, match=said):
        await aiordma.connect(ADDRESS, 1, options=aiordma.ConnectionOptions(comp_vector=count))
    with pytest.raises(ValueError, match=said):
        await aiordma.open_shared_receive(ADDRESS, comp_vector=count)
    if not device.lacks("datagrams"):
        with pytest.raises(ValueError, match=said):
            await aiordma.open_datagram(
                ADDRESS, options=aiordma.ConnectionOptions(comp_vector=count)
            )
    if not device.lacks("queue pairs by hand"):
        with pytest.raises(ValueError, match=said.replace(device.name, device.by_hand)):
            await aiordma.open_queue_pair(
                device.by_hand, options=aiordma.ConnectionOptions(comp_vector=count)
            )
    async with (
        aiordma.listen(
            ADDRESS, 0, options=aiordma.ConnectionOptions(comp_vector=count)
        ) as listener,
        anyio.create_task_group() as group,
    ):
        connecting = Outcome()
        group.start_soon(connecting.of, lambda: aiordma.connect(ADDRESS, listener.port))
        with pytest.raises(ValueError, match=said):
            await listener.accept()
    assert isinstance(connecting.error, aiordma.RejectedError)


async def test_connection_has_a_completion_queue_to_itself(device: DeviceUnderTest) -> None:
    async with connected() as usual:
        before = queues(device)
        # 20 requests of the client can be in flight: no other connection fits into the queue.
        own: dict[str, Any] = {
            "options": aiordma.ConnectionOptions(max_send_wr=12, cqe=20),
            "receive_buffers": 8,
        }
        async with connected(client=own) as one, connected(client=own) as other:
            assert queues(device) == before + 2
            for client, server in (one, other):
                assert 20 <= completion_queue_of(client).cqe < 40
                assert completion_queue_of(server) is completion_queue_of(usual[1])
                await both_ways(client, server)


async def test_connections_with_one_queue_size_share_a_queue(device: DeviceUnderTest) -> None:
    async with connected():
        before = queues(device)
        size: dict[str, Any] = {"options": aiordma.ConnectionOptions(cqe=1000)}
        async with connected(client=size, server=size) as ends, connected(client=size) as more:
            assert queues(device) == before + 1
            assert completion_queue_of(ends[0]).cqe >= 1000
            await both_ways(*ends)
            await both_ways(*more)


@one_loop
async def test_connection_refuses_a_queue_size_it_cannot_use(device: DeviceUnderTest) -> None:
    with aiordma.verbs.Device(device.name).open() as context:
        most = context.query().max_cqe
    for cqe in (19, most + 1):
        options = aiordma.ConnectionOptions(max_send_wr=12, receive_buffers=8, cqe=cqe)
        said = rf"^cqe={cqe} is not in 20\.\.{most}: 20 requests can be in flight, and a .* {most}$"
        with pytest.raises(ValueError, match=said):
            await aiordma.connect(ADDRESS, 1, options=options)
        if not device.lacks("datagrams"):
            with pytest.raises(ValueError, match=said):
                await aiordma.open_datagram(ADDRESS, options=options)
    with pytest.raises(ValueError, match=rf"^cqe=7 is not in 8\.\.{most}: 8 requests"):
        await aiordma.open_shared_receive(ADDRESS, depth=8, cqe=7)


@pytest.mark.capability("srq_resize")
async def test_shared_queue_grows_into_its_completion_queue() -> None:
    async with aiordma.open_shared_receive(ADDRESS, depth=8, cqe=100) as shared:
        most = endpoint_of(shared).queue.queue.cqe
        with pytest.raises(
            ValueError, match=f"their completion queue has {most} entries, of which "
        ):
            await shared.resize(most + 1)
        await shared.resize(100)
        assert shared.depth == 100


# -- the path -------------------------------------------------------------------------------------


@by_hand
@pytest.mark.parametrize("mtu", [aiordma.verbs.Mtu.MTU_256, aiordma.verbs.Mtu.MTU_1024])
async def test_queue_pairs_use_the_path_they_are_given(
    device: DeviceUnderTest, mtu: aiordma.verbs.Mtu
) -> None:
    opened: dict[str, Any] = {"gid_index": GID_INDEX, "pkey_index": 0}
    async with (
        aiordma.open_queue_pair(device.by_hand, **opened) as one,
        aiordma.open_queue_pair(device.by_hand, **opened) as other,
    ):
        for end, peer in ((one, other), (other, one)):
            await end.connect_to(peer.address, path_mtu=mtu, service_level=3, traffic_class=0x20)
        for end in (one, other):
            found = end.query()
            assert found.path_mtu is mtu
            assert found.pkey_index == 0
            assert found.ah_attr.gid_index == GID_INDEX
            assert found.ah_attr.traffic_class == 0x20
        assert one.query().dest_qp_num == other.qp_num
        assert one.protection_domain is other.protection_domain
        await both_ways(one, other)
        await one.send(bytes(5000))  # several packets
        assert await other.receive() == bytes(5000)


@by_hand
@one_loop
async def test_queue_pair_refuses_a_missing_partition_key(device: DeviceUnderTest) -> None:
    with aiordma.verbs.Device(device.by_hand).open() as context:
        count = context.query_port().pkey_tbl_len
    with pytest.raises(
        ValueError, match=rf"^pkey_index={count}: {device.by_hand} has 0\.\.{count - 1}$"
    ):
        await aiordma.open_queue_pair(device.by_hand, pkey_index=count)


@pytest.mark.capability("retries_carried")
async def test_a_query_shows_what_the_connection_manager_chose() -> None:
    async with connected(client={"options": aiordma.ConnectionOptions(tos=0x20)}) as (
        client,
        server,
    ):
        found = client.query()
        assert found.path_mtu is client.context.query_port().active_mtu
        assert found.ah_attr.traffic_class == 0x20
        assert client.context.query_gid(found.port_num, found.ah_attr.gid_index)[-4:] == (
            ipaddress.ip_address(ADDRESS).packed
        )
        assert server.query().path_mtu is found.path_mtu


# -- datagrams ------------------------------------------------------------------------------------


@pytest.mark.capability("datagrams")
async def test_datagrams_come_from_the_gid_that_was_chosen(device: DeviceUnderTest) -> None:
    async with aiordma.open_datagram(IPV6) as receiver:
        entries = [entry for entry in receiver.context.gid_table() if ":" in entry.address]
        # Another address if there is one. (The loopback interface has no link-local ones.)
        others = [entry for entry in entries if entry.gid != receiver.gid]
        if device.is_built_in:
            others = [entry for entry in others if not entry.address.startswith("fe80")]
        entry = (others or [entry for entry in entries if entry.gid == receiver.gid])[0]
        async with aiordma.open_datagram(IPV6, gid_index=entry.index) as sender:
            assert sender.gid == entry.gid
            learned = sender.peer(receiver.gid, receiver.qp_num)
            resolved = await sender.resolve(IPV6, receiver.port)
            for peer in (learned, resolved):
                assert peer.address.gid_index == entry.index
                await sender.send(b"hello", peer)
                message = await receiver.receive()
                assert message.data == b"hello"
                assert message.source.address.gid == entry.gid


@pytest.mark.capability("datagrams")
async def test_datagrams_have_the_service_level_that_was_chosen() -> None:
    async with (
        aiordma.open_datagram(ADDRESS, service_level=3) as one,
        aiordma.open_datagram(ADDRESS) as other,
    ):
        learned = one.peer(other.gid, other.qp_num)
        resolved = await one.resolve(ADDRESS, other.port)
        await other.send(b"hello", other.peer(one.gid, one.qp_num))
        replied = (await one.receive()).source
        for peer in (learned, resolved, replied):
            assert peer.address.service_level == 3
            await one.send(b"hello", peer)
            assert (await other.receive()).data == b"hello"
        assert other.peer(one.gid, one.qp_num).address.service_level == 0


@one_loop
@pytest.mark.capability("datagrams")
async def test_datagram_socket_refuses_a_missing_gid(device: DeviceUnderTest) -> None:
    said = rf"^gid_index=255: port 1 of {device.name} has no GID there; it has \d+ \(.*{ADDRESS}\)"
    with pytest.raises(ValueError, match=said):
        await aiordma.open_datagram(ADDRESS, gid_index=255)


# -- what is decided elsewhere --------------------------------------------------------------------

BY_CM = {
    "path_mtu": "the connection manager takes the MTU of the path",
    "gid_index": "the connection manager takes the GID of the local address",
    "service_level": "the connection manager derives it from .* Use the option tos",
    "pkey_index": "the connection manager takes the partition key of the network interface",
}
REFUSE: dict[str, Callable[..., Awaitable[Any]]] = {
    "connect": lambda **k: aiordma.connect(ADDRESS, 1, **k),
    "prepare_connection": lambda **k: aiordma.prepare_connection(ADDRESS, 1, **k),
    "listen": lambda **k: aiordma.listen(ADDRESS, 0, **k),
}


@one_loop
@pytest.mark.parametrize("call", REFUSE)
@pytest.mark.parametrize("option", BY_CM)
async def test_what_is_decided_elsewhere_is_refused_with_the_reason(call: str, option: str) -> None:
    meant = rf"^{re.escape(call)}\(\) has no parameter '{option}': {BY_CM[option]}"
    with pytest.raises(TypeError, match=meant):
        await REFUSE[call](**{option: 1})


@one_loop
async def test_options_without_effect_are_refused() -> None:
    options = aiordma.ConnectionOptions(tos=1)
    with pytest.raises(ValueError, match=r"options has tos=1: connect_to\(\) takes it, as traffic"):
        await aiordma.open_queue_pair("nothing0", options=options)
    with pytest.raises(ValueError, match="options has tos=1: datagram sockets have only receive_b"):
        await aiordma.open_datagram(ADDRESS, options=options)


@one_loop
@pytest.mark.parametrize("option", BY_CM)
async def test_accepting_refuses_what_is_decided_elsewhere(option: str) -> None:
    given: Any = {option: 1}
    meant = rf"\(\) has no parameter '{option}': {BY_CM[option]}"
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        connecting = Outcome()
        group.start_soon(connecting.of, lambda: aiordma.connect(ADDRESS, listener.port))
        request = await listener.request()
        with pytest.raises(TypeError, match=f"^accept{meant}"):
            await request.accept(**given)
        with pytest.raises(TypeError, match=f"^prepare{meant}"):
            await request.prepare(**given)
        await request.reject()  # it has not been answered
    assert isinstance(connecting.error, aiordma.RejectedError)
