"""What a chain costs where the engine collects and posts it, and what it is not to be talked into.

On a device that takes no time, as tests/unit/test_hot_path.py; what a chain does on a real one is
in tests/device/test_chains.py.
"""

import asyncio
import errno
import gc
import sys
from contextlib import suppress
from typing import Any

import pytest

import aiordma
from aiordma import Connection, RemoteMemory
from aiordma.types import MemorySlice
from aiordma.verbs import WorkCompletionOpcode
from tests.bench.instant import doorbell_fails, instant
from tests.internals import drain_of, endpoint_of, engine, fail, free_sends, hub_of
from tests.unit.test_hot_path import WINDOW, Calls, connected, run


@pytest.mark.parametrize("signal_last_only", [False, True])
def test_a_chain_is_one_crossing_and_no_python_for_its_requests(signal_last_only: bool) -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        steps = drain_of(client)

        async def calls_of(count: int) -> tuple[int, int]:
            with Calls() as calls:
                with client.chain(signal_last_only=signal_last_only) as chain:
                    for _ in range(count):
                        chain.post_write(local, remote)
                for request in chain.requests:
                    await request
            return calls.python, calls.c

        await client.post_write(local, remote)
        crossings = steps.crossings
        one = await calls_of(1)
        assert steps.crossings == crossings + 1
        many = await calls_of(WINDOW)
        # The watchdog may have to be started in one of the two, and not in the other.
        assert max(many[0] - one[0], many[1] - one[1]) <= 2
        assert steps.crossings == crossings + 2

    run(main)


@pytest.mark.parametrize("signal_last_only", [False, True])
def test_each_chained_request_has_its_own_completion(signal_last_only: bool) -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        with client.chain(signal_last_only=signal_last_only) as chain:
            for _ in range(20):  # more than the table holds at first
                chain.post_read(local, remote)
                chain.post_write(local, remote)
                chain.post_send(b"x")
        kinds = [WorkCompletionOpcode.RDMA_READ, WorkCompletionOpcode.RDMA_WRITE]
        kinds.append(WorkCompletionOpcode.SEND)
        seen = set()
        for i, request in enumerate(chain.requests):
            completion = await request
            assert completion.ok
            assert completion.operation is kinds[i % 3]
            assert completion.wr_id == request.wr_id
            assert completion.qp_num == client.qp_num
            seen.add(request.wr_id)
        assert len(seen) == 60
        assert len(hub_of(client).in_flight) == client.options.receive_buffers * 2

    run(main)


def test_a_callback_is_not_called_inside_the_post() -> None:
    """Neither its own, nor that of an unsignaled request before the signaled one."""

    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        for signal_last_only in (False, True):
            seen: list[Any] = []
            with client.chain(signal_last_only=signal_last_only) as chain:
                chain.post_write(local, remote).add_done_callback(seen.append)
                last = chain.post_write(local, remote)
            assert seen == []
            await last
            assert seen == chain.requests[:1]

    run(main)


def test_nothing_grows_with_the_number_of_chains() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        async def some() -> None:
            for signal_last_only in (False, True):
                with client.chain(signal_last_only=signal_last_only) as chain:
                    for _ in range(WINDOW // 2):
                        chain.post_write(local, remote)
                        chain.post_send(b"inline" * 5, solicited=True)
                for request in chain.requests:
                    await request
            with suppress(KeyError), client.chain() as chain:
                chain.post_write(b"i" * 64, remote)
                raise KeyError

        for _ in range(20):
            await some()
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(500):
            await some()
        gc.collect()
        # Of 1,500 chains and 32,500 requests; a hundred and more are kept to be used again.
        assert sys.getallocatedblocks() - before < 500
        assert local.region._users == 0
        assert free_sends(client) == client.options.max_send_wr
        assert hub_of(client).in_flight.slots <= 128

    run(main)


@pytest.mark.parametrize("signal_last_only", [False, True])
def test_unposted_chain_requests_hold_memory_to_the_end(signal_last_only: bool) -> None:
    async def body() -> None:
        async with connected() as (client, _, local, remote):
            with instant(client):
                doorbell_fails(errno.EIO)
                with client.chain(signal_last_only=signal_last_only) as chain:
                    chain.post_write(local, remote)
                    chain.post_sendv(iter([b"x" * 1000]), solicited=True)
                assert not any(request.done() for request in chain.requests)
                assert local.region._users == 1
                with pytest.raises(aiordma.VerbsCallError):
                    client.chain()
            for request in chain.requests:
                with pytest.raises(aiordma.FlushedError) as caught:
                    await request
                cause = caught.value.__cause__
                assert isinstance(cause, aiordma.VerbsCallError)
                assert cause.errno == errno.EIO
            assert local.region._users == 0

    aiordma.run(body())


@pytest.mark.parametrize("way", ["alone", "chain"])
def test_unposted_requests_hold_their_blocks_to_the_end(way: str) -> None:
    async def body() -> None:
        async with connected() as (client, _, _, _):
            pool = hub_of(client).pool
            with instant(client):
                await client.send(bytes(1000))
                leased = pool.leased
                doorbell_fails(errno.EIO)
                if way == "alone":
                    request = client.post_send(bytes(1000))
                else:
                    with client.chain() as chain:
                        request = chain.post_send(bytes(1000))
                assert not request.done()
                assert pool.leased == leased + 1
            with pytest.raises(aiordma.FlushedError):
                await request
            assert pool.leased <= leased

    aiordma.run(body())


def test_chain_without_memory_is_posted_or_fails() -> None:
    """Each allocation of the end of the block fails once."""
    testcapi = pytest.importorskip("_testcapi")

    async def body() -> None:
        async with connected() as (client, _, local, remote):
            slots, failures = free_sends(client), 0
            for number in range(20):
                chain = client.chain(signal_last_only=True)
                chain.__enter__()
                requests = [chain.post_write(local, remote) for _ in range(2)]
                end, arguments = chain.__exit__, (None, None, None)
                testcapi.set_nomemory(number, number + 1)
                try:
                    end(*arguments)
                except MemoryError:
                    failures += 1
                finally:
                    testcapi.remove_mem_hooks()
                async with asyncio.timeout(10):
                    for request in requests:
                        with suppress(aiordma.RdmaError):
                            await request
                assert free_sends(client) == slots
                assert local.region._users == 0
            assert failures < 20

    aiordma.run(body())


def test_unposted_chain_is_collected() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        chain: Any = client.chain()
        requests = [chain.post_write(local, remote), chain.post_write(b"y" * 64, remote)]
        chain.around = chain._port, chain  # only the collector finds it
        chain.post_send(b"x")
        del chain
        gc.collect()
        assert not any(isinstance(it, engine.ChainPort) for it in gc.get_objects())
        with pytest.raises(RuntimeError, match="posted when its block ends"):
            await requests[0]
        assert local.region._users == 1
        await client.aclose()
        for request in requests:
            assert isinstance(request.exception(), aiordma.FlushedError)
        assert local.region._users == 0

    run(main)


def test_what_ends_between_collecting_and_posting_is_not_posted() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        chain = client.chain()
        request = chain.post_write(local, remote)
        crossings = drain_of(client).crossings
        fail(client, aiordma.DisconnectedError("as the test wants it"))
        with pytest.raises(aiordma.DisconnectedError):
            chain.post_write(local, remote)
        with pytest.raises(aiordma.DisconnectedError):
            chain.__exit__(None, None, None)
        assert drain_of(client).crossings == crossings
        with pytest.raises(aiordma.RdmaError, match="was not posted"):
            request.result()
        assert local.region._users == 0

    run(main)


class Poster:
    """Posts through a port, without a general path."""

    send: Any = engine.method("send", lambda *arguments: None)
    write: Any = engine.method("write", lambda *arguments: None)

    def __init__(self, port: Any) -> None:
        self._port = port


def test_a_chain_port_does_not_do_what_makes_no_sense() -> None:
    async def main(client: Connection, local: MemorySlice, remote: RemoteMemory) -> None:
        wrong: Any
        chain_port: Any = engine.ChainPort
        for wrong in (None, 3, client):
            with pytest.raises(TypeError):
                chain_port(wrong)
        with pytest.raises(TypeError, match="port"):
            chain_port.__new__(chain_port)
        port = chain_port(endpoint_of(client).work.port)
        with pytest.raises(ValueError, match="posted once"):
            port.post()
        for wrong in (None, client):
            with pytest.raises(ValueError, match="takes a WorkRequest"):
                port.add(wrong)
        poster, wrong = Poster(port), endpoint_of(client).work.port
        with pytest.raises(TypeError, match=r"write\(\): the arguments do not fit"):
            wrong.write(local)
        assert poster.write(local) is None
        assert poster.send(bytearray(1 << 20)) is None
        assert poster.send(3) is None
        request = poster.write(local, remote)
        assert port.requests() == [request]
        assert port.post() == 0
        assert (port.posted, port.count, port.over) == (1, 1, True)
        with pytest.raises(ValueError, match="posted once"):
            port.post()
        assert poster.write(local, remote) is None
        await request
        added = chain_port(endpoint_of(client).work.port)
        added.add(request)
        with pytest.raises(ValueError, match="posted once"):
            added.post()  # without its work

    run(main)
