"""Which device serves what: the real one that reaches the address, else the built-in one; both in
one process, on one event loop."""

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

import anyio
import httpcore
import pytest

import aiordma
from aiordma.integrations.httpcore import StreamBackend
from aiordma.streams import connect_stream, create_connection, create_server, listen_stream
from tests.connections import connect_to
from tests.device.players import both_ways, one_loop
from tests.devices import ADDRESS, BUILT_IN, DeviceUnderTest, kernel_objects
from tests.internals import close_unused_reactors, current_reactors, device_choice

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
    monkeypatch.setattr(device_choice, "_logged", set())
    monkeypatch.delenv("AIORDMA_DEVICE", raising=False)
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
    assert aiordma.verbs.Device.names()[-2:] == ["software", "software_roce"]
    with aiordma.verbs.Device("software").open() as context, context.alloc_pd():
        assert context.transport is aiordma.verbs.Transport.IWARP
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
    await close_unused_reactors()
    assert {name: kernel_objects(name) for name in before} == before
    assert current_reactors() == []


@pytest.mark.capability("beside_the_built_in")
async def test_a_real_device_that_is_insisted_on_must_reach_the_address(
    device: DeviceUnderTest,
) -> None:
    with pytest.raises(aiordma.RdmaConnectionError, match=r'(?s)RDMA device.*device="software"'):
        await aiordma.connect(LOOPBACK, 7471, device=device.name)


@pytest.mark.parametrize("address", [ADDRESS, LOOPBACK])
async def test_every_opener_names_an_unknown_device(device: DeviceUnderTest, address: str) -> None:
    unknown = "mlx5_9"
    for opening in (
        partial(aiordma.connect, address, 7471),
        partial(aiordma.prepare_connection, address, 7471),
        partial(aiordma.listen, address),
        partial(aiordma.listen, "0.0.0.0"),
        partial(aiordma.open_datagram, address),
        partial(aiordma.open_shared_receive, address),
        partial(aiordma.open_domain, address),
        aiordma.open_queue_pair,
        partial(connect_stream, address, 7471),
        partial(listen_stream, address),
    ):
        with pytest.raises(aiordma.NoDeviceError) as caught:
            await opening(device=unknown)
        assert f"there is no RDMA device {unknown!r}" in str(caught.value), opening
        assert device.name in str(caught.value)


async def opened_by_every_opener(chosen: str) -> list[str]:
    """Open one object with each function that takes a class of devices; return the errors."""
    errors: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        # The device under test serves the address, on this machine, also if it is the built-in one.
        patch.delenv("AIORDMA_DEVICE", raising=False)
        async with await aiordma.listen(ADDRESS) as listener, await listen_stream(ADDRESS) as other:
            patch.setenv("AIORDMA_DEVICE", chosen)
            for argument in ("auto", chosen):
                for opening in (
                    partial(aiordma.listen, ADDRESS),
                    partial(aiordma.prepare_connection, ADDRESS, listener.port),
                    partial(aiordma.open_shared_receive, ADDRESS),
                    partial(aiordma.open_domain, ADDRESS),
                    partial(listen_stream, ADDRESS),
                ):
                    try:
                        await (await opening(device=argument)).aclose()
                    except aiordma.DeviceRequirementError as error:
                        errors.append(str(error))
                for connecting, port in (
                    (aiordma.connect, listener.port),
                    (connect_stream, other.port),
                ):
                    if chosen != "rdma":
                        continue  # only the refusals: nothing here accepts
                    if BUILT_IN:
                        with pytest.raises(aiordma.DeviceRequirementError) as caught:
                            await connecting(ADDRESS, port, device=argument)
                        errors.append(str(caught.value))
    return errors


@pytest.mark.promise("A required transport is never replaced")
@one_loop
async def test_every_opener_requires_rdma(device: DeviceUnderTest) -> None:
    errors = await opened_by_every_opener("rdma")
    assert len(errors) == (14 if device.is_built_in else 0), errors


@pytest.mark.promise("A required transport is never replaced")
@one_loop
async def test_every_opener_requires_a_kind(device: DeviceUnderTest) -> None:
    for chosen in ("roce", "iwarp", "infiniband"):
        errors = await opened_by_every_opener(chosen)
        assert len(errors) == (0 if device.kind == chosen else 10), errors


@one_loop
@pytest.mark.capability("datagrams")
async def test_datagram_socket_requires_a_kind(device: DeviceUnderTest) -> None:
    for chosen in ("rdma", "roce", "iwarp"):
        permitted = device.kind == chosen or (chosen == "rdma" and not device.is_built_in)
        if permitted:
            async with await aiordma.open_datagram(ADDRESS, device=chosen) as socket:
                assert socket.device_name == device.name
        else:
            with pytest.raises(aiordma.DeviceRequirementError, match=chosen):
                await aiordma.open_datagram(ADDRESS, device=chosen)


@pytest.mark.promise("A required transport is never replaced")
@one_loop
async def test_wildcard_listener_rejects_another_kind(device: DeviceUnderTest) -> None:
    if device.is_built_in:
        with pytest.raises(aiordma.DeviceRequirementError, match="rdma"):
            await aiordma.listen("0.0.0.0", device="rdma")
        return
    other = "iwarp" if device.kind == "roce" else "roce"
    async with await aiordma.listen("0.0.0.0", device=other) as listener:
        with pytest.raises(aiordma.RejectedError):
            await aiordma.connect(ADDRESS, listener.port)
    async with await aiordma.listen("0.0.0.0", device=device.kind) as listener:
        for end in await connect_to(listener, ADDRESS):
            await end.aclose()


@one_loop
async def test_log_names_the_device(
    device: DeviceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiordma")
    async with AsyncExitStack() as stack:
        await pair(stack, ADDRESS)
    said = [(r.levelname, r.message) for r in caplog.records]
    assert ("INFO", f"this event loop uses the device {device.name}") in said
    through = [text for level, text in said if text.endswith(f"through the device {device.name}")]
    assert sorted(text.split()[0] for text in through) == ["accepted", "connected"]


@pytest.mark.one_kernel_device
async def test_log_names_the_device_once_in_an_event_loop(
    device: DeviceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """The device stays open until the loop ends, also for one connection at a time."""
    caplog.set_level(logging.DEBUG, "aiordma")
    for _ in range(3):
        async with AsyncExitStack() as stack:
            await pair(stack, ADDRESS)
    text = f"this event loop uses the device {device.name}"
    levels = [record.levelname for record in caplog.records if record.message == text]
    assert levels == ["INFO"]


@one_loop
async def test_asyncio_and_httpcore_refuse_other_devices(device: DeviceUnderTest) -> None:
    other = {"software": "rdma", "iwarp": "roce"}.get(device.kind, "iwarp")
    with pytest.raises(aiordma.DeviceRequirementError):
        await create_server(asyncio.Protocol, ADDRESS, device=other)
    with pytest.raises(aiordma.DeviceRequirementError):
        await create_connection(asyncio.Protocol, ADDRESS, 7471, device=other)
    with pytest.raises(httpcore.ConnectError, match="device"):
        await StreamBackend(device=other).connect_tcp(ADDRESS, 7471)
