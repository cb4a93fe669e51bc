"""Which device serves what: the real one that reaches the address, else the built-in one; both in
one process, on one event loop."""

import logging
from contextlib import AsyncExitStack

import anyio
import pytest

import aiordma
from aiordma._runtime import device_choice
from aiordma._runtime.reactor import current_reactors
from tests.connections import connect_to
from tests.device.players import both_ways, one_loop
from tests.devices import ADDRESS, DeviceUnderTest, kernel_objects

pytestmark = pytest.mark.anyio

LOOPBACK = "127.0.0.1"
"""What no real device here reaches."""


async def pair(
    stack: AsyncExitStack, address: str, device: str = "auto"
) -> tuple[aiordma.Connection, aiordma.Connection]:
    """A connection's two ends, closed with the stack."""
    listener = await stack.enter_async_context(await aiordma.listen(address, device=device))
    ends = await connect_to(listener, address, device=device)
    for end in ends:
        await stack.enter_async_context(end)
    return ends


async def test_the_address_decides(device: DeviceUnderTest) -> None:
    async with AsyncExitStack() as stack:
        for end in await pair(stack, ADDRESS):
            assert end.device_name == device.name


async def test_what_no_real_device_reaches_the_built_in_one_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_choice, "_said", set())
    caplog.set_level(logging.INFO, "aiordma")
    async with AsyncExitStack() as stack:
        one, other = await pair(stack, LOOPBACK)
        assert {one.device_name, other.device_name} == {"software"}
        await both_ways(one, other)
        socket = await stack.enter_async_context(await aiordma.open_datagram(LOOPBACK))
        assert socket.device_name == "software"
        shared = await stack.enter_async_context(await aiordma.open_shared_receive(LOOPBACK))
        assert shared.device_name == "software"
    said = [r.message for r in caplog.records if "software device" in r.message]
    assert len(said) == 1


@one_loop
async def test_the_built_in_device_is_had_by_name_wherever_one_is(device: DeviceUnderTest) -> None:
    async with AsyncExitStack() as stack:
        for end in await pair(stack, ADDRESS, "software"):
            assert end.device_name == "software"
    assert aiordma.Device.names()[-1] == "software"
    with aiordma.Device("software").open() as context, context.alloc_pd():
        assert context.transport is aiordma.Transport.IWARP
        assert context.device_name == "software"


@one_loop
async def test_the_environment_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIORDMA_DEVICE", "software")
    async with AsyncExitStack() as stack:
        for end in await pair(stack, ADDRESS):
            assert end.device_name == "software"


@pytest.mark.capability("beside_the_built_in")
async def test_both_devices_serve_one_loop_at_the_same_time(device: DeviceUnderTest) -> None:
    before = {name: kernel_objects(name) for name in (device.name, "software")}
    async with AsyncExitStack() as stack:
        real = await pair(stack, ADDRESS, device.name)
        built_in = await pair(stack, LOOPBACK, "software")
        assert {end.device_name for end in real} == {device.name}
        assert {end.device_name for end in built_in} == {"software"}
        assert len(current_reactors()) == 2
        async with anyio.create_task_group() as group:
            for ends in (real, built_in):
                for _ in range(20):
                    await both_ways(*ends)
                group.start_soon(both_ways, *ends)
        # Memory of the one is not the other's.
        region = real[0].register(bytearray(8))
        with pytest.raises(ValueError, match="another device"):
            built_in[0].post_send(region)
        await real[0].aclose()
        await both_ways(*built_in)
    assert {name: kernel_objects(name) for name in before} == before
    assert current_reactors() == []


@pytest.mark.capability("beside_the_built_in")
async def test_a_real_device_that_is_insisted_on_must_reach_the_address(
    device: DeviceUnderTest,
) -> None:
    with pytest.raises(aiordma.RdmaConnectionError, match=r'(?s)RDMA device.*device="software"'):
        await aiordma.connect(LOOPBACK, 7471, device=device.name)
