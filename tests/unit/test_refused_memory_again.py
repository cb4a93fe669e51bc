"""A close whose memory regions or windows the driver has refused to free: each close says so, waits
for another task's, and frees all that is left when it is called again."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import aiordma
from aiordma import Access, VerbsCallError
from aiordma._base.provider import software
from aiordma.verbs import MemoryRegion
from tests.unit.test_refused_destroy import (
    OPTIONS,
    PATIENCE,
    connected,
    refusing,
)

pytestmark = [pytest.mark.anyio, pytest.mark.natively]


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
