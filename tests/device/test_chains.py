"""Chains: one call for many requests, all of them signaled or only the last."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import aiordma
from aiordma import RemoteMemory
from aiordma.verbs import WorkCompletionOpcode
from tests.device.players import OWN_RECEIVES, REMOTE, connected, one_loop
from tests.internals import drain_of, free_sends, hub_of, pool_of, queue_pair_of, unposted_of

pytestmark = pytest.mark.anyio


@contextmanager
def one_call(connection: aiordma.Connection) -> Iterator[None]:
    """Whatever is posted in the block is posted with one call, by Python or by the engine."""
    pair, steps = queue_pair_of(connection), drain_of(connection)
    assert pair is not None
    calls, post = -steps.crossings, pair.post_send_chain

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return post(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "post_send_chain", counted)
        yield
    assert calls + steps.crossings == 1


@pytest.mark.parametrize("signal_last_only", [False, True])
async def test_a_chain_is_posted_with_one_call_and_each_request_ends(
    signal_last_only: bool,
) -> None:
    async with connected() as (client, server):
        target = bytearray(64)
        theirs = server.register(target, REMOTE).remote()
        ours = client.register(bytearray(b"0123456789abcdef"))
        with one_call(client), client.chain(signal_last_only=signal_last_only) as chain:
            writes = [chain.post_write(ours[i : i + 4], theirs[i : i + 4]) for i in range(0, 16, 4)]
            message = chain.post_send(b"written")
        assert chain.requests == [*writes, message]
        assert await server.receive() == b"written"
        assert target[:16] == b"0123456789abcdef"
        for write in writes:
            assert (await write).operation is WorkCompletionOpcode.RDMA_WRITE
        assert (await message).operation is WorkCompletionOpcode.SEND
        assert free_sends(client) == client.options.max_send_wr
        # The chain has left nothing in flight; only the receives are.
        receives = 2 * client.options.receive_buffers - unposted_of(server)
        assert len(hub_of(client).in_flight) == receives


@pytest.mark.capability("rnr")  # else they end without a receive
async def test_unsignaled_slots_are_counted_until_the_last_one_ends() -> None:
    async with connected(
        client={"options": aiordma.ConnectionOptions(max_send_wr=4)}, server=OWN_RECEIVES
    ) as (client, server):
        buffers = [bytearray(8) for _ in range(4)]
        for round_ in range(5):
            with client.chain(signal_last_only=True) as chain:
                for i in range(4):
                    chain.post_send(b"%d" % (4 * round_ + i))
                with pytest.raises(aiordma.QueueFullError, match=r"by this chain.*end the block"):
                    chain.post_send(b"one too many")
            with pytest.raises(aiordma.QueueFullError):
                client.post_send(b"no slot")
            receives = [server.post_recv(buffer) for buffer in buffers]
            for request in chain.requests:
                await request
            assert free_sends(client) == 4
            for i, receive in enumerate(receives):
                length = (await receive).byte_len
                assert buffers[i][:length] == b"%d" % (4 * round_ + i)


@pytest.mark.promise("A post that raises has posted nothing")
@one_loop
async def test_raising_chain_block_posts_nothing() -> None:
    async with connected() as (client, server):
        pool = pool_of(client)
        leased, free = pool.leased, free_sends(client)
        chain = client.chain()
        with suppress(KeyError), chain:
            request = chain.post_send(b"x" * 1000)
            with pytest.raises(RuntimeError, match="posted when its block ends"):
                await request
            raise KeyError
        with pytest.raises(aiordma.NotPostedError, match="the block raised KeyError") as caught:
            await request
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(ValueError, match="over"):
            chain.post_send(b"late")
        assert (pool.leased, free_sends(client)) == (leased, free)
        with client.chain():
            pass  # an empty one is none
        await client.send(b"still there")
        assert await server.receive() == b"still there"


@one_loop
async def test_a_chain_on_a_closed_connection_is_refused() -> None:
    async with connected() as (client, _):
        chain = client.chain()
        request = chain.post_send(b"x")
        await client.aclose()
        with pytest.raises(aiordma.ClosedError):
            chain.__exit__(None, None, None)
        with pytest.raises(aiordma.FlushedError):
            await request
        with pytest.raises(aiordma.ClosedError):
            client.chain()


@pytest.mark.promise("A post that raises has posted nothing")
@one_loop
async def test_bad_input_leaves_the_chain_as_it_was() -> None:
    async with connected() as (client, server):
        with client.chain() as chain:
            chain.post_send(b"first")
            with pytest.raises(ValueError, match="local has 3 bytes, and remote 2"):
                chain.post_write(b"abc", RemoteMemory(0, 2, 0))
            assert not hasattr(chain, "post_recv")  # a chain is of the send queue
            chain.post_send(b"second")
        assert [await server.receive() for _ in range(2)] == [b"first", b"second"]
        for request in chain.requests:
            await request


@pytest.mark.capability("named_refusals")
async def test_failed_run_reports_each_requests_outcome() -> None:
    """A failing request has a completion, also unsignaled; those before it succeeded."""
    async with connected() as (client, server):
        theirs = server.register(bytearray(64), REMOTE).remote()
        wrong = RemoteMemory(theirs.address, 8, theirs.rkey ^ 0xFFFF00)
        with client.chain(signal_last_only=True) as chain:
            good = chain.post_write(b"12345678", theirs[:8])
            bad = chain.post_write(b"12345678", wrong)
            last = chain.post_send(b"never")
        with pytest.raises(aiordma.RemoteAccessError):
            await bad
        with pytest.raises(aiordma.FlushedError):
            await last
        assert (await good).ok


@pytest.mark.promise("A post that raises has posted nothing")
@one_loop
async def test_unposted_request_holds_memory_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doorbell that fails leaves the request in the device's ring: it may be executed yet."""
    async with connected() as (client, _):
        pair, hub = queue_pair_of(client), hub_of(client)
        assert pair is not None
        leased = hub.pool.leased
        monkeypatch.setattr(pair, "post_send_chain", lambda *_: (-5, 1))
        # An iterator takes the general path; the engine's is in tests/unit/test_chain_port.py.
        request = client.post_sendv(iter([b"x" * 1000]))
        assert not request.done()
        assert hub.pool.leased == leased + 1
        with pytest.raises(aiordma.FlushedError) as caught:
            await request
        assert isinstance(caught.value.__cause__, aiordma.VerbsCallError)


@one_loop
async def test_a_chain_is_entered_once() -> None:
    async with connected() as (client, server):
        chain = client.chain()
        with chain:
            request = chain.post_send(b"once")
        with pytest.raises(ValueError, match="over"):
            chain.__enter__()
        chain.__exit__(None, None, None)
        await request
        assert await server.receive() == b"once"
        assert free_sends(client) == client.options.max_send_wr


@one_loop
async def test_a_chain_that_is_forgotten_ends_with_its_connection() -> None:
    async with connected() as (client, _):
        chain = client.chain()
        request = chain.post_send(b"x" * 1000)
        await client.aclose()
        assert isinstance(request.exception(), aiordma.FlushedError)
        with pytest.raises(aiordma.ClosedError):
            chain.__exit__(None, None, None)
        assert free_sends(client) == client.options.max_send_wr


@one_loop
async def test_a_run_has_no_read_where_its_end_may_come_late() -> None:
    async with connected() as (client, server):
        hub_of(client).keeps_order = False
        theirs = server.register(bytearray(8), REMOTE).remote()
        ours = client.register(bytearray(8))
        assert (await client.post_read(ours[:], theirs)).ok
        with client.chain(signal_last_only=True) as chain:
            for _ in range(2):
                with pytest.raises(aiordma.NotSupportedError, match="signal_last_only"):
                    chain.post_read(ours[:], theirs)
            chain.post_write(ours[:], theirs)
        (request,) = chain.requests
        assert (await request).ok
        with client.chain() as chain:
            chain.post_read(ours[:], theirs)
        assert (await chain.requests[0]).ok
        assert ours._users == 0


@pytest.mark.parametrize(
    "signal_last_only", [False, pytest.param(True, marks=pytest.mark.capability("ordered_ends"))]
)
async def test_requests_of_every_kind_are_posted_in_their_order(signal_last_only: bool) -> None:
    async with connected() as (client, server):
        memory = bytearray(b"before..")
        theirs = server.register(memory, REMOTE).remote()
        other = server.register(bytearray(b"another."), REMOTE).remote()
        ours = client.register(bytearray(b"written."))
        read, kept = client.register(bytearray(8)), client.register(bytearray(8))
        with one_call(client), client.chain(signal_last_only=signal_last_only) as chain:
            chain.post_read(kept[:], other)
            chain.post_write(ours[:], theirs)
            chain.post_sendv([b"in ", b"parts"])
            chain.post_readv([read[:]], theirs)
            chain.post_send(b"x" * 1000)
            chain.post_send(ours[:])
        for request in chain.requests:
            assert (await request).ok
        names = [request.operation for request in chain.requests]
        assert names == ["RDMA_READ", "RDMA_WRITE", "SEND", "RDMA_READ", "SEND", "SEND"]
        assert (bytes(kept), bytes(read), bytes(memory)) == (b"another.", b"written.", b"written.")
        for message in (b"in parts", b"x" * 1000, b"written."):
            assert await server.receive() == message
        assert free_sends(client) == client.options.max_send_wr
        assert (ours._users, read._users, kept._users) == (0, 0, 0)


@one_loop
async def test_short_bytes_are_the_programs_again_once_they_are_collected() -> None:
    async with connected() as (client, server):
        first, second = bytearray(b"first"), bytearray(b"second")
        with client.chain() as chain:
            chain.post_send(first)
            chain.post_sendv([second])
            first[:], second[:] = b"other", b"others"
            first.clear()
            del second
            chain.post_send(bytes(b"third" * 10))
        for message in (b"first", b"second", b"third" * 10):
            assert await server.receive() == message
        for request in chain.requests:
            await request  # a close would flush it before its acknowledgement


@one_loop
async def test_memory_is_held_from_the_beginning() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(8), REMOTE).remote()
        ours = client.register(bytearray(8))
        with suppress(KeyError), client.chain() as chain:
            requests = [chain.post_write(ours[:], theirs), chain.post_read(ours[:], theirs)]
            with pytest.raises(aiordma.BusyError):
                ours.close()
            raise KeyError
        for request in requests:
            with pytest.raises(aiordma.NotPostedError, match="was not posted"):
                await request
        ours.close()
        assert free_sends(client) == client.options.max_send_wr
        await client.send(b"still there")
        assert await server.receive() == b"still there"


@one_loop
async def test_memory_of_a_chain_that_is_forgotten_is_held_until_its_connection_ends() -> None:
    async with connected() as (client, server):
        theirs = server.register(bytearray(8), REMOTE).remote()
        ours = client.register(bytearray(8))
        chain = client.chain()
        chain.post_write(ours[:], theirs)
        chain.post_send(b"short")
        gone = weakref.ref(chain)
        del chain
        gc.collect()
        assert gone() is None
        with pytest.raises(aiordma.BusyError):
            ours.close()
        assert free_sends(client) == client.options.max_send_wr - 2
        await client.aclose()
        assert free_sends(client) == client.options.max_send_wr
        assert ours._users == 0
