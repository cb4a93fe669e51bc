"""Posts, and the ends of chains, that find no memory: each request completes or fails, and nothing
stays held.

One allocation fails at a time. If all of them fail, Python cannot call the end of the block at all,
and the requests end with the connection."""

import pytest

from tests.unit.child import run_child

pytest.importorskip("_testcapi")

SWEEP = """
MOST = 500  # allocations of a block

import asyncio, contextlib, faulthandler
import _testcapi
import aiordma
from aiordma.testing import connected_pair
from tests.internals import endpoint_of, free_sends, hub_of

faulthandler.dump_traceback_later(120, exit=True)  # what hangs fails, and says where

ADDS = {
    "plain": lambda sink: sink.post_send(b"plain"),
    "staged": lambda sink: sink.post_send(b"staged" * 500),
    "general": lambda sink: sink.post_sendv(iter([b"general"])),
    "registered": lambda sink: sink.post_send(bytearray(70_000)),
}

is_over = False

@contextlib.contextmanager
def without_memory(number):
    # One allocation fails, the `number`-th. `is_over`: the block made fewer.
    global is_over
    _testcapi.set_nomemory(number, number + 1)
    try:
        yield
    finally:
        is_over = False
        try:
            for _ in range(MOST):
                bytearray(1)
        except MemoryError:
            is_over = True
        _testcapi.remove_mem_hooks()

async def outcomes(requests):
    found = []
    async with asyncio.timeout(20):
        for request in requests:
            try:
                await request
                found.append("completed")
            except aiordma.RdmaError:
                found.append("failed")
    return found

def held_by(client):
    return len(hub_of(client).in_flight), free_sends(client), len(endpoint_of(client).regions)

async def sweep(attempt):
    seen = set()
    options = dict(max_send_wr=8, receive_buffers=16, receive_size=70_000)
    async with connected_pair(**options) as (client, server):
        held = held_by(client)
        for number in range(MOST):
            found = await outcomes(attempt(client, number))
            seen.update(found)
            async with asyncio.timeout(20):
                for _ in range(found.count("completed")):
                    await server.receive()
            with contextlib.suppress(TimeoutError):  # who waits has posted all receives again
                async with asyncio.timeout(0):
                    await server.receive()
            assert held_by(client) == held, number
            assert client.cause is None, number
            if is_over:
                return sorted(seen)
"""


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("signal_last_only", [True, False])
@pytest.mark.parametrize(
    "kinds", ["plain", "general", "plain general", "staged plain", "registered"]
)
def test_requests_of_a_chain_without_memory_end(
    kinds: str, signal_last_only: bool, engine: str
) -> None:
    printed = run_child(
        SWEEP,
        f"KINDS, LAST = {kinds.split()!r}, {signal_last_only!r}\n",
        """
        def attempt(client, number):
            chain = client.chain(signal_last_only=LAST)
            chain.__enter__()
            requests = [ADDS[kind](chain) for kind in KINDS]
            end, arguments = chain.__exit__, (None, None, None)
            with contextlib.suppress(MemoryError, SystemError), without_memory(number):
                end(*arguments)
            return requests

        print(asyncio.run(sweep(attempt)))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert "completed" in printed


@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["plain", "staged", "general", "registered"])
def test_post_without_memory_keeps_no_slot(kind: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        def attempt(client, number):
            post = ADDS[{kind!r}]
            requests = [None]
            with contextlib.suppress(MemoryError, SystemError), without_memory(number):
                requests[0] = post(client)
            return filter(None, requests)

        print(asyncio.run(sweep(attempt)))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert "completed" in printed


@pytest.mark.natively
@pytest.mark.parametrize("engine", ["c", "python"])
@pytest.mark.parametrize("kind", ["plain", "staged", "general"])
def test_request_added_to_a_chain_without_memory_keeps_no_slot(kind: str, engine: str) -> None:
    printed = run_child(
        SWEEP,
        f"""
        def attempt(client, number):
            add = ADDS[{kind!r}]
            with client.chain() as chain:
                with contextlib.suppress(MemoryError, SystemError), without_memory(number):
                    add(chain)
                return chain.requests

        print(asyncio.run(sweep(attempt)))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert "completed" in printed


@pytest.mark.parametrize("engine", ["c", "python"])
def test_requests_of_a_refused_chain_without_memory_end(engine: str) -> None:
    printed = run_child(
        SWEEP,
        """
        import errno
        from tests.bench.instant import instant, refuses
        from tests.unit.test_hot_path import connected

        async def attempt(client, local, remote, number):
            with instant(client):
                refuses(errno.EIO)
                chain = client.chain(signal_last_only=True)
                chain.__enter__()
                requests = [chain.post_write(local, remote) for _ in range(2)]
                end, arguments = chain.__exit__, (None, None, None)
                expected = MemoryError, SystemError, aiordma.VerbsCallError
                with contextlib.suppress(*expected), without_memory(number):
                    end(*arguments)
            found = await outcomes(requests)
            assert not local.region._users
            return found

        async def main():
            seen, number = set(), 0
            while not is_over:
                async with connected(flush_timeout=0.01) as (client, _, local, remote):
                    while client.cause is None and not is_over:
                        seen.update(await attempt(client, local, remote, number))
                        number += 1
            assert number < MOST
            return seen

        print(asyncio.run(main()))
        """,
        AIORDMA_BACKEND=engine,
    )
    assert printed == "{'failed'}\n"
