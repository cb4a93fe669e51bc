"""What open_datagram refuses, on whatever device."""

from typing import Any

import pytest

import aiordma
from tests.device.players import one_loop, reactor_in_use
from tests.devices import ADDRESS, NOT_OURS, DeviceUnderTest

pytestmark = [pytest.mark.anyio]


@one_loop
async def test_a_device_without_datagrams_is_refused_by_name(device: DeviceUnderTest) -> None:
    if device.lacks("datagrams"):
        with pytest.raises(aiordma.NotSupportedError, match=f"datagrams: {device.name} has none"):
            await aiordma.open_datagram(ADDRESS)
    else:
        async with await aiordma.open_datagram(ADDRESS, device=device.name) as socket:
            assert socket.device_name == device.name
    assert not reactor_in_use()


BAD: list[tuple[str, dict[str, Any]]] = [
    ("private_data of 137 bytes", {"private_data": bytes(137)}),
    ("qkey=4294967296 is not in 0", {"qkey": 1 << 32}),
    ("most_handles=0 is not in 1", {"most_handles": 0}),
    ("receive_buffers=-1 is not in 0", {"receive_buffers": -1}),
    ("host='0.0.0.0': expected the address of one device", {"host": "0.0.0.0"}),
    ("port", {"port": 65536}),
]


@one_loop
@pytest.mark.parametrize(("text", "arguments"), BAD, ids=[text for text, _ in BAD])
async def test_a_bad_argument_is_named(text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        await aiordma.open_datagram(**{"host": ADDRESS, **arguments})
    assert not reactor_in_use()


@one_loop
async def test_an_address_that_cannot_be_had_is_refused(device: DeviceUnderTest) -> None:
    text = f"rdma_bind_addr: .*{NOT_OURS} is no address of this machine"
    with pytest.raises(aiordma.VerbsCallError, match=text):
        await aiordma.open_datagram(NOT_OURS)
    with pytest.raises(aiordma.NoDeviceError, match="there is no RDMA device 'mlx5_9'"):
        await aiordma.open_datagram(ADDRESS, device="mlx5_9")
    assert not reactor_in_use()


@one_loop
@pytest.mark.capability("datagrams")
async def test_a_port_belongs_to_one_socket() -> None:
    async with await aiordma.open_datagram(ADDRESS) as socket:
        with pytest.raises(aiordma.VerbsCallError, match="Address already in use"):
            await aiordma.open_datagram(ADDRESS, socket.port)
