"""On a machine without a real RDMA device whoever insists on one is told what to do, and nothing is
left behind. (Who does not insist gets the software device: tests/device.)"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

import aiordma
from aiordma.verbs.identifier import EventChannel
from tests.internals import THREAD_NAME, calls_under_way, rdma_core, reactor

DEVICES = Path("/sys/class/infiniband")
PRESENT = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []

pytestmark = [
    pytest.mark.skipif(
        bool(PRESENT),
        reason=f"this machine does not lack RDMA devices: it has {', '.join(PRESENT)}",
    ),
]

COMMAND = "rdma link add rxe0 type rxe netdev eth0"


async def _connect() -> None:
    await aiordma.connect("127.0.0.1", 7471, device="rxe0")


async def _connect_by_name() -> None:
    await aiordma.connect("localhost", 7471, device="rxe0", source=("127.0.0.1", 0))


async def _listen() -> None:
    await aiordma.listen("127.0.0.1", 7471, device="rxe0")


async def _open_datagram() -> None:
    await aiordma.open_datagram("127.0.0.1", device="rxe0")


async def _open_shared_receive() -> None:
    await aiordma.open_shared_receive("127.0.0.1", device="rxe0")


async def _open_domain() -> None:
    await aiordma.open_domain("127.0.0.1", device="rxe0")


async def _open_queue_pair() -> None:
    await aiordma.open_queue_pair("rxe0")


WAYS = [
    _connect,
    _connect_by_name,
    _listen,
    _open_datagram,
    _open_shared_receive,
    _open_domain,
    _open_queue_pair,
]


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_in_names_the_command_that_helps(
    way: Callable[[], Awaitable[None]],
) -> None:
    with pytest.raises(aiordma.NoDeviceError) as caught:
        await way()
    assert "there is no RDMA device 'rxe0'; there is none at all" in str(caught.value)
    assert COMMAND in str(caught.value)
    assert "modprobe -a rdma_rxe rdma_ucm" in str(caught.value)
    assert 'device="software"' in str(caught.value)
    if way is not _listen:  # which looks at the names first
        cause = caught.value.__cause__
        assert isinstance(cause, aiordma.NoDeviceError)
        assert isinstance(cause.__cause__, aiordma.VerbsCallError)
        assert cause.__cause__.call == "rdma_create_event_channel"


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def _own_threads() -> list[str]:
    while calls_under_way():
        time.sleep(0.001)
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("aiordma") and name != THREAD_NAME]


@pytest.mark.anyio
@pytest.mark.parametrize("way", WAYS)
async def test_a_failed_attempt_leaves_nothing(way: Callable[[], Awaitable[None]]) -> None:
    async def attempt() -> None:
        with pytest.raises(aiordma.NoDeviceError):
            await way()

    await attempt()  # librdmacm, and the worker threads, stay once they are there
    gc.collect()
    before = _descriptors(), _own_threads()
    for _ in range(3):
        await attempt()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(attempt)
    gc.collect()
    assert (_descriptors(), _own_threads()) == before
    assert reactor.current_reactors() == []


@pytest.mark.parametrize("use_uvloop", [False, True], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("way", WAYS)
def test_the_loop_is_left_clean(use_uvloop: bool, way: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with pytest.raises(aiordma.NoDeviceError):
            await way()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    # pytest turns every ResourceWarning, and what a loop complains of at its end, into a failure.
    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": use_uvloop, "debug": True})
    gc.collect()


def test_opening_a_device_says_that_there_is_none() -> None:
    with pytest.raises(aiordma.NoDeviceError) as caught:
        aiordma.verbs.Device("rxe0").open()
    assert "there is no RDMA device 'rxe0'" in str(caught.value)
    assert "there is none at all" in str(caught.value)
    assert COMMAND in str(caught.value)


def test_the_built_in_devices_are_the_only_names() -> None:
    assert aiordma.verbs.Device.names() == ["software", "software_roce"]


def test_an_event_channel_is_no_device_and_leaves_none() -> None:
    before = _descriptors()
    with pytest.raises(aiordma.NoDeviceError, match="rdma_create_event_channel"):
        EventChannel(rdma_core())
    gc.collect()
    assert _descriptors() == before


def test_what_is_wrong_with_the_arguments_is_said_first() -> None:
    # A typing error is not reported as a missing device.
    with pytest.raises(ValueError, match="max_send_wr=0"):
        anyio.run(
            lambda: aiordma.connect(
                "127.0.0.1", 7471, options=aiordma.ConnectionOptions(max_send_wr=0)
            )
        )
    with pytest.raises(ValueError, match="private_data of 57 bytes"):
        anyio.run(lambda: aiordma.connect("127.0.0.1", 7471, private_data=bytes(57)))
    with pytest.raises(ValueError, match="backlog=0"):
        anyio.run(lambda: aiordma.listen("127.0.0.1", 7471, backlog=0))
    with pytest.raises(aiordma.AddressError, match="does not resolve"):
        anyio.run(lambda: aiordma.connect("no-such-host.invalid", 7471))


def test_use_outside_a_loop_raises_event_loop_error() -> None:
    for made in (aiordma.connect("127.0.0.1", 7471), aiordma.listen("127.0.0.1", 7471)):
        with pytest.raises(RuntimeError, match="event loop"):
            made.send(None)
        made.close()
