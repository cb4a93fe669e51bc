"""A close whose memory regions or windows the driver has refused to free: each close says so, waits
for another task's, and frees all that is left when it is called again."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Access, BusyError, VerbsCallError
from aiordma._base.provider import software
from aiordma.testing import Faults, software_objects
from aiordma.verbs import MemoryRegion, MemoryWindow
from tests.internals import endpoint_of
from tests.unit.test_refused_destroy import (
    OPTIONS,
    PATIENCE,
    connected,
    objects,
    refusing,
)

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

USERS = ["connection", "each", "datagram", "shared"]
REFUSED = r"ibv_dereg_mr: Device or resource busy.*call aclose\(\) again"


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Any]:
    """An object that registers memory, on a loop that keeps the device open."""
    async with aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener:
        kept = await connected(listener)
        if kind == "datagram":
            yield await aiordma.open_datagram("127.0.0.1", 0, device="software")
        elif kind == "shared":
            yield await aiordma.open_shared_receive("127.0.0.1", device="software", depth=8)
        else:
            domain: Any = "each" if kind == "each" else None
            client, server = await connected(listener, domain=domain)
            yield client
            await server.aclose()
        for each in kept:
            await each.aclose()


class Slow:
    """Deregisters a region when it may, and answers that it is busy before."""

    def __init__(self, patch: pytest.MonkeyPatch, region: MemoryRegion) -> None:
        provider: Any = software()
        self._deregister = provider.dereg_mr
        self._pointer = region.pointer
        self.answers = 0
        self.refuses = True
        self.waits_at: int | None = None
        """The answer before which it waits for `going`."""
        self.begun, self.going = threading.Event(), threading.Event()
        self.events: list[str] = []
        patch.setattr(provider, "dereg_mr", self)

    def __call__(self, pointer: Any) -> int:
        if pointer != self._pointer:
            return int(self._deregister(pointer))
        self.answers += 1
        if self.answers == self.waits_at:
            self.begun.set()
            assert self.going.wait(PATIENCE)
        if self.refuses:
            return 16
        self.events.append("deregistered")
        return int(self._deregister(pointer))

    def wait_at_next(self) -> None:
        self.waits_at = self.answers + 1


async def close_twice(slow: Slow, close: Callable[[], Any]) -> None:
    """Call a close while another one waits for the device."""
    slow.wait_at_next()

    async def closing() -> None:
        try:
            await close()
        except VerbsCallError:
            slow.events.append("refused")
        else:
            slow.events.append("closed")

    async with anyio.create_task_group() as group:
        group.start_soon(closing)
        await anyio.to_thread.run_sync(slow.begun.wait, PATIENCE)
        group.start_soon(closing)
        await anyio.sleep(0.1)  # enough for a close that does not wait
        slow.events.append("going")
        slow.going.set()


async def test_two_closes_of_a_domain_raise_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async with refusing(), opened("connection") as client:
        domain = await aiordma.open_domain("127.0.0.1", device="software")
        slow = Slow(monkeypatch, await domain.register(bytearray(8), Access.REMOTE_WRITE))
        with pytest.raises(VerbsCallError):
            await domain.aclose()
        await close_twice(slow, domain.aclose)
        assert slow.events == ["going", "refused", "refused"]
        slow.refuses = False
        await domain.aclose()
        assert slow.events[3:] == ["deregistered"]
        await client.aclose()


async def test_close_of_a_domain_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with refusing(), opened("connection") as client:
        domain = await aiordma.open_domain("127.0.0.1", device="software")
        slow = Slow(monkeypatch, await domain.register(bytearray(8), Access.REMOTE_WRITE))
        with pytest.raises(VerbsCallError):
            await domain.aclose()
        slow.refuses = False
        await close_twice(slow, domain.aclose)
        assert slow.events == ["going", "deregistered", "closed", "closed"]
        await client.aclose()


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("kind", ["connection", "datagram", "shared"])
async def test_close_of_a_user_waits_for_another(
    kind: str, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with refusing(), opened(kind) as user:
        slow = Slow(monkeypatch, user.register(bytearray(8)))
        with pytest.raises(VerbsCallError, match=REFUSED):
            await user.aclose()
        slow.refuses = refuses
        await close_twice(slow, user.aclose)
        if refuses:
            assert slow.events == ["going", "refused", "refused"]
            slow.refuses = False
            await user.aclose()
        else:
            assert slow.events == ["going", "deregistered", "closed", "closed"]


@pytest.mark.parametrize("kind", USERS)
async def test_refused_region_is_closed_by_a_later_close(kind: str) -> None:
    async with refusing("dereg_mr") as (fault,), opened(kind) as user:
        before, memory = objects(), bytearray(4096)
        region = user.register(memory)
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=REFUSED):
                await user.aclose()
            assert not region.closed
            with pytest.raises(BufferError):
                memory.append(0)
        fault.end()
        await user.aclose()
        assert region.closed
        memory.append(0)
        assert software_objects()["regions"] <= before["regions"]
        await user.aclose()


@pytest.mark.parametrize("kind", USERS)
async def test_close_after_two_refusals_destroys_all(kind: str) -> None:
    calls = ["destroy_srq" if kind == "shared" else "destroy_qp", "dereg_mr"]
    async with refusing(*calls) as faults, opened(kind) as user:
        region = user.register(bytearray(4096))
        with pytest.raises(VerbsCallError, match=f"ibv_{calls[0]}"):
            await user.aclose()
        faults[0].end()
        with pytest.raises(VerbsCallError, match=REFUSED):
            await user.aclose()
        faults[1].end()
        await user.aclose()
        assert region.closed


async def test_close_waits_for_the_domain_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async with refusing("dealloc_pd") as (fault,), opened("each") as client:
        await client.aclose()  # the domain ends behind it
        with pytest.raises(VerbsCallError, match="ibv_dealloc_pd"):
            await client.aclose()
        fault.end()
        await client.aclose()
        assert endpoint_of(client).domain_state.raw._is_gone


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the driver answers if it is asked to free a window: [16], or [0] to free it."""
    free, answer = MemoryWindow._destroy, [16]

    def destroy(window: MemoryWindow) -> None:
        window._check_destroyed(answer[0], "ibv_dealloc_mw")
        free(window)

    monkeypatch.setattr(MemoryWindow, "_destroy", destroy)
    return answer


@pytest.mark.parametrize("first", ["window", "connection"])
async def test_refused_window_is_freed_by_a_later_close(first: str, windows: list[int]) -> None:
    async with refusing(), opened("connection") as client:
        region = client.register(bytearray(4096), Access.MW_BIND | Access.LOCAL_WRITE)
        window = await client.bind(region[:], Access.REMOTE_WRITE)
        if first == "window":
            window.close()
            window.close()
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=r"ibv_dealloc_mw: .*It still exists: call"):
                await client.aclose()
            assert software_objects()["windows"] == 1
        windows[0] = 0
        await client.aclose()
        assert (software_objects()["windows"], region.closed) == (0, True)


async def test_window_can_be_closed_after_its_connection(windows: list[int]) -> None:
    async with refusing(), opened("connection") as client:
        window = await client.open_window()
        with pytest.raises(VerbsCallError, match="ibv_dealloc_mw"):
            await client.aclose()
        windows[0] = 0
        window.close()
        assert software_objects()["windows"] == 0
        await client.aclose()


async def test_region_in_use_elsewhere_is_closed_by_a_later_close() -> None:
    async with (
        refusing("dereg_mr") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as listener,
    ):
        client, server = await connected(listener)
        other, other_server = await connected(listener, receive_buffers=0)
        region = client.register(bytearray(64))
        request = other.post_recv(region[:])
        await client.aclose()  # it waits for no request of another connection
        assert not region.closed
        await other_server.send(b"x")
        await request
        with pytest.raises(VerbsCallError, match=REFUSED):
            await client.aclose()
        fault.end()
        await client.aclose()
        assert region.closed
        for each in (server, other, other_server):
            await each.aclose()


@pytest.mark.filterwarnings("ignore:left open:ResourceWarning")
def test_end_of_the_loop_survives_refused_memory(caplog: pytest.LogCaptureFixture) -> None:
    users: list[Any] = []

    async def main() -> None:
        listener = await aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS)
        client, server = await connected(listener)
        client.register(bytearray(64), Access.MW_BIND)  # so that the refusal is a BusyError
        users.extend([client, server, listener])

    before = objects()
    with Faults() as faults:
        faults.refuse_call("dereg_mr", 16, times=0)
        asyncio.run(main())
        with pytest.raises(BusyError, match="a memory window is bound to it"):
            asyncio.run(users[0].aclose())
    assert "unhandled exception" not in caplog.text
    for user in users:
        asyncio.run(user.aclose())
    assert objects() == before


async def test_refused_handle_is_destroyed_by_a_later_close() -> None:
    async with refusing("destroy_ah") as (fault,), opened("datagram") as socket:
        other = await aiordma.open_datagram("127.0.0.1", 0, device="software")
        peer = await socket.resolve("127.0.0.1", other.port)
        await socket.send(b"x", peer)
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=r"ibv_destroy_ah: .*It still exists"):
                await socket.aclose()
            assert software_objects()["address_handles"] == 1
        fault.end()
        await socket.aclose()
        assert software_objects()["address_handles"] == 0
        await other.aclose()


async def test_refused_group_is_destroyed_by_a_later_close() -> None:
    async with refusing() as _, opened("datagram") as socket:
        before = software_objects()["identifiers"]
        await socket.join("239.7.7.8")
        with Faults() as faults:
            faults.refuse_call("destroy_id", 16, times=0)
            for _ in range(2):
                with pytest.raises(VerbsCallError, match=r"rdma_destroy_id: .*It still exists"):
                    await socket.aclose()
        await socket.aclose()
        assert software_objects()["identifiers"] < before
