"""Chains that the device takes in part, or never receives."""

import errno
import gc
import weakref
from contextlib import suppress

import pytest

import aiordma
from aiordma.testing import Faults
from aiordma.verbs import PartialPostError
from tests.alike import alike
from tests.device.players import REMOTE, both_ways, connected, until
from tests.internals import endpoint_of

pytestmark = [pytest.mark.anyio, pytest.mark.natively]


# An iterator of parts takes the general path, all others the engine's.
@pytest.mark.promise("A post that raises has posted nothing")
@pytest.mark.parametrize("general", [0, 2, 4], ids=["plain", "mixed", "general"])
@pytest.mark.parametrize("signal_last_only", [False, True])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
async def test_a_chain_is_posted_up_to_what_is_refused(
    faults: Faults, index: int, signal_last_only: bool, general: int
) -> None:
    async with connected() as (client, server):
        endpoint = endpoint_of(client)
        target = bytearray(16)
        theirs = server.register(target, REMOTE).remote()
        ours = client.register(bytearray(b"0123456789abcdef"))
        in_flight = len(endpoint.hub.in_flight)
        faults.refuse_post(after=index)
        chain = client.chain(signal_last_only=signal_last_only)
        for i in range(0, 16, 4):
            parts = [ours[i : i + 4]]
            chain.post_writev(iter(parts) if i % 8 < 2 * general else parts, theirs[i : i + 4])
        assert ours._users == 4
        name = f"request {index} of the chain" if index else "ibv_post_send"
        with pytest.raises(aiordma.VerbsCallError, match=name) as caught:
            chain.__exit__(None, None, None)
        assert caught.value.errno == errno.ENOMEM
        assert "RDMA_WRITE of 4 bytes" in str(caught.value)
        posted, refused = chain.requests[:index], chain.requests[index:]
        assert isinstance(caught.value, PartialPostError) == bool(index)
        if isinstance(caught.value, PartialPostError):
            assert (caught.value.posted, caught.value.refused) == (posted, index)
        for request in refused:
            assert alike(request.exception(), caught.value)
        if index and signal_last_only:
            # Those before it would never have completed: the connection ended for that.
            for request in posted:
                with pytest.raises(aiordma.FlushedError):
                    await request
        else:
            for request in posted:
                assert (await request).ok
            assert target[: 4 * index] == b"0123456789abcdef"[: 4 * index]
            assert target[4 * index :] == bytes(16 - 4 * index)
            assert len(endpoint.hub.in_flight) == in_flight
            await both_ways(client, server)
        assert ours._users == 0
        assert endpoint.work.sends.slots.free == client.options.max_send_wr


class Counted(bytearray):
    """A buffer that can be referred to weakly."""


@pytest.mark.promise("A buffer is held until its request completes")
async def test_refused_chain_keeps_no_buffer(faults: Faults) -> None:
    async with connected() as (client, server):
        remote = server.register(bytearray(1 << 17), REMOTE).remote()

        async def post() -> weakref.ref[Counted]:
            buffer = Counted(len(remote))
            faults.refuse_post(after=1)
            with (
                suppress(PartialPostError),
                client.chain(signal_last_only=True) as chain,
            ):
                chain.post_write(buffer, remote)
                chain.post_write(buffer, remote)
            return weakref.ref(buffer)

        gc.collect()
        gc.disable()
        try:
            buffer = await post()
            await client.ended()
            await until(lambda: buffer() is None)
        finally:
            gc.enable()
