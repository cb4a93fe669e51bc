"""What two sides ask of each other as they connect, and what is in force then."""

import dataclasses
import logging
import math
from typing import Any

import anyio
import pytest

import aiordma
from tests.device.players import OWN_RECEIVES, Outcome, both_ways, connected
from tests.devices import ADDRESS, DEVICE, DeviceUnderTest
from tests.internals import SOFTWARE, incoming

pytestmark = pytest.mark.anyio

ASKED = aiordma.ConnectionOptions(responder_resources=2, initiator_depth=4)


async def asked(listener: aiordma.Listener, **options: Any) -> aiordma.verbs.ConnectionParameters:
    """What a listener is shown of a client that asks for these, and is refused."""
    connecting = Outcome()
    async with anyio.create_task_group() as group:
        group.start_soon(connecting.of, lambda: aiordma.connect(ADDRESS, listener.port, **options))
        request = await listener.request()
        shown = request.parameters
        await request.reject()
    assert isinstance(connecting.error, aiordma.RejectedError)
    return shown


async def test_a_request_shows_the_depths_that_the_peer_asks_for() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        shown = await asked(listener, private_data=b"hello", options=ASKED)
    # From here: what the peer initiates is responded to here.
    assert (shown.responder_resources, shown.initiator_depth) == (4, 2)
    assert shown.private_data.rstrip(b"\0") == b"hello"


@pytest.mark.capability("retries_carried")
async def test_a_request_shows_the_retries_that_the_peer_asks_for() -> None:
    async with aiordma.listen(ADDRESS, 0) as listener:
        options = aiordma.ConnectionOptions(retry_count=3, rnr_retry_count=4)
        shown = await asked(listener, options=options)
        assert (shown.retry_count, shown.rnr_retry_count) == (3, 4)
        assert not shown.shared_receive
        assert shown.flow_control
        async with aiordma.prepare_connection(ADDRESS, listener.port) as client:
            qp_num = client.qp_num
            connecting = Outcome()
            async with anyio.create_task_group() as group:
                group.start_soon(connecting.of, client.establish)
                request = await listener.request()
                assert request.parameters.qp_num == qp_num
                await request.reject()


async def test_a_request_shows_the_ece_or_says_why_not(device: DeviceUnderTest) -> None:
    async with aiordma.listen(ADDRESS, 0) as listener, anyio.create_task_group() as group:
        group.start_soon(Outcome().of, lambda: aiordma.connect(ADDRESS, listener.port))
        request = await listener.request()
        if device.lacks("ece"):
            with pytest.raises(aiordma.NotSupportedError, match="ECE"):
                _ = request.ece
        else:
            assert request.ece == aiordma.verbs.Ece(0, 0)
        await request.reject()
        with pytest.raises(aiordma.ClosedError, match="answered"):
            _ = request.ece


async def test_a_query_shows_what_is_in_force(device: DeviceUnderTest) -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(max_send_wr=40)}, server=OWN_RECEIVES
    ) as (client, server):
        found = client.query()
        if not device.lacks("queue_pair_state"):
            assert found.qp_state is aiordma.verbs.QueuePairState.RTS
        assert found.cap.max_send_wr >= 40
        assert server.query().cap.max_recv_wr >= server.options.max_recv_wr
    with pytest.raises(aiordma.ClosedError):
        client.query()


@pytest.mark.capability("retries_carried")
async def test_a_query_shows_the_negotiated_retries() -> None:
    options = dataclasses.replace(ASKED, ack_timeout=17, retry_count=3, min_rnr_timer=6)
    async with connected(client={"options": options}) as (client, server):
        found = client.query()
        assert (found.timeout, found.retry_cnt, found.min_rnr_timer) == (17, 3, 6)
        assert (found.max_rd_atomic, found.max_dest_rd_atomic) == (4, 2)
        assert (server.query().max_rd_atomic, server.query().max_dest_rd_atomic) == (2, 4)
        assert found.dest_qp_num == server.qp_num


@pytest.mark.capability("retries_carried")
async def test_the_servers_own_retry_count_is_in_force(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "_warned", set())
    with caplog.at_level(logging.WARNING, "aiordma"):
        for _ in range(2):
            async with connected(
                client={"options": aiordma.ConnectionOptions(retry_count=0)},
                server={"options": aiordma.ConnectionOptions(retry_count=5)},
            ) as (client, server):
                assert client.query().retry_cnt == 0
                assert server.query().retry_cnt == 5
                assert server.query().timeout == server.options.ack_timeout
                await both_ways(client, server)
    (record,) = caplog.records
    assert "connects with retry_count=0" in record.getMessage()
    assert "retry_count=5" in record.getMessage()


@pytest.mark.capability("retries_carried")
async def test_a_shared_queue_is_accepted_with_own_retries() -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(retry_count=0)}, server={"shared_receive": 8}
    ) as ends:
        await both_ways(*ends)
        assert ends[1].query().retry_cnt == ends[1].options.retry_count


async def test_connection_has_the_objects_it_was_made_with(device: DeviceUnderTest) -> None:
    async with connected() as (client, server):
        assert client.qp_num != server.qp_num
        if not device.lacks("retries_carried"):  # the handshake carries the number
            assert server.query().dest_qp_num == client.qp_num
        # One event loop opens a device once.
        assert client.context is server.context
        assert client.protection_domain is server.protection_domain
        assert client.context.device_name == client.device_name
        assert client.context.query_port(1).state is aiordma.verbs.PortState.ACTIVE
        # Memory of that domain works for the connection, and is not closed with it.
        memory = bytearray(b"registered by the domain")
        with aiordma.MemoryRegion(client.protection_domain, memory) as region:
            await client.send(region)
            assert await server.receive() == memory


async def test_connection_keeps_its_number_and_objects_after_close() -> None:
    async with connected() as (client, _):
        number, context, domain = client.qp_num, client.context, client.protection_domain
        await client.aclose()
        assert (client.qp_num, client.context, client.protection_domain) == (
            number,
            context,
            domain,
        )
        context.query()  # the device stays open until the loop ends
    with aiordma.MemoryRegion(client.protection_domain, bytearray(8)):
        assert client.context is context


@pytest.mark.parametrize(
    ("options", "most", "on_iwarp"),
    [
        ({"peer_timeout": 3600.0}, 3600.0, 900.0),
        ({"options": aiordma.ConnectionOptions(ack_timeout=0)}, math.inf, 900.0),
        ({"options": aiordma.ConnectionOptions(retry_count=0, ack_timeout=1)}, 0.0001, 1.0),
    ],
    ids=["an hour", "no limit", "at once"],
)
async def test_peer_timeout_is_within_what_tcp_can_do_on_iwarp(
    options: dict[str, Any], most: float, on_iwarp: float
) -> None:
    async with connected(client=options) as (client, _):
        if DEVICE in (SOFTWARE, "siw0"):
            assert client.peer_timeout == on_iwarp
        else:
            assert client.peer_timeout <= most
            assert (client.peer_timeout == math.inf) == (most == math.inf)
