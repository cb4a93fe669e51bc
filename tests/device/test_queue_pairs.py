"""Queue pairs without the connection manager: connected by hand, awaited as any other."""

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import aiordma
from aiordma import QueuePairAddress
from aiordma.verbs import QueuePairState, QueuePairType
from tests.device.by_hand import GID_INDEX
from tests.device.players import REMOTE, both_ways, one_loop
from tests.devices import DeviceUnderTest
from tests.internals import SOFTWARE, queue_pair_of

pytestmark = pytest.mark.anyio

by_hand = pytest.mark.capability("queue pairs by hand")


@contextlib.asynccontextmanager
async def pair(
    device: DeviceUnderTest, service: QueuePairType = QueuePairType.RC, **options: Any
) -> AsyncIterator[tuple[aiordma.types.UnmanagedConnection, aiordma.types.UnmanagedConnection]]:
    ways = {"service": service, "gid_index": GID_INDEX, **options}
    async with (
        await aiordma.open_queue_pair(device.by_hand, **ways) as one,
        await aiordma.open_queue_pair(device.by_hand, **ways) as other,
    ):
        await one.connect_to(other.address)
        await other.connect_to(one.address)
        yield one, other


@by_hand
@pytest.mark.parametrize("service", [QueuePairType.RC, QueuePairType.UC])
async def test_messages_and_writes(device: DeviceUnderTest, service: QueuePairType) -> None:
    async with pair(device, service) as (one, other):
        assert one.service is service
        await both_ways(one, other)
        target = bytearray(16)
        theirs = other.register(target, REMOTE).remote()
        await one.write(b"0123456789abcdef", theirs)
        await one.send(b"written", immediate=3)
        assert await other.receive_message() == aiordma.types.Message(b"written", 3)
        assert target == b"0123456789abcdef"


@by_hand
async def test_reads_and_atomics_on_rc(device: DeviceUnderTest) -> None:
    async with pair(device) as (one, other):
        region = other.register(bytearray(16), REMOTE | aiordma.Access.REMOTE_ATOMIC)
        start = -region.address % 8
        place = region[start : start + 8].remote()
        assert await one.fetch_add(place, 5) == 0
        assert (await one.read_bytes(place)).strip(b"\0") == b"\5"


@one_loop
@by_hand
async def test_what_uc_lacks_is_said(device: DeviceUnderTest) -> None:
    async with pair(device, QueuePairType.UC) as (one, other):
        remote = other.register(bytearray(8), REMOTE).remote()
        with pytest.raises(aiordma.NotSupportedError, match="UC"):
            one.post_read(bytearray(8), remote)
        with pytest.raises(aiordma.NotSupportedError, match="UC"):
            one.post_fetch_add(bytearray(8), remote, 1)
        with pytest.raises(aiordma.NotSupportedError, match="UC"):
            one.post_send(b"x", invalidate=1)
        with pytest.raises(aiordma.NotSupportedError, match="UC"):
            await one.open_window()
        assert one.peer_timeout == math.inf  # no acknowledgements
        await both_ways(one, other)


@by_hand
async def test_a_peer_that_is_gone_is_a_retry_exceeded_error(device: DeviceUnderTest) -> None:
    async with pair(device, options=aiordma.ConnectionOptions(ack_timeout=8, retry_count=1)) as (
        one,
        other,
    ):
        await other.aclose()
        with pytest.raises(aiordma.RetryExceededError):
            await one.send(b"anybody there?")
        with pytest.raises(aiordma.RetryExceededError):
            await one.receive()


@by_hand
async def test_closing_ends_what_is_posted(device: DeviceUnderTest) -> None:
    async with pair(device, receive_buffers=0) as (one, other):
        buffer = bytearray(8)
        receive = one.post_recv(buffer)
        await one.aclose()
        with pytest.raises(aiordma.FlushedError):
            await receive
        assert other.is_connected  # no event reports it


@one_loop
@by_hand
async def test_wrong_addresses_and_arguments_are_refused(device: DeviceUnderTest) -> None:
    name = device.by_hand
    with pytest.raises(ValueError, match=r"port=7.*1\.\.1"):
        await aiordma.open_queue_pair(name, port=7)
    with pytest.raises(ValueError, match="gid_index=100000"):
        await aiordma.open_queue_pair(name, gid_index=100000)
    with pytest.raises(ValueError, match=r"open_queue_pair\(\): service=UD: .*open_datagram"):
        await aiordma.open_queue_pair(name, service=QueuePairType.UD)
    with pytest.raises(aiordma.NoDeviceError, match=device.name):
        await aiordma.open_queue_pair("none0")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"qp_num": 2**24}, "24 bits"),
        ({"psn": -1}, "24 bits"),
        ({"gid": b"short"}, "gid has 5 bytes: expected 16"),
        ({"lid": 2**16}, "16 bits"),
    )
    address = QueuePairAddress(1, 1, bytes(16))
    for bad, match in refused:
        with pytest.raises(ValueError, match=match):
            replace(address, **bad)
    async with await aiordma.open_queue_pair(name, gid_index=GID_INDEX) as one:
        with pytest.raises(ValueError, match="not connected yet"):
            one.post_send(b"x" * 1000)  # its ring would keep it, and send it later
        options: list[dict[str, Any]] = [
            {"hop_limit": 300},
            {"service_level": -1},
            {"traffic_class": 256},
        ]
        for option in options:
            with pytest.raises(ValueError, match="is not in"):
                await one.connect_to(one.address, **option)
        await one.connect_to(one.address)  # a queue pair can be its own peer
        await one.send(b"to myself")
        assert await one.receive() == b"to myself"
    async with pair(device) as (one, other):
        with pytest.raises(ValueError, match="has been connected"):
            await one.connect_to(other.address)


@one_loop
async def test_open_queue_pair_on_iwarp_is_not_supported(device: DeviceUnderTest) -> None:
    if device.driver in ("siw", SOFTWARE):
        with pytest.raises(aiordma.NotSupportedError, match=f"{device.name} is an iWARP device"):
            await aiordma.open_queue_pair(device.name)
    if not device.lacks("queue pairs by hand"):
        async with await aiordma.open_queue_pair(device.by_hand) as one:
            assert one.device_name == device.by_hand


@one_loop
@by_hand
async def test_the_error_state_is_seen_by_the_queue_pair(device: DeviceUnderTest) -> None:
    async with pair(device) as (one, _):
        queue_pair = queue_pair_of(one)
        assert queue_pair is not None
        assert queue_pair.state is QueuePairState.RTS
