"""A listener whose identifier or shared receive queue the driver has refused to destroy."""

from typing import Any

import anyio
import pytest

import aiordma
import aiordma.streams
from aiordma import VerbsCallError
from aiordma.testing import software_objects
from tests.internals import endpoint_of
from tests.unit.test_refused_destroy import OPTIONS, connected, refusing

pytestmark = [pytest.mark.anyio, pytest.mark.natively]

REFUSED = "rdma_destroy_id: Device or resource busy"


@pytest.mark.parametrize("kind", ["listener", "streams"])
async def test_close_repeats_what_the_driver_refused(kind: str) -> None:
    async with refusing("destroy_id") as (fault,):
        listener: Any
        if kind == "listener":
            listener = await aiordma.listen("127.0.0.1", 0, device="software")
        else:
            listener = await aiordma.streams.listen_stream("127.0.0.1", 0, device="software")
        for _ in range(2):
            with pytest.raises(VerbsCallError, match=REFUSED):
                await listener.aclose()
        fault.end()
        await listener.aclose()
        again = await aiordma.listen("127.0.0.1", listener.port, device="software")
        await again.aclose()
        await listener.aclose()


async def test_each_of_two_closes_raises_the_refusal() -> None:
    async with refusing("destroy_id") as (fault,):
        listener = await aiordma.listen("127.0.0.1", 0, device="software")

        async def refused() -> None:
            with pytest.raises(VerbsCallError, match=REFUSED):
                await listener.aclose()

        for _ in range(2):
            async with anyio.create_task_group() as group:
                group.start_soon(refused)
                group.start_soon(refused)
        fault.end()
        await listener.aclose()


@pytest.mark.parametrize("last", ["listener", "connection"])
async def test_close_repeats_the_end_of_its_own_queue(last: str) -> None:
    async with (
        refusing("destroy_srq") as (fault,),
        aiordma.listen("127.0.0.1", 0, receive_buffers=0, **OPTIONS) as other,
    ):
        kept = await connected(other)  # which keep the device open
        listener = await aiordma.listen(
            "127.0.0.1", 0, shared_receive=8, receive_size=256, **OPTIONS
        )
        client, server = await connected(listener)
        queue: Any = endpoint_of(server).shared_receive
        both: list[Any] = [server, listener] if last == "listener" else [listener, server]
        for each in both:
            await each.aclose()
        await client.aclose()
        await queue.life.closed.wait()  # it ends in the background
        with pytest.raises(VerbsCallError, match="ibv_destroy_srq"):
            await listener.aclose()
        fault.end()
        await listener.aclose()
        assert software_objects()["shared_receives"] == 0
        for user in kept:
            await user.aclose()
