"""Address handles: kept up to a number, never destroyed under a request, gone at the end."""

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aiordma import BusyError, ClosedError, VerbsCallError
from aiordma._datagram import address_handles
from aiordma._datagram.address_handles import AddressHandles, close_all
from aiordma.verbs import AddressHandle as RealHandle
from aiordma.verbs import AddressVector
from aiordma.verbs import Device as RealDevice
from tests.internals import current_event_loop
from tests.unit.loops import until

pytestmark = pytest.mark.anyio

ONE, OTHER, THIRD = (AddressVector(lid=number) for number in (1, 2, 3))


class Device:
    """Where handles are made: which ones exist, and how many are being made."""

    def __init__(self) -> None:
        self.alive: list[AddressVector] = []
        self.begun = self.made = 0
        self.refuse = False
        self.ready = threading.Event()
        self.ready.set()
        self.domain = Domain()


class Domain:
    """Its users: the last one closes it."""

    def __init__(self) -> None:
        self.users: list[object] = []

    def join(self, user: object, _kind: str, _is_closing: Callable[[], bool]) -> None:
        self.users.append(user)

    def leave(self, user: object) -> None:
        if user in self.users:
            self.users.remove(user)


class Handle:
    def __init__(self, device: Any, vector: AddressVector) -> None:
        device.begun += 1
        assert device.ready.wait(10)
        if device.refuse:
            raise VerbsCallError(12, "ibv_create_ah")
        self.device, self.vector = device, vector
        device.made += 1
        device.alive.append(vector)

    def close(self) -> None:
        self.device.alive.remove(self.vector)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(address_handles, "AddressHandle", Handle)
    return Device()


def handles_of(device: Any, most: int) -> AddressHandles:
    return AddressHandles(current_event_loop(), device, most, device.domain)


async def ended(handles: AddressHandles, device: Device) -> None:
    close_all(handles.detach())
    await until(lambda: not device.alive and not len(handles))
    assert device.domain.users == []


async def test_a_way_has_one_handle(device: Device) -> None:
    handles = handles_of(device, 4)
    first = handles.get(ONE)
    assert handles.get(AddressVector(lid=1)) is first
    assert await handles.obtain(ONE) is first
    assert await handles.obtain(OTHER) is not first
    assert device.made == 2
    for _ in range(3):
        first.release()
    handles.get(OTHER).release()
    assert device.alive == [ONE, OTHER]  # kept, though the first is not held
    handles._kept[OTHER].release()
    await ended(handles, device)


async def test_least_recently_used_unheld_handle_goes_first(
    device: Device,
) -> None:
    handles = handles_of(device, 2)
    one, other = handles.get(ONE), handles.get(OTHER)
    other.release()
    handles.get(ONE).release()  # used after the other
    handles.get(THIRD).release()
    await until(lambda: OTHER not in device.alive)
    handles.get(OTHER).release()  # now the first one has to go, and is held
    await anyio.sleep(0.05)
    assert ONE in device.alive
    one.release()
    await until(lambda: ONE not in device.alive)
    await ended(handles, device)


async def test_no_handle_is_made_after_the_end(device: Device) -> None:
    handles = handles_of(device, 4)
    await ended(handles, device)
    for make in (handles.obtain, _async(handles.get)):
        with pytest.raises(ClosedError):
            await make(THIRD)


def _async(function: Callable[[AddressVector], Any]) -> Callable[[AddressVector], Any]:
    async def call(vector: AddressVector) -> Any:
        return function(vector)

    return call


async def test_a_refused_handle_is_not_counted(device: Device) -> None:
    handles = handles_of(device, 4)
    device.refuse = True
    for make in (handles.obtain, _async(handles.get)):
        with pytest.raises(VerbsCallError):
            await make(ONE)
    await ended(handles, device)


async def test_one_that_was_made_for_a_cancelled_task_is_kept_for_the_next(device: Device) -> None:
    handles = handles_of(device, 4)
    device.ready.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(_obtain_and_release, handles)
        await until(lambda: device.begun == 1)
        group.cancel_scope.cancel()
        device.ready.set()
    assert device.made == 1
    handles.get(ONE).release()
    assert device.made == 1
    await ended(handles, device)


async def test_two_tasks_that_make_the_same_one_leave_one(device: Device) -> None:
    handles = handles_of(device, 4)
    device.ready.clear()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(_obtain_and_release, handles)
        await until(lambda: device.begun == 2)
        device.ready.set()
    await until(lambda: len(handles) <= 1)
    await ended(handles, device)


async def _obtain_and_release(handles: AddressHandles) -> None:
    (await handles.obtain(ONE)).release()


async def test_one_that_is_made_while_all_is_closed_is_destroyed(device: Device) -> None:
    handles = handles_of(device, 4)
    device.ready.clear()

    async def obtain() -> None:
        with pytest.raises(ClosedError):
            await handles.obtain(ONE)

    async with anyio.create_task_group() as group:
        group.start_soon(obtain)
        await until(lambda: device.begun == 1)
        assert handles.detach() == []
        assert len(device.domain.users) == 1
        device.ready.set()
    assert device.made == 1
    await ended(handles, device)


def test_handle_in_use_keeps_its_domain_open() -> None:
    with RealDevice("software").open() as context:
        domain = context.alloc_pd()
        handle = RealHandle(domain, AddressVector(gid=bytes(10) + b"\xff\xff\x7f\0\0\1"))
        handle._in_use = True
        with pytest.raises(BusyError, match="in use"):
            domain.close()
        assert (handle.closed, domain.closed) == (False, False)
        handle._in_use = False
        domain.close()
        assert handle.closed
